"""Judge: which model is asked, where, in which words, and how patiently."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from ascent.menu import nearest
from ascent.types import Refused

SCORE = """\
You grade a response to a prompt. What counts: {criteria}.

[The prompt]
{prompt}

[The response]
{response}

[End of the response]
Say in a sentence or two what is good and bad about it. Then close with one line, "Score: N", N from {low} (worthless) \
to {high} (as good as can be)."""

PAIR = """\
You compare two responses to one prompt. What counts: {criteria}.

[The prompt]
{prompt}

[Response A]
{first}

[Response B]
{second}

[End of the responses]
Say in a sentence or two how they differ. Their order means nothing, and neither does their length. Then close with \
one line, "Verdict: A", "Verdict: B", or "Verdict: tie" if neither is better."""

SCORE_LINE = r"(?im)^\W*score\W*?[:=]\W*?([-−]?\d+(?:\.\d+)?)(?:\s*/\s*\d+)?\W*$"
PAIR_LINE = r"(?im)^\W*verdict\W*?[:=]\W*?(a|b|tie)\b\W*$"


@dataclass(frozen=True)
class Judge:
    """A language model behind an OpenAI-compatible address."""

    url: str = ""
    """Address of the API: http://localhost:8000/v1. /chat/completions is added to it."""
    model: str = ""
    """The model's name there."""
    key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key. Where it is not set, none is sent. The key itself is written nowhere."""
    criteria: str = "whether it is correct, helpful and to the point"
    """What makes a response good, in words: {criteria} of the two prompts."""
    score_prompt: str = SCORE
    """How one response is judged: {prompt}, {response}, {answer} (the right one, where it is known), {low}, {high}."""
    pair_prompt: str = PAIR
    """How two responses are compared: {prompt}, {first}, {second}, {answer}."""
    system: str | None = None
    """A system message before either."""
    low: float = 1.0
    """The lowest score, which becomes a reward of 0."""
    high: float = 10.0
    """The highest score, which becomes a reward of 1."""
    score_pattern: str = SCORE_LINE
    """Regular expression whose one group is the score; the last match counts. Default: a line `Score: N`."""
    pair_pattern: str = PAIR_LINE
    """Regular expression whose one group is A, B or tie; the last match counts. Default: a line `Verdict: A`."""
    temperature: float = 0.0
    """Of the judge."""
    max_tokens: int = 1024
    """The most tokens of an answer."""
    options: str = ""
    """More fields of the request, as a JSON object; null takes one away: {"seed": 1, "max_tokens": null}."""
    timeout: float = 60.0
    """Seconds for one request."""
    deadline: float = 300.0
    """Seconds for one question, with all its retries and waiting between them."""
    retries: int = 6
    """Further requests after one that was refused as too many (429), failed (5xx, malformed) or found nobody there."""
    backoff: float = 0.5
    """Seconds before the first retry, doubled before each further one, and shortened at random; Retry-After counts."""
    again: int = 1
    """How often a question is asked anew whose answer holds no verdict."""
    concurrency: int = 8
    """Requests under way at once."""
    cache: str = ""
    """JSONL file that keeps every answer. Default: beside the judge's file, or beside --out."""

    def __post_init__(self) -> None:
        if self.url:
            object.__setattr__(self, "url", _address(self.url))
        for name, least in (("max_tokens", 1), ("concurrency", 1), ("retries", 0), ("again", 0)):
            if getattr(self, name) < least:
                raise Refused(f"--{_flag(name)} is {getattr(self, name)}: it has to be at least {least}")
        for name in ("timeout", "deadline", "backoff"):
            if not 0 < getattr(self, name) < float("inf"):
                raise Refused(f"--{name} is {getattr(self, name):g}: it is a number of seconds, above 0")
        if not self.low < self.high:
            raise Refused(f"--low {self.low:g} --high {self.high:g}: scores go from low up to high")
        _check_prompt("score_prompt", self.score_prompt, ("prompt", "response"))
        _check_prompt("pair_prompt", self.pair_prompt, ("first", "second"))
        for name in ("score_pattern", "pair_pattern"):
            _check_pattern(name, getattr(self, name))
        self.body([])

    def body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """The request: all that decides the answer."""
        try:
            more = json.loads(self.options or "{}")
        except ValueError as error:
            raise Refused(f"--options {self.options}: no JSON: {error}") from None
        if not isinstance(more, dict) or {"messages", "model", "stream", "n"} & more.keys():
            raise Refused(f"--options {self.options}: an object of request fields, without messages, model, stream, n")
        made: dict[str, Any] = {"model": self.model, "messages": messages}
        made |= {"temperature": self.temperature, "max_tokens": self.max_tokens, **more}
        return {name: value for name, value in made.items() if value is not None}

    def messages(self, template: str, **words: str) -> list[dict[str, str]]:
        """A prompt with its places filled in, in one pass: what a text holds in braces stays as it is."""
        words |= {"criteria": self.criteria, "low": f"{self.low:g}", "high": f"{self.high:g}"}
        text = re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], found[0]), template)
        chat = [{"role": "user", "content": text}]
        return [{"role": "system", "content": self.system}, *chat] if self.system is not None else chat

    def insist(self) -> Judge:
        """This judge, or what it lacks to be asked."""
        for name, example in (("url", "http://localhost:8000/v1"), ("model", "NAME")):
            if not getattr(self, name):
                raise Refused(f"the judge has no {name}: set --{name} {example}, or `{name}` in its file")
        return self


def read_judge(file: str | Path) -> Judge:
    """A judge from a TOML file; its answers are kept beside it unless it says where."""
    path = Path(file).expanduser().resolve()
    try:
        given = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise Refused(
            f"judge {file}: there is no such file. It is a TOML file with at least a url and a model"
        ) from None
    except (OSError, ValueError) as error:
        raise Refused(f"judge {file}: it cannot be read as TOML: {error}") from None
    known, kinds = [f.name for f in fields(Judge)], get_type_hints(Judge)
    for name, value in given.items():
        if name in ("key", "api_key", "token"):
            raise Refused(f"judge {file}: a key does not belong into a file. Put it into ${Judge.key_env}, or key_env")
        if name not in known:
            raise Refused(f"judge {file}: it has no setting {name}.{nearest(name, known)}")
        number = kinds[name] is float and type(value) is int
        if not (number or type(value) is kinds[name] or (kinds[name] == str | None and isinstance(value, str))):
            raise Refused(
                f"judge {file}: {name} is {value!r}, and has to be {getattr(kinds[name], '__name__', 'words')}"
            )
    whole: dict[str, Any] = {name: float(v) if kinds[name] is float else v for name, v in given.items()}
    judge = Judge(**whole)
    kept = path.parent / judge.cache if judge.cache else path.with_name(f"{path.stem}.answers.jsonl")
    return replace(judge, cache=str(kept))


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _address(url: str) -> str:
    """…/chat/completions, whatever part of it was given; a password or a key in it would end up in records."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise Refused(f"--url {url}: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise Refused("--url holds a name or a password, and would be written down: put a key into $OPENAI_API_KEY")
    for name in dict(parse_qsl(parts.query, keep_blank_values=True)):
        if name.lower().endswith(("key", "token", "secret")):
            raise Refused(
                f"--url holds a key ({name}=…), and would be written down: put it into the environment variable of "
                "--key-env ($OPENAI_API_KEY)"
            )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Refused(f"--url {url}: an address begins with http:// or https://, as in http://localhost:8000/v1")
    path = parts.path.rstrip("/")
    if not path.endswith("/chat/completions"):
        path = f"{path or '/v1'}/chat/completions"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def _check_prompt(name: str, template: str, needed: tuple[str, ...]) -> None:
    for place in needed:
        if f"{{{place}}}" not in template:
            raise Refused(f"--{_flag(name)} has no place {{{place}}}: the judge would not see it")


def _check_pattern(name: str, pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise Refused(f"--{_flag(name)} {pattern}: no regular expression: {error}") from None
    if groups != 1:
        raise Refused(f"--{_flag(name)} {pattern}: it has {groups} groups, and one has to hold the verdict")

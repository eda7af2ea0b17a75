"""The settings of a judge: its address, its model, its prompts, and how long to wait for it."""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from ascent.core.errors import ConfigError
from ascent.core.menu import nearest
from ascent.core.types import check_counts
from ascent.processes.user_code import CODE
from ascent.settings import settings_of
from ascent.tasks.text.text_task import Message

Prompt = str | list[Message]
MIN_SECRET_LENGTH = 8
"""Shorter keys are dummies (0, EMPTY), and are no secret."""

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

SCORE_LINE = r"(?im)^[^\w\n]*+score[^\w:=]{0,40}+[:=]\W{0,40}?([-−]?\d++(?:\.\d++)?+)(?:\s*+/\s*+\d++)?+\W*$"
PAIR_LINE = r"(?im)^[^\w\n]*+verdict[^\w:=]{0,40}+[:=]\W{0,40}?(a|b|tie)\b\W*$"


@dataclass(frozen=True)
class Judge:
    """A language model behind an OpenAI-compatible API."""

    url: str = ""
    """Address of the API: http://localhost:8000/v1. /chat/completions is added to it."""
    model: str = ""
    """The model's name there."""
    key_env: str = "OPENAI_API_KEY"
    """Environment variable with the API key. If it is not set, no key is sent. The key itself is never written."""
    insecure: bool = False
    """Send the key over plain http to another machine, where everyone on the way can read it. The cache notes it."""
    criteria: str = "whether it is correct, helpful and to the point"
    """What makes a response good; fills {criteria} in both prompts."""
    score_prompt: str = SCORE
    """Prompt to score one response: {prompt}, {response}, {answer} (the right one, if known), {low}, {high}."""
    pair_prompt: str = PAIR
    """Prompt to compare two responses: {prompt}, {first}, {second}, {answer}."""
    system: str | None = None
    """System message for both prompts."""
    low: float = 1.0
    """The lowest score, which becomes a reward of 0."""
    high: float = 10.0
    """The highest score, which becomes a reward of 1."""
    score_pattern: str = SCORE_LINE
    """Regular expression whose one group is the score; the last match counts. Default: a line `Score: N`."""
    pair_pattern: str = PAIR_LINE
    """Regular expression whose one group is A, B or tie; the last match counts. Default: a line `Verdict: A`."""
    temperature: float = 0.0
    """Sampling temperature of the judge."""
    max_tokens: int = 1024
    """Maximum number of tokens in an answer."""
    options: str = ""
    """More fields of the request, as a JSON object; null removes one: {"seed": 1, "max_tokens": null}."""
    timeout: float = 60.0
    """Seconds per request."""
    deadline: float = 300.0
    """Seconds per question, with all its retries, the pauses between them, and the search for its verdict."""
    retries: int = 6
    """Retries after a 429, a 5xx, a malformed reply or a failed connection."""
    backoff: float = 0.5
    """Seconds before the first retry; they double, with random jitter. A Retry-After header is respected."""
    again: int = 1
    """How many times to ask again when an answer contains no verdict."""
    concurrency: int = 8
    """Concurrent requests."""
    cache: str = ""
    """JSONL file that keeps every answer. Default: beside the judge's file, or beside --out."""

    def __post_init__(self) -> None:
        if self.url:
            object.__setattr__(self, "url", _address(self.url))
        check_counts(max_tokens=self.max_tokens, concurrency=self.concurrency)
        check_counts(0, retries=self.retries, again=self.again)
        for name in ("timeout", "deadline", "backoff"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"--{name} is {getattr(self, name):g}: it has to be a number of seconds above 0")
        if not self.low < self.high:
            raise ConfigError(f"--low {self.low:g} --high {self.high:g}: scores go from low up to high")
        score = ("score", self.score_prompt, self.score_pattern, ("prompt", "response"))
        pair = ("pair", self.pair_prompt, self.pair_pattern, ("first", "second"))
        for kind, template, pattern, places in (score, pair):
            for place in places:
                if f"{{{place}}}" not in template:
                    raise ConfigError(f"--{kind}-prompt does not contain {{{place}}}, so the judge would not see it")
            try:
                groups = re.compile(pattern).groups
            except (re.error, RecursionError, OverflowError) as error:
                raise ConfigError(f"--{kind}-pattern {pattern}: not a regular expression: {error}") from None
            if groups != 1:
                raise ConfigError(
                    f"--{kind}-pattern {pattern}: it has {groups} groups; exactly one has to hold the verdict"
                )
        self.body([])

    def body(self, messages: list[Message]) -> dict[str, Any]:
        """The request: everything that decides the answer."""
        try:
            options = json.loads(self.options or "{}")
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--options {self.options}: not valid JSON: {error}") from None
        if not isinstance(options, dict) or {"messages", "model", "stream", "n"} & options.keys():
            raise ConfigError(
                f"--options {self.options}: a JSON object of fields, without messages, model, stream and n"
            )
        body = {"model": self.model, "messages": messages, "temperature": self.temperature}
        body |= {"max_tokens": self.max_tokens, **options}
        return {name: value for name, value in body.items() if value is not None}

    def messages(self, template: str, prompt: Prompt, answer: str | None = None, **texts: str) -> list[Message]:
        """A template with its {places} filled in, in one pass: braces inside the texts stay as they are."""
        if not isinstance(prompt, str):
            turns = [f"{message['role']}: {message['content']}" for message in prompt]
            prompt = "\n\n".join(turns) if len(turns) > 1 else prompt[0]["content"]
        texts |= {"prompt": prompt, "answer": answer if answer is not None else "(not known)"}
        texts |= {"criteria": self.criteria, "low": f"{self.low:g}", "high": f"{self.high:g}"}
        text = re.sub(r"\{(\w+)\}", lambda place: texts.get(place[1], place[0]), template)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": text}]

    @property
    def key(self) -> str:
        """The API key; empty if there is none."""
        return os.environ.get(self.key_env, "").strip()

    @property
    def local(self) -> bool:
        """Whether its address is on this machine."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    @property
    def exposed(self) -> bool:
        """Whether others can read the key on its way."""
        return len(self.key) >= MIN_SECRET_LENGTH and not self.local and self.url.startswith("http:")

    def validated(self) -> Judge:
        """This judge; refused if it lacks an address or a model, or if its key cannot be sent or would be exposed."""
        for name, example in (("url", "http://localhost:8000/v1"), ("model", "NAME")):
            if not getattr(self, name):
                raise ConfigError(f"the judge has no {name}: set --{name} {example}, or `{name}` in its file")
        if not (self.key.isascii() and self.key.isprintable()):
            raise ConfigError(f"${self.key_env} has characters that cannot be part of a key: look at its value")
        if self.exposed and not self.insecure:
            raise ConfigError(
                f"--url {self.url}: the key in ${self.key_env} would go to another machine over plain http, where "
                "everyone on the way can read it. Use https, or a tunnel to localhost. If that judge needs no key, let "
                "--key-env name a variable that is not set. To send it all the same, set --insecure (insecure = true)"
            )
        return self


def read_judge(file: str | Path) -> Judge:
    """The judge of a TOML file. Its answers are kept beside that file, unless it names a cache."""
    path = Path(file).expanduser().resolve()
    try:
        values = tomllib.loads((CODE.get(path) or path.read_bytes()).decode())
    except FileNotFoundError:
        raise ConfigError(
            f"judge {file}: there is no such file. It has to be a TOML file with at least url and model"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"judge {file}: it cannot be read as TOML: {error}") from None
    settings = settings_of(Judge)
    for name in values:
        if name in ("key", "api_key", "token"):
            raise ConfigError(
                f"judge {file}: a key does not belong in a file. Put it in ${Judge.key_env} (or see key_env)"
            )
        if name not in settings:
            raise ConfigError(f"judge {file}: it has no setting {name}.{nearest(name, settings)}")
    judge = Judge(**{name: settings[name].check(value, f"judge {file}: {name}") for name, value in values.items()})
    cache = path.parent / judge.cache if judge.cache else path.with_name(f"{path.stem}.answers.jsonl")
    return replace(judge, cache=str(cache))


def _address(url: str) -> str:
    """The address with /chat/completions. One that contains a password or a key would end up in records."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}") from None
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    secrets = [f"a key ({name}=…)" for name in names if name.lower().endswith(("key", "token", "secret"))]
    if parts.username is not None or parts.password is not None:
        secrets = ["a name or a password"]
    if secrets:
        raise ConfigError(
            f"--url contains {secrets[0]}, which would be written down. Put it in the environment variable that "
            f"--key-env names (${Judge.key_env})"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url}: an address begins with http:// or https://, as in http://localhost:8000/v1")
    path = parts.path.rstrip("/")
    if not path.endswith("/chat/completions"):
        path = f"{path or '/v1'}/chat/completions"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))

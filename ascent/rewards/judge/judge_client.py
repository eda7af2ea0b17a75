"""Ask a judge: many requests at once, retries within a deadline, every answer on disk before it is read.

429, 5xx, a malformed reply, a failed connection    retried, with growing pauses
401, 403, 404: a wrong key or a wrong address       everything ends, because no retry helps
any other refusal (400: the text is too long, …)    this question fails, the others continue
"""

import asyncio
import hashlib
import json
import os
import random
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import IO, Any

from ascent.core.errors import ConfigError, RunError
from ascent.processes.user_state import lock_file
from ascent.rewards.judge.judge_settings import MIN_SECRET_LENGTH, Judge
from ascent.rewards.judge.pattern_search import PatternSearcher
from ascent.tasks.text.text_task import Message

Messages = list[Message]
Answer = dict[str, Any]
"""text, finish (why it ended), usage, model."""
Parse = Callable[[Answer, float], Any]
"""Reads the verdict of an answer until a moment of `time.monotonic`, or raises Unparsed."""
Done = Callable[[int], None]
MAX_WAIT_SECONDS = 30.0
"""Maximum seconds between two tries, unless a Retry-After header asks for more."""
FATAL_STATUSES = (401, 403, 404)
RETRIED_STATUSES = (408, 409, 425, 429)
"""Statuses that are retried, in addition to every 5xx."""
MAX_SILENT_QUESTIONS = 8
"""After this many questions in a row without any answer, the remaining ones are not asked."""
ENVELOPE, TOKEN = 1 << 16, 32
"""Maximum bytes of a reply: without its tokens, and per token that it may have."""
MAX_REPLY_TOKENS = 1 << 17
"""Tokens that a reply may have if the request names no limit, or a larger one."""
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
EXCERPT = 160
"""Characters of an answer in an error."""


class JudgeError(Exception):
    """There is no verdict on this question. It never becomes a number."""


class JudgeTimeoutError(JudgeError):
    """No answer arrived: the judge was unreachable, busy or broken at every try."""


class JudgeStoppedError(JudgeTimeoutError):
    """The question was not asked, because the client was told to stop."""


class JudgeParseError(JudgeError):
    """An answer arrived, but it contains no verdict. `raw` is the whole answer."""

    def __init__(self, why: str, raw: str):
        text = " ".join(raw.split())
        text = text if len(text) <= EXCERPT else f"…{text[-EXCERPT:]}"  # a verdict would stand at the end
        super().__init__(f"{why}. The answer: {text!r}")
        self.raw = raw


class _RetryError(Exception):
    """A request failed in a way that may pass. `wait`: the seconds that Retry-After asks for."""

    def __init__(self, why: str, wait: float = 0.0):
        super().__init__(why)
        self.wait = wait


@dataclass
class JudgeUsage:
    """The cost of asking so far."""

    asked: int = 0
    """Answers received over the network."""
    kept: int = 0
    """Answers that were in the cache."""
    retried: int = 0
    tokens: int = 0
    """Tokens of prompts and answers, where the API reports them."""

    def summary(self) -> str:
        retried = f", {self.retried} requests retried" if self.retried else ""
        tokens = f", {self.tokens:,} tokens" if self.tokens else ""
        return f"{self.asked} answers requested, {self.kept} from the cache{retried}{tokens}"


@dataclass
class JudgeClient:
    """Asks a judge. Equal questions are asked once."""

    judge: Judge
    usage: JudgeUsage = field(default_factory=JudgeUsage)
    stop: bool = False
    """Set by a signal handler: no new request is made, and those under way are finished, because they cost money."""

    def __post_init__(self) -> None:
        self.judge.validated()
        try:
            import httpx
        except ImportError:
            raise ConfigError("a judge needs httpx: pip install 'ascent-rl[judge]'") from None
        self._httpx = httpx
        key, n = self.judge.key, MIN_SECRET_LENGTH
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._key_parts = {key[i : i + n] for i in range(len(key) - n + 1)}
        self.searches = PatternSearcher()
        self.answers = AnswerCache(self.judge.cache)

    def ask(self, questions: Sequence[Messages], parse: Parse, done: Done = lambda _: None) -> list[Any]:
        """The verdict or the JudgeError of each question, in order; `done` is called with the index of each."""
        try:
            verdicts = _run(self._ask_all(questions, parse, done))
        finally:
            self.searches.close()
        if any(isinstance(verdict, JudgeStoppedError) for verdict in verdicts):
            raise KeyboardInterrupt
        return verdicts

    async def _ask_all(self, questions: Sequence[Messages], parse: Parse, done: Done) -> list[Any]:
        self._slots = asyncio.Semaphore(self.judge.concurrency)
        self._pending: dict[str, asyncio.Task[Any]] = {}
        self._silent = 0

        async def verdict(i: int) -> Any:
            for again in range(self.judge.again + 1):
                try:
                    result = await self._verdict(questions[i], again, parse)
                except JudgeError as error:
                    result = error
                if not isinstance(result, JudgeParseError):
                    break
            if not isinstance(result, JudgeStoppedError):
                done(i)
            return result

        limits = self._httpx.Limits(max_connections=self.judge.concurrency)
        proxies = self.judge.url.startswith("https:") or not self.judge.local  # one would carry the key elsewhere
        http = self._httpx.AsyncClient(timeout=None, limits=limits, trust_env=proxies)
        try:
            async with http as self._http, asyncio.TaskGroup() as group:
                tasks = [group.create_task(verdict(i)) for i in range(len(questions))]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _verdict(self, question: Messages, again: int, parse: Parse) -> Any:
        """The verdict of an answer from the cache, from an equal question under way, or over the network."""
        body = self.judge.body(question)
        key = request_key(body, again)
        if (kept := self.answers.get(key)) is not None:
            self.usage.kept += 1
            return await asyncio.to_thread(parse, kept, time.monotonic() + self.judge.deadline)
        if key not in self._pending:
            self._pending[key] = asyncio.create_task(self._fetch(key, body, parse))
            self._pending[key].add_done_callback(lambda task: task.cancelled() or task.exception())
        return await self._pending[key]

    async def _fetch(self, key: str, body: dict[str, Any], parse: Parse) -> Any:
        """Request an answer, with retries until the deadline, save it, and read its verdict."""
        judge = self.judge
        async with self._slots:
            if self._silent >= MAX_SILENT_QUESTIONS:
                raise JudgeTimeoutError(f"not asked, because the last {self._silent} questions got no answer at all")
            end = time.monotonic() + judge.deadline
            for attempt in range(judge.retries + 1):
                if self.stop:
                    raise JudgeStoppedError
                try:
                    answer = await self._request(body, min(judge.timeout, end - time.monotonic()))
                except _RetryError as failure:
                    why, wait = str(failure), failure.wait
                else:
                    self._silent = 0
                    self.answers.put(key, answer)
                    self.usage.asked += 1
                    return await asyncio.to_thread(parse, answer, end)
                # exponential, and shortened at random so that not all requests come back at once
                own = min(MAX_WAIT_SECONDS, judge.backoff * 2**attempt) * random.uniform(0.5, 1.0)
                resume = time.monotonic() + max(own, wait)
                if attempt == judge.retries or resume >= end:
                    break
                self.usage.retried += 1
                while not self.stop and (left := resume - time.monotonic()) > 0:
                    await asyncio.sleep(min(left, 0.1))
            self._silent += 1
            tries = "1 try" if attempt == 0 else f"{attempt + 1} tries"
            late = " (the deadline does not allow another)" if attempt < judge.retries else ""
            raise JudgeTimeoutError(f"the judge gave no answer after {tries}{late}. The last failure: {why}")

    async def _request(self, body: dict[str, Any], seconds: float) -> Answer:
        """One request: its answer, or an error that says whether to retry."""
        url, received, largest = self.judge.url, bytearray(), largest_reply(body)
        request = self._http.stream("POST", url, content=json.dumps(body).encode(), headers=self._headers)
        try:
            async with asyncio.timeout(seconds), request as reply:
                if reply.headers.get("content-encoding", "identity") != "identity":  # it could unpack to any size
                    raise _RetryError("a compressed reply, although none was asked for")
                async for part in reply.aiter_raw():
                    received += part
                    if len(received) > largest:
                        raise _RetryError(f"a reply of more than {largest:,} bytes: that is too long for max_tokens")
        except TimeoutError:
            raise _RetryError(f"no answer within {max(seconds, 0):.3g} s") from None
        except self._httpx.HTTPError as error:
            raise _RetryError(
                f"{type(error).__name__}: {self._excerpt(str(error)) or 'the connection broke'}"
            ) from None
        except (self._httpx.InvalidURL, UnicodeError) as error:
            raise ConfigError(f"--url {url}: {error}") from None
        text, status = received.decode("utf-8", "replace"), reply.status_code
        if status == 200:
            return self._content(text)
        why = f"{status}: {self._excerpt(_error_message(text)) or 'no text'}"
        if status in FATAL_STATUSES:
            advice = f"set the key in ${self.judge.key_env}" if status != 404 else "check --url and --model"
            raise RunError(f"the judge at {url} refuses with {why}. No retry helps: {advice}")
        if status in RETRIED_STATUSES or status >= 500:
            raise _RetryError(why, _retry_after(reply.headers.get("retry-after", "")))
        raise JudgeTimeoutError(f"the judge refuses with {why}")

    def _content(self, text: str) -> Answer:
        """What a reply of status 200 contains."""
        try:
            reply = json.loads(text)
            choice = reply["choices"][0]
            content = choice["message"]["content"]
            if not isinstance(content, str | None):
                raise TypeError
        except (ValueError, LookupError, TypeError, RecursionError):
            raise _RetryError(f"the reply is not a chat completion: {self._excerpt(text)[:120]!r}") from None
        counts, finish = reply.get("usage"), choice.get("finish_reason")
        counts = counts if isinstance(counts, dict) else {}
        usage = {name: counts[name] for name in USAGE if type(counts.get(name)) is int and 0 <= counts[name] < 1 << 40}
        self.usage.tokens += usage.get("total_tokens", 0)
        answer = {
            "text": self._masked(content or ""),
            "finish": self._masked(finish)[:40] if isinstance(finish, str) else None,
        }
        return {"model": self.judge.model, **answer, "usage": usage} | (
            {"insecure": True} if self.judge.exposed else {}
        )

    def _masked(self, text: str) -> str:
        """The text without the key and without any part of it that is long enough to be a secret."""
        n, pieces, end = MIN_SECRET_LENGTH, [], 0
        for i in (i for i in range(len(text) - n + 1) if text[i : i + n] in self._key_parts):
            if i >= end:
                pieces += [text[end:i], "***"]
            end = i + n
        return "".join(pieces) + text[end:]

    def _excerpt(self, text: str) -> str:
        """The beginning of a text for an error. Escapes are resolved and the key is masked before it is cut."""
        plain = re.sub(r"\\(?:u([0-9a-fA-F]{4})|(.))", lambda m: chr(int(m[1], 16)) if m[1] else m[2], text)
        return " ".join(self._masked(plain).split())[:300]


def _run(work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """Run a coroutine to its end, even inside a running event loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _retry_after(header: str) -> float:
    """The seconds that a Retry-After header asks for, as a number or a date; 0 if it is neither."""
    with suppress(ValueError):
        return float(header)
    with suppress(ValueError, TypeError, OverflowError):
        return parsedate_to_datetime(header).timestamp() - time.time()
    return 0.0


def _error_message(text: str) -> str:
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError, RecursionError):
        return text


def largest_reply(body: dict[str, Any]) -> int:
    """Maximum bytes of a reply to a request. Thoughts count as tokens, wherever the reply has them."""
    limits = [body.get(name) for name in ("max_tokens", "max_completion_tokens")]
    tokens = max((limit for limit in limits if type(limit) is int), default=MAX_REPLY_TOKENS)
    return ENVELOPE + TOKEN * max(0, min(tokens, MAX_REPLY_TOKENS))


# ---- the answers so far, on disk -----------------------------------------------------------------------


def request_key(body: dict[str, Any], again: int) -> str:
    """A hash of everything that decides an answer: model, messages, parameters, and how often it was asked before."""
    request = json.dumps([body, again], sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return hashlib.sha256(request).hexdigest()


class AnswerCache:
    """A file of answers by key. Lines are only appended, one at a time, under a lock.

    A line that a crash left incomplete is skipped. Lines that other processes append are seen too.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._known: dict[str, Answer] = {}
        self._offset = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
        except OSError as error:
            raise ConfigError(f"--cache {self.path}: cannot write there ({error.strerror})") from None
        if not self.path.is_file():
            raise ConfigError(f"--cache {self.path}: it is not a regular file")

    def get(self, key: str) -> Answer | None:
        if key not in self._known:
            with suppress(OSError), open(self.path, "rb") as file:
                self._catch_up(file)
        return self._known.get(key)

    def put(self, key: str, answer: Answer) -> None:
        """Append an answer. When this returns, it is on the disk."""
        line = json.dumps({"key": key, **answer}, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            with open(self.path, "a+b") as file:
                lock_file(file)
                incomplete = self._catch_up(file)
                file.write(b"\n" + line if incomplete else line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be written ({error.strerror}). The judge is not asked any more, because its "
                "answers could not be kept. Make room, then run the same command again"
            ) from None
        self._known[key] = answer

    def _catch_up(self, file: IO[bytes]) -> bool:
        """Read the lines that were appended since the last time; returns whether an incomplete one follows."""
        file.seek(self._offset)
        data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        for line in data[:end].splitlines():
            with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):  # it is asked again
                entry = json.loads(line)
                if isinstance(entry["text"], str):
                    self._known[entry.pop("key")] = entry
        return end < len(data)

"""Many questions to one address at once: retried, under deadlines, every answer on disk before it is read.

refused as too many (429), failed (5xx), malformed, dropped, nobody there    tried again, later each time
a key or an address that is wrong (401, 403, 404)                            ends everything: no retry helps
any other refusal (400: too long a text, …)                                  the end of this one question
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ascent.judge.cache import Answer, Answers, key_of
from ascent.judge.errors import JudgeError, Unanswered
from ascent.judge.replies import message_of, seconds_of
from ascent.judge.settings import Judge
from ascent.types import Refused, Trouble

LONGEST_WAIT = 30.0
"""Seconds between two tries at most, unless Retry-After asks for more."""
FATAL = (401, 403, 404)
PASSING = (408, 409, 425, 429)
"""Refusals that may pass, beside every 5xx."""
GIVEN_UP = 8
"""Questions without any answer, one after the other, after which no more are asked in the same call."""
LARGEST = 1 << 22
"""Bytes of a reply that are read at most."""
SHORTEST_SECRET = 8
"""Characters of a key from which on it is masked in texts: a shorter one (0, EMPTY) is a dummy, and no secret."""

Messages = list[dict[str, str]]
Read = Callable[[Answer], Any]
"""From an answer to a verdict; raises Unparsed."""


@dataclass(frozen=True)
class Question:
    """What is asked, and how its answer is read."""

    messages: Messages
    read: Read


@dataclass
class Counts:
    """What asking has cost so far."""

    asked: int = 0
    """Answers that came over the wire."""
    kept: int = 0
    """Answers that were on disk already."""
    retried: int = 0
    tokens: int = 0
    """Of prompts and answers, where the address counts them."""

    def words(self) -> str:
        retried = f", {self.retried} requests tried again" if self.retried else ""
        tokens = f", {self.tokens:,} tokens" if self.tokens else ""
        return f"{self.asked} answers asked for, {self.kept} from disk{retried}{tokens}"


@dataclass
class Stop:
    """Set from a signal handler: no new request is made, those under way are waited for."""

    asked: bool = False
    event: asyncio.Event | None = None
    loop: asyncio.AbstractEventLoop | None = None

    def __call__(self) -> None:
        self.asked = True
        if self.loop is not None and self.event is not None:
            self.loop.call_soon_threadsafe(self.event.set)


class Stopped(Exception):
    """Nothing more is asked, for somebody said stop."""


@dataclass
class Asker:
    """A judge that can be asked. Equal questions are asked once."""

    judge: Judge
    answers: Answers
    counts: Counts = field(default_factory=Counts)
    stop: Stop = field(default_factory=Stop)

    def __post_init__(self) -> None:
        self.judge.insist()
        try:
            import httpx
        except ImportError:
            raise Refused("a judge needs httpx: pip install 'ascent-rl[judge]'") from None
        self._httpx = httpx

    def __call__(self, questions: Sequence[Question], heard: Callable[[int], None] | None = None) -> list[Any]:
        """For each question its verdict or its JudgeError, in their order; `heard` after each."""
        try:
            return _finish(self._all(questions, heard or (lambda _: None)))
        except Stopped:
            raise KeyboardInterrupt from None

    async def _all(self, questions: Sequence[Question], heard: Callable[[int], None]) -> list[Any]:
        self._room = asyncio.Semaphore(self.judge.concurrency)
        self._same: dict[str, asyncio.Future[Answer]] = {}
        self.stop.loop, self.stop.event = asyncio.get_running_loop(), asyncio.Event()
        if self.stop.asked:
            self.stop.event.set()
        self._silent = 0
        found: list[Any] = [None] * len(questions)

        async def one(i: int) -> None:
            try:
                found[i] = await self._verdict(questions[i])
            except JudgeError as error:
                found[i] = error
            heard(i)

        limits = self._httpx.Limits(max_connections=self.judge.concurrency)
        async with self._httpx.AsyncClient(timeout=None, limits=limits) as self._client:
            tasks = [asyncio.create_task(one(i)) for i in range(len(questions))]
            try:
                await asyncio.gather(*tasks)
            except Stopped:  # those under way have been paid for: let them come
                await asyncio.gather(*tasks, return_exceptions=True)
                raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self.stop.loop = None
        return found

    async def _verdict(self, question: Question) -> Any:
        """Ask, and ask anew where no verdict can be read; the last such answer is the error's."""
        for again in range(self.judge.again + 1):
            answer = await self._once(question.messages, again)
            try:
                return question.read(answer)
            except JudgeError:
                if again == self.judge.again:
                    raise
        raise AssertionError

    async def _once(self, messages: Messages, again: int) -> Answer:
        """From disk, from an equal question that is being asked, or over the wire."""
        body = self.judge.body(messages)
        key = key_of(body, again)
        kept = self.answers.get(key)
        if kept is not None:
            self.counts.kept += 1
            return kept
        if key in self._same:
            return await asyncio.shield(self._same[key])
        future = self._same[key] = asyncio.get_running_loop().create_future()
        try:
            async with self._room:
                if self._silent >= GIVEN_UP:
                    raise Unanswered(f"not asked, for the last {self._silent} questions had no answer at all")
                answer = await self._asked(body)
                self._silent = 0
            self.answers.put(key, answer)
        except BaseException as error:
            if not future.cancelled():
                future.set_exception(error)
                future.exception()  # nobody else may be waiting for it
            raise
        self.counts.asked += 1
        future.set_result(answer)
        return answer

    async def _asked(self, body: dict[str, Any]) -> Answer:
        """One answer over the wire, whatever it takes within the deadline."""
        judge, end, why = self.judge, time.monotonic() + self.judge.deadline, ""
        for attempt in range(judge.retries + 1):
            if self.stop.asked:
                raise Stopped
            left = end - time.monotonic()
            try:
                async with asyncio.timeout(min(judge.timeout, left)):
                    return await self._request(body)
            except TimeoutError:
                what, wait = f"no answer within {min(judge.timeout, max(left, 0)):.3g} s", None
            except _Again as again:
                what, wait = again.why, again.wait
            why = what
            delay = self._delay(attempt, wait)
            if attempt == judge.retries or time.monotonic() + delay >= end:
                break
            self.counts.retried += 1
            await self._sleep(delay)
        self._silent += 1
        tries = "1 try" if attempt == 0 else f"{attempt + 1} tries"
        late = " (the deadline does not allow another)" if attempt < judge.retries else ""
        raise Unanswered(f"the judge gave no answer after {tries}{late}. The last: {why}")

    def _delay(self, attempt: int, asked_for: float | None) -> float:
        """Exponential, shortened at random so that not all come back at once; never less than was asked for."""
        own = min(LONGEST_WAIT, self.judge.backoff * 2**attempt) * random.uniform(0.5, 1.0)
        return own if asked_for is None else max(own, asked_for)

    async def _sleep(self, seconds: float) -> None:
        assert self.stop.event is not None
        try:
            await asyncio.wait_for(self.stop.event.wait(), seconds)
        except TimeoutError:
            return

    async def _request(self, body: dict[str, Any]) -> Answer:
        """One request: an answer, or why there is none and whether to try again."""
        secret = self._secret()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {secret}"} if secret else {})
        sent = json.dumps(body).encode()
        try:
            async with self._client.stream("POST", self.judge.url, content=sent, headers=headers) as reply:
                received = bytearray()
                async for part in reply.aiter_bytes():
                    received += part
                    if len(received) > LARGEST:
                        raise _Again(f"a reply of more than {LARGEST >> 20} MiB")
        except self._httpx.HTTPError as error:
            raise _Again(f"{type(error).__name__}: {self._masked(str(error)) or 'the connection broke'}") from None
        except (self._httpx.InvalidURL, UnicodeError) as error:
            raise Refused(f"--url {self.judge.url}: {error}") from None
        text = received.decode("utf-8", "replace")
        if reply.status_code != 200:
            self._refusal(reply.status_code, self._masked(message_of(text))[:300], reply.headers.get("retry-after"))
        return self._answer(text)

    def _secret(self) -> str:
        return os.environ.get(self.judge.key_env, "").strip()

    def _masked(self, said: Any) -> Any:
        """What an address said, without the key: in a text, and in the texts of what was parsed."""
        if isinstance(said, dict):
            return {name: self._masked(value) for name, value in said.items()}
        if isinstance(said, list):
            return [self._masked(value) for value in said]
        secret = self._secret()
        if not isinstance(said, str) or len(secret) < SHORTEST_SECRET:
            return said
        return said.replace(secret, "***").replace(repr(secret)[1:-1], "***")

    def _refusal(self, status: int, said: str, retry_after: str | None) -> None:
        what = f"{status}: {said}"
        if status in FATAL:
            advice = f"set the key in ${self.judge.key_env}" if status != 404 else "check --url and --model"
            raise Trouble(f"the judge at {self.judge.url} refuses with {what}. No retry helps: {advice}")
        if status in PASSING or status >= 500:
            raise _Again(what, seconds_of(retry_after))
        raise Unanswered(f"the judge refuses with {what}")

    def _answer(self, text: str) -> Answer:
        """What a reply of status 200 holds."""
        try:
            reply = json.loads(text)
            choice = reply["choices"][0]
            said = choice["message"]["content"]
            if not isinstance(said, str | None):
                raise TypeError
        except (ValueError, LookupError, TypeError):
            raise _Again(f"a reply that is none of a chat: {self._masked(text)[:120]!r}") from None
        usage = reply.get("usage") if isinstance(reply.get("usage"), dict) else {}
        tokens = usage.get("total_tokens")
        self.counts.tokens += tokens if isinstance(tokens, int) else 0
        heard = {"text": said or "", "finish": choice.get("finish_reason"), "usage": usage}
        return {"model": self.judge.model, **self._masked(heard)}


class _Again(Exception):
    """This request failed in a way that may pass; `wait` is what Retry-After asked for."""

    def __init__(self, why: str, wait: float | None = None):
        super().__init__(why)
        self.why, self.wait = why, wait


def _finish(work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """Run it to its end, also where a loop is running already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()

"""The HTTP side of one server: responses and new weights, in its dialect. Every wait has a deadline."""

import asyncio
import json
import ssl
import threading
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, contextmanager
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from ascent.core.errors import ConfigError, RunError
from ascent.inference.remote.engine_adapter import (
    EMPTY_RESPONSE,
    EngineAdapter,
    EngineRequest,
    EngineResponse,
    ServerConfig,
)
from ascent.inference.remote.weight_files import WeightManifest

GLANCE = 30.0
"""Seconds in which a living server says that it lives, if its deadline is not shorter."""
EXCERPT = 300
"""Characters of a server's words in an error."""
PIECE = 2**20
"""Bytes of weights that are sent at once."""
Some = TypeVar("Some")
OnProgress = Callable[[EngineResponse], None]


class ServerLostError(Exception):
    """The server is gone, or does not answer: what it was asked may be asked again."""


class EventLoopThread:
    """A thread with an event loop: requests run there while the run computes."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="ascent-engine", daemon=True)
        self.thread.start()

    def start(self, call: Coroutine[Any, Any, Some]) -> "Future[Some]":
        return asyncio.run_coroutine_threadsafe(call, self.loop)

    def together(self, calls: list[Coroutine[Any, Any, Some]]) -> list[Some]:
        """All of them at once, to their end: each has its own deadline."""

        async def every() -> list[Some]:
            return await asyncio.gather(*calls)

        return self.start(every()).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class PrioritySemaphore:
    """So many may work at once. Of those who wait, an earlier step goes first, and then who came first."""

    def __init__(self, free: int):
        self.free, self._came = free, count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def __call__(self, step: int) -> AsyncIterator[None]:
        if self.free:
            self.free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heappush(self._waiting, (step, next(self._came), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # a lane was handed over already
                    self._leave()
                raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        while self._waiting:
            *_, turn = heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1


class ServerClient:
    """What is asked of one server. It knows nothing of tickets."""

    def __init__(self, url: str, dialect: EngineAdapter, at_once: int, deadline: float, key: str = ""):
        try:
            import httpx
        except ImportError:
            raise ConfigError("--engine needs httpx: pip install 'ascent-rl[judge]'") from None
        self.url, self.dialect, self.deadline, self._httpx = url.rstrip("/"), dialect, deadline, httpx
        limits = httpx.Limits(max_connections=at_once + 4, keepalive_expiry=2.0)  # before a server ends an idle one
        verify = ssl.create_default_context() if url.startswith("https:") else True  # SSL_CERT_FILE counts
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(  # no proxy to loopback
            timeout=None, limits=limits, trust_env=False, headers=headers, verify=verify
        )
        self.lanes, self._key = PrioritySemaphore(at_once), key

    async def ask(self, path: str, body: Any = None, seconds: float | None = None) -> Any:
        """POST, or GET without a body; the answer's JSON. Lost: no answer in time, or the server itself has failed."""
        return await self._exchange(path, seconds or self.deadline, "GET" if body is None else "POST", json=body)

    async def send(self, path: str, file: Path) -> Any:
        """PUT a file, in a stream. Lost also where something else than was sent has arrived."""
        sent = 0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal sent
            with file.open("rb") as weights:
                while piece := await asyncio.to_thread(weights.read, PIECE):
                    sent = await asyncio.to_thread(zlib.crc32, piece, sent)
                    yield piece

        length = {"Content-Length": str(file.stat().st_size)}
        reply = await self._exchange(path, self.deadline, "PUT", content=pieces(), headers=length)
        if reply["checksum"] != sent:
            raise ServerLostError(f"{self.url}{path}: what arrived has another checksum than what was sent")
        return reply

    async def _exchange(self, path: str, seconds: float, method: str, **more: Any) -> Any:
        async with self._within(path, seconds):
            reply = await self._http.request(method, self.url + path, **more)
        self._check(path, reply.status_code, reply.text)
        try:
            return reply.json() if reply.content else None
        except ValueError:
            raise RunError(f"{self.url}{path} did not answer in JSON: {self._excerpt(reply.text)}") from None

    async def _events(self, path: str, body: Any) -> AsyncGenerator[Any]:
        """The server-sent events that answer a POST, each of them JSON, within the deadline for one answer."""
        async with (
            self._within(path, self.deadline),
            self._http.stream("POST", self.url + path, json=body) as reply,
        ):
            if reply.status_code >= 300:
                self._check(path, reply.status_code, (await reply.aread()).decode(errors="replace"))
            async for line in reply.aiter_lines():
                words = line.removeprefix("data:").strip()
                if not line.startswith("data:") or words == "[DONE]":
                    continue
                try:
                    event = json.loads(words)
                except ValueError:
                    raise RunError(f"{self.url}{path} did not answer in JSON: {self._excerpt(words)}") from None
                if isinstance(event, dict) and event.get("error"):
                    about = event["error"]
                    code = about.get("code") if isinstance(about, dict) else None
                    self._check(path, code if type(code) is int else 500, words)
                yield event

    @asynccontextmanager
    async def _within(self, path: str, seconds: float) -> AsyncIterator[None]:
        """Lost where the server is gone, or the time is over."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise ServerLostError(f"{self.url}{path} has not answered within {seconds:g} seconds") from None
        except self._httpx.TransportError as error:
            raise ServerLostError(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from None

    def _check(self, path: str, status: int, text: str) -> None:
        if status >= 500:
            raise ServerLostError(f"{self.url}{path} said {status}: {self._excerpt(text)}")
        if status >= 300:  # to another address nothing is sent
            words = f"{self._excerpt(text)}{self._advice(status)}"
            raise RunError(f"the engine refused {self.url}{path} with {status}: {words}")

    def _excerpt(self, text: str) -> str:
        return (text.replace(self._key, "…") if self._key else text)[:EXCERPT]

    async def alive(self, seconds: float = GLANCE) -> bool:
        try:
            await self.ask("/health", seconds=min(seconds, self.deadline))
        except (ServerLostError, RunError):
            return False
        return True

    async def generate(self, request: EngineRequest, salt: str, hear: OnProgress | None = None) -> EngineResponse:
        """One response. `hear` is told how far it has come."""
        body, answer = self.dialect.body(request, salt), EMPTY_RESPONSE
        if hear is None:
            reply = await self.ask(self.dialect.generates, body)
            with self._reading():
                answer = self.dialect.read(reply)
        else:
            async with aclosing(self._events(self.dialect.generates, body | {"stream": True})) as events:
                async for event in events:
                    with self._reading():
                        answer = self.dialect.more(answer, event)
                    hear(answer)
        tokens, logp, versions, aborted, _ = answer
        if -1 in versions:
            raise ServerLostError(f"{self.url} was started again, and has no weights yet")
        if aborted:
            return answer
        if not (len(tokens) == len(logp) == len(versions)) or not tokens:
            raise RunError(
                f"{self.url}: a response of {len(tokens)} tokens came with {len(logp)} log-probs and {len(versions)} "
                f"versions; is it {self.dialect.release}?"
            )
        if tokens[-1] not in request.ends and len(tokens) != request.most:
            raise RunError(
                f"{self.url}: a response that may have {request.most} tokens ended after {len(tokens)}, at token "
                f"{tokens[-1]}, which does not end one here. Is there memory for a whole response, and does the server "
                "know other end tokens than the model has here?"
            )
        return answer

    async def greet(self, serving: ServerConfig) -> None:
        """Before its first weights. RunError where it cannot serve this run."""
        with self._reading():
            await self.dialect.greet(self, serving)

    async def load(self, weights: WeightManifest, version: int) -> None:
        """New weights, and none of the old ones' caches."""
        with self._reading():
            await self.dialect.load(self, weights, version)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Answers that cannot be read are RunError."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError) as error:
            why = f"{type(error).__name__} {error}"
            raise RunError(f"{self.url}: its answer is not that of {self.dialect.release}: {why}") from None

    def _advice(self, status: int) -> str:
        if status == 401:
            return ". Is the key the one of that `ascent engine`?"
        if status != 404:
            return ""
        return f". {self.dialect.advice}? docs/serving.md has the command"

    async def close(self) -> None:
        await self._http.aclose()

"""The HTTP client of one server: responses and weight updates, through its adapter. Every wait has a deadline."""

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

HEALTH_CHECK_TIMEOUT = 30.0
"""Seconds that a health check may take, if the deadline is not shorter."""
MAX_EXCERPT_CHARS = 300
"""Maximum number of characters of a reply that an error message quotes."""
UPLOAD_CHUNK_BYTES = 2**20
Result = TypeVar("Result")
OnProgress = Callable[[EngineResponse], None]
"""Called with the response so far, after each event of a stream."""


class ServerLostError(Exception):
    """The server is gone or does not answer. Its requests may be sent again."""


class EventLoopThread:
    """An event loop in a background thread, so that HTTP requests run while the run computes."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="ascent-engine", daemon=True)
        self.thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> "Future[Result]":
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run_all(self, coroutines: list[Coroutine[Any, Any, Result]]) -> list[Result]:
        """Run them concurrently and wait for all results. Each has its own deadline."""

        async def gather() -> list[Result]:
            return await asyncio.gather(*coroutines)

        return self.submit(gather()).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class PrioritySemaphore:
    """A semaphore that admits waiters by step, and within a step in their order of arrival."""

    def __init__(self, free: int):
        self.free, self._arrivals = free, count()
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def __call__(self, step: int) -> AsyncIterator[None]:
        if self.free:
            self.free -= 1
        else:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heappush(self._waiters, (step, next(self._arrivals), waiter))
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():  # it was admitted before it was cancelled
                    self._release()
                raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        while self._waiters:
            *_, waiter = heappop(self._waiters)
            if not waiter.done():
                waiter.set_result(None)
                return
        self.free += 1


class ServerClient:
    """The HTTP client of one server. It knows single responses, not rollout requests."""

    def __init__(self, url: str, adapter: EngineAdapter, max_concurrency: int, deadline: float, key: str = ""):
        try:
            import httpx
        except ImportError:
            raise ConfigError("--engine needs httpx: pip install 'ascent-rl[judge]'") from None
        self.url, self.adapter, self.deadline, self._httpx = url.rstrip("/"), adapter, deadline, httpx
        # Idle connections are closed before the server closes them.
        limits = httpx.Limits(max_connections=max_concurrency + 4, keepalive_expiry=2.0)
        verify = ssl.create_default_context() if url.startswith("https:") else True  # respects SSL_CERT_FILE
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(  # trust_env=False: no proxy to loopback
            timeout=None, limits=limits, trust_env=False, headers=headers, verify=verify
        )
        self.slots, self._key = PrioritySemaphore(max_concurrency), key

    async def call(self, path: str, body: Any = None, seconds: float | None = None) -> Any:
        """POST `body`, or GET if there is none, and return the JSON of the reply.

        ServerLostError: no reply in time, or an internal server error.
        """
        return await self._exchange(path, seconds or self.deadline, "GET" if body is None else "POST", json=body)

    async def upload(self, path: str, file: Path) -> Any:
        """PUT a file as a stream. ServerLostError also if the checksum of the received file differs."""
        checksum = 0

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal checksum
            with file.open("rb") as weights:
                while chunk := await asyncio.to_thread(weights.read, UPLOAD_CHUNK_BYTES):
                    checksum = await asyncio.to_thread(zlib.crc32, chunk, checksum)
                    yield chunk

        length = {"Content-Length": str(file.stat().st_size)}
        reply = await self._exchange(path, self.deadline, "PUT", content=chunks(), headers=length)
        if reply["checksum"] != checksum:
            raise ServerLostError(f"{self.url}{path}: the checksum of the received file differs from that of the sent")
        return reply

    async def _exchange(self, path: str, seconds: float, method: str, **options: Any) -> Any:
        async with self._deadline(path, seconds):
            reply = await self._http.request(method, self.url + path, **options)
        self._check_status(path, reply.status_code, reply.text)
        try:
            return reply.json() if reply.content else None
        except ValueError:
            raise RunError(f"{self.url}{path} did not answer in JSON: {self._excerpt(reply.text)}") from None

    async def _events(self, path: str, body: Any) -> AsyncGenerator[Any]:
        """Yield the JSON of the server-sent events that answer a POST, within the deadline of one response."""
        async with (
            self._deadline(path, self.deadline),
            self._http.stream("POST", self.url + path, json=body) as reply,
        ):
            if reply.status_code >= 300:
                self._check_status(path, reply.status_code, (await reply.aread()).decode(errors="replace"))
            async for line in reply.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                try:
                    event = json.loads(data)
                except ValueError:
                    raise RunError(f"{self.url}{path} did not answer in JSON: {self._excerpt(data)}") from None
                if isinstance(event, dict) and event.get("error"):
                    error = event["error"]
                    code = error.get("code") if isinstance(error, dict) else None
                    self._check_status(path, code if type(code) is int else 500, data)
                yield event

    @asynccontextmanager
    async def _deadline(self, path: str, seconds: float) -> AsyncIterator[None]:
        """Raise ServerLostError if the connection fails or the block takes longer than `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise ServerLostError(f"{self.url}{path} has not answered within {seconds:g} seconds") from None
        except self._httpx.TransportError as error:
            raise ServerLostError(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from None

    def _check_status(self, path: str, status: int, text: str) -> None:
        if status >= 500:
            raise ServerLostError(f"{self.url}{path} answered {status}: {self._excerpt(text)}")
        if status >= 300:  # redirects are not followed: data are sent to the configured address only
            details = f"{self._excerpt(text)}{self._hint(status)}"
            raise RunError(f"the engine rejected {self.url}{path} with {status}: {details}")

    def _excerpt(self, text: str) -> str:
        return (text.replace(self._key, "…") if self._key else text)[:MAX_EXCERPT_CHARS]

    async def is_healthy(self, seconds: float = HEALTH_CHECK_TIMEOUT) -> bool:
        try:
            await self.call("/health", seconds=min(seconds, self.deadline))
        except (ServerLostError, RunError):
            return False
        return True

    async def generate(
        self, request: EngineRequest, salt: str, on_progress: OnProgress | None = None
    ) -> EngineResponse:
        """Generate one response. With `on_progress`, the response is streamed."""
        body, response = self.adapter.request_body(request, salt), EMPTY_RESPONSE
        if on_progress is None:
            reply = await self.call(self.adapter.generate_path, body)
            with self._parsing():
                response = self.adapter.parse_response(reply)
        else:
            async with aclosing(self._events(self.adapter.generate_path, body | {"stream": True})) as events:
                async for event in events:
                    with self._parsing():
                        response = self.adapter.parse_event(response, event)
                    on_progress(response)
        if -1 in response.versions:
            raise ServerLostError(f"{self.url} was restarted and has no weights yet")
        if not response.aborted:
            self._check_response(request, response)
        return response

    def _check_response(self, request: EngineRequest, response: EngineResponse) -> None:
        tokens, logp, versions, *_ = response
        if not (len(tokens) == len(logp) == len(versions)) or not tokens:
            raise RunError(
                f"{self.url}: a response of {len(tokens)} tokens came with {len(logp)} log-probs and {len(versions)} "
                f"versions; is it {self.adapter.release}?"
            )
        if tokens[-1] not in request.stop_token_ids and len(tokens) != request.max_tokens:
            raise RunError(
                f"{self.url}: a response of at most {request.max_tokens} tokens ended after {len(tokens)}, at token "
                f"{tokens[-1]}, which is not an end token. Does the server have memory for a whole response, and do "
                "its end tokens agree with those of the model?"
            )

    async def check_server(self, config: ServerConfig) -> None:
        """Raise RunError if the server cannot serve this run."""
        with self._parsing():
            await self.adapter.check_server(self, config)

    async def load_weights(self, weights: WeightManifest, version: int) -> None:
        """Load new weights and drop the caches of the old ones."""
        with self._parsing():
            await self.adapter.load_weights(self, weights, version)

    @contextmanager
    def _parsing(self) -> Iterator[None]:
        """Turn errors of parsing a reply into RunError."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__} {error}"
            raise RunError(f"{self.url}: its reply is not that of {self.adapter.release}: {reason}") from None

    def _hint(self, status: int) -> str:
        if status == 401:
            return ". Is the key the one of that `ascent engine`?"
        if status != 404:
            return ""
        return f". {self.adapter.setup_hint}? docs/serving.md has the command"

    async def close(self) -> None:
        await self._http.aclose()

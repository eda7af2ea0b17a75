"""`ascent engine`: a relay next to a serving engine, for a trainer on another machine.

An engine in its development mode obeys anyone who can connect, so it listens on loopback only. The relay connects to it
and does four things for a client that has the key: it reports the engine's health, requests responses, receives weights
into shared memory, and has the engine load them. No address, header or body is forwarded: each request to the engine is
built from validated numbers.
"""

import asyncio
import hmac
import os
import secrets
import shutil
import socket
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import uvicorn
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ascent.core.errors import RunError
from ascent.inference.remote.engine_adapter import EngineRequest, EngineResponse, ServerConfig
from ascent.inference.remote.relay_client import ABOUT_PATH, CHECK_PATH, GENERATE_PATH, LOAD_PATH, WEIGHTS_PATH
from ascent.inference.remote.server_client import ServerClient, ServerLostError
from ascent.inference.remote.weight_files import WeightManifest, weights_folder
from ascent.server.connections import Connection, bind, configure, wait_for_disconnect
from ascent.server.openai_responses import format_event

MAX_BODY_BYTES = 64 * 2**20
"""Bytes of a request other than an upload: names and checksums of all tensors, or a long prompt."""
CHUNK_BYTES = 4 * 2**20
"""Bytes that are written at once."""
TRUSTED = "ascent.trusted"
"""In the scope of a request that has the key."""
Parsed = TypeVar("Parsed")


class GenerateBody(BaseModel):
    """A request for a response. `salt` separates prefix caches of different weights."""

    request: EngineRequest
    salt: str
    stream: bool = False


class LoadBody(BaseModel):
    """A request to load uploaded weights. `tensors`: the shape and checksum of each."""

    upload: str
    version: int
    tensors: dict[str, list[Any]]


class Upload(NamedTuple):
    """A complete file of weights."""

    name: str
    path: Path
    checksum: int


class RelayConnection(Connection):
    """Connections of a trainer: one per response, and without a deadline while an upload makes progress."""

    max_peer_connections, max_connections = 2048, 4096

    def data_received(self, data: bytes) -> None:
        if self.cycle is not None and self.cycle.scope.get(TRUSTED):
            self._cancel_deadline()
        super().data_received(data)


class Relay:
    """The application for one engine. `max_upload_bytes`: the maximum size of a weight file."""

    def __init__(self, client: ServerClient, key: str, max_upload_bytes: int):
        self.client, self.max_upload_bytes, self._key = client, max_upload_bytes, key.encode()
        self._upload: Upload | None = None
        self._upload_lock = asyncio.Lock()
        self._routes: dict[tuple[str, str], Callable[[Request], Awaitable[Any]]] = {
            ("GET", "/health"): self._health,
            ("GET", ABOUT_PATH): self._about,
            ("POST", CHECK_PATH): self._check,
            ("POST", GENERATE_PATH): self._generate,
            ("PUT", WEIGHTS_PATH): self._receive_weights,
            ("POST", LOAD_PATH): self._load,
        }
        self._application = ExceptionMiddleware(
            self._respond, dict.fromkeys((HTTPException, RunError, ValidationError), render_relay_error)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            with suppress(ClientDisconnect):
                await self._application(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        authorization = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(authorization, b"Bearer " + self._key):
            raise HTTPException(401, "the key of this engine is missing or wrong")
        scope[TRUSTED] = True
        route = self._routes.get((request.method, scope["path"]))
        if route is None or scope["query_string"]:
            raise HTTPException(404, "not found")
        value = await route(request)
        response = value if isinstance(value, Response) else JSONResponse(value)
        await response(scope, receive, send)

    # ---- routes

    async def _health(self, _: Request) -> Any:
        if not await self.client.is_healthy():
            raise HTTPException(503, "the engine does not respond")
        return {}

    async def _about(self, _: Request) -> Any:
        return {"engine": self.client.adapter.name}

    async def _check(self, request: Request) -> Any:
        await self.client.check_server(await read_body(request, TypeAdapter(ServerConfig)))
        return {}

    async def _generate(self, request: Request) -> Any:
        body = await read_body(request, TypeAdapter(GenerateBody))
        if body.stream:
            return StreamingResponse(self._stream(body.request, body.salt), media_type="text/event-stream")
        async with self.client.slots(0):
            return (await self._while_connected(request, self.client.generate(body.request, body.salt)))._asdict()

    async def _stream(self, request: EngineRequest, salt: str) -> AsyncGenerator[bytes]:
        """Yield events with new tokens, and at the end one with the whole response or an error."""
        partial: asyncio.Queue[EngineResponse | None] = asyncio.Queue()

        async def generate() -> EngineResponse:
            async with self.client.slots(0):
                return await self.client.generate(request, salt, partial.put_nowait)

        generating, num_sent = asyncio.ensure_future(generate()), 0
        generating.add_done_callback(lambda _: partial.put_nowait(None))
        try:
            while (response := await partial.get()) is not None:
                new = EngineResponse(response.tokens[num_sent:], response.logp[num_sent:], [])
                num_sent = len(response.tokens)
                yield format_event(new._asdict() | {"whole": False})
            yield format_event(generating.result()._asdict() | {"whole": True})
        except RunError as error:
            yield format_event({"error": {"message": str(error), "code": error_status(error)}})
        finally:
            generating.cancel()

    async def _while_connected(self, request: Request, work: Awaitable[EngineResponse]) -> EngineResponse:
        """Await a response; cancel it if the trainer disconnects."""
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect(request.receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            return working.result()
        finally:
            working.cancel(), leaving.cancel()

    async def _receive_weights(self, request: Request) -> Any:
        """Write a weight file into a new folder. It replaces the last one; an incomplete file is removed."""
        length = request.headers.get("content-length", "")
        if not length.isdecimal():
            raise HTTPException(411, "an upload of weights needs a Content-Length header")
        size = int(length)
        if size > self.max_upload_bytes:
            raise HTTPException(
                413, f"{size} bytes of weights: the limit of this relay is {self.max_upload_bytes} (--limit)"
            )
        if self._upload_lock.locked():
            raise HTTPException(409, "other weights are being received or loaded")
        async with self._upload_lock:
            self._remove_upload()
            folder = weights_folder(size)
            try:
                space = os.statvfs(folder)
                if space.f_bavail * space.f_frsize < size:
                    raise HTTPException(507, f"there is no space for {size} bytes of weights")
                async with asyncio.timeout(self.client.deadline):
                    checksum = await write_upload(request, folder / "part", size)
                path = folder / "weights.safetensors"
                (folder / "part").rename(path)
            except TimeoutError:
                shutil.rmtree(folder, ignore_errors=True)
                raise HTTPException(
                    408, f"the weights have not arrived within {self.client.deadline:g} seconds"
                ) from None
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._upload = Upload(secrets.token_hex(8), path, checksum)
        return {"upload": self._upload.name, "checksum": checksum}

    async def _load(self, request: Request) -> Any:
        body = await read_body(request, TypeAdapter(LoadBody))
        if self._upload_lock.locked():
            raise HTTPException(409, "other weights are being received or loaded")
        async with self._upload_lock:
            upload = self._upload
            if upload is None or body.upload != upload.name:
                raise HTTPException(409, "these weights have not arrived, or other weights have replaced them")
            try:
                await self.client.load_weights(WeightManifest(upload.path, body.tensors), body.version)
            finally:
                self._remove_upload()
        return {}

    def _remove_upload(self) -> None:
        """Remove the uploaded weights from memory."""
        upload, self._upload = self._upload, None
        if upload is not None:
            shutil.rmtree(upload.path.parent, ignore_errors=True)

    def close(self) -> None:
        self._remove_upload()


def relay_server(
    relay: Relay, host: str, port: int, certificate: str = "", private_key: str = ""
) -> tuple[uvicorn.Server, socket.socket]:
    """Return a server of the relay and its listening socket."""
    listening = bind(host, port)
    tls = {"ssl_certfile": certificate or None, "ssl_keyfile": private_key or None}
    config = configure(relay, RelayConnection, timeout_keep_alive=60, **tls)  # `Connection` closes idle connections
    return uvicorn.Server(config), listening


def error_status(error: Exception) -> int:
    if isinstance(error, HTTPException):
        return error.status_code
    return 502 if isinstance(error, ServerLostError) else 422 if isinstance(error, RunError) else 400


async def render_relay_error(_: Request, error: Exception) -> Response:
    """Handle an exception of a route. The connection is closed, because the rest of the request is not read."""
    message: Any = str(error)
    if isinstance(error, HTTPException):
        message = error.detail
    elif isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        message = f"{'.'.join(map(str, first['loc']))}: {first['msg']}. Are both sides of this version of Ascent?"
    return JSONResponse({"error": message}, error_status(error), {"connection": "close"})


async def read_body(request: Request, body_type: TypeAdapter[Parsed]) -> Parsed:
    """Read and validate the body of a request, of limited size."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"a request has at most {MAX_BODY_BYTES} bytes")
    return body_type.validate_json(bytes(body))


async def write_upload(request: Request, path: Path, size: int) -> int:
    """Write the body of a request to a new file and return its checksum. Raises unless it has `size` bytes."""
    checksum, count, buffer = 0, 0, bytearray()

    async def flush(file: Any) -> None:
        nonlocal checksum
        piece = bytes(buffer)
        buffer.clear()
        await asyncio.to_thread(file.write, piece)
        checksum = await asyncio.to_thread(zlib.crc32, piece, checksum)

    with open(path, "xb") as file:
        async for piece in request.stream():
            buffer += piece
            count += len(piece)
            if len(buffer) >= CHUNK_BYTES:
                await flush(file)
        await flush(file)
    if count != size:
        raise HTTPException(400, f"{count} bytes of weights arrived, and the Content-Length is {size}")
    return checksum

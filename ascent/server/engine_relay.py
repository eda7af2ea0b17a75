"""`ascent engine`: a relay beside a serving engine, for a trainer on another machine.

An engine in its development mode does whatever anyone who reaches it says, so it listens on loopback only. This process
reaches it, and does four things for whoever has the key: it says how the engine is, asks it for a response, takes
weights into shared memory, and has the engine load them. It hands on no address, no header and no body: each request to
the engine is made anew from numbers that were read here.
"""

import asyncio
import hmac
import json
import os
import secrets
import shutil
import socket
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ascent.core.errors import RunError
from ascent.inference.remote.engine_adapter import EngineRequest, EngineResponse, ServerConfig
from ascent.inference.remote.relay_client import ABOUT_PATH, CHECK_PATH, GENERATE_PATH, LOAD_PATH, WEIGHTS_PATH
from ascent.inference.remote.server_client import ServerClient, ServerLostError
from ascent.inference.remote.weight_files import WeightManifest, weights_folder
from ascent.server.connections import Connection, bind, configure

MOST_WORDS = 64 * 2**20
"""Bytes of a request that is not a file of weights: names and checksums of all tensors, or a long prompt."""
PIECE = 4 * 2**20
"""Bytes that are written at once."""
TRUSTED = "ascent.trusted"
"""In the scope of a request that had the key."""


class Upload(NamedTuple):
    """A file of weights that has arrived whole."""

    name: str
    path: Path
    checksum: int


class RelayError(Exception):
    """What is not done, and the HTTP status that says so."""

    def __init__(self, status: int, words: str):
        super().__init__(words)
        self.status = status


class RelayConnection(Connection):
    """A trainer has one connection per response, and time for a file of weights as long as it keeps sending."""

    most_of_peer, most_open = 2048, 4096

    def data_received(self, data: bytes) -> None:
        if self.cycle is not None and self.cycle.scope.get(TRUSTED):
            self._forget()
        super().data_received(data)


class Relay:
    """The application, for one engine. `limit`: the most bytes of weights."""

    def __init__(self, client: ServerClient, key: str, limit: int):
        self.client, self.limit, self._key = client, limit, key.encode()
        self._upload: Upload | None = None
        self._busy = asyncio.Lock()
        self._routes: dict[tuple[str, str], Callable[[Request], Awaitable[Any]]] = {
            ("GET", "/health"): self._health,
            ("GET", ABOUT_PATH): self._about,
            ("POST", CHECK_PATH): self._greet,
            ("POST", GENERATE_PATH): self._generate,
            ("PUT", WEIGHTS_PATH): self._take,
            ("POST", LOAD_PATH): self._load,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        asked = Request(scope, receive)
        try:
            value = await self._answer(scope, asked)
            reply: Response = value if isinstance(value, Response) else JSONResponse(value)
        except RelayError as error:
            reply = JSONResponse({"error": str(error)}, error.status)
        except ServerLostError as error:
            reply = JSONResponse({"error": str(error)}, 502)
        except RunError as error:
            reply = JSONResponse({"error": str(error)}, 422)
        except ClientDisconnect:
            return
        if reply.status_code != 200:
            reply.headers["connection"] = "close"  # what else was sent is not read
        await reply(scope, receive, send)

    async def _answer(self, scope: Scope, asked: Request) -> Any:
        given = asked.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, b"Bearer " + self._key):
            raise RelayError(401, "the key of this engine is missing or wrong")
        scope[TRUSTED] = True
        route = self._routes.get((scope["method"], scope["path"]))
        if route is None or scope["query_string"]:
            raise RelayError(404, "there is nothing here")
        return await route(asked)

    # ---- what it does

    async def _health(self, _: Request) -> Any:
        if not await self.client.alive():
            raise RelayError(503, "the engine does not say that it lives")
        return {}

    async def _about(self, _: Request) -> Any:
        return {"engine": self.client.dialect.name}

    async def _greet(self, asked: Request) -> Any:
        with _reading():
            serving = ServerConfig(**await _json(asked))
            serving = serving._replace(length=int(serving.length), rows=int(serving.rows))
        await self.client.greet(serving)
        return {}

    async def _generate(self, asked: Request) -> Any:
        with _reading():
            body = await _json(asked)
            request, salt = request_of(body["request"]), str(body["salt"])
        if body.get("stream"):
            return StreamingResponse(self._pieces(request, salt), media_type="text/event-stream")
        async with self.client.lanes(0):
            return (await self._while_connected(asked, self.client.generate(request, salt)))._asdict()

    async def _pieces(self, request: EngineRequest, salt: str) -> AsyncGenerator[bytes]:
        """A response as it comes, as events: what is new, and at the end all of it, or how it failed."""
        come: asyncio.Queue[EngineResponse | None] = asyncio.Queue()

        async def work() -> EngineResponse:
            async with self.client.lanes(0):
                return await self.client.generate(request, salt, come.put_nowait)

        working, told = asyncio.ensure_future(work()), 0
        working.add_done_callback(lambda _: come.put_nowait(None))
        try:
            while (answer := await come.get()) is not None:
                new = EngineResponse(answer.tokens[told:], answer.logp[told:], [])
                told = len(answer.tokens)
                yield _event(new._asdict() | {"whole": False})
            yield _event(working.result()._asdict() | {"whole": True})
        except (ServerLostError, RunError) as error:
            code = 502 if isinstance(error, ServerLostError) else 422
            yield _event({"error": {"message": str(error), "code": code}})
        finally:
            working.cancel()

    async def _while_connected(self, asked: Request, work: Awaitable[EngineResponse]) -> EngineResponse:
        """The answer. Nobody decodes for a trainer that is gone."""

        async def gone() -> None:
            while (await asked.receive())["type"] != "http.disconnect":
                pass

        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            return working.result()
        finally:
            working.cancel(), leaving.cancel()

    async def _take(self, asked: Request) -> Any:
        """A file of weights into a folder of its own. It replaces the last one; one that is cut off is removed."""
        length = asked.headers.get("content-length", "")
        if not length.isdecimal():
            raise RelayError(411, "weights come with their Content-Length")
        size = int(length)
        if size > self.limit:
            raise RelayError(413, f"{size} bytes of weights: the limit of this relay is {self.limit} (--limit)")
        if self._busy.locked():
            raise RelayError(409, "other weights are being taken or loaded")
        async with self._busy:
            self._forget()
            folder = weights_folder(size)
            try:
                room = os.statvfs(folder)
                if room.f_bavail * room.f_frsize < size:
                    raise RelayError(507, f"there is no room for {size} bytes of weights")
                async with asyncio.timeout(self.client.deadline):
                    checksum = await write_body(asked, folder / "part", size)
                path = folder / "weights.safetensors"
                (folder / "part").rename(path)
            except TimeoutError:
                shutil.rmtree(folder, ignore_errors=True)
                raise RelayError(408, f"the weights have not arrived within {self.client.deadline:g} seconds") from None
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._upload = Upload(secrets.token_hex(8), path, checksum)
        return {"upload": self._upload.name, "checksum": checksum}

    async def _load(self, asked: Request) -> Any:
        with _reading():
            body = await _json(asked)
            version, tensors = int(body["version"]), dict(body["tensors"])
        if self._busy.locked():
            raise RelayError(409, "other weights are being taken or loaded")
        async with self._busy:
            upload = self._upload
            if upload is None or body.get("upload") != upload.name:
                raise RelayError(409, "these weights have not arrived, or others have since")
            try:
                await self.client.load(WeightManifest(upload.path, tensors), version)
            finally:
                self._forget()
        return {}

    def _forget(self) -> None:
        """Weights take memory: they are removed once they are loaded, or replaced."""
        upload, self._upload = self._upload, None
        if upload is not None:
            shutil.rmtree(upload.path.parent, ignore_errors=True)

    def close(self) -> None:
        self._forget()


def relay_server(
    relay: Relay, host: str, port: int, certificate: str = "", private_key: str = ""
) -> tuple[uvicorn.Server, socket.socket]:
    """A server of the relay, and the socket that it listens on."""
    listening = bind(host, port)
    tls = {"ssl_certfile": certificate or None, "ssl_keyfile": private_key or None}
    config = configure(relay, RelayConnection, timeout_keep_alive=60, **tls)  # `Connection` ends those that are idle
    return uvicorn.Server(config), listening


async def _json(asked: Request) -> Any:
    """The body of a request, which is bounded."""
    body = bytearray()
    async for piece in asked.stream():
        body += piece
        if len(body) > MOST_WORDS:
            raise RelayError(413, f"a request has at most {MOST_WORDS} bytes")
    return json.loads(bytes(body))


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@contextmanager
def _reading() -> Iterator[None]:
    """What cannot be read is refused."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RelayError(400, f"this is not a request of Ascent's: {type(error).__name__}") from None


def request_of(values: dict[str, Any]) -> EngineRequest:
    """A request, number by number."""
    ends = tuple(int(token) for token in values["ends"])
    prompt, drawn = [int(token) for token in values["prompt"]], float(values["temperature"])
    k, p, least = values.get("narrow", (0, 1.0, 0.0))
    return EngineRequest(
        prompt, int(values["most"]), drawn, int(values["seed"]), ends, (int(k), float(p), float(least))
    )


async def write_body(asked: Request, path: Path, size: int) -> int:
    """The body of a request into a new file, in pieces; its checksum. It has just this many bytes, or is cut off."""
    checksum, count, held = 0, 0, bytearray()

    async def put(file: Any) -> None:
        nonlocal checksum
        piece = bytes(held)
        held.clear()
        await asyncio.to_thread(file.write, piece)
        checksum = await asyncio.to_thread(zlib.crc32, piece, checksum)

    with open(path, "xb") as file:
        async for piece in asked.stream():
            held += piece
            count += len(piece)
            if len(held) >= PIECE:
                await put(file)
        await put(file)
    if count != size:
        raise RelayError(400, f"{count} bytes of weights arrived, and {size} were announced")
    return checksum

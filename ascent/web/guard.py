"""One guard before every route and method of the lab: what it does not let through, nobody sees.

A page of another site can send requests to a server on this machine, and by rebinding its name to
127.0.0.1 even read the answers. So every request has to name this server in `Host`, must not come
from another site (`Origin`, `Sec-Fetch-Site`), and must carry a cookie that only the address printed
in the terminal gives: `?token=…`, once, exchanged for a cookie that scripts cannot read.
"""

import hashlib
import hmac
import os
import secrets
import socket
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
METHODS = ("GET", "HEAD", "POST")
LOCAL = ("127.0.0.1", "localhost", "[::1]")


class Guard:
    """Wraps the whole application. `hosts` are the names, with port, by which it may be called."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], token: str, secret: bytes):
        self.app, self.token = app, token
        self.hosts = hosts | {host.removesuffix(":80") for host in hosts}  # a browser leaves that port out
        port = min(hosts).rpartition(":")[2]
        self.cookie_name = f"ascent-lab-{port}"  # cookies know no port: two labs would share one
        self.cookie = hmac.new(secret, b"ascent lab cookie", hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # there are no web sockets here
            return await send({"type": "websocket.close", "code": 1008})

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self.check(scope)
        await (self.app if answer is None else answer)(scope, receive, guarded)

    def check(self, scope: Scope) -> Response | None:
        """None for a request that may go on; else what it is told instead."""
        headers = Headers(scope=scope)
        if headers.get("host", "").lower() not in self.hosts or len(headers.getlist("host")) != 1:
            return _refused(403, "This server does not answer to that name. Use the address that `ascent lab` printed.")
        if scope["method"] not in METHODS:
            return _refused(405, f"{scope['method']}: the lab knows {', '.join(METHODS)}.")
        why = self._foreign(headers, scope["method"])
        if why:
            return _refused(403, why)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if scope["method"] == "GET" and scope["path"] == "/" and "token" in query:
            return self._exchange(query)
        cookie = cookie_parser(headers.get("cookie", "")).get(self.cookie_name, "")  # among those of other servers
        if not hmac.compare_digest(cookie.encode(), self.cookie.encode()):
            return _refused(403, "This page needs the whole address that `ascent lab` printed, with its token.")
        return None

    def _foreign(self, headers: Headers, method: str) -> str | None:
        """Why a request comes from elsewhere. A browser that says nothing of it is held to cookie and token alone."""
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site not in (None, "same-origin", "none"):
            return f"Sec-Fetch-Site is {site}: only the lab's own pages, and an address typed by hand, get through."
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.hosts}:
            return "The request comes from a page of another site."
        if method == "POST" and origin is None:
            return "A command has to say where it comes from: a browser's own Origin is missing."
        return None

    def _exchange(self, query: dict[str, str]) -> Response:
        if not hmac.compare_digest(query.pop("token").encode(), self.token.encode()):
            return _refused(403, "That token is not the one of this lab. Use the address that `ascent lab` printed.")
        answer = RedirectResponse("/" + (f"?{urlencode(query)}" if query else ""), status_code=303)
        answer.set_cookie(self.cookie_name, self.cookie, httponly=True, samesite="strict", path="/")
        return answer


def _refused(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status_code=status)


def host_names(host: str, port: int) -> frozenset[str]:
    """What a browser may call this server: the loopback names, and the one it was told to listen on."""
    return frozenset(f"{name}:{port}" for name in (*LOCAL, host_name(host)))


def host_name(host: str) -> str:
    """The name under which browsers reach an address, in lower case; this machine's own where it listens on all."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return name.lower()


def kept_secret(folder: Path) -> bytes:
    """The secret behind the cookie, readable by its owner alone: a page that is open survives a restart."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "secret"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        kept = path.read_bytes()
        if len(kept) >= 32 and not path.stat().st_mode & 0o077:
            return kept
        path.unlink()
        return kept_secret(folder)
    with os.fdopen(handle, "wb") as file:
        file.write(secrets.token_bytes(32))
    return path.read_bytes()

"""One guard before every route and method of the lab: what it does not let through, nobody sees.

A page of another site can send requests to a server on this machine, and by rebinding its name to
127.0.0.1 even read the answers. So every request has to name this server in `Host`, must not come
from another site (`Origin`, `Sec-Fetch-Site`), and must carry a cookie that scripts cannot read. A
browser gets it for the token in the printed address, which is good for one exchange.

Cookies ignore ports: a browser sends one to every server on 127.0.0.1 whose path it covers. So the
whole lab, and its cookie, lie below a prefix that nobody can guess. Prefix and cookie come from the
lab's secret, which outlives a restart (`ascent.server.lab_secret`): an open page goes on where it was. Elsewhere
there is nothing, and nothing is said about the lab.
"""

import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable
from html import escape
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response
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
    """Wraps the whole application. `hosts` are the names, with port, by which it may be called.

    `origin` is where it is: http://NAME:PORT. `opened` is called after each exchange: the address has a new token.
    """

    def __init__(
        self, app: ASGIApp, hosts: frozenset[str], secret: bytes, origin: str, opened: Callable[[], None] = lambda: None
    ):
        self.app, self.origin, self.opened = app, origin, opened
        self.hosts = hosts | {host.removesuffix(":80") for host in hosts}  # a browser leaves that port out
        port = min(hosts).rpartition(":")[2]
        self.root = prefix_of(secret, port)
        # A name that nobody can guess either: another server on this machine could set a cookie of a known name.
        self.cookie_name = f"ascent-lab-{_derived(secret, 'cookie name', port)[:16]}"
        self.cookie = _derived(secret, "cookie", port)
        self.token = new_token()

    @property
    def address(self) -> str:
        """What to open in a browser, once."""
        return f"{self.origin}/?token={self.token}"

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
        await (self.app if answer is None else answer)({**scope, "root_path": self.root}, receive, guarded)

    def check(self, scope: Scope) -> Response | None:
        """None for a request that may go on; else what it is told instead."""
        headers, method = Headers(scope=scope), scope["method"]
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        exchange = method == "GET" and scope["path"] == "/" and "token" in query
        if not exchange and not self._is_below_prefix(scope["path"]):
            return _refused(404, "There is nothing here.")
        if headers.get("host", "").lower() not in self.hosts or len(headers.getlist("host")) != 1:
            return _refused(403, "This server does not answer to that name. Use the address that `ascent lab` printed.")
        if method not in METHODS:
            return _refused(405, f"{method}: the lab knows {', '.join(METHODS)}.")
        why = self._foreign(headers, method, exchange)
        if why:
            return _refused(403, why)
        if exchange:
            return self._exchange(query)
        cookie = cookie_parser(headers.get("cookie", "")).get(self.cookie_name, "")  # among those of other servers
        if not hmac.compare_digest(cookie.encode(), self.cookie.encode()):
            return _refused(403, "This page needs the whole address that `ascent lab` printed last, with its token.")
        return None

    def _is_below_prefix(self, path: str) -> bool:
        first = "/" + path.removeprefix("/").partition("/")[0]
        return hmac.compare_digest(first.encode(), self.root.encode())

    def _foreign(self, headers: Headers, method: str, exchange: bool) -> str | None:
        """Why a request comes from elsewhere. A browser that says nothing of it is held to cookie and token alone.

        An exchange may come from another place, as from the file that opens the browser: who has the token may enter.
        """
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        entering = exchange and headers.get("sec-fetch-dest") in (None, "document")
        if site not in (None, "same-origin", "none") and not entering:
            return f"Sec-Fetch-Site is {site}: only the lab's own pages, and an address typed by hand, get through."
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.hosts}:
            return "The request comes from a page of another site."
        if method == "POST" and origin is None:
            return "A command has to say where it comes from: a browser's own Origin is missing."
        return None

    def _exchange(self, query: dict[str, str]) -> Response:
        """The cookie for the token, and a page that goes on by itself.

        It is not a redirect: along one that another site began, a browser does not send a strict cookie.
        """
        if not self._spend(query.pop("token")):
            return _refused(
                403,
                "That token is not valid, or no longer: it opens the lab once. Use the newest address in the terminal "
                "of `ascent lab`, which prints another one after each use.",
            )
        to = escape(f"{self.root}/" + (f"?{urlencode(query)}" if query else ""))
        answer = HTMLResponse(ONWARD.format(to=to))
        answer.set_cookie(self.cookie_name, self.cookie, httponly=True, samesite="strict", path=self.root)
        self.opened()
        return answer

    def _spend(self, token: str) -> bool:
        """Is that the token? Then it was: the next exchange needs another one."""
        right = hmac.compare_digest(token.encode(), self.token.encode())
        if right:
            self.token = new_token()
        return right


ONWARD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Ascent lab</title>
<meta http-equiv="refresh" content="0; url={to}"></head>
<body><p><a href="{to}">Ascent lab</a></p></body></html>
"""
"""A page that goes on to another address at once, without a script."""


def prefix_of(secret: bytes, port: int | str) -> str:
    """The path below which a lab lies. It has 128 bits."""
    return f"/{_derived(secret, 'prefix', port)[:32]}"


def new_token() -> str:
    return secrets.token_urlsafe(24)


def _derived(secret: bytes, purpose: str, port: int | str) -> str:
    return hmac.new(secret, f"ascent lab {purpose} {port}".encode(), hashlib.sha256).hexdigest()


def _refused(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status_code=status)


def host_names(host: str, port: int) -> frozenset[str]:
    """What a browser may call this server: the loopback names, and the one it was told to listen on."""
    return frozenset(f"{name}:{port}" for name in (*LOCAL, host_name(host)))


def host_name(host: str) -> str:
    """The name under which browsers reach an address, in lower case; this machine's own where it listens on all."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return name.lower()

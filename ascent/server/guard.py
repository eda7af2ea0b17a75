"""Access control of the lab: a middleware that checks every request.

A page of another site can send requests to a server on this machine, and by DNS rebinding even read the responses. So
every request has to name this server in `Host`, must not come from another site (`Origin`, `Sec-Fetch-Site`), and must
carry a cookie that scripts cannot read. A browser gets the cookie in exchange for the token in the printed address,
which is valid once.

Cookies ignore ports: a browser sends one to every server on 127.0.0.1 whose path it covers. So the whole lab and its
cookie are below an unguessable prefix. Prefix and cookie are derived from the lab's secret, which survives a restart
(`ascent.server.lab_secret`), so that open pages continue to work. Other paths return 404.
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
    """Wraps an application.

    Args:
        app: The application.
        hosts: The host names, with port, under which it may be requested.
        secret: The lab's secret.
        origin: Its address, http://NAME:PORT.
        opened: Called after each exchange of a token, because the address then has a new one.
    """

    def __init__(
        self, app: ASGIApp, hosts: frozenset[str], secret: bytes, origin: str, opened: Callable[[], None] = lambda: None
    ):
        self.app, self.origin, self.opened = app, origin, opened
        self.hosts = hosts | {host.removesuffix(":80") for host in hosts}  # browsers omit this port
        port = min(hosts).rpartition(":")[2]
        self.root = lab_prefix(secret, port)
        # The name is unguessable, too: another server on this machine could set a cookie with a known name.
        self.cookie_name = f"ascent-lab-{_derived(secret, 'cookie name', port)[:16]}"
        self.cookie = _derived(secret, "cookie", port)
        self.token = new_token()

    @property
    def address(self) -> str:
        """The address to open in a browser, valid once."""
        return f"{self.origin}/?token={self.token}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # web sockets are not supported
            return await send({"type": "websocket.close", "code": 1008})

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        response = self.check(scope)
        await (response or self.app)({**scope, "root_path": self.root}, receive, guarded)

    def check(self, scope: Scope) -> Response | None:
        """Return None for an allowed request, otherwise the response that refuses it."""
        headers, method = Headers(scope=scope), scope["method"]
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        exchange = method == "GET" and scope["path"] == "/" and "token" in query
        if not exchange and not self._is_below_prefix(scope["path"]):
            return _refused(404, "Not found.")
        if headers.get("host", "").lower() not in self.hosts or len(headers.getlist("host")) != 1:
            return _refused(
                403, "This server does not accept this host name. Use the address that `ascent lab` printed."
            )
        if method not in METHODS:
            return _refused(405, f"{method}: the lab accepts {', '.join(METHODS)}.")
        if reason := self._cross_site_reason(headers, method, exchange):
            return _refused(403, reason)
        if exchange:
            return self._exchange(query)
        cookie = cookie_parser(headers.get("cookie", "")).get(self.cookie_name, "")  # among cookies of other servers
        if not hmac.compare_digest(cookie.encode(), self.cookie.encode()):
            return _refused(403, "This page needs the whole address that `ascent lab` printed last, with its token.")
        return None

    def _is_below_prefix(self, path: str) -> bool:
        first = "/" + path.removeprefix("/").partition("/")[0]
        return hmac.compare_digest(first.encode(), self.root.encode())

    def _cross_site_reason(self, headers: Headers, method: str, exchange: bool) -> str | None:
        """Return why a request is cross-site, or None. Without the headers, only cookie and token are checked.

        The exchange of a token may come from elsewhere, such as from the file that opens the browser.
        """
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        is_navigation = exchange and headers.get("sec-fetch-dest") in (None, "document")
        if site not in (None, "same-origin", "none") and not is_navigation:
            return f"Sec-Fetch-Site is {site}: only the lab's pages and typed addresses are accepted."
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.hosts}:
            return "The request comes from a page of another site."
        if method == "POST" and origin is None:
            return "A POST request needs the Origin header that browsers send."
        return None

    def _exchange(self, query: dict[str, str]) -> Response:
        """Set the cookie for the token and return a page that opens the lab.

        It is not a redirect: after a redirect that another site started, browsers do not send a strict cookie.
        """
        if not self._spend(query.pop("token")):
            return _refused(
                403,
                "This token is not valid: a token opens the lab once. Use the newest address in the terminal "
                "of `ascent lab`, which prints another one after each use.",
            )
        to = escape(f"{self.root}/" + (f"?{urlencode(query)}" if query else ""))
        response = HTMLResponse(REDIRECT_PAGE.format(to=to))
        response.set_cookie(self.cookie_name, self.cookie, httponly=True, samesite="strict", path=self.root)
        self.opened()
        return response

    def _spend(self, token: str) -> bool:
        """Return whether this is the token, and replace it if so."""
        is_valid = hmac.compare_digest(token.encode(), self.token.encode())
        if is_valid:
            self.token = new_token()
        return is_valid


REDIRECT_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Ascent lab</title>
<meta http-equiv="refresh" content="0; url={to}"></head>
<body><p><a href="{to}">Ascent lab</a></p></body></html>
"""
"""A page that redirects without a script."""


def lab_prefix(secret: bytes, port: int | str) -> str:
    """Return the path prefix of a lab, with 128 random bits."""
    return f"/{_derived(secret, 'prefix', port)[:32]}"


def new_token() -> str:
    return secrets.token_urlsafe(24)


def _derived(secret: bytes, purpose: str, port: int | str) -> str:
    return hmac.new(secret, f"ascent lab {purpose} {port}".encode(), hashlib.sha256).hexdigest()


def _refused(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status_code=status)


def host_names(host: str, port: int) -> frozenset[str]:
    """Return the host names of this server: the loopback names and the name of its address."""
    return frozenset(f"{name}:{port}" for name in (*LOCAL, host_name(host)))


def host_name(host: str) -> str:
    """Return the host name of an address in lower case: this machine's name if it listens on all addresses."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return name.lower()

"""Sessions that are open: whose request it is, by its key and its session's name, and what it may ask for."""

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ascent.environments.chat_session import Session
from ascent.inference.request_queue import Completion, Request
from ascent.server.openai_format import ApiError

SESSIONS = 4096
"""Sessions of a server that are remembered; the one that was silent longest is forgotten for a new one."""
LONGEST_NAME = 200


@dataclass(frozen=True)
class SessionRules:
    """What is sampled, and how much of it."""

    context: int
    """Tokens of a conversation, its prompt counted."""
    prompt: int
    """Tokens of a prompt."""
    behind: int
    """Tokens behind a prompt."""
    turn_tokens: int = 0
    """The most tokens of a turn; 0: what the context leaves. So too with the next two."""
    drawn: int = 0
    """The most tokens of a session that are drawn."""
    turns: int = 0
    """The most turns of a session."""
    temperature: float = 1.0
    support: Any = None
    greedy: bool = False
    stop: tuple[str, ...] = ()
    fixed: bool = False
    """The settings above hold whatever the client asks for: a run's own, in training."""
    narrowed: Callable[[int, float, float], Any] | None = None
    """Makes a `support` of top-k, top-p and min-p."""
    coldest: float = 0.0
    """The lowest temperature above 0."""
    blurred: str = ""
    """Why log-probs cannot be known where a `support` is narrowed; empty: they are known."""


@dataclass(eq=False)
class OpenSession:
    """A session that is open."""

    session: Session
    rules: SessionRules
    busy: Request | None = None
    preparing: bool = False
    """A request is being rendered and tokenized."""
    reading: int = 0
    """Requests that are being read or answered."""
    closed: str = ""
    """Why nothing more is answered."""
    cut: str = ""
    """Which limit it has reached."""
    answered: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, read: list[int], done: Completion, waited: float) -> None:
        """A turn is over, and `read` came before it. Denied if the session was closed meanwhile: its record stands."""
        with self._lock:
            self.check_open()
            self.session.add(read, done.tokens, done.logp, done.kept_mass, waited)
            self.session.ended = done.finish_reason == "stop"
            self.answered, self.cut = time.monotonic(), ""

    def close(self, why: str) -> None:
        with self._lock:
            self.closed = why

    def check_open(self) -> None:
        if self.closed:
            raise ApiError(403, f"this session is closed: {self.closed}")

    def anew(self) -> None:
        """Another conversation begins."""
        self.session = Session(secrets.randbits(62))


class OpenSessions:
    """All of them. `key`: of the whole server; without one, sessions have keys of their own."""

    def __init__(self, rules: SessionRules, key: str, forget: Callable[[OpenSession], None]):
        self.rules, self._key, self._forget = rules, key.encode(), forget
        self._keyed: dict[str, OpenSession] = {}
        self._named: OrderedDict[str, OpenSession] = OrderedDict()

    def open(self, session: Session, rules: SessionRules) -> tuple[str, OpenSession]:
        """A session, and the key that reaches it."""
        key, live = f"sk-{secrets.token_urlsafe(24)}", OpenSession(session, rules)
        self._keyed[_digest(key.encode())] = live
        return key, live

    def close(self, key: str, why: str) -> OpenSession | None:
        """Nothing more is answered to this key."""
        live = self._keyed.pop(_digest(key.encode()), None)
        if live is not None:
            live.close(why)
        return live

    def new(self) -> OpenSession:
        """One that nobody can name."""
        return OpenSession(Session(secrets.randbits(62)), self.rules)

    def find(self, headers: Mapping[str, str]) -> OpenSession | None:
        """Whose request it is, by its key. A server's own key may name a session beside it; None: it does not."""
        if headers.get("origin") is not None or headers.get("sec-fetch-site") is not None:
            raise ApiError(403, "requests of web pages are not answered")
        scheme, _, rest = headers.get("authorization", "").encode("latin-1", "replace").partition(b" ")
        given = rest.strip() if scheme.lower() == b"bearer" else b""
        if self._key:
            if not hmac.compare_digest(given, self._key):
                raise ApiError(401, "the key of this server is missing or wrong", "invalid_api_key")
            return self._find_named(headers.get("x-session-id", ""))
        live = self._keyed.get(_digest(given))
        if live is None:
            raise ApiError(401, "this key belongs to no session that is open", "invalid_api_key")
        return live

    def _find_named(self, name: str) -> OpenSession | None:
        if not name:
            return None
        if len(name) > LONGEST_NAME:
            raise ApiError(400, f"X-Session-ID: at most {LONGEST_NAME} characters")
        if name not in self._named:
            if len(self._named) >= SESSIONS:
                idle = next((each for each, live in self._named.items() if live.busy is None), None)
                if idle is None:
                    raise ApiError(429, "too many sessions at once", "rate_limit", {"retry-after": "5"})
                self._forget(self._named.pop(idle))
            self._named[name] = self.new()
        self._named.move_to_end(name)
        return self._named[name]


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()

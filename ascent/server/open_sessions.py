"""Open sessions, found by the key and the session name of a request, and what a session may request."""

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException

from ascent.environments.chat_session import Session
from ascent.inference.request_queue import Completion, Request
from ascent.server.openai_responses import ApiError

MAX_NAMED_SESSIONS = 4096
"""Named sessions of a server. Beyond it, a new session replaces the least recently used idle one."""
MAX_NAME_CHARACTERS = 200


@dataclass(frozen=True)
class SessionSettings:
    """Sampling settings and limits of a session. A limit of 0 is the one that the context length implies."""

    context_length: int
    """Tokens of a conversation, its prompt included."""
    max_prompt_tokens: int
    max_response_tokens: int
    """Tokens after the prompt, sampled or observed."""
    max_turn_tokens: int = 0
    max_sampled_tokens: int = 0
    """Tokens that are sampled in all turns of a session."""
    max_turns: int = 0
    temperature: float = 1.0
    sampling_params: Any = None
    greedy: bool = False
    stop: tuple[str, ...] = ()
    fixed: bool = False
    """Ignore the sampling settings of clients, as in training."""
    make_sampling_params: Callable[[int, float, float], Any] | None = None
    """Makes `sampling_params` from top-k, top-p and min-p."""
    min_temperature: float = 0.0
    """The lowest temperature above 0 that the engine supports."""
    no_logprobs_reason: str = ""
    """Why the engine has no log-probs with top-k, top-p or min-p; empty if it has."""


@dataclass(eq=False)
class OpenSession:
    """A session that clients can reach."""

    session: Session
    settings: SessionSettings
    active_request: Request | None = None
    is_preparing: bool = False
    """A request is being rendered and tokenized."""
    num_http_requests: int = 0
    """HTTP requests that are being read or answered."""
    closed_reason: str = ""
    limit_reached: str = ""
    """The limit that refused the latest request."""
    answered_at: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, new_tokens: list[int], completion: Completion, waited: float) -> None:
        """Record a turn and the tokens before it. Raises if the session was closed: then its record is final."""
        with self._lock:
            self.check_open()
            self.session.record_turn(new_tokens, completion.tokens, completion.logp, completion.kept_mass, waited)
            self.session.ended = completion.finish_reason == "stop"
            self.answered_at, self.limit_reached = time.monotonic(), ""

    def close(self, reason: str) -> None:
        with self._lock:
            self.closed_reason = reason

    def check_open(self) -> None:
        if self.closed_reason:
            raise HTTPException(403, f"this session is closed: {self.closed_reason}")

    def restart(self) -> None:
        """Begin another conversation."""
        self.session = Session(secrets.randbits(62))


class OpenSessions:
    """All open sessions. `key`: the key of the whole server; without one, each session has its own key."""

    def __init__(self, settings: SessionSettings, key: str, forget: Callable[[OpenSession], None]):
        self.settings, self._key, self._forget = settings, key.encode(), forget
        self._keyed: dict[str, OpenSession] = {}
        self._named: OrderedDict[str, OpenSession] = OrderedDict()

    def open(self, session: Session, settings: SessionSettings) -> tuple[str, OpenSession]:
        """Open a session; return its key and the session."""
        key, open_session = f"sk-{secrets.token_urlsafe(24)}", OpenSession(session, settings)
        self._keyed[_digest(key.encode())] = open_session
        return key, open_session

    def close(self, key: str, reason: str) -> OpenSession | None:
        """Close the session of this key: further requests are refused."""
        open_session = self._keyed.pop(_digest(key.encode()), None)
        if open_session is not None:
            open_session.close(reason)
        return open_session

    def new_anonymous(self) -> OpenSession:
        """Return a session for a single request."""
        return OpenSession(Session(secrets.randbits(62)), self.settings)

    def find(self, headers: Mapping[str, str]) -> OpenSession | None:
        """Return the session of a request by its key, or by its name if the server has one key. None: no name."""
        if headers.get("origin") is not None or headers.get("sec-fetch-site") is not None:
            raise HTTPException(403, "requests from web pages are not accepted")
        scheme, _, credentials = headers.get("authorization", "").encode("latin-1", "replace").partition(b" ")
        key = credentials.strip() if scheme.lower() == b"bearer" else b""
        if self._key:
            if not hmac.compare_digest(key, self._key):
                raise ApiError(401, "the key of this server is missing or wrong", "invalid_api_key")
            return self._find_named(headers.get("x-session-id", ""))
        open_session = self._keyed.get(_digest(key))
        if open_session is None:
            raise ApiError(401, "this key belongs to no open session", "invalid_api_key")
        return open_session

    def _find_named(self, name: str) -> OpenSession | None:
        if not name:
            return None
        if len(name) > MAX_NAME_CHARACTERS:
            raise HTTPException(400, f"X-Session-ID: at most {MAX_NAME_CHARACTERS} characters")
        if name not in self._named:
            if len(self._named) >= MAX_NAMED_SESSIONS:
                idle = next((key for key, session in self._named.items() if session.active_request is None), None)
                if idle is None:
                    raise HTTPException(429, "too many sessions at once", {"retry-after": "5"})
                self._forget(self._named.pop(idle))
            self._named[name] = self.new_anonymous()
        self._named.move_to_end(name)
        return self._named[name]


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()

"""Requests: turns that others ask of a sampler while it decodes, from threads of their own.

    a client's thread ── submit, cancel, forget ──> Desk ──> the thread that decodes
                      <── tell(Drew), tell(Done) ──────────

A request brings all that its turn depends on: the tokens before it, a seed and settings. What a sampler keeps between
two requests of a conversation (its keys and values) saves work and changes no number: token t of a response depends on
its seed and on t, whoever else is decoded beside it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ascent.core.errors import RunError

GLANCE = 1.0
"""Seconds of one wait for requests."""


class CompletionDelta(NamedTuple):
    """Tokens of a turn that goes on."""

    tokens: list[int]
    logp: list[float]


class Completion(NamedTuple):
    """A turn that is over, whole."""

    tokens: list[int]
    logp: list[float]
    """Over the full vocabulary, at the sampling temperature."""
    mass: list[float]
    """Probability of what could be drawn; 1 where nothing was cut."""
    ended: bool
    """By an end token or a stop string, and not by its limit."""
    version: int
    error: str = ""
    """Why nothing was drawn: the sampler failed."""


@dataclass(eq=False)
class Request:
    """One turn that is asked for."""

    prompt: list[int]
    response: list[int]
    """What follows the prompt so far, drawn or given."""
    seed: int
    limit: int
    """The most tokens of the turn."""
    tell: Callable[[CompletionDelta | Completion], None]
    """Called by the thread that decodes."""
    conversation: Any = None
    """Whose turn it is: the next one of the same conversation continues where this ends. None: there is no next one."""
    temperature: float = 1.0
    support: Any = None
    """Which tokens may be drawn (`draw.Support`); None: the sampler's own."""
    greedy: bool = False
    stop: tuple[str, ...] = ()
    watched: bool = False
    """Is it told of tokens before the turn is over?"""


class RecordedConversation(NamedTuple):
    """What was asked and drawn in one conversation, token by token."""

    prompt: list[int]
    response: list[int]
    """All that follows the prompt."""
    drawn: list[bool]
    """Which of those the policy drew; so too the next ones."""
    logp: list[float]
    mass: list[float]
    turn: list[int]
    waited: list[float]
    truncated: bool
    valid: bool
    note: str


class QueueFullError(Exception):
    """There are as many requests as are taken at once."""


class QueueUpdate(NamedTuple):
    """What has come to a desk since the last look."""

    requests: list[Request]
    cancelled: list[Request]
    forgotten: list[Any]


class RequestQueue:
    """Where requests wait for the sampler, and from where it says what it drew."""

    def __init__(self, most: int):
        """`most`: requests that are waiting or under way at once."""
        self.most = most
        self.active: set[Request] = set()
        self.closed = False
        self._changed = threading.Condition()
        self._new: deque[Request] = deque()
        self._cancelled: list[Request] = []
        self._forgotten: list[Any] = []

    def submit(self, request: Request) -> None:
        with self._changed:
            if self.closed:
                raise RunError("nothing is sampled any more")
            if len(self.active) >= self.most:
                raise QueueFullError
            self.active.add(request)
            self._new.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Nobody waits for this turn any more."""
        with self._changed:
            if request in self.active:
                self.active.remove(request)
                self._cancelled.append(request)
                self._changed.notify()

    def forget(self, conversation: Any) -> None:
        """Nothing more will be asked in this conversation."""
        with self._changed:
            self._forgotten.append(conversation)
            self._changed.notify()

    def close(self) -> None:
        """Nothing more is asked for; who still waits is told so."""
        with self._changed:  # before anybody is told: who then asks again would wait for ever
            self.closed = True
            self._changed.notify()
        self.fail("the sampler has ended")

    def fail(self, why: str) -> None:
        """Whoever waits is told that nothing will come."""
        with self._changed:
            waiting, self.active, self._new = list(self.active), set(), deque()
        for request in waiting:
            request.tell(Completion([], [], [], False, -1, why))

    # ---- the thread that decodes

    def take(self, wait: bool) -> QueueUpdate:
        """What has come; `wait`: for a moment, if nothing has."""
        with self._changed:
            if wait and not (self._new or self._cancelled or self._forgotten or self.closed):
                self._changed.wait(GLANCE)
            taken = QueueUpdate(list(self._new), self._cancelled, self._forgotten)
            self._new, self._cancelled, self._forgotten = deque(), [], []
            return taken

    def done(self, request: Request, done: Completion) -> None:
        with self._changed:
            if request not in self.active:  # it was cancelled
                return
            self.active.remove(request)
        request.tell(done)

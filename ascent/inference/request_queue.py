"""Generation requests: the thread-safe queue between clients and the thread that decodes.

    client threads ── submit, cancel, end_conversation ──> RequestQueue ── poll ──> decode thread
                   <── on_output(CompletionDelta), on_output(Completion) ──────────

A request carries everything that its completion depends on: the tokens before it, a seed, and sampling parameters.
The keys and values that an engine caches between two requests of a conversation save work and change no token: token t
of a response depends only on its seed and on t, not on the rest of the batch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ascent.core.errors import RunError

POLL_SECONDS = 1.0
"""Maximum time that `RequestQueue.poll` blocks."""


FinishReason = Literal["stop", "length", "error"]


class CompletionDelta(NamedTuple):
    """New tokens of a streamed completion."""

    tokens: list[int]
    logp: list[float]


class Completion(NamedTuple):
    """The result of a request."""

    tokens: list[int]
    logp: list[float]
    """Log-probs over the full vocabulary, at the sampling temperature."""
    kept_mass: list[float]
    """Probability mass kept by top-k, top-p and min-p; 1 where nothing was truncated."""
    finish_reason: FinishReason
    """stop: an end token or a stop string; length: `max_tokens`; error: the engine failed."""
    version: int
    """Version of the policy that generated the tokens; −1 after an error."""
    error: str = ""

    @classmethod
    def failed(cls, error: str) -> Completion:
        return cls([], [], [], "error", -1, error)


@dataclass(eq=False)
class Request:
    """A request for one completion: one turn of a conversation."""

    prompt: list[int]
    response: list[int]
    """Tokens that follow the prompt so far: earlier turns and observations."""
    seed: int
    """The seed of the whole response; all turns of a conversation share it."""
    max_tokens: int
    on_output: Callable[[CompletionDelta | Completion], None]
    """Callback for results. It runs in the decode thread."""
    conversation_id: Any = None
    """The next request with the same id continues where this one ends. None: no request follows."""
    temperature: float = 1.0
    sampling_params: Any = None
    """`SamplingParams`; None: the default of the engine."""
    greedy: bool = False
    stop: tuple[str, ...] = ()
    stream: bool = False
    """Deliver a `CompletionDelta` as tokens are generated, before the `Completion`."""


class RecordedConversation(NamedTuple):
    """The tokens of a whole conversation."""

    prompt: list[int]
    response: list[int]
    """All tokens after the prompt. The fields below up to `waited` have one entry per token of it."""
    sampled: list[bool]
    """True for tokens that the policy sampled, False for observations."""
    logp: list[float]
    kept_mass: list[float]
    turn: list[int]
    waited: list[float]
    truncated: bool
    valid: bool
    note: str


class QueueFullError(Exception):
    """The queue already holds `max_requests` active requests."""


class QueueUpdate(NamedTuple):
    """Events since the last `RequestQueue.poll`."""

    requests: list[Request]
    cancelled: list[Request]
    ended_conversations: list[Any]


class RequestQueue:
    """Thread-safe queue of requests. Clients submit; the decode thread polls and delivers results."""

    def __init__(self, max_requests: int):
        """`max_requests`: limit on requests that are waiting or running."""
        self.max_requests = max_requests
        self.active: set[Request] = set()
        self.closed = False
        self._changed = threading.Condition()
        self._new: deque[Request] = deque()
        self._cancelled: list[Request] = []
        self._ended_conversations: list[Any] = []

    def submit(self, request: Request) -> None:
        with self._changed:
            if self.closed:
                raise RunError("the request queue is closed")
            if len(self.active) >= self.max_requests:
                raise QueueFullError
            self.active.add(request)
            self._new.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Cancel a request: its callback is not called any more."""
        with self._changed:
            if request in self.active:
                self.active.remove(request)
                self._cancelled.append(request)
                self._changed.notify()

    def end_conversation(self, conversation_id: Any) -> None:
        """Release the cached keys and values of a conversation that gets no further request."""
        with self._changed:
            self._ended_conversations.append(conversation_id)
            self._changed.notify()

    def close(self) -> None:
        """Reject new requests and fail the active ones."""
        with self._changed:  # close before the callbacks run: one that resubmits must get an error, not wait forever
            self.closed = True
            self._changed.notify()
        self.fail("the request queue was closed")

    def fail(self, reason: str) -> None:
        """Complete all active requests with an error."""
        with self._changed:
            failed, self.active, self._new = list(self.active), set(), deque()
        for request in failed:
            request.on_output(Completion.failed(reason))

    # ---- called by the decode thread

    def poll(self, wait: bool) -> QueueUpdate:
        """Return the events since the last call; with `wait`, block up to `POLL_SECONDS` if there are none."""
        with self._changed:
            if wait and not (self._new or self._cancelled or self._ended_conversations or self.closed):
                self._changed.wait(POLL_SECONDS)
            update = QueueUpdate(list(self._new), self._cancelled, self._ended_conversations)
            self._new, self._cancelled, self._ended_conversations = deque(), [], []
            return update

    def finish(self, request: Request, completion: Completion) -> None:
        """Deliver the completion, unless the request was cancelled."""
        with self._changed:
            if request not in self.active:
                return
            self.active.remove(request)
        request.on_output(completion)

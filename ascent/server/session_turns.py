"""Turns of sessions: submitted to the request queue, cancelled when their client leaves, and recorded when they end."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from ascent.environments.chat_session import ChatRenderer, HistoryMismatchError, InvalidMessageError, Session
from ascent.environments.tool_call_formats import Schema
from ascent.environments.turn_parser import AssistantTurn, TokenParser
from ascent.inference.request_queue import Completion, CompletionDelta, Request, RequestQueue
from ascent.server.connections import wait_for_disconnect
from ascent.server.open_sessions import OpenSession, OpenSessions, SessionSettings
from ascent.server.openai_requests import SamplingFields
from ascent.server.openai_responses import ApiError

LARGE_REQUEST_CHARACTERS = 16_384
"""Requests from this size on are rendered and tokenized in a worker thread, so that other clients do not wait."""
MAX_GREEDY_TEMPERATURE = 1e-4
"""Below this temperature, decoding is greedy."""
NO_LIMIT = 2**30
Event = CompletionDelta | Completion
Events = asyncio.Queue[Event | None]
"""What the decode thread reports about a turn. None: the client has disconnected."""


@dataclass(frozen=True)
class TurnInput:
    """What a request adds to its session: messages, or a prompt as text or token ids."""

    messages: list[dict[str, Any]] | None = None
    tools: Sequence[Schema] = ()
    prompt: str | list[int] = ""
    num_characters: int = 0
    """The approximate size of the text to render and tokenize."""

    def extend(self, session: Session, renderer: ChatRenderer) -> list[int]:
        """Return the tokens between the session's last turn and the next one."""
        if self.messages is None:
            return session.extend_with_tokens(renderer.encode(self.prompt))
        return session.extend_with_messages(self.messages, self.tools, renderer)


@dataclass(eq=False)
class PendingTurn:
    """A turn that was submitted and is not over."""

    open_session: OpenSession
    turn_input: TurnInput
    new_tokens: list[int]
    """The tokens before the turn that are not recorded yet."""
    request: Request
    parser: TokenParser
    events: Events
    waited: float
    """Seconds since the session's last turn ended."""
    session_state: str

    @property
    def input_ids(self) -> list[int]:
        """All tokens before the turn."""
        return self.request.prompt + self.request.response

    @property
    def headers(self) -> dict[str, str]:
        return {"x-ascent-session": self.session_state}

    def usage(self, completion: Completion) -> dict[str, int]:
        before, sampled = len(self.input_ids), len(completion.tokens)
        return {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}

    def record_reply(self, reply: AssistantTurn) -> None:
        """Record what the client now knows of the conversation."""
        messages = self.turn_input.messages
        reply = AssistantTurn() if messages is None else reply
        self.open_session.session.record_messages(messages, self.turn_input.tools, reply)


class SessionTurns:
    """Runs the turns of sessions through a request queue."""

    def __init__(self, queue: RequestQueue, renderer: ChatRenderer, sessions: OpenSessions, counts: dict[str, int]):
        self.queue, self.renderer, self.sessions, self.counts = queue, renderer, sessions, counts
        self._worker_renderer = renderer.for_thread()
        self._worker = ThreadPoolExecutor(1, "ascent tokenizer")
        self._dispatcher = EventDispatcher()

    async def submit(
        self, open_session: OpenSession | None, fields: SamplingFields, turn_input: TurnInput
    ) -> PendingTurn:
        """Render, tokenize and submit a turn. `open_session`: None for a request without a session."""
        is_single = open_session is None
        open_session = open_session or self.sessions.new_anonymous()
        if open_session.active_request is not None or open_session.is_preparing:
            raise HTTPException(409, "this session has an active request: a conversation has one turn at a time")
        open_session.check_open()
        session_before, open_session.is_preparing = open_session.session, True
        loop, is_large = asyncio.get_running_loop(), turn_input.num_characters > LARGE_REQUEST_CHARACTERS
        renderer = self._worker_renderer if is_large else self.renderer
        prepare = partial(self._prepare, loop, open_session, is_single, fields, turn_input, renderer)
        try:
            turn = await loop.run_in_executor(self._worker, prepare) if is_large else prepare()
            self.queue.submit(turn.request)
            open_session.active_request = turn.request
        except BaseException:
            open_session.session = session_before  # a refused request does not restart the session
            raise
        finally:
            open_session.is_preparing = False
        if open_session.closed_reason:  # closed by another thread before the request was active
            self.abandon(turn)
            open_session.check_open()
        return turn

    def _prepare(
        self,
        loop: asyncio.AbstractEventLoop,
        open_session: OpenSession,
        is_single: bool,
        fields: SamplingFields,
        turn_input: TurnInput,
        renderer: ChatRenderer,
    ) -> PendingTurn:
        """Render and tokenize a turn and check its limits. Runs in a worker thread for large requests."""
        session_state = "extended" if open_session.session.num_turns else "new"
        try:
            if open_session.session.mismatch:
                raise HistoryMismatchError(open_session.session.mismatch)
            new_tokens = turn_input.extend(open_session.session, renderer)
        except HistoryMismatchError as error:
            new_tokens, session_state = self._restart(open_session, error, turn_input, renderer), "rewritten"
        session, settings = open_session.session, open_session.settings
        if settings.fixed:
            session.ignored_settings.update(fields.for_record())
        elif not session.num_turns and fields.seed is not None:
            session.seed = fields.seed % 2**62
        prompt, response = (session.prompt, session.response + new_tokens) if session.num_turns else (new_tokens, [])
        max_tokens = max_turn_tokens(open_session, prompt, response, fields.max_new_tokens)
        events = Events()
        sampling = {
            "temperature": settings.temperature,
            "sampling_params": settings.sampling_params,
            "greedy": settings.greedy,
        }
        request = Request(
            prompt,
            response,
            session.seed,
            max_tokens,
            lambda event: self._dispatcher.send(loop, events, event),
            conversation_id=None if is_single else open_session,
            stop=tuple(dict.fromkeys((*settings.stop, *fields.stop))),
            stream=bool(fields.stream),
            **sampling if settings.fixed else sampling | client_sampling(fields, settings),
        )
        input_ids = None if turn_input.messages is None else prompt + response
        parser = renderer.make_parser(
            turn_input.tools, request.stop, input_ids, single_call=fields.parallel_tool_calls is False
        )
        waited = time.monotonic() - open_session.answered_at
        return PendingTurn(open_session, turn_input, new_tokens, request, parser, events, waited, session_state)

    def _restart(
        self, open_session: OpenSession, error: HistoryMismatchError, turn_input: TurnInput, renderer: ChatRenderer
    ) -> list[int]:
        """Handle a history that differs from the record: a served session restarts, an episode becomes invalid."""
        if not open_session.session.mismatch:
            self.counts["rewritten"] += 1
        if open_session.settings.fixed:
            open_session.session.mismatch = str(error)
            message = f"the history was rewritten, so this episode is not valid: {error}"
            raise ApiError(400, message, "rewritten") from None
        self.queue.end_conversation(open_session)
        open_session.restart()
        return turn_input.extend(open_session.session, renderer)

    async def events(self, receive: Receive, turn: PendingTurn) -> AsyncGenerator[Event]:
        """Yield the events of a turn and record it when it ends. If the client disconnects before, cancel it."""
        disconnect, open_session = asyncio.ensure_future(wait_for_disconnect(receive)), turn.open_session
        disconnect.add_done_callback(lambda _: turn.events.put_nowait(None))
        try:
            while open_session.active_request is turn.request:
                event = await turn.events.get()
                if event is None or disconnect.done():  # a client that has left may send the request again
                    raise ClientDisconnect
                if isinstance(event, Completion):
                    open_session.active_request = None
                    if event.error:
                        raise HTTPException(503, event.error)
                    open_session.record(turn.new_tokens, event, turn.waited)
                yield event
        finally:
            disconnect.cancel()
            self.abandon(turn)

    def abandon(self, turn: PendingTurn) -> None:
        """Cancel a turn that is not over; nothing of it is recorded."""
        if turn.open_session.active_request is turn.request:
            turn.open_session.active_request = None
            self.counts["cancelled"] += 1
            self.queue.cancel(turn.request)


def max_turn_tokens(open_session: OpenSession, prompt: list[int], response: list[int], requested: int | None) -> int:
    """Return the most tokens of the next turn. Raises if a limit of the session leaves none."""
    settings, session = open_session.settings, open_session.session
    if not prompt:
        raise InvalidMessageError("the prompt has no tokens")
    if len(prompt) > settings.max_prompt_tokens:
        message = f"the prompt has {len(prompt)} tokens, and at most {settings.max_prompt_tokens} are allowed"
        raise ApiError(400, message, "context_length_exceeded")
    context = (
        f"the conversation has {len(prompt) + len(response)} tokens, and the context length with the completion is "
        f"{settings.context_length}"
    )
    max_sampled, max_turns = settings.max_sampled_tokens, settings.max_turns
    remaining = {
        context: min(settings.context_length - len(prompt), settings.max_response_tokens) - len(response),
        f"the limit of {max_sampled} tokens": max_sampled - sum(session.sampled) if max_sampled else NO_LIMIT,
        f"the limit of {max_turns} turns": 0 if max_turns and session.num_turns >= max_turns else NO_LIMIT,
    }
    limit, num_tokens = min(remaining.items(), key=lambda item: item[1])
    if num_tokens < 1:
        open_session.limit_reached = open_session.limit_reached or limit
        raise ApiError(400, limit, "context_length_exceeded")
    return min(num_tokens, requested or NO_LIMIT, settings.max_turn_tokens or NO_LIMIT)


def client_sampling(fields: SamplingFields, settings: SessionSettings) -> dict[str, Any]:
    """Return the sampling settings that a client sets. Raises for those that the server does not support."""
    if unsupported := list(fields.unsupported):
        raise InvalidMessageError(f"{unsupported[0]}: this server does not support this setting")
    sampling: dict[str, Any] = {}
    if fields.temperature is not None:
        greedy = fields.temperature < MAX_GREEDY_TEMPERATURE
        sampling |= {"greedy": greedy, "temperature": 1.0 if greedy else fields.temperature}
        if not greedy and fields.temperature < settings.min_temperature:
            lowest = f"{settings.min_temperature:g}"
            raise InvalidMessageError(
                f"temperature: should be 0, or at least {lowest} with the engine of this server, got "
                f"{fields.temperature:g}"
            )
    if fields.truncates and settings.make_sampling_params is not None:
        top_p = 1.0 if fields.top_p is None else fields.top_p
        sampling["sampling_params"] = settings.make_sampling_params(
            max(fields.top_k or 0, 0), top_p, fields.min_p or 0.0
        )
    params = sampling.get("sampling_params", settings.sampling_params)
    if fields.wants_logprobs and settings.no_logprobs_reason and params is not None and not params.unrestricted:
        raise InvalidMessageError(f"logprobs with top_k, top_p or min_p: {settings.no_logprobs_reason}")
    return sampling


class EventDispatcher:
    """Passes events from the decode thread to event loops. A loop is woken once for all events until it runs."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Events, Event]] = deque()
        self._woken: asyncio.AbstractEventLoop | None = None

    def send(self, loop: asyncio.AbstractEventLoop, events: Events, event: Event) -> None:
        self._pending.append((events, event))
        if self._woken is not loop:
            self._woken = loop
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = None  # later events wake the loop again
        while self._pending:
            events, event = self._pending.popleft()
            with suppress(RuntimeError):  # the loop of these events has ended
                events.put_nowait(event)

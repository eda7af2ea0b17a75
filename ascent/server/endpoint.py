"""The OpenAI-compatible endpoint of a policy: an ASGI application.

    GET  /v1/models
    POST /v1/chat/completions     messages in, a message out; tools; streamed or whole
    POST /v1/completions          text or tokens in, text out
    POST /inference/v1/generate   tokens in and out, in vLLM's format

It checks keys and limits, validates requests and submits turns to the request queue; sessions keep the record
(environments/chat_session.py). The key of a request alone decides which session it reaches, and is checked before the
body is read.
"""

import secrets
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ascent.core.errors import ConfigError, RunError
from ascent.environments.chat_session import ChatRenderer, InvalidMessageError, Session
from ascent.environments.turn_parser import AssistantTurn
from ascent.inference.request_queue import Completion, QueueFullError, RequestQueue
from ascent.server.connections import Connection
from ascent.server.event_stream import FormatLogprobs, TurnStream
from ascent.server.open_sessions import OpenSession, OpenSessions, SessionSettings
from ascent.server.openai_requests import (
    MAX_BODY_BYTES,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    SamplingFields,
    read_request,
)
from ascent.server.openai_responses import ApiError, ResponseFrame, finish_reason, format_message, render_api_error
from ascent.server.session_turns import PendingTurn, SessionTurns, TurnInput

MAX_CHARACTERS_PER_TOKEN = 64
"""Longer texts are refused without tokenizing them, because they cannot fit the context."""
MAX_BYTES_PER_CHARACTER, OVERHEAD_BYTES = 6, 2**18
"""Bytes of a character escaped in JSON; bytes of a request besides its text."""
MAX_SESSION_REQUESTS = 4
"""HTTP requests of one session at once. All but one are answered with 409."""
Handler = Callable[[Request, OpenSession | None], Awaitable[Response]]


class EndpointConnection(Connection):
    """Connections of the endpoint: each agent has its own, and all of them come from one machine."""

    max_peer_connections, max_connections = 2048, 4096


class Endpoint:
    """The application. `key`: the key of the whole server; without one, each session has its own key (`open`)."""

    def __init__(
        self,
        queue: RequestQueue,
        renderer: ChatRenderer,
        settings: SessionSettings,
        vocab_size: int,
        name: str = "policy",
        key: str = "",
    ):
        self.renderer, self.settings, self.vocab_size, self.name = renderer, settings, vocab_size, name
        self.sessions = OpenSessions(settings, key, lambda open_session: self.queue.end_conversation(open_session))
        self.counts = {"requests": 0, "refused": 0, "rewritten": 0, "cancelled": 0}
        self.turns = SessionTurns(queue, renderer, self.sessions, self.counts)
        text_bytes = MAX_BYTES_PER_CHARACTER * MAX_CHARACTERS_PER_TOKEN * settings.context_length
        self.max_body_bytes = min(MAX_BODY_BYTES, OVERHEAD_BYTES + text_bytes)
        self._num_http_requests = 0
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/v1/models"): self._list_models,
            ("GET", f"/v1/models/{name}"): self._get_model,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/inference/v1/generate"): self._generate,
        }
        errors = (HTTPException, InvalidMessageError, ConfigError, QueueFullError, RunError)
        self._application = ExceptionMiddleware(self._respond, dict.fromkeys(errors, self._render_error))

    @property
    def queue(self) -> RequestQueue:
        return self.turns.queue

    # ---- sessions with their own keys, for training runs: called from other threads

    def open(self, session: Session, settings: SessionSettings) -> tuple[str, OpenSession]:
        """Open a session; return its key and the session."""
        return self.sessions.open(session, settings)

    def close(self, key: str, reason: str) -> None:
        """Close the session of this key and end its active request."""
        open_session = self.sessions.close(key, reason)
        if open_session is None:
            return
        if (request := open_session.active_request) is not None:
            self.queue.cancel(request)
            request.on_output(Completion.failed(reason))
        self.queue.end_conversation(open_session)

    # ---- the application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.counts["requests"] += 1
            with suppress(ClientDisconnect):
                await self._application(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        open_session = self.sessions.find(request.headers)
        handler = self._find_handler(request.method, scope["path"])
        if open_session is not None and open_session.num_http_requests >= MAX_SESSION_REQUESTS:
            raise HTTPException(429, "too many requests of this session at once")
        if self._num_http_requests >= MAX_SESSION_REQUESTS * self.queue.max_requests:
            raise HTTPException(429, "too many requests at once")
        self._num_http_requests += 1
        if open_session is not None:
            open_session.num_http_requests += 1
        try:
            response = await handler(request, open_session)
        finally:
            self._num_http_requests -= 1
            if open_session is not None:
                open_session.num_http_requests -= 1
        await response(scope, receive, send)

    def _find_handler(self, method: str, path: str) -> Handler:
        handler = self._routes.get((method, path))
        if handler is None:
            route = f"{method[:20]} {path[:200]}"
            if allowed := [allowed for allowed, known_path in self._routes if known_path == path]:
                raise HTTPException(405, f"{route}: use {allowed[0]}", {"allow": allowed[0]})
            raise HTTPException(404, f"{route}: not found")
        return handler

    async def _render_error(self, request: Request, error: Exception) -> Response:
        self.counts["refused"] += 1
        return render_api_error(error)

    # ---- routes

    @property
    def model(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "ascent"}
        return model | {"max_model_len": self.settings.context_length}

    async def _list_models(self, request: Request, open_session: OpenSession | None) -> Response:
        return JSONResponse({"object": "list", "data": [self.model]})

    async def _get_model(self, request: Request, open_session: OpenSession | None) -> Response:
        return JSONResponse(self.model)

    async def _chat(self, request: Request, open_session: OpenSession | None) -> Response:
        body = await read_request(request, ChatRequest, self.max_body_bytes)
        num_characters = self._check_length(body.num_characters)
        messages = [message.for_template() for message in body.messages]
        turn_input = TurnInput(messages, body.offered_tools, num_characters=num_characters)
        turn, frame = (
            await self.turns.submit(open_session, body, turn_input),
            ResponseFrame(self.name, "chatcmpl", "chat.completion"),
        )
        if body.stream:
            return TurnStream(self.turns, turn, body, frame, self._format_logprobs)
        completion, reply = await self._complete_turn(request, turn)
        choice = {"message": format_message(reply), "finish_reason": finish_reason(completion, reply)}
        return self._respond_whole(turn, body, frame({}), choice, completion, self._format_logprobs)

    async def _complete(self, request: Request, open_session: OpenSession | None) -> Response:
        body = await read_request(request, CompletionRequest, self.max_body_bytes)
        if isinstance(body.prompt, str):
            turn_input = TurnInput(prompt=body.prompt, num_characters=self._check_length(len(body.prompt)))
        else:
            turn_input = TurnInput(prompt=self._check_ids(body.prompt, "prompt"))
        turn, frame = (
            await self.turns.submit(open_session, body, turn_input),
            ResponseFrame(self.name, "cmpl", "text_completion"),
        )
        if body.stream:
            return TurnStream(self.turns, turn, body, frame, self._format_text_logprobs)
        completion, reply = await self._complete_turn(request, turn)
        choice = {"text": reply.content, "finish_reason": finish_reason(completion)}
        return self._respond_whole(turn, body, frame({}), choice, completion, self._format_text_logprobs)

    async def _generate(self, request: Request, open_session: OpenSession | None) -> Response:
        body = await read_request(request, GenerateRequest, self.max_body_bytes)
        turn_input = TurnInput(prompt=self._check_ids(body.token_ids, "token_ids"))
        turn = await self.turns.submit(open_session, body.sampling_params, turn_input)
        completion, _ = await self._complete_turn(request, turn, parse=False)
        choice = {"token_ids": completion.tokens, "finish_reason": finish_reason(completion)}
        name = {"request_id": body.request_id or f"gen-{secrets.token_hex(12)}"}
        return self._respond_whole(turn, body.sampling_params, name, choice, completion, format_id_logprobs)

    async def _complete_turn(
        self, request: Request, turn: PendingTurn, parse: bool = True
    ) -> tuple[Completion, AssistantTurn]:
        """Wait for the whole turn; return its completion and what it parses to."""
        async with aclosing(self.turns.events(request.receive, turn)) as events:
            async for event in events:
                if isinstance(event, Completion):
                    if parse:
                        turn.parser.feed(event.tokens), turn.parser.end()
                    turn.record_reply(turn.parser.turn)
                    return event, turn.parser.turn
        raise ClientDisconnect

    def _respond_whole(
        self,
        turn: PendingTurn,
        fields: SamplingFields,
        body: dict[str, Any],
        choice: dict[str, Any],
        completion: Completion,
        format_logprobs: FormatLogprobs,
    ) -> Response:
        logprobs = format_logprobs(completion.tokens, completion.logp) if fields.wants_logprobs else None
        choice = {"index": 0, **choice, "logprobs": logprobs}
        if fields.return_token_ids:
            choice["token_ids"], body["prompt_token_ids"] = completion.tokens, turn.input_ids
        return JSONResponse(body | {"choices": [choice], "usage": turn.usage(completion)}, headers=turn.headers)

    # ---- prompts and log-probs

    def _check_length(self, num_characters: int) -> int:
        context_length = self.settings.context_length
        if num_characters > MAX_CHARACTERS_PER_TOKEN * context_length:
            message = f"{num_characters} characters do not fit the context length of {context_length} tokens"
            raise ApiError(400, message, "context_length_exceeded")
        return num_characters

    def _check_ids(self, ids: list[int], field: str) -> list[int]:
        context_length = self.settings.context_length
        if len(ids) > context_length:
            message = f"{field}: {len(ids)} tokens, and the context length is {context_length}"
            raise ApiError(400, message, "context_length_exceeded")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise HTTPException(400, f"{field}: token ids should be from 0 to {self.vocab_size - 1}")
        return ids

    def _format_logprobs(self, tokens: list[int], logp: list[float]) -> dict[str, Any]:
        """Format log-probs as /v1/chat/completions does."""
        content = []
        for token, value in zip(tokens, logp, strict=True):
            text = self.renderer.decode([token], special=True)
            content.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content}

    def _format_text_logprobs(self, tokens: list[int], logp: list[float]) -> dict[str, Any]:
        """Format log-probs as /v1/completions does."""
        texts = [self.renderer.decode([token], special=True) for token in tokens]
        return {"tokens": texts, "token_logprobs": logp, "top_logprobs": None}


def format_id_logprobs(tokens: list[int], logp: list[float]) -> dict[str, Any]:
    """Format log-probs as vLLM's /inference/v1/generate does."""
    pairs = zip(tokens, logp, strict=True)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in pairs
        ]
    }

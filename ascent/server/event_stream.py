"""A turn as server-sent events: what is certain is told at once, with the tokens that it is made of."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ascent.environments.turn_parser import AssistantTurn, TokenReader
from ascent.inference.request_queue import Completion, CompletionDelta
from ascent.server.openai_format import CompletionParams, Frame, event_of, reason_of, tool_call_of

Send = Callable[[Any], Awaitable[None]]
Logprobs = Callable[[list[int], list[float]], dict[str, Any]]
"""Tokens with their log-probs, as the answer shows them."""


class TurnStream:
    """The events of one turn. `reader`: what a client is told of the tokens."""

    def __init__(self, send: Send, frame: Frame, wish: CompletionParams, reader: TokenReader, logprobs: Logprobs):
        self.send, self.frame, self.wish, self.reader, self.logprobs = send, frame, wish, reader, logprobs
        self.chat, self._calls, self._shown = frame.kind == "chat.completion", 0, 0
        self._tokens: list[int] = []
        self._logp: list[float] = []

    async def begin(self, headers: Mapping[str, str], prompt: list[int]) -> None:
        kind = {"content-type": "text/event-stream", "cache-control": "no-cache"}
        encoded = [(name.encode(), value.encode()) for name, value in (kind | dict(headers)).items()]
        await self.send({"type": "http.response.start", "status": 200, "headers": encoded})
        more: dict[str, Any] = {"prompt_token_ids": prompt} if self.wish.ids else {}
        if self.chat:
            await self._put({"delta": {"role": "assistant", "content": ""}}, **more)
        elif more:
            await self._put({"text": ""}, **more)

    async def tell(self, drew: CompletionDelta) -> None:
        """Tokens have come."""
        self._tokens += drew.tokens
        self._logp += drew.logp
        await self._say(self.reader.feed(drew.tokens))

    def finish(self, done: Completion) -> AssistantTurn:
        """The turn is over: what is left of it, which `end` tells."""
        told = self.reader.feed(done.tokens[len(self._tokens) :])
        self._tokens, self._logp = done.tokens, done.logp
        rest = self.reader.end()
        return AssistantTurn(told.content + rest.content, told.reasoning + rest.reasoning, told.calls + rest.calls)

    async def end(self, rest: AssistantTurn, done: Completion, usage: dict[str, int]) -> None:
        """What is left, why the turn has ended, and what it used."""
        await self._say(rest)
        reason = reason_of(done, self.reader.whole)
        nothing: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        await self._put(nothing | {"finish_reason": reason}, self._part())
        if self.wish.usage:
            await self._event(choices=[], usage=usage)
        await self.done()

    async def fail(self, words: str, code: str) -> None:
        error = {"message": words, "type": "server_error", "param": None, "code": code or None}
        await self.send({"type": "http.response.body", "body": event_of({"error": error}), "more_body": True})
        await self.done()

    async def done(self) -> None:
        await self.send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    # ---- events

    async def _say(self, told: AssistantTurn) -> None:
        if told.reasoning:
            await self._put({"delta": {"reasoning_content": told.reasoning}}, self._part())
        if told.content:
            await self._put({"delta": {"content": told.content}} if self.chat else {"text": told.content}, self._part())
        for call in told.calls:
            delta = {"tool_calls": [{"index": self._calls, **tool_call_of(call)}]}
            self._calls += 1
            await self._put({"delta": delta}, self._part())

    def _part(self) -> dict[str, Any]:
        """The tokens that were read since the last event, as far as they were asked for."""
        part = slice(self._shown, self.reader.read)
        tokens, logp, self._shown = self._tokens[part], self._logp[part], part.stop
        more: dict[str, Any] = {"token_ids": tokens} if self.wish.ids else {}
        return more | ({"logprobs": self.logprobs(tokens, logp)} if self.wish.logprobs and tokens else {})

    async def _put(self, choice: dict[str, Any], part: Mapping[str, Any] | None = None, **more: Any) -> None:
        usage = {"usage": None} if self.wish.usage else {}
        whole = {"index": 0, "logprobs": None, "finish_reason": None} | choice | dict(part or {})
        await self._event(choices=[whole], **usage, **more)

    async def _event(self, **body: Any) -> None:
        event = event_of(self.frame(body | ({"object": f"{self.frame.kind}.chunk"} if self.chat else {})))
        await self.send({"type": "http.response.body", "body": event, "more_body": True})

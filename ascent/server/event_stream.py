"""A turn as server-sent events. Each event has the tokens that its text was parsed from."""

from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ascent.environments.turn_parser import AssistantTurn
from ascent.inference.request_queue import Completion, CompletionDelta
from ascent.server.openai_requests import SamplingFields
from ascent.server.openai_responses import ResponseFrame, finish_reason, format_error, format_event, format_tool_call
from ascent.server.session_turns import PendingTurn, SessionTurns

FormatLogprobs = Callable[[list[int], list[float]], dict[str, Any]]


class TurnStream(Response):
    """The streamed response of one turn."""

    def __init__(
        self,
        turns: SessionTurns,
        turn: PendingTurn,
        fields: SamplingFields,
        frame: ResponseFrame,
        format_logprobs: FormatLogprobs,
    ):
        headers = {"cache-control": "no-cache", **turn.headers}
        super().__init__(None, headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self.turns, self.turn, self.fields, self.frame = turns, turn, fields, frame
        self.format_logprobs, self.parser, self.is_chat = (
            format_logprobs,
            turn.parser,
            turn.turn_input.messages is not None,
        )
        self._num_calls = self._num_sent = 0
        self._tokens: list[int] = []
        self._logp: list[float] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_first_choice()
            async with aclosing(self.turns.events(receive, self.turn)) as events:
                async for event in events:
                    if isinstance(event, CompletionDelta):
                        await self._send_delta(event)
                    else:
                        await self._send_end(event)
        except HTTPException as error:
            await self._send_body(format_event(format_error(error)[1]))
        except ClientDisconnect:
            return
        finally:
            self.turns.abandon(self.turn)
        await self._send_body(b"data: [DONE]\n\n", more_body=False)

    async def _send_first_choice(self) -> None:
        prompt = {"prompt_token_ids": self.turn.input_ids} if self.fields.return_token_ids else {}
        if self.is_chat:
            await self._send_choice({"delta": {"role": "assistant", "content": ""}}, **prompt)
        elif prompt:
            await self._send_choice({"text": ""}, **prompt)

    async def _send_delta(self, delta: CompletionDelta) -> None:
        self._tokens += delta.tokens
        self._logp += delta.logp
        await self._send_parsed(self.parser.feed(delta.tokens))

    async def _send_end(self, completion: Completion) -> None:
        """Send the rest of the turn, the reason why it has ended, and the usage."""
        parsed = [self.parser.feed(completion.tokens[len(self._tokens) :]), self.parser.end()]
        self._tokens, self._logp = completion.tokens, completion.logp
        self.turn.record_reply(self.parser.turn)
        for part in parsed:
            await self._send_parsed(part)
        empty: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        reason = finish_reason(completion, self.parser.turn)
        await self._send_choice(empty | {"finish_reason": reason} | self._parsed_tokens())
        if self.fields.wants_usage:
            await self._send_event(choices=[], usage=self.turn.usage(completion))

    async def _send_parsed(self, part: AssistantTurn) -> None:
        if part.reasoning:
            await self._send_choice({"delta": {"reasoning_content": part.reasoning}} | self._parsed_tokens())
        if part.content:
            text = {"delta": {"content": part.content}} if self.is_chat else {"text": part.content}
            await self._send_choice(text | self._parsed_tokens())
        for call in part.calls:
            delta = {"tool_calls": [{"index": self._num_calls, **format_tool_call(call)}]}
            self._num_calls += 1
            await self._send_choice({"delta": delta} | self._parsed_tokens())

    def _parsed_tokens(self) -> dict[str, Any]:
        """Return the ids and log-probs of the tokens parsed since the last event, as far as they were requested."""
        new = slice(self._num_sent, self.parser.num_parsed)
        tokens, logp, self._num_sent = self._tokens[new], self._logp[new], new.stop
        ids: dict[str, Any] = {"token_ids": tokens} if self.fields.return_token_ids else {}
        return ids | ({"logprobs": self.format_logprobs(tokens, logp)} if self.fields.wants_logprobs and tokens else {})

    async def _send_choice(self, choice: Mapping[str, Any], **fields: Any) -> None:
        usage = {"usage": None} if self.fields.wants_usage else {}
        defaults = {"index": 0, "logprobs": None, "finish_reason": None}
        await self._send_event(choices=[defaults | dict(choice)], **usage, **fields)

    async def _send_event(self, **body: Any) -> None:
        chunk = {"object": f"{self.frame.kind}.chunk"} if self.is_chat else {}
        await self._send_body(format_event(self.frame(body | chunk)))

    async def _send_body(self, body: bytes, more_body: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more_body})

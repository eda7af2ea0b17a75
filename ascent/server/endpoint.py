"""The endpoint: what OpenAI's clients, and those that send tokens, ask of a policy; an ASGI application.

    GET  /v1/models
    POST /v1/chat/completions     messages in, a message out; tools; streamed or whole
    POST /v1/completions          text or tokens in, text out
    POST /inference/v1/generate   tokens in and out, as vLLM has it

It reads requests, checks keys and limits, and hands turns to a desk (engines/requests.py); sessions keep the record
(environments/sessions.py). A key decides whose record a request reaches, and nothing in a body does. Nothing of a body
is read before its key is known.
"""

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ascent.core.errors import ConfigError, RunError
from ascent.environments.chat_session import (
    ChatWriter,
    HistoryMismatchError,
    InvalidMessageError,
    Session,
    read_messages,
    read_tools,
)
from ascent.environments.tool_call_formats import Schema
from ascent.environments.turn_parser import AssistantTurn, TokenReader
from ascent.inference.request_queue import Completion, CompletionDelta, QueueFullError, Request, RequestQueue
from ascent.server.connections import Connection
from ascent.server.event_stream import TurnStream
from ascent.server.open_sessions import OpenSession, OpenSessions, SessionRules
from ascent.server.openai_format import (
    BODY,
    IGNORED,
    ApiError,
    CompletionParams,
    Frame,
    error_reply,
    message_of,
    read_body,
    read_wish,
    reason_of,
)

MESSAGES, TOOLS = 2048, 128
CHARACTERS = 64
"""Characters per token of context that are read: a text with more cannot fit, and is not tokenized to see it."""
ESCAPED, FRAME = 6, 2**18
"""The most bytes of a character in JSON; bytes of a request beside its text. No request of more can be read."""
CALL = 32
"""Characters of a call beside its name and arguments."""
REQUESTS_PER_SESSION = 4
"""Requests of one session at once, most of which are answered with 409: a conversation has one turn at a time."""
LARGE_REQUEST = 16_384
"""Characters from which a request is rendered and tokenized in a worker thread, so that other clients do not wait."""
COLDEST = 1e-4
"""Below this temperature the likeliest token is taken."""
CONTEXT = "context_length_exceeded"
ReadPrompt = Callable[[Session, ChatWriter], list[int]]
"""Renders and tokenizes what a request adds to its session."""
Events = asyncio.Queue[CompletionDelta | Completion | None]
"""What the sampler tells of a turn; None: the client has left."""


class EndpointConnection(Connection):
    """An agent has a connection of its own, and all of them are on one machine. Beyond these, slow peers make room."""

    most_of_peer, most_open = 2048, 4096


@dataclass(eq=False)
class PendingTurn:
    """A turn that was asked for, and what has come of it."""

    live: OpenSession
    read: list[int]
    """Tokens that come before it and are not recorded yet."""
    request: Request
    reader: TokenReader
    events: Events
    waited: float
    begun: str = "extended"

    @property
    def before(self) -> list[int]:
        """All tokens before it."""
        return self.request.prompt + self.request.response

    @property
    def headers(self) -> dict[str, str]:
        return {"x-ascent-session": self.begun}


class Endpoint:
    """The application. `key`: of the whole server; without one, sessions have keys of their own (`open`)."""

    def __init__(
        self,
        queue: RequestQueue,
        writer: ChatWriter,
        rules: SessionRules,
        vocab: int,
        name: str = "policy",
        key: str = "",
    ):
        self.queue, self.writer, self.rules, self.vocab, self.name = queue, writer, rules, vocab, name
        self.sessions = OpenSessions(rules, key, lambda live: self.queue.end_conversation(live))
        self.counts = {"requests": 0, "refused": 0, "rewritten": 0, "cancelled": 0}
        self.most_bytes = min(BODY, FRAME + ESCAPED * CHARACTERS * rules.context)
        self._reading = 0
        self._large_writer = writer.for_thread()
        self._large_worker = ThreadPoolExecutor(1, "ascent tokenizer")
        self._post = Post()
        self._routes: dict[tuple[str, str], Callable[[Asked, OpenSession | None], Awaitable[Response | None]]] = {
            ("GET", "/v1/models"): self._models,
            ("GET", f"/v1/models/{name}"): self._model,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/inference/v1/generate"): self._generate,
        }

    # ---- sessions with keys of their own, for a run: called from other threads

    def open(self, session: Session, rules: SessionRules) -> tuple[str, OpenSession]:
        """A session, and the key that reaches it."""
        return self.sessions.open(session, rules)

    def close(self, key: str, why: str) -> None:
        """Nothing more is answered to this key; what is under way is ended."""
        live = self.sessions.close(key, why)
        if live is None:
            return
        if (request := live.busy) is not None:
            self.queue.cancel(request)
            request.on_output(Completion.failed(why))
        self.queue.end_conversation(live)

    # ---- the application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        asked = Asked(scope, receive, send)
        self.counts["requests"] += 1
        try:
            reply = await self._answer(scope, asked)
        except ApiError as error:
            self.counts["refused"] += 1
            reply = error_reply(error.status, str(error), error.code, error.headers)
        except ClientDisconnect:
            return
        if reply is not None:
            if reply.status_code >= 400:
                reply.headers["connection"] = "close"  # what else was sent is not read
            await reply(scope, receive, send)

    async def _answer(self, scope: Scope, asked: Asked) -> Response | None:
        live = self.sessions.find(asked.headers)
        route = self._routes.get((scope["method"], scope["path"]))
        if route is None:
            what = f"{scope['method'][:20]} {scope['path'][:200]}"
            if allowed := [method for method, path in self._routes if path == scope["path"]]:
                raise ApiError(405, f"{what}: only {allowed[0]} is answered here", headers={"allow": allowed[0]})
            raise ApiError(404, f"{what}: there is nothing here")
        if live is not None and live.reading >= REQUESTS_PER_SESSION:
            raise ApiError(429, "too many requests of this session at once", "rate_limit", {"retry-after": "1"})
        if self._reading >= REQUESTS_PER_SESSION * self.queue.max_requests:
            raise ApiError(429, "too many requests at once", "rate_limit", {"retry-after": "1"})
        self._reading += 1
        if live is not None:
            live.reading += 1
        try:
            return await route(asked, live)
        except (InvalidMessageError, ConfigError) as error:
            raise ApiError(400, str(error)) from None
        except QueueFullError:
            words = f"{self.queue.max_requests} requests are waiting or under way"
            raise ApiError(429, words, "rate_limit", {"retry-after": "1"}) from None
        except RunError as error:
            raise ApiError(503, str(error)) from None
        finally:
            self._reading -= 1
            if live is not None:
                live.reading -= 1

    # ---- routes

    @property
    def model(self) -> dict[str, Any]:
        about = {"id": self.name, "object": "model", "created": 0, "owned_by": "ascent"}
        return about | {"max_model_len": self.rules.context}

    async def _models(self, asked: Asked, live: OpenSession | None) -> Response:
        return JSONResponse({"object": "list", "data": [self.model]})

    async def _model(self, asked: Asked, live: OpenSession | None) -> Response:
        return JSONResponse(self.model)

    async def _chat(self, asked: Asked, live: OpenSession | None) -> Response | None:
        body = await read_body(asked, self.most_bytes)
        messages = read_messages(body.get("messages"), MESSAGES)
        tools = [] if body.get("tool_choice") == "none" else read_tools(body.get("tools"), TOOLS)
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise InvalidMessageError("tool_choice: auto or none. What the policy draws cannot be forced")
        size = self._fits(sum(map(length_of, messages)) + len(json.dumps(tools)))
        wish, frame = read_wish(body), Frame(self.name, "chatcmpl", "chat.completion")
        turn = await self._begin(live, wish, size, lambda s, writer: s.read_chat(messages, tools, writer), tools)

        def say(reply: AssistantTurn) -> None:
            turn.live.session.say(messages, tools, reply)

        if wish.stream:
            await self._stream(asked, turn, TurnStream(asked._send, frame, wish, turn.reader, self._logprobs), say)
            return None
        done, reply = await self._draw(asked, turn, say)
        choice = {"index": 0, "message": message_of(reply), "finish_reason": reason_of(done, reply)}
        choice["logprobs"] = self._logprobs(done.tokens, done.logp) if wish.logprobs else None
        return self._respond(turn, wish, frame({"choices": [choice]}), done)

    async def _complete(self, asked: Asked, live: OpenSession | None) -> Response | None:
        body = await read_body(asked, self.most_bytes)
        prompt, wish = self._prompt(body.get("prompt")), read_wish(body, plain=True)
        size = len(prompt) if isinstance(prompt, str) else 0
        turn = await self._begin(live, wish, size, lambda s, writer: s.read_tokens(writer.encode(prompt)))
        frame, say = Frame(self.name, "cmpl", "text_completion"), self._say_nothing(turn)
        if wish.stream:
            stream = TurnStream(asked._send, frame, wish, turn.reader, self._plain_logprobs)
            await self._stream(asked, turn, stream, say)
            return None
        done, reply = await self._draw(asked, turn, say)
        choice = {"index": 0, "text": reply.content, "finish_reason": reason_of(done)}
        choice["logprobs"] = self._plain_logprobs(done.tokens, done.logp) if wish.logprobs else None
        return self._respond(turn, wish, frame({"choices": [choice]}), done)

    async def _generate(self, asked: Asked, live: OpenSession | None) -> Response | None:
        body = await read_body(asked, self.most_bytes)
        settings = body.get("sampling_params") or {}
        if not isinstance(settings, Mapping):
            raise InvalidMessageError("sampling_params: an object")
        if body.get("stream"):
            raise InvalidMessageError("stream: tokens come whole here")
        ids, wish = self._tokens(body.get("token_ids"), "token_ids"), read_wish(settings, plain=True)
        turn = await self._begin(live, wish, 0, lambda s, _: s.read_tokens(ids))
        done, _ = await self._draw(asked, turn, self._say_nothing(turn), reads=False)
        choice = {"index": 0, "token_ids": done.tokens, "finish_reason": reason_of(done), "logprobs": None}
        if wish.logprobs:
            pairs = zip(done.tokens, done.logp, strict=True)
            named: list[dict[str, Any]] = [
                {"token": f"token_id:{i}", "logprob": p, "bytes": None, "top_logprobs": []} for i, p in pairs
            ]
            choice["logprobs"] = {"content": named}
        name = str(body.get("request_id") or f"gen-{secrets.token_hex(12)}")[:200]
        return self._respond(turn, wish, {"request_id": name, "choices": [choice]}, done)

    def _respond(self, turn: PendingTurn, wish: CompletionParams, body: dict[str, Any], done: Completion) -> Response:
        if wish.ids:
            body["prompt_token_ids"] = turn.before
            body["choices"][0]["token_ids"] = done.tokens
        return JSONResponse(body | {"usage": usage_of(turn, done)}, headers=turn.headers)

    # ---- a turn

    async def _begin(
        self,
        live: OpenSession | None,
        wish: CompletionParams,
        size: int,
        read: ReadPrompt,
        tools: Sequence[Schema] | None = None,
    ) -> PendingTurn:
        """Submit a turn, or raise. `size`: characters to tokenize. `tools`: those of a chat; None: plain text."""
        once = live is None
        live = live or self.sessions.new()
        if live.busy is not None or live.preparing:
            raise ApiError(409, "this session has a request under way: a conversation has one turn at a time")
        live.check_open()
        before, live.preparing = live.session, True
        loop, large = asyncio.get_running_loop(), size > LARGE_REQUEST
        writer = self._large_writer if large else self.writer
        prepare = partial(self._prepare, loop, live, once, wish, writer, read, tools)
        try:
            turn = await loop.run_in_executor(self._large_worker, prepare) if large else prepare()
            self.queue.submit(turn.request)
            live.busy = turn.request
        except BaseException:
            live.session = before  # a request that is refused begins no session anew
            raise
        finally:
            live.preparing = False
        if live.closed:  # meanwhile, by a thread that saw no request to end
            self._abandon(turn)
            live.check_open()
        return turn

    def _prepare(
        self,
        loop: asyncio.AbstractEventLoop,
        live: OpenSession,
        once: bool,
        wish: CompletionParams,
        writer: ChatWriter,
        read: ReadPrompt,
        tools: Sequence[Schema] | None,
    ) -> PendingTurn:
        """Render and tokenize a turn and check its limits. Runs in a worker thread for large requests."""
        begun = "extended" if live.session.turns else "new"
        try:
            if live.session.rewritten:
                raise HistoryMismatchError(live.session.rewritten)
            new = read(live.session, writer)
        except HistoryMismatchError as error:
            new, begun = self._rewritten(live, error, writer, read), "rewritten"
        session, rules = live.session, live.rules
        session.asked.update(wish.noted if rules.fixed else {})
        if not session.turns and wish.seed is not None and not rules.fixed:
            session.seed = wish.seed
        prompt, response = (session.prompt, session.response + new) if session.turns else (new, [])
        limit = self._limit(live, prompt, response, wish)
        events = Events()
        own = {} if rules.fixed else own_settings(wish, rules)
        request = Request(
            prompt,
            response,
            session.seed,
            limit,
            lambda event: self._post.send(loop, events, event),
            conversation_id=None if once else live,
            **{"temperature": rules.temperature, "sampling_params": rules.support, "greedy": rules.greedy} | own,
            stop=tuple(dict.fromkeys((*rules.stop, *wish.stop))),
            stream=wish.stream,
        )
        before = None if tools is None else prompt + response
        reader = writer.reader(tools or (), request.stop, before, wish.one_call)
        return PendingTurn(live, new, request, reader, events, time.monotonic() - live.answered, begun)

    def _rewritten(
        self, live: OpenSession, error: HistoryMismatchError, writer: ChatWriter, read: ReadPrompt
    ) -> list[int]:
        """In a run the episode is invalid from here on; a server begins anew."""
        if not live.session.rewritten:
            self.counts["rewritten"] += 1
        if live.rules.fixed:
            live.session.rewritten = str(error)
            raise ApiError(
                400, f"the history was rewritten, so this episode is not valid: {error}", "rewritten"
            ) from None
        self.queue.end_conversation(live)
        live.anew()
        return read(live.session, writer)

    def _limit(self, live: OpenSession, prompt: list[int], response: list[int], wish: CompletionParams) -> int:
        """The most tokens of the next turn."""
        rules, session = live.rules, live.session
        if not prompt:
            raise InvalidMessageError("the prompt has no tokens")
        long = f"{len(prompt) + len(response)} tokens, and the model reads {rules.context} with its answer"
        if len(prompt) > rules.prompt:
            raise ApiError(400, f"a prompt of {len(prompt)} tokens, and at most {rules.prompt} are read", CONTEXT)
        left = {
            long: min(rules.context - len(prompt), rules.behind) - len(response),
            f"the limit of {rules.drawn} tokens": rules.drawn - sum(session.drawn) if rules.drawn else 1 << 30,
            f"the limit of {rules.turns} turns": 1 << 30 if not rules.turns or session.turns < rules.turns else 0,
        }
        words, most = min(left.items(), key=lambda item: item[1])
        if most < 1:
            live.cut = live.cut or words
            raise ApiError(400, words, CONTEXT)
        return min(each for each in (most, wish.max_tokens, rules.turn_tokens or None) if each is not None)

    async def _draw(
        self, asked: Asked, turn: PendingTurn, say: Callable[[AssistantTurn], None], reads: bool = True
    ) -> tuple[Completion, AssistantTurn]:
        """The whole turn, and how it reads, if anybody does. Nobody decodes for a client that is gone."""
        async with aclosing(self._events(asked, turn)) as events:
            async for event in events:
                if isinstance(event, Completion):
                    if reads:
                        turn.reader.feed(event.tokens), turn.reader.end()
                    say(turn.reader.whole)
                    return event, turn.reader.whole
        raise ClientDisconnect

    async def _events(self, asked: Asked, turn: PendingTurn) -> AsyncGenerator[CompletionDelta | Completion]:
        """What comes of a turn; with its end it is recorded, and a client that leaves before ends it."""
        leaving, live = asyncio.ensure_future(_gone(asked)), turn.live
        leaving.add_done_callback(lambda _: turn.events.put_nowait(None))
        try:
            while live.busy is turn.request:
                event = await turn.events.get()
                if event is None or leaving.done():  # who has left does not know of the turn, and may ask again
                    raise ClientDisconnect
                if isinstance(event, Completion):
                    live.busy = None
                    if event.error:
                        raise ApiError(503, event.error)
                    live.record(turn.read, event, turn.waited)
                yield event
        finally:
            leaving.cancel()
            self._abandon(turn)

    def _abandon(self, turn: PendingTurn) -> None:
        """Nobody waits for a turn that is not over: nothing of it is recorded."""
        if turn.live.busy is turn.request:
            turn.live.busy = None
            self.counts["cancelled"] += 1
            self.queue.cancel(turn.request)

    async def _stream(
        self, asked: Asked, turn: PendingTurn, stream: TurnStream, say: Callable[[AssistantTurn], None]
    ) -> None:
        """The turn as it is drawn."""
        try:
            await stream.begin(turn.headers, turn.before)
            async with aclosing(self._events(asked, turn)) as events:
                async for event in events:
                    if isinstance(event, CompletionDelta):
                        await stream.tell(event)
                        continue
                    rest = stream.finish(event)
                    say(stream.reader.whole)
                    await stream.end(rest, event, usage_of(turn, event))
        except ApiError as error:
            await stream.fail(str(error), error.code)
        except ClientDisconnect:
            return
        finally:
            self._abandon(turn)

    def _say_nothing(self, turn: PendingTurn) -> Callable[[AssistantTurn], None]:
        """The client has told its history as tokens."""
        return lambda _: turn.live.session.say(None, (), AssistantTurn())

    # ---- tokens and words

    def _fits(self, characters: int) -> int:
        if characters > CHARACTERS * self.rules.context:
            raise ApiError(400, f"{characters} characters do not fit a context of {self.rules.context} tokens", CONTEXT)
        return characters

    def _prompt(self, prompt: Any) -> str | list[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
            raise InvalidMessageError("prompt: one prompt per request")
        if isinstance(prompt, str):
            self._fits(len(prompt))
            return prompt
        return self._tokens(prompt, "prompt")

    def _tokens(self, ids: Any, name: str) -> list[int]:
        if not isinstance(ids, list) or not ids:
            raise InvalidMessageError(f"{name}: one prompt, as text or as a list of token ids")
        if len(ids) > self.rules.context:
            raise ApiError(400, f"{name}: {len(ids)} tokens, and the model reads {self.rules.context}", CONTEXT)
        if not all(type(i) is int and 0 <= i < self.vocab for i in ids):
            raise InvalidMessageError(f"{name}: a token id is a whole number from 0 to {self.vocab - 1}")
        return ids

    def _logprobs(self, tokens: list[int], logp: list[float]) -> dict[str, Any]:
        content = []
        for token, value in zip(tokens, logp, strict=True):
            word = self.writer.words([token], special=True)
            content.append({"token": word, "logprob": value, "bytes": list(word.encode()), "top_logprobs": []})
        return {"content": content}

    def _plain_logprobs(self, tokens: list[int], logp: list[float]) -> dict[str, Any]:
        spelled = [self.writer.words([token], special=True) for token in tokens]
        return {"tokens": spelled, "token_logprobs": logp, "top_logprobs": None}


def own_settings(wish: CompletionParams, rules: SessionRules) -> dict[str, Any]:
    """What a server uses of a client's settings; refused: what it does not know."""
    if unknown := [name for name in wish.noted if name in IGNORED]:
        raise InvalidMessageError(f"{unknown[0]}: this server does not have that setting")
    own: dict[str, Any] = {}
    if wish.temperature is not None:
        greedy = wish.temperature < COLDEST
        own |= {"greedy": greedy, "temperature": 1.0 if greedy else wish.temperature}
        if not greedy and wish.temperature < rules.coldest:
            raise InvalidMessageError(f"temperature: 0, or {rules.coldest:g} and more, with the engine of this server")
    if {"top_k", "top_p", "min_p"} & wish.noted.keys() and rules.narrowed is not None:
        own["sampling_params"] = rules.narrowed(*wish.narrow)
    support = own.get("sampling_params", rules.support)
    if wish.logprobs and rules.blurred and support is not None and not support.whole:
        raise InvalidMessageError(f"logprobs with top_k, top_p or min_p: {rules.blurred}")
    return own


def length_of(message: Mapping[str, Any]) -> int:
    """Characters of a message, about."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return len(message["content"]) + sum(CALL + len(c["name"]) + len(json.dumps(c["arguments"])) for c in calls)


def usage_of(turn: PendingTurn, done: Completion) -> dict[str, int]:
    before, drawn = len(turn.before), len(done.tokens)
    return {"prompt_tokens": before, "completion_tokens": drawn, "total_tokens": before + drawn}


class Post:
    """What the thread that decodes tells. A loop is woken once for all that comes before it looks."""

    def __init__(self) -> None:
        self._letters: deque[tuple[Events, CompletionDelta | Completion]] = deque()
        self._woken: asyncio.AbstractEventLoop | None = None

    def send(self, loop: asyncio.AbstractEventLoop, to: Events, event: CompletionDelta | Completion) -> None:
        self._letters.append((to, event))
        if self._woken is not loop:
            self._woken = loop
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = None  # what comes from here on wakes the loop again
        while self._letters:
            to, event = self._letters.popleft()
            with suppress(RuntimeError):  # its loop has ended
                to.put_nowait(event)


async def _gone(asked: Asked) -> None:
    while (await asked.receive())["type"] != "http.disconnect":
        pass

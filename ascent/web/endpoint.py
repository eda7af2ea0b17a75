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
import hashlib
import hmac
import json
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ascent.core.types import Refused, Trouble
from ascent.engines.requests import Desk, Done, Drew, Full, TurnRequest
from ascent.environments.sessions import (
    AssistantTurn,
    ChatWriter,
    Nonsense,
    Rewritten,
    Session,
    read_messages,
    read_tools,
)
from ascent.web.connections import Connection
from ascent.web.wire import (
    EXTRAS,
    IGNORED,
    Denied,
    Shown,
    Wish,
    cut,
    error_reply,
    event_of,
    message_of,
    read_body,
    read_wish,
    reason_of,
)

MESSAGES, TOOLS = 2048, 128
CHARACTERS = 64
"""Characters per token of context that are read: a text with more cannot fit, and is not tokenized to see it."""
SESSIONS = 4096
"""Sessions of a server that are remembered; the one that was silent longest is forgotten for a new one."""
TRUSTED = "ascent.trusted"
Events = asyncio.Queue[Drew | Done | None]
"""What the sampler tells of a turn; None: the client has left."""


class EndpointConnection(Connection):
    """An agent has a connection of its own, and all of them are on one machine. Beyond these, slow peers make room."""

    most_of_peer, most_open = 2048, 4096


@dataclass(frozen=True)
class Rules:
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


@dataclass(eq=False)
class OpenSession:
    """A session that is open."""

    session: Session
    rules: Rules
    busy: TurnRequest | None = None
    closed: str = ""
    """Why nothing more is answered."""
    cut: str = ""
    """Which limit it has reached."""
    answered: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class PendingTurn:
    """A turn that was asked for, and what has come of it."""

    live: OpenSession
    read: list[int]
    """Tokens that come before it and are not recorded yet."""
    request: TurnRequest
    events: Events
    waited: float
    begun: str = "extended"

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt) + len(self.request.response)


class Endpoint:
    """The application. `key`: of the whole server; without one, sessions have keys of their own (`open`)."""

    def __init__(self, desk: Desk, writer: ChatWriter, rules: Rules, vocab: int, name: str = "policy", key: str = ""):
        self.desk, self.writer, self.rules, self.vocab, self.name = desk, writer, rules, vocab, name
        self._key = key.encode()
        self._keyed: dict[str, OpenSession] = {}
        self._named: OrderedDict[str, OpenSession] = OrderedDict()
        self.counts = {"requests": 0, "refused": 0, "rewritten": 0, "cancelled": 0}
        self._reading = 0
        self._post = Post()
        self._routes: dict[tuple[str, str], Callable[[Asked, OpenSession | None], Awaitable[Response | None]]] = {
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/inference/v1/generate"): self._generate,
        }

    # ---- sessions with keys of their own, for a run: called from other threads

    def open(self, session: Session, rules: Rules) -> tuple[str, OpenSession]:
        """A session, and the key that reaches it."""
        key, live = f"sk-{secrets.token_urlsafe(24)}", OpenSession(session, rules)
        self._keyed[_digest(key.encode())] = live
        return key, live

    def close(self, key: str, why: str) -> None:
        """Nothing more is answered to this key; what is under way is ended."""
        live = self._keyed.pop(_digest(key.encode()), None)
        if live is None:
            return
        live.closed, request = why, live.busy
        if request is not None:
            self.desk.cancel(request)
            request.tell(Done([], [], [], False, -1, why))
        self.desk.forget(live)

    # ---- the application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        asked = Asked(scope, receive, send)
        self.counts["requests"] += 1
        try:
            reply = await self._answer(scope, asked)
        except Denied as error:
            self.counts["refused"] += 1
            reply = error_reply(error.status, str(error), error.code, error.headers)
        except ClientDisconnect:
            return
        if reply is not None:
            if reply.status_code >= 400:
                reply.headers["connection"] = "close"  # what else was sent is not read
            await reply(scope, receive, send)

    async def _answer(self, scope: Scope, asked: Asked) -> Response | None:
        live = self._session(asked)
        route = self._routes.get((scope["method"], scope["path"]))
        if route is None:
            known = any(path == scope["path"] for _, path in self._routes)
            raise Denied(405 if known else 404, f"{scope['method']} {scope['path'][:200]}: there is nothing here")
        if self._reading >= 4 * self.desk.most:
            raise Denied(429, "too many requests at once", "rate_limit", {"retry-after": "1"})
        self._reading += 1
        try:
            return await route(asked, live)
        except (Nonsense, Refused) as error:
            raise Denied(400, str(error)) from None
        except Full:
            words = f"{self.desk.most} requests are waiting or under way"
            raise Denied(429, words, "rate_limit", {"retry-after": "1"}) from None
        except Trouble as error:
            raise Denied(503, str(error)) from None
        finally:
            self._reading -= 1

    def _session(self, asked: Asked) -> OpenSession | None:
        """Whose request it is, by its key. A server's own key may name a session beside it."""
        head = asked.headers.get("authorization", "").encode("latin-1", "replace")
        if asked.headers.get("origin") is not None or asked.headers.get("sec-fetch-site") is not None:
            raise Denied(403, "requests of web pages are not answered")
        given = head.removeprefix(b"Bearer ").strip()
        if self._key:
            if not hmac.compare_digest(given, self._key):
                raise Denied(401, "the key of this server is missing or wrong", "invalid_api_key")
            return self._named_session(asked.headers.get("x-session-id", ""))
        live = self._keyed.get(_digest(given))
        if live is None:
            raise Denied(401, "this key belongs to no session that is open", "invalid_api_key")
        return live

    def _named_session(self, name: str) -> OpenSession | None:
        if not name:
            return None
        if len(name) > 200:
            raise Denied(400, "X-Session-ID: at most 200 characters")
        if name not in self._named:
            if len(self._named) >= SESSIONS:
                idle = next((each for each, live in self._named.items() if live.busy is None), None)
                if idle is None:
                    raise Denied(429, "too many sessions at once", "rate_limit", {"retry-after": "5"})
                self.desk.forget(self._named.pop(idle))
            self._named[name] = OpenSession(Session(secrets.randbits(62)), self.rules)
        self._named.move_to_end(name)
        return self._named[name]

    # ---- routes

    async def _models(self, asked: Asked, live: OpenSession | None) -> Response:
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "ascent"}
        return JSONResponse({"object": "list", "data": [model | {"max_model_len": self.rules.context}]})

    async def _chat(self, asked: Asked, live: OpenSession | None) -> Response | None:
        body = await read_body(asked)
        messages = read_messages(body.get("messages"), MESSAGES)
        tools = [] if body.get("tool_choice") == "none" else read_tools(body.get("tools"), TOOLS)
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise Nonsense("tool_choice: auto or none. What the policy draws cannot be forced")
        self._fits(sum(len(message["content"]) for message in messages) + len(json.dumps(tools)))
        wish, made = read_wish(body), Made(self, "chatcmpl", "chat.completion")
        whole = bool(tools) or "</think>" in str(self.writer.tokenizer.chat_template)  # it is read apart at its end
        turn = self._begin(live, wish, lambda session: session.read_chat(messages, tools, self.writer), whole)

        def finish(done: Done) -> AssistantTurn:
            reply = cut(self.writer.read(done.tokens, tools), turn.request.stop)
            turn.live.session.say(messages, tools, reply)
            return reply

        if wish.stream:
            await self._stream(asked, turn, wish, made, finish)
            return None
        done = await self._draw(asked, turn)
        reply = finish(done)
        choice = {"index": 0, "message": message_of(reply), "finish_reason": reason_of(done, reply), "logprobs": None}
        if wish.logprobs:
            choice["logprobs"] = {"content": self._logprobs(done)}
        return self._respond(turn, wish, made({"choices": [choice]}), done)

    async def _complete(self, asked: Asked, live: OpenSession | None) -> Response | None:
        body = await read_body(asked)
        ids, wish = self._prompt(body.get("prompt")), read_wish(body, plain=True)
        turn = self._begin(live, wish, lambda session: session.read_tokens(ids))
        made = Made(self, "cmpl", "text_completion")

        def finish(done: Done) -> AssistantTurn:
            turn.live.session.say(None, (), AssistantTurn(""))
            drawn = done.tokens[:-1] if done.tokens[-1] in self.writer.ends else done.tokens
            return cut(AssistantTurn(self.writer.words(drawn)), turn.request.stop)

        if wish.stream:
            await self._stream(asked, turn, wish, made, finish)
            return None
        done = await self._draw(asked, turn)
        choice = {"index": 0, "text": finish(done).content, "finish_reason": reason_of(done), "logprobs": None}
        if wish.logprobs:
            spelled = [self.writer.words([token], special=True) for token in done.tokens]
            choice["logprobs"] = {"tokens": spelled, "token_logprobs": done.logp, "top_logprobs": None}
        return self._respond(turn, wish, made({"choices": [choice]}), done)

    async def _generate(self, asked: Asked, live: OpenSession | None) -> Response | None:
        body = await read_body(asked)
        settings = body.get("sampling_params") or {}
        if not isinstance(settings, Mapping):
            raise Nonsense("sampling_params: an object")
        if body.get("stream"):
            raise Nonsense("stream: tokens come whole here")
        ids, wish = self._tokens(body.get("token_ids"), "token_ids"), read_wish(settings, plain=True)
        turn = self._begin(live, wish, lambda session: session.read_tokens(ids))
        done = await self._draw(asked, turn)
        turn.live.session.say(None, (), AssistantTurn(""))
        choice = {"index": 0, "token_ids": done.tokens, "finish_reason": reason_of(done), "logprobs": None}
        if wish.logprobs:
            pairs = zip(done.tokens, done.logp, strict=True)
            named: list[dict[str, Any]] = [
                {"token": f"token_id:{i}", "logprob": p, "bytes": None, "top_logprobs": []} for i, p in pairs
            ]
            choice["logprobs"] = {"content": named}
        name = str(body.get("request_id") or f"gen-{secrets.token_hex(12)}")[:200]
        return self._respond(turn, wish, {"request_id": name, "choices": [choice]}, done)

    def _respond(self, turn: PendingTurn, wish: Wish, body: dict[str, Any], done: Done) -> Response:
        if wish.ids:
            body["prompt_token_ids"] = turn.request.prompt + turn.request.response
            body["choices"][0]["token_ids"] = done.tokens
        return JSONResponse(body | {"usage": usage_of(turn, done)}, headers={"x-ascent-session": turn.begun})

    # ---- a turn

    def _begin(
        self, live: OpenSession | None, wish: Wish, read: Callable[[Session], list[int]], whole: bool = False
    ) -> PendingTurn:
        """Hand a turn to the sampler, or say why not. `whole`: it is shown when it is over, and not before."""
        once = live is None
        live = live or OpenSession(Session(secrets.randbits(62)), self.rules)
        if live.busy is not None:
            raise Denied(409, "this session has a request under way: a conversation has one turn at a time")
        if live.closed:
            raise Denied(403, f"this session is closed: {live.closed}")
        begun = "extended" if live.session.turns else "new"
        try:
            if live.session.rewritten:
                raise Rewritten(live.session.rewritten)
            new = read(live.session)
        except Rewritten as error:
            new, begun = self._rewritten(live, error, read), "rewritten"
        session, rules = live.session, live.rules
        session.asked.update(wish.noted if rules.fixed else {})
        if not session.turns and wish.seed is not None and not rules.fixed:
            session.seed = wish.seed
        prompt, response = (session.prompt, session.response + new) if session.turns else (new, [])
        limit = self._limit(live, prompt, response, wish)
        loop, events = asyncio.get_running_loop(), Events()
        own = {} if rules.fixed else own_settings(wish, rules)
        request = TurnRequest(
            prompt,
            response,
            session.seed,
            limit,
            lambda event: self._post.send(loop, events, event),
            conversation=None if once else live,
            **{"temperature": rules.temperature, "support": rules.support, "greedy": rules.greedy} | own,
            stop=tuple(dict.fromkeys((*rules.stop, *wish.stop))),
            watched=wish.stream and not (whole or wish.logprobs or wish.stop or rules.stop),
        )
        self.desk.submit(request)
        live.busy = request
        return PendingTurn(live, new, request, events, time.monotonic() - live.answered, begun)

    def _rewritten(self, live: OpenSession, error: Rewritten, read: Callable[[Session], list[int]]) -> list[int]:
        """In a run the episode is invalid from here on; a server begins anew."""
        if not live.session.rewritten:
            self.counts["rewritten"] += 1
        if live.rules.fixed:
            live.session.rewritten = str(error)
            raise Denied(
                400, f"the history was rewritten, so this episode is not valid: {error}", "rewritten"
            ) from None
        self.desk.forget(live)
        live.session = Session(secrets.randbits(62))
        return read(live.session)

    def _limit(self, live: OpenSession, prompt: list[int], response: list[int], wish: Wish) -> int:
        """The most tokens of the next turn."""
        rules, session = live.rules, live.session
        if not prompt:
            raise Nonsense("the prompt has no tokens")
        long = f"{len(prompt) + len(response)} tokens, and the model reads {rules.context} with its answer"
        if len(prompt) > rules.prompt:
            raise Denied(400, f"a prompt of {len(prompt)} tokens, and at most {rules.prompt} are read", CONTEXT)
        left = {
            long: min(rules.context - len(prompt), rules.behind) - len(response),
            f"the limit of {rules.drawn} tokens": rules.drawn - sum(session.drawn) if rules.drawn else 1 << 30,
            f"the limit of {rules.turns} turns": 1 << 30 if not rules.turns or session.turns < rules.turns else 0,
        }
        words, most = min(left.items(), key=lambda item: item[1])
        if most < 1:
            live.cut = live.cut or words
            raise Denied(400, words, CONTEXT)
        return min(each for each in (most, wish.max_tokens, rules.turn_tokens or None) if each is not None)

    async def _draw(self, asked: Asked, turn: PendingTurn) -> Done:
        """The whole turn. Nobody decodes for a client that is gone."""
        async with aclosing(self._events(asked, turn)) as events:
            async for event in events:
                if isinstance(event, Done):
                    return event
        raise ClientDisconnect

    async def _events(self, asked: Asked, turn: PendingTurn) -> AsyncGenerator[Drew | Done]:
        """What comes of a turn; with its end it is recorded, and a client that leaves before ends it."""
        leaving, live = asyncio.ensure_future(_gone(asked)), turn.live
        leaving.add_done_callback(lambda _: turn.events.put_nowait(None))
        try:
            while live.busy is turn.request:
                event = await turn.events.get()
                if event is None:
                    raise ClientDisconnect
                if isinstance(event, Done):
                    live.busy = None
                    if event.error:
                        raise Denied(503, event.error)
                    live.session.add(turn.read, event.tokens, event.logp, event.mass, turn.waited)
                    live.session.ended, live.answered = event.ended, time.monotonic()
                yield event
        finally:
            leaving.cancel()
            self._abandon(turn)

    def _abandon(self, turn: PendingTurn) -> None:
        """Nobody waits for a turn that is not over: nothing of it is recorded."""
        if turn.live.busy is turn.request:
            turn.live.busy = None
            self.counts["cancelled"] += 1
            self.desk.cancel(turn.request)

    async def _stream(
        self, asked: Asked, turn: PendingTurn, wish: Wish, made: "Made", finish: Callable[[Done], AssistantTurn]
    ) -> None:
        """The turn as server-sent events."""
        send, shown, chat = asked._send, Shown(self.writer), made.kind == "chat.completion"
        kind = "chat.completion.chunk" if chat else made.kind

        async def put(choice: dict[str, Any] | None, **more: Any) -> None:
            body = made({"object": kind, "choices": [] if choice is None else [choice], **more})
            await send({"type": "http.response.body", "body": event_of(body), "more_body": True})

        def words(text: str, **more: Any) -> dict[str, Any]:
            said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            return {"index": 0, **said, "logprobs": None, "finish_reason": None, **more}

        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        headers.append((b"x-ascent-session", turn.begun.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            if chat:
                await put(words("", delta={"role": "assistant", "content": ""}))
            async with aclosing(self._events(asked, turn)) as events:
                async for event in events:
                    if isinstance(event, Drew):
                        if text := shown.more(event.tokens):
                            await put(words(text))
                        continue
                    await self._stream_end(turn, wish, chat, event, finish(event), shown, put, words)
        except Denied as error:
            body = {"error": {"message": str(error), "type": "server_error", "code": error.code or None}}
            await send({"type": "http.response.body", "body": event_of(body), "more_body": True})
        except ClientDisconnect:
            return
        finally:
            self._abandon(turn)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _stream_end(
        self,
        turn: PendingTurn,
        wish: Wish,
        chat: bool,
        done: Done,
        reply: AssistantTurn,
        shown: "Shown",
        put: Any,
        words: Any,
    ) -> None:
        """The last events: what was not said yet, calls, why it ended, and what it used."""
        logprobs = {"content": self._logprobs(done)} if wish.logprobs else None
        await put(words(shown.rest(reply.content), logprobs=logprobs))
        if chat and (reply.calls or reply.reasoning):
            message = message_of(reply, numbered=True)
            await put(words("", delta={name: message[name] for name in EXTRAS if name in message}))
        ended: dict[str, Any] = {"delta": {}} if chat else {}
        await put(words("", finish_reason=reason_of(done, reply), **ended))
        if wish.usage:
            await put(None, usage=usage_of(turn, done))

    # ---- tokens and words

    def _fits(self, characters: int) -> None:
        if characters > CHARACTERS * self.rules.context:
            raise Denied(400, f"{characters} characters do not fit a context of {self.rules.context} tokens", CONTEXT)

    def _prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            self._fits(len(prompt))
            return list(self.writer.tokenizer(prompt)["input_ids"])
        return self._tokens(prompt, "prompt")

    def _tokens(self, ids: Any, name: str) -> list[int]:
        if not isinstance(ids, list) or not ids:
            raise Nonsense(f"{name}: one prompt, as text or as a list of token ids")
        if len(ids) > self.rules.context:
            raise Denied(400, f"{name}: {len(ids)} tokens, and the model reads {self.rules.context}", CONTEXT)
        if not all(type(i) is int and 0 <= i < self.vocab for i in ids):
            raise Nonsense(f"{name}: a token id is a whole number from 0 to {self.vocab - 1}")
        return ids

    def _logprobs(self, done: Done) -> list[dict[str, Any]]:
        content = []
        for token, logp in zip(done.tokens, done.logp, strict=True):
            word = self.writer.words([token], special=True)
            content.append({"token": word, "logprob": logp, "bytes": list(word.encode()), "top_logprobs": []})
        return content


CONTEXT = "context_length_exceeded"


class Made:
    """The frame of an answer: its name, kind, time and model."""

    def __init__(self, endpoint: Endpoint, prefix: str, kind: str):
        self.kind = kind
        self.base = {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time())}
        self.base["model"] = endpoint.name

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.base | body


def own_settings(wish: Wish, rules: Rules) -> dict[str, Any]:
    """What a server uses of a client's settings; refused: what it does not know."""
    if unknown := [name for name in wish.noted if name in IGNORED]:
        raise Nonsense(f"{unknown[0]}: this server does not have that setting")
    own: dict[str, Any] = {}
    if wish.temperature is not None:
        own |= {"greedy": True, "temperature": 1.0} if wish.temperature == 0 else {"temperature": wish.temperature}
        own.setdefault("greedy", False)
    if {"top_k", "top_p", "min_p"} & wish.noted.keys() and rules.narrowed is not None:
        own["support"] = rules.narrowed(*wish.narrow)
    return own


def usage_of(turn: PendingTurn, done: Done) -> dict[str, int]:
    before, drawn = turn.prompt_tokens, len(done.tokens)
    return {"prompt_tokens": before, "completion_tokens": drawn, "total_tokens": before + drawn}


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


class Post:
    """What the thread that decodes tells. A loop is woken once for all that comes before it looks."""

    def __init__(self) -> None:
        self._letters: deque[tuple[Events, Drew | Done]] = deque()
        self._woken: asyncio.AbstractEventLoop | None = None

    def send(self, loop: asyncio.AbstractEventLoop, to: Events, event: Drew | Done) -> None:
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

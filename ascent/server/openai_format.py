"""The wire format of OpenAI's API: settings of a request, messages, errors and events of a stream."""

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, Response

from ascent.environments.chat_session import InvalidMessageError
from ascent.environments.tool_call_formats import ToolCall
from ascent.environments.turn_parser import AssistantTurn
from ascent.inference.request_queue import Completion

BODY = 8 * 2**20
"""Bytes of a request."""
DISCARDED = 64 * 2**20
"""Bytes of an oversized request that are received and discarded, so that its client can read the error."""
NOTED = 100
"""Characters of a value that are noted."""
STOPS = 16
"""Stop strings of a request."""


class ApiError(Exception):
    """What is not done, and the HTTP status that says so."""

    def __init__(self, status: int, words: str, code: str = "", headers: Mapping[str, str] | None = None):
        super().__init__(words)
        self.status, self.code, self.headers = status, code, dict(headers or {})


class CompletionParams(NamedTuple):
    """What a client asks for beside the tokens."""

    max_tokens: int | None
    stop: tuple[str, ...]
    temperature: float | None
    narrow: tuple[int, float, float]
    seed: int | None
    stream: bool
    usage: bool
    logprobs: bool
    ids: bool
    one_call: bool
    """At most one call of a tool is read."""
    noted: dict[str, Any]
    """All that differs from what a request says by default."""


class Frame:
    """The frame of an answer: its name, kind, time and model."""

    def __init__(self, model: str, prefix: str, kind: str):
        self.kind, name = kind, f"{prefix}-{secrets.token_hex(12)}"
        self.base = {"id": name, "object": kind, "created": int(time.time()), "model": model}

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.base | body


# ---- reading ----------------------------------------------------------------------------------------------------


async def read_body(asked: Asked, most: int = BODY) -> dict[str, Any]:
    """The body of a request: a JSON object, of limited size."""
    length = asked.headers.get("content-length", "")
    body, size = bytearray(), 0
    if not length.isdecimal() or int(length) <= DISCARDED:
        async for piece in asked.stream():  # to its end: a client that is still sending cannot read an error
            size += len(piece)
            if size <= most:
                body += piece
            elif size > DISCARDED:
                break
    if size > most or (length.isdecimal() and int(length) > most):
        raise ApiError(413, f"the request body has more than {most} bytes, the limit for this context length")
    try:
        value = json.loads(bytes(body))
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # finite numbers, and no half characters
    except (ValueError, RecursionError):
        raise InvalidMessageError("the body is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidMessageError("the body is not a JSON object")
    return value


IGNORED = {
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "guided_json": (),
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}
"""Settings that are not there, and values of them that change nothing."""


def read_wish(body: Mapping[str, Any], plain: bool = False) -> CompletionParams:
    """The settings of a request; `Nonsense` for what no setting can be. `plain`: logprobs is a number there."""
    most = next((body[n] for n in ("max_completion_tokens", "max_tokens") if body.get(n) is not None), None)
    stop = body.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop
    if (
        not isinstance(stop, tuple)
        or len(stop) > STOPS
        or not all(isinstance(s, str) and 0 < len(s) <= 200 for s in stop)
    ):
        raise InvalidMessageError(f"stop: text, or a list of at most {STOPS} of them")
    if any("\N{REPLACEMENT CHARACTER}" in string for string in stop):
        raise InvalidMessageError("stop: text without U+FFFD")
    if most is not None and (type(most) is not int or most < 1):
        raise InvalidMessageError("max_tokens: a whole number above 0")
    if body.get("n") is not None and (type(body["n"]) is not int or body["n"] != 1):
        raise InvalidMessageError("n: one answer per request")
    if body.get("top_logprobs"):
        raise InvalidMessageError("top_logprobs: only the log-probs of the tokens that were drawn are known")
    top_k = _number(body, "top_k", 0, -1, 1 << 30)
    if top_k != int(top_k):
        raise InvalidMessageError("top_k: a whole number")
    narrow = (max(int(top_k), 0), _number(body, "top_p", 1.0, 1e-9, 1.0), _number(body, "min_p", 0.0, 0.0, 0.999999))
    temperature, seed = body.get("temperature"), body.get("seed")
    if temperature is not None:
        temperature = _number(body, "temperature", 1.0, 0.0, 100.0)
    if seed is not None and type(seed) is not int:
        raise InvalidMessageError("seed: a whole number")
    if type(parallel := body.get("parallel_tool_calls", True)) not in (bool, type(None)):
        raise InvalidMessageError("parallel_tool_calls: true or false")
    stream, options = body.get("stream") or False, body.get("stream_options") or {}
    if type(stream) is not bool or not isinstance(options, Mapping):
        raise InvalidMessageError("stream: true or false")
    noted = {name: body[name] for name in IGNORED if body.get(name) is not None and body[name] not in IGNORED[name]}
    asked = {
        name: body[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed") if body.get(name) is not None
    }
    logprobs = body.get("logprobs")
    if logprobs is not None and type(logprobs) is not bool and not (plain and type(logprobs) is int and logprobs >= 0):
        raise InvalidMessageError(f"logprobs: {'a whole number' if plain else 'true or false'}")
    return CompletionParams(
        most,
        stop,
        temperature,
        narrow,
        None if seed is None else seed % 2**62,
        stream,
        bool(options.get("include_usage")),
        logprobs is not None and logprobs is not False if plain else bool(logprobs),
        bool(body.get("return_token_ids")),
        parallel is False,
        {name: _noted(value) for name, value in {**asked, **noted}.items()},
    )


def _noted(value: Any) -> Any:
    """What is noted of a value that a client has sent: not megabytes."""
    words = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if len(words) <= NOTED else f"{words[:NOTED]}…"


def _number(body: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not low <= value <= high:
        raise InvalidMessageError(f"{name}: a number from {low:g} to {high:g}")
    return value


# ---- writing ----------------------------------------------------------------------------------------------------


def message_of(reply: AssistantTurn) -> dict[str, Any]:
    """A turn as the message of an assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [tool_call_of(call) for call in reply.calls]
    return message


def tool_call_of(call: ToolCall) -> dict[str, Any]:
    about = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id or f"call_{secrets.token_hex(8)}", "type": "function", "function": about}


def reason_of(done: Completion, reply: AssistantTurn | None = None) -> str:
    return "tool_calls" if done.finish_reason == "stop" and reply and reply.calls else done.finish_reason


def error_reply(status: int, words: str, code: str, headers: Mapping[str, str]) -> Response:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"message": words, "type": kind, "param": None, "code": code or None}
    return JSONResponse({"error": error}, status, headers=headers)


def event_of(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"

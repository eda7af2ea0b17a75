"""Response bodies of the OpenAI-compatible endpoint: messages, tool calls, errors and stream events."""

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ascent.core.errors import RunError
from ascent.environments.tool_call_formats import ToolCall
from ascent.environments.turn_parser import AssistantTurn
from ascent.inference.request_queue import Completion, QueueFullError

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An HTTP error with the `code` of OpenAI's error body."""

    def __init__(self, status_code: int, detail: str, code: str, headers: Mapping[str, str] | None = None):
        super().__init__(status_code, detail, headers)
        self.code = code


class ResponseFrame:
    """The fields that all responses and chunks of one completion share: id, kind, time and model."""

    def __init__(self, model: str, prefix: str, kind: str):
        self.kind = kind
        self.fields = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.fields | body


def format_message(turn: AssistantTurn) -> dict[str, Any]:
    """Return a turn as a message of the assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [format_tool_call(call) for call in turn.calls]
    return message


def format_tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id or f"call_{secrets.token_hex(8)}", "type": "function", "function": function}


def finish_reason(completion: Completion, turn: AssistantTurn | None = None) -> str:
    reason = completion.finish_reason
    return "tool_calls" if reason == "stop" and turn and turn.calls else reason


def format_event(body: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


def format_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body of an error."""
    status = 429 if isinstance(error, QueueFullError) else 503 if isinstance(error, RunError) else 400
    message: Any = str(error)
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    code = "rate_limit" if status == 429 else getattr(error, "code", None)
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return status, {"error": {"message": message, "type": kind, "param": None, "code": code}}


def render_api_error(error: Exception) -> Response:
    """Return the response to a failed request. It closes the connection: the rest of the request is not read."""
    status, body = format_error(error)
    headers = {"connection": "close"} | dict(getattr(error, "headers", None) or {})
    if status == 429:
        headers.setdefault("retry-after", "1")
    return JSONResponse(body, status, headers)

"""What a command may bring with it, and what an answer may hold."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from ascent.core.types import Refused

MOST_BYTES = 100_000
"""The longest command that is read."""


async def body(request: Request) -> dict[str, Any]:
    """A JSON object, of bounded length."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > MOST_BYTES:
            raise Refused(f"the command is longer than {MOST_BYTES} bytes")
    try:
        asked = json.loads(data)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        raise Refused("a command is a JSON object")
    return asked


class Json(JSONResponse):
    """JSON of what may come from anyone's files: numbers that are not finite are null, odd letters are escaped."""

    def render(self, content: Any) -> bytes:
        try:
            text = json.dumps(content, allow_nan=False, separators=(",", ":"))
        except ValueError:
            text = json.dumps(_finite(content), allow_nan=False, separators=(",", ":"))
        return text.encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value

"""What a command may bring with it."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from ascent.types import Refused

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

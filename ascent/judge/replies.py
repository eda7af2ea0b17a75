"""What a refusal says: how long to wait, and why."""

from __future__ import annotations

import json
import time
from email.utils import parsedate_to_datetime


def seconds_of(header: str | None) -> float | None:
    """Retry-After: seconds, or a date."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def message_of(text: str) -> str:
    """The words of an error reply, not shortened yet: half a key would not be seen."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return " ".join(text.split()) or "no words"

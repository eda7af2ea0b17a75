"""A problem in words, and the grade of a response to it. It imports nothing of Ascent: graders need no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

Message = dict[str, str]
"""One message of a chat: its role and its content."""


@dataclass(frozen=True)
class Problem:
    """One prompt, what it should lead to, and whatever else is known of it."""

    prompt: str | list[Message]
    """Words, or the messages of a chat."""
    answer: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    """Passed to a reward function of your own by name."""


class Graded(NamedTuple):
    """What a task says of one response."""

    value: float
    strict: bool
    """Right, and in the form that was asked for."""
    lenient: bool
    """Right, in whatever form. What is strictly right is leniently right too."""
    reason: str = ""

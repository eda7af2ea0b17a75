"""A sequence that is being decoded."""

from __future__ import annotations

from dataclasses import dataclass, field

NOWHERE = -1
"""The lane of a row that is parked."""


@dataclass(eq=False)
class Sequence:
    """One response on pages, from when it enters until it leaves or is evicted; then it is another row."""

    response: int
    prompt: int
    length: int
    """Tokens that its own pages hold, or will after the steps that are under way."""
    pages: list[int] = field(default_factory=list)
    lane: int = NOWHERE

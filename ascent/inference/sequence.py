"""A sequence that is being decoded."""

from __future__ import annotations

from dataclasses import dataclass, field

NOT_RUNNING = -1
"""The lane of a row that is parked."""


@dataclass(eq=False)
class Sequence:
    """One response on pages, from when it enters until it leaves or is evicted; then it is another row."""

    seq_id: int
    prompt_id: int
    num_tokens: int
    """Tokens that its own pages hold, or will after the steps that are under way."""
    block_table: list[int] = field(default_factory=list)
    batch_index: int = NOT_RUNNING

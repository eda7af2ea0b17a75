"""A sequence that is being decoded."""

from __future__ import annotations

from dataclasses import dataclass, field

NOT_RUNNING = -1
"""`Sequence.batch_index` of a sequence that waits for an observation."""


@dataclass(eq=False)
class Sequence:
    """A response with KV-cache blocks. A sequence that is preempted and scheduled again becomes a new object."""

    seq_id: int
    prompt_id: int
    num_tokens: int
    """Response tokens whose keys and values are in `block_table`, counting decode steps that are still in flight."""
    block_table: list[int] = field(default_factory=list)
    """Blocks of the response. Those of the prompt are shared (`Scheduler.prompt_blocks`)."""
    batch_index: int = NOT_RUNNING

"""KV-cache blocks and their allocation."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class BlockManager:
    """Allocator of KV-cache blocks.

    Sequences get the lowest free blocks and prompts the highest ones, so that blocks of one kind are close together.
    `prompt_region`: from this block upwards, prompts get the lowest free block instead.
    """

    def __init__(self, num_blocks: int, block_size: int, prompt_region: int | None = None):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prompt_region = num_blocks if prompt_region is None else prompt_region
        self._free = set(range(num_blocks))
        self._low = list(range(num_blocks))
        self._high = [
            self._prompt_priority(block)
            for block in (*range(self.prompt_region, num_blocks), *reversed(range(self.prompt_region)))
        ]
        """Heaps of free blocks (for sequences) and of their ranks (for prompts). Both may contain stale entries: blocks
        that were allocated through the other heap."""
        self._freed: list[int] = []
        """Blocks that were freed and not yet pushed to the heaps; `allocate_blocks` does that."""
        self.peak_used = 0
        """Largest number of blocks that were allocated at once."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate_blocks(self, count: int, for_prompt: bool = False) -> list[int]:
        """Allocate blocks. At least `count` blocks must be free."""
        for block in self._freed:
            heapq.heappush(self._low, block)
            heapq.heappush(self._high, self._prompt_priority(block))
        self._freed.clear()
        blocks: list[int] = []
        while len(blocks) < count:
            block = self._block(heapq.heappop(self._high)) if for_prompt else heapq.heappop(self._low)
            if block in self._free:
                self._free.remove(block)
                blocks.append(block)
        self.peak_used = max(self.peak_used, self.num_blocks - len(self._free))
        return blocks

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Free allocated blocks."""
        num_free = len(self._free) + len(blocks)
        self._free.update(blocks)
        if len(self._free) != num_free:
            raise AssertionError(f"some of the blocks {blocks} were freed twice")
        self._freed += blocks

    def _prompt_priority(self, block: int) -> int:
        """Return the priority of a block for prompts; the lowest rank is allocated first."""
        return block if block >= self.prompt_region else 2 * self.num_blocks - block

    def _block(self, rank: int) -> int:
        return rank if rank < self.num_blocks else 2 * self.num_blocks - rank

"""KV-cache blocks and their allocation."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class BlockManager:
    """The pages that are free. Rows take the lowest and prompts the highest, so each kind lies together.

    `border`: from there on the lowest are prompts' first, in the order in which they come.
    """

    def __init__(self, num_blocks: int, block_size: int, prompt_region: int | None = None):
        self.num_blocks, self.block_size, self.prompt_region = (
            num_blocks,
            block_size,
            num_blocks if prompt_region is None else prompt_region,
        )
        self._free = set(range(num_blocks))
        self._low = list(range(num_blocks))
        self._high = [
            self._rank(page) for page in (*range(self.prompt_region, num_blocks), *reversed(range(self.prompt_region)))
        ]
        """Heaps of the free pages and of their ranks; a page that was taken from the other end may still be there."""
        self._given: list[int] = []
        """Free pages that are in neither yet: most calls end before anybody takes them again."""
        self.peak_used = 0
        """The largest number of pages that were ever held at once."""

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def blocks_needed(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, count: int, high: bool = False) -> list[int]:
        """This many pages; there must be as many."""
        for page in self._given:
            heapq.heappush(self._low, page)
            heapq.heappush(self._high, self._rank(page))
        self._given.clear()
        pages: list[int] = []
        while len(pages) < count:
            page = self._page(heapq.heappop(self._high)) if high else heapq.heappop(self._low)
            if page in self._free:
                self._free.remove(page)
                pages.append(page)
        self.peak_used = max(self.peak_used, self.num_blocks - len(self._free))
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Back to the free ones."""
        free = len(self._free) + len(pages)
        self._free.update(pages)
        if len(self._free) != free:
            raise AssertionError(f"some of the pages {pages} were given back twice")
        self._given += pages

    def _rank(self, page: int) -> int:
        """When a prompt gets this page, if it is free."""
        return page if page >= self.prompt_region else 2 * self.num_blocks - page

    def _page(self, rank: int) -> int:
        return rank if rank < self.num_blocks else 2 * self.num_blocks - rank

"""Passes over the rows of a task: every row comes once, in an order of its own, before any comes again."""

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ascent.core.errors import ConfigError

MAX_UNUSABLE_ROWS = 10_000
"""Rows of a stream in a row that may be unusable before a step goes without."""


class EpochSampler:
    """Which rows each step takes, and how many passes there have been by then: the metric `epoch`.

    Both depend on the seed, the prompts per step and the step alone. So a checkpoint needs nothing but its step, and
    whoever samples ahead takes the same rows. A step at the end of a pass is filled up from the next one, with rows
    that it does not have yet where there are any. Rows that are not `usable` are passed over.
    """

    def __init__(self, size: int, usable: Callable[[int], bool]):
        self.size, self.usable = size, usable
        self._start(0, 0)

    def _start(self, count: int, seed: int) -> None:
        self._count, self._seed, self._step = count, seed, 0
        self._begun = 0
        """Passes that were begun."""
        self._waiting: deque[int] = deque()
        """The rows that are still to come in the present one."""

    def rows(self, step: int, count: int, seed: int) -> tuple[list[int], float]:
        """The rows of a step, and the passes at its end. No rows: none is usable."""
        if (count, seed) != (self._count, self._seed) or step < self._step:
            self._start(count, seed)
        rows: list[int] = []
        while self._step <= step:
            rows = self._next()
            self._step += 1
        return rows, (self._begun * self.size - len(self._waiting)) / self.size

    def steps(self, passes: float, count: int) -> int:
        """Steps in which every usable row comes this often, at least."""
        usable = sum(map(self.usable, range(self.size)))
        return max(1, -(-round(passes * usable) // count))

    def _next(self) -> list[int]:
        rows: list[int] = []
        while len(rows) < self._count:
            if not self._waiting:
                if self._begun and not any(map(self.usable, range(self.size))):
                    break
                self._waiting = deque(self._order(rows))
                self._begun += 1
            row = self._waiting.popleft()
            if self.usable(row):
                rows.append(row)
        while self._waiting and not self.usable(self._waiting[0]):  # so that a pass ends with its last usable row
            self._waiting.popleft()
        return rows

    def _order(self, taken: list[int]) -> list[int]:
        """The next pass. If a step has taken rows of the one before, others come first until it is full."""
        key = np.random.SeedSequence((self._seed, self._begun)).generate_state(1, np.uint64) >> 1
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(int(key[0]))).tolist()
        if not taken:
            return order
        times = Counter(taken)
        others = sorted(filter(self.usable, order), key=lambda row: times[row])
        first = set(others[: self._count - len(taken)])
        return sorted(order, key=lambda row: row not in first)


class StreamSampler:
    """Rows of a stream: each step takes the next ones that are usable. There is no end, and no order of its own."""

    def __init__(self, usable: Callable[[int], bool]):
        self.usable = usable
        self._start(0)

    def _start(self, count: int) -> None:
        self._count, self._step = count, 0
        self.position = 0
        """The rows that have come so far."""

    def rows(self, step: int, count: int, seed: int) -> tuple[list[int], float | None]:
        """The rows of a step. How many passes there have been, nobody knows."""
        if count != self._count or step < self._step:
            self._start(count)
        rows: list[int] = []
        while self._step <= step:
            rows, barren = [], 0
            while len(rows) < count and barren < MAX_UNUSABLE_ROWS:
                usable = self.usable(self.position)
                rows += [self.position] if usable else []
                barren = 0 if usable else barren + 1
                self.position += 1
            self._step += 1
        return rows, None

    def steps(self, passes: float, count: int) -> int:
        raise ConfigError(f"--data-epochs {passes:g}: nobody knows the length of a stream. Set --steps")


def steps_for_epochs(passes: float, prompts: int, task: Any) -> int:
    """Steps that go through the rows of a task this often. Rows that are left out are not counted."""
    if task.epoch_sampler is None:
        raise ConfigError(
            f"--data-epochs {passes:g}: the task has no rows to go through; its prompts are made, and there is no end "
            "of them. Set --steps"
        )
    return task.epoch_sampler.steps(passes, prompts)

"""Order of the training rows: each epoch is a shuffled pass over all rows; streams are read in order."""

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ascent.core.errors import ConfigError

MAX_UNUSABLE_ROWS = 10_000
"""Consecutive unusable rows of a stream after which a step gives up."""


class EpochSampler:
    """Chooses the rows of each step, and counts epochs (the metric `epoch`).

    Both depend only on the seed, the number of prompts per step and the step. So a checkpoint only needs its step, and
    sampling ahead takes the same rows. A step at the end of an epoch is filled with rows of the next epoch, preferring
    rows that the step does not contain yet. Rows that are not `usable` are skipped.
    """

    def __init__(self, size: int, usable: Callable[[int], bool]):
        self.size, self.usable = size, usable
        self._start(0, 0)

    def _start(self, count: int, seed: int) -> None:
        self._count, self._seed, self._step = count, seed, 0
        self._epochs_started = 0
        self._remaining: deque[int] = deque()
        """Rows of the current epoch that have not been used yet."""

    def rows(self, step: int, count: int, seed: int) -> tuple[list[int], float]:
        """Return the rows of a step and the number of epochs after it. The list is empty if no row is usable."""
        if (count, seed) != (self._count, self._seed) or step < self._step:
            self._start(count, seed)
        rows: list[int] = []
        while self._step <= step:
            rows = self._next()
            self._step += 1
        return rows, (self._epochs_started * self.size - len(self._remaining)) / self.size

    def steps(self, epochs: float, count: int) -> int:
        """Return the number of steps, with `count` prompts each, that cover at least `epochs` epochs of usable rows."""
        usable = sum(map(self.usable, range(self.size)))
        return max(1, -(-round(epochs * usable) // count))

    def _next(self) -> list[int]:
        rows: list[int] = []
        while len(rows) < self._count:
            if not self._remaining:
                if self._epochs_started and not any(map(self.usable, range(self.size))):
                    break
                self._remaining = deque(self._order(rows))
                self._epochs_started += 1
            row = self._remaining.popleft()
            if self.usable(row):
                rows.append(row)
        while self._remaining and not self.usable(self._remaining[0]):  # an epoch ends with its last usable row
            self._remaining.popleft()
        return rows

    def _order(self, taken: list[int]) -> list[int]:
        """Return the order of the next epoch. Rows that the current step does not contain yet come first."""
        key = np.random.SeedSequence((self._seed, self._epochs_started)).generate_state(1, np.uint64) >> 1
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(int(key[0]))).tolist()
        if not taken:
            return order
        times = Counter(taken)
        others = sorted(filter(self.usable, order), key=lambda row: times[row])
        first = set(others[: self._count - len(taken)])
        return sorted(order, key=lambda row: row not in first)


class StreamSampler:
    """Rows of a stream: each step takes the next usable rows. A stream has no length."""

    def __init__(self, usable: Callable[[int], bool]):
        self.usable = usable
        self._start(0)

    def _start(self, count: int) -> None:
        self._count, self._step = count, 0
        self.position = 0
        """Number of rows read so far."""

    def rows(self, step: int, count: int, seed: int) -> tuple[list[int], float | None]:
        """Return the rows of a step, and None for the number of epochs, which is unknown."""
        if count != self._count or step < self._step:
            self._start(count)
        rows: list[int] = []
        while self._step <= step:
            rows, num_unusable = [], 0
            while len(rows) < count and num_unusable < MAX_UNUSABLE_ROWS:
                usable = self.usable(self.position)
                rows += [self.position] if usable else []
                num_unusable = 0 if usable else num_unusable + 1
                self.position += 1
            self._step += 1
        return rows, None

    def steps(self, epochs: float, count: int) -> int:
        raise ConfigError(f"--data-epochs {epochs:g}: the length of a stream is unknown. Set --steps")


def steps_for_epochs(epochs: float, prompts: int, task: Any) -> int:
    """Return the number of steps for this number of epochs. Rows that are left out are not counted."""
    if task.epoch_sampler is None:
        raise ConfigError(
            f"--data-epochs {epochs:g}: the task generates its prompts without end, so it has no epochs. Set --steps"
        )
    return task.epoch_sampler.steps(epochs, prompts)

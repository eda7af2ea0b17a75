"""A run's metrics in windows of steps: means with their standard errors, before and now."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

LIKELY = 2.5
"""Standard errors of a difference that may be there."""
FLAT = 0.05
"""The most that a flat accuracy may have risen."""


class Mean(NamedTuple):
    """A mean over a window of steps, with its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, count: float, total: float, squares: float) -> Mean | None:
        if count < 2:
            return None
        value = total / count
        return cls(value, math.sqrt(max(0.0, squares / count - value**2) / (count - 1)))


def difference(before: Mean, now: Mean) -> tuple[float, float]:
    """Now less before, and its standard error."""
    return now.value - before.value, math.hypot(before.error, now.error)


@dataclass(frozen=True)
class Block:
    """Sums over some steps: how many numbers, their total, their squares, for each metric in turn."""

    first: int
    last: int
    sums: list[float]

    def joined(self, other: Block) -> Block:
        return Block(self.first, other.last, [a + b for a, b in zip(self.sums, other.sums, strict=True)])


def sums(values: Sequence[Any]) -> tuple[float, float, float]:
    """How many of these are numbers, their total, and that of their squares."""
    try:
        total = math.fsum(values)
        if math.isfinite(total):
            return float(len(values)), total, math.fsum(value * value for value in values)
    except (TypeError, ValueError, OverflowError):
        pass
    numbers = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return float(len(numbers)), math.fsum(numbers), math.fsum(value * value for value in numbers)


class Change:
    """Two windows of a run, one before the other."""

    def __init__(self, keys: Sequence[str], before: Sequence[Block], now: Sequence[Block]):
        self.steps = (before[0].first, now[-1].last)
        self.then = f"{before[0].first}–{before[-1].last}"
        self.words = f"from steps {self.then} to {now[0].first}–{now[-1].last}"
        self._before, self._now = (
            [sum(column) for column in zip(*(b.sums for b in w), strict=True)] for w in (before, now)
        )
        self._place = {key: 3 * i for i, key in enumerate(keys)}
        self._known: dict[str, tuple[Mean, Mean] | None] = {}

    def of(self, key: str) -> tuple[Mean, Mean] | None:
        """A metric before and now; None where it was not measured."""
        if key not in self._known:
            at = self._place[key]
            before, now = Mean.of(*self._before[at : at + 3]), Mean.of(*self._now[at : at + 3])
            self._known[key] = None if before is None or now is None else (before, now)
        return self._known[key]

    def numbers(self, *keys: str) -> dict[str, list[float]]:
        pairs = {key: pair for key in keys if (pair := self.of(key)) is not None}
        return {key: [before.value, now.value] for key, (before, now) in pairs.items()}

    @cached_property
    def flat(self) -> bool:
        """Has the accuracy surely not risen by much, and has it not even begun to?"""
        pair = self.of("accuracy")
        if pair is None:
            return False
        rise, error = difference(*pair)
        return rise + 2 * error <= FLAT and (rise <= 0 or rise < LIKELY * error)

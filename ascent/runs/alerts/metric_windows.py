"""The comparison of two windows of a run, from which alerts are raised, and the alert itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

CERTAIN_SIGMAS, POSSIBLE_SIGMAS = 5.0, 2.5
"""Number of standard errors of a certain difference, and of a possible one."""
SOLVED_ACCURACY, MAX_FLAT_RISE, MAX_LEVEL_MOVE = 0.9, 0.05, 0.1
"""Accuracy of a solved task; maximum rise of a flat accuracy; maximum change of a level reward (in std)."""


@dataclass(frozen=True)
class Alert:
    """An observation about a run, with its evidence."""

    name: str
    text: str
    metrics: dict[str, list[float]]
    """For each metric its values before and now, or one value for a single step."""
    steps: tuple[int, int]
    """First and last step of the comparison; equal for a single step."""
    show: str = "all"
    q: str = ""
    """The filter and the search text for the completions that show it."""

    def event(self, step: int, recorded: int | None) -> dict[str, Any]:
        """Return the line of events.jsonl; `recorded` is the step whose completions show the alert."""
        evidence: dict[str, Any] = {"metrics": self.metrics, "steps": list(self.steps)}
        if recorded is not None:
            evidence["rollouts"] = {"step": recorded, "show": self.show, "q": self.q}
        return {"step": step, "event": "alert", "name": self.name, "text": self.text, "evidence": evidence}


class MetricChange(NamedTuple):
    """The mean of a metric in two windows of steps, and the standard error of its change."""

    before: float
    now: float
    error: float

    @property
    def rise(self) -> float:
        return self.now - self.before

    def __format__(self, spec: str) -> str:
        """Format both values: f"{change:.1%}" is "3.0% to 4.5%"."""
        return f"{self.before:{spec}} to {self.now:{spec}}"


class StepBlock(NamedTuple):
    """Sums over some steps: for each metric its count, its total and the total of its squares."""

    first: int
    last: int
    sums: list[float]


def merge_blocks(blocks: Sequence[StepBlock]) -> StepBlock:
    columns = zip(*(block.sums for block in blocks), strict=True)
    return StepBlock(blocks[0].first, blocks[-1].last, [sum(column) for column in columns])


def sums(values: Sequence[Any]) -> tuple[float, float, float]:
    """Return the count, the sum and the sum of squares of the finite numbers in `values`."""
    numbers = [value for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    return float(len(numbers)), math.fsum(numbers), math.fsum(value * value for value in numbers)


def mean_with_error(count: float, total: float, squares: float) -> tuple[float, float]:
    mean = total / count
    return mean, math.sqrt(max(0.0, squares / count - mean**2) / (count - 1))


class WindowComparison:
    """Two windows of a run: before and now."""

    def __init__(self, keys: Sequence[str], before: StepBlock, now: StepBlock):
        self.steps = (before.first, now.last)
        self.before_steps = f"{before.first}–{before.last}"
        self.words = f"from steps {self.before_steps} to {now.first}–{now.last}"
        self._sums = before.sums, now.sums
        self._place = {key: 3 * i for i, key in enumerate(keys)}

    def of(self, key: str) -> MetricChange | None:
        """Return a metric before and now; None if it was measured fewer than two times in a window."""
        before, now = (sums[self._place[key] :][:3] for sums in self._sums)
        if min(before[0], now[0]) < 2:
            return None
        (then, error), (late, late_error) = mean_with_error(*before), mean_with_error(*now)
        return MetricChange(then, late, math.hypot(error, late_error))

    def alert(self, name: str, text: str, *keys: str, show: str = "all") -> Alert:
        """Return an alert with these metrics, before and now, as evidence."""
        pairs = {key: pair for key in keys if (pair := self.of(key)) is not None}
        return Alert(name, text, {key: [pair.before, pair.now] for key, pair in pairs.items()}, self.steps, show)

    @cached_property
    def flat(self) -> bool:
        """Whether the accuracy has certainly not risen by much, without a sign that it begins to rise."""
        pair = self.of("accuracy")
        if pair is None:
            return False
        return pair.rise + 2 * pair.error <= MAX_FLAT_RISE and (
            pair.rise <= 0 or pair.rise < POSSIBLE_SIGMAS * pair.error
        )

"""Two windows of a run, compared: what an alert is raised from, and the alert itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

SURE, LIKELY = 5.0, 2.5
"""Standard errors of a certain difference, and of a possible one."""
SOLVED, FLAT, LEVEL = 0.9, 0.05, 0.1
"""The accuracy of a solved task; maximum rise of a flat one; standard deviations that a level reward may move."""


@dataclass(frozen=True)
class Alert:
    """What was seen, and where to look."""

    name: str
    text: str
    metrics: dict[str, list[float]]
    """For each metric: its value before and now, or a single number for a single step."""
    steps: tuple[int, int]
    """First and last step of the comparison; the same step twice for a single step."""
    show: str = "all"
    q: str = ""
    """Which completions to look at, and what to search for in them."""

    def event(self, step: int, recorded: int | None) -> dict[str, Any]:
        """The line of events.jsonl; `recorded` is the step whose completions show it."""
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
        """f"{pair:.1%}" is "3.0% to 4.5%"."""
        return f"{self.before:{spec}} to {self.now:{spec}}"


class StepBlock(NamedTuple):
    """Sums over some steps: for each metric its count, its total and the total of its squares."""

    first: int
    last: int
    sums: list[float]


def joined(blocks: Sequence[StepBlock]) -> StepBlock:
    columns = zip(*(block.sums for block in blocks), strict=True)
    return StepBlock(blocks[0].first, blocks[-1].last, [sum(column) for column in columns])


def sums(values: Sequence[Any]) -> tuple[float, float, float]:
    """How many of these are numbers, their total, and the total of their squares."""
    numbers = [value for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    return float(len(numbers)), math.fsum(numbers), math.fsum(value * value for value in numbers)


def mean_with_error(count: float, total: float, squares: float) -> tuple[float, float]:
    mean = total / count
    return mean, math.sqrt(max(0.0, squares / count - mean**2) / (count - 1))


class Change:
    """Two windows of a run, one before the other."""

    def __init__(self, keys: Sequence[str], before: StepBlock, now: StepBlock):
        self.steps = (before.first, now.last)
        self.then = f"{before.first}–{before.last}"
        self.words = f"from steps {self.then} to {now.first}–{now.last}"
        self._sums = before.sums, now.sums
        self._place = {key: 3 * i for i, key in enumerate(keys)}

    def of(self, key: str) -> MetricChange | None:
        """A metric before and now; None where it was measured less than twice."""
        before, now = (sums[self._place[key] :][:3] for sums in self._sums)
        if min(before[0], now[0]) < 2:
            return None
        (then, error), (late, late_error) = mean_with_error(*before), mean_with_error(*now)
        return MetricChange(then, late, math.hypot(error, late_error))

    def alert(self, name: str, text: str, *keys: str, show: str = "all") -> Alert:
        """An alert whose evidence is these metrics, before and now."""
        pairs = {key: pair for key in keys if (pair := self.of(key)) is not None}
        return Alert(name, text, {key: [pair.before, pair.now] for key, pair in pairs.items()}, self.steps, show)

    @cached_property
    def flat(self) -> bool:
        """Has the accuracy surely not risen by much, and shows no sign of beginning to?"""
        pair = self.of("accuracy")
        if pair is None:
            return False
        return pair.rise + 2 * pair.error <= FLAT and (pair.rise <= 0 or pair.rise < LIKELY * pair.error)

"""Flags from many steps: trends in a run's metrics that are a reason to look at its completions.

A Watch gets the lines of metrics.jsonl one by one. It keeps sums over blocks of steps, fewer than `BLOCKS`: when there
are that many, neighbors are joined, so that they cover the whole run in bounded memory. It compares windows: the first
quarter of the run with the last, and the third quarter with the last. A difference must be large in itself and large
compared with both standard errors, twice in a row, because a false alarm is worse than silence.

One flag needs no windows: a gradient or a KL that is far too large for any run.

The state of a Watch depends only on the lines, so a resumed run gets the same flags as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ascent.core.metric_names import MISMATCH
from ascent.records.watch.flags import Flag, one_answer

LENGTH = "completions/mean_length"
KEYS = ("reward", "reward_std", "accuracy", "entropy", LENGTH, MISMATCH)
FIRST, BLOCKS, LEAST = 4, 32, 8
"""Steps per block at first; number of blocks at which they are joined; least number of blocks to compare."""
SURE = 5.0
"""Standard errors of a certain difference."""
SOLVED, HALF = 0.9, 0.5
"""The accuracy of a solved task, and of an unsolved one."""
EARNED, LEVEL, COUNTED = 0.6, 0.1, 0.02
"""Most of what there was to gain, as a share; standard deviations that a level reward may move; a low accuracy."""
BEHIND = 0.25
"""The accuracy does not follow if it has gained less than this share of what there was to gain."""
DRIFT, TOKENS = 1.5, 5.0
"""Lengths have drifted if they changed by this factor and by this many tokens."""
COLLAPSED = 0.1
"""Share of the initial entropy."""
APART, TIMES = 0.02, 3.0
"""A mismatch counts from this many nats per token, and from this multiple of its initial value."""
BEYOND = {"grad_norm": (1e6, 1e3, "gradient's norm"), "kl": (100.0, 10.0, "KL in nats per token")}
"""Values that are out of scale in any run; values that are so after much smaller ones; the name of the metric."""
DECADES, USUAL = 5, 16
"""Powers of ten above the median that make a jump; least number of values for a median."""
NEARLY_ALL, PATIENCE = 0.9, 64
"""Share of the reward's change that dominates it; least number of steps to judge that."""
LIKELY = 2.5
"""Standard errors of a possible difference."""
FLAT = 0.05
"""Maximum rise of a flat accuracy."""


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


@dataclass(frozen=True)
class StepBlock:
    """Sums over some steps: for each metric its count, its total and the total of its squares."""

    first: int
    last: int
    sums: list[float]

    def joined(self, other: StepBlock) -> StepBlock:
        return StepBlock(self.first, other.last, [a + b for a, b in zip(self.sums, other.sums, strict=True)])


def sums(values: Sequence[Any]) -> tuple[float, float, float]:
    """How many of these are numbers, their total, and the total of their squares."""
    numbers = [value for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    return float(len(numbers)), math.fsum(numbers), math.fsum(value * value for value in numbers)


def mean_with_error(count: float, total: float, squares: float) -> tuple[float, float]:
    """A mean and its standard error, from these sums."""
    mean = total / count
    return mean, math.sqrt(max(0.0, squares / count - mean**2) / (count - 1))


class Change:
    """Two windows of a run, one before the other."""

    def __init__(self, keys: Sequence[str], before: Sequence[StepBlock], now: Sequence[StepBlock]):
        self.steps = (before[0].first, now[-1].last)
        self.then = f"{before[0].first}–{before[-1].last}"
        self.words = f"from steps {self.then} to {now[0].first}–{now[-1].last}"
        self._before, self._now = (
            [sum(column) for column in zip(*(b.sums for b in w), strict=True)] for w in (before, now)
        )
        self._place = {key: 3 * i for i, key in enumerate(keys)}

    def of(self, key: str) -> MetricChange | None:
        """A metric before and now; None where it was measured less than twice."""
        at = self._place[key]
        before, now = self._before[at : at + 3], self._now[at : at + 3]
        if min(before[0], now[0]) < 2:
            return None
        (then, error), (late, late_error) = mean_with_error(*before), mean_with_error(*now)
        return MetricChange(then, late, math.hypot(error, late_error))

    def flag(self, name: str, text: str, *keys: str, show: str = "all") -> Flag:
        """A flag whose evidence is these metrics, before and now."""
        pairs = {key: pair for key in keys if (pair := self.of(key)) is not None}
        return Flag(name, text, {key: [pair.before, pair.now] for key, pair in pairs.items()}, self.steps, show)

    @cached_property
    def flat(self) -> bool:
        """Has the accuracy surely not risen by much, and shows no sign of beginning to?"""
        pair = self.of("accuracy")
        if pair is None:
            return False
        return pair.rise + 2 * pair.error <= FLAT and (pair.rise <= 0 or pair.rise < LIKELY * pair.error)


class Watch:
    """Gets a run's lines one by one, and returns flags."""

    def __init__(self, maximum: float | None = None, weights: Mapping[str, float] | None = None):
        self.maximum, self.weights = maximum, weights
        self.keys: tuple[str, ...] = KEYS
        self.blocks: list[StepBlock] = []
        self.start: StepBlock | None = None
        """The first block, before any were joined."""
        self.first: dict[str, Any] = {}
        """The first evaluation, and its step."""
        self.sizes: dict[str, Counter[int]] = {key: Counter() for key in BEYOND}
        """For each metric, how often it had each power of ten."""
        self._held: set[str] = set()
        """The names of the flags of the last comparison."""
        self._size = FIRST
        self._waiting: list[Sequence[Any]] = []
        self._since = 0

    def see(self, line: Mapping[str, Any]) -> list[Flag]:
        """The flags of one more step, and if it completes a block, those of the comparison of windows."""
        return [*self._beyond(line), *self._blocked(line)]

    def _beyond(self, line: Mapping[str, Any]) -> list[Flag]:
        """A metric that is far too large in this step."""
        flags = []
        for key, (senseless, large, name) in BEYOND.items():
            value = line.get(key)
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                continue
            seen, power = self.sizes[key], math.floor(math.log10(value))
            jump = value >= large and seen.total() >= USUAL and power > _median(seen) + DECADES
            seen[power] += 1
            if value < senseless and not jump:
                continue
            than = f", more than {10**DECADES:,} times its median before" if jump else ""
            text = f"out of scale: the {name} is {value:.3g} in this step{than}"
            flags.append(Flag("out-of-scale", text, {key: [float(value)]}, (line["step"], line["step"])))
        return flags[:1]

    def _blocked(self, line: Mapping[str, Any]) -> list[Flag]:
        if not self.blocks and not self._waiting:
            self.keys = (*KEYS, *(key for key in sorted(line) if _is_component(key)))
        if line.get("eval/accuracy") is not None and not self.first:
            self.first = {k: line[k] for k in ("step", "eval/accuracy", "eval/reward") if line.get(k) is not None}
        if not self._waiting:
            self._since = line["step"]
        self._waiting.append([line.get(key) for key in self.keys])
        if len(self._waiting) < self._size:
            return []
        self.blocks.append(
            StepBlock(self._since, line["step"], [x for c in zip(*self._waiting, strict=True) for x in sums(c)])
        )
        self._waiting = []
        self.start = self.start or self.blocks[0]
        if len(self.blocks) == BLOCKS:
            self.blocks = [a.joined(b) for a, b in zip(self.blocks[::2], self.blocks[1::2], strict=True)]
            self._size *= 2
        return self._compared() if len(self.blocks) >= LEAST and len(self.blocks) % 2 == 0 else []

    def _compared(self) -> list[Flag]:
        blocks, quarter = self.blocks, len(self.blocks) // 4
        half = len(blocks) // 2
        whole = Change(self.keys, blocks[:quarter], blocks[-quarter:])
        late = Change(self.keys, blocks[half : half + quarter], blocks[-quarter:])
        begun = Change(self.keys, [self.start or blocks[0]], blocks[-quarter:])
        raised = [
            self._reward_up(whole, late) or self._reward_up(late, late),
            self._drift(whole) or self._drift(late),
            self._dominated(whole) or self._dominated(begun),
            self._collapsed(begun, late),
            self._apart(whole) or self._apart(begun),
        ]
        flags = [flag for flag in raised if flag is not None]
        before, self._held = self._held, {flag.name for flag in flags}
        return [flag for flag in flags if flag.name in before]

    def _moved(self, change: Change) -> float | None:
        """How far the reward has surely moved, in standard deviations of the responses of a step."""
        reward, spread = change.of("reward"), change.of("reward_std")
        if reward is None or spread is None or spread.before <= 0:
            return None
        return reward.rise / spread.before if abs(reward.rise) >= SURE * reward.error else None

    def _gained(self, key: str, most: float) -> float:
        """How much of what there was to gain after the first quarter has been gained by now: 1 is all."""
        pair = Change(self.keys, self.blocks[: len(self.blocks) // 4], self.blocks[-1:]).of(key)
        return pair.rise / (most - pair.before) if pair and most > pair.before else 0.0

    def _behind(self, change: Change, late: Change) -> bool:
        """Is most or nearly all of the reward gained, and the accuracy has not followed?"""
        if not self.maximum:
            return change.flat
        gained = self._gained("reward", self.maximum)
        if change.flat:
            return gained >= EARNED
        return late.flat and gained >= NEARLY_ALL and self._gained("accuracy", 1.0) < BEHIND

    def _reward_up(self, change: Change, late: Change) -> Flag | None:
        """A reward in small parts usually rises before the accuracy does, so most of it must be gained first.

        If its maximum is unknown, it must have stopped rising, or some answers must be right.
        """
        moved, accuracy, reward = self._moved(change), change.of("accuracy"), change.of("reward")
        if moved is None or accuracy is None or reward is None or accuracy.now >= SOLVED:
            return None
        level = abs(self._moved(late) or 0.0) < LEVEL
        clear = self.maximum or level or accuracy.now >= COUNTED
        if moved < (HALF if self.maximum else 1.0) or not clear or not self._behind(change, late):
            return None
        of = f" of {self.maximum:g}" if self.maximum else ""
        text = (
            f"reward up, accuracy {'flat' if change.flat else 'far behind'}: {change.words} the reward went from "
            f"{reward:.3g}{of}, and the share of exactly right answers from {accuracy:.1%}"
        )
        return change.flag("reward-up-accuracy-flat", text, "reward", "accuracy", show="wrong")

    def _drift(self, change: Change) -> Flag | None:
        length, accuracy = change.of(LENGTH), change.of("accuracy")
        if length is None or accuracy is None or not change.flat:
            return None
        low, high = sorted((length.before, length.now))
        if high - low < max(TOKENS, SURE * length.error) or high < DRIFT * low:
            return None
        if length.rise < 0 and accuracy.now >= SOLVED:
            return None
        text = (
            f"{'longer' if length.rise > 0 else 'shorter'}, and no better: {change.words} responses went from "
            f"{length:.0f} tokens, and the share of exactly right answers from {accuracy:.1%}"
        )
        return change.flag("length-drift", text, LENGTH, "accuracy")

    def _dominated(self, change: Change) -> Flag | None:
        reward, moved = change.of("reward"), self._moved(change)
        parts = {key: pair for key in self.keys[len(KEYS) :] if (pair := change.of(key)) is not None}
        if reward is None or moved is None or abs(moved) < HALF or not parts or not change.flat:
            return None
        if change.steps[1] - change.steps[0] < PATIENCE or (self.weights is None and not _adds_up(reward, parts)):
            return None
        weights = self.weights or {}
        shares = {key: weights.get(key, 1.0) * pair.rise / reward.rise for key, pair in parts.items()}
        first, *others = sorted(shares, key=lambda key: -abs(shares[key]))
        if abs(shares[first] - 1) > 1 - NEARLY_ALL or any(abs(shares[key]) > 1 - NEARLY_ALL for key in others):
            return None
        text = (
            f"one part carries the reward: {change.words} {first} went from {parts[first]:.3g}, which is "
            f"{shares[first]:.0%} of the reward's change from {reward:.3g}; the share of exactly right answers has not "
            "risen"
        )
        return change.flag("component-dominates", text, first, "reward", "accuracy")

    def _collapsed(self, begun: Change, late: Change) -> Flag | None:
        """The entropy is compared with the first steps; the second half shows whether anything still improves."""
        entropy, accuracy, moved = begun.of("entropy"), late.of("accuracy"), self._moved(late)
        if entropy is None or accuracy is None or entropy.before <= 0 or accuracy.now >= HALF:
            return None
        if entropy.now > COLLAPSED * entropy.before or not late.flat or (moved or 0) > 0:
            return None
        text = (
            f"little is tried any more: {begun.words} the entropy went from {entropy:.3g} nats per token, and "
            f"{accuracy.now:.1%} of the answers are exactly right, no more than in steps {late.then} "
            f"({accuracy.before:.1%})"
        )
        return begun.flag("entropy-collapse", text, "entropy", "accuracy", show="wrong")

    def _apart(self, change: Change) -> Flag | None:
        """A stale sampler is far away after only a few steps, so it is also compared with the first ones."""
        pair = change.of(MISMATCH)
        if pair is None or pair.now < APART or pair.now < TIMES * pair.before or pair.rise < SURE * pair.error:
            return None
        if not self._steady(MISMATCH) and pair.now < TIMES**2 * pair.before:
            return None
        text = (
            f"sampler and trainer drift apart: {change.words} their log-probs went from {pair:.2g} nats per token apart"
        )
        return change.flag("mismatch-rising", text, MISMATCH)

    def _steady(self, key: str) -> bool:
        """Does it rise from quarter to quarter?"""
        quarter, at = len(self.blocks) // 4, 3 * self.keys.index(key)
        parts = [self.blocks[i * quarter : (i + 1) * quarter] for i in range(4)]
        means = [sum(b.sums[at + 1] for b in p) / max(1.0, sum(b.sums[at] for b in p)) for p in parts]
        return means == sorted(means)


def watch_from(lines: Iterable[Mapping[str, Any]], maximum: float | None, weights: Mapping[str, float]) -> Watch:
    """A watch that has seen the lines of a run so far."""
    watch = Watch(maximum, weights)
    for line in lines:
        watch.see(line)
    return watch


def flag_events(
    lines: Iterable[Mapping[str, Any]],
    rows_by_step: Mapping[int, Sequence[Mapping[str, Any]]],
    maximum: float | None = None,
) -> list[dict[str, Any]]:
    """The flags of a run that Ascent did not write, each once, from its metrics and its recorded responses."""
    watch = Watch(maximum)
    events: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines):
        step = line["step"] if isinstance(line.get("step"), int) else number
        for flag in watch.see({**line, "step": step}):
            near = min(rows_by_step, key=lambda other: (abs(other - step), other), default=None)
            events.setdefault(flag.name, flag.event(step, near))
    for step, rows in sorted(rows_by_step.items()):
        responses = ((r.get("prompt_text"), r.get("response_text") or "", r.get("correct")) for r in rows)
        for flag in one_answer(step, responses, str):
            events.setdefault(flag.name, flag.event(step, step))
    return sorted(events.values(), key=lambda event: event["step"])


def _median(counts: Counter[int]) -> int:
    ordered, half = sorted(counts.items()), counts.total() / 2
    return next(value for i, (value, _) in enumerate(ordered) if sum(n for _, n in ordered[: i + 1]) >= half)


def _is_component(key: str) -> bool:
    """Is it rewards/NAME, or TRL's rewards/NAME/mean?"""
    parts = key.split("/")
    return parts[0] == "rewards" and (len(parts) == 2 or parts[2:] == ["mean"])


def _adds_up(reward: MetricChange, parts: Mapping[str, MetricChange]) -> bool:
    """Is the reward the plain sum of these parts?"""
    before, now = sum(pair.before for pair in parts.values()), sum(pair.now for pair in parts.values())
    gap = max(abs(reward.before - before), abs(reward.now - now))
    return gap <= 0.02 * max(abs(reward.before), abs(reward.now))

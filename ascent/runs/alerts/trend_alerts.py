"""The alerts of a run. An alert is not a verdict: it says what was seen, in which numbers, and where to look.

A Watch gets the lines of metrics.jsonl one by one and looks for trends. It keeps sums over blocks of steps, fewer than
`BLOCKS`: when there are that many, neighbors are joined, so that they cover the whole run in bounded memory. It
compares windows: the first quarter of the run with the last, and the third quarter with the last. A difference must be
large in itself and large compared with both standard errors, twice in a row, because a false alarm is worse than
silence. The state of a Watch depends only on the lines, so a resumed run gets the same alerts as an uninterrupted one.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any

from ascent.core.metric_names import MISMATCH
from ascent.runs.alerts import conversation_alerts
from ascent.runs.alerts.metric_windows import LEVEL, SOLVED, SURE, Alert, Change, StepBlock, joined, sums
from ascent.runs.alerts.step_alerts import one_answer

# ---- trends over many steps ---------------------------------------------------------------------------------------

LENGTH = "completions/mean_length"
KEYS = ("reward", "reward_std", "accuracy", "entropy", LENGTH, MISMATCH, *conversation_alerts.KEYS)
FIRST, BLOCKS, LEAST = 4, 32, 8
"""Steps per block at first; number of blocks at which they are joined; least number of blocks to compare."""
HALF = 0.5
"""The accuracy of an unsolved task."""
EARNED, TOOL_COUNT_NAMES = 0.6, 0.02
"""Most of what there was to gain, as a share; a low accuracy."""
BEHIND = 0.25
"""The accuracy does not follow if it has gained less than this share of what there was to gain."""
DRIFT, TOKENS = 1.5, 5.0
"""Lengths have drifted if they changed by this factor and by this many tokens."""
COLLAPSED = 0.1
"""Share of the initial entropy."""
APART, TIMES = 0.02, 3.0
"""A mismatch counts from this many nats per token, and from this multiple of its initial value."""
PART = r"rewards/[^/]*(/mean)?"
"""Metrics of the parts of a reward; TRL's names end in /mean."""
BEYOND = {"grad_norm": (1e6, 1e3, "gradient's norm"), "kl": (100.0, 10.0, "KL in nats per token")}
"""Values that are out of scale in any run; values that are so after much smaller ones; the name of the metric."""
DECADES, USUAL = 5, 16
"""Powers of ten above the median that make a jump; least number of values for a median."""
NEARLY_ALL, PATIENCE = 0.9, 64
"""Share of the reward's change that dominates it; least number of steps to judge that."""


class RunAlerts:
    """Gets a run's lines one by one, and returns alerts."""

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
        """The names of the alerts of the last comparison."""
        self._size = FIRST
        self._waiting: list[Sequence[Any]] = []
        self._since = 0

    def see(self, line: Mapping[str, Any]) -> list[Alert]:
        """The alerts of one more step, and if it completes a block, those of the comparison of windows."""
        alerts = self._beyond(line)
        if not self.blocks and not self._waiting:
            parts = {*(self.weights or {}), *(key for key in line if re.fullmatch(PART, key))}
            self.keys = (*KEYS, *sorted(parts))
        if line.get("eval/accuracy") is not None and not self.first:
            self.first = {k: line[k] for k in ("step", "eval/accuracy", "eval/reward") if line.get(k) is not None}
        if not self._waiting:
            self._since = line["step"]
        self._waiting.append([line.get(key) for key in self.keys])
        if len(self._waiting) < self._size:
            return alerts
        found = [number for column in zip(*self._waiting, strict=True) for number in sums(column)]
        self.blocks.append(StepBlock(self._since, line["step"], found))
        self._waiting = []
        self.start = self.start or self.blocks[0]
        if len(self.blocks) == BLOCKS:
            self.blocks = [joined(self.blocks[i : i + 2]) for i in range(0, BLOCKS, 2)]
            self._size *= 2
        return alerts + self._compared() if len(self.blocks) >= LEAST and len(self.blocks) % 2 == 0 else alerts

    def _beyond(self, line: Mapping[str, Any]) -> list[Alert]:
        """A metric that is far too large in this step."""
        alerts = []
        for key, (senseless, large, name) in BEYOND.items():
            value = line.get(key)
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                continue
            seen, power = self.sizes[key], math.floor(math.log10(value))
            jump = value >= large and seen.total() >= USUAL and power > median_low(seen.elements()) + DECADES
            seen[power] += 1
            if value >= senseless or jump:
                than = f", more than {10**DECADES:,} times its median before" if jump else ""
                text = f"out of scale: the {name} is {value:.3g} in this step{than}"
                alerts.append(Alert("out-of-scale", text, {key: [float(value)]}, (line["step"], line["step"])))
        return alerts[:1]

    def _compared(self) -> list[Alert]:
        blocks, quarter, half = self.blocks, len(self.blocks) // 4, len(self.blocks) // 2
        befores = (joined(blocks[:quarter]), joined(blocks[half : half + quarter]), self.start or blocks[0])
        whole, late, begun = (Change(self.keys, before, joined(blocks[-quarter:])) for before in befores)
        raised = [
            self._reward_up(whole, late) or self._reward_up(late, late),
            self._drift(whole) or self._drift(late),
            self._dominated(whole) or self._dominated(begun),
            self._collapsed(begun, late),
            self._apart(whole) or self._apart(begun),
            *conversation_alerts.raised(whole, late, self._moved),
        ]
        before, self._held = self._held, {alert.name for alert in raised if alert is not None}
        return [alert for alert in raised if alert is not None and alert.name in before]

    def _moved(self, change: Change) -> float:
        """How far the reward has surely moved, in standard deviations of the responses of a step; otherwise 0."""
        reward, spread = change.of("reward"), change.of("reward_std")
        if reward is None or spread is None or spread.before <= 0 or abs(reward.rise) < SURE * reward.error:
            return 0.0
        return reward.rise / spread.before

    def _gained(self, key: str, most: float) -> float:
        """How much of what there was to gain after the first quarter has been gained by now: 1 is all."""
        pair = Change(self.keys, joined(self.blocks[: len(self.blocks) // 4]), self.blocks[-1]).of(key)
        return pair.rise / (most - pair.before) if pair and most > pair.before else 0.0

    def _behind(self, change: Change, late: Change) -> bool:
        """Is most or nearly all of the reward gained, and the accuracy has not followed?"""
        if not self.maximum:
            return change.flat
        gained = self._gained("reward", self.maximum)
        if change.flat:
            return gained >= EARNED
        return late.flat and gained >= NEARLY_ALL and self._gained("accuracy", 1.0) < BEHIND

    def _reward_up(self, change: Change, late: Change) -> Alert | None:
        """A reward in small parts usually rises before the accuracy does, so most of it must be gained first.

        If its maximum is unknown, it must have stopped rising, or some answers must be right.
        """
        moved, accuracy, reward = self._moved(change), change.of("accuracy"), change.of("reward")
        if accuracy is None or reward is None or accuracy.now >= SOLVED:
            return None
        clear = self.maximum or abs(self._moved(late)) < LEVEL or accuracy.now >= TOOL_COUNT_NAMES
        if moved < (HALF if self.maximum else 1.0) or not clear or not self._behind(change, late):
            return None
        of = f" of {self.maximum:g}" if self.maximum else ""
        text = (
            f"reward up, accuracy {'flat' if change.flat else 'far behind'}: {change.words} the reward went from "
            f"{reward:.3g}{of}, and the share of exactly right answers from {accuracy:.1%}"
        )
        return change.alert("reward-up-accuracy-flat", text, "reward", "accuracy", show="wrong")

    def _drift(self, change: Change) -> Alert | None:
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
        return change.alert("length-drift", text, LENGTH, "accuracy")

    def _dominated(self, change: Change) -> Alert | None:
        reward, moved = change.of("reward"), self._moved(change)
        parts = {key: pair for key in self.keys[len(KEYS) :] if (pair := change.of(key)) is not None}
        if reward is None or abs(moved) < HALF or not parts or not change.flat:
            return None
        if change.steps[1] - change.steps[0] < PATIENCE:
            return None
        gap = max(abs(reward[i] - sum(pair[i] for pair in parts.values())) for i in (0, 1))
        plain_sum = gap <= 0.02 * max(abs(reward.before), abs(reward.now))
        if self.weights is None and not plain_sum:
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
        return change.alert("component-dominates", text, first, "reward", "accuracy")

    def _collapsed(self, begun: Change, late: Change) -> Alert | None:
        """The entropy is compared with the first steps; the second half shows whether anything still improves."""
        entropy, accuracy, moved = begun.of("entropy"), late.of("accuracy"), self._moved(late)
        if entropy is None or accuracy is None or entropy.before <= 0 or accuracy.now >= HALF:
            return None
        if entropy.now > COLLAPSED * entropy.before or not late.flat or moved > 0:
            return None
        text = (
            f"little is tried any more: {begun.words} the entropy went from {entropy:.3g} nats per token, and "
            f"{accuracy.now:.1%} of the answers are exactly right, no more than in steps {late.then} "
            f"({accuracy.before:.1%})"
        )
        return begun.alert("entropy-collapse", text, "entropy", "accuracy", show="wrong")

    def _apart(self, change: Change) -> Alert | None:
        """A stale sampler is far away after only a few steps, so it is also compared with the first ones."""
        pair = change.of(MISMATCH)
        if pair is None or pair.now < APART or pair.now < TIMES * pair.before or pair.rise < SURE * pair.error:
            return None
        quarter, at = len(self.blocks) // 4, 3 * self.keys.index(MISMATCH)
        parts = [joined(self.blocks[i * quarter : (i + 1) * quarter]).sums for i in range(4)]
        means = [sums[at + 1] / max(1.0, sums[at]) for sums in parts]
        if means != sorted(means) and pair.now < TIMES**2 * pair.before:  # it does not rise from quarter to quarter
            return None
        apart = f"their log-probs went from {pair:.2g} nats per token apart"
        return change.alert("mismatch-rising", f"sampler and trainer drift apart: {change.words} {apart}", MISMATCH)


def alert_events(
    lines: Iterable[Mapping[str, Any]], steps: Sequence[int], rows_of: Callable[[int], Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """The alerts of a run that Ascent did not write, each once, from its metrics and its recorded responses."""
    watch = RunAlerts()
    events: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines):
        step = line["step"] if isinstance(line.get("step"), int) else number
        for alert in watch.see({**line, "step": step}):
            near = min(steps, key=lambda other: (abs(other - step), other), default=None)
            events.setdefault(alert.name, alert.event(step, near))
    for step in sorted(steps):
        responses = ((r.get("prompt_text"), r.get("response_text") or "", r.get("correct")) for r in rows_of(step))
        for alert in one_answer(step, responses, str):
            events.setdefault(alert.name, alert.event(step, step))
    return sorted(events.values(), key=lambda event: event["step"])

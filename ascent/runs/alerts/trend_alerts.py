"""Alerts about trends over many steps. An alert is not a verdict: it names an observation, its metrics and the steps.

`RunAlerts` gets the lines of metrics.jsonl one by one. It keeps sums over blocks of steps. When there are `MAX_BLOCKS`,
adjacent blocks are merged, so that they cover the whole run in bounded memory. It compares the first quarter of the run
with the last, and the third quarter with the last. To avoid false alarms, a difference must be large both absolutely
and relative to the standard errors, two times in a row. The state depends only on the lines, so a resumed run raises
the same alerts as an uninterrupted one.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any

from ascent.core.metric_names import MISMATCH
from ascent.runs.alerts import conversation_alerts
from ascent.runs.alerts.metric_windows import (
    CERTAIN_SIGMAS,
    MAX_LEVEL_MOVE,
    SOLVED_ACCURACY,
    Alert,
    StepBlock,
    WindowComparison,
    merge_blocks,
    sums,
)
from ascent.runs.alerts.step_alerts import one_answer

LENGTH = "completions/mean_length"
KEYS = ("reward", "reward_std", "accuracy", "entropy", LENGTH, MISMATCH, *conversation_alerts.KEYS)
INITIAL_BLOCK_STEPS, MAX_BLOCKS, MIN_BLOCKS = 4, 32, 8
"""Initial steps per block; number of blocks at which they are merged; minimum number of blocks to compare."""
UNSOLVED_ACCURACY = 0.5
"""The accuracy of an unsolved task."""
MOSTLY_EARNED, LOW_ACCURACY = 0.6, 0.02
"""Fraction of the possible gain that counts as most of it; a low but nonzero accuracy."""
BEHIND_FRACTION = 0.25
"""The accuracy lags if it has gained less than this fraction of the possible gain."""
DRIFT_FACTOR, TOKENS = 1.5, 5.0
"""Lengths have drifted if they changed by this factor and by this many tokens."""
COLLAPSED_ENTROPY_FRACTION = 0.1
"""Fraction of the initial entropy."""
MIN_MISMATCH, MISMATCH_FACTOR = 0.02, 3.0
"""A mismatch counts from this many nats per token, and from this multiple of its initial value."""
REWARD_PART_PATTERN = r"rewards/[^/]*(/mean)?"
"""Names of the metrics of reward parts; TRL's end in /mean."""
OUT_OF_SCALE = {"grad_norm": (1e6, 1e3, "gradient's norm"), "kl": (100.0, 10.0, "KL in nats per token")}
"""For each metric: a value that is out of scale in any run, one that is so after much smaller values, and its name."""
JUMP_DECADES, MIN_VALUES_FOR_MEDIAN = 5, 16
"""Powers of ten above the median that count as a jump; minimum number of values for a median."""
NEARLY_ALL, MIN_STEPS_TO_DOMINATE = 0.9, 64
"""Fraction of the reward's change with which a part dominates it; minimum number of steps to decide that."""


class RunAlerts:
    """Raises alerts from the lines of a run's metrics, which it gets one by one."""

    def __init__(self, maximum: float | None = None, weights: Mapping[str, float] | None = None):
        self.maximum, self.weights = maximum, weights
        self.keys: tuple[str, ...] = KEYS
        self.blocks: list[StepBlock] = []
        self.start: StepBlock | None = None
        """The first block, before any were merged."""
        self.first: dict[str, Any] = {}
        """The first evaluation, and its step."""
        self.sizes: dict[str, Counter[int]] = {key: Counter() for key in OUT_OF_SCALE}
        """For each metric the count of each power of ten."""
        self._previous: set[str] = set()
        """Names of the alerts of the last comparison."""
        self._size = INITIAL_BLOCK_STEPS
        self._waiting: list[Sequence[Any]] = []
        self._since = 0

    def see(self, line: Mapping[str, Any]) -> list[Alert]:
        """Return the alerts of one more step and, if it completes a block, those of the window comparison."""
        alerts = self._out_of_scale(line)
        if not self.blocks and not self._waiting:
            parts = {*(self.weights or {}), *(key for key in line if re.fullmatch(REWARD_PART_PATTERN, key))}
            self.keys = (*KEYS, *sorted(parts))
        if line.get("eval/accuracy") is not None and not self.first:
            self.first = {k: line[k] for k in ("step", "eval/accuracy", "eval/reward") if line.get(k) is not None}
        if not self._waiting:
            self._since = line["step"]
        self._waiting.append([line.get(key) for key in self.keys])
        if len(self._waiting) < self._size:
            return alerts
        block_sums = [number for column in zip(*self._waiting, strict=True) for number in sums(column)]
        self.blocks.append(StepBlock(self._since, line["step"], block_sums))
        self._waiting = []
        self.start = self.start or self.blocks[0]
        if len(self.blocks) == MAX_BLOCKS:
            self.blocks = [merge_blocks(self.blocks[i : i + 2]) for i in range(0, MAX_BLOCKS, 2)]
            self._size *= 2
        return (
            alerts + self._compare_windows() if len(self.blocks) >= MIN_BLOCKS and len(self.blocks) % 2 == 0 else alerts
        )

    def _out_of_scale(self, line: Mapping[str, Any]) -> list[Alert]:
        """Return an alert if a metric is far too large in this step."""
        alerts = []
        for key, (always_too_large, large, name) in OUT_OF_SCALE.items():
            value = line.get(key)
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                continue
            seen, power = self.sizes[key], math.floor(math.log10(value))
            jump = (
                value >= large
                and seen.total() >= MIN_VALUES_FOR_MEDIAN
                and power > median_low(seen.elements()) + JUMP_DECADES
            )
            seen[power] += 1
            if value >= always_too_large or jump:
                than = f", more than {10**JUMP_DECADES:,} times its median before" if jump else ""
                text = f"out of scale: the {name} is {value:.3g} in this step{than}"
                alerts.append(Alert("out-of-scale", text, {key: [float(value)]}, (line["step"], line["step"])))
        return alerts[:1]

    def _compare_windows(self) -> list[Alert]:
        blocks, quarter, half = self.blocks, len(self.blocks) // 4, len(self.blocks) // 2
        befores = (merge_blocks(blocks[:quarter]), merge_blocks(blocks[half : half + quarter]), self.start or blocks[0])
        whole, late, begun = (
            WindowComparison(self.keys, before, merge_blocks(blocks[-quarter:])) for before in befores
        )
        alerts = [
            self._reward_without_accuracy(whole, late) or self._reward_without_accuracy(late, late),
            self._length_drift(whole) or self._length_drift(late),
            self._part_dominates(whole) or self._part_dominates(begun),
            self._entropy_collapse(begun, late),
            self._mismatch_rising(whole) or self._mismatch_rising(begun),
            *conversation_alerts.compare_conversations(whole, late, self._moved),
        ]
        previous, self._previous = self._previous, {alert.name for alert in alerts if alert is not None}
        return [alert for alert in alerts if alert is not None and alert.name in previous]

    def _moved(self, change: WindowComparison) -> float:
        """Return the change of the reward in standard deviations within a step, or 0 if it is not certain."""
        reward, spread = change.of("reward"), change.of("reward_std")
        if reward is None or spread is None or spread.before <= 0 or abs(reward.rise) < CERTAIN_SIGMAS * reward.error:
            return 0.0
        return reward.rise / spread.before

    def _gained(self, key: str, maximum: float) -> float:
        """Return the fraction of the possible gain since the first quarter that a metric has gained."""
        pair = WindowComparison(self.keys, merge_blocks(self.blocks[: len(self.blocks) // 4]), self.blocks[-1]).of(key)
        return pair.rise / (maximum - pair.before) if pair and maximum > pair.before else 0.0

    def _accuracy_lags(self, change: WindowComparison, late: WindowComparison) -> bool:
        """Whether most of the reward is gained while the accuracy has not followed."""
        if not self.maximum:
            return change.flat
        gained = self._gained("reward", self.maximum)
        if change.flat:
            return gained >= MOSTLY_EARNED
        return late.flat and gained >= NEARLY_ALL and self._gained("accuracy", 1.0) < BEHIND_FRACTION

    def _reward_without_accuracy(self, change: WindowComparison, late: WindowComparison) -> Alert | None:
        """Return an alert if the reward has risen without the accuracy.

        A reward with partial scores usually rises before the accuracy, so most of it must be gained first. If its
        maximum is unknown, it must have stopped rising, or some answers must be right.
        """
        moved, accuracy, reward = self._moved(change), change.of("accuracy"), change.of("reward")
        if accuracy is None or reward is None or accuracy.now >= SOLVED_ACCURACY:
            return None
        clear = self.maximum or abs(self._moved(late)) < MAX_LEVEL_MOVE or accuracy.now >= LOW_ACCURACY
        if moved < (UNSOLVED_ACCURACY if self.maximum else 1.0) or not clear or not self._accuracy_lags(change, late):
            return None
        of = f" of {self.maximum:g}" if self.maximum else ""
        text = (
            f"reward up, accuracy {'flat' if change.flat else 'far behind'}: {change.words} the reward went from "
            f"{reward:.3g}{of}, and the share of exactly right answers from {accuracy:.1%}"
        )
        return change.alert("reward-up-accuracy-flat", text, "reward", "accuracy", show="wrong")

    def _length_drift(self, change: WindowComparison) -> Alert | None:
        length, accuracy = change.of(LENGTH), change.of("accuracy")
        if length is None or accuracy is None or not change.flat:
            return None
        low, high = sorted((length.before, length.now))
        if high - low < max(TOKENS, CERTAIN_SIGMAS * length.error) or high < DRIFT_FACTOR * low:
            return None
        if length.rise < 0 and accuracy.now >= SOLVED_ACCURACY:
            return None
        text = (
            f"{'longer' if length.rise > 0 else 'shorter'}, and no better: {change.words} responses went from "
            f"{length:.0f} tokens, and the share of exactly right answers from {accuracy:.1%}"
        )
        return change.alert("length-drift", text, LENGTH, "accuracy")

    def _part_dominates(self, change: WindowComparison) -> Alert | None:
        reward, moved = change.of("reward"), self._moved(change)
        parts = {key: pair for key in self.keys[len(KEYS) :] if (pair := change.of(key)) is not None}
        if reward is None or abs(moved) < UNSOLVED_ACCURACY or not parts or not change.flat:
            return None
        if change.steps[1] - change.steps[0] < MIN_STEPS_TO_DOMINATE:
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
            f"one part dominates the reward: {change.words} {first} went from {parts[first]:.3g}, which is "
            f"{shares[first]:.0%} of the reward's change from {reward:.3g}; the share of exactly right answers has not "
            "risen"
        )
        return change.alert("component-dominates", text, first, "reward", "accuracy")

    def _entropy_collapse(self, begun: WindowComparison, late: WindowComparison) -> Alert | None:
        """Compare the entropy with the first steps, and check that the second half of the run has not improved."""
        entropy, accuracy, moved = begun.of("entropy"), late.of("accuracy"), self._moved(late)
        if entropy is None or accuracy is None or entropy.before <= 0 or accuracy.now >= UNSOLVED_ACCURACY:
            return None
        if entropy.now > COLLAPSED_ENTROPY_FRACTION * entropy.before or not late.flat or moved > 0:
            return None
        text = (
            f"entropy collapse: {begun.words} the entropy went from {entropy:.3g} nats per token, and "
            f"{accuracy.now:.1%} of the answers are exactly right, no more than in steps {late.before_steps} "
            f"({accuracy.before:.1%})"
        )
        return begun.alert("entropy-collapse", text, "entropy", "accuracy", show="wrong")

    def _mismatch_rising(self, change: WindowComparison) -> Alert | None:
        """Compare the mismatch also with the first steps, because a stale sampler differs after a few steps."""
        pair = change.of(MISMATCH)
        if (
            pair is None
            or pair.now < MIN_MISMATCH
            or pair.now < MISMATCH_FACTOR * pair.before
            or pair.rise < CERTAIN_SIGMAS * pair.error
        ):
            return None
        quarter, at = len(self.blocks) // 4, 3 * self.keys.index(MISMATCH)
        parts = [merge_blocks(self.blocks[i * quarter : (i + 1) * quarter]).sums for i in range(4)]
        means = [sums[at + 1] / max(1.0, sums[at]) for sums in parts]
        if (
            means != sorted(means) and pair.now < MISMATCH_FACTOR**2 * pair.before
        ):  # it does not rise from quarter to quarter
            return None
        apart = f"their log-probs went from {pair:.2g} nats per token apart"
        return change.alert("mismatch-rising", f"sampler and trainer drift apart: {change.words} {apart}", MISMATCH)


def alert_events(
    lines: Iterable[Mapping[str, Any]], steps: Sequence[int], rows_of: Callable[[int], Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the alerts of a run of another library, each once, from its metrics and recorded responses."""
    run_alerts = RunAlerts()
    events: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines):
        step = line["step"] if isinstance(line.get("step"), int) else number
        for alert in run_alerts.see({**line, "step": step}):
            near = min(steps, key=lambda other: (abs(other - step), other), default=None)
            events.setdefault(alert.name, alert.event(step, near))
    for step in sorted(steps):
        responses = ((r.get("prompt_text"), r.get("response_text") or "", r.get("correct")) for r in rows_of(step))
        for alert in one_answer(step, responses, str):
            events.setdefault(alert.name, alert.event(step, step))
    return sorted(events.values(), key=lambda event: event["step"])

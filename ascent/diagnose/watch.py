"""Flags with their evidence, never verdicts: what in a run's numbers deserves a look at its completions.

The watch is fed one line of metrics.jsonl after the other. It keeps sums over blocks of steps, at most `BLOCKS` of
them: when they are full, neighbours are joined, so that they cover the whole run in bounded memory. Two windows are
then compared, the first quarter of the run with its last, and the third with the last. A difference counts where it
is large against both windows' standard errors and in itself, twice in a row: a false alarm is worse than silence.

One flag needs no windows: a gradient or a KL of a size that no run has a use for.

What it knows follows from the lines alone: a run that is resumed is watched as one that was never stopped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ascent.diagnose.evidence import Flag, one_answer, told
from ascent.diagnose.windows import Block, Change, Mean, difference, sums

MISMATCH = "sampling/sampling_logp_difference/mean"
LENGTH = "completions/mean_length"
KEYS = ("reward", "reward_std", "accuracy", "entropy", LENGTH, MISMATCH)
FIRST, BLOCKS, LEAST = 4, 32, 8
"""Steps of a block at first; blocks at most; blocks from which on windows are compared."""
SURE = 5.0
"""Standard errors of a difference that is there."""
SOLVED, HALF = 0.9, 0.5
"""The accuracy of a task that is solved, and one of a task that is not."""
EARNED, LEVEL, COUNTED = 0.6, 0.1, 0.02
"""Share of what there was to gain that is most of it; standard deviations that a level reward moves; a low accuracy."""
BEHIND = 0.25
"""Share of what there was to gain that an accuracy has which does not follow."""
DRIFT, TOKENS = 1.5, 5.0
"""By which factor, and by how many tokens, lengths have drifted."""
COLLAPSED = 0.1
"""Share of its first entropy."""
APART, TIMES = 0.02, 3.0
"""Nats a token, and times its beginning, from which on a mismatch counts."""
BEYOND = {"grad_norm": (1e6, 1e3, "gradient's norm"), "kl": (100.0, 10.0, "KL in nats a token")}
"""Numbers that make no sense in any run; those that make none where they were small; what they are."""
DECADES, USUAL = 5, 16
"""Powers of ten over its own median that are a jump; numbers that a median takes."""
NEARLY_ALL, PATIENCE = 0.9, 64
"""Share of the reward's movement that dominates it; steps of a run before which that is not asked."""


class Watch:
    """Sees a run's lines, and says what is to be looked at."""

    def __init__(self, maximum: float | None = None, weights: Mapping[str, float] | None = None):
        self.maximum, self.weights = maximum, weights
        self.keys: tuple[str, ...] = KEYS
        self.blocks: list[Block] = []
        self.start: Block | None = None
        """The first steps, which stay as they are when blocks are joined."""
        self.first: dict[str, Any] = {}
        """The first evaluation, and its step."""
        self.sizes: dict[str, Counter[int]] = {key: Counter() for key in BEYOND}
        """How often a metric had which power of ten."""
        self._held: set[str] = set()
        """What the last comparison showed."""
        self._size = FIRST
        self._waiting: list[Sequence[Any]] = []
        self._since = 0

    def see(self, line: Mapping[str, Any]) -> list[Flag]:
        """One more step: flags that it shows, and if it completes a block, those of the windows."""
        return [*self._beyond(line), *self._blocked(line)]

    def _beyond(self, line: Mapping[str, Any]) -> list[Flag]:
        """What is out of all proportion in this step alone."""
        found = []
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
            found.append(Flag("out-of-scale", text, {key: [float(value)]}, (line["step"], line["step"])))
        return found[:1]

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
            Block(self._since, line["step"], [x for c in zip(*self._waiting, strict=True) for x in sums(c)])
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
        found = [self._reward_up(whole, late) or self._reward_up(late, late), _drift(whole) or _drift(late)]
        begun = Change(self.keys, [self.start or blocks[0]], blocks[-quarter:])
        found += [
            self._dominated(whole) or self._dominated(begun),
            self._collapsed(begun, late),
            self._apart(whole) or self._apart(begun),
        ]
        flags = [flag for flag in found if flag is not None]
        before, self._held = self._held, {flag.name for flag in flags}
        return [flag for flag in flags if flag.name in before]

    def _moved(self, change: Change) -> float | None:
        """How far the reward has surely moved, in standard deviations of the responses of a step."""
        reward, spread = change.of("reward"), change.of("reward_std")
        if reward is None or spread is None or spread[0].value <= 0:
            return None
        rise, error = difference(*reward)
        return rise / spread[0].value if abs(rise) >= SURE * error else None

    def _gained(self, key: str, most: float) -> float:
        """How much of what there was to gain after the first quarter has been gained by now: 1 is all."""
        pair = Change(self.keys, self.blocks[: len(self.blocks) // 4], self.blocks[-1:]).of(key)
        room = most - pair[0].value if pair else 0.0
        return (pair[1].value - pair[0].value) / room if pair and room > 0 else 0.0

    def _behind(self, change: Change, late: Change) -> bool:
        """Has the accuracy not followed a reward of which most, or nearly all, is gained?"""
        if not self.maximum:
            return change.flat
        gained = self._gained("reward", self.maximum)
        if change.flat:
            return gained >= EARNED
        return late.flat and gained >= NEARLY_ALL and self._gained("accuracy", 1.0) < BEHIND

    def _reward_up(self, change: Change, late: Change) -> Flag | None:
        """A reward in small parts comes before the accuracy: an ordinary beginning, until most of it is gained.

        Where nobody knows how much there is, until it rises no more, or answers are right often enough to count them.
        """
        moved, accuracy, reward = self._moved(change), change.of("accuracy"), change.of("reward")
        if moved is None or accuracy is None or reward is None or accuracy[1].value >= SOLVED:
            return None
        level = abs(self._moved(late) or 0.0) < LEVEL
        told = self.maximum or level or accuracy[1].value >= COUNTED
        if moved < (HALF if self.maximum else 1.0) or not told or not self._behind(change, late):
            return None
        of = f" of {self.maximum:g}" if self.maximum else ""
        text = (
            f"reward up, accuracy {'flat' if change.flat else 'far behind'}: {change.words} the reward went from "
            f"{reward[0].value:.3g} to {reward[1].value:.3g}{of}, and the share of exactly right answers "
            f"from {accuracy[0].value:.1%} to {accuracy[1].value:.1%}"
        )
        return Flag("reward-up-accuracy-flat", text, change.numbers("reward", "accuracy"), change.steps, "wrong")

    def _dominated(self, change: Change) -> Flag | None:
        reward, moved = change.of("reward"), self._moved(change)
        parts = {key: pair for key in self.keys[len(KEYS) :] if (pair := change.of(key)) is not None}
        if reward is None or moved is None or abs(moved) < HALF or not parts or not change.flat:
            return None
        if change.steps[1] - change.steps[0] < PATIENCE or (self.weights is None and not _adds_up(reward, parts)):
            return None
        weights = self.weights or {}
        total = reward[1].value - reward[0].value
        shares = {k: weights.get(k, 1.0) * (now.value - then.value) / total for k, (then, now) in parts.items()}
        first, *others = sorted(shares, key=lambda key: -abs(shares[key]))
        if abs(shares[first] - 1) > 1 - NEARLY_ALL or any(abs(shares[key]) > 1 - NEARLY_ALL for key in others):
            return None
        then, now = parts[first]
        text = (
            f"one part carries the reward: {change.words} {first} went from {then.value:.3g} to {now.value:.3g}, which "
            f"is {shares[first]:.0%} of the reward's change from {reward[0].value:.3g} to {reward[1].value:.3g}; the "
            "share of exactly right answers has not risen"
        )
        return Flag("component-dominates", text, change.numbers(first, "reward", "accuracy"), change.steps)

    def _collapsed(self, begun: Change, late: Change) -> Flag | None:
        """Against the first steps; that nothing improves any more is asked of the second half."""
        entropy, accuracy, moved = begun.of("entropy"), late.of("accuracy"), self._moved(late)
        if entropy is None or accuracy is None or entropy[0].value <= 0 or accuracy[1].value >= HALF:
            return None
        if entropy[1].value > COLLAPSED * entropy[0].value or not late.flat or (moved or 0) > 0:
            return None
        text = (
            f"little is tried any more: {begun.words} the entropy went from {entropy[0].value:.3g} to "
            f"{entropy[1].value:.3g} nats a token, and {accuracy[1].value:.1%} of the answers are exactly right, no "
            f"more than in steps {late.then} ({accuracy[0].value:.1%})"
        )
        return Flag("entropy-collapse", text, begun.numbers("entropy", "accuracy"), begun.steps, "wrong")

    def _apart(self, change: Change) -> Flag | None:
        """A sampler that stays behind is far away after a few steps: so it is also compared with the first ones."""
        pair = change.of(MISMATCH)
        if pair is None or pair[1].value < APART or pair[1].value < TIMES * pair[0].value:
            return None
        rise, error = difference(*pair)
        if rise < SURE * error or not (self._steady(MISMATCH) or pair[1].value >= TIMES**2 * pair[0].value):
            return None
        text = (
            f"sampler and trainer drift apart: {change.words} their log-probs went from {pair[0].value:.2g} to "
            f"{pair[1].value:.2g} nats a token apart"
        )
        return Flag("mismatch-rising", text, change.numbers(MISMATCH), change.steps)

    def _steady(self, key: str) -> bool:
        """Does it rise from quarter to quarter?"""
        quarter, at = len(self.blocks) // 4, 3 * self.keys.index(key)
        parts = [self.blocks[i * quarter : (i + 1) * quarter] for i in range(4)]
        means = [sum(b.sums[at + 1] for b in p) / max(1.0, sum(b.sums[at] for b in p)) for p in parts]
        return means == sorted(means)


def _drift(change: Change) -> Flag | None:
    length, accuracy = change.of(LENGTH), change.of("accuracy")
    if length is None or accuracy is None or not change.flat:
        return None
    before, now = length[0].value, length[1].value
    gain, error = difference(*length)
    if abs(gain) < max(TOKENS, SURE * error) or max(before, now) < DRIFT * min(before, now):
        return None
    if gain < 0 and accuracy[1].value >= SOLVED:
        return None
    text = (
        f"{'longer' if gain > 0 else 'shorter'}, and no better: {change.words} responses went from {before:.0f} to "
        f"{now:.0f} tokens, and the share of exactly right answers from {accuracy[0].value:.1%} to "
        f"{accuracy[1].value:.1%}"
    )
    return Flag("length-drift", text, change.numbers(LENGTH, "accuracy"), change.steps)


def watched(lines: Iterable[Mapping[str, Any]], maximum: float | None, weights: Mapping[str, float]) -> Watch:
    """One that has seen these lines before."""
    watch = Watch(maximum, weights)
    for line in lines:
        watch.see(line)
    return watch


def flags_of(
    lines: Iterable[Mapping[str, Any]],
    rows_by_step: Mapping[int, Sequence[Mapping[str, Any]]],
    maximum: float | None = None,
) -> list[dict[str, Any]]:
    """The events of a run that Ascent did not write, each once, from its metrics and its recorded responses."""
    watch = Watch(maximum)
    found: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines):
        step = line["step"] if isinstance(line.get("step"), int) else number
        flags = watch.see({**line, "step": step})
        for flag in flags:
            near = min(rows_by_step, key=lambda other: (abs(other - step), other), default=None)
            found.setdefault(flag.name, flag.event(step, near))
    for step, rows in sorted(rows_by_step.items()):
        given = ((r.get("prompt_text"), r.get("response_text") or "", r.get("correct")) for r in rows)
        answer = one_answer(step, given)
        for flag in told(answer, answer[0] if answer else ""):
            found.setdefault(flag.name, flag.event(step, step))
    return sorted(found.values(), key=lambda event: event["step"])


def _median(counts: Counter[int]) -> int:
    ordered, half = sorted(counts.items()), counts.total() / 2
    return next(value for i, (value, _) in enumerate(ordered) if sum(n for _, n in ordered[: i + 1]) >= half)


def _is_component(key: str) -> bool:
    """rewards/NAME, or as TRL has it, rewards/NAME/mean."""
    parts = key.split("/")
    return parts[0] == "rewards" and (len(parts) == 2 or parts[2:] == ["mean"])


def _adds_up(reward: tuple[Mean, Mean], parts: Mapping[str, tuple[Mean, Mean]]) -> bool:
    """Is the reward the plain sum of these?"""
    gaps = [abs(reward[i].value - sum(pair[i].value for pair in parts.values())) for i in (0, 1)]
    return max(gaps) <= 0.02 * max(abs(reward[0].value), abs(reward[1].value))

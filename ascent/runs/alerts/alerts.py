"""The flags of a run. A flag is not a verdict: it says what was seen, in which numbers, and where to look.

A Watch gets the lines of metrics.jsonl one by one and looks for trends. It keeps sums over blocks of steps, fewer than
`BLOCKS`: when there are that many, neighbors are joined, so that they cover the whole run in bounded memory. It
compares windows: the first quarter of the run with the last, and the third quarter with the last. A difference must be
large in itself and large compared with both standard errors, twice in a row, because a false alarm is worse than
silence. The state of a Watch depends only on the lines, so a resumed run gets the same flags as an uninterrupted one.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from statistics import median_low
from typing import Any

from ascent.core.metric_names import MISMATCH
from ascent.runs.alerts import turn_alerts
from ascent.runs.alerts.metric_windows import LEVEL, SOLVED, SURE, Alert, Change, StepBlock, joined, sums

PROMPTS, SAME, UNKNOWN = 8, 2 / 3, 0.9
"""Least number of different prompts; share of responses with the same text; that share if correctness is unknown."""
RIGHT, CHARACTERS = 0.6, 120
"""Share of right answers above which one text may be the answer to many prompts; characters of it that are quoted."""
EARNED_ALL, MOSTLY_RIGHT = 0.95, 0.5
"""Share of the maximum reward that counts as earned; accuracy below which answers are mostly wrong."""
ALL_RIGHT, ALL_EQUAL = 0.99, 0.5
"""Accuracy of a solved task; share of groups with equal rewards from which little is learned."""
DETERMINED = 0.1
"""Entropy per token, in nats, below which a policy hardly explores."""
Answer = tuple[Any, Any, bool | None]
"""A prompt, a response, and whether it is right; None: not known."""
EVIDENCE: dict[str, tuple[tuple[str, ...], str]] = {
    "reward-without-accuracy": (("eval/reward", "eval/accuracy"), "wrong"),
    "reward-errors": (("reward_errors",), "failed"),
    "environment-errors": (("reward_errors",), "failed"),
    "no-signal": (("frac_reward_zero_std", "reward"), "all"),
    "trust-region-refused": (("trust_region/too_far", "trust_region/no_gain"), "all"),
}
"""For flags from a single line of metrics: the metrics to show, and which completions to look at."""


def metric_warnings(metrics: Mapping[str, Any], task: Any) -> list[tuple[str, str]]:
    """The warnings of one line of metrics, each with a name and a sentence."""
    warnings = []
    reward, accuracy = metrics.get("eval/reward"), metrics.get("eval/accuracy")
    share = reward / task.max_reward if task.max_reward and reward is not None else None
    if share is not None and accuracy is not None and share >= EARNED_ALL and accuracy < MOSTLY_RIGHT:
        how = f" Known of this task: {task.loophole}." if task.loophole else ""
        text = (
            f"reward without accuracy: held-out reward is {share:.0%} of its maximum, and {accuracy:.0%} of the "
            f"answers are exactly right.{how}"
        )
        warnings.append(("reward-without-accuracy", text))
    measured = metrics.get("reward") is not None and metrics.get("frac_reward_zero_std") == 1
    if measured and metrics.get("grad_norm") is None:
        text = (
            "no signal: in every group that was sampled all rewards are equal, so there is no update and nothing is "
            "learned from this step. Try easier or harder prompts, more --samples, or more --groups.rounds"
        )
        warnings.append(("no-signal", text))
    if metrics.get("trust_region/accepted") == 0 and metrics.get("grad_norm"):
        beyond, flat = metrics["trust_region/too_far"], metrics["trust_region/no_gain"]
        text = (
            f"the line search took no step: {beyond:.0f} trials had a KL beyond Δ, and {flat:.0f} within it gained "
            "nothing. The parameters stay as they were; --update.backtracks is how often a step is shortened"
        )
        warnings.append(("trust-region-refused", text))
    return warnings


def with_evidence(name: str, text: str, line: Mapping[str, Any], first: Mapping[str, Any]) -> Alert:
    """A warning as a flag with its numbers: those of this line, and of the `first` line if it has them."""
    keys, show = EVIDENCE.get(name, ((), "all"))
    measured = [key for key in keys if isinstance(line.get(key), int | float) and math.isfinite(line[key])]
    lines = [first, line] if measured and first.keys() >= set(measured) else [line]
    numbers = {key: [float(each[key]) for each in lines] for key in measured}
    return Alert(name, text, numbers, (lines[0]["step"], line["step"]), show)


def one_answer(step: int, responses: Iterable[Answer], text_of: Callable[[Any], str]) -> list[Alert]:
    """A flag if one response is given to most of a step's prompts and is not mostly right."""
    responses = list(responses)
    prompts, total = len({prompt for prompt, _, _ in responses}), len(responses)
    if prompts < PROMPTS:
        return []
    answer, count = Counter(response for _, response, _ in responses).most_common(1)[0]
    known = all(correct is not None for _, _, correct in responses)
    alike = [(prompt, correct) for prompt, response, correct in responses if response == answer]
    share, many = sum(bool(correct) for _, correct in alike) / count, len({prompt for prompt, _ in alike})
    if min(count / total, many / prompts) < (SAME if known else UNKNOWN) or (known and share > RIGHT):
        return []
    text = text_of(answer)
    words, longest = " ".join(text.split()), max(text.splitlines() or [""], key=len)
    quoted = repr(words if len(words) <= CHARACTERS else f"{words[:CHARACTERS]}…") if words else "an empty response"
    said = f"one answer for many prompts: {quoted} is {count} of {total} responses, to {many} of {prompts} prompts"
    numbers = {"share of one text": [count / total]}
    if known:
        said += f", {share:.0%} of them exactly right"
        numbers["right among them"] = [share]
    return [Alert("one-answer", said, numbers, (step, step), q=longest[:CHARACTERS].strip())]


def batch_responses(batch: Any) -> Iterator[Answer]:
    """The responses of a batch, as tokens."""
    right = batch.correct.tolist() if batch.correct is not None else None
    groups = zip(batch.prompt.tolist(), batch.response.tolist(), batch.mask.tolist(), strict=True)
    for p, (prompt, responses, masks) in enumerate(groups):
        for s, (response, mask) in enumerate(zip(responses, masks, strict=True)):
            yield tuple(prompt), tuple(compress(response, mask)), None if right is None else right[p][s]


def reward_weights(task: Any) -> dict[str, float]:
    """The weight of each part of a task's reward, by the name of its metric."""
    return {f"rewards/{part.name}": part.weight for part in getattr(task, "reward_parts", ())}


def findings(last: Mapping[str, Any], task: Any, grouped: bool) -> list[str]:
    """The result, from the last value of every metric; `grouped`: does credit compare the responses to a prompt?"""
    words = []
    accuracy, maximum = last.get("eval/accuracy"), task.max_reward
    exact = last.get("exact/reward")
    reward, name = (exact, "E[R], enumerated,") if exact is not None else (last.get("eval/reward"), "Held-out reward")
    of = f" of {maximum:g}" if maximum else ""
    if reward is not None:
        right = "" if accuracy is None else f"; {accuracy:.1%} of the greedy answers are exactly right"
        words.append(f"{name} is {reward:.3f}{of}{right}.")
    if last.get("eval/logp") is not None:
        words.append(f"Held-out demonstrations have a log-prob of {last['eval/logp']:.3f} per token.")
    if last.get("eval/pairs/accuracy") is not None:
        share, loss, ece = (last[f"eval/pairs/{name}"] for name in ("accuracy", "log_loss", "ece"))
        words.append(
            f"{share:.1%} of held-out pairs are ranked correctly, with a log-loss of {loss:.3f} (chance: 0.693) and "
            f"a calibration error of {ece:.3f}."
        )
    if last.get("eval/steps/explained") is not None:
        words.append(f"The scores explain {last['eval/steps/explained']:.1%} of the variance of held-out labels.")
    warnings = [text for _, text in metric_warnings(last, task)]
    words += [text[0].upper() + text[1:] for text in warnings]
    silent, entropy = last.get("frac_reward_zero_std"), last.get("entropy")
    if accuracy is not None and accuracy >= ALL_RIGHT:
        words.append("Solved.")
    elif accuracy is None or warnings or silent is None or entropy is None:
        return words
    elif silent >= ALL_EQUAL and entropy < DETERMINED:  # stuck if the answers are mostly wrong, settled if right
        equal = f"{silent:.0%} of the groups have equal rewards"
        tried = f"at an entropy of {entropy:.3f} nats per token the policy"
        if accuracy < MOSTLY_RIGHT and grouped:
            why = "which gives group credit nothing to compare"
            words.append(f"Stuck: {equal}, {why}, and {tried} no longer tries anything else.")
        else:
            how = "Stuck" if accuracy < MOSTLY_RIGHT else f"Settled at {accuracy:.1%} right"
            words.append(f"{how}: {tried} hardly tries anything else any more; {equal}.")
    return words


# ---- trends over many steps ---------------------------------------------------------------------------------------

LENGTH = "completions/mean_length"
KEYS = ("reward", "reward_std", "accuracy", "entropy", LENGTH, MISMATCH, *turn_alerts.KEYS)
FIRST, BLOCKS, LEAST = 4, 32, 8
"""Steps per block at first; number of blocks at which they are joined; least number of blocks to compare."""
HALF = 0.5
"""The accuracy of an unsolved task."""
EARNED, COUNTED = 0.6, 0.02
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

    def see(self, line: Mapping[str, Any]) -> list[Alert]:
        """The flags of one more step, and if it completes a block, those of the comparison of windows."""
        flags = self._beyond(line)
        if not self.blocks and not self._waiting:
            parts = {*(self.weights or {}), *(key for key in line if re.fullmatch(PART, key))}
            self.keys = (*KEYS, *sorted(parts))
        if line.get("eval/accuracy") is not None and not self.first:
            self.first = {k: line[k] for k in ("step", "eval/accuracy", "eval/reward") if line.get(k) is not None}
        if not self._waiting:
            self._since = line["step"]
        self._waiting.append([line.get(key) for key in self.keys])
        if len(self._waiting) < self._size:
            return flags
        found = [number for column in zip(*self._waiting, strict=True) for number in sums(column)]
        self.blocks.append(StepBlock(self._since, line["step"], found))
        self._waiting = []
        self.start = self.start or self.blocks[0]
        if len(self.blocks) == BLOCKS:
            self.blocks = [joined(self.blocks[i : i + 2]) for i in range(0, BLOCKS, 2)]
            self._size *= 2
        return flags + self._compared() if len(self.blocks) >= LEAST and len(self.blocks) % 2 == 0 else flags

    def _beyond(self, line: Mapping[str, Any]) -> list[Alert]:
        """A metric that is far too large in this step."""
        flags = []
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
                flags.append(Alert("out-of-scale", text, {key: [float(value)]}, (line["step"], line["step"])))
        return flags[:1]

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
            *turn_alerts.raised(whole, late, self._moved),
        ]
        before, self._held = self._held, {flag.name for flag in raised if flag is not None}
        return [flag for flag in raised if flag is not None and flag.name in before]

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
        clear = self.maximum or abs(self._moved(late)) < LEVEL or accuracy.now >= COUNTED
        if moved < (HALF if self.maximum else 1.0) or not clear or not self._behind(change, late):
            return None
        of = f" of {self.maximum:g}" if self.maximum else ""
        text = (
            f"reward up, accuracy {'flat' if change.flat else 'far behind'}: {change.words} the reward went from "
            f"{reward:.3g}{of}, and the share of exactly right answers from {accuracy:.1%}"
        )
        return change.flag("reward-up-accuracy-flat", text, "reward", "accuracy", show="wrong")

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
        return change.flag("length-drift", text, LENGTH, "accuracy")

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
        return change.flag("component-dominates", text, first, "reward", "accuracy")

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
        return begun.flag("entropy-collapse", text, "entropy", "accuracy", show="wrong")

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
        return change.flag("mismatch-rising", f"sampler and trainer drift apart: {change.words} {apart}", MISMATCH)


def flag_events(
    lines: Iterable[Mapping[str, Any]], steps: Sequence[int], rows_of: Callable[[int], Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """The flags of a run that Ascent did not write, each once, from its metrics and its recorded responses."""
    watch = RunAlerts()
    events: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines):
        step = line["step"] if isinstance(line.get("step"), int) else number
        for flag in watch.see({**line, "step": step}):
            near = min(steps, key=lambda other: (abs(other - step), other), default=None)
            events.setdefault(flag.name, flag.event(step, near))
    for step in sorted(steps):
        responses = ((r.get("prompt_text"), r.get("response_text") or "", r.get("correct")) for r in rows_of(step))
        for flag in one_answer(step, responses, str):
            events.setdefault(flag.name, flag.event(step, step))
    return sorted(events.values(), key=lambda event: event["step"])

"""Flags from a single step. A flag is not a verdict: it says what was seen, in which numbers, and where to look."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any

PROMPTS, SAME, UNKNOWN = 8, 2 / 3, 0.9
"""Least number of different prompts; share of responses with the same text; that share if correctness is unknown."""
RIGHT, CHARACTERS = 0.6, 120
"""Share of right answers above which one text may be the answer to many prompts; characters of it that are quoted."""
EARNED_ALL, MOSTLY_RIGHT = 0.95, 0.5
"""Share of the maximum reward that counts as earned; accuracy below which answers are mostly wrong."""
EVIDENCE: dict[str, tuple[tuple[str, ...], str]] = {
    "reward-without-accuracy": (("eval/reward", "eval/accuracy"), "wrong"),
    "reward-errors": (("reward_errors",), "failed"),
    "trust-region-refused": (("trust_region/too_far", "trust_region/no_gain"), "all"),
}
"""For flags from a single line of metrics: the metrics to show, and which completions to look at."""


@dataclass(frozen=True)
class Flag:
    """What was seen, and where to look."""

    name: str
    text: str
    metrics: dict[str, list[float]]
    """For each metric: its value before and now, or a single number for a single step."""
    steps: tuple[int, int]
    """First and last step of the comparison; the same step twice for a single step."""
    show: str = "all"
    """Which completions to look at."""
    q: str = ""
    """What to search for in them."""

    def event(self, step: int, recorded: int | None) -> dict[str, Any]:
        """The line of events.jsonl; `recorded` is the step whose completions show it."""
        evidence: dict[str, Any] = {"metrics": self.metrics, "steps": list(self.steps)}
        if recorded is not None:
            evidence["rollouts"] = {"step": recorded, "show": self.show, "q": self.q}
        return {"step": step, "event": "flag", "name": self.name, "text": self.text, "evidence": evidence}


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
    if metrics.get("trust_region/accepted") == 0 and metrics.get("grad_norm"):
        beyond, flat = metrics["trust_region/too_far"], metrics["trust_region/no_gain"]
        text = (
            f"the line search took no step: {beyond:.0f} trials had a KL beyond Δ, and {flat:.0f} within it gained "
            "nothing. The parameters stay as they were; --update.backtracks is how often a step is shortened"
        )
        warnings.append(("trust-region-refused", text))
    return warnings


def with_evidence(name: str, text: str, line: Mapping[str, Any], first: Mapping[str, Any]) -> Flag:
    """A warning as a flag with its numbers: those of this line, and of the `first` line if it has them."""
    keys, show = EVIDENCE.get(name, ((), "all"))
    measured = [key for key in keys if isinstance(line.get(key), int | float) and math.isfinite(line[key])]
    lines = [first, line] if measured and first.keys() >= set(measured) else [line]
    numbers = {key: [float(each[key]) for each in lines] for key in measured}
    return Flag(name, text, numbers, (lines[0]["step"], line["step"]), show)


def one_answer(
    step: int, responses: Iterable[tuple[Any, Any, bool | None]], text_of: Callable[[Any], str]
) -> list[Flag]:
    """A flag if one response is given to most of a step's prompts and is not mostly right.

    `responses` are (prompt, response, correct), where correct is None if unknown; `text_of` gives a response's text.
    """
    responses = list(responses)
    prompts, total = len({prompt for prompt, _, _ in responses}), len(responses)
    if prompts < PROMPTS:
        return []
    answer, count = Counter(response for _, response, _ in responses).most_common(1)[0]
    known = all(correct is not None for _, _, correct in responses)
    share = sum(bool(correct) for _, response, correct in responses if response == answer) / count
    many = len({prompt for prompt, response, _ in responses if response == answer})
    if min(count / total, many / prompts) < (SAME if known else UNKNOWN) or (known and share > RIGHT):
        return []
    numbers = {"share of one text": [count / total]} | ({"right among them": [share]} if known else {})
    text = text_of(answer)
    words, longest = " ".join(text.split()), max(text.splitlines() or [""], key=len)
    quoted = repr(words if len(words) <= CHARACTERS else f"{words[:CHARACTERS]}…") if words else "an empty response"
    counts = f"{quoted} is {count} of {total} responses, to {many} of {prompts} prompts"
    right = f", {share:.0%} of them exactly right" if known else ""
    text = f"one answer for many prompts: {counts}{right}"
    return [Flag("one-answer", text, numbers, (step, step), q=longest[:CHARACTERS].strip())]


def batch_responses(batch: Any) -> Iterator[tuple[Any, Any, bool | None]]:
    """For each response of a batch: its prompt, its tokens, and whether it is right."""
    right = batch.correct.tolist() if batch.correct is not None else None
    groups = zip(batch.prompt.tolist(), batch.response.tolist(), batch.mask.tolist(), strict=True)
    for p, (prompt, responses, masks) in enumerate(groups):
        for s, (response, mask) in enumerate(zip(responses, masks, strict=True)):
            yield tuple(prompt), tuple(compress(response, mask)), None if right is None else right[p][s]


def reward_weights(task: Any) -> dict[str, float]:
    """The weight of each part of a task's reward, by the name of its metric."""
    return {f"rewards/{part.name}": part.weight for part in getattr(task, "reward_parts", ())}

"""A task's rewards on responses whose worth is known: right ones have to pass, corrupted ones must not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ascent.tasks.text.base import TextTask
from ascent.tasks.text.grading.grading import Grading, Mark, ResponseGrader, excerpt
from ascent.tasks.text.problems import Problem

_EXAMPLES = 3
"""Failures of each kind that are described."""


@dataclass(frozen=True)
class SelfTest:
    """What a self-test found."""

    gold: int
    """Right responses tried; 0 where the task knows none."""
    gold_passed: int
    corrupted: int
    corrupted_passed: int
    """Corrupted responses that were taken for right: none should be."""
    gold_reward: float
    """Mean reward of right responses."""
    corrupted_reward: float
    errors: int
    failures: tuple[str, ...]
    """What went wrong, in words, a few of each kind."""

    @property
    def ok(self) -> bool:
        return not self.failures

    def lines(self) -> list[str]:
        """The report as a person reads it."""
        if not self.gold + self.corrupted:
            head = "no right responses are known, or only a reward model rates them, so the reward could not be tested"
        else:
            head = (
                f"{self.gold_passed} of {self.gold} right responses pass (mean reward {self.gold_reward:.3g}), "
                f"{self.corrupted_passed} of {self.corrupted} corrupted ones do (mean reward "
                f"{self.corrupted_reward:.3g}), {self.errors} errors"
            )
        return [head, *self.failures]


def self_test(task: TextTask, count: int = 16, judges: Mapping[str, ResponseGrader] | None = None) -> SelfTest:
    """The rewards on right, corrupted, empty and other problems' responses, in worker processes as in training."""
    if all(reward.kind == "model" for reward in task.rewards):
        return _summary([], [], [], [])
    size = task.size
    problems = [task.train(i * 7919 % size if size else i * 7919) for i in range(min(count, size or count))]
    golds = [task.gold(problem) for problem in problems]
    others = golds[1:] + golds[:1]
    right = [(p, gold) for p, gold in zip(problems, golds, strict=True) if gold is not None]
    wrong = [
        (p, response)
        for p, gold, other in zip(problems, golds, others, strict=True)
        for response in dict.fromkeys(task.wrong(p, other if other != gold else None))
    ]
    grading = Grading(task, judges, partial=True)
    try:
        marks = grading([*right, *wrong])
    finally:
        grading.close()
    return _summary(right, wrong, marks[: len(right)], marks[len(right) :])


def _summary(
    right: list[tuple[Problem, str]], wrong: list[tuple[Problem, str]], good: list[Mark], bad: list[Mark]
) -> SelfTest:
    errors = [mark.error for mark in (*good, *bad) if mark.error is not None]
    refused = [(p, r, m) for (p, r), m in zip(right, good, strict=True) if m.error is None and not m.strict]
    passed = [(p, r, m) for (p, r), m in zip(wrong, bad, strict=True) if m.error is None and m.strict]
    failures = [f"a reward failed: {error}" for error in errors[:_EXAMPLES]]
    failures += [f"a right response does not pass: {_case(*case)}" for case in refused[:_EXAMPLES]]
    failures += [f"a corrupted response passes: {_case(*case)}" for case in passed[:_EXAMPLES]]
    high, low = _mean(good), _mean(bad)
    if right and wrong and not errors and not high > low:
        failures.append(
            f"the reward cannot tell right from wrong: right responses earn {high:.3g} on the mean, corrupted {low:.3g}"
        )
    passing = sum(mark.strict for mark in good)
    return SelfTest(len(right), passing, len(wrong), len(passed), high, low, len(errors), tuple(failures))


def _mean(marks: list[Mark]) -> float:
    values = [mark.value for mark in marks if mark.error is None]
    return sum(values) / len(values) if values else 0.0


def _case(problem: Problem, response: str, mark: Mark) -> str:
    why = f" ({mark.reason})" if mark.reason else ""
    return f"prompt {excerpt(problem.prompt)}, response {excerpt(response)}{why}"

"""A task's rewards on many responses at once, in its grading processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ascent.tasks.text.base import Problem, Text, settings_of
from ascent.tasks.text.worker import Grader, Job
from ascent.tasks.text.workers import Outcome, Pool


@dataclass(frozen=True)
class Mark:
    """What all of a task's rewards together say of one response."""

    value: float = 0.0
    strict: bool = False
    lenient: bool = False
    reason: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    """The value of each reward by its name, before its weight."""
    error: str | None = None


class Grading:
    """The rewards of a task, ready to be computed. `close` ends its processes."""

    def __init__(self, task: Text):
        self.task = task
        cls = type(task)
        source = getattr(cls, "__ascent_source__", None) or f"{cls.__module__}:{cls.__qualname__}"
        functions = [reward.source for reward in task.rewards if not reward.own]
        graders = [Grader(source, settings_of(task)), *(Grader(function) for function in functions)]
        self.pool = Pool(graders, task.reward_workers, task.reward_seconds)

    def __call__(self, asked: Sequence[tuple[Problem, str]]) -> list[Mark]:
        """A mark for each problem and response, in their order."""
        jobs, places = [], []
        for i, (problem, response) in enumerate(asked):
            for grader in self._graders(problem):
                jobs.append(Job(grader, problem.prompt, response, problem.answer, problem.columns))
                places.append((i, grader))
        outcomes = dict(zip(places, self.pool.run(jobs), strict=True))
        return [self._mark(problem, response, i, outcomes) for i, (problem, response) in enumerate(asked)]

    def _graders(self, problem: Problem) -> list[int]:
        """0 is the task's own check: for the strict score if not for the reward, but not where it knows nothing."""
        functions = sum(not reward.own for reward in self.task.rewards)
        knows = problem.answer is not None or functions < len(self.task.rewards)
        return [*([0] if knows else []), *range(1, functions + 1)]

    def _mark(self, problem: Problem, response: str, i: int, outcomes: dict[tuple[int, int], Outcome]) -> Mark:
        own, function = outcomes.get((i, 0)), 0
        parts, reasons = {}, [own.reason] if own else []
        failed = f"the task's check: {own.error}" if own is not None and own.error else None
        value = 0.0
        for reward in self.task.rewards:
            function += not reward.own
            outcome = outcomes[i, 0 if reward.own else function]
            parts[reward.name] = outcome.value
            value += reward.weight * outcome.value
            if not reward.own:
                reasons.append(f"{reward.name}: {outcome.reason}" if outcome.reason else "")
                failed = failed or (f"reward {reward.name}: {outcome.error}" if outcome.error else None)
        reason = "; ".join(filter(None, reasons))
        if failed is not None:
            return Mark(reason=reason, error=f"{failed}. Prompt {shown(problem.prompt)}, response {shown(response)}")
        if own is None:  # nothing to compare with: what earns the full point counts as right
            return Mark(value, value >= 1, value >= 1, reason, parts)
        return Mark(value, own.strict, own.lenient, reason, parts)

    def close(self) -> None:
        self.pool.close()


def shown(text: object, length: int = 160) -> str:
    """The head of a prompt or response, on one line."""
    if isinstance(text, list):
        text = text[-1].get("content", "") if text else ""
    words = " ".join(str(text).split())
    return repr(words if len(words) <= length else f"{words[:length]}…")

"""A task's rewards on many responses at once: in its grading processes, by its judges and by its reward models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ascent.tasks.text.base import TextTask, task_fields
from ascent.tasks.text.grading.worker import Grader, Job
from ascent.tasks.text.grading.workers import Outcome, Pool
from ascent.tasks.text.problems import Problem


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


ResponseGrader = Callable[[Sequence[tuple[Problem, str]]], list[Outcome]]
"""A judge or a reward model: one outcome for each response to a problem, in order."""
_CHECK = -1
"""Stands for the task's own check, where rewards are counted from 0."""
Outcomes = dict[tuple[int, int], Outcome]
"""By the number of the response and that of the reward."""


class Grading:
    """The rewards of a task, ready to be computed. `close` ends its processes.

    Its judges and reward models come from outside, by their source. A self-test is `partial`: it leaves out rewards
    whose grader it was not given, such as reward models, which know of no right response.
    """

    def __init__(self, task: TextTask, graders: Mapping[str, ResponseGrader] | None = None, partial: bool = False):
        self.task, self.graders = task, dict(graders or {})
        cls = type(task)
        source = getattr(cls, "__ascent_source__", None) or f"{cls.__module__}:{cls.__qualname__}"
        functions = {i: reward for i, reward in enumerate(task.rewards) if reward.kind == "python"}
        self._grader = {_CHECK: 0} | {i: grader for grader, i in enumerate(functions, 1)}
        graders_in_processes = [Grader(source, task_fields(task)), *(Grader(r.source) for r in functions.values())]
        self.pool = Pool(graders_in_processes, task.reward_workers, task.reward_seconds)
        outside = {i: r.source for i, r in enumerate(task.rewards) if r.kind in ("judge", "model")}
        self._outside = {i: source for i, source in outside.items() if not partial or source in self.graders}

    def __call__(self, responses: Sequence[tuple[Problem, str]]) -> list[Mark]:
        """A mark for each problem and response, in their order."""
        jobs, places = [], []
        for i, (problem, response) in enumerate(responses):
            for reward, grader in self._grader.items():
                if reward != _CHECK or self._checks(problem):
                    jobs.append(Job(grader, problem.prompt, response, problem.answer, problem.columns))
                    places.append((i, reward))
        outcomes: Outcomes = dict(zip(places, self.pool.run(jobs), strict=True))
        for reward, source in self._outside.items():
            outcomes |= {(i, reward): outcome for i, outcome in enumerate(self.graders[source](responses))}
        return [self._mark(problem, response, i, outcomes) for i, (problem, response) in enumerate(responses)]

    def _checks(self, problem: Problem) -> bool:
        """Is the task's own check made? Also for the strict score alone; not where there is nothing to compare with."""
        return problem.answer is not None or any(reward.own for reward in self.task.rewards)

    def _mark(self, problem: Problem, response: str, i: int, outcomes: Outcomes) -> Mark:
        own = outcomes.get((i, _CHECK))
        parts, reasons = {}, [own.reason] if own else []
        failed = f"the task's check: {own.error}" if own is not None and own.error else None
        value = 0.0
        for number, reward in enumerate(self.task.rewards):
            if reward.kind.startswith("process") or (reward.kind in ("judge", "model") and number not in self._outside):
                continue  # process rewards come token by token, after this
            outcome = outcomes[i, _CHECK if reward.own else number]
            parts[reward.name] = outcome.value
            value += reward.weight * outcome.value
            if not reward.own:
                reasons.append(f"{reward.name}: {outcome.reason}" if outcome.reason else "")
                failed = failed or (f"reward {reward.name}: {outcome.error}" if outcome.error else None)
        reason = "; ".join(filter(None, reasons))
        if failed is not None:
            return Mark(
                reason=reason, error=f"{failed}. Prompt {excerpt(problem.prompt)}, response {excerpt(response)}"
            )
        if own is None:  # nothing to compare with: what earns the full point counts as right
            return Mark(value, value >= 1, value >= 1, reason, parts)
        return Mark(value, own.strict, own.lenient, reason, parts)

    def close(self) -> None:
        self.pool.close()


def excerpt(text: object, length: int = 160) -> str:
    """The head of a prompt or response, on one line."""
    if isinstance(text, list):
        text = text[-1].get("content", "") if text else ""
    words = " ".join(str(text).split())
    return repr(words if len(words) <= length else f"{words[:length]}…")

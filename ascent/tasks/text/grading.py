"""A task's rewards on many responses at once: in its grading processes, by its judges and by its reward models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ascent.tasks.text.base import Message, Problem, Text, settings_of
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


CHECK = -1
"""Stands for the task's own check, where rewards are counted from 0."""
Outcomes = dict[tuple[int, int], Outcome]
"""By the number of the response and that of the reward."""
Rater = Callable[[Sequence[tuple[list[Message], str]]], list[float]]
"""A reward model: from chats and responses to them, a number each."""


class Grading:
    """The rewards of a task, ready to be computed. `close` ends its processes.

    Its reward models are handed in by their source. A self-test has none, for they know of no right response: there
    only the other rewards count.
    """

    def __init__(self, task: Text, raters: Mapping[str, Rater] | None = None):
        self.task, self.raters = task, raters
        cls = type(task)
        source = getattr(cls, "__ascent_source__", None) or f"{cls.__module__}:{cls.__qualname__}"
        functions = {i: reward for i, reward in enumerate(task.rewards) if reward.kind == "python"}
        self._grader = {CHECK: 0} | {i: grader for grader, i in enumerate(functions, 1)}
        graders = [Grader(source, settings_of(task)), *(Grader(reward.source) for reward in functions.values())]
        self.pool = Pool(graders, task.reward_workers, task.reward_seconds)
        self._judges = {i: reward for i, reward in enumerate(task.rewards) if reward.kind == "judge"}
        self._askers: dict[int, Any] = {}
        self._models = {i: reward for i, reward in enumerate(task.rewards) if reward.kind == "model"}

    def __call__(self, asked: Sequence[tuple[Problem, str]]) -> list[Mark]:
        """A mark for each problem and response, in their order."""
        jobs, places = [], []
        for i, (problem, response) in enumerate(asked):
            for reward, grader in self._grader.items():
                if reward != CHECK or self._checks(problem):
                    jobs.append(Job(grader, problem.prompt, response, problem.answer, problem.columns))
                    places.append((i, reward))
        outcomes: Outcomes = dict(zip(places, self.pool.run(jobs), strict=True))
        for reward in self._judges:
            outcomes |= {(i, reward): outcome for i, outcome in enumerate(self._judged(reward, asked))}
        for reward in self._models if self.raters is not None else ():
            outcomes |= {(i, reward): outcome for i, outcome in enumerate(self._rated(reward, asked))}
        return [self._mark(problem, response, i, outcomes) for i, (problem, response) in enumerate(asked)]

    def _checks(self, problem: Problem) -> bool:
        """Is the task's own check made? For the strict score if not for the reward; not where it knows nothing."""
        return problem.answer is not None or any(reward.own for reward in self.task.rewards)

    def _judged(self, reward: int, asked: Sequence[tuple[Problem, str]]) -> list[Outcome]:
        """What a judge says of each: a score, or the error that it is in place of one."""
        from ascent.judge import Asker, Scored, score
        from ascent.judge.cache import Answers

        if reward not in self._askers:
            judge = self._judges[reward].load()
            self._askers[reward] = Asker(judge, Answers(judge.cache))
        said = score(self._askers[reward], [(p.prompt, response, p.answer) for p, response in asked])
        return [Outcome(s.value, reason=s.reason) if isinstance(s, Scored) else Outcome(error=str(s)) for s in said]

    def _rated(self, reward: int, asked: Sequence[tuple[Problem, str]]) -> list[Outcome]:
        """What a reward model says of each, shown the chat that the policy was shown."""
        assert self.raters is not None
        values = self.raters[self._models[reward].source]([(self.task.messages(p), response) for p, response in asked])
        fine = [math.isfinite(value) for value in values]
        return [
            Outcome(v, reason=f"{v:.3f}") if ok else Outcome(error=f"it returned {v}")
            for v, ok in zip(values, fine, strict=True)
        ]

    def _mark(self, problem: Problem, response: str, i: int, outcomes: Outcomes) -> Mark:
        own = outcomes.get((i, CHECK))
        parts, reasons = {}, [own.reason] if own else []
        failed = f"the task's check: {own.error}" if own is not None and own.error else None
        value = 0.0
        for number, reward in enumerate(self.task.rewards):
            if (reward.kind == "model" and self.raters is None) or reward.kind.startswith("process"):
                continue  # a process reward comes token by token, when words are tokens again
            outcome = outcomes[i, CHECK if reward.own else number]
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
        for asker in self._askers.values():
            asker.answers.close()
        self._askers = {}


def shown(text: object, length: int = 160) -> str:
    """The head of a prompt or response, on one line."""
    if isinstance(text, list):
        text = text[-1].get("content", "") if text else ""
    words = " ".join(str(text).split())
    return repr(words if len(words) <= length else f"{words[:length]}…")

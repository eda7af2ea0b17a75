"""Tasks whose problems are made from an index, without end; one prompt in four is held out by its hash."""

from __future__ import annotations

from dataclasses import dataclass

from ascent.tasks.base import refuse
from ascent.tasks.files import is_held_out
from ascent.tasks.text.base import TextTask
from ascent.tasks.text.problems import Problem

_HELD_OUT_ONE_IN = 4
"""A large share: to find the test set, four times as many problems have to be made; training never runs out."""
_TRIES = 200
INDICES = 2**31
"""Indices are taken modulo this: several generators take no larger seed."""


@dataclass(frozen=True)
class Generated(TextTask):
    """Endless problems. A task derives from it and makes the problem of an index."""

    def make(self, index: int) -> Problem:
        """The problem of an index from 0 to 2³¹ − 1, the same every time."""
        raise NotImplementedError

    @property
    def size(self) -> int | None:
        return None

    def train(self, index: int) -> Problem:
        """The first problem from this index on that is not held out."""
        for step in range(_TRIES):
            problem = self.make((index + step * 1_000_003) % INDICES)
            if not is_held_out(problem.prompt, _HELD_OUT_ONE_IN):
                return problem
        refuse("the task makes so few different prompts that all are held out; give it other options")

    def test(self, count: int) -> list[Problem]:
        """The first `count` different held-out problems, or as many as are found in a reasonable time."""
        problems: dict[str, Problem] = {}
        barren = 0
        for index in range(INDICES):
            problem = self.make(index)
            new = is_held_out(problem.prompt, _HELD_OUT_ONE_IN) and str(problem.prompt) not in problems
            if new:
                problems[str(problem.prompt)] = problem
            barren = 0 if new else barren + 1
            if len(problems) == count or barren == _TRIES:
                break
        return list(problems.values())

    def verify(self) -> None:
        super().verify()
        self.train(0)
        if not self.test(1):
            refuse("the task makes so few different prompts that none is held out; give it other options")

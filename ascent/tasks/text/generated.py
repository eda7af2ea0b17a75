"""Worlds whose problems are made from an index, without end; one prompt in four is held out by its hash."""

from __future__ import annotations

from dataclasses import dataclass

from ascent.tasks.text.base import Problem, Text, held_out, refuse

ONE_IN = 4
"""One prompt in so many is held out. Many, for a test set costs so many times its problems to make, and there
are always more to train on."""
TRIES = 200
INDICES = 2**31
"""Indices are taken modulo this: several generators take no larger seed."""


@dataclass(frozen=True)
class Generated(Text):
    """Endless problems. A task derives from it and makes the problem of an index."""

    def make(self, index: int) -> Problem:
        """The problem of an index from 0 to 2³¹ − 1, the same every time."""
        raise NotImplementedError

    @property
    def size(self) -> int | None:
        return None

    def train(self, index: int) -> Problem:
        """The first problem from this index on that is not held out."""
        for step in range(TRIES):
            problem = self.make((index + step * 1_000_003) % INDICES)
            if not held_out(problem.prompt, ONE_IN):
                return problem
        refuse("the task makes so few different prompts that all are held out; give it other options")

    def test(self, count: int) -> list[Problem]:
        """The first so many different held-out problems, or as many as are found in a fair time."""
        found: dict[str, Problem] = {}
        barren = 0
        for index in range(INDICES):
            problem = self.make(index)
            new = held_out(problem.prompt, ONE_IN) and str(problem.prompt) not in found
            if new:
                found[str(problem.prompt)] = problem
            barren = 0 if new else barren + 1
            if len(found) == count or barren == TRIES:
                break
        return list(found.values())

    def verify(self) -> None:
        super().verify()
        self.train(0)
        if not self.test(1):
            refuse("the task makes so few different prompts that none is held out; give it other options")

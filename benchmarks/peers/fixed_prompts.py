"""The task of the step benchmarks. It imports no torch, because its reward runs in worker processes."""

from __future__ import annotations

from dataclasses import dataclass

from ascent.tasks.text import Graded, Problem, TextTask
from benchmarks.peers.reward import reward


@dataclass(frozen=True)
class FixedPrompts(TextTask):
    """Prompts from a list, and the same reward as the peer."""

    words: tuple[str, ...] = ()
    """The prompts."""

    @property
    def size(self) -> int | None:
        return len(self.words)

    def train(self, index: int) -> Problem:
        return Problem(self.words[index])

    def test(self, count: int) -> list[Problem]:
        return [Problem("never asked")]

    def grade(self, problem: Problem, response: str) -> Graded:
        return Graded(reward(response), False, False)

"""Worlds whose problems are the lines of one JSONL file, to be learned from as they stand there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascent.tasks.text.base import Graded, Problem, Text, held_out, refuse
from ascent.tasks.text.jsonl import read_lines, stamp_of
from ascent.tasks.text.rows import ONE_IN

Split = tuple[list[Problem], list[Problem]]


@dataclass(frozen=True)
class Filed(Text):
    """A file of what is to be learned. A task derives from it and says what a line is."""

    source: str = ""
    """The file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source:
            object.__setattr__(self, "source", str(Path(self.source).expanduser().resolve()))

    def problem(self, row: dict[str, Any], where: str) -> Problem:
        """A line as a problem; refused with its place if it is none."""
        raise NotImplementedError

    def missing(self) -> str:
        """What to say where no file is named."""
        raise NotImplementedError

    def shown(self, problem: Problem) -> str:
        """The response that is to be learned."""
        return problem.answer or ""

    @property
    def rows(self) -> Split:
        """Those to learn from, and those of one prompt in ten, held out."""
        return _rows(self, stamp_of(self.source))

    @property
    def size(self) -> int | None:
        return len(self.rows[0])

    def train(self, index: int) -> Problem:
        return self.rows[0][index]

    def test(self, count: int) -> list[Problem]:
        return self.rows[1][:count]

    def grade(self, problem: Problem, response: str) -> Graded:
        """The same words as those that are shown."""
        same = response.strip() == self.shown(problem).strip()
        return self.graded(same, same)

    def verify(self) -> None:
        super().verify()
        _ = self.rows


@functools.lru_cache(maxsize=4)
def _rows(task: Filed, stamp: object) -> Split:  # noqa: ARG001 (the key's)
    if not task.source:
        refuse(task.missing())
    found = [task.problem(row, f"{task.source}, line {line}") for line, row in read_lines(Path(task.source))]
    return split(found, lambda problem: problem.prompt, task.source)


def split(found: list[Any], prompt: Callable[[Any], Any], source: str) -> tuple[list[Any], list[Any]]:
    """One prompt in ten held out by its hash; of a small file the last one."""
    kept = [row for row in found if not held_out(prompt(row), ONE_IN)]
    tested = [row for row in found if held_out(prompt(row), ONE_IN)]
    if not kept or not tested:
        last = prompt(found[-1])
        kept, tested = [r for r in found if prompt(r) != last], [r for r in found if prompt(r) == last]
    if not kept:
        refuse(f"{source}: there has to be something to learn and something to test with: at least two prompts")
    return kept, tested

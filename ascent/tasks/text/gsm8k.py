"""GSM8K: grade-school word problems, in the data set's own format.

A solution ends in a line `#### 72`. Strictly right is the first such mark of the response, as in the data
set's own grader; leniently, the last number of the response.

Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ascent.tasks.text.answers import MINUS, last_number, same_number
from ascent.tasks.text.base import Graded, Problem, refuse
from ascent.tasks.text.dataset import load
from ascent.tasks.text.jsonl import read_lines, stamp_of
from ascent.tasks.text.rows import Rows

MARK = re.compile(r"####\s*(-?[0-9][0-9.,]*|-?\.[0-9]+)")
HUB = "openai/gsm8k"


@dataclass(frozen=True)
class Gsm8k(Rows):
    """Grade-school word problems: the answer stands after ####."""

    instruction: str = "Think step by step. End with a line that has only #### and the number."
    """Stands below every prompt: how the answer has to be given."""
    path: str | None = None
    """A folder with train.jsonl and test.jsonl. None: openai/gsm8k from the Hugging Face hub."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None:
            object.__setattr__(self, "path", str(Path(self.path).expanduser().resolve()))

    def stamp(self) -> object:
        if self.path is None:
            return None
        return tuple(stamp_of(Path(self.path, f"{part}.jsonl")) for part in ("train", "test"))

    def read(self) -> tuple[list[Problem], list[Problem] | None]:
        return self._part("train"), self._part("test")

    def _part(self, split: str) -> list[Problem]:
        if self.path is None:
            rows = enumerate(load(HUB, "main", split, hint="gsm8k --path FOLDER reads train.jsonl and test.jsonl"))
            return [problem_of(row, f"{HUB}, {split}, row {i}") for i, row in rows]
        file = Path(self.path, f"{split}.jsonl")
        return [problem_of(row, f"{file}, line {line}") for line, row in read_lines(file)]

    def grade(self, problem: Problem, response: str) -> Graded:
        marked = MARK.search(response.translate(MINUS))
        said = marked[1].replace(",", "").rstrip(".") if marked else None
        found = last_number(response)
        strict, lenient = same_number(said, problem.answer), same_number(found, problem.answer)
        return self.graded(strict, lenient, f"answered {said or found or 'no number'}"[:80])

    def gold(self, problem: Problem) -> str | None:
        return problem.columns.get("solution")


def problem_of(row: dict[str, str], where: str) -> Problem:
    """A row of GSM8K: a question, and an answer that ends in #### N."""
    question, solution = row.get("question"), row.get("answer")
    marked = MARK.search(solution) if isinstance(solution, str) else None
    if not isinstance(question, str) or marked is None:
        refuse(f"{where} is no problem of GSM8K: it needs a question, and an answer with #### and a number")
    return Problem(question, marked[1].replace(",", "").rstrip("."), {"solution": solution})

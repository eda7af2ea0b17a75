"""GSM8K: grade-school word problems, in the data set's own format.

A solution ends in a line `#### 72`. Strictly, the first such mark of a response counts, as in the data set's own
grader; leniently, its last number.

Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ascent.tasks.base import refuse
from ascent.tasks.files import absolute_path, file_stamp, read_jsonl
from ascent.tasks.text.answers import MINUS, last_number, same_number
from ascent.tasks.text.dataset import load_dataset
from ascent.tasks.text.problems import Graded, Problem
from ascent.tasks.text.rows import TableTask

MARK = re.compile(r"####\s*(-?[0-9][0-9.,]*|-?\.[0-9]+)")
HUB = "openai/gsm8k"


@dataclass(frozen=True)
class Gsm8k(TableTask):
    """Grade-school word problems; the answer follows ####."""

    instruction: str = "Think step by step. End with a line that has only #### and the number."
    """Text below every prompt that says how to give the answer."""
    path: str | None = None
    """A folder with train.jsonl and test.jsonl. None: openai/gsm8k from the Hugging Face hub."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None:
            object.__setattr__(self, "path", absolute_path(self.path))

    def stamp(self) -> object:
        if self.path is None:
            return None
        return tuple(file_stamp(Path(self.path, f"{part}.jsonl")) for part in ("train", "test"))

    def read(self) -> tuple[list[Problem], list[Problem] | None]:
        return self._part("train"), self._part("test")

    def _part(self, split: str) -> list[Problem]:
        if self.path is None:
            rows = enumerate(
                load_dataset(HUB, "main", split, hint="gsm8k --path FOLDER reads train.jsonl and test.jsonl")
            )
            return [_problem(row, f"{HUB}, {split}, row {i}") for i, row in rows]
        file = Path(self.path, f"{split}.jsonl")
        return [_problem(row, f"{file}, line {line}") for line, row in read_jsonl(file)]

    def grade(self, problem: Problem, response: str) -> Graded:
        marked = MARK.search(response.translate(MINUS))
        stated = marked[1].replace(",", "").rstrip(".") if marked else None
        last = last_number(response)
        strict, lenient = same_number(stated, problem.answer), same_number(last, problem.answer)
        return self.graded(strict, lenient, f"answered {stated or last or 'no number'}"[:80])

    def gold(self, problem: Problem) -> str | None:
        return problem.columns.get("solution")


def _problem(row: dict[str, str], where: str) -> Problem:
    """A row of GSM8K: a question, and an answer that ends in #### N."""
    question, solution = row.get("question"), row.get("answer")
    marked = MARK.search(solution) if isinstance(solution, str) else None
    if not isinstance(question, str) or marked is None:
        refuse(f"{where} is not a GSM8K problem: it needs a question, and an answer with #### and a number")
    return Problem(question, marked[1].replace(",", "").rstrip("."), {"solution": solution})

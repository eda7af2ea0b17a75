"""GSM8K: grade-school word problems, in the data set's own format.

A solution ends in a line `#### 72`. Strictly, the first such mark of a response counts, as in the data set's own
grader; leniently, its last number.

Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascent.core.errors import ConfigError
from ascent.tasks.text.answer_checking import MINUS_SIGNS, last_number, same_number
from ascent.tasks.text.table_tasks import TableRows, TableTask, load_dataset
from ascent.tasks.text.text_task import Graded, Problem
from ascent.tasks.user_files import read_jsonl

MARK = re.compile(r"####\s*(-?[0-9][0-9.,]*|-?\.[0-9]+)")


@dataclass(frozen=True)
class Gsm8k(TableTask):
    """Grade-school word problems; the answer follows ####."""

    instruction: str = "Think step by step. End with a line that has only #### and the number."
    """Text appended to every prompt that says how to give the answer."""
    path: str | None = None
    """A folder with train.jsonl and test.jsonl. None: openai/gsm8k from the Hugging Face hub."""

    paths = ("path",)

    def rows(self, part: str) -> TableRows:
        if self.path is None:
            return load_dataset("openai/gsm8k", "main", part, "gsm8k --path FOLDER reads train.jsonl and test.jsonl")
        return read_jsonl(Path(self.path, f"{part}.jsonl"))

    def problem(self, row: Mapping[str, Any], where: str) -> Problem:
        question, solution = row.get("question"), row.get("answer")
        marked = MARK.search(solution) if isinstance(solution, str) else None
        if not isinstance(question, str) or marked is None:
            raise ConfigError(
                f"{where} is not a GSM8K problem: it needs a question, and an answer with #### and a number"
            )
        return Problem(question, marked[1].replace(",", "").rstrip("."), {"solution": solution})

    def grade(self, problem: Problem, response: str) -> Graded:
        marked = MARK.search(response.translate(MINUS_SIGNS))
        stated = marked[1].replace(",", "").rstrip(".") if marked else None
        last = last_number(response)
        strict, lenient = same_number(stated, problem.answer), same_number(last, problem.answer)
        return self.graded(strict, lenient, f"answered {stated or last or 'no number'}"[:80])

    def gold(self, problem: Problem) -> str | None:
        return problem.columns.get("solution")

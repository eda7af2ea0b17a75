"""Demonstrations: a JSONL file of prompts and responses to learn from as they are (SFT)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ascent.tasks.text.base import DEFAULT, Graded, Problem, Text, held_out, refuse
from ascent.tasks.text.jsonl import read_lines, stamp_of
from ascent.tasks.text.rows import ONE_IN, prompt_of


@dataclass(frozen=True)
class Demonstrations(Text):
    """demonstrations:FILE: one JSON object a line, with a prompt and a response. `ascent sft FILE` trains on it."""

    source: str = ""
    """The file. Short form: ascent sft FILE."""
    prompt_column: str = "prompt"
    """Column with the prompt: words, or the messages of a chat."""
    response_column: str = "response"
    """Column with the response to learn."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "default": DEFAULT
        | {
            "algorithm": "sft",
            "lr": 2e-5,
            "update.schedule": "linear",
            "update.warmup": 0.05,
            "prompts": 16,
            "samples": 1,
            "max_tokens": 1024,
        }
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source:
            object.__setattr__(self, "source", str(Path(self.source).expanduser().resolve()))

    @property
    def rows(self) -> tuple[list[Problem], list[Problem]]:
        """Those to learn, and one prompt in ten, held out."""
        return _rows(self, stamp_of(self.source))

    @property
    def size(self) -> int | None:
        return len(self.rows[0])

    def train(self, index: int) -> Problem:
        return self.rows[0][index]

    def test(self, count: int) -> list[Problem]:
        return self.rows[1][:count]

    def grade(self, problem: Problem, response: str) -> Graded:
        """The same words as the demonstration's."""
        same = response.strip() == (problem.answer or "").strip()
        return self.graded(same, same)

    def verify(self) -> None:
        super().verify()
        _ = self.rows


@functools.lru_cache(maxsize=2)
def _rows(task: Demonstrations, stamp: object) -> tuple[list[Problem], list[Problem]]:  # noqa: ARG001 (the key's)
    if not task.source:
        refuse("demonstrations need a file: ascent sft FILE")
    found = [_problem(task, row, f"{task.source}, line {line}") for line, row in read_lines(Path(task.source))]
    kept = [problem for problem in found if not held_out(problem.prompt, ONE_IN)]
    tested = [problem for problem in found if held_out(problem.prompt, ONE_IN)]
    if not kept or not tested:  # a small file: its last prompt is the one that is held out
        last = found[-1].prompt
        kept, tested = [p for p in found if p.prompt != last], [p for p in found if p.prompt == last]
    if not kept:
        refuse(f"{task.source}: there has to be something to learn and something to test with: at least two prompts")
    return kept, tested


def _problem(task: Demonstrations, row: dict[str, Any], where: str) -> Problem:
    for column in (task.prompt_column, task.response_column):
        if column not in row:
            flag = "--prompt-column" if column == task.prompt_column else "--response-column"
            refuse(f"{where} has no column {column}; there are: {', '.join(row) or 'none'}. Set {flag}")
    response = row[task.response_column]
    if not isinstance(response, str) or not response.strip():
        refuse(f"{where}, column {task.response_column}: a response is words, and it is {response!r:.80}")
    return Problem(prompt_of(row[task.prompt_column], f"{where}, column {task.prompt_column}"), response)

"""Labelled steps: a JSONL file of prompts, each with a response cut into steps and a label for every one of them.

    {"prompt": "What is 2 + 3 + 4?", "steps": ["2 + 3 = 5", "5 + 4 = 10"], "labels": [1, 0]}

A label is a number, or true or false: was the step right, or what is the response worth after it. The response is its
steps with a separator between them; the last one is closed by the end token, unless `cut` says that the limit did it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ascent.tasks.text.base import DEFAULT, Graded, Problem, Text, held_out, refuse
from ascent.tasks.text.jsonl import read_lines, stamp_of
from ascent.tasks.text.rows import ONE_IN, prompt_of

SEPARATOR = "\n"


@dataclass(frozen=True)
class Steps(Text):
    """steps:FILE: responses in steps, with a label for each. `ascent process-reward FILE` learns them."""

    source: str = ""
    """The file. Short form: ascent process-reward FILE."""
    separator: str = SEPARATOR
    """What stands between two steps of a response. Default: a newline."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "default": DEFAULT
        | {
            "algorithm": "process-reward",
            "update.schedule": "linear",
            "update.warmup": 0.1,
            "prompts": 16,
            "max_tokens": 1024,
        }
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.separator:
            refuse("--separator is empty: something has to stand between two steps")
        if self.source:
            object.__setattr__(self, "source", str(Path(self.source).expanduser().resolve()))

    @property
    def rows(self) -> tuple[list[Problem], list[Problem]]:
        """Responses to learn from, and those of one prompt in ten, held out."""
        return _rows(self.source, self.separator, stamp_of(self.source))

    @property
    def size(self) -> int | None:
        return len(self.rows[0])

    def train(self, index: int) -> Problem:
        return self.rows[0][index]

    def test(self, count: int) -> list[Problem]:
        return self.rows[1][:count]

    def grade(self, problem: Problem, response: str) -> Graded:
        """The same words as those of the steps."""
        same = response.strip() == self.separator.join(problem.columns["steps"]).strip()
        return self.graded(same, same)

    def verify(self) -> None:
        super().verify()
        _ = self.rows


@functools.lru_cache(maxsize=2)
def _rows(source: str, separator: str, stamp: object) -> tuple[list[Problem], list[Problem]]:  # noqa: ARG001 (the key's)
    if not source:
        refuse("labelled steps need a file: ascent process-reward FILE")
    found = [_problem(row, f"{source}, line {line}", separator) for line, row in read_lines(Path(source))]
    return split(found, lambda problem: problem.prompt, source)


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


def _problem(row: dict[str, Any], where: str, separator: str) -> Problem:
    steps, labels = labelled(row, where)
    for step in steps:
        if not isinstance(step, str) or not step:
            refuse(f"{where}, column steps: a step is words, and one is {step!r:.80}")
        if separator in step:
            refuse(
                f"{where}: the step {step!r:.60} holds the separator {separator!r}, so it would be two. Cut it "
                "there, or set --separator to what stands between steps"
            )
    columns = {"steps": steps, "labels": labels, "cut": bool(row.get("cut", False))}
    return Problem(prompt_of(row["prompt"], f"{where}, column prompt"), None, columns)


def labelled(row: dict[str, Any], where: str) -> tuple[list[Any], list[float]]:
    """The steps of a row and a finite number for each; refused with its place if there are not as many."""
    for column in ("prompt", "steps", "labels"):
        if column not in row:
            refuse(f"{where} has no column {column}; there are: {', '.join(row) or 'none'}")
    steps, labels = row["steps"], row["labels"]
    if not (isinstance(steps, list) and isinstance(labels, list) and steps and len(steps) == len(labels)):
        refuse(
            f"{where}: steps and labels are two lists of the same length, at least 1; these are {steps!r:.60} and "
            f"{labels!r:.60}"
        )
    for label in labels:
        if not isinstance(label, bool | int | float) or not abs(label) < float("inf"):
            refuse(f"{where}, column labels: a label is a finite number, true or false, and one is {label!r:.40}")
    return steps, [float(label) for label in labels]

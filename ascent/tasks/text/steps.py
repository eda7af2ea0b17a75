"""Labelled steps: a JSONL file of prompts, each with a response cut into steps and a label for every one of them.

    {"prompt": "What is 2 + 3 + 4?", "steps": ["2 + 3 = 5", "5 + 4 = 10"], "labels": [1, 0]}

A label is a number, or true or false: was the step right, or what is the response worth after it. The response is its
steps with a separator between them; the last one is closed by the end token, unless `cut` says that the limit did it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ascent.tasks.text.base import DEFAULT, Problem, refuse
from ascent.tasks.text.filed import Filed
from ascent.tasks.text.rows import prompt_of

SEPARATOR = "\n"


@dataclass(frozen=True)
class Steps(Filed):
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

    def missing(self) -> str:
        return "labelled steps need a file: ascent process-reward FILE"

    def shown(self, problem: Problem) -> str:
        return self.separator.join(problem.columns["steps"])

    def problem(self, row: dict[str, Any], where: str) -> Problem:
        steps, labels = labelled(row, where)
        for step in steps:
            if not isinstance(step, str) or not step:
                refuse(f"{where}, column steps: a step is words, and one is {step!r:.80}")
            if self.separator in step:
                refuse(
                    f"{where}: the step {step!r:.60} holds the separator {self.separator!r}, so it would be two. Cut "
                    "it there, or set --separator to what stands between steps"
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

"""Worlds whose problems are the rows of a table: read once, each prompt once, some of them held out."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ascent.tasks.text.answers import CHECKS
from ascent.tasks.text.base import Graded, Message, Problem, Text, held_out, refuse

ONE_IN = 10
"""One prompt in so many is held out where there is no table of test problems."""
Check = Literal["exact", "number", "math"]
TAKEN = ("prompt", "response", "answer")
"""What a reward's own arguments are called: no column can be handed to it under these names."""


@dataclass(frozen=True)
class Table:
    """Problems to train on and to test with, and what was left out."""

    train: tuple[Problem, ...]
    test: tuple[Problem, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Rows(Text):
    """A table of prompts and answers. A task derives from it and says how the table is read."""

    def read(self) -> tuple[list[Problem], list[Problem] | None]:
        """The rows to train on, and those to test with if they are known apart."""
        raise NotImplementedError

    def stamp(self) -> object:
        """Changes when the table does."""
        return None

    @property
    def table(self) -> Table:
        return _table(self, self.stamp())

    @property
    def size(self) -> int | None:
        return len(self.table.train)

    def train(self, index: int) -> Problem:
        return self.table.train[index]

    def test(self, count: int) -> list[Problem]:
        return list(self.table.test[:count])

    def report(self) -> list[str]:
        return list(self.table.notes)

    def verify(self) -> None:
        super().verify()
        if getattr(self, "check", None) == "math":
            need("math_verify", "--check math", "lm")
        _ = self.table

    @property
    def needs_answer(self) -> bool:
        """Does the task's own check count?"""
        return any(entry.own for entry in self.rewards)


@dataclass(frozen=True)
class Columns(Rows):
    """A table whose columns and check are chosen."""

    prompt_column: str = "prompt"
    """Column with the prompt: words, or the messages of a chat."""
    answer_column: str = "answer"
    """Column with the right answer. There need be none where --reward leaves the task's own check out."""
    check: Check = "exact"
    """How an answer is compared: exact (the same words) | number (the same number) | math (math-verify)."""

    def grade(self, problem: Problem, response: str) -> Graded:
        if problem.answer is None:
            raise ValueError("there is no answer to compare with")
        return self.graded(*CHECKS[self.check](problem.answer, response))

    def gold(self, problem: Problem) -> str | None:
        if problem.answer is None or self.check == "exact":
            return problem.answer
        return (
            f"\\boxed{{{problem.answer.strip().strip('$')}}}" if self.check == "math" else f"Answer: {problem.answer}"
        )

    def prepare(self) -> None:
        if self.check == "math":
            CHECKS["math"]("1", "1")

    def problem(self, row: Mapping[str, Any], where: str) -> Problem:
        """A row as a problem; refused with its place if the columns are not there or hold something else."""
        there = ", ".join(row) or "none"
        if self.prompt_column not in row:
            refuse(f"{where} has no column {self.prompt_column}; there are: {there}. Set --prompt-column")
        if self.needs_answer and row.get(self.answer_column) is None:
            refuse(
                f"{where} has no {'value' if self.answer_column in row else 'column'} {self.answer_column}; there are: "
                f"{there}. Set --answer-column, or a --reward of your own that needs none"
            )
        taken = (self.prompt_column, self.answer_column, *TAKEN)
        columns = {name: value for name, value in row.items() if name not in taken}
        answer = row.get(self.answer_column)
        answer = answer if answer is None or isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
        return Problem(prompt_of(row[self.prompt_column], f"{where}, column {self.prompt_column}"), answer, columns)


def prompt_of(value: Any, where: str) -> str | list[Message]:
    if isinstance(value, str) and value.strip():
        return value
    keys = {"role", "content"}
    if isinstance(value, list) and value and all(isinstance(m, Mapping) and keys <= m.keys() for m in value):
        messages = [{"role": m["role"], "content": m["content"]} for m in value]
        if all(isinstance(part, str) for m in messages for part in m.values()):
            return messages
    refuse(f"{where}: a prompt is words, or a list of messages with role and content, and it is {value!r:.80}")


@functools.lru_cache(maxsize=4)
def _table(task: Rows, stamp: object) -> Table:  # noqa: ARG001 (part of the cache's key)
    """Each prompt once, and none both trained on and held out."""
    given, test = task.read()
    train, notes = _once(given)
    if test is None:
        train, tested = _split(train)
    else:
        tested, more = _once(test)
        shared = {_key(problem) for problem in tested}
        kept = [problem for problem in train if _key(problem) not in shared]
        notes += [f"of the test problems, {note}" for note in more]
        if len(kept) < len(train):
            notes.append(f"{len(train) - len(kept)} rows are left out of training: their prompts are test problems")
        train = kept
    if not train or not tested:
        refuse(
            f"{len(given)} rows: there has to be something to train on and something to test with, so at least two "
            "different prompts"
        )
    return Table(tuple(train), tuple(tested), tuple(notes))


def _key(problem: Problem) -> str:
    return problem.prompt if isinstance(problem.prompt, str) else json.dumps(problem.prompt, sort_keys=True)


def _once(problems: list[Problem]) -> tuple[list[Problem], list[str]]:
    """The first problem of each prompt, and how many others there were."""
    first: dict[str, Problem] = {}
    repeated = other = 0
    for problem in problems:
        kept = first.setdefault(_key(problem), problem)
        repeated += kept is not problem and kept.answer == problem.answer
        other += kept.answer != problem.answer
    notes = [f"{repeated} rows repeat a prompt and count once"] if repeated else []
    if other:
        notes.append(f"{other} rows have the prompt of an earlier row and another answer: the earlier one is used")
    return list(first.values()), notes


def _split(problems: list[Problem]) -> tuple[list[Problem], list[Problem]]:
    """One prompt in ten held out by its hash; at least one on either side, if there are two."""
    held = [held_out(problem.prompt, ONE_IN) for problem in problems]
    if len(problems) > 1 and len(set(held)) == 1:
        held[0] = not held[0]
    train = [problem for problem, out in zip(problems, held, strict=True) if not out]
    return train, [problem for problem, out in zip(problems, held, strict=True) if out]


def need(module: str, what: str, extra: str) -> Any:
    """An optional library, or what to install."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        refuse(f"{what} needs {module.replace('_', '-')} ({error}): pip install 'ascent-rl[{extra}]'")

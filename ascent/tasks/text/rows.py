"""Tasks whose problems are the rows of a table: read once, each prompt once, some of them held out."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ascent.tasks.base import refuse
from ascent.tasks.files import absolute_path, canonical_prompt, file_stamp, is_held_out, read_jsonl
from ascent.tasks.text.answers import CHECKS
from ascent.tasks.text.base import TextTask
from ascent.tasks.text.problems import Graded, Message, Problem

_ARGUMENTS = ("prompt", "response", "answer")
"""The arguments that a reward function always has: no column can be passed to it under these names."""


@dataclass(frozen=True)
class ProblemTable:
    """Problems to train on and to test on, and notes on what was left out."""

    train: tuple[Problem, ...]
    test: tuple[Problem, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class TableTask(TextTask):
    """A table of prompts and answers. A task derives from it and defines how the table is read."""

    def read(self) -> tuple[list[Problem], list[Problem] | None]:
        """The rows to train on, and those to test on if the table has them apart."""
        raise NotImplementedError

    def stamp(self) -> object:
        """Changes when the table does."""
        return None

    def tabulate(self) -> ProblemTable:
        """The table as it is now: each prompt once, and none both trained on and held out."""
        return _without_repeats(*self.read())

    @property
    def table(self) -> ProblemTable:
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
        _ = self.table


@dataclass(frozen=True)
class ColumnsTask(TableTask):
    """A table whose columns and check are chosen."""

    prompt_column: str = "prompt"
    """Column with the prompt: text, or the messages of a chat."""
    answer_column: str = "answer"
    """Column with the right answer. It may be missing if --reward leaves out the task's own check."""
    check: Literal["exact", "number", "math"] = "exact"
    """How an answer is compared: exact (the same text) | number (the same number) | math (math-verify)."""

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

    def verify(self) -> None:
        if self.check == "math":
            import_optional("math_verify", "--check math", "lm")
        super().verify()

    def prepare(self) -> None:
        if self.check == "math":
            CHECKS["math"]("1", "1")

    def problem(self, row: Mapping[str, Any], where: str) -> Problem:
        """A row as a problem; refused with its place if its columns are missing or wrong."""
        names = ", ".join(row) or "none"
        if self.prompt_column not in row:
            refuse(f"{where} has no column {self.prompt_column}; there are: {names}. Set --prompt-column")
        if any(entry.own for entry in self.rewards) and row.get(self.answer_column) is None:
            refuse(
                f"{where} has no {'value' if self.answer_column in row else 'column'} {self.answer_column}; there are: "
                f"{names}. Set --answer-column, or a --reward of your own that needs none"
            )
        taken = (self.prompt_column, self.answer_column, *_ARGUMENTS)
        columns = {name: value for name, value in row.items() if name not in taken}
        answer = row.get(self.answer_column)
        answer = answer if answer is None or isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
        return Problem(read_prompt(row[self.prompt_column], f"{where}, column {self.prompt_column}"), answer, columns)


@dataclass(frozen=True)
class Jsonl(ColumnsTask):
    """jsonl:FILE: one JSON object per line, with a prompt and an answer."""

    source: str = ""
    """The file. Short form: jsonl:FILE."""
    test_file: str | None = None
    """A file of test problems in the same form. None: one prompt in ten is held out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("source", "test_file"):
            if getattr(self, name):
                object.__setattr__(self, name, absolute_path(getattr(self, name)))

    def stamp(self) -> object:
        return tuple(file_stamp(file) for file in (self.source, self.test_file) if file)

    def read(self) -> tuple[list[Problem], list[Problem] | None]:
        if not self.source:
            refuse("jsonl needs a file: ascent train jsonl:FILE")
        return self._problems(self.source), self._problems(self.test_file) if self.test_file else None

    def _problems(self, file: str) -> list[Problem]:
        return [self.problem(row, f"{file}, line {line}") for line, row in read_jsonl(Path(file))]


def read_prompt(value: Any, where: str) -> str | list[Message]:
    """Text, or the messages of a chat; refused with its place if it is neither."""
    if isinstance(value, str) and value.strip():
        return value
    keys = {"role", "content"}
    if isinstance(value, list) and value and all(isinstance(m, Mapping) and keys <= m.keys() for m in value):
        messages = [{"role": m["role"], "content": m["content"]} for m in value]
        if all(isinstance(part, str) for m in messages for part in m.values()):
            return messages
    refuse(f"{where}: a prompt must be text, or a list of messages with role and content; got {value!r:.80}")


@functools.lru_cache(maxsize=4)
def _table(task: TableTask, stamp: object) -> ProblemTable:  # noqa: ARG001 (part of the cache's key)
    return task.tabulate()


def _without_repeats(rows: list[Problem], test_rows: list[Problem] | None) -> ProblemTable:
    """Each prompt once, and none both trained on and held out."""
    train, notes = _once(rows)
    if test_rows is None:
        train, test = _split(train)
    else:
        test, more = _once(test_rows)
        shared = {canonical_prompt(problem.prompt) for problem in test}
        kept = [problem for problem in train if canonical_prompt(problem.prompt) not in shared]
        notes += [f"of the test problems, {note}" for note in more]
        if len(kept) < len(train):
            notes.append(f"{len(train) - len(kept)} rows are left out of training: their prompts are test problems")
        train = kept
    if not train or not test:
        refuse(f"{len(rows)} rows: at least two different prompts are needed, one to train on and one to hold out")
    return ProblemTable(tuple(train), tuple(test), tuple(notes))


def _once(problems: list[Problem]) -> tuple[list[Problem], list[str]]:
    """The first problem of each prompt, and how many others there were."""
    first: dict[str, Problem] = {}
    repeated = other = 0
    for problem in problems:
        kept = first.setdefault(canonical_prompt(problem.prompt), problem)
        repeated += kept is not problem and kept.answer == problem.answer
        other += kept.answer != problem.answer
    notes = [f"{repeated} rows repeat a prompt and count once"] if repeated else []
    if other:
        notes.append(f"{other} rows have the prompt of an earlier row and another answer: the earlier one is used")
    return list(first.values()), notes


def _split(problems: list[Problem]) -> tuple[list[Problem], list[Problem]]:
    """One prompt in ten held out by its hash; at least one on either side, if there are two."""
    held = [is_held_out(problem.prompt) for problem in problems]
    if len(problems) > 1 and len(set(held)) == 1:
        held[0] = not held[0]
    train = [problem for problem, out in zip(problems, held, strict=True) if not out]
    return train, [problem for problem, out in zip(problems, held, strict=True) if out]


def import_optional(module: str, what: str, extra: str) -> Any:
    """An optional library; refused with what to install."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        refuse(f"{what} needs {module.replace('_', '-')} ({error}): pip install 'ascent-rl[{extra}]'")

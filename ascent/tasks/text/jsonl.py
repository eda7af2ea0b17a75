"""A JSONL file of prompts and answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascent.tasks.text.base import Problem, refuse
from ascent.tasks.text.rows import Columns


@dataclass(frozen=True)
class Jsonl(Columns):
    """jsonl:FILE: one JSON object a line, with a prompt and an answer."""

    source: str = ""
    """The file. Short form: jsonl:FILE."""
    test_file: str | None = None
    """A file of test problems in the same form. None: one prompt in ten is held out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("source", "test_file"):
            if getattr(self, name):
                object.__setattr__(self, name, str(Path(getattr(self, name)).expanduser().resolve()))

    def stamp(self) -> object:
        return tuple(stamp_of(file) for file in (self.source, self.test_file) if file)

    def read(self) -> tuple[list[Problem], list[Problem] | None]:
        if not self.source:
            refuse("jsonl needs a file: ascent train jsonl:FILE")
        return self._problems(self.source), self._problems(self.test_file) if self.test_file else None

    def _problems(self, file: str) -> list[Problem]:
        return [self.problem(row, f"{file}, line {line}") for line, row in read_lines(Path(file))]


def stamp_of(file: str | Path) -> tuple[int, int] | None:
    path = Path(file)
    return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers; what is none is refused."""
    if not path.is_file():
        refuse(f"there is no file {path}")
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not line:
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                refuse(f"{path}, line {number} is no JSON: {error}")
            if not isinstance(row, dict):
                refuse(f"{path}, line {number}: a line is an object with columns, and this is {row!r:.60}")
            rows.append((number, row))
    if not rows:
        refuse(f"{path} is empty: it has no line with a JSON object")
    return rows

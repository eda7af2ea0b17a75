"""JSONL files of problems, and which of their prompts are held out. Graders import it, so it does without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ascent.tasks.base import refuse

HELD_OUT_ONE_IN = 10
"""One prompt in ten of a file is held out, unless the file has a test set."""

T = TypeVar("T")


def read_jsonl(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers; a line that is not an object is refused."""
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
                refuse(f"{path}, line {number} is not JSON: {error}")
            if not isinstance(row, dict):
                refuse(f"{path}, line {number}: a line is an object with columns, and this is {row!r:.60}")
            rows.append((number, row))
    if not rows:
        refuse(f"{path} is empty: it has no line with a JSON object")
    return rows


def absolute_path(file: str) -> str:
    """The whole path of a file, so that a run can be resumed from any folder."""
    return str(Path(file).expanduser().resolve())


def file_stamp(file: str | Path) -> tuple[int, int] | None:
    """Changes when the file does."""
    path = Path(file)
    return (path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None


def canonical_prompt(prompt: str | list[Any]) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def is_held_out(prompt: str | list[Any], one_in: int = HELD_OUT_ONE_IN) -> bool:
    """Decided by a hash of the prompt, one in `one_in`, so that no list has to be kept."""
    text = canonical_prompt(prompt).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) % one_in == 0


def split_held_out(rows: list[T], prompt_of: Callable[[T], Any], source: str) -> tuple[list[T], list[T]]:
    """Rows to train on and rows to test on. Of a small file the last prompt is held out."""
    train = [row for row in rows if not is_held_out(prompt_of(row))]
    test = [row for row in rows if is_held_out(prompt_of(row))]
    if not train or not test:
        last = prompt_of(rows[-1])
        train = [row for row in rows if prompt_of(row) != last]
        test = [row for row in rows if prompt_of(row) == last]
    if not train:
        refuse(f"{source}: at least two different prompts are needed: one to train on, one to hold out")
    return train, test


def steps_and_labels(row: dict[str, Any], where: str) -> tuple[list[Any], list[float]]:
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

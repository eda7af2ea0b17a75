"""A user's own files: problems in JSONL, of which some are held out, and Python. Graders import it: no torch here."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ascent.core.errors import ConfigError
from ascent.core.menu import nearest
from ascent.processes.user_code import run_file

T = TypeVar("T")


def read_jsonl(path: Path | str) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with its place (FILE, line N); a line that is not an object is refused."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            line, where = line.removeprefix(b"\xef\xbb\xbf").strip(), f"{path}, line {number}"
            if not line:
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{where} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: a line is an object with columns, and this is {row!r:.60}")
            rows.append((where, row))
    if not rows:
        raise ConfigError(f"{path} is empty: it has no line with a JSON object")
    return rows


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A JSONL file, written aside, flushed and renamed: it is there whole or not at all."""
    aside = path.with_name(f".{path.name}.new")
    with open(aside, "w") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def absolute_path(file: str) -> str:
    """The whole path of a file, so that a run can be resumed from any folder."""
    return str(Path(file).expanduser().resolve())


def file_stamp(file: str | Path) -> tuple[tuple[int, int], ...]:
    """Changes when the file does, or a file of the folder."""
    path = Path(file)
    found = [file.stat() for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if file.exists()]
    return tuple((file.st_mtime_ns, file.st_size) for file in found)


def canonical_prompt(prompt: str | list[Any]) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def is_held_out(prompt: str | list[Any], one_in: int = 10) -> bool:
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
        raise ConfigError(f"{source}: at least two different prompts are needed: one to train on, one to hold out")
    return train, test


def require_columns(row: Mapping[str, Any], columns: Iterable[str], where: str, hint: str = "") -> None:
    for column in columns:
        if column not in row:
            raise ConfigError(f"{where} has no column {column}; there are: {', '.join(row) or 'none'}{hint}")


def steps_and_labels(row: Mapping[str, Any], where: str) -> tuple[list[Any], list[float]]:
    """The steps of a row and a finite number for each; refused with its place if there are not as many."""
    require_columns(row, ("prompt", "steps", "labels"), where)
    steps, labels = row["steps"], row["labels"]
    if not (isinstance(steps, list) and isinstance(labels, list) and steps and len(steps) == len(labels)):
        raise ConfigError(
            f"{where}: steps and labels are two lists of the same length, at least 1; these are {steps!r:.60} and "
            f"{labels!r:.60}"
        )
    for label in labels:
        if not isinstance(label, bool | int | float) or not abs(label) < float("inf"):
            raise ConfigError(
                f"{where}, column labels: a label is a finite number, true or false, and one is {label!r:.40}"
            )
    return steps, [float(label) for label in labels]


# ---- Python -----------------------------------------------------------------------------------------


def load_python(flag: str, name: str) -> Any:
    """The object NAME of the Python file FILE, given as python:FILE:NAME."""
    parts = name.split(":")
    if len(parts) != 3 or not all(parts):
        raise ConfigError(f"{flag} {name}: a choice of your own is written python:FILE:NAME")
    path = Path(parts[1]).expanduser()
    if not path.is_file():
        raise ConfigError(f"{flag} {name}: there is no file {path}")
    try:
        module = run_file(path)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{flag} {name}: {path} does not run: {type(error).__name__}: {error}") from None
    value = getattr(module, parts[2], None)
    if value is None:
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError((f"{flag} {name}: {path} has no {parts[2]}.") + nearest(parts[2], public))
    if isinstance(value, type):
        value.__ascent_source__ = f"python:{path.resolve()}:{parts[2]}"  # type: ignore[attr-defined]
    return value

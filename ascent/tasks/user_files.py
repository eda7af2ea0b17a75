"""User files: JSONL data with held-out rows, and Python files. Reward workers import it, so it imports no torch."""

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
    """Return the objects of a JSONL file, each with its location ("FILE, line N"). Other lines are errors."""
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
                raise ConfigError(f"{where}: expected a JSON object, got {row!r:.60}")
            rows.append((where, row))
    if not rows:
        raise ConfigError(f"{path} is empty: expected one JSON object per line")
    return rows


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a JSONL file atomically: to a temporary file that is synced and renamed."""
    aside = path.with_name(f".{path.name}.new")
    with open(aside, "w") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def absolute_path(file: str) -> str:
    """Return the absolute path of a file, so that a run can be resumed from any folder."""
    return str(Path(file).expanduser().resolve())


def file_stamp(file: str | Path) -> tuple[tuple[int, int], ...]:
    """Return modification times and sizes of a file, or of the files of a folder."""
    path = Path(file)
    stats = [file.stat() for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if file.exists()]
    return tuple((stat.st_mtime_ns, stat.st_size) for stat in stats)


def canonical_prompt(prompt: str | list[Any]) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def is_held_out(prompt: str | list[Any], one_in: int = 10) -> bool:
    """Return whether a prompt is held out: one in `one_in`, by the prompt's hash."""
    text = canonical_prompt(prompt).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) % one_in == 0


def split_held_out(rows: list[T], prompt_of: Callable[[T], Any], source: str) -> tuple[list[T], list[T]]:
    """Split rows into training and test rows. If the hash gives only one kind, the last prompt is held out."""
    train = [row for row in rows if not is_held_out(prompt_of(row))]
    test = [row for row in rows if is_held_out(prompt_of(row))]
    if not train or not test:
        last = prompt_of(rows[-1])
        train = [row for row in rows if prompt_of(row) != last]
        test = [row for row in rows if prompt_of(row) == last]
    if not train:
        raise ConfigError(f"{source}: needs at least two different prompts, one for training and one held out")
    return train, test


def require_columns(row: Mapping[str, Any], columns: Iterable[str], where: str, hint: str = "") -> None:
    for column in columns:
        if column not in row:
            raise ConfigError(f"{where} has no column {column}; there are: {', '.join(row) or 'none'}{hint}")


def steps_and_labels(row: Mapping[str, Any], where: str) -> tuple[list[Any], list[float]]:
    """Return the steps of a row and their labels, one finite number per step."""
    require_columns(row, ("prompt", "steps", "labels"), where)
    steps, labels = row["steps"], row["labels"]
    if not (isinstance(steps, list) and isinstance(labels, list) and steps and len(steps) == len(labels)):
        raise ConfigError(
            f"{where}: steps and labels must be lists of the same length, at least 1; got {steps!r:.60} and "
            f"{labels!r:.60}"
        )
    for label in labels:
        if not isinstance(label, bool | int | float) or not abs(label) < float("inf"):
            raise ConfigError(
                f"{where}, column labels: a label must be a finite number, true or false; got {label!r:.40}"
            )
    return steps, [float(label) for label in labels]


# ---- Python -----------------------------------------------------------------------------------------


def load_python(flag: str, name: str) -> Any:
    """Return the object of python:FILE:NAME."""
    parts = name.split(":")
    if len(parts) != 3 or not all(parts):
        raise ConfigError(f"{flag} {name}: expected python:FILE:NAME")
    path = Path(parts[1]).expanduser()
    if not path.is_file():
        raise ConfigError(f"{flag} {name}: there is no file {path}")
    try:
        module = run_file(path)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{flag} {name}: {path} raised {type(error).__name__}: {error}") from None
    value = getattr(module, parts[2], None)
    if value is None:
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"{flag} {name}: {path} has no {parts[2]}." + nearest(parts[2], public))
    if isinstance(value, type):
        value.__ascent_source__ = f"python:{path.resolve()}:{parts[2]}"  # type: ignore[attr-defined]
    return value

"""Runs of other libraries, read as ours: TRL's completions (Parquet) and verl's rollouts (JSON lines).

What their files do not hold is absent. Steps are counted as they count them, from 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ascent.types import Refused
from ascent.viewer.foreign import summary, trl, verl
from ascent.viewer.kept import Kept

Row = dict[str, Any]
READERS = {"trl": trl, "verl": verl}
_rows = Kept(200_000)
"""Rows of the last files."""
_flags: dict[Path, tuple[bytes, list[dict[str, Any]]]] = {}
MOST_FLAGGED = 200


def kind_of(folder: Path) -> str | None:
    """Whose files a folder holds: `trl`, `verl`, or None. Names are looked at first, then one file."""
    return next((name for name, reader in READERS.items() if reader.looks_like(folder)), None)


def steps(folder: Path) -> list[int]:
    """The steps that have completions."""
    return sorted(_files(folder)[1])


def by_step(folder: Path) -> dict[int, Path]:
    """The file of each step."""
    return dict(sorted(_files(folder)[1].items()))


def file_of(folder: Path, step: int) -> Path:
    found = _files(folder)[1]
    if step not in found:
        raise Refused(f"step {step}: there are no completions of that step")
    return found[step]


def rows(folder: Path, step: int) -> list[Row]:
    """The completions of a step, as rows like those of our own runs; what is not known is left out."""
    reader = _files(folder)[0]
    return read(reader, file_of(folder, step), reader.names(folder))


def read(reader: Any, path: Path, names: tuple[str, ...] | None) -> list[Row]:
    try:
        return _rows(path, lambda: reader.read(path, names), names, weight=len)
    except FileNotFoundError:
        raise Refused(f"{path.name} is gone") from None
    except Refused:
        raise
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise Refused(f"{path.name} cannot be read: {error}") from None


def lines(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """A line of metrics for each step, as in metrics.jsonl, and what could not be read, one line each."""
    reader, found = _files(folder)
    names = reader.names(folder)
    told: dict[int, dict[str, Any]] = {}
    problems: list[str] = []
    for step, path in sorted(found.items()):
        try:
            rows_of = partial(read, reader, path, names)
            told[step] = summary.line(path, step, rows_of, reader.PART, names)
        except (Refused, OSError, ValueError, OverflowError) as error:
            problems.append(str(error))
    logged, said = reader.logged(folder)
    if summary.weighted(told, logged):
        said = [*said, "the reward functions were weighted: a completion's reward is shown as their plain sum"]
    return summary.merged(told, logged), [*problems, *said]


def files(folder: Path) -> list[Path]:
    """The files that are read here."""
    reader, found = _files(folder)
    return [*(found[step] for step in sorted(found)), *reader.logs(folder)]


def mark(folder: Path) -> bytes:
    """Changes whenever one of the files does: their names, sizes and times."""
    made = hashlib.blake2b(digest_size=16)
    for path in files(folder):
        try:
            about = path.stat()
        except OSError:
            continue
        made.update(f"{path.name}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
    return made.digest()


def events(folder: Path) -> list[dict[str, Any]]:
    """Flags, as our own trainer would have written them; looked for again when a file has changed."""
    from ascent.diagnose.watch import flags_of

    now = mark(folder)
    if _flags.get(folder, (b"", []))[0] != now:
        if len(_flags) >= MOST_FLAGGED:
            _flags.clear()
        found = flags_of(lines(folder)[0], Rows(folder))
        _flags[folder] = (now, found)
        return found
    return _flags.get(folder, (b"", []))[1]


class Rows(Mapping[int, list[Row]]):
    """The rows of each step, read when they are asked for; none where a file cannot be read."""

    def __init__(self, folder: Path):
        self.reader, self.files = _files(folder)
        self.names, self.steps = self.reader.names(folder), sorted(self.files)

    def __getitem__(self, step: int) -> list[Row]:
        path = self.files[step]
        try:
            return read(self.reader, path, self.names)
        except Refused:
            return []

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


def _files(folder: Path) -> tuple[Any, dict[int, Path]]:
    kind = kind_of(folder)
    if kind is None:
        raise Refused(f"{folder.name}: there are no completions of TRL or verl here")
    return READERS[kind], READERS[kind].files(folder)

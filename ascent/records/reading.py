"""Reading the files of a run folder, which anyone may have written. Links are never followed."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from threading import Lock
from typing import IO, Any

LONGEST = 15
"""Whole numbers with more digits become floats."""


def open_regular(path: Path) -> IO[bytes]:
    """A regular file, to be read; OSError for a link, a folder or a pipe, which could lead or hang anywhere."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path.name} is not a regular file")
    return os.fdopen(handle, "rb")


def read_regular(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def finite_json(data: bytes) -> Any:
    """JSON in which every number is finite; others become None. ValueError if it is not JSON, or nested too deeply."""
    try:
        return json.loads(data, parse_float=_finite, parse_int=_whole, parse_constant=lambda _: None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _whole(text: str) -> int | float | None:
    return int(text) if len(text) <= LONGEST else _finite(text)


def read_object(path: Path) -> tuple[dict[str, Any], str]:
    """A JSON object, or an empty one and what is wrong with its file."""
    try:
        held = finite_json(read_regular(path))
    except FileNotFoundError:
        return {}, f"{path.name} is missing"
    except (OSError, ValueError) as error:
        return {}, f"{path.name} cannot be read: {error}"
    return (held, "") if isinstance(held, dict) else ({}, f"{path.name} is not a JSON object")


def finite_number(value: Any) -> Any:
    """A finite number; None for anything else."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    return value if known else None


def finite_line(values: dict[str, Any]) -> dict[str, Any]:
    """A line of records. A number that is not finite becomes None, and is named in `nonfinite`."""
    bad = {k: str(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return {k: None if k in bad else v for k, v in values.items()} | {"nonfinite": bad} if bad else values


def numbered_files(folder: Path, name: str) -> dict[int, Path]:
    """What a folder has under such names, by the number that the pattern captures; nothing if it cannot be listed."""
    try:
        paths = {int(match[1]): path for path in folder.iterdir() if (match := re.fullmatch(name, path.name))}
    except OSError:
        return {}
    return dict(sorted(paths.items()))


def printable(value: Any) -> str:
    """A name that can be shown: what is not a character, such as half of a surrogate pair, is replaced."""
    return str(value).encode("utf-8", "replace").decode()


def modified_at(path: Path) -> float | None:
    """When a file was last written; None if it is missing."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


class FileCache:
    """Keeps what was read from files. A file that changed (size, time) is read again.

    `most` bounds the sum of the weights; the least recently used entries go first.
    """

    def __init__(self, most: int):
        self.most, self.held = most, 0
        self.entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.lock = Lock()

    def __call__(
        self, path: Path, make: Callable[[], Any], *which: Hashable, weight: Callable[[Any], int] = lambda _: 1
    ) -> Any:
        about = path.stat()
        key = (str(path), about.st_size, about.st_mtime_ns, *which)
        with self.lock:
            if key in self.entries:
                self.entries.move_to_end(key)
                return self.entries[key][0]
        made = make()
        heavy = weight(made)
        if heavy > self.most:
            return made
        with self.lock:
            if key not in self.entries:
                self.entries[key] = (made, heavy)
                self.held += heavy
            while self.held > self.most:
                self.held -= self.entries.popitem(last=False)[1][1]
        return made

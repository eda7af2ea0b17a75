"""Files of a run folder, which anyone may have written: read as they are or not at all, and never followed away."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import IO, Any

LONGEST = 15
"""Digits of a whole number that is kept as one; a longer one is a number like any other."""


def opened(path: Path) -> IO[bytes]:
    """A regular file, to be read; OSError for a link, a folder or a pipe, which could lead or hang anywhere."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path.name} is no regular file")
    return os.fdopen(handle, "rb")


def contents(path: Path) -> bytes:
    with opened(path) as file:
        return file.read()


def loads(data: bytes) -> Any:
    """JSON in which every number is finite: others are None. ValueError for what is no JSON, however deep."""
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
        found = loads(contents(path))
    except FileNotFoundError:
        return {}, f"{path.name} is missing"
    except (OSError, ValueError) as error:
        return {}, f"{path.name} cannot be read: {error}"
    return (found, "") if isinstance(found, dict) else ({}, f"{path.name} is no JSON object")


def number(value: Any, otherwise: Any = None) -> Any:
    """A finite number, or something else in its place."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    return value if known else otherwise


def text(value: Any) -> str:
    """What is shown of a name: letters that are none, such as half of a surrogate pair, are replaced."""
    return str(value).encode("utf-8", "replace").decode()


def changed(path: Path) -> float | None:
    """When a file was last written; None: it is not there."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return None

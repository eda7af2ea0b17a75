"""Safe reading of files from an untrusted run folder.

Only regular files inside the folder are opened, and links in it are not followed. Whatever a file contains, reading it
returns a value or raises an error that names the file. The folder itself may be a link, for example to another disk.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from ascent.core.errors import ConfigError
from ascent.tasks.base import error_line

MAX_JSON_BYTES, MAX_JSONL_BYTES = 1 << 26, 1 << 30
"""Maximum bytes of a JSON file, and of a file with a line per step."""
MAX_NESTING = 64
"""Maximum nesting of lists and objects; Ascent's files have at most ten levels."""
READ_ERRORS = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""The errors of reading a file with arbitrary contents, including those of pyarrow and torch."""


def open_regular(path: Path, within: Path | None = None) -> BufferedReader:
    """Open a regular file for reading; raise OSError for a link, a folder or a pipe.

    No folder between the file and `within` (by default its parent) may be a link.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    within = path.parent if within is None else within
    handle, parts = os.open(within, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path.relative_to(within).parts
    for part in parts:
        above = handle
        try:
            handle = os.open(part, flags, dir_fd=above)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):
                raise
            kind = "a link, and links are not followed" if error.errno == errno.ELOOP else "not a regular file"
            raise OSError(f"{part} is {kind}") from None
        finally:
            os.close(above)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path.name} is not a regular file")
    return os.fdopen(handle, "rb")


def read_regular(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read a regular file of bounded size."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(f"{path.name} has more than {max_bytes >> 20} MiB")
    return data


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Convert errors of reading a file to a ConfigError that names it."""
    try:
        yield
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"{path.name} is gone: it was removed, or the run was resumed from an earlier step") from None
    except READ_ERRORS as error:
        raise ConfigError(f"{path.name} cannot be read: {error_line(error)[:160]}") from None


def parse_json(data: bytes, **hooks: Any) -> Any:
    """Parse JSON; raise ValueError if it is invalid or nested too deeply."""
    try:
        value = json.loads(data, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if data.count(b"[") + data.count(b"{") <= MAX_NESTING:
        return value
    level = [value]
    for _ in range(MAX_NESTING):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for values in inner for item in values]
    if level:
        raise ValueError("it is nested too deeply")
    return value


def finite_json(data: bytes) -> Any:
    """Parse JSON like `parse_json`; infinite and NaN numbers become None."""

    def finite(text: str) -> float | None:
        value = float(text)
        return value if math.isfinite(value) else None

    def whole(text: str) -> int | float | None:
        return int(text) if len(text) <= 15 else finite(text)

    return parse_json(data, parse_float=finite, parse_int=whole, parse_constant=lambda _: None)


def read_json(path: Path) -> Any:
    try:
        return parse_json(read_regular(path))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent}: there is no {path.name} here, so this is not a run folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def read_object(path: Path) -> tuple[dict[str, Any], str]:
    """Read a JSON object; if it cannot be read, return an empty one and the error."""
    try:
        value = finite_json(read_regular(path))
    except FileNotFoundError:
        return {}, f"{path.name} is missing"
    except (OSError, ValueError) as error:
        return {}, f"{path.name} cannot be read: {error}"
    return (value, "") if isinstance(value, dict) else ({}, f"{path.name} is not a JSON object")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a JSONL file up to its last newline: an incomplete last line is still being written."""
    try:
        data = read_regular(path, MAX_JSONL_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    lines = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            lines.append(parse_json(line))
            if not isinstance(lines[-1], dict):
                raise ValueError("it is not an object")
        except ValueError as error:
            raise ConfigError(
                f"{path}, line {number}, is not valid JSON: {error}. Something other than Ascent has written there"
            ) from None
    return lines


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl or updates.jsonl, whose lines consist of a step and numbers."""
    lines = read_lines(path)
    for number, line in enumerate(lines, 1):
        if not is_metrics_line(line):
            raise ConfigError(
                f"{path}, line {number}, is not a step and its numbers. Something other than Ascent has written there"
            )
    return lines


def is_metrics_line(line: Any) -> bool:
    """Return whether a line consists of a step and numbers."""
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return False
    values = [value for name, value in line.items() if name != "nonfinite" and value is not None]
    return all(isinstance(value, int | float) and abs(value) < 1.7e308 for value in values)


def finite_number(value: Any) -> Any:
    """Return a finite number unchanged, and None for anything else."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    return value if known else None


def numbered_files(folder: Path, name: str) -> dict[int, Path]:
    """Return the paths in a folder that match a pattern, by the captured number; empty if it cannot be listed."""
    try:
        paths = {int(match[1]): path for path in folder.iterdir() if (match := re.fullmatch(name, path.name))}
    except OSError:
        return {}
    return dict(sorted(paths.items()))


def printable(value: Any) -> str:
    """Return a name as valid Unicode: unpaired surrogates are replaced."""
    return str(value).encode("utf-8", "replace").decode()


def modified_at(path: Path) -> float | None:
    """Return the modification time of a file; None if it is missing."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


class FileCache:
    """A least-recently-used cache of values read from files; an entry is invalid once its file changes (size, time)."""

    def __init__(self, max_weight: int):
        self.max_weight, self.total_weight = max_weight, 0
        self.entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.lock = threading.Lock()

    def __call__(
        self, path: Path, make: Callable[[], Any], *key_parts: Hashable, weight: Callable[[Any], int] = lambda _: 1
    ) -> Any:
        about = path.lstat()
        key = (str(path), about.st_size, about.st_mtime_ns, *key_parts)
        with self.lock:
            if key in self.entries:
                self.entries.move_to_end(key)
                return self.entries[key][0]
        value = make()
        entry_weight = weight(value)
        if entry_weight > self.max_weight:
            return value
        with self.lock:
            if key not in self.entries:
                self.entries[key] = (value, entry_weight)
                self.total_weight += entry_weight
            while self.total_weight > self.max_weight:
                self.total_weight -= self.entries.popitem(last=False)[1][1]
        return value

"""Python files of the user. Each is read once, so the code that is hashed is the code that runs."""

import functools
import importlib
import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

CODE: dict[Path, bytes] = {}
"""Contents of code files by absolute path. Worker processes receive it, so they run the same code."""


def read_code(path: Path) -> bytes:
    """Return the bytes of a code file. It is read again only after `CODE` is cleared, for a new run."""
    path = path.resolve()
    if path not in CODE:
        CODE[path] = path.read_bytes()
    return CODE[path]


def run_file(path: Path) -> ModuleType:
    return _run_code(path.resolve(), read_code(path))


@functools.lru_cache
def _run_code(path: Path, code: bytes) -> ModuleType:
    """Return the module of a file, run once per content, so that its classes stay the same."""
    spec = importlib.util.spec_from_file_location(f"ascent_user_{path.stem}_{hash(path):x}", path)
    assert spec is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    exec(compile(code, str(path), "exec"), module.__dict__)
    return module


def load_code(source: str, sent: bytes | None = None) -> Any:
    """Return the object of python:FILE:NAME or MODULE:NAME, or the one that the owner sent."""
    if sent is not None:
        return pickle.loads(sent)
    where, name = source.removeprefix("python:").rsplit(":", 1)
    module = run_file(Path(where)) if source.startswith("python:") else importlib.import_module(where)
    return functools.reduce(getattr, name.split("."), module)

"""Python files of the user, each read once: what is hashed is what runs."""

import functools
import importlib
import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

CODE: dict[Path, bytes] = {}
"""Code files by their whole paths, each read once: what is hashed is what is run, also in the processes of rewards."""


def read_code(path: Path) -> bytes:
    """The bytes of a code file, read again only after `CODE` is cleared, as where a user names files for a new run."""
    path = path.resolve()
    if path not in CODE:
        CODE[path] = path.read_bytes()
    return CODE[path]


def run_file(path: Path) -> ModuleType:
    return _run_code(path.resolve(), read_code(path))


@functools.lru_cache
def _run_code(path: Path, code: bytes) -> ModuleType:
    """The module of a file, run once for each text that it had, so that its classes stay the same."""
    spec = importlib.util.spec_from_file_location(f"ascent_user_{path.stem}_{hash(path):x}", path)
    assert spec is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    exec(compile(code, str(path), "exec"), module.__dict__)
    return module


def load_code(source: str, sent: bytes | None = None) -> Any:
    """The object of python:FILE:NAME or MODULE:NAME, or what the parent process sent."""
    if sent is not None:
        return pickle.loads(sent)
    where, name = source.removeprefix("python:").rsplit(":", 1)
    module = run_file(Path(where)) if source.startswith("python:") else importlib.import_module(where)
    return functools.reduce(getattr, name.split("."), module)

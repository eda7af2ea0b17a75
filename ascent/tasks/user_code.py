"""A user's own Python: a choice, a task or a reward, named python:FILE:NAME."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ascent.core.menu import nearest
from ascent.core.types import Refused


def load_python(flag: str, name: str) -> Any:
    """The object NAME of the Python file FILE, given as python:FILE:NAME."""
    parts = name.split(":")
    if len(parts) != 3 or not all(parts):
        raise Refused(f"{flag} {name}: a choice of your own is written python:FILE:NAME")
    path = Path(parts[1]).expanduser()
    if not path.is_file():
        raise Refused(f"{flag} {name}: there is no file {path}")
    try:
        module = _module(path.resolve(), path.stat().st_mtime_ns)
    except Exception as error:
        raise Refused(f"{flag} {name}: {path} does not run: {type(error).__name__}: {error}") from error
    value = getattr(module, parts[2], None)
    if value is None:
        public = [n for n in vars(module) if not n.startswith("_")]
        raise Refused(f"{flag} {name}: {path} has no {parts[2]}.{nearest(parts[2], public)}")
    if isinstance(value, type):
        value.__ascent_source__ = f"python:{path.resolve()}:{parts[2]}"  # type: ignore[attr-defined]
    return value


@functools.lru_cache
def _module(path: Path, changed: int) -> ModuleType:  # noqa: ARG001 (part of the cache's key)
    """The module of a file, run once for each time it was changed, so that its classes stay the same."""
    spec = importlib.util.spec_from_file_location(f"ascent_user_{path.stem}_{hash(path):x}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""The menu as names: every choice is a class, its name is the class name in kebab case.

No registry and no decorators. A menu is a plain tuple at the end of the file that defines its
choices; here they are only spelled, found and turned into dictionaries and back.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ascent.types import Refused

Menu = tuple[type, ...]


def name_of(choice: object) -> str:
    """LeaveOneOut -> leave-one-out, for a class or one of its instances."""
    cls = choice if isinstance(choice, type) else type(choice)
    source = getattr(cls, "__ascent_source__", None)
    return source or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cls.__name__).lower()


def nearest(given: str, known: Iterable[str]) -> str:
    """A hint for a misspelled name, or nothing."""
    found = difflib.get_close_matches(given, list(known), n=1)
    return f" Did you mean {found[0]}?" if found else ""


def find(axis: str, menu: Menu, name: str) -> Any:
    """The class of this name on a menu, or a user's own behind python:FILE:NAME."""
    if name.startswith("python:"):
        return load_python(f"--{axis}", name)
    known = {name_of(cls): cls for cls in menu}
    if name not in known:
        raise Refused(f"--{axis} {name}: no such choice. The menu has {', '.join(known)}.{nearest(name, known)}")
    return known[name]


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
    found = getattr(module, parts[2], None)
    if found is None:
        public = [n for n in vars(module) if not n.startswith("_")]
        raise Refused(f"{flag} {name}: {path} has no {parts[2]}.{nearest(parts[2], public)}")
    if isinstance(found, type):
        found.__ascent_source__ = f"python:{path.resolve()}:{parts[2]}"  # type: ignore[attr-defined]
    return found


@functools.lru_cache
def _module(path: Path, changed: int) -> ModuleType:  # noqa: ARG001 (part of the cache's key)
    """The module of a file, run once for each time it was changed, so that its classes stay the same."""
    spec = importlib.util.spec_from_file_location(f"ascent_user_{path.stem}_{hash(path):x}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hyperparameters(cls: type) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}


def build(axis: str, cls: type, settings: Mapping[str, Any]) -> Any:
    """A choice from its class and some of its fields, with unknown fields refused."""
    known = hyperparameters(cls)
    for key in settings:
        if key not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise Refused(f"--{axis}.{key}: {name_of(cls)} has no such field; {has}.{nearest(key, known)}")
    return cls(**settings)


def to_dict(choice: Any) -> dict[str, Any]:
    return {"name": name_of(choice), **dataclasses.asdict(choice)}


def spell(choice: Any) -> str:
    """clipped(low=0.2, high=0.28): the name and the fields that differ from their defaults."""
    changed = []
    for f in dataclasses.fields(choice):
        value = getattr(choice, f.name)
        if value != f.default:
            changed.append(f"{f.name}={value:g}" if isinstance(value, float) else f"{f.name}={value}")
    return name_of(choice) + (f"({', '.join(changed)})" if changed else "")

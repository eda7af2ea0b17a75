"""The menu as names: every choice is a class, its name is the class name in kebab case.

No registry and no decorators. A menu is a plain tuple at the end of the file that defines its
choices; here they are only spelled, found and turned into dictionaries and back.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ascent.types import Refused

Menu = tuple[type, ...]


def name_of(choice: object) -> str:
    """LeaveOneOut -> leave-one-out, for a class or one of its instances."""
    cls = choice if isinstance(choice, type) else type(choice)
    source = getattr(cls, "__ascent_source__", None)
    return source or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__.replace("KL", "Kl")).lower()


def nearest(given: str, known: Iterable[str]) -> str:
    """A hint for a misspelled name, or nothing."""
    found = difflib.get_close_matches(given, list(known), n=1)
    return f" Did you mean {found[0]}?" if found else ""


def find(axis: str, menu: Menu, name: str) -> type:
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
    spec = importlib.util.spec_from_file_location(f"ascent_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Refused(f"{flag} {name}: {path} does not run: {type(error).__name__}: {error}") from error
    found = getattr(module, parts[2], None)
    if found is None:
        public = [n for n in vars(module) if not n.startswith("_")]
        raise Refused(f"{flag} {name}: {path} has no {parts[2]}.{nearest(parts[2], public)}")
    found.__ascent_source__ = f"python:{path.resolve()}:{parts[2]}"
    return found


def hyperparameters(cls: type) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}


def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass: what it means, in its author's words."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}
    body = tree.body[0].body  # type: ignore[attr-defined]
    docs = {}
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[field.target.id] = inspect.cleandoc(str(after.value.value))  # type: ignore[union-attr]
    return docs


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

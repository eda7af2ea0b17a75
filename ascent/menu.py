"""The menu as names: every choice is a class, its name is the class name in kebab case.

No registry and no decorators. A menu is a plain tuple at the end of the file that defines its
choices; here they are only spelled, found and turned into dictionaries and back.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
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

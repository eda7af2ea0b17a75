"""Names of choices: every choice is a class, and its name is the class name in kebab case.

A menu is a plain tuple at the end of the file that defines its choices; there is no registry.
"""

import dataclasses
import difflib
import re
from collections.abc import Iterable
from typing import Any


def name_of(choice: object) -> str:
    """LeaveOneOut -> leave-one-out, for a class or one of its instances."""
    cls = choice if isinstance(choice, type) else type(choice)
    source = getattr(cls, "__ascent_source__", None)
    return source or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", cls.__name__).lower()


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelled name, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {matches[0]}?" if matches else ""


def hyperparameters(cls: type) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}


def to_dict(choice: Any) -> dict[str, Any]:
    return {"name": name_of(choice), **dataclasses.asdict(choice)}

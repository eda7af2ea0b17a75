"""Every default of the menu, of the tasks and of a run is pinned: a changed default is a change of results.

python tests/test_setting_defaults.py      writes tests/data/defaults.json anew; say in the change log what changed
"""

from __future__ import annotations

import json
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest

from ascent.core.algorithms import ALGORITHMS
from ascent.core.config import Config, RankSettings
from ascent.core.menu import hyperparameters, name_of
from ascent.settings import CHOICES, SHORT, settings_of
from ascent.tasks import TASKS

PINNED = Path(__file__).parent / "data" / "defaults.json"
PLAIN = bool | int | float | str | tuple


def attributes(cls: type) -> dict[str, str]:
    """Attributes of a class that are no fields: the loop reads them, and they decide what a run computes."""
    names = {name for base in cls.__mro__ for name in vars(base) if not name.startswith("_")}
    found = {name: getattr(cls, name) for name in sorted(names - set(hyperparameters(cls)))}
    return {name: repr(value) for name, value in found.items() if isinstance(value, PLAIN)}


def described(cls: type, axis: str = "") -> dict[str, str]:
    fields = {s.flag: "required" if s.default is MISSING else repr(s.default) for s in settings_of(cls, axis).values()}
    return fields | attributes(cls)


def defaults() -> dict[str, Any]:
    """All defaults in words, by flag: whatever a user who sets nothing gets."""
    choices = {f"{axis} {name_of(cls)}": described(cls, axis) for axis, menu in CHOICES.items() for cls in menu}
    tasks = {f"task {name_of(cls)}": described(cls) | {"presets": repr(cls.presets)} for cls in TASKS}
    rows = {f"algorithm {name}": {"choices": repr(row)} for name, row in ALGORITHMS.items()}
    return (
        choices
        | tasks
        | {"ranks": described(RankSettings, "ranks"), "a run": described(Config), "short names": dict(SHORT)}
        | rows
    )


@pytest.mark.parametrize("what", sorted(json.loads(PINNED.read_text()) if PINNED.exists() else ()))
def test_default_is_the_pinned_one(what: str) -> None:
    assert defaults().get(what) == json.loads(PINNED.read_text())[what], "a changed default: see the top of this file"


def test_every_choice_is_pinned() -> None:
    assert set(defaults()) == set(json.loads(PINNED.read_text()))


if __name__ == "__main__":
    PINNED.write_text(json.dumps(defaults(), indent=1, sort_keys=True) + "\n")

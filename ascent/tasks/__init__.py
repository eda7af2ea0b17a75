"""Tasks: prompts and verifiable rewards, one file each.

Imported on use: a process that only computes rewards of text needs neither torch nor the small tasks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ascent.tasks.small.lecture import Lecture
    from ascent.tasks.small.sort import Sort

    TASKS: tuple[type, ...]

_AT = {
    "Lecture": "small.lecture",
    "Sort": "small.sort",
    "ReasoningGym": "text",
    "Gsm8k": "text",
    "Countdown": "text",
    "Jsonl": "text",
    "Dataset": "text",
    "Demonstrations": "text",
    "Preferences": "text",
    "Steps": "text",
}


def __getattr__(name: str) -> Any:
    if name == "TASKS":
        return tuple(__getattr__(task) for task in _AT)
    if name in _AT:
        return getattr(import_module(f"ascent.tasks.{_AT[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["TASKS", "Lecture", "Sort"]

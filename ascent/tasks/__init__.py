"""Tasks: prompts and verifiable rewards. They are imported lazily, because reward workers of text need no torch."""

from importlib import import_module
from typing import Any

_MODULES = {
    "small.lecture": "Lecture",
    "small.sorting": "Sort",
    "small.multi_turn": "Guess Swaps",
    "text.reasoning_gym": "ReasoningGym",
    "text.gsm8k": "Gsm8k",
    "text.countdown": "Countdown",
    "text.textarena": "Textarena",
    "text.code_problems": "Code",
    "text.table_tasks": "Jsonl Dataset Demonstrations Preferences Steps",
    "text.python_rows": "Rows RowStream",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "TASKS":
        return tuple(__getattr__(task) for task in _HOME)
    if name in _HOME:
        return getattr(import_module(f"ascent.tasks.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

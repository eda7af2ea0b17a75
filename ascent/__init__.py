"""Ascent trains language models with policy gradients: every method a choice on one menu.

run = ascent.train("sort", algorithm="grpo", seed=0)
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ascent.api import load, resume
    from ascent.records import Run
    from ascent.trained.exporting import export
    from ascent.trained.sampling import sample
    from ascent.types import Refused, Trouble

__version__ = "0.1.0"
__all__ = ["Refused", "Run", "Trouble", "evaluate", "export", "load", "resume", "sample", "train"]

_AT = {"load": "api", "resume": "api", "Run": "records", "Refused": "types", "Trouble": "types"}
_AT |= {"sample": "trained.sampling", "export": "trained.exporting"}


def __getattr__(name: str) -> Any:
    """Everything on use: a process that only grades responses needs no torch."""
    if name in _AT:
        return getattr(import_module(f"ascent.{_AT[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Ascent(ModuleType):
    """`ascent.train` and `ascent.evaluate` are functions, though modules of the loop have these names too."""

    @property
    def train(self) -> Any:
        return import_module("ascent.api").train

    @train.setter
    def train(self, module: ModuleType) -> None:
        """What the import of `ascent.train` would lay over it."""

    @property
    def evaluate(self) -> Any:
        return import_module("ascent.trained.held_out").evaluate

    @evaluate.setter
    def evaluate(self, module: ModuleType) -> None:
        """As above."""


sys.modules[__name__].__class__ = _Ascent

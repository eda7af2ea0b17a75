"""The run folder: what a run writes down, so that other tools can read it and a kill loses nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ascent.records.folder import RunFolder
    from ascent.records.run import Run
    from ascent.records.writer import Writer

__all__ = ["Run", "RunFolder", "Writer"]

_HOME = {"RunFolder": "folder", "Run": "run", "Writer": "writer"}


def __getattr__(name: str) -> Any:
    """Imported on use: who only watches a run's numbers needs no torch."""
    if name in _HOME:
        return getattr(import_module(f"ascent.records.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

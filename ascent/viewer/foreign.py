"""Runs of other trainers: what the rest of the viewer asks of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def kind_of(folder: Path) -> str | None:  # noqa: ARG001
    return None


def lines(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:  # noqa: ARG001
    """One dictionary a step, in Ascent's names, and what is wrong with the files."""
    return [], []


def steps(folder: Path) -> list[int]:  # noqa: ARG001
    return []


def files(folder: Path) -> list[Path]:  # noqa: ARG001
    """The files that are read here."""
    return []


def mark(folder: Path) -> bytes:  # noqa: ARG001
    """Changes whenever one of the files does: their names, sizes and times."""
    return b""


def events(folder: Path) -> list[dict[str, Any]]:  # noqa: ARG001
    """Flags, as Ascent's trainer would have written them: `ascent.diagnose.watch.flags_of`."""
    return []

"""Which runs there are below a folder, and where: nothing outside of it is ever opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ascent.core.types import Refused
from ascent.records.foreign import foreign_kind

DEEP = 4
"""Folders within folders in which runs are looked for: a comparison keeps its runs one level down."""
MOST_RUNS = 5_000
"""Runs that one list shows."""
LONGEST = 500
INSIDE = frozenset({"checkpoints", "rollouts", "held_out", "tensorboard", "wandb", "mlflow"})
"""What is in a run's folder and is not a run."""


@dataclass(frozen=True)
class Place:
    """A folder that holds a run. Its id is its path below the folder of runs."""

    id: str
    folder: Path
    kind: str
    """`ascent`, or whose files these are: `trl`, `verl`."""


def run_kind(folder: Path) -> str | None:
    """Whose run a folder holds; None: it holds none."""
    try:
        if (folder / "run.json").exists() or ((folder / "config.json").exists() and (folder / ".lock").exists()):
            return "ascent"
        return foreign_kind(folder)
    except OSError:  # not ours to look into
        return None


def find_run(root: Path, id: str) -> Place:
    """The run of an id; whatever would lead out of the folder is refused."""
    parts = id.split("/")
    if len(id) > LONGEST or "\0" in id or "\\" in id or any(p in ("", ".", "..") or p.startswith(".") for p in parts):
        raise Refused(f"{id[:80]!r} is not the name of a run")
    try:
        folder = root.joinpath(*parts).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise Refused(f"there is no run {id}") from None
    if not folder.is_relative_to(root.resolve()):
        raise Refused(f"{id}: that is not inside the folder of runs")
    kind = run_kind(folder) if folder.is_dir() else None
    if kind is None:
        raise Refused(f"there is no run {id}")
    return Place(id, folder, kind)


def runs_below(root: Path) -> list[Place]:
    """Every run below a folder, in the order of their names."""
    runs: list[Place] = []
    waiting = [(root, "", 0)]
    while waiting and len(runs) < MOST_RUNS:
        folder, id, depth = waiting.pop()
        kind = run_kind(folder) if depth else None
        if kind is not None:
            runs.append(Place(id, folder, kind))
        elif depth < DEEP:
            waiting += [(path, f"{id}/{path.name}".lstrip("/"), depth + 1) for path in _folders(folder)]
    return sorted(runs, key=lambda place: place.id)


def _folders(folder: Path) -> list[Path]:
    """Folders that may hold runs; a link is not followed, since it may lead anywhere, or back."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False) and _named(entry.name)]
    except OSError:
        return []


def _named(name: str) -> bool:
    """A name that a page can show and an address can hold."""
    return not name.startswith(".") and name not in INSIDE and name.isprintable()

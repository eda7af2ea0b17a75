"""Checkpoints: everything that a resume needs, written aside, flushed, renamed, with checksums. No pickles."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ascent.types import Refused

Groups = dict[str, dict[str, Tensor]]


def name(step: int) -> str:
    return f"step_{step:06d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def save(folder: Path, step: int, groups: Groups, state: dict[str, Any], keep: int, best: int | None = None) -> Path:
    """Write `folder/step_000100`, and drop all but the newest `keep` and that of the step `best`."""
    final, aside = folder / name(step), folder / f".writing-{name(step)}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for group, tensors in groups.items():
        save_file({k: v.contiguous() for k, v in tensors.items()}, aside / f"{group}.safetensors")
    (aside / "state.json").write_text(json.dumps(state))
    sums = {path.name: _checksum(path) for path in sorted(aside.iterdir())}
    (aside / "manifest.json").write_text(json.dumps({"step": step, "sha256": sums}))
    for path in [*aside.iterdir(), aside]:
        flush(path)
    if final.exists():
        _drop(final)
    os.replace(aside, final)
    flush(folder)
    for old in complete(folder)[:-keep]:
        if step_of(old) != best:
            _drop(old)
    return final


def _drop(path: Path) -> None:
    """Renamed before it is taken apart, so that a kill never leaves half of it under its name."""
    gone = path.with_name(f".dropping-{path.name}")
    os.replace(path, gone)
    shutil.rmtree(gone)


def complete(folder: Path) -> list[Path]:
    """The checkpoints that were renamed into place, oldest first."""
    found = (path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name))
    return sorted(found, key=step_of)


def clear_unfinished(folder: Path) -> None:
    """Remove what a kill left half-written or half-removed."""
    for path in (*folder.glob(".writing-*"), *folder.glob(".dropping-*")):
        shutil.rmtree(path)


def load(path: Path) -> tuple[Groups, dict[str, Any]]:
    """Its tensors and its state, after every checksum was found right."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for file, expected in manifest["sha256"].items():
            if _checksum(path / file) != expected:
                raise ValueError(f"{file} does not match its checksum")
        groups = {p.stem: load_file(p) for p in path.glob("*.safetensors")}
        return groups, json.loads((path / "state.json").read_text())
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        older = [step_of(p) for p in complete(path.parent) if step_of(p) < step_of(path)]
        run = path.parent.parent
        back = f"Go back: ascent resume {run} --from {older[-1]}" if older else "There is no older one for --from"
        raise Refused(f"{path} is corrupt: {error}. {back}") from None


def params(path: Path) -> dict[str, Tensor]:
    """The policy's parameters of a checkpoint, its checksum found right, or of any folder with a params.safetensors."""
    file = path / "params.safetensors"
    try:
        if (path / "manifest.json").exists():
            expected = json.loads((path / "manifest.json").read_text())["sha256"][file.name]
            if _checksum(file) != expected:
                raise ValueError(f"{file.name} does not match its checksum")
        return load_file(file)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise Refused(f"{path}: its parameters cannot be read: {error}") from None


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Have a file or a folder on the disk before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Checkpoints: everything that a resume needs, written aside, flushed, renamed, with checksums. No pickles."""

from __future__ import annotations

import hashlib
import json
import os
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


def save(folder: Path, step: int, groups: Groups, state: dict[str, Any], keep: int) -> Path:
    """Write `folder/step_000100`, and drop all but the newest `keep`."""
    final, aside = folder / name(step), folder / f".writing-{name(step)}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for group, tensors in groups.items():
        save_file({k: v.contiguous() for k, v in tensors.items()}, aside / f"{group}.safetensors")
    (aside / "state.json").write_text(json.dumps(state))
    sums = {path.name: _checksum(path) for path in sorted(aside.iterdir())}
    (aside / "manifest.json").write_text(json.dumps({"step": step, "sha256": sums}))
    for path in [*aside.iterdir(), aside]:
        _flush(path)
    if final.exists():
        shutil.rmtree(final)
    os.replace(aside, final)
    _flush(folder)
    for old in complete(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def complete(folder: Path) -> list[Path]:
    """The checkpoints that were renamed into place, oldest first."""
    return sorted(folder.glob("step_*")) if folder.is_dir() else []


def clear_unfinished(folder: Path) -> None:
    """Remove what a kill left half-written."""
    for path in folder.glob(".writing-*"):
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
        others = [p.name.removeprefix("step_").lstrip("0") or "0" for p in complete(path.parent) if p != path]
        back = f"Go back to an older one with --from {others[-1]}" if others else "There is no older one to go back to"
        raise Refused(f"{path} is corrupt: {error}. {back}") from None


def params(path: Path) -> dict[str, Tensor]:
    """The policy's parameters of a checkpoint, or of any folder with a params.safetensors."""
    try:
        return load_file(path / "params.safetensors")
    except (OSError, SafetensorError) as error:
        raise Refused(f"{path}: its parameters cannot be read: {error}") from None


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

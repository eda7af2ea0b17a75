"""Checkpoints: everything that a resume needs, written aside, flushed, renamed, with checksums. No pickles."""

import errno
import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.runs.sharded_reader import read_parts
from ascent.runs.untrusted_files import READ_ERRORS as ODD
from ascent.runs.untrusted_files import numbered_files, open_regular, parse_json, read_regular
from ascent.training.sharded_checkpoint import SHARD_FILES, ShardedWrite

Groups = dict[str, dict[str, Tensor]]
START = "start"
"""The folder, among the checkpoints, of the parameters that a run starts from."""
READ_ERRORS = (*ODD, SafetensorError)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def aside_of(final: Path) -> Path:
    """Where a folder is written until it is whole."""
    return final.with_name(f".writing-{final.name}")


def save(
    folder: Path, step: int, groups: Groups, state: dict[str, Any], keep: int, best: int | None = None,
    parts: ShardedWrite | None = None,
) -> None:  # fmt: skip
    """Write `folder/step_000100`, and drop all but the newest `keep` and that of the step `best`."""
    write_whole(step_folder(folder, step), groups, state, {"step": step}, parts)
    for old in complete(folder)[:-keep]:
        if step_of(old) != best:
            drop(old)


def write_whole(
    final: Path, groups: Groups, state: dict[str, Any], about: dict[str, Any], parts: ShardedWrite | None = None
) -> None:
    """A folder with these groups of tensors and a state.json, whose manifest has checksums: all of it, or nothing.

    `parts`: what all ranks write there, each its own.
    """
    aside = aside_of(final)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for group, tensors in groups.items():
        try:
            save_file({k: v.contiguous() for k, v in tensors.items()}, aside / f"{group}.safetensors")
        except SafetensorError as error:  # it has words of its own for what the disk said
            code = int((re.search(r"(?:code: |os error )(\d+)", str(error)) or [0, errno.EIO])[1])
            raise OSError(code, os.strerror(code)) from None
    (aside / "state.json").write_text(json.dumps(state))
    sums = {path.name: _checksum(path) for path in sorted(aside.iterdir())}
    if parts is not None:
        sums |= parts.write()
        about = about | {"narrow": parts.narrow}
    (aside / "manifest.json").write_text(json.dumps(about | {"sha256": sums}))
    for path in [*aside.iterdir(), aside]:
        flush(path)
    if final.exists():
        drop(final)
    os.replace(aside, final)
    flush(final.parent)


def read_whole(path: Path) -> tuple[Groups, dict[str, Any]]:
    """What `write_whole` has written; UNREADABLE errors where something of it is not as it was."""
    about = _verify(path)
    groups = {p.stem: load_file(p) for p in path.glob("*.safetensors") if not p.match(SHARD_FILES)}
    if "narrow" in about:
        groups |= read_parts(path, about["narrow"])
    return groups, parse_json(read_regular(path / "state.json"))


def drop(path: Path) -> None:
    """Rename a checkpoint before its files are removed, so that a kill never leaves half of it under its name."""
    gone = path.with_name(f".dropping-{path.name}")
    os.replace(path, gone)
    shutil.rmtree(gone)


def keep_start(source: Path, folder: Path) -> None:
    """Keep the parameters that a run starts from as `folder/start`.

    Those of a checkpoint are linked where the disk allows it: its files never change, and nothing is stored twice.
    """
    final, aside = folder / START, folder / f".writing-{START}"
    if final.exists():
        return
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    checkpointed = (source / "manifest.json").exists()
    files = [path.name for path in source.glob(SHARD_FILES)] or ["params.safetensors"]
    for name in [*files, *["manifest.json"][:checkpointed]]:
        with suppress(OSError):
            if checkpointed:
                os.link(source / name, aside / name)
        if not (aside / name).exists():
            shutil.copyfile(source / name, aside / name)
            flush(aside / name)
    flush(aside)
    os.replace(aside, final)
    flush(folder)


def start_of(folder: Path) -> Path | None:
    """Where a run keeps the parameters that it starts from, if it does."""
    return folder / START if (folder / START).exists() else None


def drop_start(folder: Path) -> None:
    if (folder / START).exists():
        drop(folder / START)


def complete(folder: Path) -> list[Path]:
    """The checkpoints that were renamed into place, oldest first."""
    return list(numbered_files(folder, r"step_(\d+)").values())


def clear_unfinished(folder: Path) -> None:
    """Remove what a kill left half-written or half-removed."""
    for path in (*folder.glob(".writing-*"), *folder.glob(".dropping-*")):
        shutil.rmtree(path)


def load_checkpoint(path: Path) -> tuple[Groups, dict[str, Any]]:
    """The tensors and the state of a checkpoint, after all checksums were verified."""
    try:
        groups, saved = read_whole(path)
        if not all(type(number) is int and number >= 0 for number in (saved["step"], *saved["records"].values())):
            raise ValueError("state.json does not say where the records ended")
        return groups, saved | {"state": saved["state"]}
    except READ_ERRORS as error:
        older = [step_of(p) for p in complete(path.parent) if step_of(p) < step_of(path)]
        run = path.parent.parent
        back = f"To go back: ascent resume {run} --from {older[-1]}" if older else "There is no older one for --from"
        raise ConfigError(f"{path} is corrupt: {error}. {back}") from None


def params(path: Path) -> dict[str, Tensor]:
    """The policy's parameters of a checkpoint, verified, or of any folder with a params.safetensors."""
    file = path / "params.safetensors"
    try:
        if not (path / "manifest.json").exists():
            return load_file(file)
        if file.exists():
            _verify(path, file.name)
            return load_file(file)
        about = _verify(path, *(part.name for part in path.glob(SHARD_FILES)))
        return read_parts(path, about["narrow"], ("params", "wide"))["params"]
    except READ_ERRORS as error:
        raise ConfigError(f"{path}: its parameters cannot be read: {error}") from None


def _verify(path: Path, *files: str) -> dict[str, Any]:
    """Compare files of a checkpoint, by default all, with its manifest, which is returned."""
    about = parse_json(read_regular(path / "manifest.json"))
    checksums = about["sha256"]
    for file in files or checksums:
        if Path(file).name != file:
            raise ValueError(f"the manifest names {file}, which is not a file of the checkpoint")
        if _checksum(path / file) != checksums[file]:
            raise ValueError(f"{file} does not match its checksum")
    return about


def _checksum(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Return when a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

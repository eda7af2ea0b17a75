"""Checkpoints: everything that a resume needs, written atomically with checksums and without pickles."""

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
from ascent.runs.untrusted_files import READ_ERRORS as FILE_READ_ERRORS
from ascent.runs.untrusted_files import numbered_files, open_regular, parse_json, read_regular
from ascent.training.sharded_checkpoint import SHARD_FILES, ShardedWrite

Groups = dict[str, dict[str, Tensor]]
INITIAL_PARAMS_FOLDER = "start"
"""The folder of the initial parameters, beside the checkpoints."""
READ_ERRORS = (*FILE_READ_ERRORS, SafetensorError)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def temporary_path(final: Path) -> Path:
    """Return the temporary path of a folder that is being written."""
    return final.with_name(f".writing-{final.name}")


def save(
    folder: Path, step: int, groups: Groups, state: dict[str, Any], keep: int, best: int | None = None,
    parts: ShardedWrite | None = None,
) -> None:  # fmt: skip
    """Write `folder/step_000100` and remove all but the newest `keep` checkpoints and that of the step `best`."""
    write_atomically(step_folder(folder, step), groups, state, {"step": step}, parts)
    for old in complete_checkpoints(folder)[:-keep]:
        if step_of(old) != best:
            remove_atomically(old)


def write_atomically(
    final: Path, groups: Groups, state: dict[str, Any], info: dict[str, Any], parts: ShardedWrite | None = None
) -> None:
    """Atomically write a folder with groups of tensors, a state.json and a manifest with checksums.

    `parts` writes the shards of all ranks.
    """
    aside = temporary_path(final)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for group, tensors in groups.items():
        try:
            save_file({k: v.contiguous() for k, v in tensors.items()}, aside / f"{group}.safetensors")
        except SafetensorError as error:  # safetensors wraps OSError
            code = int((re.search(r"(?:code: |os error )(\d+)", str(error)) or [0, errno.EIO])[1])
            raise OSError(code, os.strerror(code)) from None
    (aside / "state.json").write_text(json.dumps(state))
    checksums = {path.name: _checksum(path) for path in sorted(aside.iterdir())}
    if parts is not None:
        checksums |= parts.write()
        info = info | {"narrow": parts.narrow}
    (aside / "manifest.json").write_text(json.dumps(info | {"sha256": checksums}))
    for path in [*aside.iterdir(), aside]:
        flush(path)
    if final.exists():
        remove_atomically(final)
    os.replace(aside, final)
    flush(final.parent)


def read_verified(path: Path) -> tuple[Groups, dict[str, Any]]:
    """Read what `write_atomically` has written after verifying all checksums."""
    manifest = _verify(path)
    groups = {p.stem: load_file(p) for p in path.glob("*.safetensors") if not p.match(SHARD_FILES)}
    if "narrow" in manifest:
        groups |= read_parts(path, manifest["narrow"])
    return groups, parse_json(read_regular(path / "state.json"))


def remove_atomically(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that a kill never leaves an incomplete one under its name."""
    removed = path.with_name(f".dropping-{path.name}")
    os.replace(path, removed)
    shutil.rmtree(removed)


def keep_initial_params(source: Path, folder: Path) -> None:
    """Keep the initial parameters of a run as `folder/start`.

    The files of a checkpoint are hard-linked if possible, because they never change.
    """
    final, aside = folder / INITIAL_PARAMS_FOLDER, folder / f".writing-{INITIAL_PARAMS_FOLDER}"
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


def initial_params_folder(folder: Path) -> Path | None:
    """Return the folder of the initial parameters, if it exists."""
    return folder / INITIAL_PARAMS_FOLDER if (folder / INITIAL_PARAMS_FOLDER).exists() else None


def remove_initial_params(folder: Path) -> None:
    if (folder / INITIAL_PARAMS_FOLDER).exists():
        remove_atomically(folder / INITIAL_PARAMS_FOLDER)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return list(numbered_files(folder, r"step_(\d+)").values())


def remove_unfinished(folder: Path) -> None:
    """Remove incompletely written or removed checkpoints."""
    for path in (*folder.glob(".writing-*"), *folder.glob(".dropping-*")):
        shutil.rmtree(path)


def load_checkpoint(path: Path) -> tuple[Groups, dict[str, Any]]:
    """Read the tensors and the state of a checkpoint after verifying all checksums."""
    try:
        groups, saved = read_verified(path)
        if not all(type(number) is int and number >= 0 for number in (saved["step"], *saved["records"].values())):
            raise ValueError("state.json does not say where the records ended")
        return groups, saved | {"state": saved["state"]}
    except READ_ERRORS as error:
        older = [step_of(p) for p in complete_checkpoints(path.parent) if step_of(p) < step_of(path)]
        run = path.parent.parent
        hint = f"To go back: ascent resume {run} --from {older[-1]}" if older else "There is no older one for --from"
        raise ConfigError(f"{path} is corrupt: {error}. {hint}") from None


def params(path: Path) -> dict[str, Tensor]:
    """Read the policy's parameters of a checkpoint (verified) or of any folder with a params.safetensors."""
    file = path / "params.safetensors"
    try:
        if not (path / "manifest.json").exists():
            return load_file(file)
        if file.exists():
            _verify(path, file.name)
            return load_file(file)
        manifest = _verify(path, *(part.name for part in path.glob(SHARD_FILES)))
        return read_parts(path, manifest["narrow"], ("params", "wide"))["params"]
    except READ_ERRORS as error:
        raise ConfigError(f"{path}: its parameters cannot be read: {error}") from None


def _verify(path: Path, *files: str) -> dict[str, Any]:
    """Verify the checksums of files of a checkpoint (default: all) and return its manifest."""
    manifest = parse_json(read_regular(path / "manifest.json"))
    checksums = manifest["sha256"]
    for file in files or checksums:
        if Path(file).name != file:
            raise ValueError(f"the manifest names {file}, which is not a file of the checkpoint")
        if _checksum(path / file) != checksums[file]:
            raise ValueError(f"{file} does not match its checksum")
    return manifest


def _checksum(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Sync a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

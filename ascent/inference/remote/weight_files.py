"""The policy's weights in the form that a serving engine loads: checkpoint names, with LoRA adapters merged."""

import fcntl
import os
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from ascent.models.causal_lm import LanguageModel

SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX = "ascent-weights-"


class WeightManifest(NamedTuple):
    """The weights of one version: a file, or tensors in memory, with their checksums."""

    path: Path
    checksums: dict[str, list[Any]]
    """By tensor name: shape and checksum, in the form that the worker inside the engine reports them."""
    tensors: dict[str, Tensor] | None = None
    """The tensors, if there is no file."""


@torch.no_grad()
def checkpoint_tensors(lm: LanguageModel) -> dict[str, Tensor]:
    """Return every tensor of the model by its name in a Hugging Face checkpoint; tied tensors appear once."""
    from transformers.core_model_loading import revert_weight_conversion

    modules, tensors, seen = dict(lm.model.named_modules()), {}, set()
    for name, tensor in lm.model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or ".lora_" in name:
            continue
        seen.add(id(tensor))
        merged, parts = tensor.detach(), name.split(".")
        for i, part in enumerate(parts):
            layer: Any = modules[".".join(parts[:i])]
            if part == "base_layer" and getattr(layer, "parameter_name", "weight") == parts[-1]:
                for adapter in layer.active_adapters:
                    merged = merged + layer.get_delta_weight(adapter).to(merged.dtype)
        tensors[".".join(part for part in parts if part != "base_layer")] = merged
    return revert_weight_conversion(lm.model, tensors)


def write_weights(tensors: dict[str, Tensor], folder: Path) -> WeightManifest:
    """Write all tensors to one safetensors file."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path = folder / "weights.safetensors"
    save_file(tensors, path)
    return WeightManifest(path, {name: [list(tensor.shape), checksum(tensor)] for name, tensor in tensors.items()})


@contextmanager
def prepare_weights(tensors: dict[str, Tensor], as_file: bool) -> Iterator[WeightManifest]:
    """Provide weights for a transfer: as a file, which is removed on exit, or as tensors in memory."""
    if not as_file:
        tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        checksums = {name: [list(tensor.shape), checksum(tensor.cpu())] for name, tensor in tensors.items()}
        yield WeightManifest(Path(), checksums, tensors)
        return
    folder = weights_folder(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
    try:
        yield write_weights(tensors, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the bytes of a tensor."""
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


LOCKED_FOLDERS: dict[Path, int] = {}
"""The weight folders of this process, each with the file descriptor that locks it."""


def weights_folder(size: int) -> Path:
    """Create a folder for a file of `size` bytes, in shared memory or, if there is no room, on the disk.

    This process locks the folder. An unlocked folder was left by a process that was killed, and is removed. Unlike a
    process id, a lock also works between containers that share the memory.
    """
    for removed in [folder for folder in LOCKED_FOLDERS if not folder.exists()]:
        os.close(LOCKED_FOLDERS.pop(removed))
    for folder in SHARED_MEMORY.glob(FOLDER_PREFIX + "[0-9a-f]" * 16):
        with suppress(OSError):  # in use, or owned by another user
            os.close(_lock(folder))
            shutil.rmtree(folder)
    parent = Path(tempfile.gettempdir())
    with suppress(OSError):
        usage = os.statvfs(SHARED_MEMORY)
        parent = SHARED_MEMORY if usage.f_bavail * usage.f_frsize > 1.1 * size + 2**20 else parent
    name = f"{FOLDER_PREFIX}{secrets.token_hex(8)}"
    hidden = parent / f".{name}"  # renamed once it is locked, so that no other process removes it
    hidden.mkdir(mode=0o700)
    LOCKED_FOLDERS[parent / name] = _lock(hidden)
    return hidden.rename(parent / name)


def _lock(folder: Path) -> int:
    """Lock a folder and return the descriptor that holds the lock. OSError: another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor

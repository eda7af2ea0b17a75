"""The policy's weights as a serving engine loads them: by their names in a checkpoint, with adapters merged."""

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

SHARED = Path("/dev/shm")
PREFIX = "ascent-weights-"


class WeightManifest(NamedTuple):
    """What a file of weights holds."""

    path: Path
    tensors: dict[str, list[Any]]
    """By name: shape and checksum, as the worker inside the engine reports what it has read."""
    held: dict[str, Tensor] | None = None
    """The tensors themselves, where there is no file."""


@torch.no_grad()
def checkpoint_tensors(lm: LanguageModel) -> dict[str, Tensor]:
    """Every tensor of the model by its name in a Hugging Face checkpoint. Tied ones are there once."""
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
    """All of them in one safetensors file."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path = folder / "weights.safetensors"
    save_file(held, path)
    return WeightManifest(path, {name: [list(tensor.shape), checksum(tensor)] for name, tensor in held.items()})


@contextmanager
def prepared(tensors: dict[str, Tensor], by_file: bool) -> Iterator[WeightManifest]:
    """Inside, the weights can be handed over: as a file, which is removed afterwards, or as they are."""
    if not by_file:
        held = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        yield WeightManifest(
            Path(), {name: [list(each.shape), checksum(each.cpu())] for name, each in held.items()}, held
        )
        return
    folder = weights_folder(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
    try:
        yield write_weights(tensors, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def checksum(tensor: Tensor) -> int:
    """CRC-32 of its bytes."""
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


HELD: dict[Path, int] = {}
"""The folders of this process, each with the descriptor that locks it."""


def weights_folder(size: int) -> Path:
    """A new folder for a file of this many bytes: in shared memory, or on the disk where that has no room.

    This process locks it. One without a lock was left by a process that was killed, and is removed: it takes memory.
    UnsupportedArchitectureError a pid, a lock is also seen by containers that share the memory.
    """
    for removed in [folder for folder in HELD if not folder.exists()]:
        os.close(HELD.pop(removed))
    for left in SHARED.glob(PREFIX + "[0-9a-f]" * 16):
        with suppress(OSError):  # in use, or somebody else's
            os.close(_locked(left))
            shutil.rmtree(left)
    where = Path(tempfile.gettempdir())
    with suppress(OSError):
        room = os.statvfs(SHARED)
        where = SHARED if room.f_bavail * room.f_frsize > 1.1 * size + 2**20 else where
    name = f"{PREFIX}{secrets.token_hex(8)}"
    aside = where / f".{name}"  # it has its name once it is locked
    aside.mkdir(mode=0o700)
    HELD[where / name] = _locked(aside)
    return aside.rename(where / name)


def _locked(folder: Path) -> int:
    """A descriptor that locks a folder until it is closed; OSError where another one does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor

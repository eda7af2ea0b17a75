"""Read sharded checkpoints into full tensors on one machine.

They are torch distributed checkpoints in safetensors format, without pickles. Each file records the offsets of its
shards. A tensor is named `group/name`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = ("float32", "float64", "bfloat16", "float16")


def read_parts(path: Path, narrow: str, only: Collection[str] = ()) -> dict[str, dict[str, Tensor]]:
    """Read groups of a checkpoint (default: all) as full tensors; raise ValueError for invalid shards."""
    import torch.distributed.checkpoint as dcp

    if narrow not in TYPES:
        raise ValueError(f"{narrow} is no type of parameters")
    reader = dcp.HuggingFaceStorageReader(str(path))
    try:
        every: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
        large = sum(about.size.numel() * about.properties.dtype.itemsize for about in every.values())
        if large > sum(file.stat().st_size for file in path.glob("*.safetensors")):
            raise ValueError("its parts leave holes in its tensors")
        whole = {
            name: torch.empty(about.size, dtype=about.properties.dtype)
            for name, about in every.items()
            if "/" in name and (not only or name.split("/")[0] in only)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # loading in one process is intended
            dcp.load(whole, storage_reader=reader, no_dist=True)
    except (AssertionError, LookupError, TypeError, RuntimeError, dcp.CheckpointException) as error:
        raise ValueError(f"its parts do not make a whole: {error}") from None
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in whole.items():
        group, own = name.split("/", 1)
        groups.setdefault(group, {})[own] = tensor
    if "wide" in groups:
        groups["params"] = {name: tensor.to(getattr(torch, narrow)) for name, tensor in groups["wide"].items()}
    return groups

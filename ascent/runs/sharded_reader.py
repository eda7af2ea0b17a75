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

PARAMETER_DTYPES = ("float32", "float64", "bfloat16", "float16")


def read_parts(path: Path, narrow: str, only: Collection[str] = ()) -> dict[str, dict[str, Tensor]]:
    """Read groups of a checkpoint (default: all) as full tensors; raise ValueError for invalid shards."""
    import torch.distributed.checkpoint as dcp

    if narrow not in PARAMETER_DTYPES:
        raise ValueError(f"{narrow} is not a dtype of parameters")
    reader = dcp.HuggingFaceStorageReader(str(path))
    try:
        metadata: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
        num_bytes = sum(about.size.numel() * about.properties.dtype.itemsize for about in metadata.values())
        if num_bytes > sum(file.stat().st_size for file in path.glob("*.safetensors")):
            raise ValueError("its shards do not cover its tensors")
        tensors = {
            name: torch.empty(about.size, dtype=about.properties.dtype)
            for name, about in metadata.items()
            if "/" in name and (not only or name.split("/")[0] in only)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # loading in one process is intended
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except (AssertionError, LookupError, TypeError, RuntimeError, dcp.CheckpointException) as error:
        raise ValueError(f"its shards cannot be assembled: {error}") from None
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group, key = name.split("/", 1)
        groups.setdefault(group, {})[key] = tensor
    if "wide" in groups:
        groups["params"] = {name: tensor.to(getattr(torch, narrow)) for name, tensor in groups["wide"].items()}
    return groups

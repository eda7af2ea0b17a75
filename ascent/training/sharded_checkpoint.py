"""Sharded checkpoints: each rank writes its shard with torch.distributed.checkpoint while training continues."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ascent.distributed.ranks import Ranks
from ascent.training.async_checkpoint import BackgroundWriter

SHARD_FILES = "shard-*.safetensors"
"""The shard files of a checkpoint: `shard-00002-….safetensors` is that of the second rank."""


class ShardedWrite(NamedTuple):
    """The pending write of a sharded checkpoint, on rank 0."""

    write: Callable[[], dict[str, str]]
    """Writes the shard and returns the checksums of the files of all ranks."""
    narrow: str
    """The dtype of the model's parameters, of which float32 copies are written."""


class ShardWriter:
    """Writes the shard of this rank on a thread, which needs a separate process group."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.saver = ranks, BackgroundWriter()
        self.group = dist.new_group(backend="gloo")

    def stage(self, groups: dict[str, dict[str, Tensor]], aside: Path, narrow: str) -> ShardedWrite | None:
        """Copy this rank's shard to the host. Rank 0 returns the write; other ranks start it on a thread."""
        self.saver.wait()
        tensors = {
            f"{group}/{name}": value.detach().to("cpu", copy=True)
            for group, values in groups.items()
            for name, value in values.items()
        }
        write = partial(self._write, tensors, aside)
        if self.ranks.rank == 0:
            return ShardedWrite(write, narrow)
        self.saver.begin(write)
        return None

    def _write(self, tensors: dict[str, Any], aside: Path) -> dict[str, str]:
        import torch.distributed.checkpoint as dcp

        try:
            writer = dcp.HuggingFaceStorageWriter(str(aside), save_distributed=True)
            dcp.save(tensors, storage_writer=writer, process_group=self.group)
        except dcp.CheckpointException as error:
            first = next((e for e, _ in error.failures.values() if isinstance(e, OSError)), None)
            code = errno.EIO if first is None or first.errno is None else first.errno
            raise OSError(code, os.strerror(code) if first is not None else str(error)) from None
        files = list(aside.glob(SHARD_FILES.replace("*", f"{self.ranks.rank + 1:05d}-*")))
        checksums = {}
        for path in files:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                checksums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        gathered: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(gathered, checksums, group=self.group)
        return {name: value for part in gathered for name, value in part.items()}

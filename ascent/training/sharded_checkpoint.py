"""Every rank writes its own part of a checkpoint, by torch's distributed checkpoint, while training goes on."""

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
"""The files of a checkpoint that ranks write by themselves: `shard-00002-….safetensors` is what the second one held."""


class ShardedWrite(NamedTuple):
    """What all ranks write of one checkpoint."""

    write: Callable[[], dict[str, str]]
    """Writes all of it, and returns the checksums of its files."""
    narrow: str
    """The type of the model's parameters, of which float32 copies are written."""


class ShardWriter:
    """The part of this rank. Ranks meet in a group of its own, because a thread of each writes."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.saver = ranks, BackgroundWriter()
        self.group = dist.new_group(backend="gloo")

    def stage(self, groups: dict[str, dict[str, Tensor]], aside: Path, narrow: str) -> ShardedWrite | None:
        """Copy this rank's shards to the host. Rank 0 gets what writes them; on others a thread does so by itself."""
        self.saver.wait()
        own = {
            f"{group}/{name}": value.detach().to("cpu", copy=True)
            for group, values in groups.items()
            for name, value in values.items()
        }
        write = partial(self._write, own, aside)
        if self.ranks.rank == 0:
            return ShardedWrite(write, narrow)
        self.saver.begin(write)
        return None

    def _write(self, own: dict[str, Any], aside: Path) -> dict[str, str]:
        import torch.distributed.checkpoint as dcp

        try:
            writer = dcp.HuggingFaceStorageWriter(str(aside), save_distributed=True)
            dcp.save(own, storage_writer=writer, process_group=self.group)
        except dcp.CheckpointException as error:
            first = next((e for e, _ in error.failures.values() if isinstance(e, OSError)), None)
            code = errno.EIO if first is None or first.errno is None else first.errno
            raise OSError(code, os.strerror(code) if first is not None else str(error)) from None
        mine = list(aside.glob(SHARD_FILES.replace("*", f"{self.ranks.rank + 1:05d}-*")))
        own_sums = {}
        for path in mine:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                own_sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        sums: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(sums, own_sums, group=self.group)
        return {name: value for part in sums for name, value in part.items()}

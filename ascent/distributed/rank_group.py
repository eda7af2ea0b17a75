"""The ranks of a torchrun launch: collectives and commands over torch.distributed. Every wait has a deadline."""

from __future__ import annotations

import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascent.core.errors import ConfigError, RunError
from ascent.distributed.heartbeat import Heartbeat
from ascent.distributed.ranks import SINGLE_PROCESS, Ranks

BUCKET_NUMEL = 2**24
"""Number of elements of an all_reduce."""
COMMAND_TIMEOUT = 7200.0
"""Seconds that other ranks wait for a command of rank 0, while it is alive: rewards and evaluations take time."""
PHASES = {
    "generate_share": "generate",
    "load_own": "sync",
    "step": "update",
    "fit_critic": "update",
    "mix_reference": "sync",
}
PHASES |= {"state": "checkpoint", "restore": "checkpoint", "on_rank_zero": "trial"}
"""The phase that a command belongs to, for messages; others are their own phase."""


JOINED: list[Ranks] = []
"""The group of this process. A process joins at most one."""


def join_ranks(deadline: float, device: str, world_size: int) -> Ranks:
    """Join the group of this launch; without one (`world_size` 0) return the single process."""
    if not world_size:
        return SINGLE_PROCESS
    if JOINED:
        raise ConfigError(
            "a second run in one launch: the other ranks ended with the first. Start each run by a torchrun"
        )
    JOINED.append(RankGroup(deadline, device))
    return JOINED[0]


class RankGroup(Ranks):
    """The ranks of a launch. Rank 0 sends commands, which the other ranks receive and carry out."""

    def __init__(self, deadline: float, device: str, rendezvous: tuple[Any, int, int] | None = None):
        """`rendezvous`: store, rank and world size; None: from torchrun's environment variables."""
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        timeout = timedelta(seconds=deadline)
        rendezvous = rendezvous or next(iter(dist.rendezvous("env://", timeout=timeout)))
        store, self.rank, self.world_size = rendezvous
        backend, self.device = ("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"), torch.device(device)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store of earlier attempts
        group_store = dist.PrefixStore(f"group/{attempt}", store)
        heartbeat_store: Any = dist.PrefixStore(f"watch/{attempt}", store)
        self.heartbeat = Heartbeat(heartbeat_store.clone(), self.rank, self.world_size, deadline)
        with self._collective():
            dist.init_process_group(
                backend, store=group_store, rank=self.rank, world_size=self.world_size, timeout=timeout
            )
            self._command_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=COMMAND_TIMEOUT))

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Run a collective; an error names the rank that is missing."""
        self.heartbeat.num_collectives += 1
        try:
            yield
        except Exception as error:
            raise self.heartbeat.explain(error) from None

    def all_reduce(self, tensors: list[Tensor]) -> None:
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            by_kind[tensor.dtype, tensor.device].append(tensor.detach())
        with self._collective():
            for same_kind in by_kind.values():
                for bucket in make_buckets(same_kind):
                    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                    dist.all_reduce(flat)
                    parts = flat.split([tensor.numel() for tensor in bucket])
                    torch._foreach_copy_(bucket, [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])

    def all_reduce_max(self, count: int) -> int:
        if self.world_size == 1:
            return count
        maximum = torch.tensor(count)
        with self._collective():
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
        return int(maximum)

    def gather(self, value: Any) -> list[Any]:
        if self.world_size == 1:
            return [value]
        data = _serialize(value)
        sizes = torch.zeros(self.world_size, dtype=torch.long)
        sizes[self.rank] = len(data)
        with self._collective():
            dist.all_reduce(sizes)
            if self.rank:
                dist.send(data, 0)
                return []
            values = [value]
            for rank in range(1, self.world_size):
                received = torch.empty(int(sizes[rank]), dtype=torch.uint8)
                dist.recv(received, rank)
                values.append(_deserialize(received))
        return values

    def broadcast(self, value: Any = None) -> Any:
        return self._broadcast(value, None)

    def _broadcast(self, value: Any, group: Any) -> Any:
        if self.world_size == 1:
            return value
        data = torch.empty(0, dtype=torch.uint8) if self.rank else _serialize(value)
        size = torch.tensor(len(data))
        with self._collective():
            dist.broadcast(size, 0, group=group)
            data = torch.empty(int(size), dtype=torch.uint8) if self.rank else data
            dist.broadcast(data, 0, group=group)
        return _deserialize(data) if self.rank else value

    def broadcast_groups(
        self,
        groups: dict[str, dict[str, Tensor]] | None = None,
        keep: Callable[[str, str, Tensor], Any] = lambda _group, _name, tensor: tensor,
    ) -> dict[str, dict[str, Any]]:
        """Broadcast named groups of tensors from rank 0, one tensor at a time. Return what `keep` makes of each."""
        groups = groups or {}
        shapes = {group: {name: (t.shape, t.dtype) for name, t in named.items()} for group, named in groups.items()}
        kept: dict[str, dict[str, Any]] = {}
        for group, names in self.broadcast(shapes).items():
            kept[group] = {}
            for name, (shape, dtype) in names.items():
                tensor = torch.empty(shape, dtype=dtype) if self.rank else groups[group][name].cpu().contiguous()
                with self._collective():
                    dist.broadcast(tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor, 0)
                kept[group][name] = keep(group, name, tensor)
        return kept

    # ---- commands

    def send_command(self, target: str, name: str, *args: Any) -> None:
        """Send a command from rank 0: call this method of the `engine` or the `learner` on every other rank."""
        self.heartbeat.phase = PHASES.get(name, name)
        self._broadcast((target, name, args), self._command_group)

    def receive_command(self) -> tuple[str, str, tuple[Any, ...]]:
        """Receive the next command on a rank other than 0."""
        self.heartbeat.phase = "idle"
        target, name, args = self._broadcast(None, self._command_group)
        self.heartbeat.phase = PHASES.get(name, name)
        return target, name, args

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Carry out a command; an error ends the run on all ranks."""
        try:
            yield
        except Exception as error:
            raise self.heartbeat.explain(error) from (None if isinstance(error, RuntimeError) else error)
        except BaseException as error:
            self.heartbeat.fail(self.rank, f"it was interrupted ({type(error).__name__})")
            raise
        self.heartbeat.phase = f"after {self.heartbeat.phase.removeprefix('after ')}"

    def close(self) -> None:
        """End the other ranks, unless they know already that the run is over."""
        if self.rank == 0 and not self.heartbeat.is_ending:
            self.heartbeat.is_ending = True
            with suppress(RunError):  # a rank that is gone needs no command
                self.send_command("", "end")
        self.heartbeat.close()


def make_buckets(tensors: list[Any]) -> Iterator[list[Any]]:
    """Split a list into buckets of at most `BUCKET_NUMEL` elements, in order."""
    bucket: list[Any] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET_NUMEL:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _serialize(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _deserialize(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())

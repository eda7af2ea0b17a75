"""Ranks that torchrun has started: sums, parts and orders over torch.distributed, every wait with a deadline."""

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

BUCKET = 2**24
"""Numbers that are summed at once."""
PATIENCE = 7200.0
"""Seconds for which rank 0 may have nothing to order, as long as it lives: rewards and evaluations take their time."""
PHASES = {"part": "generate", "load": "sync", "step": "update", "fit": "update", "mix_reference": "sync"}
PHASES |= {"state": "checkpoint", "restore": "checkpoint", "on_rank_zero": "trial"}


JOINED: list[Ranks] = []
"""The group of this process: there is one in its life."""


def join_ranks(deadline: float, device: str, size: int) -> Ranks:
    """The ranks that this process belongs to; alone, if there is no group."""
    if not size:
        return SINGLE_PROCESS
    if JOINED:
        raise ConfigError(
            "a second run in one launch: the other ranks ended with the first. Start each run by a torchrun"
        )
    JOINED.append(RankGroup(deadline, device))
    return JOINED[0]


class RankGroup(Ranks):
    """The ranks of a launch. On other ranks than 0, `hear` gives the orders of rank 0, which it gave by `tell`."""

    def __init__(self, deadline: float, device: str, found: tuple[Any, int, int] | None = None):
        """`found`: the store, rank and size, where torchrun's environment does not say them."""
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        found = found or next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=deadline))))
        store, self.rank, self.size = found
        backend, self.device = ("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"), torch.device(device)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store of the ones before
        own, wait = dist.PrefixStore(f"group/{attempt}", store), timedelta(seconds=deadline)
        watched: Any = dist.PrefixStore(f"watch/{attempt}", store)
        self.watch = Heartbeat(watched.clone(), self.rank, self.size, deadline)
        with self._together():
            dist.init_process_group(backend, store=own, rank=self.rank, world_size=self.size, timeout=wait)
            self._orders = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE))

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Inside, all ranks meet; an error says who did not come."""
        self.watch.entered += 1
        try:
            yield
        except Exception as error:
            raise self.watch.explain(error) from None

    def sum(self, tensors: list[Tensor]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            kinds[tensor.dtype, tensor.device].append(tensor.detach())
        with self._together():
            for same in kinds.values():
                for bucket in sum_buckets(same):
                    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                    dist.all_reduce(flat)
                    parts = flat.split([tensor.numel() for tensor in bucket])
                    torch._foreach_copy_(bucket, [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])

    def most(self, count: int) -> int:
        if self.size == 1:
            return count
        number = torch.tensor(count)
        with self._together():
            dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)

    def gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        mine = _bytes(value)
        sizes = torch.zeros(self.size, dtype=torch.long)
        sizes[self.rank] = len(mine)
        with self._together():
            dist.all_reduce(sizes)
            if self.rank:
                dist.send(mine, 0)
                return []
            parts = [value]
            for rank in range(1, self.size):
                part = torch.empty(int(sizes[rank]), dtype=torch.uint8)
                dist.recv(part, rank)
                parts.append(_value(part))
        return parts

    def broadcast(self, value: Any = None) -> Any:
        return self._send(value, None)

    def _send(self, value: Any, group: Any) -> Any:
        if self.size == 1:
            return value
        data = torch.empty(0, dtype=torch.uint8) if self.rank else _bytes(value)
        size = torch.tensor(len(data))
        with self._together():
            dist.broadcast(size, 0, group=group)
            data = torch.empty(int(size), dtype=torch.uint8) if self.rank else data
            dist.broadcast(data, 0, group=group)
        return _value(data) if self.rank else value

    def broadcast_groups(
        self, groups: dict[str, dict[str, Tensor]] | None = None, keep: Callable[..., Tensor] = lambda *own: own[-1]
    ) -> dict[str, dict[str, Tensor]]:
        """The tensors that rank 0 has, on every rank, or what it keeps of each: one after the other."""
        have = groups or {}
        shapes = {g: {name: (t.shape, t.dtype) for name, t in own.items()} for g, own in have.items()}
        made: dict[str, dict[str, Tensor]] = {}
        for group, names in self.broadcast(shapes).items():
            made[group] = {}
            for name, (shape, dtype) in names.items():
                tensor = torch.empty(shape, dtype=dtype) if self.rank else have[group][name].cpu().contiguous()
                with self._together():
                    dist.broadcast(tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor, 0)
                made[group][name] = keep(group, name, tensor)
        return made

    # ---- orders

    def tell(self, part: str, name: str, *args: Any) -> None:
        """Rank 0: have every other rank call this method of its sampler or learner."""
        self.watch.phase = PHASES.get(name, name)
        self._send((part, name, args), self._orders)

    def hear(self) -> tuple[str, str, tuple[Any, ...]]:
        """Another rank: the next order."""
        self.watch.phase = "idle"
        part, name, args = self._send(None, self._orders)
        self.watch.phase = PHASES.get(name, name)
        return part, name, args

    @contextmanager
    def work(self) -> Iterator[None]:
        """Inside, an order is carried out: what goes wrong ends the run of all ranks."""
        try:
            yield
        except Exception as error:
            raise self.watch.explain(error) from (None if isinstance(error, RuntimeError) else error)
        except BaseException as error:
            self.watch.fail(self.rank, f"it was interrupted ({type(error).__name__})")
            raise
        self.watch.phase = f"after {self.watch.phase.removeprefix('after ')}"

    def close(self) -> None:
        """Rank 0 sends the others home, unless they know already that the run is over."""
        if self.rank == 0 and not self.watch.over:
            self.watch.over = True
            with suppress(RunError):  # whoever is gone needs no word
                self.tell("", "end")
        self.watch.close()


def sum_buckets(tensors: list[Any]) -> Iterator[list[Any]]:
    """They in their order, as many at once as make up a bucket."""
    bucket: list[Any] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _value(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())

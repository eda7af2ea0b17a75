"""What a learner asks of the ranks that work on a batch with it: sums, and everybody's part in one place.

Every rank is handed the whole mini-batch, with its weights, and computes its share of it. A share is made of whole
prompts, by their tokens, and in the same way on every rank; so nobody has to say who does what.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ascent.core.types import Batch, Terms

CLUSTER_VARIABLE = "ASCENT_CLUSTER"
"""The environment variable that names the Ray cluster and the run that a rank belongs to."""


def in_ray_cluster() -> bool:
    """Has `ascent cluster` started this process?"""
    return CLUSTER_VARIABLE in os.environ


def is_torchrun_process() -> bool:
    """Has torchrun started this process?"""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def torchrun_rank() -> int:
    return int(os.environ["RANK"]) if is_torchrun_process() else 0


def torchrun_world_size() -> int:
    return int(os.environ["WORLD_SIZE"]) if is_torchrun_process() else 1


def training_world_size(shard: str) -> int:
    """How many ranks train together here. One process is a group if torchrun started it and it was told how: else 0."""
    return torchrun_world_size() if is_torchrun_process() and (torchrun_world_size() > 1 or shard != "auto") else 0


def torchrun_id() -> str:
    """The name of the launch that this process belongs to; nothing, if nobody gave it one of its own."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if name == "none" else name


def was_restarted() -> bool:
    """Has torchrun started this process in the place of one that failed (--max-restarts)?"""
    return is_torchrun_process() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


class Ranks:
    """One process: nothing to do. `group.RankGroup` is the same for several."""

    rank: int = 0
    size: int = 1

    def sum(self, tensors: list[Tensor]) -> None:
        """Each of them, in place, becomes its sum over the ranks: the same bits everywhere."""

    def most(self, count: int) -> int:
        """The largest count of any rank."""
        return count

    def gather(self, value: Any) -> list[Any]:
        """What every rank has, on rank 0; on others nothing."""
        return [value]

    def broadcast(self, value: Any = None) -> Any:
        """What rank 0 has, on every rank."""
        return value

    def close(self) -> None:
        """Take leave of the others."""

    # ---- what follows from these

    def share(self, batch: Batch) -> Batch:
        """This rank's part of a mini-batch, which may be empty."""
        return batch if self.size == 1 else batch.sub_batch(shares(batch, self.size)[self.rank])

    def put_together(self, part: Tensor, batch: Batch) -> Tensor:
        """Numbers of everybody's share, in the order of the batch; on other ranks than 0, one's own."""
        if self.size == 1:
            return part
        parts = self.gather(part.cpu())
        if self.rank:
            return part
        order = torch.cat(shares(batch, self.size)).argsort()
        return torch.cat(parts)[order]

    def sum_terms(self, terms: Terms) -> Terms:
        """The terms of all shares together."""
        if self.size == 1:
            return terms
        every = [terms.objective, *terms.sums.values(), *terms.means.values()]
        total = torch.stack([value.detach().double() for value in every])
        self.sum([total])
        first, *rest = (value.to(old.dtype) for value, old in zip(total, every, strict=True))
        sums, means = dict(zip(terms.sums, rest, strict=False)), rest[len(terms.sums) :]
        return Terms(first, sums, dict(zip(terms.means, means, strict=True)))

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """The gradients of all shares together. A parameter that no share has reached has none."""
        if self.size == 1:
            return
        every = list(parameters)
        reached = torch.tensor([float(p.grad is not None) for p in every])
        self.sum([reached])
        moved = [p for p, count in zip(every, reached.tolist(), strict=True) if count]
        for p in moved:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.sum([p.grad for p in moved if p.grad is not None])


SINGLE_PROCESS = Ranks()


class RankZeroOnly(Ranks):
    """Rank 0 computes a whole batch. The others have none of it, and only meet it where the model is in shards."""

    def __init__(self, inner: Ranks):
        self.inner, self.rank = inner, inner.rank

    def most(self, count: int) -> int:
        return self.inner.most(count)

    def share(self, batch: Batch) -> Batch:
        return batch.sub_batch(slice(0, 0)) if self.rank else batch


def shares(batch: Batch, size: int) -> list[Tensor]:
    """Which prompts each rank computes, in order: the longest groups first, each to whoever has the fewest tokens."""
    cost = ((batch.prompt >= 0).sum(-1) + batch.present.sum((1, 2))).tolist()
    own: list[list[int]] = [[] for _ in range(size)]
    load = [0] * size
    for prompt in sorted(range(len(cost)), key=lambda prompt: -cost[prompt]):
        least = load.index(min(load))
        own[least].append(prompt)
        load[least] += cost[prompt]
    return [torch.tensor(sorted(prompts), dtype=torch.long) for prompts in own]

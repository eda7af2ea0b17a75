"""The collectives that a learner uses: sums, gathers, and the assignment of prompts to ranks.

Every rank gets the whole mini-batch, with its weights, and computes its share of it. A share consists of whole prompts.
Every rank computes the same assignment of prompts to ranks, so it does not have to be communicated.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ascent.core.types import Batch, Terms

CLUSTER_VARIABLE = "ASCENT_CLUSTER"
"""The environment variable with the address of the Ray cluster and the run that a rank belongs to."""


def in_ray_cluster() -> bool:
    """Return whether `ascent cluster` has started this process."""
    return CLUSTER_VARIABLE in os.environ


def is_torchrun_process() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def torchrun_rank() -> int:
    return int(os.environ["RANK"]) if is_torchrun_process() else 0


def torchrun_world_size() -> int:
    return int(os.environ["WORLD_SIZE"]) if is_torchrun_process() else 1


def training_world_size(shard: str) -> int:
    """Return the number of ranks that train together; 0: no process group.

    A single process forms a group only if torchrun has started it and `--ranks.shard` is set.
    """
    return torchrun_world_size() if is_torchrun_process() and (torchrun_world_size() > 1 or shard != "auto") else 0


def torchrun_id() -> str:
    """Return the run id of torchrun; empty if the user has not set one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if name == "none" else name


def was_restarted() -> bool:
    """Return whether torchrun has started this process to replace a failed one (--max-restarts)."""
    return is_torchrun_process() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


class Ranks:
    """The collectives of a single process, which do nothing. `RankGroup` implements them for several."""

    rank: int = 0
    world_size: int = 1

    def all_reduce(self, tensors: list[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over the ranks. All ranks get the same bits."""

    def all_reduce_max(self, count: int) -> int:
        """Return the maximum over the ranks."""
        return count

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, and an empty list on the others."""
        return [value]

    def broadcast(self, value: Any = None) -> Any:
        """Return the value of rank 0 on every rank."""
        return value

    def close(self) -> None:
        """Leave the group."""

    # ---- derived operations

    def shard(self, batch: Batch) -> Batch:
        """Return this rank's share of a mini-batch, which may be empty."""
        return batch if self.world_size == 1 else batch.sub_batch(assign_prompts(batch, self.world_size)[self.rank])

    def gather_shards(self, values: Tensor, batch: Batch) -> Tensor:
        """Return the values of all shares in the order of the batch; on other ranks than 0, only their own."""
        if self.world_size == 1:
            return values
        gathered = self.gather(values.cpu())
        if self.rank:
            return values
        order = torch.cat(assign_prompts(batch, self.world_size)).argsort()
        return torch.cat(gathered)[order]

    def all_reduce_terms(self, terms: Terms) -> Terms:
        """Sum the terms over all shares."""
        if self.world_size == 1:
            return terms
        values = [terms.objective, *terms.sums.values(), *terms.means.values()]
        total = torch.stack([value.detach().double() for value in values])
        self.all_reduce([total])
        objective, *rest = (new.to(old.dtype) for new, old in zip(total, values, strict=True))
        sums, means = dict(zip(terms.sums, rest, strict=False)), rest[len(terms.sums) :]
        return Terms(objective, sums, dict(zip(terms.means, means, strict=True)))

    def all_reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum the gradients over all shares. A parameter without a gradient on any rank keeps none."""
        if self.world_size == 1:
            return
        parameters = list(parameters)
        num_gradients = torch.tensor([float(p.grad is not None) for p in parameters])
        self.all_reduce([num_gradients])
        with_gradient = [p for p, count in zip(parameters, num_gradients.tolist(), strict=True) if count]
        for p in with_gradient:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.all_reduce([p.grad for p in with_gradient if p.grad is not None])


SINGLE_PROCESS = Ranks()


class RankZeroOnly(Ranks):
    """Rank 0 computes a whole batch. The others compute empty shares, to take part in the collectives of FSDP2."""

    def __init__(self, inner: Ranks):
        self.inner, self.rank = inner, inner.rank

    def all_reduce_max(self, count: int) -> int:
        return self.inner.all_reduce_max(count)

    def shard(self, batch: Batch) -> Batch:
        return batch.sub_batch(slice(0, 0)) if self.rank else batch


def assign_prompts(batch: Batch, world_size: int) -> list[Tensor]:
    """Assign prompts to ranks: the groups with the most tokens first, each to the rank with the fewest tokens."""
    num_tokens = ((batch.prompt >= 0).sum(-1) + batch.present.sum((1, 2))).tolist()
    assigned: list[list[int]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for prompt in sorted(range(len(num_tokens)), key=lambda prompt: -num_tokens[prompt]):
        rank = load.index(min(load))
        assigned[rank].append(prompt)
        load[rank] += num_tokens[prompt]
    return [torch.tensor(sorted(prompts), dtype=torch.long) for prompts in assigned]

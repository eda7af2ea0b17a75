"""Which groups are trained on, and what a response's length does to its reward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ascent.advantages import all_equal
from ascent.types import Batch, Refused


def without_signal(batch: Batch) -> Bool[Tensor, "prompt"]:
    """Groups whose rewards, as the task gave them, are all equal; or that have none."""
    total = batch.reward.sum(-1, keepdim=True)
    return all_equal(total, batch.valid.unsqueeze(-1)).flatten()


class Groups:
    """A choice of groups: called with a batch, it says which to keep; the rest are drawn again."""

    rounds: int = 1

    def __call__(self, batch: Batch) -> Bool[Tensor, "prompt"]:
        return torch.ones(batch.mask.shape[0], dtype=torch.bool)


@dataclass(frozen=True)
class All(Groups):
    """Every group that was sampled."""


@dataclass(frozen=True)
class WithSignal(Groups):
    """Only groups whose rewards differ; new prompts are drawn in place of the others (DAPO).

    Yu et al. 2025, dynamic sampling. It costs samples, and it shifts the prompt distribution
    towards prompts of middling difficulty. If no round brings enough, the step trains on what
    there is; reward and accuracy are reported over everything that was sampled.
    """

    rounds: int = 4
    """How often to draw in one step, at most."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise Refused(f"--groups.rounds is {self.rounds}: at least one draw is needed")

    def __call__(self, batch: Batch) -> Bool[Tensor, "prompt"]:
        return ~without_signal(batch)


class Shaping:
    """A second reward: called with a batch, it returns what to add to each response's, or nothing."""

    def __call__(self, batch: Batch) -> Float[Tensor, "prompt sample 1"] | None:
        return None


@dataclass(frozen=True)
class NoShaping(Shaping):
    """The task's reward as it is."""


@dataclass(frozen=True)
class Overlong(Shaping):
    """A soft penalty before the length limit, in place of a cliff at it (DAPO).

    with limit L and margin c: 0 up to L − c tokens, then (L − c − length)/c, −1 if truncated
    Yu et al. 2025. Added to the reward, whether it is right or wrong. Degenerate case: without an
    end token no response is too long, and nothing is added.
    """

    margin: int = 16
    """c: how many tokens before the limit the penalty begins."""

    def __post_init__(self) -> None:
        if self.margin < 1:
            raise Refused(f"--shaping.margin is {self.margin}: it is a number of tokens, 1 or more")

    def __call__(self, batch: Batch) -> Float[Tensor, "prompt sample 1"] | None:
        if not batch.ends:
            return None
        over = (batch.limit - self.margin - batch.length.to(batch.reward.dtype)) / self.margin
        return torch.where(batch.truncated, -1.0, over.clamp(-1.0, 0.0)).unsqueeze(-1)


GROUPS = (All, WithSignal)
SHAPINGS = (NoShaping, Overlong)

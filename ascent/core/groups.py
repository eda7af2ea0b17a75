"""Which groups are trained on, and what a response's length does to its reward."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ascent.core.advantages import all_equal
from ascent.core.errors import ConfigError
from ascent.core.types import Batch


def groups_without_signal(batch: Batch) -> Bool[Tensor, "prompt"]:
    """Return the groups whose rewards from the task are all equal, or that have no reward."""
    total = batch.reward.sum(-1, keepdim=True)
    return all_equal(total, batch.valid.unsqueeze(-1)).flatten()


@dataclass(frozen=True)
class Groups:
    """A selection of groups: called with a batch, it returns those to train on; others are sampled again."""

    mask_truncated: bool = field(default=False, kw_only=True)
    """Do not train on truncated responses; their rewards stay in their groups (DAPO's overlong filtering)."""
    rounds = 1

    def __call__(self, batch: Batch) -> Bool[Tensor, "prompt"]:
        return torch.ones(batch.mask.shape[0], dtype=torch.bool)


@dataclass(frozen=True)
class All(Groups):
    """Every group that was sampled."""


@dataclass(frozen=True)
class WithSignal(Groups):
    """Only groups whose rewards differ; the others are replaced by new prompts (DAPO).

    Yu et al. 2025, dynamic sampling. It costs samples. If too few groups are found, the step trains
    on those; if none is, there is no update, and only schedules go on. Reward and accuracy are over
    everything that was sampled. Bias: prompts of medium difficulty are trained on more often. Where
    A is 0 on an all-equal group anyway, only the denominator changes: other groups weigh more.
    """

    rounds: int = 4
    """Maximum number of sampling rounds per step."""

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"--groups.rounds is {self.rounds}: at least one round is needed")

    def __call__(self, batch: Batch) -> Bool[Tensor, "prompt"]:
        return ~groups_without_signal(batch)


class Shaping:
    """A reward of length: called with a batch, it returns what to add to each reward, or None."""

    def __call__(self, batch: Batch) -> Float[Tensor, "prompt sample 1"] | None:
        return None


@dataclass(frozen=True)
class NoShaping(Shaping):
    """The task's reward as it is."""


@dataclass(frozen=True)
class Overlong(Shaping):
    """A soft penalty before the length limit, instead of a cliff at the limit (DAPO).

    with limit L and margin c: 0 up to L − c drawn tokens, then (L − c − length)/c, −1 if truncated
    Yu et al. 2025. Bias: it changes the reward, so responses near the limit earn less, even right
    ones. Degenerate case: without an end token no response is too long, and nothing is added.
    """

    margin: int = 16
    """c: how many tokens before the limit the penalty begins."""

    def __post_init__(self) -> None:
        if self.margin < 1:
            raise ConfigError(f"--shaping.margin is {self.margin}: it is a number of tokens, 1 or more")

    def __call__(self, batch: Batch) -> Float[Tensor, "prompt sample 1"] | None:
        if not batch.can_end:
            return None
        length = batch.length.to(batch.reward.dtype)
        limit = batch.limit if batch.limits is None else batch.limits.unsqueeze(-1)
        over = (limit - self.margin - length) / self.margin
        return torch.where(batch.truncated, -1.0, over.clamp(-1.0, 0.0)).unsqueeze(-1)


GROUPS = (All, WithSignal)
SHAPINGS = (NoShaping, Overlong)

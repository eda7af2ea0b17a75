"""Reward models, which rate responses, and process rewards, which rate steps: their learners, and they themselves."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.core.config import Config
from ascent.core.types import Batch, Outputs, Rollouts
from ascent.core.update import Update
from ascent.engines.small.learner import SmallLearner, values_of
from ascent.policies.base import ValueFunction


def rate_small_responses(model: ValueFunction, batch: Rollouts) -> Float[Tensor, "prompt sample 1"]:
    """What a reward model gives each response: its head, read at the state behind the last token."""
    return values_of(model, batch).gather(-1, batch.extent.unsqueeze(-1))


def rate_small_steps(model: ValueFunction, batch: Rollouts) -> Float[Tensor, "prompt sample token"]:
    """What a process reward gives each step, and so each token: its head, read at the state after it."""
    return values_of(model, batch)[..., 1:]


class SmallRewardModelLearner(SmallLearner):
    """Trains a reward model of a small task in this process."""

    fills: frozenset[str] = frozenset()

    def __init__(self, model: ValueFunction, update: Update, micro_batch: int = 0):
        super().__init__(model, update, False, frozenset(), micro_batch)
        self.model = model

    def rate(self, batch: Batch) -> Float[Tensor, "prompt sample #token"]:
        return rate_small_responses(self.model, batch)

    def evaluate(self, batch: Batch) -> Outputs:
        """The ratings; a reward model has no log-probs, so they are 0."""
        rating = self.rate(batch)
        zeros = rating.new_zeros(batch.mask.shape)
        return Outputs(zeros, zeros, rating=rating)


class SmallProcessRewardLearner(SmallRewardModelLearner):
    """Trains a process reward of a small task in this process."""

    def rate(self, batch: Batch) -> Float[Tensor, "prompt sample #token"]:
        return rate_small_steps(self.model, batch)


class SmallRewardModel:
    """A reward model, loaded from a run: rollouts in, a number per response."""

    batch = 1 << 30
    """All responses at once."""

    def __init__(self, model: ValueFunction, config: Config):
        self.model, self.config = model.eval().requires_grad_(False), config

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "prompt sample #token"]:
        return rate_small_responses(self.model, rollouts)


class SmallProcessReward(SmallRewardModel):
    """A process reward, loaded from a run: rollouts in, a number per token, for every token is a step."""

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "prompt sample #token"]:
        return torch.where(rollouts.mask, rate_small_steps(self.model, rollouts), 0.0)

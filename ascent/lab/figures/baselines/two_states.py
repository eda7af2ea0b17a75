"""Two states with two actions each: a task and a policy so small that the oracle says everything exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ascent.core.advantages import Advantage, Credit
from ascent.core.types import Batch, Rollouts, Scores, Space, State
from ascent.policies.base import Policy

REWARDS = ((11.0, 9.0), (0.0, 2.0))
"""Of the two actions in state 1, and in state 2."""


@dataclass(frozen=True)
class Minus(Advantage):
    """The reward minus a number that somebody chose.

    δ = R − b
    Unbiased whatever b is, as long as it does not see the response; the variance may be anything.
    """

    baseline: float = 0.0
    """b"""
    group = False

    def __call__(self, batch: Batch, state: State) -> Credit:
        return batch.reward - self.baseline


@dataclass(frozen=True)
class TwoStates:
    """A prompt is state 0 or 1, a response one of two actions."""

    @property
    def space(self) -> Space:
        return Space(prompt_length=1, vocab=2, limit=1)

    def score(self, rollouts: Rollouts) -> Scores:
        table = torch.tensor(REWARDS, dtype=torch.float64)
        reward = table[rollouts.prompt].expand(-1, rollouts.response.shape[1], -1).gather(-1, rollouts.response)
        best = table.argmax(-1)[rollouts.prompt]
        return Scores(reward, torch.ones_like(rollouts.truncated), rollouts.response[..., 0] == best)


class LogOdds(Policy):
    """Two actions with log-odds θ: π(first) = 1/(1 + exp(−θ)), the same in every state. One parameter."""

    def __init__(self, probability: float):
        super().__init__()
        self.space = TwoStates().space
        p = torch.tensor(probability, dtype=torch.float64)
        self.theta = nn.Parameter(torch.logit(p))

    def logits(self, prompt: Tensor, response: Tensor) -> Float[Tensor, "prompt 1 token vocab"]:
        return torch.stack([self.theta, torch.zeros_like(self.theta)]).expand(len(prompt), 1, 1, 2)

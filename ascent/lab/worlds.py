"""The small worlds of the figures: two states with two actions, 27 responses of which some are rewarded.

They meet the oracle's protocol (`ascent.diagnose.exact`), so everything said of them is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ascent.advantages import Advantage, Credit
from ascent.policies.base import Policy, Sampled
from ascent.types import Batch, Rollouts, Scores, Space, State

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


PROMPT = (2, 0, 1)
"""The prompt of the figure on variance; [0 1 2] is right."""


@dataclass(frozen=True)
class Rewarded:
    """Three positions, three numbers: the `rewarded` best of 27 responses earn 1, all others 0.

    Responses are ranked by how many positions are right, then by their numbers.
    """

    rewarded: int = 3
    """How many of the 27 responses earn the reward."""

    @property
    def space(self) -> Space:
        return Space(prompt_length=3, vocab=3, limit=3)

    def score(self, rollouts: Rollouts) -> Scores:
        from ascent.diagnose.exact import responses

        every = responses(self.space).response
        target = rollouts.prompt.sort(-1).values[0]
        right = (every == target).sum(-1)
        code = torch.tensor([9, 3, 1])
        order = torch.argsort((every * code).sum(-1) - 100 * right)
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        reward = (rank[(rollouts.response * code).sum(-1)] < self.rewarded).double()
        correct = (rollouts.response == target).all(-1)
        return Scores(reward.unsqueeze(-1), torch.ones_like(correct), correct)


class Tabular(Policy):
    """A logit for each number at each position, whatever the prompt: nine parameters."""

    def __init__(self, space: Space, spread: float = 0.5, seed: int = 0):
        super().__init__()
        self.space = space
        drawn = torch.randn(
            space.limit, space.vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        self.table = nn.Parameter(spread * drawn)

    def logits(self, prompt: Tensor, response: Tensor) -> Float[Tensor, "prompt 1 token vocab"]:
        return self.table.expand(len(prompt), 1, -1, -1)

    @torch.no_grad()
    def sample(self, prompt: Tensor, samples: int, temperature: float, generator: torch.Generator | None) -> Sampled:
        logp = torch.log_softmax(self.table / temperature, -1)
        if generator is None:
            drawn = logp.argmax(-1, keepdim=True).expand(-1, len(prompt) * samples)
        else:
            drawn = torch.multinomial(logp.exp(), len(prompt) * samples, replacement=True, generator=generator)
        response = drawn.T.reshape(len(prompt), samples, -1)
        chosen = logp.expand(len(prompt), samples, -1, -1).gather(-1, response.unsqueeze(-1)).squeeze(-1)
        return Sampled(response, chosen, torch.full(response.shape[:2], response.shape[-1]))

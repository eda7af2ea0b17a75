"""27 responses of which some are rewarded: a task and a policy so small that the oracle says everything exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ascent.core.types import Rollouts, Scores, Space
from ascent.oracle.exact import all_responses
from ascent.policies.base import Policy, Sampled, draw_next

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
        every = all_responses(self.space).response
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
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(space.limit, space.vocab, generator=generator, dtype=torch.float64)
        self.table = nn.Parameter(spread * logits)

    def logits(self, prompt: Tensor, response: Tensor) -> Float[Tensor, "prompt 1 token vocab"]:
        return self.table.expand(len(prompt), 1, -1, -1)

    @torch.no_grad()
    def sample(self, prompt: Tensor, samples: int, temperature: float, generator: torch.Generator | None) -> Sampled:
        rows = len(prompt) * samples
        drawn = [draw_next(logits.expand(rows, -1), temperature, generator) for logits in self.table]
        response, logp = (torch.stack(part, -1).view(len(prompt), samples, -1) for part in zip(*drawn, strict=True))
        return Sampled(response, logp, torch.full(response.shape[:2], response.shape[-1]))

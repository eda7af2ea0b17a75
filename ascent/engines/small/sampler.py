"""Draws from a small policy in this process."""

from __future__ import annotations

import torch
from torch import Tensor

from ascent.core.protocols import Sampler
from ascent.core.types import Prompts, Rollouts
from ascent.policies.base import Policy


class SmallSampler(Sampler):
    """Draws from a policy in this process. With the learner's own module, loading copies nothing."""

    fills = frozenset({"reward_greedy"})

    def __init__(self, policy: Policy, temperature: float, generator: torch.Generator):
        self.policy, self.temperature, self.generator = policy, temperature, generator
        self.version, self.limit = -1, policy.space.limit
        self._own = dict(policy.named_parameters())

    def load(self, params: dict[str, Tensor], version: int) -> None:
        if any(self._own[name].data_ptr() != tensor.data_ptr() for name, tensor in params.items()):
            self.policy.load_state_dict(params)
        self.version = version

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        if limit not in (None, self.limit):
            raise ValueError(f"a limit of {limit} tokens: a small policy draws up to {self.limit}, as its task says")
        stream = self.generator if seed is None else torch.Generator().manual_seed(seed)
        drawn = self.policy.sample(prompts.prompt, samples, self.temperature, None if greedy else stream)
        mask = torch.arange(drawn.response.shape[2]) < drawn.length.unsqueeze(-1)
        space = self.policy.space
        truncated = torch.zeros_like(drawn.length, dtype=torch.bool)
        if space.end is not None:
            last = drawn.response.gather(-1, drawn.length.unsqueeze(-1) - 1).squeeze(-1)
            truncated = last != space.end
        return Rollouts(
            prompt=prompts.prompt,
            problem=prompts.problem,
            response=drawn.response,
            mask=mask,
            logp_sampler=torch.where(mask, drawn.logp, 0.0),
            limit=space.limit,
            truncated=truncated,
            ends=space.end is not None,
            temperature=self.temperature,
            version=torch.full((*mask.shape[:2], 1), self.version),
        )

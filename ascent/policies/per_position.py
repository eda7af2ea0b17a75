"""The lecture's policy: linear, with every response position drawn independently of the others.

    encoded = Σ_position emb[prompt_position] · E_position
    logits_position = encoded · D_position · embᵀ        (the same embedding, no bias, no activation)

Following Stanford's CS336, lecture 17. Small enough that all its responses can be enumerated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ascent.core.types import Refused, Space
from ascent.policies.base import Policy, Sampled, ValueFunction


@dataclass(frozen=True)
class PerPosition:
    """A linear policy whose response positions are independent of one another."""

    dim: int = 10
    """Width of the embedding."""

    backend: ClassVar[str] = "small"

    def __call__(self, space: Space, generator: torch.Generator) -> PerPositionPolicy:
        if space.end is not None:
            raise Refused(
                "--policy per-position draws every position independently, so it cannot decide to end: "
                "use --policy transformer, or a task without an end token"
            )
        return PerPositionPolicy(space, self.dim, generator)

    def critic(self, policy: PerPositionPolicy, shared: bool, generator: torch.Generator) -> PerPositionValue:
        """A value function on this policy's matrices, or on new ones of the same shape."""
        return PerPositionValue(policy if shared else self(policy.space, generator), shared)


class PerPositionPolicy(Policy):
    def __init__(self, space: Space, dim: int, generator: torch.Generator):
        super().__init__()
        self.space = space

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        # The order of these draws is part of the published random stream.
        self.embedding = nn.Parameter(normal(space.vocab, dim))
        self.encode = nn.Parameter(normal(space.prompt_length, dim, dim) / math.sqrt(dim))
        self.decode = nn.Parameter(normal(space.limit, dim, dim) / math.sqrt(dim))

    def encoded(self, prompt: Int[Tensor, "prompt position"]) -> Float[Tensor, "prompt dim"]:
        return self.embedding[prompt].flatten(1) @ self.encode.flatten(0, 1)

    def all_logits(self, prompt: Int[Tensor, "prompt position"]) -> Float[Tensor, "prompt token vocab"]:
        encoded = self.encoded(prompt)
        decoded = torch.bmm(encoded.expand(len(self.decode), -1, -1), self.decode)  # [token prompt dim]
        return (decoded @ self.embedding.T).transpose(0, 1)

    def logits(self, prompt: Tensor, response: Tensor) -> Float[Tensor, "prompt 1 token vocab"]:
        return self.all_logits(prompt).unsqueeze(1)

    @torch.no_grad()
    def sample(self, prompt: Tensor, samples: int, temperature: float, generator: torch.Generator | None) -> Sampled:
        logits = self.all_logits(prompt) / temperature
        prompts, tokens, vocab = logits.shape
        if generator is None:
            response = logits.argmax(-1).unsqueeze(1).expand(-1, samples, -1)
        else:
            rows = torch.softmax(logits, -1).reshape(prompts * tokens, vocab)
            drawn = torch.multinomial(rows, samples, replacement=True, generator=generator)
            response = drawn.reshape(prompts, tokens, samples).transpose(1, 2)
        logp = torch.log_softmax(logits, -1).unsqueeze(1).expand(-1, samples, -1, -1)
        chosen = logp.gather(-1, response.unsqueeze(-1)).squeeze(-1)
        return Sampled(response, chosen, torch.full((prompts, samples), tokens))


class PerPositionValue(ValueFunction):
    """V(s_t) = b_t + w_t · encoded + Σ_{u<t} a_u · logit_u(y_u), with the backbone's encoding and logits.

    The sum is what the tokens so far have earned, estimated from their logits; the rest is what is to come.
    """

    def __init__(self, backbone: PerPositionPolicy, shared: bool):
        super().__init__(backbone, shared)
        states, dim = backbone.space.limit + 1, backbone.embedding.shape[1]
        self.bias = nn.Parameter(torch.zeros(states))
        self.weight = nn.Parameter(torch.zeros(states, dim))
        self.scale = nn.Parameter(torch.zeros(states - 1))

    def values(self, prompt: Tensor, response: Tensor) -> Float[Tensor, "prompt sample state"]:
        expected = self.backbone.encoded(prompt) @ self.weight.T + self.bias
        logits = self.backbone.all_logits(prompt).unsqueeze(1).expand(-1, response.shape[1], -1, -1)
        earned = self.scale * logits.gather(-1, response.unsqueeze(-1)).squeeze(-1)
        return expected.unsqueeze(1) + nn.functional.pad(earned.cumsum(-1), (1, 0))

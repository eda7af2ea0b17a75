"""A small autoregressive transformer that encodes a prompt once for its whole group.

All samples of a group share the keys and values of their prompt, in training and in sampling.
Training computes every state at once, sampling one token at a time with a key-value cache. Both use
the same code, so their log-probs agree up to rounding.

Pre-norm blocks, learned positions, a GELU MLP of four times the width. No dropout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ascent.core.types import Refused, Space
from ascent.policies.base import Policy, Sampled, ValueFunction, draw_next

Cache = tuple[Tensor, Tensor]
"""Keys and values, `[row head position channel]`."""


@dataclass(frozen=True)
class Transformer:
    """A small autoregressive transformer with a key-value cache."""

    width: int = 64
    """Channels of the residual stream."""
    layers: int = 2
    """Blocks."""
    heads: int = 4
    """Attention heads; the width must be a multiple."""

    backend: ClassVar[str] = "small"

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.heads) < 1:
            raise Refused("--policy.width, --policy.layers and --policy.heads must be 1 or more")
        if self.width % self.heads:
            raise Refused(
                f"--policy.width {self.width} is not a multiple of --policy.heads {self.heads}: each head takes "
                "an equal share of the width"
            )

    def __call__(self, space: Space, generator: torch.Generator) -> TransformerPolicy:
        return TransformerPolicy(space, self, generator)

    def critic(self, policy: TransformerPolicy, shared: bool, generator: torch.Generator) -> TransformerValue:
        """A value function on this policy's blocks, or on new ones of the same shape."""
        return TransformerValue(policy if shared else self(policy.space, generator), shared)


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Float[Tensor, "row position width"], past: Cache | None) -> tuple[Tensor, Cache]:
        """Attend to all of `past`, and causally to x; return the new x and the longer cache."""
        rows, length, width = x.shape
        split = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        if past is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            seen = past[0].shape[2]
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            mask = None
            if length > 1:
                mask = torch.ones(length, seen + length, dtype=torch.bool).tril(seen)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), (k, v)


class TransformerPolicy(Policy):
    def __init__(self, space: Space, shape: Transformer, generator: torch.Generator):
        super().__init__()
        self.space = space
        self.token = nn.Embedding(space.vocab + 1, shape.width)  # the last id separates prompt and response
        self.position = nn.Embedding(space.prompt_length + 1 + space.limit, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, space.vocab)
        self._initialize(generator)

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        """Layers of unit variance and a nearly uniform first policy, all drawn from one generator."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, 1 / math.sqrt(module.in_features), generator=generator)
                module.bias.zero_()
            elif isinstance(module, nn.Embedding):
                module.weight.normal_(0, 0.5, generator=generator)
        self.head.weight.mul_(0.1)

    def _forward(
        self, tokens: Int[Tensor, "row position"], start: int, caches: list[Cache] | None
    ) -> tuple[Float[Tensor, "row position width"], list[Cache]]:
        x = self.token(tokens) + self.position.weight[start : start + tokens.shape[1]]
        grown = []
        for i, block in enumerate(self.blocks):
            x, cache = block(x, None if caches is None else caches[i])
            grown.append(cache)
        return self.norm(x), grown

    def _encode(self, prompt: Int[Tensor, "prompt position"]) -> tuple[Float[Tensor, "prompt width"], list[Cache]]:
        """The state before the first response token, and the prompt's cache."""
        separator = prompt.new_full((prompt.shape[0], 1), self.space.vocab)
        hidden, caches = self._forward(torch.cat([prompt, separator], 1), 0, None)
        return hidden[:, -1], caches

    def states(self, prompt: Tensor, response: Tensor, head: nn.Module) -> Float[Tensor, "prompt sample state out"]:
        """The head's output at the state before each token, and at the state after the last token."""
        prompts, samples, tokens = response.shape
        first, caches = self._encode(prompt)
        out = head(first)[:, None, None].expand(-1, samples, -1, -1)
        if tokens == 0:
            return out
        hidden, _ = self._forward(response.reshape(-1, tokens), prompt.shape[1] + 1, _repeat(caches, samples))
        return torch.cat([out, head(hidden).view(prompts, samples, tokens, -1)], 2)

    def logits(self, prompt: Tensor, response: Tensor) -> Float[Tensor, "prompt sample token vocab"]:
        return self.states(prompt, response[:, :, :-1], self.head)

    @torch.no_grad()
    def sample(self, prompt: Tensor, samples: int, temperature: float, generator: torch.Generator | None) -> Sampled:
        first, caches = self._encode(prompt)
        logits, caches = self.head(first).repeat_interleave(samples, 0), _repeat(caches, samples)
        tokens: list[Tensor] = []
        logps: list[Tensor] = []
        length = torch.zeros(len(logits), dtype=torch.long)
        running = torch.ones(len(logits), dtype=torch.bool)
        for t in range(self.space.limit):
            if t > 0:
                hidden, caches = self._forward(tokens[-1][:, None], prompt.shape[1] + t, caches)
                logits = self.head(hidden[:, -1])
            token, logp = draw_next(logits, temperature, generator)
            tokens.append(token)
            logps.append(logp)
            length += running
            if self.space.end is not None:
                running &= token != self.space.end
                if not bool(running.any()):
                    break
        shape = (prompt.shape[0], samples, len(tokens))
        return Sampled(torch.stack(tokens, 1).view(shape), torch.stack(logps, 1).view(shape), length.view(shape[:2]))


class TransformerValue(ValueFunction):
    """A linear head on the last layer's state, initially 0."""

    def __init__(self, backbone: TransformerPolicy, shared: bool):
        super().__init__(backbone, shared)
        self.head = nn.Linear(backbone.norm.weight.numel(), 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        if not shared:
            backbone.head = nn.Identity()  # type: ignore[assignment]

    def values(self, prompt: Tensor, response: Tensor) -> Float[Tensor, "prompt sample state"]:
        return self.backbone.states(prompt, response, self.head).squeeze(-1)


def _repeat(caches: list[Cache], samples: int) -> list[Cache]:
    """A prompt's keys and values for each sample of its group."""
    return [(k.repeat_interleave(samples, 0), v.repeat_interleave(samples, 0)) for k, v in caches]

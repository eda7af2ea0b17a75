"""Small policies: the interface, a linear policy, and a transformer. They have no state besides parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ascent.core.errors import ConfigError
from ascent.core.types import Space


class Sampled(NamedTuple):
    """Sampled responses. Tokens beyond a response's length are meaningless padding."""

    response: Int[Tensor, "prompt sample token"]
    logp: Float[Tensor, "prompt sample token"]
    length: Int[Tensor, "prompt sample"]


Follow = Callable[[Int[Tensor, "row"]], tuple[Int[Tensor, "row"], Bool[Tensor, "row"]]]
"""Maps sampled tokens to those of the responses (an environment may replace them) and a mask of those that continue."""


class Policy(nn.Module):
    """π(token | prompt, previous tokens). Autoregressive policies implement `sample_turns` too, for environments."""

    space: Space
    sample_turns: Callable[..., Sampled]
    """`sample` with an environment: the additional last argument, a `Follow`, is called after each token."""

    def logits(
        self, prompt: Int[Tensor, "prompt position"], response: Int[Tensor, "prompt sample token"]
    ) -> Float[Tensor, "prompt #sample token vocab"]:
        """Logits at every state of these responses (sample length 1 if they do not depend on the response)."""
        raise NotImplementedError

    def sample(self, prompt: Tensor, samples: int, temperature: float, generator: torch.Generator | None) -> Sampled:
        """Sample `samples` responses per prompt with this generator; without a generator decode greedily."""
        raise NotImplementedError


class ValueFunction(nn.Module):
    """V(prompt, previous tokens): a value head on a separate backbone, or on the policy's."""

    def __init__(self, backbone: Policy, shared: bool):
        super().__init__()
        self._backbone = (
            backbone,
        )  # in a tuple: a shared backbone is not a submodule, and is saved only with the policy
        if not shared:
            self.own = backbone

    @property
    def backbone(self) -> Any:
        return self._backbone[0]

    def trained(self) -> list[Tensor]:
        """Return the trained parameters: the head, and the backbone if it is not shared."""
        return [p for p in self.parameters() if p.requires_grad]

    def values(
        self, prompt: Int[Tensor, "prompt position"], response: Int[Tensor, "prompt sample token"]
    ) -> Float[Tensor, "prompt sample state"]:
        """Return the value of the state before each token, and of the state after the last token."""
        raise NotImplementedError


def draw_next(
    logits: Float[Tensor, "row vocab"], temperature: float, generator: torch.Generator | None
) -> tuple[Int[Tensor, "row"], Float[Tensor, "row"]]:
    """Sample one token per row (torch.multinomial; without a generator argmax); return it and its log-prob."""
    logp = torch.log_softmax(logits / temperature, -1)
    if generator is None:
        token = logits.argmax(-1)
    else:
        token = torch.multinomial(logp.exp(), 1, replacement=True, generator=generator)[:, 0]
    return token, logp.gather(-1, token[:, None])[:, 0]


# ---- linear --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerPosition:
    """A linear policy whose response positions are independent of one another."""

    dim: int = 10
    """Width of the embedding."""

    backend: ClassVar[str] = "small"
    reads: ClassVar[bool] = False
    """Whether a token depends on previous tokens, which environments need."""

    def __call__(self, space: Space, generator: torch.Generator) -> PerPositionPolicy:
        if space.end is not None:
            raise ConfigError(
                "--policy per-position draws every position independently, so it cannot decide to end: "
                "use --policy transformer, or a task without an end token"
            )
        return PerPositionPolicy(space, self.dim, generator)

    def critic(self, policy: PerPositionPolicy, shared: bool, generator: torch.Generator) -> PerPositionValue:
        """Build a value function on this policy's parameters, or on new ones of the same shape."""
        return PerPositionValue(policy if shared else self(policy.space, generator), shared)


class PerPositionPolicy(Policy):
    """A policy that samples all response positions independently, following Stanford's CS336, lecture 17.

        encoded = Σ_position emb[prompt_position] · E_position
        logits_position = encoded · D_position · embᵀ        (the same embedding, no bias, no activation)

    Small enough that all its responses can be enumerated.
    """

    def __init__(self, space: Space, dim: int, generator: torch.Generator):
        super().__init__()
        self.space = space
        # The order of these calls is part of the published random stream.
        shapes = ((space.vocab, dim), (space.prompt_length, dim, dim), (space.limit, dim, dim))
        embedding, encode, decode = (torch.randn(*shape, generator=generator) for shape in shapes)
        self.embedding = nn.Parameter(embedding)
        self.encode, self.decode = nn.Parameter(encode / math.sqrt(dim)), nn.Parameter(decode / math.sqrt(dim))

    def encoded(self, prompt: Int[Tensor, "prompt position"]) -> Float[Tensor, "prompt dim"]:
        return F.embedding(prompt, self.embedding).flatten(1) @ self.encode.flatten(0, 1)

    def all_logits(self, prompt: Int[Tensor, "prompt position"]) -> Float[Tensor, "prompt 1 token vocab"]:
        tokens, vocab = self.space.limit, self.space.vocab
        decoded = torch.bmm(self.encoded(prompt).expand(tokens, -1, -1), self.decode)  # [token prompt dim]
        logits = F.linear(decoded.flatten(0, 1), self.embedding)
        return logits.view(tokens, 1, -1, vocab).transpose(0, 2)

    def logits(self, prompt: Tensor, response: Tensor) -> Float[Tensor, "prompt 1 token vocab"]:
        return self.all_logits(prompt)

    @torch.no_grad()
    def sample(self, prompt: Tensor, samples: int, temperature: float, generator: torch.Generator | None) -> Sampled:
        logits = self.all_logits(prompt).squeeze(1)
        logits = logits if temperature == 1.0 else logits / temperature
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

    The sum estimates the reward of the previous tokens from their logits; the rest is the reward to come.
    """

    def __init__(self, backbone: PerPositionPolicy, shared: bool):
        super().__init__(backbone, shared)
        states, dim = backbone.space.limit + 1, backbone.embedding.shape[1]
        self.bias = nn.Parameter(torch.zeros(states))
        self.weight = nn.Parameter(torch.zeros(states, dim))
        self.scale = nn.Parameter(torch.zeros(states - 1))

    def values(self, prompt: Tensor, response: Tensor) -> Float[Tensor, "prompt sample state"]:
        expected = self.backbone.encoded(prompt) @ self.weight.T + self.bias
        logits = self.backbone.all_logits(prompt).expand(-1, response.shape[1], -1, -1)
        earned = self.scale * logits.gather(-1, response.unsqueeze(-1)).squeeze(-1)
        return expected.unsqueeze(1) + F.pad(earned.cumsum(-1), (1, 0))


# ---- transformer ---------------------------------------------------------------------------------

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
    reads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.heads) < 1:
            raise ConfigError("--policy.width, --policy.layers and --policy.heads must be 1 or more")
        if self.width % self.heads:
            raise ConfigError(
                f"--policy.width {self.width} is not a multiple of --policy.heads {self.heads}: each head takes "
                "an equal share of the width"
            )

    def __call__(self, space: Space, generator: torch.Generator) -> TransformerPolicy:
        return TransformerPolicy(space, self, generator)

    def critic(self, policy: TransformerPolicy, shared: bool, generator: torch.Generator) -> TransformerValue:
        """Build a value function on this policy's blocks, or on new ones of the same shape."""
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
            mask = torch.ones(length, seen + length, dtype=torch.bool).tril(seen) if length > 1 else None
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), (k, v)


class TransformerPolicy(Policy):
    """Pre-norm blocks, learned positions, a GELU MLP of four times the width. No dropout.

    All samples of a group share the keys and values of their prompt, in training and in sampling. Training computes
    every state at once, sampling one token at a time with a key-value cache. Both use the same code, so their
    log-probs agree up to rounding.
    """

    def __init__(self, space: Space, shape: Transformer, generator: torch.Generator):
        super().__init__()
        self.space = space
        self.token = nn.Embedding(space.vocab + 1, shape.width)  # the last id separates prompt and response
        self.position = nn.Embedding(space.prompt_length + 1 + space.limit, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, space.vocab)
        for module in self.modules():  # layers of unit variance and a nearly uniform first policy
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 1 / math.sqrt(module.in_features), generator)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, 0, 0.5, generator)
        self.head.weight.data.mul_(0.1)

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
        """Return the hidden state before the first response token, and the KV cache of the prompt."""
        separator = prompt.new_full((prompt.shape[0], 1), self.space.vocab)
        hidden, caches = self._forward(torch.cat([prompt, separator], 1), 0, None)
        return hidden[:, -1], caches

    def states(self, prompt: Tensor, response: Tensor, head: nn.Module) -> Float[Tensor, "prompt sample state out"]:
        """Return the head's output at the state before each token, and at the state after the last token."""
        prompts, samples, tokens = response.shape
        first, caches = self._encode(prompt)
        out = head(first)[:, None, None].expand(-1, samples, -1, -1)
        if tokens == 0:
            return out
        hidden, _ = self._forward(response.reshape(-1, tokens), prompt.shape[1] + 1, _repeat(caches, samples))
        return torch.cat([out, head(hidden).view(prompts, samples, tokens, -1)], 2)

    def logits(self, prompt: Tensor, response: Tensor) -> Float[Tensor, "prompt sample token vocab"]:
        return self.states(prompt, response[:, :, :-1], self.head)

    def sample(self, prompt: Tensor, samples: int, temperature: float, generator: torch.Generator | None) -> Sampled:
        end = -1 if self.space.end is None else self.space.end
        return self.sample_turns(prompt, samples, temperature, generator, lambda drawn: (drawn, drawn != end))

    @torch.no_grad()
    def sample_turns(
        self, prompt: Tensor, samples: int, temperature: float, generator: torch.Generator | None, follow: Follow
    ) -> Sampled:
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
            length += running
            token, further = follow(token)
            running &= further
            tokens.append(token)
            logps.append(logp)
            if not bool(running.any()):
                break
        shape = (prompt.shape[0], samples, len(tokens))
        return Sampled(torch.stack(tokens, 1).view(shape), torch.stack(logps, 1).view(shape), length.view(shape[:2]))


class TransformerValue(ValueFunction):
    """A linear value head on the last hidden state, initially 0."""

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
    """Repeat the KV cache of a prompt for each sample of its group."""
    return [(k.repeat_interleave(samples, 0), v.repeat_interleave(samples, 0)) for k, v in caches]

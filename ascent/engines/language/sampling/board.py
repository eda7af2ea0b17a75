"""The static state of decoding on a graph, and the arithmetic of one step in plain torch.

A lane is a place for one running response: its own cache, its state, its output. A prompt has a slot, shared by the
lanes of its group. Which lanes a step works on is itself a tensor, so a graph that was captured once serves any of
them, and a lane is given to another response by writing a column of `state`.

Each function here says what one kernel of kernels.py computes; it stands in for it where there is no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.engines.language.sampling.draw import Support, draw_tokens, uniform

SLOT, LENGTH, LAST, SEED, DONE = range(5)
"""The rows of a board's `state`. DONE is 0 while a response runs, and then its number of tokens."""
ENDS = 16
"""End tokens that a board has room for."""

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Board:
    """Tensors at fixed addresses. The last lane is nobody's: rows that have nothing to do point there."""

    state: Tensor
    """Int `[5 lane]`: slot, tokens in the own cache, the token to feed next, the seed, and done."""
    lanes: Tensor
    """The lane of each row of a step."""
    prompt_length: Tensor
    """Keys in each slot."""
    prompts: list[Pair]
    """By layer, keys and values `[slot head position channel]`."""
    own: list[Pair]
    """By layer, keys and values `[lane head token channel]`."""
    token: Tensor
    """Drawn tokens `[lane token]`; so too their log-probs and the mass of what could be drawn."""
    logp: Tensor
    mass: Tensor
    ends: Tensor
    limit: Tensor
    temperature: Tensor

    @classmethod
    def empty(
        cls, layers: int, heads: int, channel: int, rows: int, slots: int, width: int, limit: int, like: Tensor
    ) -> Board:
        """Room for rows of `limit` tokens, and for slots of `width` keys."""
        lanes, device = rows + 1, like.device
        state = torch.zeros(5, lanes, dtype=torch.long, device=device)
        state[DONE, rows] = 1

        def caches(count: int, long: int) -> list[Pair]:
            shape = (count, heads, long, channel)
            return [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(layers)]

        return cls(
            state=state,
            lanes=torch.full((rows,), rows, device=device),
            prompt_length=torch.zeros(slots, dtype=torch.long, device=device),
            prompts=caches(slots, width),
            own=caches(lanes, limit),
            token=torch.zeros(lanes, limit, dtype=torch.long, device=device),
            logp=torch.zeros(lanes, limit, device=device),
            mass=torch.ones(lanes, limit, device=device),
            ends=torch.full((ENDS,), -1, device=device),
            limit=torch.full((), limit, device=device),
            temperature=torch.ones((), dtype=torch.float64, device=device),
        )

    @property
    def rows(self) -> int:
        return len(self.lanes)

    @property
    def longest(self) -> int:
        """Positions that a response can reach."""
        return self.prompts[0][0].shape[2] + self.token.shape[1]

    def holds(self, rows: int, slots: int, width: int, limit: int) -> bool:
        have = (self.rows, len(self.prompt_length), self.prompts[0][0].shape[2], self.token.shape[1])
        return all(h >= n for h, n in zip(have, (rows, slots, width, limit), strict=True))


@dataclass(frozen=True)
class Turn:
    """What attention needs besides the caches: rotary tables `[position channel]`, norms of queries and keys, scale."""

    cos: Tensor
    sin: Tensor
    norms: tuple[Tensor, Tensor, float] | None
    scale: float


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Pair:
    """x + y, and its RMS norm w·x/√(mean x² + ε), in float32 or better within."""
    x = x if y is None else x + y
    wide = x if x.dtype == torch.float64 else x.float()
    return x, weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gated(both: Tensor) -> Tensor:
    """silu(gate)·up, the two side by side."""
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def attend(qkv: Tensor, turn: Turn, board: Board, layer: int) -> Tensor:
    """One new token a row: its key and value join the own cache, and it attends to its prompt and to its own tokens.

    With R(p) the rotation at position p = prompt_length + length:
    out = softmax(scale · R(p)q · [prompt keys, own keys, R(p)k]ᵀ) · [prompt values, own values, v]
    """
    rows, channel = qkv.shape[0], turn.cos.shape[1]
    lanes = board.lanes[:rows]
    slot, length = board.state[SLOT, lanes], board.state[LENGTH, lanes]
    prompt_k, prompt_v = board.prompts[layer]
    own_k, own_v = board.own[layer]
    shared = own_k.shape[1]
    heads = qkv.shape[1] // channel - 2 * shared
    q, k, v = qkv.view(rows, -1, channel).split([heads, shared, shared], 1)
    if turn.norms is not None:
        q, k = (add_norm(x, None, w, turn.norms[2])[1] for x, w in zip((q, k), turn.norms[:2], strict=True))
    position = board.prompt_length[slot] + length
    q, k = (_rotate(x, turn.cos[position, None], turn.sin[position, None]) for x in (q, k))
    own_k[lanes, :, length], own_v[lanes, :, length] = k, v
    keys = torch.cat([prompt_k[slot], own_k[lanes]], 2)
    values = torch.cat([prompt_v[slot], own_v[lanes]], 2)
    column = torch.arange(max(keys.shape[2], 1), device=qkv.device)
    width = prompt_k.shape[2]
    seen = torch.cat(
        [column[:width] < board.prompt_length[slot][:, None], column[: own_k.shape[2]] <= length[:, None]], 1
    )
    q = q.reshape(rows, shared, heads // shared, channel)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[:, None, None], scale=turn.scale)
    return out.reshape(rows, heads * channel)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def draw(logits: Tensor, board: Board, support: Support, greedy: bool) -> None:
    """The next token of every row by the rule of draw.py, and what follows from it: output, state, done."""
    lanes = board.lanes[: logits.shape[0]]
    t, before, done = board.state[LENGTH, lanes], board.state[LAST, lanes], board.state[DONE, lanes]
    z = (logits if logits.dtype == torch.float64 else logits.float()) / board.temperature
    u = None if greedy else uniform(board.state[SEED, lanes], t)
    token, logp, mass = draw_tokens(z, 1.0, Support() if greedy else support, u)
    on = done == 0
    for into, new in ((board.token, token), (board.logp, logp.float()), (board.mass, mass)):
        if new is not None:
            into[lanes, t] = torch.where(on, new.to(into.dtype), into[lanes, t])
    over = (token[:, None] == board.ends).any(-1) | (t + 1 >= board.limit)  # isin may sort, which no graph can hold
    board.state[LENGTH, lanes] = torch.where(on & ~over, t + 1, t)
    board.state[LAST, lanes] = torch.where(on, token, before)
    board.state[DONE, lanes] = torch.where(on & over, t + 1, done)

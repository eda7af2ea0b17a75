"""The parts of a decoding step on static state, in plain torch. model.py puts them together for each architecture.

A lane is a place for one running response: its state, its output, and a table of the pages that hold its keys and
values, its prompt's first and then its own. Which lanes a step works on is itself a tensor, so a graph that was
captured once serves any of them at any length, and a lane is given to another response by writing its column of
`state` and its row of `table`.

`add_norm`, `linear`, `gated_linear`, `adapted`, `gated`, `place_given`, `gather_keys`, `attend` and `draw` say what
kernels/decoding.py computes, and stand in for it without Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.core.sampling_params import SamplingParams
from ascent.ops.decode_state import DONE, GIVEN, KNOWN, LAST, LENGTH, PAGE, SEED, DecodeState
from ascent.ops.kv_cache import Pair
from ascent.ops.token_sampling import draw_tokens, uniform


class Norm(NamedTuple):
    """An RMS norm of a model."""

    weight: Tensor
    eps: float
    add: float | None = None
    """None: what is normed is rounded, and then times the weight. Else it is times add + weight, and then rounded."""


@dataclass(frozen=True)
class Turn:
    """What attention needs besides the caches: rotary tables `[position channel]`, norms of queries and keys, scale."""

    cos: Tensor
    sin: Tensor
    norms: tuple[Norm, Norm] | None
    scale: float


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, add: float | None = None) -> Pair:
    """x + y, in the type of x, and its RMS norm w·x/√(mean x² + ε), in that of w; within in float32 or better.

    `add`: see Norm.
    """
    x = x if y is None else x + y
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = weight * normed.to(x.dtype) if add is None else normed * (add + weight.to(wide.dtype))
    return x, normed.to(weight.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, _parts: bool = False) -> Tensor:
    """x·Wᵀ + b. `_parts`: a kernel may leave parts of the sum for `add_norm` to add up."""
    return F.linear(x.to(weight.dtype), weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    """silu(gate)·up of x, from the two matrices one after the other."""
    return gated(linear(x, weight, bias), gelu=gelu)


def adapted(whole: Tensor, b: Tensor) -> Tensor:
    """x·Wᵀ + h·Bᵀ, where `whole` is [x·Wᵀ, h, …]; in place of x·Wᵀ."""
    out, rank = b.shape
    return whole[:, :out].addmm_(whole[:, out : out + rank], b.t())


def gated(both: Tensor, b: Tensor | None = None, _ranks: tuple[int, ...] = (), gelu: bool = False) -> Tensor:
    """silu(gate)·up, the two side by side; with `b` their adapters, of these ranks, are added first."""
    gate, up = (both if b is None else adapted(both, b)).chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


def share_out(_board: DecodeState, _rows: int) -> None:
    """A kernel may cut long rows into parts, the same in all layers of a step; nobody needs them here."""


def attend(qkv: Tensor, turn: Turn, board: DecodeState, layer: int, _parts: None = None) -> Tensor:
    """One new token per row: its key and value join its pages, and it attends to its prompt and to its own tokens.

    With R(p) the rotation at position p = known + length:
    out = softmax(scale · R(p)q · [prompt keys, own keys, R(p)k]ᵀ) · [prompt values, own values, v]
    `_parts`: of long rows, if they were shared out.
    """
    rows, channel = qkv.shape[0], turn.cos.shape[1]
    lanes = board.lanes[:rows]
    known, length = board.state[KNOWN, lanes], board.state[LENGTH, lanes]
    table, (keys, values) = board.table[lanes].long(), board.cache.layers[layer]
    shared = keys.shape[1]
    heads = qkv.shape[1] // channel - 2 * shared
    q, k, v = qkv.view(rows, -1, channel).split([heads, shared, shared], 1)
    if turn.norms is not None:
        q, k = (add_norm(x, None, *norm)[1] for x, norm in zip((q, k), turn.norms, strict=True))
    position = known + length
    q, k = (_rotate(x, turn.cos[position], turn.sin[position]) for x in (q, k))
    before = (known + PAGE - 1) // PAGE  # pages of the prompt
    page = table.gather(1, (before + length // PAGE)[:, None])[:, 0]
    keys[page, :, length % PAGE], values[page, :, length % PAGE] = k, v
    column = torch.arange(table.shape[1] * PAGE, device=qkv.device)
    own = column - (before * PAGE)[:, None]
    seen = torch.where(own < 0, column < known[:, None], own <= length[:, None])
    k, v = (x[table].transpose(1, 2).flatten(2, 3) for x in (keys, values))
    q = q.reshape(rows, shared, heads // shared, channel)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None], scale=turn.scale)
    return out.reshape(rows, heads * channel)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads `[token head channel]`, turned by the angles of their tokens, `[token channel]`."""
    first, second = x.chunk(2, -1)
    return (x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)).to(x.dtype)


def place_given(qkv: Tensor, cos: Tensor, sin: Tensor, page: Tensor, offset: Tensor, cache: Pair) -> Tensor:
    """Tokens that are given: keys, turned, and values join their pages; returned are the queries, turned too.

    In `[token (heads + 2·shared)·channel]`, whose rows may be apart (adapters.py), out `[token head channel]`.
    """
    shared, channel = cache[0].shape[1], cache[0].shape[3]
    parts = qkv.view(len(qkv), -1, channel)
    both, v = parts.split([parts.shape[1] - shared, shared], 1)
    q, k = _rotate(both, cos, sin).split([both.shape[1] - shared, shared], 1)
    for into, new in zip(cache, (k, v), strict=True):
        into[page, :, offset] = new
    return q


def gather_keys(cache: Pair, page: Tensor, offset: Tensor) -> Pair:
    """Keys and values from these places, `[key head channel]`."""
    return cache[0][page, :, offset], cache[1][page, :, offset]


def draw(logits: Tensor, board: DecodeState, support: SamplingParams, greedy: bool) -> None:
    """The next token of every row by the rule of draw.py, and what follows from it: output, state, done."""
    lanes = board.lanes[: logits.shape[0]]
    t, before, done = board.state[LENGTH, lanes], board.state[LAST, lanes], board.state[DONE, lanes]
    z = (logits if logits.dtype == torch.float64 else logits.float()) / board.temperature
    u = None if greedy else uniform(board.state[SEED, lanes], t)
    barred = None
    if support.min_tokens:
        barred = (t < support.min_tokens, torch.where(board.ends < 0, board.ends[0], board.ends))
    token, logp, mass = draw_tokens(z, 1.0, SamplingParams() if greedy else support, u, barred)
    on, given = done == 0, t < board.state[GIVEN, lanes]
    token = torch.where(given, board.token[lanes, t], token)
    for into, new in ((board.token, token), (board.logp, logp.float()), (board.mass, mass)):
        if new is not None:
            into[lanes, t] = torch.where(on & ~given, new.to(into.dtype), into[lanes, t])
    over = (token[:, None] == board.ends).any(-1) | (t + 1 >= board.limit)  # isin may sort, which no graph can hold
    over &= ~given
    board.state[LENGTH, lanes] = torch.where(on & ~over, t + 1, t)
    board.state[LAST, lanes] = torch.where(on, token, before)
    board.state[DONE, lanes] = torch.where(on & over, t + 1, done)

"""The kernels of a decoding step in Triton. sampling/step.py has them in plain torch and says what they compute.

Bytes decide: a step reads each cache once, the logits once and one block of them again. bfloat16 goes in, sums and
logits are float32, and the running sum that decides a token is float64, as in draw.py.
"""

# mypy: disallow-untyped-defs=False, disallow-any-generics=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascent.core.sampling_params import SamplingParams
from ascent.ops import decode_ops as formulas
from ascent.ops.decode_state import (
    FINISHED_LENGTH,
    FORCED_LENGTH,
    LAST_TOKEN,
    MAX_STOP_TOKENS,
    RESPONSE_LENGTH,
    SEED,
    DecodeState,
)
from ascent.ops.paged_kv_cache import TensorPair
from ascent.ops.triton_matmul import active, await_inputs, early, in_parts, tile_for, tiled_product
from ascent.ops.triton_norms import normed_sum
from ascent.ops.triton_paged_attention import attend_pages, channels, cut_rows

BLOCK = 256
"""Logits whose sum is kept: draw.py looks first for the block and then for the token in it."""
TILE = 4096
"""Logits that one program of `_measure` reads."""
MOST_RANK = 128
"""Of adapters whose product a kernel adds; above it torch's own product does."""
HEADS, KEYS = 16, 32
"""Of tokens that are given: heads that one program turns, and keys that one brings together."""


def add_lora(whole: Tensor, b: Tensor) -> Tensor:
    (rows, apart), (out, rank) = whole.shape, b.shape
    if rank > MOST_RANK:
        return formulas.add_lora(whole, b)
    grid = triton.cdiv(rows, 64), triton.cdiv(out, 64)
    how = {"RANK": max(16, triton.next_power_of_2(rank)), "ROWS": 64, "WIDTH": 64, **early()}
    _adapted[grid](whole, b, rows, out, apart, rank, **how)
    return whole[:, :out]


@triton.jit
def _adapted(
    whole, b, rows, out, apart, rank, RANK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    line = whole + row[:, None] * apart
    inside = (row < rows)[:, None] & (i < out)[None, :]
    more = _low_rank(line + out, b + i[:, None] * rank, row < rows, i < out, rank, RANK)
    base = tl.load(line + i[None, :], inside, other=0.0)
    tl.store(line + i[None, :], (base.to(tl.float32) + more).to(base.dtype), inside)


@triton.jit
def _low_rank(h, b, there, inside, rank, RANK: tl.constexpr):
    """h·Bᵀ for these rows of h and of B, over this many columns."""
    r = tl.arange(0, RANK)
    left = tl.load(h + r[None, :], there[:, None] & (r < rank)[None, :], other=0.0)
    right = tl.load(b + r[None, :], inside[:, None] & (r < rank)[None, :], other=0.0)
    return tl.dot(left, tl.trans(right), input_precision="ieee")


def short_product(x: Tensor, weight: Tensor, bias: Tensor | None, split_k: bool = False) -> Tensor:
    """With `split_k`, partial sums `[split row column]` in float32 where that is faster; `add_rms_norm` adds them."""
    x = x.to(weight.dtype)
    tile = tile_for(x, weight, parts=split_k)
    if tile is not None:
        return tiled_product(x, weight, bias, tile)
    split = in_parts(x, weight) if split_k and bias is None else None
    return formulas.linear(x, weight, bias) if split is None else split


def gated_product(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    x = x.to(weight.dtype)
    tile = tile_for(x, weight, gate=True)
    if tile is None:
        return gated_activation(formulas.linear(x, weight, bias), gelu=gelu)
    return tiled_product(x, weight, bias, tile, "gelu" if gelu else "silu")


linear, gated_linear = short_product, gated_product
add_rms_norm, split_long_rows, paged_attention = normed_sum, cut_rows, attend_pages


def gated_activation(both: Tensor, b: Tensor | None = None, ranks: tuple[int, ...] = (), gelu: bool = False) -> Tensor:
    rows, apart = both.shape
    width = (apart if b is None else len(b)) // 2
    out = both.new_empty(rows, width)
    if b is None:
        _gated[(rows, triton.cdiv(width, 1024))](both, out, width, BLOCK=1024, GELU=gelu, **early())
    elif b.shape[1] > MOST_RANK:
        return gated_activation(formulas.add_lora(both, b).contiguous(), gelu=gelu)
    else:
        most = max(16, triton.next_power_of_2(max(ranks)))
        _gated_adapted[(triton.cdiv(rows, 16), triton.cdiv(width, 128))](
            *(both, out, b, rows, width, apart, *ranks, b.shape[1]),
            **{"RANK": most, "ROWS": 16, "WIDTH": 128, "GELU": gelu},
            **early(),
        )
    return out


@triton.jit
def _gated(both, out, width, BLOCK: tl.constexpr, GELU: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    await_inputs(EARLY)
    gate = tl.load(both + row * 2 * width + i, inside, other=0.0)
    up = tl.load(both + row * 2 * width + width + i, inside, other=0.0)
    tl.store(out + row * width + i, active(gate, up, GELU), inside)


@triton.jit
def _gated_adapted(
    both, out, b, rows, width, apart, of_gate, of_up, rank,
    RANK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, GELU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`of_gate` and `of_up`: columns of h that are the gate's, and after them those of up."""
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    line = both + row[:, None] * apart
    there, inside = row < rows, i < width
    gate = tl.load(line + i[None, :], there[:, None] & inside[None, :], other=0.0)
    up = tl.load(line + width + i[None, :], there[:, None] & inside[None, :], other=0.0)
    h, b_gate = line + 2 * width, b + i[:, None] * rank
    gate = (gate.to(tl.float32) + _low_rank(h, b_gate, there, inside, of_gate, RANK)).to(gate.dtype)
    b_up = b_gate + width * rank + of_gate
    up = (up.to(tl.float32) + _low_rank(h + of_gate, b_up, there, inside, of_up, RANK)).to(gate.dtype)
    tl.store(out + row[:, None] * width + i[None, :], active(gate, up, GELU), there[:, None] & inside[None, :])


# ---- tokens that are given ------------------------------------------------------------------------


def turn_and_place(qkv: Tensor, cos: Tensor, sin: Tensor, page: Tensor, offset: Tensor, cache: TensorPair) -> Tensor:
    keys, values = cache
    _, shared, size, channel = keys.shape
    tokens, heads = len(qkv), qkv.shape[1] // channel - 2 * shared
    q = qkv.new_empty(tokens, heads, channel)
    _place[(tokens, triton.cdiv(heads + 2 * shared, HEADS))](
        *(qkv, cos, sin, page, offset, keys, values, q, heads, qkv.stride(0)),
        SHARED=shared,
        SIZE=size,
        HALF=channel // 2,
        WIDE=triton.next_power_of_2(channel // 2),
        HEADS=HEADS,
        **early(),
        num_warps=2,
    )
    return q


@triton.jit
def _place(
    qkv, cos, sin, page, offset, keys, values, q, heads, apart,
    SHARED: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    c = tl.arange(0, WIDE)
    turned, real = heads + SHARED, c < HALF
    inside = (h < turned + SHARED)[:, None] & real[None, :]
    line = qkv + token * apart + h[:, None] * 2 * HALF + c[None, :]
    a, b = tl.load(line, inside, other=0.0), tl.load(line + HALF, inside, other=0.0)
    angle = token * 2 * HALF + c
    cos_a, cos_b = tl.load(cos + angle, real, other=0.0), tl.load(cos + angle + HALF, real, other=0.0)
    sin_a, sin_b = tl.load(sin + angle, real, other=0.0), tl.load(sin + angle + HALF, real, other=0.0)
    x, y = a.to(tl.float32), b.to(tl.float32)
    first = (x * cos_a.to(tl.float32)[None, :] - y * sin_a.to(tl.float32)[None, :]).to(a.dtype)
    second = (y * cos_b.to(tl.float32)[None, :] + x * sin_b.to(tl.float32)[None, :]).to(a.dtype)
    is_query = (h < heads)[:, None] & inside
    to = q + (token * heads + h[:, None]) * 2 * HALF + c[None, :]
    tl.store(to, first, is_query)
    tl.store(to + HALF, second, is_query)
    where = tl.load(page + token) * SHARED
    at = tl.load(offset + token)
    is_key = ((h >= heads) & (h < turned))[:, None] & inside
    to = keys + ((where + h[:, None] - heads) * SIZE + at) * 2 * HALF + c[None, :]
    tl.store(to, first, is_key)
    tl.store(to + HALF, second, is_key)
    is_value = (h >= turned)[:, None] & inside
    to = values + ((where + h[:, None] - turned) * SIZE + at) * 2 * HALF + c[None, :]
    tl.store(to, a, is_value)
    tl.store(to + HALF, b, is_value)


def bring_together(cache: TensorPair, page: Tensor, offset: Tensor) -> TensorPair:
    keys, values = cache
    _, shared, size, channel = keys.shape
    k, v = (keys.new_empty(len(page), shared, channel) for _ in range(2))
    _collect[(triton.cdiv(len(page), KEYS), shared)](
        *(keys, values, page, offset, k, v, len(page)),
        SHARED=shared,
        SIZE=size,
        D=channel,
        WIDE=triton.next_power_of_2(channel),
        KEYS=KEYS,
        **early(),
    )
    return k, v


@triton.jit
def _collect(
    keys, values, page, offset, k, v, count,
    SHARED: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    i = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    head = tl.program_id(1)
    c = tl.arange(0, WIDE)
    there = i < count
    where = (tl.load(page + i, there, other=0) * SHARED + head) * SIZE + tl.load(offset + i, there, other=0)
    line, inside = where[:, None] * D + c[None, :], channels(there, D, WIDE)
    to = (i[:, None] * SHARED + head) * D + c[None, :]
    tl.store(k + to, tl.load(keys + line, inside, other=0.0), inside)
    tl.store(v + to, tl.load(values + line, inside, other=0.0), inside)


rotate_and_write_kv, gather_kv = turn_and_place, bring_together


# ---- drawing --------------------------------------------------------------------------------------


def sample_next_tokens(logits: Tensor, board: DecodeState, support: SamplingParams, greedy: bool) -> None:
    if support.min_tokens or not (support.whole or greedy):
        formulas.sample_next_tokens(logits, board, support, greedy)
        return
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    per = TILE // BLOCK
    tops = torch.empty(rows, tiles, device=logits.device)
    sums = torch.empty(rows, tiles * per, device=logits.device)
    _measure[(rows, tiles)](logits, board.temperature, tops, sums, vocab, tiles, PER=per, BLOCK=BLOCK, **early())
    _draw[(rows,)](
        *(logits, tops, sums, board.temperature, board.state, board.batch_indices, board.tokens, board.logp),
        *(board.stop_tokens, board.max_tokens, vocab, tiles, board.state.shape[1], board.tokens.shape[1]),
        PER=per,
        BLOCK=BLOCK,
        TILES=triton.next_power_of_2(tiles),
        GREEDY=greedy,
        MAX_STOP_TOKENS=MAX_STOP_TOKENS,
        L=RESPONSE_LENGTH,
        LAST_TOKEN=LAST_TOKEN,
        SEED=SEED,
        FINISHED_LENGTH=FINISHED_LENGTH,
        FORCED_LENGTH=FORCED_LENGTH,
        **early(),
    )


@triton.jit
def _measure(
    logits, temperature, tops, sums, vocab, tiles, PER: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Of a tile of a row's logits z: the largest, m, and of each block in it Σ e^(z − m)."""
    await_inputs(EARLY)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tile * PER + tl.arange(0, PER)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    z = tl.load(logits + row * vocab + i, i < vocab, other=float("-inf")).to(tl.float32)
    z = z / tl.load(temperature).to(tl.float32)
    top = tl.max(z)
    tl.store(tops + row * tiles + tile, top)
    tl.store(sums + row * tiles * PER + block, tl.sum(tl.exp(z - top), 1))


@triton.jit
def _draw(
    logits, tops, sums, temperature, state, lanes, token_out, logp_out, ends, limit, vocab, tiles, lane_count, room,
    PER: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, GREEDY: tl.constexpr, MAX_STOP_TOKENS: tl.constexpr,
    L: tl.constexpr, LAST_TOKEN: tl.constexpr, SEED: tl.constexpr, FINISHED_LENGTH: tl.constexpr,
    FORCED_LENGTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A row's token from the sums of its blocks and one block of logits; then its output and state."""
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + row)
    t, done = tl.load(state + L * lane_count + lane), tl.load(state + FINISHED_LENGTH * lane_count + lane)
    cooling = tl.load(temperature).to(tl.float32)
    tile, per = tl.arange(0, TILES), tl.arange(0, PER)
    peaks = tl.load(tops + row * tiles + tile, tile < tiles, other=float("-inf"))
    top = tl.max(peaks)
    block = tile[:, None] * PER + per[None, :]
    part = tl.load(sums + row * tiles * PER + block, block < tiles * PER, other=0.0) * tl.exp(peaks - top)[:, None]
    total = tl.sum(part)
    if GREEDY:
        first = tl.min(tl.where(peaks == top, tile, TILES))
        i = first * PER * BLOCK + tl.arange(0, PER * BLOCK)
        z = tl.load(logits + row * vocab + i, i < vocab, other=float("-inf")).to(tl.float32) / cooling
        token = tl.min(tl.where(z == top, i, vocab)).to(tl.int64)
        chosen = top
    else:
        seed = tl.load(state + SEED * lane_count + lane)
        token, chosen = _invert(logits + row * vocab, part, top, seed, t, vocab, cooling, PER, BLOCK, TILES)
    on, given = done == 0, t < tl.load(state + FORCED_LENGTH * lane_count + lane)
    token = tl.where(given, tl.load(token_out + lane * room + t), token)
    end = tl.max((tl.load(ends + tl.arange(0, MAX_STOP_TOKENS)) == token).to(tl.int32)) > 0
    over = (end | (t + 1 >= tl.load(limit))) & (given == 0)
    tl.store(token_out + lane * room + t, token, on)
    tl.store(logp_out + lane * room + t, chosen - (top + tl.log(total)), on & (given == 0))
    tl.store(state + LAST_TOKEN * lane_count + lane, token, on)
    tl.store(state + L * lane_count + lane, t + 1, on & (over == 0))
    tl.store(state + FINISHED_LENGTH * lane_count + lane, t + 1, on & over)


@triton.jit
def _invert(logits, part, top, seed, t, vocab, cooling, PER: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """The first token at which the running sum of e^(z − top) exceeds u times its total, and its z."""
    sums = tl.cumsum(tl.reshape(part, (TILES * PER,)).to(tl.float64), 0)
    point = _uniform(seed, t) * tl.max(sums) * 0.999999999999
    at = tl.arange(0, TILES * PER)
    which = tl.minimum(tl.sum((sums <= point).to(tl.int32)), (vocab - 1) // BLOCK)
    before = tl.sum(tl.where(at == which - 1, sums, 0.0))
    i = tl.arange(0, BLOCK)
    z = tl.load(logits + which * BLOCK + i, which * BLOCK + i < vocab, other=float("-inf")).to(tl.float32) / cooling
    p = tl.exp(z - top)
    place = tl.sum((before + tl.cumsum(p.to(tl.float64), 0) <= point).to(tl.int32))
    first, last = tl.min(tl.where(p > 0, i, BLOCK)), tl.max(tl.where(p > 0, i, -1))
    place = tl.minimum(tl.maximum(place, first), last)
    return (which * BLOCK + place).to(tl.int64), tl.sum(tl.where(i == place, z, 0.0))


@triton.jit
def _uniform(seed, t):
    """splitmix64, as in draw.py."""
    x = seed + (t + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16

"""Triton kernels of a decode step. decode_ops.py has the same functions in PyTorch, as the reference.

A decode step is bound by memory bandwidth: it reads each KV cache once, and the logits once plus one block of them
again. Inputs are bfloat16, sums and logits float32, and the cumulative sum that selects a token is float64, as in
token_sampling.py.
"""

# mypy: disallow-untyped-defs=False, disallow-any-generics=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascent.core.sampling_params import SamplingParams
from ascent.ops import decode_ops as reference
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
from ascent.ops.triton_matmul import (
    act_and_mul,
    choose_tile,
    cublas_split_k,
    pdl_options,
    tiled_matmul,
    wait_for_inputs,
)
from ascent.ops.triton_norms import add_rms_norm as add_rms_norm
from ascent.ops.triton_paged_attention import head_dim_mask
from ascent.ops.triton_paged_attention import paged_attention as paged_attention
from ascent.ops.triton_paged_attention import split_long_rows as split_long_rows

LOGITS_BLOCK = 256
"""Logits whose sum is stored: like token_sampling.py, the sampler first finds the block and then the token in it."""
LOGITS_TILE = 4096
"""Logits that one program of `_block_sums` reads."""
MAX_LORA_RANK = 128
"""LoRA rank up to which these kernels add the adapter's matmul; above it PyTorch does."""
HEADS_PER_PROGRAM, KEYS_PER_PROGRAM = 16, 32
"""In a prefill: heads that one program rotates, and keys that one program gathers."""


def add_lora(fused: Tensor, b: Tensor) -> Tensor:
    (rows, row_stride), (out, rank) = fused.shape, b.shape
    if rank > MAX_LORA_RANK:
        return reference.add_lora(fused, b)
    grid = triton.cdiv(rows, 64), triton.cdiv(out, 64)
    block_r = max(16, triton.next_power_of_2(rank))
    _add_lora[grid](fused, b, rows, out, row_stride, rank, BLOCK_R=block_r, BLOCK_M=64, BLOCK_N=64, **pdl_options())
    return fused[:, :out]


@triton.jit
def _add_lora(
    fused, b, rows, out, row_stride, rank,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = fused + row[:, None] * row_stride
    mask = (row < rows)[:, None] & (i < out)[None, :]
    update = _lora_matmul(line + out, b + i[:, None] * rank, row < rows, i < out, rank, BLOCK_R)
    base = tl.load(line + i[None, :], mask, other=0.0)
    tl.store(line + i[None, :], (base.to(tl.float32) + update).to(base.dtype), mask)


@triton.jit
def _lora_matmul(h, b, is_row, is_column, rank, BLOCK_R: tl.constexpr):
    """h·Bᵀ for these rows of h and of B."""
    r = tl.arange(0, BLOCK_R)
    left = tl.load(h + r[None, :], is_row[:, None] & (r < rank)[None, :], other=0.0)
    right = tl.load(b + r[None, :], is_column[:, None] & (r < rank)[None, :], other=0.0)
    return tl.dot(left, tl.trans(right), input_precision="ieee")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, split_k: bool = False) -> Tensor:
    """With `split_k`, partial sums `[split row column]` in float32 where that is faster; `add_rms_norm` adds them."""
    x = x.to(weight.dtype)
    tile = choose_tile(x, weight, split_k=split_k)
    if tile is not None:
        return tiled_matmul(x, weight, bias, tile)
    partial_sums = cublas_split_k(x, weight) if split_k and bias is None else None
    return reference.linear(x, weight, bias) if partial_sums is None else partial_sums


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    x = x.to(weight.dtype)
    tile = choose_tile(x, weight, gate=True)
    if tile is None:
        return gated_activation(reference.linear(x, weight, bias), gelu=gelu)
    return tiled_matmul(x, weight, bias, tile, "gelu" if gelu else "silu")


def gated_activation(
    gate_up: Tensor, b: Tensor | None = None, ranks: tuple[int, ...] = (), gelu: bool = False
) -> Tensor:
    rows, row_stride = gate_up.shape
    width = (row_stride if b is None else len(b)) // 2
    out = gate_up.new_empty(rows, width)
    if b is None:
        _act_and_mul[(rows, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024, GELU=gelu, **pdl_options())
    elif b.shape[1] > MAX_LORA_RANK:
        return gated_activation(reference.add_lora(gate_up, b).contiguous(), gelu=gelu)
    else:
        block_r = max(16, triton.next_power_of_2(max(ranks)))
        _lora_act_and_mul[(triton.cdiv(rows, 16), triton.cdiv(width, 128))](
            *(gate_up, out, b, rows, width, row_stride, *ranks, b.shape[1]),
            **{"BLOCK_R": block_r, "BLOCK_M": 16, "BLOCK_N": 128, "GELU": gelu},
            **pdl_options(),
        )
    return out


@triton.jit
def _act_and_mul(gate_up, out, width, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    wait_for_inputs(PDL)
    gate = tl.load(gate_up + row * 2 * width + i, mask, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + i, mask, other=0.0)
    tl.store(out + row * width + i, act_and_mul(gate, up, GELU), mask)


@triton.jit
def _lora_act_and_mul(
    gate_up, out, b, rows, width, row_stride, gate_rank, up_rank, rank,
    BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first `gate_rank` columns of h are those of the gate's adapter, the next `up_rank` those of up."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = gate_up + row[:, None] * row_stride
    is_row, is_column = row < rows, i < width
    mask = is_row[:, None] & is_column[None, :]
    gate = tl.load(line + i[None, :], mask, other=0.0)
    up = tl.load(line + width + i[None, :], mask, other=0.0)
    h, b_gate = line + 2 * width, b + i[:, None] * rank
    gate = (gate.to(tl.float32) + _lora_matmul(h, b_gate, is_row, is_column, gate_rank, BLOCK_R)).to(gate.dtype)
    b_up = b_gate + width * rank + gate_rank
    up = (up.to(tl.float32) + _lora_matmul(h + gate_rank, b_up, is_row, is_column, up_rank, BLOCK_R)).to(gate.dtype)
    tl.store(out + row[:, None] * width + i[None, :], act_and_mul(gate, up, GELU), mask)


# ---- prefill --------------------------------------------------------------------------------------


def rotate_and_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, block: Tensor, offset: Tensor, cache: TensorPair
) -> Tensor:
    keys, values = cache
    _, num_kv_heads, block_size, head_dim = keys.shape
    tokens, num_heads = len(qkv), qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = qkv.new_empty(tokens, num_heads, head_dim)
    _rotate_and_write_kv[(tokens, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS_PER_PROGRAM))](
        *(qkv, cos, sin, block, offset, keys, values, q, num_heads, qkv.stride(0)),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HALF=head_dim // 2,
        BLOCK_D=triton.next_power_of_2(head_dim // 2),
        HEADS_PER_PROGRAM=HEADS_PER_PROGRAM,
        **pdl_options(),
        num_warps=2,
    )
    return q


@triton.jit
def _rotate_and_write_kv(
    qkv, cos, sin, block, offset, keys, values, q, num_heads, row_stride,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate a pair (a, b) from the two halves of a head to (a·cos − b·sin, b·cos + a·sin)."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    d = tl.arange(0, BLOCK_D)
    num_rotated, in_half = num_heads + NUM_KV_HEADS, d < HALF
    mask = (head < num_rotated + NUM_KV_HEADS)[:, None] & in_half[None, :]
    line = qkv + token * row_stride + head[:, None] * 2 * HALF + d[None, :]
    a, b = tl.load(line, mask, other=0.0), tl.load(line + HALF, mask, other=0.0)
    angle = token * 2 * HALF + d
    cos_a, cos_b = tl.load(cos + angle, in_half, other=0.0), tl.load(cos + angle + HALF, in_half, other=0.0)
    sin_a, sin_b = tl.load(sin + angle, in_half, other=0.0), tl.load(sin + angle + HALF, in_half, other=0.0)
    x, y = a.to(tl.float32), b.to(tl.float32)
    first = (x * cos_a.to(tl.float32)[None, :] - y * sin_a.to(tl.float32)[None, :]).to(a.dtype)
    second = (y * cos_b.to(tl.float32)[None, :] + x * sin_b.to(tl.float32)[None, :]).to(a.dtype)
    is_query = (head < num_heads)[:, None] & mask
    to = q + (token * num_heads + head[:, None]) * 2 * HALF + d[None, :]
    tl.store(to, first, is_query)
    tl.store(to + HALF, second, is_query)
    block_head = tl.load(block + token) * NUM_KV_HEADS
    slot = tl.load(offset + token)
    is_key = ((head >= num_heads) & (head < num_rotated))[:, None] & mask
    to = keys + ((block_head + head[:, None] - num_heads) * BLOCK_SIZE + slot) * 2 * HALF + d[None, :]
    tl.store(to, first, is_key)
    tl.store(to + HALF, second, is_key)
    is_value = (head >= num_rotated)[:, None] & mask
    to = values + ((block_head + head[:, None] - num_rotated) * BLOCK_SIZE + slot) * 2 * HALF + d[None, :]
    tl.store(to, a, is_value)
    tl.store(to + HALF, b, is_value)


def gather_kv(cache: TensorPair, block: Tensor, offset: Tensor) -> TensorPair:
    keys, values = cache
    _, num_kv_heads, block_size, head_dim = keys.shape
    k, v = (keys.new_empty(len(block), num_kv_heads, head_dim) for _ in range(2))
    _gather_kv[(triton.cdiv(len(block), KEYS_PER_PROGRAM), num_kv_heads)](
        *(keys, values, block, offset, k, v, len(block)),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        KEYS_PER_PROGRAM=KEYS_PER_PROGRAM,
        **pdl_options(),
    )
    return k, v


@triton.jit
def _gather_kv(
    keys, values, block, offset, k, v, count, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, KEYS_PER_PROGRAM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    i = tl.program_id(0).to(tl.int64) * KEYS_PER_PROGRAM + tl.arange(0, KEYS_PER_PROGRAM)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    is_key = i < count
    block_head = tl.load(block + i, is_key, other=0) * NUM_KV_HEADS + head
    slot = block_head * BLOCK_SIZE + tl.load(offset + i, is_key, other=0)
    source, mask = slot[:, None] * HEAD_DIM + d[None, :], head_dim_mask(is_key, HEAD_DIM, BLOCK_D)
    to = (i[:, None] * NUM_KV_HEADS + head) * HEAD_DIM + d[None, :]
    tl.store(k + to, tl.load(keys + source, mask, other=0.0), mask)
    tl.store(v + to, tl.load(values + source, mask, other=0.0), mask)


# ---- sampling -------------------------------------------------------------------------------------


def sample_next_tokens(logits: Tensor, state: DecodeState, params: SamplingParams, greedy: bool) -> None:
    """Multinomial sampling by inverse CDF, or argmax; top-k, top-p, min-p and min_tokens run in PyTorch."""
    if params.min_tokens or not (params.unrestricted or greedy):
        reference.sample_next_tokens(logits, state, params, greedy)
        return
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, LOGITS_TILE)
    blocks_per_tile = LOGITS_TILE // LOGITS_BLOCK
    tile_max = torch.empty(rows, tiles, device=logits.device)
    block_sums = torch.empty(rows, tiles * blocks_per_tile, device=logits.device)
    shape = {"BLOCKS_PER_TILE": blocks_per_tile, "BLOCK": LOGITS_BLOCK, **pdl_options()}
    _block_sums[(rows, tiles)](logits, state.temperature, tile_max, block_sums, vocab, tiles, **shape)
    _sample_next_tokens[(rows,)](
        *(logits, tile_max, block_sums, state.temperature, state.state, state.batch_indices, state.tokens, state.logp),
        *(state.stop_tokens, state.max_tokens, vocab, tiles, state.state.shape[1], state.tokens.shape[1]),
        TILES=triton.next_power_of_2(tiles),
        GREEDY=greedy,
        MAX_STOP_TOKENS=MAX_STOP_TOKENS,
        RESPONSE_LENGTH=RESPONSE_LENGTH,
        LAST_TOKEN=LAST_TOKEN,
        SEED=SEED,
        FINISHED_LENGTH=FINISHED_LENGTH,
        FORCED_LENGTH=FORCED_LENGTH,
        **shape,
    )


@triton.jit
def _block_sums(
    logits, temperature, tile_max, block_sums, vocab, tiles,
    BLOCKS_PER_TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For a tile of a row's scaled logits z: the maximum m, and Σ e^(z − m) of each block in it."""
    wait_for_inputs(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tile * BLOCKS_PER_TILE + tl.arange(0, BLOCKS_PER_TILE)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    z = tl.load(logits + row * vocab + i, i < vocab, other=float("-inf")).to(tl.float32)
    z = z / tl.load(temperature).to(tl.float32)
    z_max = tl.max(z)
    tl.store(tile_max + row * tiles + tile, z_max)
    tl.store(block_sums + row * tiles * BLOCKS_PER_TILE + block, tl.sum(tl.exp(z - z_max), 1))


@triton.jit
def _sample_next_tokens(
    logits, tile_max, block_sums, temperature_ptr, state, batch_indices, tokens, logp, stop_tokens, max_tokens, vocab,
    tiles, num_columns, token_stride,
    TILES: tl.constexpr, GREEDY: tl.constexpr, MAX_STOP_TOKENS: tl.constexpr, RESPONSE_LENGTH: tl.constexpr,
    LAST_TOKEN: tl.constexpr, SEED: tl.constexpr, FINISHED_LENGTH: tl.constexpr, FORCED_LENGTH: tl.constexpr,
    BLOCKS_PER_TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sample a row's token from the sums of its blocks and one block of logits; then update its output and state."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.load(batch_indices + row)
    t = tl.load(state + RESPONSE_LENGTH * num_columns + column)
    finished = tl.load(state + FINISHED_LENGTH * num_columns + column)
    temperature = tl.load(temperature_ptr).to(tl.float32)
    tile, block_in_tile = tl.arange(0, TILES), tl.arange(0, BLOCKS_PER_TILE)
    maxima = tl.load(tile_max + row * tiles + tile, tile < tiles, other=float("-inf"))
    z_max = tl.max(maxima)
    block = tile[:, None] * BLOCKS_PER_TILE + block_in_tile[None, :]
    sums = tl.load(block_sums + row * tiles * BLOCKS_PER_TILE + block, block < tiles * BLOCKS_PER_TILE, other=0.0)
    sums = sums * tl.exp(maxima - z_max)[:, None]
    total = tl.sum(sums)
    if GREEDY:
        best_tile = tl.min(tl.where(maxima == z_max, tile, TILES))
        i = best_tile * BLOCKS_PER_TILE * BLOCK + tl.arange(0, BLOCKS_PER_TILE * BLOCK)
        z = tl.load(logits + row * vocab + i, i < vocab, other=float("-inf")).to(tl.float32) / temperature
        token = tl.min(tl.where(z == z_max, i, vocab)).to(tl.int64)
        token_z = z_max
    else:
        seed = tl.load(state + SEED * num_columns + column)
        token, token_z = _invert_cdf(
            logits + row * vocab, sums, z_max, seed, t, vocab, temperature, BLOCKS_PER_TILE, BLOCK, TILES
        )
    running, forced = finished == 0, t < tl.load(state + FORCED_LENGTH * num_columns + column)
    token = tl.where(forced, tl.load(tokens + column * token_stride + t), token)
    is_stop = tl.max((tl.load(stop_tokens + tl.arange(0, MAX_STOP_TOKENS)) == token).to(tl.int32)) > 0
    ends = (is_stop | (t + 1 >= tl.load(max_tokens))) & (forced == 0)
    tl.store(tokens + column * token_stride + t, token, running)
    tl.store(logp + column * token_stride + t, token_z - (z_max + tl.log(total)), running & (forced == 0))
    tl.store(state + LAST_TOKEN * num_columns + column, token, running)
    tl.store(state + RESPONSE_LENGTH * num_columns + column, t + 1, running & (ends == 0))
    tl.store(state + FINISHED_LENGTH * num_columns + column, t + 1, running & ends)


@triton.jit
def _invert_cdf(
    logits, sums, z_max, seed, t, vocab, temperature,
    BLOCKS_PER_TILE: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return the first token at which the cumulative sum of e^(z − z_max) exceeds u times its total, and its z."""
    cdf = tl.cumsum(tl.reshape(sums, (TILES * BLOCKS_PER_TILE,)).to(tl.float64), 0)
    target = _uniform_from_seed(seed, t) * tl.max(cdf) * 0.999999999999
    block_index = tl.arange(0, TILES * BLOCKS_PER_TILE)
    block = tl.minimum(tl.sum((cdf <= target).to(tl.int32)), (vocab - 1) // BLOCK)
    sum_before = tl.sum(tl.where(block_index == block - 1, cdf, 0.0))
    i = tl.arange(0, BLOCK)
    z = tl.load(logits + block * BLOCK + i, block * BLOCK + i < vocab, other=float("-inf")).to(tl.float32) / temperature
    p = tl.exp(z - z_max)
    offset = tl.sum((sum_before + tl.cumsum(p.to(tl.float64), 0) <= target).to(tl.int32))
    first, last = tl.min(tl.where(p > 0, i, BLOCK)), tl.max(tl.where(p > 0, i, -1))
    offset = tl.minimum(tl.maximum(offset, first), last)
    return (block * BLOCK + offset).to(tl.int64), tl.sum(tl.where(i == offset, z, 0.0))


@triton.jit
def _uniform_from_seed(seed, t):
    """splitmix64, as in token_sampling.py."""
    x = seed + (t + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16

"""Operators of a decode step, in PyTorch: the reference for the Triton kernels of triton_decoding.py.

`DecoderModel` composes them for each architecture. They read and write a `DecodeState`. The batch indices of a step
are a tensor, so that one captured CUDA graph serves any sequences of any length. A batch index is reused for another
response by writing its column of `state` and its row of `block_tables`.

Without Triton these functions run instead of the kernels of the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.core.sampling_params import SamplingParams
from ascent.ops.decode_state import (
    BLOCK_SIZE,
    FINISHED_LENGTH,
    FORCED_LENGTH,
    LAST_TOKEN,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    SEED,
    DecodeState,
)
from ascent.ops.paged_kv_cache import TensorPair
from ascent.ops.token_sampling import sample_tokens, uniform_from_seed


class NormParams(NamedTuple):
    """Parameters of an RMSNorm."""

    weight: Tensor
    eps: float
    weight_offset: float | None = None
    """None: round x/RMS(x) to the dtype of x, then multiply by the weight (Llama). A number: multiply by
    weight_offset + weight, then round (Gemma adds 1)."""


@dataclass(frozen=True)
class AttentionParams:
    """Parameters of attention besides the KV cache: RoPE tables `[position head_dim]`, QK-norms, softmax scale."""

    cos: Tensor
    sin: Tensor
    qk_norms: tuple[NormParams, NormParams] | None
    scale: float


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float | None = None
) -> TensorPair:
    """Return s = x + residual and its RMSNorm w·s/√(mean s² + ε), computed in at least float32.

    The sum has the dtype of x, the norm that of w. See `NormParams` for `weight_offset`.
    """
    x = x if residual is None else x + residual
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    offset_weight = weight if weight_offset is None else weight_offset + weight.to(wide.dtype)
    normed = offset_weight * (normed.to(x.dtype) if weight_offset is None else normed)
    return x, normed.to(weight.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, _split_k: bool = False) -> Tensor:
    """x·Wᵀ + b. With `_split_k` a kernel may return the partial sums of split-K, which `add_rms_norm` adds up."""
    return F.linear(x.to(weight.dtype), weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    """act(x·W_gateᵀ) · x·W_upᵀ, where `weight` is [W_gate; W_up]: the first half of a gated MLP (SwiGLU, GeGLU)."""
    return gated_activation(linear(x, weight, bias), gelu=gelu)


def add_lora(fused: Tensor, b: Tensor) -> Tensor:
    """LoRA: x·Wᵀ + h·Bᵀ, where `fused` is [x·Wᵀ, h, …] with h = x·Aᵀ. The result overwrites x·Wᵀ."""
    out, rank = b.shape
    return fused[:, :out].addmm_(fused[:, out : out + rank], b.t())


def gated_activation(
    gate_up: Tensor, b: Tensor | None = None, _ranks: tuple[int, ...] = (), gelu: bool = False
) -> Tensor:
    """act(gate) · up for `gate_up` = [gate, up]. With `b` their LoRA adapters, of these ranks, are added first."""
    gate, up = (gate_up if b is None else add_lora(gate_up, b)).chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


def split_long_rows(_state: DecodeState, _rows: int) -> None:
    """A kernel may split the keys of long rows (split-KV attention), alike in all layers; the reference does not."""


def paged_attention(
    qkv: Tensor, params: AttentionParams, state: DecodeState, layer: int, _splits: None = None
) -> Tensor:
    """Attention of one new token per row to its paged KV cache, after writing its key and value there.

    With R(p) the rotary embedding at position p = prompt length + response length:
    out = softmax(scale · R(p)q · [prompt keys, response keys, R(p)k]ᵀ) · [prompt values, response values, v]
    `_splits`: how the keys of long rows are split, from `split_long_rows`.
    """
    rows, head_dim = qkv.shape[0], params.cos.shape[1]
    batch_indices = state.batch_indices[:rows]
    prompt_length, length = state.state[PROMPT_LENGTH, batch_indices], state.state[RESPONSE_LENGTH, batch_indices]
    block_table, (keys, values) = state.block_tables[batch_indices].long(), state.cache.layers[layer]
    num_kv_heads = keys.shape[1]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q, k, v = qkv.view(rows, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
    if params.qk_norms is not None:
        q, k = (add_rms_norm(x, None, *norm)[1] for x, norm in zip((q, k), params.qk_norms, strict=True))
    position = prompt_length + length
    q, k = (_apply_rope(x, params.cos[position], params.sin[position]) for x in (q, k))
    prompt_blocks = (prompt_length + BLOCK_SIZE - 1) // BLOCK_SIZE
    block = block_table.gather(1, (prompt_blocks + length // BLOCK_SIZE)[:, None])[:, 0]
    keys[block, :, length % BLOCK_SIZE], values[block, :, length % BLOCK_SIZE] = k, v
    column = torch.arange(block_table.shape[1] * BLOCK_SIZE, device=qkv.device)
    response_index = column - (prompt_blocks * BLOCK_SIZE)[:, None]
    visible = torch.where(response_index < 0, column < prompt_length[:, None], response_index <= length[:, None])
    k, v = (x[block_table].transpose(1, 2).flatten(2, 3) for x in (keys, values))
    q = q.reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None], scale=params.scale)
    return out.reshape(rows, num_heads * head_dim)


def _apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to heads `[token head head_dim]`; `cos` and `sin` are `[token head_dim]`."""
    first, second = x.chunk(2, -1)
    return (x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)).to(x.dtype)


def rotate_and_write_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, block: Tensor, offset: Tensor, cache: TensorPair
) -> Tensor:
    """Prefill: apply RoPE to queries and keys, write keys and values to the cache, return the queries.

    `qkv` is `[token (num_heads + 2·num_kv_heads)·head_dim]` and may be a strided view (lora.py); the result is
    `[token head head_dim]`. Each token is written at its `offset` in its `block`.
    """
    num_kv_heads, head_dim = cache[0].shape[1], cache[0].shape[3]
    heads = qkv.view(len(qkv), -1, head_dim)
    qk, v = heads.split([heads.shape[1] - num_kv_heads, num_kv_heads], 1)
    q, k = _apply_rope(qk, cos, sin).split([qk.shape[1] - num_kv_heads, num_kv_heads], 1)
    for blocks, new in zip(cache, (k, v), strict=True):
        blocks[block, :, offset] = new
    return q


def gather_kv(cache: TensorPair, block: Tensor, offset: Tensor) -> TensorPair:
    """Return the keys and values at these places, `[key head head_dim]`."""
    return cache[0][block, :, offset], cache[1][block, :, offset]


def sample_next_tokens(logits: Tensor, state: DecodeState, params: SamplingParams, greedy: bool) -> None:
    """Sample the next token of every row (`sample_tokens`) and update its output, length and finished state."""
    batch_indices = state.batch_indices[: logits.shape[0]]
    t, last_token = state.state[RESPONSE_LENGTH, batch_indices], state.state[LAST_TOKEN, batch_indices]
    finished = state.state[FINISHED_LENGTH, batch_indices]
    z = (logits if logits.dtype == torch.float64 else logits.float()) / state.temperature
    u = None if greedy else uniform_from_seed(state.state[SEED, batch_indices], t)
    forbidden = None
    if params.min_tokens:
        stop_tokens = torch.where(state.stop_tokens < 0, state.stop_tokens[0], state.stop_tokens)
        forbidden = (t < params.min_tokens, stop_tokens)
    token, logp, kept_mass = sample_tokens(z, 1.0, SamplingParams() if greedy else params, u, forbidden)
    running, forced = finished == 0, t < state.state[FORCED_LENGTH, batch_indices]
    token = torch.where(forced, state.tokens[batch_indices, t], token)
    for output, new in ((state.tokens, token), (state.logp, logp.float()), (state.kept_mass, kept_mass)):
        if new is not None:
            output[batch_indices, t] = torch.where(running & ~forced, new.to(output.dtype), output[batch_indices, t])
    # not torch.isin: it may sort, which a CUDA graph cannot capture
    ends = (token[:, None] == state.stop_tokens).any(-1) | (t + 1 >= state.max_tokens)
    ends &= ~forced
    state.state[RESPONSE_LENGTH, batch_indices] = torch.where(running & ~ends, t + 1, t)
    state.state[LAST_TOKEN, batch_indices] = torch.where(running, token, last_token)
    state.state[FINISHED_LENGTH, batch_indices] = torch.where(running & ends, t + 1, finished)

"""Paged attention of one new token per row, in Triton; the reference is `paged_attention` in decode_ops.py.

    out = softmax(scale · R(p)q · [cached keys, R(p)k]ᵀ) · [cached values, v]

The kernel also applies QK-norm and RoPE and writes the new key and value to the cache. It is bound by memory
bandwidth, so programs are small and many run on each multiprocessor. The keys of long or uneven rows are split
(split-KV, as in flash-decoding, planned by `split_long_rows`): a program reads one split, the longest splits come
first, and the program that finishes last with a row merges its splits. benchmarks/attention_gpu.py measures it.
"""

# mypy: disallow-untyped-defs=False, disallow-any-generics=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascent.ops.decode_ops import AttentionParams
from ascent.ops.decode_state import BLOCK_SIZE, PROMPT_LENGTH, RESPONSE_LENGTH, DecodeState
from ascent.ops.triton_matmul import NUM_SMS, pdl_options, prefetch_l2, wait_for_inputs
from ascent.ops.triton_norms import NORM_FORMS, scale_by_weight

MANY_PROGRAMS = 1000
"""Programs from which on the GPU is full, so that each reads fewer keys at once."""
MIN_KEYS_PER_SPLIT = 256
"""Merging shorter splits would take longer than reading their keys."""
SPLIT_FIELDS = 8
"""Fields of a split: row, batch index, prompt length, response length, index of the split in its row, number of splits
of the row, number of splits of all rows before it, keys per split. A row of −1 marks an unused entry."""


def split_long_rows(
    state: DecodeState, rows: int, min_keys: int = MIN_KEYS_PER_SPLIT, max_extra_splits: int | None = None
) -> Tensor:
    """Split the keys of each row, alike in all layers of a step; return int32 `[split SPLIT_FIELDS]`.

    Splits have at least `min_keys` keys. Besides one per row there are at most `max_extra_splits`, by default as many
    as can run at once.
    """
    max_blocks, device = state.block_tables.shape[1], state.block_tables.device
    keys = state.cache.layers[0][0]
    num_kv_heads, key_bytes = keys.shape[1], keys.shape[3] * keys.element_size()
    programs_per_sm = split_tile(rows * num_kv_heads, key_bytes)[3]
    extra = min(max_extra_splits or programs_per_sm * NUM_SMS // num_kv_heads, rows * max_blocks)
    splits = torch.empty(extra + rows, SPLIT_FIELDS, dtype=torch.int32, device=device)
    _split_long_rows[(rows,)](
        *(state.state, state.batch_indices, splits, state.state.shape[1], rows, extra, min_keys),
        BLOCK_ROWS=triton.next_power_of_2(rows),
        BLOCK_SIZE=BLOCK_SIZE,
        PROMPT_LENGTH=PROMPT_LENGTH,
        RESPONSE_LENGTH=RESPONSE_LENGTH,
        SPLIT_FIELDS=SPLIT_FIELDS,
        **pdl_options(),
    )
    return splits


@triton.jit
def _split_long_rows(
    state, batch_indices, splits, num_columns, rows, extra, min_keys,
    BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PROMPT_LENGTH: tl.constexpr, RESPONSE_LENGTH: tl.constexpr,
    SPLIT_FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row. The full splits of all rows come first, then each row's last split, the longest first."""
    wait_for_inputs(PDL)
    row, i, field = tl.program_id(0), tl.arange(0, BLOCK_ROWS), tl.arange(0, SPLIT_FIELDS)
    columns = tl.load(batch_indices + i, i < rows, other=0)
    prompt_lengths = tl.load(state + PROMPT_LENGTH * num_columns + columns, i < rows, other=0).to(tl.int32)
    lengths = tl.load(state + RESPONSE_LENGTH * num_columns + columns, i < rows, other=0).to(tl.int32)
    ends = (prompt_lengths + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE + lengths
    size = tl.maximum((tl.sum(ends) + extra * BLOCK_SIZE - 1) // (extra * BLOCK_SIZE) * BLOCK_SIZE, min_keys)
    full_splits = tl.maximum(ends - 1, 0) // size
    before = tl.sum(tl.where(i < row, full_splits, 0))
    row_full, all_full = tl.sum(tl.where(i == row, full_splits, 0)), tl.sum(full_splits)
    remainders = tl.where(i < rows, ends - full_splits * size, -1)
    remainder = tl.sum(tl.where(i == row, remainders, 0))
    rank = tl.sum(((remainders > remainder) | ((remainders == remainder) & (i < row))).to(tl.int32))
    column = tl.load(batch_indices + row)
    prompt_length = tl.load(state + PROMPT_LENGTH * num_columns + column).to(tl.int32)
    length = tl.load(state + RESPONSE_LENGTH * num_columns + column).to(tl.int32)
    values = tl.where(field == 1, column.to(tl.int32), tl.where(field == 2, prompt_length, length))
    values = tl.where(field == 0, row, values)
    values = tl.where(field == 5, row_full + 1, tl.where(field == 6, before + row, tl.where(field == 7, size, values)))
    for split in range(0, row_full):
        tl.store(splits + (before + split) * SPLIT_FIELDS + field, tl.where(field == 4, split, values))
    tl.store(splits + (all_full + rank) * SPLIT_FIELDS + field, tl.where(field == 4, row_full, values))
    for unused in range(all_full + rows + row, extra + rows, rows):
        tl.store(splits + unused * SPLIT_FIELDS + field, tl.zeros_like(field) - 1)


def paged_attention(
    qkv: Tensor, params: AttentionParams, state: DecodeState, layer: int, splits: Tensor | None = None
) -> Tensor:
    rows, head_dim = qkv.shape[0], params.cos.shape[1]
    cache = state.cache.layers[layer]
    num_kv_heads = cache[0].shape[1]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    (q_weight, eps, weight_offset), (k_weight, *_) = params.qk_norms or ((qkv, 0.0, None),) * 2
    out = qkv.new_empty(rows, num_heads * head_dim)
    choose_tile = row_tile if splits is None else split_tile
    keys_at_once, warps, stages, prefetch = choose_tile(rows * num_kv_heads, head_dim * qkv.element_size())
    tensors = (params.cos, params.sin, q_weight, k_weight, *cache)
    scalars = (qkv.stride(0), state.block_tables.shape[1], eps, params.scale * 1.4426950408889634)
    options: dict[str, Any] = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP_SIZE": num_heads // num_kv_heads,
        "BLOCK_Q": max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_SIZE": BLOCK_SIZE,
        "NORM_FORM": 0 if params.qk_norms is None else NORM_FORMS[weight_offset],
        "BLOCK_N": keys_at_once,
        **pdl_options(),
        "num_warps": warps,
        "num_stages": stages,
    }
    if splits is None:
        static = {"PROMPT_LENGTH": PROMPT_LENGTH, "RESPONSE_LENGTH": RESPONSE_LENGTH}
        static |= {"PREFETCH_BLOCKS": prefetch, "NUM_PREFETCHES": 32 * warps}
        batch = (state.state, state.batch_indices, state.block_tables, state.state.shape[1])
        _attend_rows[(rows, num_kv_heads)](qkv, out, *tensors, *batch, *scalars, **static, **options)
        return out
    num_splits = len(splits)
    split_outputs = torch.empty(num_splits, num_heads, head_dim, device=qkv.device)
    split_sums = torch.empty(num_splits, num_heads, 2, device=qkv.device)
    split_tensors = (state.block_tables, splits, state.finished_splits)
    _attend_splits[(num_kv_heads, num_splits)](
        qkv, out, split_outputs, split_sums, *tensors, *split_tensors, *scalars, SPLIT_FIELDS=SPLIT_FIELDS, **options
    )
    return out


def split_tile(programs: int, key_bytes: int) -> tuple[int, int, int, int]:
    """Return the keys that a program reads at once, warps, stages, and how many programs run on a multiprocessor."""
    half = BLOCK_SIZE // 2
    if key_bytes > 128:
        if programs >= MANY_PROGRAMS and key_bytes <= 256:
            return half, 2, 5, 6
        return BLOCK_SIZE, 4, 3, 4 if key_bytes <= 256 else 2
    return (half, 1, 5, 12) if programs >= MANY_PROGRAMS else (BLOCK_SIZE, 1, 3, 8)


def row_tile(programs: int, key_bytes: int) -> tuple[int, int, int, int]:
    """Return the same for programs that read whole rows; the last number is the blocks that each prefetches."""
    prefetch = 1 if key_bytes % 16 == 0 else 0
    if key_bytes > 256:
        return BLOCK_SIZE, 4, 3, 0
    if key_bytes > 128:
        return BLOCK_SIZE // 2 if programs >= MANY_PROGRAMS else BLOCK_SIZE, 2, 3, prefetch
    return (BLOCK_SIZE // 2, 1, 3, prefetch) if programs >= MANY_PROGRAMS else (BLOCK_SIZE, 1, 5, prefetch)


@triton.jit
def _attend_rows(
    qkv, out, cos, sin, q_weight, k_weight, keys, values, state, batch_indices, block_tables, num_columns, row_stride,
    max_blocks, eps, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, PROMPT_LENGTH: tl.constexpr, RESPONSE_LENGTH: tl.constexpr,
    NORM_FORM: tl.constexpr, BLOCK_N: tl.constexpr, PREFETCH_BLOCKS: tl.constexpr, NUM_PREFETCHES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per row and KV head; it computes all query heads that share the KV head."""
    row, head = tl.program_id(0), tl.program_id(1)
    batch_index = tl.load(batch_indices + row)
    prompt_length = tl.load(state + PROMPT_LENGTH * num_columns + batch_index).to(tl.int32)
    length = tl.load(state + RESPONSE_LENGTH * num_columns + batch_index).to(tl.int32)
    rope = _load_rope(cos, sin, prompt_length + length, HEAD_DIM, BLOCK_D)
    end = (prompt_length + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE + length
    block_table = block_tables + batch_index * max_blocks
    if PDL and PREFETCH_BLOCKS:
        _prefetch_blocks(
            block_table, keys, values, end, head, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, PREFETCH_BLOCKS, NUM_PREFETCHES
        )
    wait_for_inputs(PDL)
    qkv_row, tensors = qkv + row * row_stride, (q_weight, k_weight, eps, rope, keys, values, block_table)
    _, denominator, acc = _attend_range(
        qkv_row, tensors, prompt_length, length, 0, end, True, head, scale,
        NUM_KV_HEADS, GROUP_SIZE, BLOCK_Q, HEAD_DIM, BLOCK_D, BLOCK_SIZE, NORM_FORM, BLOCK_N,
    )  # fmt: skip
    _write_output(out, row, acc, denominator, head, NUM_KV_HEADS, GROUP_SIZE, BLOCK_Q, HEAD_DIM, BLOCK_D)


@triton.jit
def _attend_splits(
    qkv, out, split_outputs, split_sums, cos, sin, q_weight, k_weight, keys, values, block_tables, splits,
    finished_splits, row_stride, max_blocks, eps, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM_FORM: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per KV head and split. The last split of a row includes its new token."""
    wait_for_inputs(PDL)
    head, fields = tl.program_id(0), splits + tl.program_id(1) * SPLIT_FIELDS
    row, batch_index = tl.load(fields), tl.load(fields + 1)
    prompt_length, length = tl.load(fields + 2), tl.load(fields + 3)
    split, count, before, size = tl.load(fields + 4), tl.load(fields + 5), tl.load(fields + 6), tl.load(fields + 7)
    if row < 0:
        return
    rope = _load_rope(cos, sin, prompt_length + length, HEAD_DIM, BLOCK_D)
    first, end = split * size, (prompt_length + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE + length
    block_table = block_tables + batch_index * max_blocks
    qkv_row, tensors = qkv + row * row_stride, (q_weight, k_weight, eps, rope, keys, values, block_table)
    max_score, denominator, acc = _attend_range(
        qkv_row, tensors, prompt_length, length, first, tl.minimum(end, first + size), split == count - 1, head, scale,
        NUM_KV_HEADS, GROUP_SIZE, BLOCK_Q, HEAD_DIM, BLOCK_D, BLOCK_SIZE, NORM_FORM, BLOCK_N,
    )  # fmt: skip
    if count > 1:
        d, q_head = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_Q)
        is_head = q_head < GROUP_SIZE
        first_split = (before * NUM_KV_HEADS + head) * GROUP_SIZE + q_head
        this_split = first_split + split * NUM_KV_HEADS * GROUP_SIZE
        output = split_outputs + this_split[:, None] * HEAD_DIM + d[None, :]
        tl.store(output, acc, head_dim_mask(is_head, HEAD_DIM, BLOCK_D))
        tl.store(split_sums + this_split * 2, max_score, is_head)
        tl.store(split_sums + this_split * 2 + 1, denominator, is_head)
        tl.debug_barrier()
        if tl.atomic_add(finished_splits + row * NUM_KV_HEADS + head, 1) < count - 1:
            return
        tl.store(finished_splits + row * NUM_KV_HEADS + head, 0)
        denominator, acc = _merge_splits(
            split_outputs,
            split_sums,
            first_split,
            is_head,
            count,
            NUM_KV_HEADS * GROUP_SIZE,
            BLOCK_Q,
            HEAD_DIM,
            BLOCK_D,
        )
    _write_output(out, row, acc, denominator, head, NUM_KV_HEADS, GROUP_SIZE, BLOCK_Q, HEAD_DIM, BLOCK_D)


@triton.jit
def _load_rope(cos, sin, position, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    at = position * HEAD_DIM + d
    return tl.load(cos + at, d < HEAD_DIM, other=0.0), tl.load(sin + at, d < HEAD_DIM, other=0.0)


@triton.jit
def _write_output(
    out, row, acc, denominator, head, NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    d, q_head = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_Q)
    to = out + ((row * NUM_KV_HEADS + head) * GROUP_SIZE + q_head)[:, None] * HEAD_DIM + d[None, :]
    result = (acc / denominator[:, None]).to(out.dtype.element_ty)
    tl.store(to, result, head_dim_mask(q_head < GROUP_SIZE, HEAD_DIM, BLOCK_D))


@triton.jit
def _attend_range(
    qkv_row, tensors, prompt_length, length, first, end, has_new_token, head, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM_FORM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend to the slots first … end of a row; return the maximum score, the softmax denominator, and Σ p·v.

    Slots count from the first block on. The last block of the prompt may be partly empty, because response tokens
    begin in a new block. The range that ends the row includes the new token.
    """
    q_weight, k_weight, eps, rope, keys, values, block_table = tensors
    q_head, response_start = tl.arange(0, BLOCK_Q), (prompt_length + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    q_ptr = qkv_row + (head * GROUP_SIZE + q_head) * HEAD_DIM
    q = _norm_and_rope(q_ptr, q_head < GROUP_SIZE, q_weight, eps, rope, HEAD_DIM, BLOCK_D, NORM_FORM)
    max_score, denominator, acc = _empty_softmax(BLOCK_Q, BLOCK_D)
    if has_new_token:
        block = tl.load(block_table + (response_start + length) // BLOCK_SIZE).to(tl.int64)
        slot = ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + length % BLOCK_SIZE) * HEAD_DIM
        k_ptr = qkv_row + (NUM_KV_HEADS * GROUP_SIZE + head) * HEAD_DIM
        max_score, v = _write_new_token(
            q, k_ptr, keys + slot, values + slot, k_weight, eps, rope, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, NORM_FORM
        )
        denominator, acc = denominator + 1.0, acc + v
    key_range = (block_table, keys, values, first, end, prompt_length, response_start, head, scale)
    return _attend_cached(
        q, key_range, max_score, denominator, acc, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_Q, BLOCK_N
    )


@triton.jit
def _write_new_token(
    q, k_ptr, key, value, weight, eps, rope,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NORM_FORM: tl.constexpr,
):  # fmt: skip
    """Write the new token's rotated key and its value to the cache; return the scores q·k and the value."""
    zero, d = tl.arange(0, 1), tl.arange(0, BLOCK_D)
    mask = head_dim_mask(zero < 1, HEAD_DIM, BLOCK_D)
    k = _norm_and_rope(k_ptr + zero, zero < 1, weight, eps, rope, HEAD_DIM, BLOCK_D, NORM_FORM)
    v = tl.load(k_ptr + NUM_KV_HEADS * HEAD_DIM + d, d < HEAD_DIM, other=0.0)[None, :]
    tl.store(key + d[None, :], k, mask)
    tl.store(value + d[None, :], v, mask)
    return tl.sum(q.to(tl.float32) * k.to(tl.float32), 1), v.to(tl.float32)


@triton.jit
def _prefetch_blocks(
    block_table, keys, values, end, head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PREFETCH_BLOCKS: tl.constexpr, NUM_PREFETCHES: tl.constexpr,
):  # fmt: skip
    """Prefetch the first blocks of a row into the L2 cache, in one piece per thread."""
    PIECES: tl.constexpr = NUM_PREFETCHES // PREFETCH_BLOCKS
    ELEMENTS: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    i = tl.arange(0, NUM_PREFETCHES)
    block = tl.load(block_table + tl.minimum(i // PIECES, tl.maximum(end - 1, 0) // BLOCK_SIZE)).to(tl.int64)
    at = (block * NUM_KV_HEADS + head) * ELEMENTS + i % PIECES * (ELEMENTS // PIECES)
    num_bytes = tl.zeros_like(i) + ELEMENTS // PIECES * (keys.dtype.element_ty.primitive_bitwidth // 8)
    prefetch_l2(keys + at, num_bytes)
    prefetch_l2(values + at, num_bytes)


@triton.jit
def head_dim_mask(is_row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Mask of `[row BLOCK_D]`: the first HEAD_DIM columns of the rows in use. BLOCK_D is a power of 2."""
    if HEAD_DIM == BLOCK_D:
        return is_row[:, None]
    else:
        return is_row[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]


@triton.jit
def _empty_softmax(BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr):
    """Maximum score, denominator and Σ p·v of a softmax over no keys."""
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    return tl.full((BLOCK_Q,), -1e30, tl.float32), tl.zeros((BLOCK_Q,), tl.float32), acc


@triton.jit
def _merge_splits(
    split_outputs, split_sums, first_split, is_head, count,
    SPLIT_STRIDE: tl.constexpr, BLOCK_Q: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a row by their softmax denominators; four independent reads are in flight at a time."""
    d, mask = tl.arange(0, BLOCK_D), head_dim_mask(is_head, HEAD_DIM, BLOCK_D)
    max_score, denominator, acc = _empty_softmax(BLOCK_Q, BLOCK_D)
    for start in range(0, count, 4):
        for i in tl.static_range(4):
            split, is_split = first_split + (start + i) * SPLIT_STRIDE, is_head & (start + i < count)
            split_max = tl.load(split_sums + split * 2, is_split, other=-1e30, cache_modifier=".cg")
            split_sum = tl.load(split_sums + split * 2 + 1, is_split, other=0.0, cache_modifier=".cg")
            output = split_outputs + split[:, None] * HEAD_DIM + d[None, :]
            split_acc = tl.load(output, mask & (start + i < count), other=0.0, cache_modifier=".cg")
            new_max = tl.maximum(max_score, split_max)
            split_scale, decay = tl.exp2(split_max - new_max), tl.exp2(max_score - new_max)
            acc = acc * decay[:, None] + split_scale[:, None] * split_acc
            denominator = denominator * decay + split_sum * split_scale
            max_score = new_max
    return denominator, acc


@triton.jit
def _attend_cached(
    q, key_range, max_score, denominator, acc,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Continue an online softmax (in powers of 2) over the cached keys; scores are scaled in the exponent.

    Scores of slots that hold no key are masked, and so are their values: 0 times an uninitialized value might not be 0.
    Sums are kept per column of the tile and reduced at the end.
    """
    block_table, keys, values, first, end, prompt_length, response_start, head, scale = key_range
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    offsets, sums = n[:, None] * HEAD_DIM + d[None, :], tl.zeros((BLOCK_Q, BLOCK_N), tl.float32)
    for start in range(first, end, BLOCK_N):
        is_key = n < tl.where(start < response_start, prompt_length, end) - start
        block = tl.load(block_table + start // BLOCK_SIZE).to(tl.int64)
        at = ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + start % BLOCK_SIZE) * HEAD_DIM
        if HEAD_DIM == BLOCK_D:
            k = tl.load(keys + at + offsets)
        else:
            k = tl.load(keys + at + offsets, (d < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(values + at + offsets, head_dim_mask(is_key, HEAD_DIM, BLOCK_D), other=0.0)
        scores = tl.where(is_key[None, :], tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
        new_max = tl.maximum(max_score, tl.max(scores, 1))
        p, decay = tl.exp2(scores * scale - (new_max * scale)[:, None]), tl.exp2((max_score - new_max) * scale)
        acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        denominator, sums, max_score = denominator * decay, sums * decay[:, None] + p, new_max
    return max_score * scale, denominator + tl.sum(sums, 1), acc


@triton.jit
def _norm_and_rope(
    ptr, is_row, weight, eps, rope, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NORM_FORM: tl.constexpr
):  # fmt: skip
    """Load heads, apply RMSNorm if NORM_FORM is set, then RoPE: x·cos + [−second half, first half]·sin."""
    cos, sin = rope
    d = tl.arange(0, BLOCK_D)
    other, mask = (d + HEAD_DIM // 2) % HEAD_DIM, head_dim_mask(is_row, HEAD_DIM, BLOCK_D)
    x = tl.load(ptr[:, None] + d[None, :], mask, other=0.0)
    y = tl.load(ptr[:, None] + other[None, :], mask, other=0.0)
    dtype = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if NORM_FORM:
        rstd = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x_weight = tl.load(weight + d, d < HEAD_DIM, other=0.0)[None, :].to(tl.float32)
        y_weight = tl.load(weight + other)[None, :].to(tl.float32)
        x = scale_by_weight(x * rstd, x_weight, dtype, NORM_FORM).to(dtype).to(tl.float32)
        y = scale_by_weight(y * rstd, y_weight, dtype, NORM_FORM).to(dtype).to(tl.float32)
    cos, sin = cos.to(tl.float32)[None, :], sin.to(tl.float32)[None, :]
    return (x * cos + tl.where(d[None, :] < HEAD_DIM // 2, -y, y) * sin).to(dtype)

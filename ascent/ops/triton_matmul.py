"""Matmuls of few rows with a weight matrix, in Triton: `linear` and `gated_linear` of decode_ops.py in a decode step.

    linear         x·Wᵀ + b
    gated_linear   act(x·W_gateᵀ) · x·W_upᵀ

Such a matmul is bound by latency and memory bandwidth. So programs are many and small, the sum over a long row of the
matrix is split among several programs (split-K; the RMSNorm after the matmul adds the partial sums), gate and up are
combined inside one program, and a kernel is launched before its predecessor ends (programmatic dependent launch).
"""

# mypy: disallow-untyped-defs=False, disallow-any-generics=False
from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

FEW_ROWS, SOME_ROWS = 16, 64
"""Up to FEW_ROWS rows a matmul takes as long as reading its matrix; up to SOME_ROWS nearly so."""
MAX_MULTIPLICATIONS, LARGE_MATRIX, MAX_MATRIX = 1e9, 4e6, 3e7
"""Limits up to which these kernels beat cuBLAS: multiplications of a matmul with at most LARGE_MATRIX weights, and
weights of a matmul with at most SOME_ROWS rows."""
WIDE_OUTPUT, MIN_WIDE_DEPTH = 390_000, 1024
"""Numbers in the output, and in a sum, from which on a program computes 128 columns."""
NUM_SMS = 132
"""Programs that run at once if each takes most of a multiprocessor's memory: the multiprocessors of an H100 or H200."""
MAX_SPLITS, MIN_SPLIT_DEPTH = 8, 512
"""Limits of split-K: the number of splits, and the numbers in the partial sum of each."""
MIN_CUBLAS_SPLIT_DEPTH = 4096
"""Numbers in a sum from which on cuBLAS uses split-K."""
MAX_PREFETCHED_WEIGHTS = 4_000_000
"""Larger matrices gain nothing from a prefetch."""
MIN_SHARED_MEMORY = 200 * 1024
"""Bytes of shared memory that a program may take."""


@cache
def pdl_options() -> dict[str, Any]:
    """Return launch options for programmatic dependent launch: the kernel may start before its predecessor ends.

    Such a kernel calls `wait_for_inputs` itself. Supported from Hopper on.
    """
    supported = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    return {"PDL": True, "launch_pdl": True} if supported else {"PDL": False}


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Allow the next kernel to launch, and wait until all previous kernels have completed.

    Before this call a kernel may read only what no other kernel of a step writes: parameters, tables, and keys of
    earlier steps.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch_l2(at, num_bytes):
    """Prefetch `num_bytes` bytes from each of these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [at.to(tl.int64), num_bytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


class Tile(NamedTuple):
    """The tile of one program: BLOCK_M rows and BLOCK_N columns of the output, BLOCK_K numbers of the sum at a time."""

    block_m: int
    block_n: int
    block_k: int
    splits: int = 1
    """Programs that share one sum (split-K)."""
    stages: int = 4
    """Reads in flight at once."""


def choose_tile(x: Tensor, weight: Tensor, gate: bool = False, split_k: bool = False) -> Tile | None:
    """Return the tile for this matmul, or None if cuBLAS is as fast or the tensors cannot be read in tiles."""
    if x.dtype not in (torch.bfloat16, torch.float16) or not _has_enough_shared_memory():
        return None
    if any(t.stride(1) != 1 or t.stride(0) % 8 or t.data_ptr() % 16 for t in (x, weight)):
        return None
    width, depth = weight.shape
    return choose_tile_for_shape(len(x), width, depth, gate, split_k)


@cache
def _has_enough_shared_memory() -> bool:
    if not pdl_options()["PDL"]:
        return False
    shared_memory = getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", 0)
    return bool(shared_memory >= MIN_SHARED_MEMORY)


def choose_tile_for_shape(rows: int, width: int, depth: int, gate: bool, split_k: bool) -> Tile | None:
    """Return the tile of a matmul that is faster than cuBLAS with it, measured on an H200.

    Where there are more programs than multiprocessors, each has fewer reads in flight.
    """
    if width * depth > LARGE_MATRIX:
        return _choose_tile_for_large_matrix(rows, width, depth, gate, split_k)
    if rows * width * depth > MAX_MULTIPLICATIONS:
        return None
    width //= 2 if gate else 1
    few = rows <= SOME_ROWS
    block_m = (16 if rows <= FEW_ROWS else 32) if few else 64
    block_n = 128 if not few and not gate and depth >= MIN_WIDE_DEPTH and rows * width >= WIDE_OUTPUT else 64
    programs = triton.cdiv(rows, block_m) * triton.cdiv(width, block_n)
    max_programs = NUM_SMS if few or block_n == 128 else 2 * NUM_SMS
    splits = max(1, min(MAX_SPLITS, depth // MIN_SPLIT_DEPTH, max_programs // programs)) if split_k else 1
    crowded = programs * splits > NUM_SMS
    if gate:
        return Tile(block_m, block_n, 64 if crowded and not few else 128)
    if few:
        return Tile(block_m, block_n, 128, splits, 6 if depth // splits >= 768 else 4)
    return Tile(block_m, block_n, 128, splits, 3 if crowded else 4)


def _choose_tile_for_large_matrix(rows: int, width: int, depth: int, gate: bool, split_k: bool) -> Tile | None:
    """Return a tile with all rows in one program, if programs then cover most multiprocessors."""
    few = rows <= FEW_ROWS
    if width * depth > MAX_MATRIX or not (few or (rows <= SOME_ROWS and (gate or split_k))):
        return None
    block_m = 16 if few else 32 if rows <= 32 else 64
    programs = triton.cdiv(width // (2 if gate else 1), 64)
    splits = max(1, min(MAX_SPLITS, depth // MIN_SPLIT_DEPTH, NUM_SMS // programs)) if split_k else 1
    if programs * splits <= NUM_SMS // 2:
        return None
    return Tile(block_m, 64, 64, 1, 4 if few else 3) if gate else Tile(block_m, 64, 128, splits, 6 if few else 4)


def cublas_split_k(x: Tensor, weight: Tensor) -> Tensor | None:
    """Return x·Wᵀ by cuBLAS as partial sums, float32 `[split row column]`, without a kernel that adds them.

    None where that gains nothing.
    """
    (rows, depth), count = x.shape, 4 if len(x) <= 256 else 2
    is_faster = SOME_ROWS < rows <= 1024 and depth >= MIN_CUBLAS_SPLIT_DEPTH and weight.numel() <= MAX_MATRIX
    if not is_faster or not x.is_cuda or x.dtype == torch.float32 or depth % (8 * count) or not x.is_contiguous():
        return None
    left, right = x.view(rows, count, -1).transpose(0, 1), weight.view(len(weight), count, -1).permute(1, 2, 0)
    return torch.bmm(left, right, out_dtype=torch.float32)


def tiled_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, gate: str | None = None) -> Tensor:
    """Return x·Wᵀ + b, or with several splits the partial sums, float32 `[split row column]`."""
    (rows, depth), width = x.shape, len(weight) // (2 if gate else 1)
    split_depth = triton.cdiv(triton.cdiv(depth, tile.splits), tile.block_k) * tile.block_k
    splits = triton.cdiv(depth, split_depth)  # rounding up may leave the last splits empty: drop them
    out = x.new_empty(rows, width) if splits == 1 else x.new_empty(splits, rows, width, dtype=torch.float32)
    x_tiles = TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k])
    weight_tiles = TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k])
    _matmul[(triton.cdiv(rows, tile.block_m), triton.cdiv(width, tile.block_n), splits)](
        *(x_tiles, weight_tiles, weight, weight if bias is None else bias, out, rows, width, depth, split_depth),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        BIAS=bias is not None,
        GATE={None: 0, "silu": 1, "gelu": 2}[gate],
        SWAP=tile.block_m < 64,
        PREFETCH=weight.numel() <= MAX_PREFETCHED_WEIGHTS,
        **pdl_options(),
        num_warps=4,
        num_stages=tile.stages,
    )
    return out


@triton.jit
def _matmul(
    x, weight, weight_ptr, bias, out, rows, width, depth, split_depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, SWAP: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of the output. `x` and `weight` are tensor descriptors, which read zeros beyond the end."""
    split = tl.program_id(2)
    first_row, first_column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    first_k = split * split_depth
    row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    mask = column < width
    gate_sum, up_sum = _initial_sums(bias, column, width, split, BLOCK_M, BLOCK_N, BIAS, GATE > 0, SWAP)
    if PDL and PREFETCH:  # noqa: SIM102 (the first condition is evaluated when the kernel is compiled)
        if first_row == 0:
            line = weight_ptr + tl.minimum(column, width - 1).to(tl.int64) * depth + first_k
            num_bytes = tl.zeros_like(column) + (tl.minimum(first_k + split_depth, depth) - first_k) * 2
            prefetch_l2(line, num_bytes)
            if GATE:
                prefetch_l2(line + width * depth, num_bytes)
    wait_for_inputs(PDL)
    for k in range(first_k, first_k + split_depth, BLOCK_K):
        a = x.load([first_row, k])
        gate_sum = _add_dot(a, weight.load([first_column, k]), gate_sum, SWAP)
        if GATE:
            up_sum = _add_dot(a, weight.load([width + first_column, k]), up_sum, SWAP)
    if SWAP:
        gate_sum, up_sum = gate_sum.T, up_sum.T
    if GATE:
        dtype = out.dtype.element_ty
        result = act_and_mul(gate_sum.to(dtype), up_sum.to(dtype), GATE == 2)
    else:
        result = gate_sum.to(out.dtype.element_ty)
    to = out + (split * rows + row).to(tl.int64)[:, None] * width + column[None, :]
    tl.store(to, result, (row < rows)[:, None] & mask[None, :])


@triton.jit
def _add_dot(a, b, total, SWAP: tl.constexpr):
    """Return total + a·bᵀ, or its transpose, because tensor cores need at least 64 rows on the left side."""
    if SWAP:
        return tl.dot(b, a.T, total, input_precision="ieee")
    else:
        return tl.dot(a, b.T, total, input_precision="ieee")


@triton.jit
def _initial_sums(
    bias, column, width, split, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    """Initial values of the two sums, `[row column]` or transposed: the bias in the first split, else 0."""
    gate_sum, up_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if BIAS:
        mask = (column < width) & (split == 0)
        gate_sum += tl.load(bias + column, mask, other=0.0).to(tl.float32)[None, :]
        if GATE:
            up_sum += tl.load(bias + width + column, mask, other=0.0).to(tl.float32)[None, :]
    if SWAP:
        gate_sum, up_sum = gate_sum.T, up_sum.T
    return gate_sum, up_sum


@triton.jit
def act_and_mul(gate, up, GELU: tl.constexpr):
    """silu(gate)·up; with GELU ½·gate·(1 + tanh z) = gate/(1 + e^(−2z)), z = √(2/π)·(gate + 0.044715·gate³)."""
    wide = gate.to(tl.float32)
    z = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide) if GELU else wide
    return ((wide / (1 + tl.exp(-z))).to(gate.dtype).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)

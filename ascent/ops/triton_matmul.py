"""Few rows times a matrix of the model, in Triton: the products of a decoding step, `linear` and `gated_linear` in
sampling/step.py.

Such a product is short: what it waits for counts, not what it computes. So programs are many and small, the sum over a
long row of the matrix is shared out among several (the norm behind the product adds them up), gate and up meet inside
one program, and a kernel is launched while the one before it still runs (`early`).
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

FEW, SOME = 16, 64
"""Rows that are few: then a product takes as long as its matrix takes to be read; and some, where that is nearly so."""
WORK, LARGE, LARGEST = 1e9, 4e6, 3e7
"""Multiplications, numbers in a matrix, and such numbers with some rows, up to which our products are the shorter."""
WIDE, DEEP = 390_000, 1024
"""Numbers in the output, and in a sum, from which on a program computes 128 columns."""
PLACES = 132
"""Programs that run at once, if each takes most of a multiprocessor's memory."""
MOST_PARTS, SHARE = 8, 512
"""The most parts of a sum, and the least numbers in one."""
LONG = 4096
"""Numbers in a sum from which on cuBLAS computes it in parts."""
FETCHED = 4_000_000
"""Numbers in a matrix that is asked for before it is read, at most: a larger one comes as fast without."""
MEMORY = 200 * 1024
"""Bytes of shared memory that a program may take."""


@cache
def early() -> dict[str, Any]:
    """How to launch a kernel that may begin while the one before it runs: it waits itself (`await_inputs`)."""
    there = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if there else {"EARLY": False}


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """Let the next kernel be launched, and wait until all before this one are complete.

    Before it a kernel may read what no other kernel of a step writes: parameters, tables, and keys of earlier steps.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch(at, size):
    """Ask for `size` bytes from each of these addresses on: they are in the card's cache when they are read."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [at.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


class Tile(NamedTuple):
    """What one program computes: rows and columns of the output, and how much of the sum it adds at a time."""

    rows: int
    width: int
    depth: int
    splits: int = 1
    """Programs among which a sum is shared out."""
    stages: int = 4
    """Reads that are under way at once."""


def tile_for(x: Tensor, weight: Tensor, gate: bool = False, parts: bool = False) -> Tile | None:
    """How to compute this product here; None: cuBLAS is as fast, or these tensors cannot be read in tiles."""
    if x.dtype not in (torch.bfloat16, torch.float16) or not _roomy():
        return None
    if any(t.stride(1) != 1 or t.stride(0) % 8 or t.data_ptr() % 16 for t in (x, weight)):
        return None
    width, depth = weight.shape
    return tile_of(len(x), width, depth, gate, parts)


@cache
def _roomy() -> bool:
    if not early()["EARLY"]:
        return False
    return bool(getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", 0) >= MEMORY)


def tile_of(rows: int, width: int, depth: int, gate: bool, parts: bool) -> Tile | None:
    """The tile of a product that is shorter so than by cuBLAS, measured on an H200 (docs/performance.md).

    A program reads far ahead. Where there are more of them than places for such programs, each reads less far.
    """
    if width * depth > LARGE:
        return _tile_of_large(rows, width, depth, gate, parts)
    if rows * width * depth > WORK:
        return None
    width //= 2 if gate else 1
    few = rows <= SOME
    high = (16 if rows <= FEW else 32) if few else 64
    wide = 128 if not few and not gate and depth >= DEEP and rows * width >= WIDE else 64
    programs = triton.cdiv(rows, high) * triton.cdiv(width, wide)
    places = PLACES if few or wide == 128 else 2 * PLACES
    splits = max(1, min(MOST_PARTS, depth // SHARE, places // programs)) if parts else 1
    crowded = programs * splits > PLACES
    if gate:
        return Tile(high, wide, 64 if crowded and not few else 128)
    if few:
        return Tile(high, wide, 128, splits, 6 if depth // splits >= 768 else 4)
    return Tile(high, wide, 128, splits, 3 if crowded else 4)


def _tile_of_large(rows: int, width: int, depth: int, gate: bool, parts: bool) -> Tile | None:
    """Of a matrix that takes long to be read: all rows in one program, and programs on most multiprocessors."""
    few = rows <= FEW
    if width * depth > LARGEST or not (few or (rows <= SOME and (gate or parts))):
        return None
    high, programs = 16 if few else 32 if rows <= 32 else 64, triton.cdiv(width // (2 if gate else 1), 64)
    splits = max(1, min(MOST_PARTS, depth // SHARE, PLACES // programs)) if parts else 1
    if programs * splits <= PLACES // 2:
        return None
    return Tile(high, 64, 64, 1, 4 if few else 3) if gate else Tile(high, 64, 128, splits, 6 if few else 4)


def in_parts(x: Tensor, weight: Tensor) -> Tensor | None:
    """x·Wᵀ by cuBLAS, the sum in parts, float32 `[part row column]`: what it does itself, less the pass that adds.

    None where that gains nothing.
    """
    (rows, depth), count = x.shape, 4 if len(x) <= 256 else 2
    measured = SOME < rows <= 1024 and depth >= LONG and weight.numel() <= LARGEST
    if not measured or not x.is_cuda or x.dtype == torch.float32 or depth % (8 * count) or not x.is_contiguous():
        return None
    left, right = x.view(rows, count, -1).transpose(0, 1), weight.view(len(weight), count, -1).permute(1, 2, 0)
    return torch.bmm(left, right, out_dtype=torch.float32)


def tiled_product(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, gate: str | None = None) -> Tensor:
    """x·Wᵀ + b. With several splits, what is to be added up: float32 `[split row column]`."""
    (rows, depth), width = x.shape, len(weight) // (2 if gate else 1)
    share = triton.cdiv(triton.cdiv(depth, tile.splits), tile.depth) * tile.depth
    splits = triton.cdiv(depth, share)  # the last one begins before the end
    out = x.new_empty(rows, width) if splits == 1 else x.new_empty(splits, rows, width, dtype=torch.float32)
    of_x = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
    of_weight = TensorDescriptor.from_tensor(weight, [tile.width, tile.depth])
    _product[(triton.cdiv(rows, tile.rows), triton.cdiv(width, tile.width), splits)](
        *(of_x, of_weight, weight, weight if bias is None else bias, out, rows, width, depth, share),
        ROWS=tile.rows,
        WIDTH=tile.width,
        DEPTH=tile.depth,
        BIAS=bias is not None,
        GATE={None: 0, "silu": 1, "gelu": 2}[gate],
        SWAP=tile.rows < 64,
        FETCH=weight.numel() <= FETCHED,
        **early(),
        num_warps=4,
        num_stages=tile.stages,
    )
    return out


@triton.jit
def _product(
    x, weight, matrix, bias, out, rows, width, depth, share,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, SWAP: tl.constexpr, FETCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`x` and `weight` are read in tiles, with zeros past their ends; `matrix` is the place of `weight`."""
    part = tl.program_id(2)
    at_row, at, begun = tl.program_id(0) * ROWS, tl.program_id(1) * WIDTH, part * share
    row, i = at_row + tl.arange(0, ROWS), at + tl.arange(0, WIDTH)
    inside = i < width
    first, second = _sums(bias, i, width, part, ROWS, WIDTH, BIAS, GATE > 0, SWAP)
    if EARLY and FETCH:  # noqa: SIM102 (the first is decided when this is compiled)
        if at_row == 0:
            line = matrix + tl.minimum(i, width - 1).to(tl.int64) * depth + begun
            size = tl.zeros_like(i) + (tl.minimum(begun + share, depth) - begun) * 2
            fetch(line, size)
            if GATE:
                fetch(line + width * depth, size)
    await_inputs(EARLY)
    for k in range(begun, begun + share, DEPTH):
        a = x.load([at_row, k])
        first = _added(a, weight.load([at, k]), first, SWAP)
        if GATE:
            second = _added(a, weight.load([width + at, k]), second, SWAP)
    if SWAP:
        first, second = first.T, second.T
    if GATE:
        dtype = out.dtype.element_ty
        result = active(first.to(dtype), second.to(dtype), GATE == 2)
    else:
        result = first.to(out.dtype.element_ty)
    to = out + (part * rows + row).to(tl.int64)[:, None] * width + i[None, :]
    tl.store(to, result, (row < rows)[:, None] & inside[None, :])


@triton.jit
def _added(a, b, total, SWAP: tl.constexpr):
    """total + a·bᵀ, or swapped: the card's matrix units take 64 rows of the left side, and few of the right."""
    if SWAP:
        return tl.dot(b, a.T, total, input_precision="ieee")
    else:
        return tl.dot(a, b.T, total, input_precision="ieee")


@triton.jit
def _sums(
    bias, i, width, part, ROWS: tl.constexpr, WIDTH: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    """Where a sum and a second one begin, `[row column]`, or swapped: at the bias, in the first part."""
    first, second = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)
    if BIAS:
        there = (i < width) & (part == 0)
        first += tl.load(bias + i, there, other=0.0).to(tl.float32)[None, :]
        if GATE:
            second += tl.load(bias + width + i, there, other=0.0).to(tl.float32)[None, :]
    if SWAP:
        first, second = first.T, second.T
    return first, second


@triton.jit
def active(gate, up, GELU: tl.constexpr):
    """silu(gate)·up; with GELU ½·gate·(1 + tanh z) = gate/(1 + e^(−2z)), z = √(2/π)·(gate + 0.044715·gate³)."""
    wide = gate.to(tl.float32)
    z = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide) if GELU else wide
    return ((wide / (1 + tl.exp(-z))).to(gate.dtype).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)

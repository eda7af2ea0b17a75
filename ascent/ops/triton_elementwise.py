"""SwiGLU and RoPE with their backward passes, in Triton; see `ElementwiseReference` in fused_layers.py.

swiglu   silu(g)·u
rope     [a, b] ↦ [a·cos − b·sin, b·cos + a·sin], where a and b are the halves of a head
"""

# mypy: disallow-untyped-defs=False, disallow-any-generics=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty_like(gate)
    _swiglu[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK=BLOCK)
    return out


@triton.jit
def _swiglu(gate, up, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    g, u = tl.load(gate + i, inside).to(tl.float32), tl.load(up + i, inside).to(tl.float32)
    tl.store(out + i, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), inside)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    _swiglu_backward[(triton.cdiv(gate.numel(), BLOCK),)](grad, gate, up, d_gate, d_up, gate.numel(), BLOCK=BLOCK)
    return d_gate, d_up


@triton.jit
def _swiglu_backward(grad, gate, up, d_gate, d_up, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    d, g = tl.load(grad + i, inside).to(tl.float32), tl.load(gate + i, inside).to(tl.float32)
    u, s = tl.load(up + i, inside).to(tl.float32), tl.sigmoid(g)
    tl.store(d_gate + i, (d * u * s * (1 + g * (1 - s))).to(d_gate.dtype.element_ty), inside)
    tl.store(d_up + i, (d * g * s).to(d_up.dtype.element_ty), inside)


def rope(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    """Return RoPE of x `[1 head position head_dim]` in the same shape; the memory layout is `[position head head_dim]`.

    `backward`: rotate by the negative angles, which is the gradient.
    """
    _, heads, positions, channel = x.shape
    out = x.new_empty(1, positions, heads, channel)
    x = x if x.stride(3) == 1 else x.contiguous()
    rows = 16
    _rope[(positions, triton.cdiv(heads, rows))](
        *(x, out, cos.contiguous(), sin.contiguous(), heads, x.stride(1), x.stride(2)),
        HALF=channel // 2,
        PLACES=triton.next_power_of_2(channel // 2),
        ROWS=rows,
        BACKWARD=backward,
        num_warps=2,
    )
    return out.transpose(1, 2)


@triton.jit
def _rope(
    x, out, cos, sin, heads, head_stride, position_stride,
    HALF: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, PLACES)
    inside = (h < heads)[:, None] & (c < HALF)[None, :]
    line = x + position * position_stride + h[:, None] * head_stride + c[None, :]
    a, b = tl.load(line, inside, other=0.0).to(tl.float32), tl.load(line + HALF, inside, other=0.0).to(tl.float32)
    at, there = position * 2 * HALF + c, c < HALF
    cos_a, cos_b = (
        tl.load(cos + at, there).to(tl.float32)[None, :],
        tl.load(cos + at + HALF, there).to(tl.float32)[None, :],
    )
    sin_a, sin_b = (
        tl.load(sin + at, there).to(tl.float32)[None, :],
        tl.load(sin + at + HALF, there).to(tl.float32)[None, :],
    )
    if BACKWARD:
        first, second = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    to = out + (position * heads + h[:, None]) * 2 * HALF + c[None, :]
    tl.store(to, first.to(out.dtype.element_ty), inside)
    tl.store(to + HALF, second.to(out.dtype.element_ty), inside)

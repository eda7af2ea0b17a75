"""AdamW with bfloat16 state and stochastic rounding, in Triton; see `ReferenceOps` in training/compact_adamw.py.

add    total ← round(total + grad)
step   one step of AdamW; the float32 weight is stored as a bfloat16 parameter and its lower 16 bits
"""

# mypy: disallow-untyped-defs=False, disallow-any-generics=False
from __future__ import annotations

from math import sqrt

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def add(total: Tensor, grad: Tensor, keys: tuple[int, int]) -> None:
    count = total.numel()
    _add[(triton.cdiv(count, BLOCK),)](total, grad, count, *map(_signed, keys), BLOCK=BLOCK)


def step(
    p: Tensor, low: Tensor, m: Tensor, v: Tensor, grad: Tensor, scale: Tensor, keys: tuple[int, int], step: int, group
) -> None:
    (beta1, beta2), lr, count = group["betas"], group["lr"], p.numel()
    _step[(triton.cdiv(count, BLOCK),)](
        *(p, low, m, v, grad, scale, count, *map(_signed, keys)),
        *(1 - beta1, beta2, 1 - beta2, 1 - lr * group["weight_decay"], lr / (1 - beta1**step)),
        *(sqrt(1 - beta2**step), group["eps"]),
        BLOCK=BLOCK,
    )


def _signed(key: int) -> int:
    """Return the same 32 bits as a signed integer, which Triton requires."""
    return key - 2**32 if key >= 2**31 else key


@triton.jit
def _random(i, key, other):
    x = i.to(tl.uint32) + key.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + other.to(tl.uint32, bitcast=True)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _round_to_bfloat16(x, random):
    bits = (x.to(tl.uint32, bitcast=True) + random) >> 16
    return tl.where(x == x, bits, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["key", "other"])
def _add(total, grad, count, key, other, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    both = tl.load(total + i, inside).to(tl.float32) + tl.load(grad + i, inside).to(tl.float32)
    tl.store(total + i, _round_to_bfloat16(both, _random(i, key, other) & 0xFFFF), inside)


@triton.jit(do_not_specialize=["key", "other", "rest1", "beta2", "rest2", "decay", "rate", "root", "eps"])
def _step(
    p, low, m, v, grad, scale, count, key, other, rest1, beta2, rest2, decay, rate, root, eps, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    high = tl.load(p + i, inside).to(tl.uint16, bitcast=True).to(tl.int32) << 16
    w = (high + tl.load(low + i, inside).to(tl.int32)).to(tl.float32, bitcast=True) * decay
    g = tl.load(grad + i, inside).to(tl.float32) * tl.load(scale)
    mean, square = tl.load(m + i, inside).to(tl.float32), tl.load(v + i, inside).to(tl.float32)
    mean += rest1 * (g - mean)
    square = beta2 * square + rest2 * g * g
    w -= rate * mean / (tl.sqrt(square) / root + eps)
    random = _random(i, key, other)
    tl.store(m + i, _round_to_bfloat16(mean, random & 0xFFFF), inside)
    tl.store(v + i, _round_to_bfloat16(square, random >> 16), inside)
    bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FC00000)
    near = (bits + 0x8000) >> 16
    tl.store(p + i, near.to(tl.int16).to(tl.bfloat16, bitcast=True), inside)
    tl.store(low + i, (bits - (near << 16)).to(tl.int16), inside)

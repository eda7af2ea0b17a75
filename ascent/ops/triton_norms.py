"""RMS norms in Triton: `add_norm` in sampling/step.py, and the part of it that attention has for queries and keys."""

# mypy: disallow-untyped-defs=False, disallow-any-generics=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascent.ops.paged_kv_cache import TensorPair
from ascent.ops.triton_matmul import await_inputs, early

FORMS = {None: 1, 0.0: 2, 1.0: 3}
"""Form of an RMSNorm for the kernels, by `NormParams.weight_offset`. 0: no norm."""


def normed_sum(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, weight_offset: float | None = None
) -> TensorPair:
    rows, width = x.shape
    normed, total = torch.empty_like(x, dtype=weight.dtype), x if y is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    warps = min(8, max(1, block // 256))
    apart, parts = (width, 0) if y is None else (y.stride(-2), len(y) if y.ndim == 3 else 1)
    how = {"BLOCK": block, "PARTS": parts, "FORM": FORMS[weight_offset], **early()}
    _add_norm[(rows,)](x, y, total, normed, weight, eps, width, apart, rows, **how, num_warps=warps)
    return total, normed


@triton.jit
def _add_norm(
    x, y, total, normed, weight, eps, width, apart, rows,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, FORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`apart`: from one row of y to the next. Several parts of y are added up and rounded first."""
    at, there = tl.program_id(0) * width, tl.program_id(0) * apart
    i = tl.arange(0, BLOCK)
    inside = i < width
    by = tl.load(weight + i, inside, other=0.0).to(tl.float32)
    await_inputs(EARLY)
    a = tl.load(x + at + i, inside, other=0.0)
    if PARTS:
        more = tl.load(y + there + i, inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            more += tl.load(y + part * rows * apart + there + i, inside, other=0.0)
        if PARTS > 1:
            more = more.to(normed.dtype.element_ty).to(tl.float32)
        a = (a.to(tl.float32) + more).to(a.dtype)
        tl.store(total + at + i, a, inside)
    wide = a.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide) / width + eps)
    tl.store(normed + at + i, times(scaled, by, a.dtype, FORM).to(normed.dtype.element_ty), inside)


@triton.jit
def times(normed, weight, dtype: tl.constexpr, FORM: tl.constexpr):
    """What is normed, times its weight, in one of the FORMS."""
    if FORM == 1:
        normed = normed.to(dtype).to(tl.float32)
    if FORM == 3:
        weight += 1.0
    return normed * weight

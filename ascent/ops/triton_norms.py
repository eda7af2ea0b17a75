"""RMSNorm with residual addition in Triton: `add_rms_norm` of decode_ops.py, and its scaling, which QK-norm shares.

s = x + residual,   out = w · s / √(mean s² + ε)
"""

# mypy: disallow-untyped-defs=False, disallow-any-generics=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascent.ops.paged_kv_cache import TensorPair
from ascent.ops.triton_matmul import pdl_options, wait_for_inputs

NORM_FORMS = {None: 1, 0.0: 2, 1.0: 3}
"""Form of an RMSNorm for the kernels, by `NormParams.weight_offset`. 0: no norm."""


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float | None = None
) -> TensorPair:
    """`residual` may be the partial sums of split-K, `[split row column]`."""
    rows, width = x.shape
    normed, total = torch.empty_like(x, dtype=weight.dtype), x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    row_stride, splits = 0, 0
    if residual is not None:
        row_stride, splits = residual.stride(-2), len(residual) if residual.ndim == 3 else 1
    _add_rms_norm[(rows,)](
        *(x, residual, total, normed, weight, eps, width, row_stride, rows),
        BLOCK=block,
        SPLITS=splits,
        NORM_FORM=NORM_FORMS[weight_offset],
        **pdl_options(),
        num_warps=min(8, max(1, block // 256)),
    )
    return total, normed


@triton.jit
def _add_rms_norm(
    x, residual, total, normed, weight, eps, width, row_stride, rows,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, NORM_FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per row. The partial sums of a split residual are added up and rounded first."""
    row, residual_row = tl.program_id(0) * width, tl.program_id(0) * row_stride
    i = tl.arange(0, BLOCK)
    mask = i < width
    w = tl.load(weight + i, mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    s = tl.load(x + row + i, mask, other=0.0)
    if SPLITS:
        addend = tl.load(residual + residual_row + i, mask, other=0.0).to(tl.float32)
        for split in tl.static_range(1, SPLITS):
            addend += tl.load(residual + split * rows * row_stride + residual_row + i, mask, other=0.0)
        if SPLITS > 1:
            addend = addend.to(normed.dtype.element_ty).to(tl.float32)
        s = (s.to(tl.float32) + addend).to(s.dtype)
        tl.store(total + row + i, s, mask)
    wide = s.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide) / width + eps)
    tl.store(normed + row + i, scale_by_weight(scaled, w, s.dtype, NORM_FORM).to(normed.dtype.element_ty), mask)


@triton.jit
def scale_by_weight(normed, weight, dtype: tl.constexpr, NORM_FORM: tl.constexpr):
    """Multiply x/RMS(x) by the weight, in one of the NORM_FORMS."""
    if NORM_FORM == 1:
        normed = normed.to(dtype).to(tl.float32)
    if NORM_FORM == 3:
        weight += 1.0
    return normed * weight

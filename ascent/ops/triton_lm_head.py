"""Log-probs and entropy of the LM head and the gradient of its logits, in Triton; see `LMHeadReference`.

With x = z·factor and p = softmax(x):

    log π(a) = x_a − log Σ e^x       H = log Σ e^x − Σ p·x
    ∂L/∂z = factor·(g_logp·(1_a − p) − g_H·p·(log p + H))
"""

# mypy: disallow-untyped-defs=False, disallow-any-generics=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

READ_BLOCK = 4096
"""Logits that a program of `_logprobs_and_entropy` reads at a time."""
WRITE_BLOCK = 2048
"""Logits of one program of `_logits_grad`."""


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a·b in float32; the addition happens inside the matmul kernel."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = hidden.dtype == torch.float32
    z = torch.mm(hidden, weight.t()) if wide else torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return z if bias is None else z.add_(bias)


def logprobs_and_entropy(z: Tensor, target: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    logp, entropy, log_z = (z.new_empty(z.shape[0]) for _ in range(3))
    _logprobs_and_entropy[(z.shape[0],)](
        z, target, logp, entropy, log_z, z.shape[1], factor, BLOCK=READ_BLOCK, num_warps=8
    )
    return logp, entropy, log_z


@triton.jit
def _logprobs_and_entropy(z, target, logp, entropy, log_z, vocab, factor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    line = z + row * vocab
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    mixed = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab, BLOCK):  # the largest x, Σ e^(x − it) and Σ e^(x − it)·x so far
        i = start + tl.arange(0, BLOCK)
        inside = i < vocab
        x = tl.load(line + i, inside, other=float("-inf")) * factor
        now = tl.maximum(top, tl.max(x))
        e, faded = tl.exp(x - now), tl.exp(top - now)
        total = total * faded + tl.sum(e)
        mixed = mixed * faded + tl.sum(tl.where(inside, e * x, 0.0))
        top = now
    sum_log = top + tl.log(total)
    tl.store(logp + row, tl.load(line + tl.load(target + row)) * factor - sum_log)
    tl.store(entropy + row, sum_log - mixed / total)
    tl.store(log_z + row, sum_log)


def logits_grad(
    z: Tensor, target: Tensor, log_z: Tensor, g_logp: Tensor, entropy_terms: tuple[Tensor, Tensor] | None,
    factor: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    out = torch.empty_like(z, dtype=dtype)
    g_entropy, entropy = entropy_terms or (log_z, log_z)
    _logits_grad[(z.shape[0], triton.cdiv(z.shape[1], WRITE_BLOCK))](
        *(z, out, target, log_z, g_logp.contiguous(), g_entropy.contiguous(), entropy, z.shape[1], factor),
        BLOCK=WRITE_BLOCK,
        WITH_ENTROPY=entropy_terms is not None,
        num_warps=4,
    )
    return out


@triton.jit
def _logits_grad(
    z, out, target, log_z, g_logp, g_entropy, entropy, vocab, factor, BLOCK: tl.constexpr, WITH_ENTROPY: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < vocab
    log_p = tl.load(z + row * vocab + i, inside, other=float("-inf")) * factor - tl.load(log_z + row)
    p = tl.exp(log_p)
    up = tl.load(g_logp + row)
    g = tl.where(i == tl.load(target + row), up, 0.0) - up * p
    if WITH_ENTROPY:
        bend = tl.load(g_entropy + row) * (log_p + tl.load(entropy + row))
        g -= tl.where(inside & (p > 0), bend * p, 0.0)
    tl.store(out + row * vocab + i, (g * factor).to(out.dtype.element_ty), inside)

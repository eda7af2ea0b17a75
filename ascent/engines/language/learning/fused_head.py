"""head.py's log-probs and entropies for half-precision models on a GPU: few passes over the logits, in float32.

A chunk's logits come out of the matrix product in float32, unrounded. The forward pass then reads them once, for all
of a token's numbers, and the backward pass computes them again and reads them once, writing the slope in half
precision for two more products. With x = z·factor, factor = scale/temperature:

    log π(a) = x_a − log Σ e^x       H = log Σ e^x − Σ p·x
    slope = factor·(g_logp·(1_a − p) − g_H·p·(log p + H))

The head's gradient is summed over chunks in float32. `Formulas` is what the kernels compute, for the tests on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fits(hidden: Tensor) -> bool:
    """Are there kernels for these hidden states?"""
    return hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16) and _kernels() is not None


def _kernels() -> Any:
    try:
        from ascent.engines.language.kernels import head as head_kernels
    except ImportError:
        return None
    return head_kernels


class FusedStats(torch.autograd.Function):
    """log π of the targets and entropy at each hidden state. `ops`: the kernels, or `Formulas`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunk: int, factor: float,
        entropy_gradient: bool, ops: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ops = ops or _kernels()
        found = []
        for part in _parts(len(hidden), chunk):
            z = ops.logits(hidden[part], weight, bias)
            found.append(ops.measure(z, target[part], factor))
        logp, entropy, log_z = (torch.cat(values) for values in zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, bias, target, entropy, log_z)
        ctx.options = (chunk, factor, entropy_gradient, ops)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, weight, bias, target, entropy, log_z = ctx.saved_tensors
        chunk, factor, entropy_gradient, ops = ctx.options
        g_logp, g_entropy = grads[0], grads[1] if entropy_gradient else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        g_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        g_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        g_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        for part in _parts(len(hidden), chunk):
            z = ops.logits(hidden[part], weight, bias)
            bent = None if g_entropy is None else (g_entropy[part], entropy[part])
            g = ops.slope(z, target[part], log_z[part], g_logp[part], bent, factor, weight.dtype)
            del z
            if g_hidden is not None:
                torch.mm(g, weight, out=g_hidden[part])
            if g_weight is not None:
                ops.add_product(g_weight, g.t(), hidden[part])
            if g_bias is not None:
                g_bias += g.sum(0, dtype=wide)
        narrow = (None if g is None else g.to(weight.dtype) for g in (g_weight, g_bias))
        return g_hidden, *narrow, None, None, None, None, None


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


class Formulas:
    """What the kernels compute, in plain torch."""

    @staticmethod
    def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
        total += a @ b

    @staticmethod
    def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(hidden, weight, bias)

    @staticmethod
    def measure(z: Tensor, target: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        """log π of the targets, entropies, and log Σ e^x."""
        x = z * factor
        log_z = torch.logsumexp(x, -1)
        log_p = x - log_z[:, None]
        return log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), log_z

    @staticmethod
    def slope(
        z: Tensor, target: Tensor, log_z: Tensor, g_logp: Tensor, bent: tuple[Tensor, Tensor] | None, factor: float,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        log_p = z * factor - log_z[:, None]
        p = log_p.exp()
        g = (torch.nn.functional.one_hot(target, z.shape[1]) - p) * g_logp[:, None]
        if bent is not None:
            g_entropy, entropy = bent
            g -= g_entropy[:, None] * p * (log_p + entropy[:, None])
        return (g * factor).to(dtype)

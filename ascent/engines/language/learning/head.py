"""Log-probs and entropies from a language-model head, a chunk of tokens at a time.

[tokens × vocabulary] never exists at once: the forward pass keeps one number a token, and the backward
pass computes a chunk's logits again. With z the logits at the sampling temperature:

    log π(a) = z_a − log Σ e^z            ∂ log π(a)/∂z = 1_a − p
    H = log Σ e^z − Σ p·z                 ∂H/∂z = −p·(z − Σ p·z)
    KL = Σ p·(log p − log p_ref)          ∂KL/∂z = p·(log p − log p_ref − KL)

All of it in float32 or better, whatever the hidden states are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.engines.language.learning.fused_head import FusedStats, fits

CHUNK_BYTES = {"cpu": 28 * 2**20, "cuda": 2**31}
"""What one chunk of logits may take, about; a C library gives up to 32 MiB from memory that was used before."""
KEEP_BYTES = 384 * 2**20
"""Probabilities that the backward pass may find kept rather than compute again. Memory against time."""


def chunk_bytes(device: torch.device) -> int:
    return CHUNK_BYTES.get(device.type, CHUNK_BYTES["cpu"])


@dataclass(frozen=True)
class Head:
    """How hidden states become logits: `cap·tanh(scale·(h·Wᵀ + b)/cap)`, over the temperature."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: Any) -> Head:
        """The head of a transformers model, with the scalings that its config names."""
        module, config = model.get_output_embeddings(), model.config
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(
            module.weight, getattr(module, "bias", None), scale, getattr(config, "final_logit_softcapping", None)
        )

    def logits(self, hidden: Tensor) -> Tensor:
        z = F.linear(hidden, self.weight, self.bias).to(_at_least_float32(hidden.dtype))
        z = z if self.scale == 1.0 else z * self.scale
        return z if self.cap is None else torch.tanh(z / self.cap) * self.cap

    def chunk(self) -> int:
        """Tokens in a chunk."""
        return max(16, chunk_bytes(self.weight.device) // (4 * self.weight.shape[0]))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def token_stats(
    head: Head,
    hidden: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    hidden_ref: Tensor | None = None,
    head_ref: Head | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """log π of the targets, entropy and (with a reference) KL(π ‖ π_ref) at each hidden state `[token width]`."""
    if len(hidden) and hidden_ref is None and head.cap is None and fits(hidden):
        how = (head.chunk(), head.scale / temperature, entropy_gradient)
        return *FusedStats.apply(hidden, head.weight, head.bias, target, *how), None
    options = (head, temperature, hidden_ref, head_ref, entropy_gradient)
    logp, entropy, kl = _TokenStats.apply(hidden, head.weight, head.bias, target, options)
    return logp, entropy, (kl if hidden_ref is not None else None)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: Any) -> Any:
        head, temperature, hidden_ref, head_ref, entropy_gradient = options
        ctx.options = options
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.kept = []
        count, chunk = hidden.shape[0], head.chunk()
        dtype = _at_least_float32(hidden.dtype)
        logp, entropy, kl = (torch.zeros(count, dtype=dtype, device=hidden.device) for _ in range(3))
        needed = any(ctx.needs_input_grad[:3])
        room = KEEP_BYTES if needed and not head.cap else 0
        for part in _parts(count, chunk):
            z = head.logits(hidden[part]) / temperature if temperature != 1.0 else head.logits(hidden[part])
            p = torch.softmax(z, -1)
            log_z = z.amax(-1, keepdim=True) - torch.log(p.amax(-1, keepdim=True))  # the likeliest never underflows
            logp[part] = (z.gather(-1, target[part, None]) - log_z).squeeze(-1)
            if hidden_ref is not None:
                kl[part] = (p * (z - log_z - _ref_log_probs(head_ref, hidden_ref[part], temperature))).sum(-1)
            entropy[part] = log_z.squeeze(-1) - torch.linalg.vecdot(p, z)
            room -= p.numel() * p.element_size()
            if room >= 0:
                ctx.kept.append(p)
        idle = [] if entropy_gradient else [entropy]
        ctx.mark_non_differentiable(*idle, *([] if hidden_ref is not None else [kl]))
        return logp, entropy, kl

    @staticmethod
    def backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor, g_kl: Tensor) -> Any:
        head, temperature, hidden_ref, head_ref, entropy_gradient = ctx.options
        hidden, weight, bias, target = ctx.saved_tensors
        g_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        g_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        g_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for i, part in enumerate(_parts(hidden.shape[0], head.chunk())):
            kept = ctx.kept[i] if i < len(ctx.kept) else None
            whole = kept is None or entropy_gradient or hidden_ref is not None
            z = head.logits(hidden[part]) if whole else None
            log_p = torch.log_softmax(z / temperature, -1) if z is not None else None
            p = kept if kept is not None else torch.exp(log_p)  # type: ignore[arg-type]
            only_logp = kept is not None and not (entropy_gradient or hidden_ref is not None)
            g = p.mul_(-g_logp[part, None]) if only_logp else p * -g_logp[part, None]
            g.scatter_add_(-1, target[part, None], g_logp[part, None].to(g.dtype))
            if entropy_gradient and log_p is not None:
                mean = (p * log_p).sum(-1, keepdim=True)
                g -= g_entropy[part, None] * p * (log_p - mean)
            if hidden_ref is not None and log_p is not None:
                gap = log_p - _ref_log_probs(head_ref, hidden_ref[part], temperature)
                g += g_kl[part, None] * p * (gap - (p * gap).sum(-1, keepdim=True))
            if temperature != 1.0:
                g /= temperature
            if head.cap is not None and z is not None:
                g *= 1 - (z / head.cap) ** 2
            if head.scale != 1.0:
                g *= head.scale
            g = g.to(weight.dtype)
            if g_hidden is not None:
                g_hidden[part] = g @ weight
            if g_weight is not None:
                g_weight.addmm_(g.t(), hidden[part])
            if g_bias is not None:
                g_bias += g.sum(0)
        ctx.kept = []
        return g_hidden, g_weight, g_bias, None, None


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _ref_log_probs(head: Head, hidden: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(head.logits(hidden) / temperature, -1)

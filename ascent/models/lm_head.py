"""Log-probs and entropies from the LM head, one chunk of tokens at a time (chunked logits).

The logits `[token vocab]` of a batch are never in memory at once: the forward pass keeps one number per token, and the
backward pass recomputes the logits of a chunk. With z the logits at the sampling temperature:

    log π(a) = z_a − log Σ e^z            ∂ log π(a)/∂z = 1_a − p
    H = log Σ e^z − Σ p·z                 ∂H/∂z = −p·(z − Σ p·z)
    KL = Σ p·(log p − log p_ref)          ∂KL/∂z = p·(log p − log p_ref − KL)

All of it is computed in at least float32, whatever the dtype of the hidden states. On a GPU, Triton kernels need few
passes over the logits (`FusedTokenStats`, ops/triton_lm_head.py); on a CPU there is a C kernel (ops/cpu_kernels.c).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.ops import cpu_kernels, load_kernels

CHUNK_BYTES = {"cpu": 28 * 2**20, "cuda": 2**31}
"""Approximate size of one chunk of logits. The C library reuses freed memory for allocations of up to 32 MiB."""
MAX_CHUNK_FRACTION = 1 / 32
"""Largest fraction of a GPU's memory for a chunk, which makes chunks smaller on GPUs of less than 64 GiB."""
MAX_KEPT_BYTES = 384 * 2**20
"""Probabilities that are saved for the backward pass instead of recomputed: memory against time."""


def chunk_bytes(device: torch.device) -> int:
    most = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cpu"])
    if device.type != "cuda" or not torch.cuda.is_available():
        return most
    share = MAX_CHUNK_FRACTION * torch.cuda.get_per_process_memory_fraction(device.index)
    return min(most, int(share * torch.cuda.get_device_properties(device).total_memory))


@dataclass(frozen=True)
class LMHead:
    """LM head: logits = cap·tanh(scale·(h·Wᵀ + b)/cap)."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: Any) -> LMHead:
        """Return the head of a transformers model, with the logit scale and softcap of its config."""
        module, config = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(module.weight, getattr(module, "bias", None), scale, cap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits in at least float32, never rounded to the dtype of the parameters."""
        kernels = None if torch.is_grad_enabled() or hidden.dim() != 2 else lm_head_kernels(hidden)
        if kernels is not None:
            z = kernels.logits(hidden, self.weight, self.bias)
        elif hidden.dtype.itemsize < 4:
            z = LMHeadReference.logits(hidden, self.weight, self.bias)
        else:
            z = self.multiply(hidden)
        z = z if self.scale == 1.0 else z * self.scale
        return z if self.cap is None else torch.tanh(z / self.cap) * self.cap

    def multiply(self, hidden: Tensor) -> Tensor:
        """Return h·Wᵀ + b."""
        return F.linear(hidden, self.weight, self.bias)

    def chunk(self) -> int:
        """Return the number of tokens per chunk."""
        return max(16, chunk_bytes(self.weight.device) // (4 * self.weight.shape[0]))


def lm_head_kernels(hidden: Tensor) -> Any:
    """Return the Triton kernels for these hidden states; None if they are not on a GPU, or in float64."""
    fits = hidden.is_cuda and hidden.dtype != torch.float64 and len(hidden)
    return load_kernels("triton_lm_head") if fits else None


def token_stats(
    head: LMHead,
    hidden: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    reference: tuple[LMHead, Tensor] | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log π of the targets, entropy and KL(π ‖ π_ref) at each hidden state `[token hidden_size]`.

    `reference`: the head and the hidden states of the reference policy; without it there is no KL.
    """
    kernels = lm_head_kernels(hidden)
    if kernels is not None and reference is None and head.cap is None:
        how = (head.chunk(), head.scale / temperature, entropy_gradient, kernels)
        return *FusedTokenStats.apply(hidden, head.weight, head.bias, target, *how), None
    options = (head, temperature, reference, entropy_gradient)
    logp, entropy, kl = _TokenStats.apply(hidden, head.weight, head.bias, target, options)
    return logp, entropy, (None if reference is None else kl)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: Any) -> Any:
        head, temperature, reference, entropy_gradient = options
        ctx.options = options
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.kept = []
        count, chunk = hidden.shape[0], head.chunk()
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logp, entropy, kl = (torch.zeros(count, dtype=dtype, device=hidden.device) for _ in range(3))
        needed = any(ctx.needs_input_grad[:3])
        room = MAX_KEPT_BYTES if needed and not head.cap else 0
        for part in _chunks(count, chunk):
            z = head.logits(hidden[part]) / temperature if temperature != 1.0 else head.logits(hidden[part])
            if cpu_kernels.is_supported(z):
                p = z if reference is None else z.clone()
                logp[part], entropy[part] = cpu_kernels.softmax_logprobs_(p, target[part])
            else:
                p = torch.softmax(z, -1)
                log_z = z.amax(-1, keepdim=True) - torch.log(
                    p.amax(-1, keepdim=True)
                )  # the largest probability never underflows
                logp[part] = (z.gather(-1, target[part, None]) - log_z).squeeze(-1)
                entropy[part] = log_z.squeeze(-1) - torch.linalg.vecdot(p, z)
            if reference is not None:
                gap = torch.log_softmax(z, -1) - _reference_logprobs(reference, part, temperature)
                kl[part] = (p * gap).sum(-1)
            room -= p.numel() * p.element_size()
            if room >= 0:
                ctx.kept.append(p)
        idle = [] if entropy_gradient else [entropy]
        ctx.mark_non_differentiable(*idle, *([] if reference is not None else [kl]))
        return logp, entropy, kl

    @staticmethod
    def backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor, g_kl: Tensor) -> Any:
        head, temperature, reference, entropy_gradient = ctx.options
        only_logp = reference is None and not entropy_gradient
        hidden, weight, bias, target = ctx.saved_tensors
        g_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        wide = torch.promote_types(weight.dtype, torch.float32)
        g_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        g_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        for i, part in enumerate(_chunks(hidden.shape[0], head.chunk())):
            kept = ctx.kept[i] if i < len(ctx.kept) else None
            if kept is None or not only_logp:
                z = head.logits(hidden[part])
                log_p = torch.log_softmax(z / temperature, -1)
            p = torch.exp(log_p) if kept is None else kept
            g = p.mul_(-g_logp[part, None]) if only_logp and kept is not None else p * -g_logp[part, None]
            g.scatter_add_(-1, target[part, None], g_logp[part, None].to(g.dtype))
            if entropy_gradient:
                mean = (p * log_p).sum(-1, keepdim=True)
                g -= g_entropy[part, None] * p * (log_p - mean)
            if reference is not None:
                gap = log_p - _reference_logprobs(reference, part, temperature)
                g += g_kl[part, None] * p * (gap - (p * gap).sum(-1, keepdim=True))
            if temperature != 1.0:
                g /= temperature
            if head.cap is not None:  # nothing is saved with a softcap
                g *= 1 - (z / head.cap) ** 2
            if head.scale != 1.0:
                g *= head.scale
            g = g.to(weight.dtype)
            if g_hidden is not None:
                g_hidden[part] = g @ weight
            if g_weight is not None:
                add_matmul(g_weight, g.t(), hidden[part])
            if g_bias is not None:
                g_bias += g.sum(0, dtype=wide)
        ctx.kept = []
        return g_hidden, *cast_grads(weight.dtype, g_weight, g_bias), None, None


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a·b, accumulated in the dtype of `total`, which is float32 for half-precision factors."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def cast_grads(dtype: torch.dtype, *grads: Tensor | None) -> list[Tensor | None]:
    """Convert accumulated gradients to the dtype of their parameters."""
    return [None if g is None else g.to(dtype) for g in grads]


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _reference_logprobs(reference: tuple[LMHead, Tensor], part: slice, temperature: float) -> Tensor:
    head, hidden = reference
    return torch.log_softmax(head.logits(hidden[part]) / temperature, -1)


# ---- fused kernels on a GPU ------------------------------------------------------------------------


class FusedTokenStats(torch.autograd.Function):
    """log π of the targets and entropy at each hidden state. `ops`: the kernels, or `LMHeadReference` in the tests.

    The matmul returns the logits of a chunk in float32, unrounded. The forward pass reads them once for all results of
    a token. The backward pass recomputes and reads them once, and writes their gradient in half precision for two more
    matmuls. With x = z·factor, factor = scale/temperature:

        log π(a) = x_a − log Σ e^x       H = log Σ e^x − Σ p·x
        ∂L/∂z = factor·(g_logp·(1_a − p) − g_H·p·(log p + H))

    The gradient of the head is summed over chunks in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunk: int, factor: float,
        entropy_gradient: bool, ops: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ops = ops or load_kernels("triton_lm_head")
        parts = _chunks(len(hidden), chunk)
        measured = [
            ops.logprobs_and_entropy(ops.logits(hidden[part], weight, bias), target[part], factor) for part in parts
        ]
        logp, entropy, log_z = (torch.cat(values) for values in zip(*measured, strict=True))
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
        g_weight: Tensor | None = None
        g_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        parts = _chunks(len(hidden), chunk)
        for part in parts:
            z = ops.logits(hidden[part], weight, bias)
            entropy_terms = None if g_entropy is None else (g_entropy[part], entropy[part])
            g = ops.logits_grad(z, target[part], log_z[part], g_logp[part], entropy_terms, factor, weight.dtype)
            del z
            if g_hidden is not None:
                torch.mm(g, weight, out=g_hidden[part])
            if ctx.needs_input_grad[1] and len(parts) == 1:  # a single chunk needs no float32 sum
                g_weight = g.t() @ hidden
            elif ctx.needs_input_grad[1]:  # allocate it late: it is as large as the logits
                g_weight = torch.zeros_like(weight, dtype=wide) if g_weight is None else g_weight
                ops.add_matmul(g_weight, g.t(), hidden[part])
            if g_bias is not None:
                g_bias += g.sum(0, dtype=wide)
            del g
        return g_hidden, *cast_grads(weight.dtype, g_weight, g_bias), None, None, None, None, None


class LMHeadReference:
    """The kernels' computation in PyTorch."""

    add_matmul = staticmethod(add_matmul)

    @staticmethod
    def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return F.linear(hidden.to(wide), weight.to(wide), None if bias is None else bias.to(wide))

    @staticmethod
    def logprobs_and_entropy(z: Tensor, target: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return log π of the targets, entropies, and log Σ e^x."""
        x = z * factor
        log_z = torch.logsumexp(x, -1)
        log_p = x - log_z[:, None]
        return log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), log_z

    @staticmethod
    def logits_grad(
        z: Tensor, target: Tensor, log_z: Tensor, g_logp: Tensor, entropy_terms: tuple[Tensor, Tensor] | None,
        factor: float, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        log_p = z * factor - log_z[:, None]
        p = log_p.exp()
        g = (F.one_hot(target, z.shape[1]) - p) * g_logp[:, None]
        if entropy_terms is not None:
            g_entropy, entropy = entropy_terms
            g -= g_entropy[:, None] * p * (log_p + entropy[:, None])
        return (g * factor).to(dtype)

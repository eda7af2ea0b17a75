"""Fused RMSNorm, SwiGLU and RoPE for the update of a transformers model: one kernel each instead of several.

    RMSNorm   x · weight / √(mean(x²) + ε)
    SwiGLU    silu(g) · u
    RoPE      [a, b] ↦ [a·cos − b·sin, b·cos + a·sin], where a and b are the halves of a head

On a GPU a third of a small model's update is spent in such elementwise kernels, which are bound by memory bandwidth.
Here sums are float32 and results are rounded once. A module is replaced only if random inputs show that the fused form
computes the same up to rounding: Gemma's norms, which use 1 + weight, are left alone, and so is everything in float64.

The kernels are written in Triton (ops/triton_elementwise.py) and, for float32 on a CPU, in C (ops/cpu_kernels.py);
`ElementwiseReference` is their reference. On a CPU without the C kernels, `ElementwiseReference` computes RoPE,
`RMSNormFunction` needs half of the passes over memory, and `SwiGLUFunction` computes e^x once.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ascent.models.lora import fuse_lora
from ascent.ops import cpu_kernels, load_kernels

INPUT_SCALES = (2.0**-10, 1.0, 2.0**5, 2.0**10)
"""Scales of the inputs on which a fused module must match: small ones reveal another ε, large ones a clamp."""
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
"""Largest difference from the original module, relative to the largest output. Other dtypes are not fused."""


def fuse_layers(model: nn.Module, ops: Any = None) -> int:
    """Fuse the model's RMSNorms and gated MLPs, and run LoRA in half precision; return the number of fused modules."""
    return sum(_fuse_norm(m) or _fuse_mlp(m, ops) or fuse_lora(m) for m in model.modules())


@contextmanager
def fused_rope(model: Any, ops: Any = None) -> Iterator[None]:
    """Apply RoPE with one kernel each for queries and keys, inside this context."""
    like = next(model.parameters())
    where = sys.modules[type(model.get_decoder() if hasattr(model, "get_decoder") else model).__module__]
    before = getattr(where, "apply_rotary_pos_emb", None)
    if ops is None and getattr(before, "is_fused", False):  # nested, as when a critic is fitted
        yield
        return
    ops = ops or (load_kernels("triton_elementwise") if like.is_cuda else _cpu_ops(like))
    sharded = hasattr(like, "to_local")  # sharded layers compute in another dtype than that of the parameters
    if ops is None or before is None or not (sharded or _rope_matches(before, ops, like.dtype, like.device)):
        yield
        return

    def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        whole = q.shape[2:] == k.shape[2:] == cos.shape[1:] == sin.shape[1:]  # not partial rotary embeddings
        odd = q.shape[0] > 1 or unsqueeze_dim != 1 or q.dtype not in TOLERANCES or not whole
        odd = odd or (ops is cpu_kernels.ElementwiseKernels and not cpu_kernels.is_supported(q, k, cos, sin))
        if odd or needs_double_backward() or (sharded and not _rope_matches(before, ops, q.dtype, q.device)):
            return before(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return _RopeFunction.apply(q, cos, sin, ops), _RopeFunction.apply(k, cos, sin, ops)

    apply_rope.is_fused = True  # type: ignore[attr-defined]
    where.apply_rotary_pos_emb = apply_rope  # type: ignore[attr-defined]
    try:
        yield
    finally:
        where.apply_rotary_pos_emb = before  # type: ignore[attr-defined]


def needs_double_backward() -> bool:
    """Return whether the gradient will be differentiated, which fused kernels do not support.

    Callers signal it by disabling memory-efficient attention.
    """
    return not torch.backends.cuda.mem_efficient_sdp_enabled()


def _is_float32_cpu(x: Tensor) -> bool:
    """Return whether x is float32 on a CPU and not sharded: layers of shards may compute in another dtype."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not hasattr(x, "to_local")


def _cpu_ops(like: Tensor) -> Any:
    if not _is_float32_cpu(like):
        return None
    return cpu_kernels.ElementwiseKernels if cpu_kernels.is_supported(like) else ElementwiseReference


def _is_close(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).abs().max() <= TOLERANCES[want.dtype] * want.abs().max())


def _random_input(like: Tensor, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)


@torch.no_grad()
def _replace_if_equal(module: Any, fused: Callable[[Tensor], Tensor], weight: Tensor) -> bool:
    """Replace the module's forward if the fused one matches on random inputs of every scale."""
    x = _random_input(weight, 16, weight.shape[-1])
    wanted = [(x * scale, module(x * scale)) for scale in INPUT_SCALES]
    alike = all(_is_close(fused(x), want) for x, want in wanted if want.isfinite().all())
    if alike:
        module.forward = fused
    return alike


def _fuse_norm(module: Any) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or eps is None:
        return False
    fits = weight.dim() == 1 and weight.dtype in TOLERANCES
    return fits and _replace_if_equal(module, partial(_norm_forward, module, eps), weight)


def _norm_forward(module: Any, eps: float, hidden_states: Tensor) -> Tensor:
    weight = module.weight
    if _is_float32_cpu(hidden_states) and _is_float32_cpu(weight):
        return RMSNormFunction.apply(hidden_states, weight, eps)
    if hidden_states.dtype == weight.dtype:
        return F.rms_norm(hidden_states, weight.shape, weight, eps)
    wide = F.rms_norm(hidden_states, weight.shape, weight.to(hidden_states.dtype), eps)
    return wide.to(weight.dtype)  # mixed precision: a matmul in the dtype of the weight follows


class RMSNormFunction(torch.autograd.Function):
    """RMSNorm y = w·n with n = x·r, r = 1/√(mean(x²) + ε); besides x and w it saves one number per row.

    ∂L/∂x = r·(g·w − n·mean(g·w·n))      ∂L/∂w = Σ g·n over rows

    Uses the C kernels where available.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if cpu_kernels.is_supported(x, weight):
            out, r = cpu_kernels.rms_norm(x, weight, eps)
            ctx.save_for_backward(x, weight, r)
            return out
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        r = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, r = ctx.saved_tensors
        if cpu_kernels.is_supported(grad, x, weight):
            grad_x, grad_weight = cpu_kernels.rms_norm_backward(grad, x, weight, r)
            return grad_x, grad_weight if ctx.needs_input_grad[1] else None, None
        n, g = (x * r).flatten(0, -2), grad.flatten(0, -2)
        gn = g * n
        g_weight = gn.new_ones(len(gn)) @ gn if ctx.needs_input_grad[1] else None
        n.mul_(torch.mv(gn, weight).div_(-x.shape[-1])[:, None])
        return n.addcmul_(g, weight).mul_(r.view(-1, 1)).view(x.shape), g_weight, None


def _fuse_mlp(module: Any, ops: Any) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")]
    weight: Any = getattr(parts[0], "weight", None)
    fits = None not in parts and isinstance(weight, Tensor) and weight.dtype in TOLERANCES
    plain = fits and _is_float32_cpu(weight)
    has_kernels = (
        ops is not None or plain or (fits and weight.is_cuda and load_kernels("triton_elementwise") is not None)
    )
    return fits and has_kernels and _replace_if_equal(module, partial(_mlp_forward, module, ops), weight)


def _mlp_forward(
    module: Any, ops: Any, x: Tensor
) -> Tensor:  # kernels are looked up at each call, because the model may be copied to another device
    gate, up = module.gate_proj(x), module.up_proj(x)
    if ops is None and gate.is_cuda:
        ops = load_kernels("triton_elementwise")
    elif ops is None and cpu_kernels.is_supported(gate, up):
        ops = cpu_kernels.ElementwiseKernels
    if ops is not None:
        return module.down_proj(_SwiGLUKernelFunction.apply(gate, up, ops))
    if _is_float32_cpu(gate):
        return module.down_proj(SwiGLUFunction.apply(gate, up))
    return module.down_proj(module.act_fn(gate) * up)  # copied to another dtype, or cast by autocast


class SwiGLUFunction(torch.autograd.Function):
    """silu(g)·u in PyTorch; it saves s = σ(g) instead of g, so that the backward pass needs no e^x.

    ∂ silu(g)/∂g = s + a·(1 − s), with a = silu(g) = g·s
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        s = torch.sigmoid(gate)
        a = gate * s
        ctx.save_for_backward(up, s, a)
        return a * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        up, s, a = ctx.saved_tensors
        return torch.addcmul(a, a, s, value=-1).add_(s).mul_(up).mul_(grad), grad * a


class _SwiGLUKernelFunction(torch.autograd.Function):
    """silu(g)·u by the kernels of `ops`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, ops: Any) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.ops = ops
        return ops.swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *ctx.ops.swiglu_backward(grads[0].contiguous(), *ctx.saved_tensors), None


@cache
@torch.no_grad()
def _rope_matches(before: Any, ops: Any, dtype: torch.dtype, device: torch.device) -> bool:
    if dtype not in TOLERANCES:
        return False
    like = torch.empty((), dtype=dtype, device=device)
    q, k, angle = _random_input(like, 1, 4, 5, 16), _random_input(like, 1, 2, 5, 16), _random_input(like, 1, 5, 8)
    cos, sin = angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2)
    try:
        want = before(q, k, cos, sin)
    except Exception:  # a function of the same name with another signature
        return False
    return all(_is_close(_RopeFunction.apply(x, cos, sin, ops), w) for x, w in zip((q, k), want, strict=True))


class _RopeFunction(torch.autograd.Function):
    """RoPE; its gradient is the rotation by the negative angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, ops: Any) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.ops = ops
        return ops.rope(x, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.ops.rope(grads[0], *ctx.saved_tensors, True), None, None, None


class ElementwiseReference:
    """The kernels' computation in PyTorch."""

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    @staticmethod
    def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.sigmoid(gate)
        return grad * up * s * (1 + gate * (1 - s)), grad * gate * s

    @staticmethod
    def rope(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
        """Apply RoPE to x `[1 head position head_dim]`, or with `backward` rotate by the negative angles."""
        a, b = x.chunk(2, -1)
        rotated = x * cos.unsqueeze(1)
        (new_a, new_b), (sin_a, sin_b) = rotated.chunk(2, -1), sin.unsqueeze(1).chunk(2, -1)
        new_a.addcmul_(b, sin_b if backward else sin_a, value=1 if backward else -1)
        new_b.addcmul_(a, sin_a if backward else sin_b, value=-1 if backward else 1)
        return rotated

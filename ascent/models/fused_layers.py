"""What lies between a model's matrix products, in one kernel each; transformers writes it out in many.

    norm     x · weight / √(mean(x²) + ε)
    gate     silu(g) · u
    rotate   [a, b] ↦ [a·cos − b·sin, b·cos + a·sin], the channels in halves

On a GPU a third of a small model's update goes to such kernels, for each reads and writes everything once. Here sums
are float32 and results are rounded once. A part of a model is replaced only if it is found to compute the same, to
rounding: a Gemma's norms, with their 1 + weight, are left alone, and so is all that is in float64.
`Formulas` is what the kernels compute. On a CPU, in float32, the kernels are in C (kernels/cpu.py); without them
`Formulas` turns queries and keys, norms have a form with half of the passes (`RmsNorm`), and gates one that computes
e^x once (`Gate`).
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

from ascent.models.lora import fuse_adapter
from ascent.ops import cpu_kernels, load_kernels

INPUT_SCALES = (2.0**-10, 1.0, 2.0**5, 2.0**10)
"""Sizes of the inputs on which a part has to compute the same: an ε shows at small ones, a clamp at large ones."""
ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
"""How far two forms may be apart, relative to the largest output; other types are left alone."""


def fuse(model: nn.Module, ops: Any = None) -> int:
    """Let the model's norms and gated MLPs compute in one kernel, and its adapters in half; returns how many do."""
    return sum(_fuse_norm(m) or _fuse_gate(m, ops) or fuse_adapter(m) for m in model.modules())


@contextmanager
def rotating(model: Any, ops: Any = None) -> Iterator[None]:
    """Inside, queries and keys are turned in one kernel each."""
    like = next(model.parameters())
    where = sys.modules[type(model.get_decoder() if hasattr(model, "get_decoder") else model).__module__]
    before = getattr(where, "apply_rotary_pos_emb", None)
    if ops is None and getattr(before, "is_ours", False):  # a pass within a pass, as of a critic that is fitted
        yield
        return
    ops = ops or (load_kernels("triton_elementwise") if like.is_cuda else _on_a_cpu(like))
    sharded = hasattr(like, "to_local")  # then layers compute in another type than the parameters are in
    if ops is None or before is None or not (sharded or _turns_alike(before, ops, like.dtype, like.device)):
        yield
        return

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        whole = q.shape[2:] == k.shape[2:] == cos.shape[1:] == sin.shape[1:]  # some turn only a part of the channels
        odd = q.shape[0] > 1 or unsqueeze_dim != 1 or q.dtype not in ROUNDING or not whole
        odd = odd or (ops is cpu_kernels.Elementwise and not cpu_kernels.fits(q, k, cos, sin))
        if odd or differentiated_twice() or (sharded and not _turns_alike(before, ops, q.dtype, q.device)):
            return before(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return _Rotate.apply(q, cos, sin, ops), _Rotate.apply(k, cos, sin, ops)

    turned.is_ours = True  # type: ignore[attr-defined]
    where.apply_rotary_pos_emb = turned  # type: ignore[attr-defined]
    try:
        yield
    finally:
        where.apply_rotary_pos_emb = before  # type: ignore[attr-defined]


def differentiated_twice() -> bool:
    """Will the pass be differentiated twice? Whoever does that asks torch for attention without fused kernels."""
    return not torch.backends.cuda.mem_efficient_sdp_enabled()


def _is_plain(x: Tensor) -> bool:
    """Is it in float32 on a CPU, and whole? Layers of shards may compute in another type."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not hasattr(x, "to_local")


def _on_a_cpu(like: Tensor) -> Any:
    if not _is_plain(like):
        return None
    return cpu_kernels.Elementwise if cpu_kernels.fits(like) else Formulas


def _alike(got: Tensor, want: Tensor) -> bool:
    return bool((got - want).abs().max() <= ROUNDING[want.dtype] * want.abs().max())


def _noise(like: Tensor, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)


@torch.no_grad()
def _replaced(module: Any, fused: Callable[[Tensor], Tensor], weight: Tensor) -> bool:
    """Let the module compute this instead, if it is the same on a few random rows of every size."""
    x = _noise(weight, 16, weight.shape[-1])
    wanted = [(x * scale, module(x * scale)) for scale in INPUT_SCALES]
    alike = all(_alike(fused(x), want) for x, want in wanted if want.isfinite().all())
    if alike:
        module.forward = fused
    return alike


def _fuse_norm(module: Any) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or eps is None:
        return False
    fits = weight.dim() == 1 and weight.dtype in ROUNDING
    return fits and _replaced(module, partial(_normed, module, eps), weight)


def _normed(module: Any, eps: float, hidden_states: Tensor) -> Tensor:
    weight = module.weight
    if _is_plain(hidden_states) and _is_plain(weight):
        return RmsNorm.apply(hidden_states, weight, eps)
    if hidden_states.dtype == weight.dtype:
        return F.rms_norm(hidden_states, weight.shape, weight, eps)
    wide = F.rms_norm(hidden_states, weight.shape, weight.to(hidden_states.dtype), eps)
    return wide.to(weight.dtype)  # a mixed model's: what follows is a matrix product


class RmsNorm(torch.autograd.Function):
    """y = w·n with n = x·r, r = 1/√(mean(x²) + ε); besides x and w it keeps one number per row.

    ∂L/∂x = r·(g·w − n·mean(g·w·n))      ∂L/∂w = Σ g·n over rows

    By kernels in C where they are there.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if cpu_kernels.fits(x, weight):
            out, r = cpu_kernels.norm(x, weight, eps)
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
        if cpu_kernels.fits(grad, x, weight):
            to_x, to_weight = cpu_kernels.norm_slope(grad, x, weight, r)
            return to_x, to_weight if ctx.needs_input_grad[1] else None, None
        n, g = (x * r).flatten(0, -2), grad.flatten(0, -2)
        along = g * n
        g_weight = along.new_ones(len(along)) @ along if ctx.needs_input_grad[1] else None
        n.mul_(torch.mv(along, weight).div_(-x.shape[-1])[:, None])
        return n.addcmul_(g, weight).mul_(r.view(-1, 1)).view(x.shape), g_weight, None


def _fuse_gate(module: Any, ops: Any) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")]
    weight: Any = getattr(parts[0], "weight", None)
    fits = None not in parts and isinstance(weight, Tensor) and weight.dtype in ROUNDING
    plain = fits and _is_plain(weight)
    there = ops is not None or plain or (fits and weight.is_cuda and load_kernels("triton_elementwise") is not None)
    return fits and there and _replaced(module, partial(_gated, module, ops), weight)


def _gated(module: Any, ops: Any, x: Tensor) -> Tensor:  # kernels are looked up here: a model can be copied
    gate, up = module.gate_proj(x), module.up_proj(x)
    if ops is None and gate.is_cuda:
        ops = load_kernels("triton_elementwise")
    elif ops is None and cpu_kernels.fits(gate, up):
        ops = cpu_kernels.Elementwise
    if ops is not None:
        return module.down_proj(_Gate.apply(gate, up, ops))
    if _is_plain(gate):
        return module.down_proj(Gate.apply(gate, up))
    return module.down_proj(module.act_fn(gate) * up)  # copied in another type, or cast for this pass


class Gate(torch.autograd.Function):
    """silu(g)·u without kernels, with s = σ(g) kept and not g: its slope needs no e^x, most of the time on a CPU.

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


class _Gate(torch.autograd.Function):
    """The same by kernels."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, ops: Any) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.ops = ops
        return ops.gate(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *ctx.ops.gate_slope(grads[0].contiguous(), *ctx.saved_tensors), None


@cache
@torch.no_grad()
def _turns_alike(before: Any, ops: Any, dtype: torch.dtype, device: torch.device) -> bool:
    if dtype not in ROUNDING:
        return False
    like = torch.empty((), dtype=dtype, device=device)
    q, k, angle = _noise(like, 1, 4, 5, 16), _noise(like, 1, 2, 5, 16), _noise(like, 1, 5, 8)
    cos, sin = angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2)
    try:
        want = before(q, k, cos, sin)
    except Exception:  # whatever another architecture's function of this name is
        return False
    return all(_alike(_Rotate.apply(x, cos, sin, ops), w) for x, w in zip((q, k), want, strict=True))


class _Rotate(torch.autograd.Function):
    """Its gradient is a turn the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, ops: Any) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.ops = ops
        return ops.rotate(x, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.ops.rotate(grads[0], *ctx.saved_tensors, True), None, None, None


class Formulas:
    """What the kernels compute, in plain torch."""

    @staticmethod
    def gate(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    @staticmethod
    def gate_slope(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.sigmoid(gate)
        return grad * up * s * (1 + gate * (1 - s)), grad * gate * s

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
        """`[1 head position channel]`, turned by the angles of each position."""
        a, b = x.chunk(2, -1)
        turned = x * cos.unsqueeze(1)
        (new_a, new_b), (sin_a, sin_b) = turned.chunk(2, -1), sin.unsqueeze(1).chunk(2, -1)
        new_a.addcmul_(b, sin_b if back else sin_a, value=1 if back else -1)
        new_b.addcmul_(a, sin_a if back else sin_b, value=-1 if back else 1)
        return turned

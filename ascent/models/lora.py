"""LoRA adapters, kept separate from the frozen weight in training and in sampling.

    y = x·Wᵀ + h·(s·B)ᵀ,   h = x·Aᵀ,   s = alpha/rank

A and B are float32 where W is in half precision. A matmul takes A and s·B rounded to the dtype of W, and h and x·Wᵀ
are rounded before their sum. The learner (`fuse_lora`) and the sampler (`MergedLinear`) round in the same places, so
that the sampled policy is the trained one. Merging would lose small updates, because W + s·B·A is rounded. W may be
quantized to 4 bits (quantization.py); it is then dequantized for each matmul, also in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascent.models.quantization import Linear4bit, is_quantized, matmul_4bit

HALF_DTYPES = (torch.bfloat16, torch.float16)
RANK_MULTIPLE, ROW_MULTIPLE = 8, 64
"""The LoRA rank, and the rows of W and A together, are padded to multiples of these: matmuls are then faster."""


@dataclass(frozen=True)
class LoraAdapter:
    """The trained tensors of one adapter, A `[rank in]` and B `[out rank]`, and its scale."""

    a: Tensor
    b: Tensor
    scale: float


def unwrap_lora(module: Any) -> tuple[Any, LoraAdapter | None]:
    """Return the base module (linear or embedding) and its LoRA adapter.

    A module without an adapter, or with one that is not supported (DoRA, several adapters, …), is returned with None.
    """
    if not hasattr(module, "base_layer") or type(module).__module__ != "peft.tuners.lora.layer":
        return module, None
    names = module.active_adapters
    extra = module.merged or module.disable_adapters or module.lora_variant or getattr(module, "fan_in_fan_out", False)
    if extra or len(names) != 1:
        return module, None
    name, scale = names[0], float(module.scaling[names[0]])
    if name in module.lora_A:
        biased = module.lora_B[name].bias is not None
        adapter = LoraAdapter(module.lora_A[name].weight, module.lora_B[name].weight, scale)
        return (module, None) if biased else (module.base_layer, adapter)
    return module.base_layer, LoraAdapter(module.lora_embedding_A[name], module.lora_embedding_B[name], scale)


def is_adapter_name(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return ".lora_" in name


@contextmanager
def randomized_adapters(model: nn.Module) -> Iterator[None]:
    """Set adapters that are still 0 to random values in this context, so that a comparison of models covers them."""
    untrained: list[Tensor] = [p for name, p in model.named_parameters() if is_adapter_name(name) and not bool(p.any())]
    with torch.no_grad():
        for p in untrained:
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) * 0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for p in untrained:
                p.zero_()


# ---- sampling: one matmul for all linear layers with the same input -----------------------------------


class MergedLinear(NamedTuple):
    """Linear layers with the same input (such as q, k and v), merged into one matmul, with their LoRA adapters.

    x·[W₁; W₂; …; A₁; A₂; …]ᵀ computes the outputs and every h; a second matmul adds h·Bᵀ, where B is 0 for outputs that
    do not belong to an adapter. All tensors are at fixed addresses, as CUDA graphs need them.
    """

    weight: Tensor
    """`[out in]`, or with adapters `[out + rank + … in]`."""
    bias: Tensor | None
    b: Tensor | None = None
    """`[out rank]`"""
    ranks: tuple[int, ...] = ()
    """LoRA rank of each merged layer; their columns of h are consecutive."""

    def __call__(self, x: Tensor, ops: Any, split_k: bool = False) -> Tensor:
        """`split_k`: the kernel may return partial sums (`linear` in decode_ops.py)."""
        if self.b is None:
            return ops.linear(x, self.weight, self.bias, split_k)
        return ops.add_lora(self.base(x, ops), self.b)

    def base(self, x: Tensor, ops: Any) -> Tensor:
        """Return [x·Wᵀ, h], or x·Wᵀ without an adapter."""
        return ops.linear(x, self.weight, self.bias)

    def gated(self, x: Tensor, ops: Any, gelu: bool) -> Tensor:
        """Return act(gate)·up of x, if the merged layers are gate and up."""
        if self.b is None:
            return ops.gated_linear(x, self.weight, self.bias, gelu)
        if len(self.ranks) == 1:  # one adapter for both gate and up
            return ops.gated_activation(self(x, ops).contiguous(), gelu=gelu)
        return ops.gated_activation(self.base(x, ops), self.b, self.ranks, gelu)


class MergedLinear4bit(NamedTuple):
    """Merged 4-bit linear layers; h is a separate matmul."""

    packed: Tensor
    scale: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    a: Tensor | None = None
    """`[rank in]`"""
    b: Tensor | None = None

    def __call__(self, x: Tensor, ops: Any, split_k: bool = False) -> Tensor:
        x = x.to(self.dtype)
        y = matmul_4bit(x, self.packed, self.scale, self.bias)
        return y if self.a is None or self.b is None else y.addmm_(x @ self.a.t(), self.b.t())

    def gated(self, x: Tensor, ops: Any, gelu: bool) -> Tensor:
        return ops.gated_activation(self(x, ops), gelu=gelu)


class MergedEmbedding(NamedTuple):
    """An embedding and its LoRA adapter: `a` is `[vocab rank]`, `b` is `[hidden_size rank]`."""

    weight: Tensor
    a: Tensor | None = None
    b: Tensor | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.weight)
        return x if self.a is None or self.b is None else x.addmm_(F.embedding(ids, self.a), self.b.t())


class AdapterCopies:
    """Copies of the adapters in the dtype and layout of the sampler, refreshed all at once."""

    def __init__(self) -> None:
        self.targets: list[Tensor] = []
        self.sources: list[Tensor] = []
        self.scales: list[float] = []

    def add(self, target: Tensor, source: Tensor, scale: float = 1.0) -> None:
        self.targets.append(target)
        self.sources.append(source.detach())
        self.scales.append(scale)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy scale · source to every target; the product is rounded once."""
        if self.targets:
            torch._foreach_copy_(self.targets, torch._foreach_mul(self.sources, self.scales))


@torch.no_grad()
def flatten_parameters(parts: Sequence[Tensor], padding: int = 0) -> Tensor:
    """Move these parameters into one flat tensor, consecutively, with `padding` numbers behind them.

    The parameters become views of the flat tensor and stay the same objects, so optimizers, state dicts and
    checkpoints are unaffected, and every update of a parameter updates the flat tensor without a copy.
    """
    first, count = parts[0].data, sum(p.numel() for p in parts)
    ends = [p.data_ptr() + p.numel() * p.element_size() for p in parts]
    consecutive = all(p.data_ptr() == end for p, end in zip(parts[1:], ends[:-1], strict=True))
    one_storage = len({p.untyped_storage().data_ptr() for p in parts}) == 1 and all(p.is_contiguous() for p in parts)
    whole = first.storage_offset() == 0 and first.untyped_storage().nbytes() == (count + padding) * first.element_size()
    if consecutive and one_storage and (whole or not padding):
        return first.as_strided((count + padding,), (1,))
    flat = torch.cat([*(p.data.flatten() for p in parts), first.new_zeros(padding)])
    for p, part in zip(parts, flat.split([p.numel() for p in parts] + [padding]), strict=False):
        p.data = part.view(p.shape)
    return flat


def merge_linears(modules: Sequence[Any], copies: AdapterCopies) -> MergedLinear | MergedLinear4bit:
    """Merge linear layers with the same input, with or without LoRA adapters."""
    plain, adapters = zip(*map(unwrap_lora, modules), strict=True)
    out, width = [m.out_features for m in plain], plain[0].in_features
    ranks = tuple(0 if adapter is None else len(adapter.a) for adapter in adapters)
    rank = sum(ranks) + -sum(ranks) % RANK_MULTIPLE
    if is_quantized(plain[0]):
        whole = _merge_4bit_linears(plain, rank)
        if whole.a is not None and whole.b is not None:
            register_adapter_copies(copies, adapters, out, whole.a, whole.b)
        return whole
    rows = sum(out) + rank
    rows += -rows % ROW_MULTIPLE if rank else 0
    flat = flatten_parameters([m.weight for m in plain], (rows - sum(out)) * width + rank * sum(out))
    bias = None if plain[0].bias is None else flatten_parameters([m.bias for m in plain], rows - sum(out))
    weight = flat[: rows * width].view(rows, width)
    if not rank:
        return MergedLinear(weight, bias)
    b = flat[rows * width :].view(sum(out), rank)
    register_adapter_copies(copies, adapters, out, weight[sum(out) :], b)
    return MergedLinear(weight, bias, b, ranks)


def _merge_4bit_linears(plain: Sequence[Linear4bit], rank: int) -> MergedLinear4bit:
    """Merge 4-bit layers: quantization blocks never span two rows, so packed rows can be concatenated."""
    first, width, out = plain[0], plain[0].in_features, sum(m.out_features for m in plain)
    packed, scale = (
        flatten_parameters([getattr(m, name) for m in plain]).view(out, -1) for name in ("packed", "scale")
    )
    bias = None if first.bias is None else flatten_parameters([m.bias for m in plain])
    if not rank:
        return MergedLinear4bit(packed, scale, bias, first.dtype)
    if first.adapter_buffer is None or first.adapter_buffer.numel() != rank * (width + out):
        first.adapter_buffer = torch.zeros(rank * (width + out), dtype=first.dtype, device=packed.device)
    a, b = first.adapter_buffer.split([rank * width, rank * out])
    return MergedLinear4bit(packed, scale, bias, first.dtype, a.view(rank, width), b.view(out, rank))


def register_adapter_copies(
    copies: AdapterCopies, adapters: Sequence[LoraAdapter | None], out: Sequence[int], a: Tensor, b: Tensor
) -> None:
    """Register copies of each adapter to its rows of A, and to its rows and columns of B."""
    row = column = 0
    for count, adapter in zip(out, adapters, strict=True):
        own = 0 if adapter is None else len(adapter.a)
        if adapter is not None:
            copies.add(a[column : column + own], adapter.a)
            copies.add(b[row : row + count, column : column + own], adapter.b, adapter.scale)
        row, column = row + count, column + own


def merge_embedding(module: Any, copies: AdapterCopies) -> MergedEmbedding:
    plain, adapter = unwrap_lora(module)
    if adapter is None:
        return MergedEmbedding(plain.weight.data)
    (words, width), rank = plain.weight.shape, len(adapter.a)
    even = rank + -rank % RANK_MULTIPLE
    weight, a, b = flatten_parameters([plain.weight], even * (words + width)).split(
        [words * width, words * even, width * even]
    )
    a, b = a.view(words, even), b.view(width, even)
    copies.add(a[:, :rank], adapter.a.t())
    copies.add(b[:, :rank], adapter.b, adapter.scale)
    return MergedEmbedding(weight.view(words, width), a, b)


# ---- training ------------------------------------------------------------------------------------------


def fuse_lora(module: Any) -> bool:
    """Let the LoRA adapter of a half-precision layer compute in half precision; return whether it was replaced.

    peft converts inputs and outputs to float32, which takes nine passes over a tensor as large as the output.
    """
    plain, adapter = unwrap_lora(module)
    if adapter is None or type(plain) not in (nn.Linear, Linear4bit) or _weight_dtype(plain) not in HALF_DTYPES:
        return False
    if type(plain) is nn.Linear and plain.weight.requires_grad:
        return False
    module.forward = partial(_lora_forward, module)
    return True


def _weight_dtype(plain: Any) -> torch.dtype:
    return plain.dtype if is_quantized(plain) else plain.weight.dtype


def _lora_forward(module: Any, x: Tensor) -> Tensor:
    plain, adapter = unwrap_lora(module)
    if (
        adapter is None or x.dtype not in HALF_DTYPES or x.dtype != _weight_dtype(plain)
    ):  # the module was copied or converted to another dtype
        return type(module).forward(module, x)
    packed = plain if is_quantized(plain) else None
    weight = None if packed is not None else plain.weight
    return _LoraFunction.apply(x, weight, plain.bias, adapter.a, adapter.b, adapter.scale, packed)


class _LoraFunction(torch.autograd.Function):
    """y = x·Wᵀ + bias + h·(s·B)ᵀ, h = x·Aᵀ. W and its bias are frozen; gradients of A and B are summed in float32.

    W is a tensor, or a 4-bit layer.

    ∂h = ∂y·(s·B)   ∂x = ∂y·W + ∂h·A   ∂A = ∂hᵀ·x   ∂B = s·∂yᵀ·h
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, a: Tensor, b: Tensor, scale: float,
        packed: Linear4bit | None = None,
    ) -> Tensor:  # fmt: skip
        rows = x.flatten(0, -2)
        a, scaled = a.to(x.dtype), (b * scale).to(x.dtype)
        h = rows @ a.t()
        y = F.linear(rows, weight, bias) if packed is None else packed.matmul(rows)  # type: ignore[arg-type]
        y.addmm_(h, scaled.t())
        ctx.save_for_backward(x, weight, a, scaled, h)
        ctx.scale, ctx.packed = scale, packed
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, a, scaled, h = ctx.saved_tensors
        rows, g = x.flatten(0, -2), grads[0].flatten(0, -2)
        weight = weight if ctx.packed is None else ctx.packed.weight
        g_h = g @ scaled
        g_x = (g @ weight).addmm_(g_h, a).view(x.shape) if ctx.needs_input_grad[0] else None
        return g_x, None, None, matmul_float32(g_h.t(), rows), matmul_float32(g.t(), h).mul_(ctx.scale), None, None


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return a·b in float32, or in float64 for float64 inputs."""
    if a.is_cuda and a.dtype in HALF_DTYPES:
        return torch.mm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)

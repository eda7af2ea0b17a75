"""Frozen matrices in 4 bits, below LoRA's adapters: NF4, as in QLoRA (Dettmers et al. 2023).

A row is cut into blocks of 64 numbers, and a number is kept as the nearest of 16 levels:

    w ≈ level[k] · scale,   scale = the largest |w| of its block

That takes 4 bits per number and 32 per block, 4.5 in all. The levels are quantiles of a normal distribution, so that
each is used about as often as the others. For a product the numbers are made again in the precision of the model, and
are thrown away after it: sampler, learner and backward pass all compute with the same ones.

On a GPU bitsandbytes makes them, or multiplies without making them where it knows that to be faster. `dequantize` says
what it computes, and stands in for it elsewhere.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascent.core.errors import ConfigError

QUANTIZATION_BLOCK = 64
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BYTES_PER_PARAMETER = 1 / 2 + 4 / QUANTIZATION_BLOCK
"""Of a number, its share of the scale included."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Levels `[out in/2]`, two in a byte, the first in its upper half; and scales `[out in/64]`.

    Every device computes the same: the only operation that rounds is a division.
    """
    blocks = weight.detach().float().unflatten(-1, (-1, QUANTIZATION_BLOCK))
    scale = blocks.abs().amax(-1)
    levels = torch.tensor(NF4_LEVELS, device=weight.device)
    between = (levels[1:] + levels[:-1]) / 2
    shares = blocks / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    first, second = (
        torch.bucketize(shares, between, out_int32=True).to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    )
    return first << 4 | second, scale


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers `[out in]`, multiplied in float32 and then rounded."""
    if packed.is_cuda and dtype != torch.float64:
        shape = [packed.shape[0], 2 * packed.shape[1]]
        return torch.ops.bitsandbytes.dequantize_4bit(packed, scale, QUANTIZATION_BLOCK, "nf4", shape, dtype)
    levels = torch.tensor(NF4_LEVELS, device=packed.device)
    pairs = torch.cartesian_prod(levels, levels)
    blocks = F.embedding(packed.int(), pairs).flatten(-2).unflatten(-1, (-1, QUANTIZATION_BLOCK))
    return (blocks * scale.unsqueeze(-1)).flatten(-2).to(dtype)


def matmul_4bit(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x·Wᵀ + bias, in the type of x."""
    if x.is_cuda and x.dtype != torch.float64:
        shape = [packed.shape[0], 2 * packed.shape[1]]
        return torch.ops.bitsandbytes.gemm_4bit(x, packed, shape, scale, QUANTIZATION_BLOCK, "nf4", bias)
    return F.linear(x, dequantize(packed, scale, x.dtype), bias)


class Linear4bit(nn.Linear):
    """A frozen matrix that is kept in 4 bits; its bias is not. To peft it is a Linear like any other."""

    def __init__(self, linear: nn.Linear, device: torch.device, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, dtype
        packed, scale = quantize(linear.weight.to(device))
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        bias = None if linear.bias is None else linear.bias.detach().to(device, dtype)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.room: Tensor | None = None
        """Where the sampler copies adapters to (engines/language/adapters.py)."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Made anew at each look."""
        return dequantize(self.packed, self.scale, self.dtype)

    def product(self, x: Tensor) -> Tensor:
        return matmul_4bit(x, self.packed, self.scale, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return _Frozen4bitFunction.apply(x.to(self.dtype), self)


def is_quantized(module: Any) -> TypeGuard[Linear4bit]:
    """Is this a matrix in 4 bits?"""
    return hasattr(module, "packed")


class _Frozen4bitFunction(torch.autograd.Function):
    """y = x·Wᵀ + bias, ∂x = ∂y·W; nothing is kept for the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Linear4bit) -> Tensor:
        ctx.matrix = matrix
        return matrix.product(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ ctx.matrix.weight, None


# ---- whole models --------------------------------------------------------------------------------------


def quantize_linears(model: Any, backbone: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Put the matrices of the backbone into 4 bits, on this device. Words and head stay as they are."""
    if device.type == "cuda":
        _check_kernels(device)
    head = model.get_output_embeddings()
    for parent in list(backbone.modules()):
        for name, matrix in list(parent.named_children()):
            if type(matrix) is nn.Linear and matrix is not head and matrix.in_features % QUANTIZATION_BLOCK == 0:
                setattr(parent, name, Linear4bit(matrix, device, dtype))
    packed = [module for module in backbone.modules() if is_quantized(module)]
    if not packed:
        raise ConfigError(
            f"--policy.bits 4: {type(model).__name__} has no linear layer whose in_features is a multiple of "
            f"{QUANTIZATION_BLOCK}. Leave it out"
        )
    if not all(bool(matrix.scale.isfinite().all()) for matrix in packed):
        raise ConfigError("--policy.bits 4: the model has parameters that are not finite")


def _check_kernels(device: torch.device) -> None:
    try:
        import bitsandbytes  # noqa: F401

        dequantize(
            torch.zeros(1, QUANTIZATION_BLOCK // 2, dtype=torch.uint8, device=device),
            torch.ones(1, 1, device=device),
            torch.float32,
        )
    except Exception as error:  # missing, or made for other cards or another CUDA
        first = str(error).strip().splitlines()[:1]
        raise ConfigError(
            f"--policy.bits 4 on a GPU needs bitsandbytes: pip install 'ascent-rl[qlora]' ({type(error).__name__}: "
            f"{''.join(first)})"
        ) from None


def dequantize_linears(model: nn.Module) -> None:
    """Put matrices in 4 bits back into ordinary ones, with the numbers that were computed with."""
    for parent in list(model.modules()):
        for name, matrix in list(parent.named_children()):
            if is_quantized(matrix):
                plain = nn.Linear(1, 1, bias=False)
                plain.in_features, plain.out_features = matrix.in_features, matrix.out_features
                plain.weight = nn.Parameter(matrix.weight, requires_grad=False)
                plain.bias = matrix.bias
                setattr(parent, name, plain)


def parameter_count(module: nn.Module) -> int:
    """Parameters of a model or of a part of it, as if none were packed."""
    return sum(p.numel() for p in unquantized_parameters(module)) + quantized_parameter_count(module)


def quantized_parameter_count(module: nn.Module) -> int:
    """Parameters that are in 4 bits."""
    return sum(2 * matrix.packed.numel() for matrix in module.modules() if is_quantized(matrix))


def unquantized_parameters(module: nn.Module) -> list[Tensor]:
    """The parameters but those that hold matrices in 4 bits."""
    inside = {id(p) for matrix in module.modules() if is_quantized(matrix) for p in (matrix.packed, matrix.scale)}
    return [p for p in module.parameters() if id(p) not in inside]

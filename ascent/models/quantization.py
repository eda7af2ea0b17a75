"""4-bit quantization (NF4) of the frozen weights below LoRA adapters, as in QLoRA (Dettmers et al. 2023).

A row is divided into blocks of 64 weights, and each weight is stored as the nearest of 16 levels:

    w ≈ level[k] · scale,   scale = the largest |w| of its block

That takes 4 bits per weight and 32 per block: 4.5 bits per weight. The levels are quantiles of a normal distribution,
so that each is used about equally often. Each matmul dequantizes the weights to the dtype of the model and discards
them afterwards: sampling, training and the backward pass all use the same numbers.

On a GPU bitsandbytes dequantizes, or multiplies directly where that is faster; `dequantize` is the PyTorch reference.
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
"""Including the share of the scale."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return level indices `[out in/2]`, two per byte with the first in the upper half, and scales `[out in/64]`.

    All devices compute the same, because the only operation that rounds is a division.
    """
    blocks = weight.detach().float().unflatten(-1, (-1, QUANTIZATION_BLOCK))
    scale = blocks.abs().amax(-1)
    levels = torch.tensor(NF4_LEVELS, device=weight.device)
    boundaries = (levels[1:] + levels[:-1]) / 2
    normalized = blocks / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)
    first, second = (
        torch.bucketize(normalized, boundaries, out_int32=True)
        .to(torch.uint8)
        .flatten(-2)
        .unflatten(-1, (-1, 2))
        .unbind(-1)
    )
    return first << 4 | second, scale


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights `[out in]`, multiplied in float32 and then rounded."""
    if packed.is_cuda and dtype != torch.float64:
        shape = [packed.shape[0], 2 * packed.shape[1]]
        return torch.ops.bitsandbytes.dequantize_4bit(packed, scale, QUANTIZATION_BLOCK, "nf4", shape, dtype)
    levels = torch.tensor(NF4_LEVELS, device=packed.device)
    pairs = torch.cartesian_prod(levels, levels)
    blocks = F.embedding(packed.int(), pairs).flatten(-2).unflatten(-1, (-1, QUANTIZATION_BLOCK))
    return (blocks * scale.unsqueeze(-1)).flatten(-2).to(dtype)


def matmul_4bit(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return x·Wᵀ + bias in the dtype of x."""
    if x.is_cuda and x.dtype != torch.float64:
        shape = [packed.shape[0], 2 * packed.shape[1]]
        return torch.ops.bitsandbytes.gemm_4bit(x, packed, shape, scale, QUANTIZATION_BLOCK, "nf4", bias)
    return F.linear(x, dequantize(packed, scale, x.dtype), bias)


class Linear4bit(nn.Linear):
    """A frozen linear layer with a 4-bit weight; the bias is not quantized. peft treats it as an nn.Linear."""

    def __init__(self, linear: nn.Linear, device: torch.device, dtype: torch.dtype):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, dtype
        packed, scale = quantize(linear.weight.to(device))
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        bias = None if linear.bias is None else linear.bias.detach().to(device, dtype)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.adapter_buffer: Tensor | None = None
        """Memory for the sampler's copies of the adapters (lora.py)."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight, recomputed at each access."""
        return dequantize(self.packed, self.scale, self.dtype)

    def matmul(self, x: Tensor) -> Tensor:
        return matmul_4bit(x, self.packed, self.scale, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return _Frozen4bitFunction.apply(x.to(self.dtype), self)


def is_quantized(module: Any) -> TypeGuard[Linear4bit]:
    """Return whether this is a 4-bit linear layer."""
    return hasattr(module, "packed")


class _Frozen4bitFunction(torch.autograd.Function):
    """y = x·Wᵀ + bias, ∂x = ∂y·W; the dequantized weight is not saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Linear4bit) -> Tensor:
        ctx.matrix = matrix
        return matrix.matmul(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ ctx.matrix.weight, None


# ---- whole models --------------------------------------------------------------------------------------


def quantize_linears(model: Any, backbone: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Quantize the linear layers of the backbone to 4 bits, on this device; embedding and head are not quantized."""
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
    except Exception as error:  # bitsandbytes is missing, or built for other GPUs or another CUDA version
        first = str(error).strip().splitlines()[:1]
        raise ConfigError(
            f"--policy.bits 4 on a GPU needs bitsandbytes: pip install 'ascent-rl[qlora]' ({type(error).__name__}: "
            f"{''.join(first)})"
        ) from None


def dequantize_linears(model: nn.Module) -> None:
    """Replace 4-bit linear layers by ordinary ones with the dequantized weights."""
    for parent in list(model.modules()):
        for name, matrix in list(parent.named_children()):
            if is_quantized(matrix):
                plain = nn.Linear(1, 1, bias=False)
                plain.in_features, plain.out_features = matrix.in_features, matrix.out_features
                plain.weight = nn.Parameter(matrix.weight, requires_grad=False)
                plain.bias = matrix.bias
                setattr(parent, name, plain)


def parameter_count(module: nn.Module) -> int:
    """Return the number of parameters of a module; a quantized weight counts as before its quantization."""
    return sum(p.numel() for p in unquantized_parameters(module)) + quantized_parameter_count(module)


def quantized_parameter_count(module: nn.Module) -> int:
    """Return the number of parameters in 4 bits."""
    return sum(2 * matrix.packed.numel() for matrix in module.modules() if is_quantized(matrix))


def unquantized_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters except those that hold 4-bit weights."""
    inside = {id(p) for matrix in module.modules() if is_quantized(matrix) for p in (matrix.packed, matrix.scale)}
    return [p for p in module.parameters() if id(p) not in inside]

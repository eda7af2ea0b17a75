"""Fused operators: Triton and C kernels, each with a reference implementation in PyTorch."""

import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

import torch


@cache
def load_kernels(name: str) -> ModuleType | None:
    """Import a module of Triton kernels; None where Triton is missing or does not work."""
    try:
        module = import_module(f"{__name__}.{name}")
    except ImportError:
        return None
    return module if _triton_works() else None


@cache
def _triton_works() -> bool:
    """Compile and run one kernel on the GPU; this fails on GPUs that are too old, or without a C compiler."""
    if not torch.cuda.is_available():
        return True
    try:
        total = torch.zeros(16, dtype=torch.bfloat16, device="cuda")
        import_module(f"{__name__}.triton_adamw").add(total, total.clone(), (1, 2))
        return not bool(total.any())
    except Exception as error:  # any failure: PyTorch computes the same
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        warnings.warn(f"Triton does not work here ({why}): using PyTorch instead, which is slower", stacklevel=2)
        return False

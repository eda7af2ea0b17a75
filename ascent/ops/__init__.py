"""Kernels in Triton, one file for each module that uses them; that module says in plain torch what they compute."""

import warnings
from functools import cache
from importlib import import_module
from types import ModuleType

import torch


@cache
def load_kernels(name: str) -> ModuleType | None:
    """The kernels of this file; None where there is no Triton, or none that works."""
    try:
        found = import_module(f"{__name__}.{name}")
    except ImportError:
        return None
    return found if _works() else None


@cache
def _works() -> bool:
    """Can a kernel be compiled and run on the GPU? Not if the card is too old for it, or without a C compiler."""
    if not torch.cuda.is_available():
        return True
    try:
        total = torch.zeros(16, dtype=torch.bfloat16, device="cuda")
        import_module(f"{__name__}.triton_adamw").add(total, total.clone(), (1, 2))
        return not bool(total.any())
    except Exception as error:  # whatever it says: plain torch computes the same
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        warnings.warn(f"Triton does not work here ({why}): plain torch computes the same, slower", stacklevel=2)
        return False

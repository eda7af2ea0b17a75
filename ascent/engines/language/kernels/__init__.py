"""Kernels in Triton, one file for each module that uses them; that module says in plain torch what they compute."""

from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def load_kernels(name: str) -> ModuleType | None:
    """The kernels of this file; None where there is no Triton."""
    try:
        return import_module(f"{__name__}.{name}")
    except ImportError:
        return None

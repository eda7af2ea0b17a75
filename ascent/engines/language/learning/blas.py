"""Which library multiplies matrices while a model learns on a CPU.

On Arm, torch hands x·Wᵀ in float32 to oneDNN and every other product to its BLAS. With the many rows of an update BLAS
is faster there too: with two threads 72 instead of 66 GFLOP/s, with one 37 instead of 36. A forward pass is x·Wᵀ only.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ascent.engines.language.attention import ours


@contextmanager
def learning(model: Any, shares: bool) -> Iterator[None]:
    """Inside, layers compute as in an update: by our attention function, if prompts are shared, and by BLAS."""
    with ours(model, shares), by_blas(model):
        yield


@contextmanager
def by_blas(model: Any) -> Iterator[None]:
    """Inside, BLAS multiplies float32 matrices on Arm. Other types need oneDNN, and layers of shards may have them."""
    plain = model.dtype == torch.float32 and model.device.type == "cpu"
    if platform.machine() != "aarch64" or not plain or hasattr(next(model.parameters()), "to_local"):
        yield
        return
    before, *_ = torch.backends.mkldnn.set_flags(False, None, None, None)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before, None, None, None)

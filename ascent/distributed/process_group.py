"""A process group of its own, beside the one that ranks train in: for weights on their way to who samples with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

ON_ERROR = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
CLEAN_UP = "2"
"""NCCL gives up the group of a member that is gone, and not the whole process, which is what it does by default."""


def make_process_group(store: Any, rank: int, size: int, backend: str, wait: timedelta, host: str) -> Any:
    """Those who meet at this store, by gloo or NCCL. `host`: the address of this machine that gloo listens at."""
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        with _cleaning_up():
            return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    over = gloo._Options()
    over._timeout, over._devices = wait, [gloo.create_device(hostname=host)]
    return gloo(store, rank, size, over)


@contextmanager
def _cleaning_up() -> Iterator[None]:
    before = os.environ.get(ON_ERROR)
    os.environ[ON_ERROR] = before or CLEAN_UP
    try:
        yield
    finally:
        if before is None:
            del os.environ[ON_ERROR]

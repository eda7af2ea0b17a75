"""Process groups for weight transfer, separate from the default group in which ranks train."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

ERROR_HANDLING_VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ABORT_GROUP_ONLY = "2"
"""On an error NCCL aborts the communicator rather than the whole process, which is the default."""


def make_process_group(store: Any, rank: int, world_size: int, backend: str, timeout: timedelta, host: str) -> Any:
    """Create a gloo or NCCL process group over a store. `host`: the address of this machine on which gloo listens."""
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        with _abort_group_only():
            return dist.ProcessGroupNCCL(store, rank, world_size, options)
    gloo: Any = dist.ProcessGroupGloo
    gloo_options = gloo._Options()
    gloo_options._timeout, gloo_options._devices = timeout, [gloo.create_device(hostname=host)]
    return gloo(store, rank, world_size, gloo_options)


@contextmanager
def _abort_group_only() -> Iterator[None]:
    before = os.environ.get(ERROR_HANDLING_VARIABLE)
    os.environ[ERROR_HANDLING_VARIABLE] = before or ABORT_GROUP_ONLY
    try:
        yield
    finally:
        if before is None:
            del os.environ[ERROR_HANDLING_VARIABLE]

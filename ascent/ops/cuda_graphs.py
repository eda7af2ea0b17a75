"""CUDA graphs: replay a recorded sequence of kernel launches with one call of the host.

A captured graph reads and writes tensors at fixed addresses. So inputs are padded to one of a few sizes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol

import torch

BUCKETS_PER_OCTAVE = 4
"""Number of sizes between a power of two and the next."""


class GraphBackend(Protocol):
    def warm_up(self, work: Callable[[], None]) -> None:
        """Run once, because compilation and allocation at the first use cannot be captured."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the work; return a function that repeats it."""

    def reset(self) -> None:
        """Forget the memory pool, because all captured graphs are about to be released."""


class CudaGraphs:
    """CUDA graphs that share one memory pool: use the results of a graph before replaying another."""

    pool: Any = None

    def warm_up(self, work: Callable[[], None]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # a collection could free the graphs of another learner, which fails during a capture
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                work()
        finally:
            if collects:
                gc.enable()
        return graph.replay

    def reset(self) -> None:
        self.pool = None  # PyTorch frees the pool with its last graph and cannot reuse the handle


class EagerGraphs:
    """Without CUDA graphs the host runs the work again."""

    def warm_up(self, work: Callable[[], None]) -> None: ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def reset(self) -> None: ...


def round_up_to_bucket(count: int) -> int:
    """Round up to one of `BUCKETS_PER_OCTAVE` sizes between two powers of two."""
    return -(-count // bucket_step(count)) * bucket_step(count)


def bucket_step(count: int) -> int:
    return max(1, next_power_of_2(count) // (2 * BUCKETS_PER_OCTAVE))


def next_power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()

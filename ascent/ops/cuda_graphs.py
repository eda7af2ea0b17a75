"""CUDA graphs: what a host launches again and again in the same way, it launches once, as one graph.

What is captured reads and writes tensors at fixed addresses. So work of any size is padded to one of a few sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

STEPS = 4
"""Sizes between a power of two and the next."""


class Graphs(Protocol):
    def warm(self, work: Callable[[], None]) -> None:
        """Do it once: what is compiled or allocated at a first use cannot be captured."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What does it again."""

    def forget(self) -> None:
        """All that was captured is gone, or will be: the next capture begins anew."""


class CudaGraphs:
    """Graphs that share their memory: one of them works at a time, and its results are used before the next does."""

    pool: Any = None

    def warm(self, work: Callable[[], None]) -> None:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream().wait_stream(aside)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def forget(self) -> None:
        self.pool = None  # torch gives it up with the last of its graphs, and would not take it again


class NoGraphs:
    """Where there are none, the host does all of it again."""

    def warm(self, work: Callable[[], None]) -> None: ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def forget(self) -> None: ...


def size_above(count: int) -> int:
    """The next of `STEPS` numbers between two powers of two."""
    return -(-count // size_step(count)) * size_step(count)


def size_step(count: int) -> int:
    return max(1, power_above(count) // (2 * STEPS))


def power_above(count: int) -> int:
    return 1 << (count - 1).bit_length()

"""Asynchronous checkpoints: a thread writes a copy in host memory while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

Groups = dict[str, dict[str, Tensor]]
MAX_COPY_FRACTION = 0.5
"""Fraction of the free host memory that a copy may use. A larger state is written synchronously."""


class BackgroundWriter:
    """Runs one write at a time in a background thread. `wait` and `poll` raise its error."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._after: Callable[[], None] = _nothing

    def begin(self, write: Callable[[], object], after: Callable[[], None] = lambda: None) -> None:
        """Wait for the previous write, then start this one. `wait` or `poll` calls `after` once it is complete."""
        self.wait()
        self._after = after
        self._thread = threading.Thread(target=self._work, args=(write,), name="ascent-saving", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Finish the write if it is complete: call `after`, or raise its error."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self, timeout: float | None = None) -> None:
        if self._thread is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            return
        self._thread, (error, self._error) = None, (self._error, None)
        if error is not None:
            raise error
        self._after()

    def _work(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:  # raised by `wait`
            self._error = error


def _nothing() -> None: ...


def copy_to_host(groups: Groups) -> tuple[Groups, bool]:
    """Copy tensors to host memory. Without enough memory, return the tensors themselves and False.

    Each original is released as soon as it is copied.
    """
    if (
        sum(t.numel() * t.element_size() for own in groups.values() for t in own.values())
        > MAX_COPY_FRACTION * free_memory()
    ):
        return groups, False
    return {
        group: {name: own.pop(name).to("cpu", copy=True) for name in list(own)} for group, own in groups.items()
    }, True


def free_memory() -> float:
    """Return the free bytes of host memory; infinity if they are unknown."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024.0 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    return float("inf")

"""Checkpoints are written while training goes on: from a copy on the host, by a thread, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

Groups = dict[str, dict[str, Tensor]]
MAX_COPY_FRACTION = 0.5
"""Of the host's free memory, what a copy may take. A larger state is written before training goes on."""


class BackgroundWriter:
    """Writes one thing at a time in the background. What went wrong is told to whoever asks: `wait`, `poll`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._after: Callable[[], None] = _nothing

    def begin(self, write: Callable[[], object], after: Callable[[], None] = lambda: None) -> None:
        """Wait for what is being written, then have this written. `after` follows it, in the thread that asks."""
        self.wait()
        self._after = after
        self._thread = threading.Thread(target=self._work, args=(write,), name="ascent-saving", daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """If it has been written: what follows; or raise what went wrong."""
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
        except BaseException as error:  # for whoever waits
            self._error = error


def _nothing() -> None: ...


def copy_to_host(groups: Groups) -> tuple[Groups, bool]:
    """Copies of these tensors that training does not change; or themselves and False, if there is no memory for them.

    Each original is let go as soon as it is copied.
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
    """Bytes that the host has left; without limit where it does not say."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024.0 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    return float("inf")

"""A sampler around another one, which it passes for."""

from __future__ import annotations

from typing import Any

from ascent.core.protocols import Sampler


class DelegatingEngine(Sampler):
    def __init__(self, inner: Any):
        self.inner, self.exact = inner, inner.exact
        self.fills, self.limit, self.rows, self.note = inner.fills, inner.limit, inner.rows, inner.note

    @property
    def timeline(self) -> Any:
        return self.inner.timeline

    @timeline.setter
    def timeline(self, new: Any) -> None:
        self.inner.timeline = new

    def close(self) -> None:
        self.inner.close()

"""A rollout engine that delegates to another rollout engine."""

from __future__ import annotations

from typing import Any

from ascent.core.protocols import RolloutEngine


class DelegatingEngine(RolloutEngine):
    def __init__(self, inner: Any):
        self.inner, self.deterministic = inner, inner.deterministic
        self.provides, self.limit, self.rows, self.note = inner.provides, inner.limit, inner.rows, inner.note

    @property
    def timeline(self) -> Any:
        return self.inner.timeline

    @timeline.setter
    def timeline(self, new: Any) -> None:
        self.inner.timeline = new

    def close(self) -> None:
        self.inner.close()

"""Occupancy of the running batch over time: how many sequences an engine decodes at once."""

import time
from dataclasses import dataclass, field

TAIL_OCCUPANCY = 0.5
"""The tail of a rollout is the time in which less than this share of the batch's capacity is in use."""
NUM_SLICES = 32
"""Number of equal time slices in `OccupancyTimeline.mean_running`."""


@dataclass
class OccupancyTimeline:
    """Number of running sequences over time."""

    capacity: int = 0
    """Maximum number of sequences that can run at once; of several merged timelines, the largest."""
    spans: list[tuple[float, int, int]] = field(default_factory=list)
    """(seconds, running sequences, capacity) of consecutive time spans."""
    _current: tuple[float, int] | None = None
    """Start time and running sequences of the span that has not ended yet."""

    def record(self, running: int) -> None:
        """Record that this many sequences run from now on."""
        if self._current is None or self._current[1] != running:
            self.stop()
            self._current = time.perf_counter(), running

    def stop(self) -> None:
        """End the current span."""
        if self._current is not None:
            start, running = self._current
            self.spans.append((time.perf_counter() - start, running, self.capacity))
            self._current = None

    def merge(self, other: "OccupancyTimeline") -> None:
        """Append the spans of a later call."""
        self.spans += other.spans
        self.capacity = max(self.capacity, other.capacity)

    def drain(self) -> "OccupancyTimeline":
        """Return a copy and clear this timeline."""
        drained = OccupancyTimeline(self.capacity, self.spans)
        self.capacity, self.spans = 0, []
        return drained

    @property
    def seconds(self) -> float:
        return sum(seconds for seconds, _, _ in self.spans)

    @property
    def tail_seconds(self) -> float:
        """Time in which less than `TAIL_OCCUPANCY` of the capacity was in use."""
        return sum(seconds for seconds, running, capacity in self.spans if running < TAIL_OCCUPANCY * capacity)

    def mean_running(self, slices: int = NUM_SLICES) -> list[float]:
        """Return the mean number of running sequences in each of `slices` equal parts of the time."""
        if not (width := self.seconds / slices):
            return []
        area, start = [0.0] * slices, 0.0
        for seconds, running, _ in self.spans:
            end = start + seconds
            for i in range(min(int(start / width), slices - 1), min(int(end / width), slices - 1) + 1):
                area[i] += running * max(0.0, min(end, (i + 1) * width) - max(start, i * width))
            start = end
        return [round(part / width, 2) for part in area]

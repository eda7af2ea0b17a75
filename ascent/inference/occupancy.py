"""How many responses a sampler decodes at once, over the time that it takes: where few are left, the rest waits."""

import time
from dataclasses import dataclass, field

TAIL = 0.5
"""The tail of a rollout is the time in which fewer than this share of the lanes is busy."""
SLICES = 32
"""Parts of equal duration that the time of a step is cut into."""


@dataclass
class Timeline:
    """Rows that ran, and for how long. A lane is a place for a row: there are as many as can run at once."""

    lanes: int = 0
    """Of a call; of several, the most."""
    spans: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds, and the rows and lanes in them."""
    _since: tuple[float, int] | None = None
    """When a span began that goes on, and its rows."""

    def see(self, rows: int) -> None:
        """From now on this many rows run."""
        if self._since is None or self._since[1] != rows:
            self.stop()
            self._since = time.perf_counter(), rows

    def stop(self) -> None:
        """The call is over."""
        if self._since is not None:
            begun, rows = self._since
            self.spans.append((time.perf_counter() - begun, rows, self.lanes))
            self._since = None

    def add(self, other: "Timeline") -> None:
        """Another call, behind those that are here."""
        self.spans += other.spans
        self.lanes = max(self.lanes, other.lanes)

    def take(self) -> "Timeline":
        """All that is here, which then begins anew."""
        taken = Timeline(self.lanes, self.spans)
        self.lanes, self.spans = 0, []
        return taken

    @property
    def seconds(self) -> float:
        return sum(seconds for seconds, _, _ in self.spans)

    @property
    def tail(self) -> float:
        """Seconds in which fewer than `TAIL` of the lanes were busy."""
        return sum(seconds for seconds, rows, lanes in self.spans if rows < TAIL * lanes)

    def running(self, slices: int = SLICES) -> list[float]:
        """The mean number of rows that ran in each of so many parts of the time."""
        if not (width := self.seconds / slices):
            return []
        area, at = [0.0] * slices, 0.0
        for seconds, rows, _ in self.spans:
            end = at + seconds
            for i in range(min(int(at / width), slices - 1), min(int(end / width), slices - 1) + 1):
                area[i] += rows * max(0.0, min(end, (i + 1) * width) - max(at, i * width))
            at = end
        return [round(part / width, 2) for part in area]

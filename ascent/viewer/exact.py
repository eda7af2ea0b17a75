"""Lines of a run's file as they are, out of a digest that holds only sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ascent.viewer.digest import Buckets, Digest, fold
from ascent.viewer.parsing import Parsed

REREAD = 20_000
"""Lines that are read again where buckets would give fewer points than asked for; a longer part has to do with them."""
KEPT = 4
"""Parts of a file that are kept, of those that were read again."""


class Piece(NamedTuple):
    """Some steps of a run: its digest's buckets, or its lines, read again."""

    place: np.ndarray
    """Which steps each bucket is for: those from place × width on."""
    first: np.ndarray
    last: np.ndarray
    width: int
    metrics: Mapping[str, Buckets]
    before: int
    """Buckets of the digest that come before."""


class Exact:
    """Single lines of one digest; what was read again once is kept as long as this."""

    def __init__(self, digest: Digest):
        self.digest = digest
        self._read: dict[int, Parsed] = {}
        self._parts: dict[tuple[int | float, int | float], Parsed] = {}

    def piece(
        self,
        metrics: Collection[str],
        begin: int | float = -np.inf,
        end: int | float = np.inf,
        points: int | float = 0,
        most: int | None = None,
        rare: str | None = None,
    ) -> Piece:
        """The steps from one to another: line by line where buckets give fewer points than so many, else the buckets.

        Not where that were more lines than `most`. Of a metric that is `rare` only buckets that have it are points.
        """
        digest = self.digest
        keep = (digest.last >= begin) & (digest.first <= end)
        before = int(np.argmax(keep)) if keep.any() else 0
        there = keep if rare is None else keep & (digest.metrics[rare].number > 0)
        few = digest.width > 1 and np.count_nonzero(there) < points
        if few and np.count_nonzero(keep) * digest.width <= (REREAD if most is None else most):
            return _singly(self._part(begin, end), metrics, before)
        found = {n: Buckets(*(p[keep] for p in digest.metrics[n])) for n in metrics if n in digest.metrics}
        return Piece(digest.index[keep], digest.first[keep], digest.last[keep], digest.width, found, before)

    def _part(self, begin: int | float, end: int | float) -> Parsed:
        if (begin, end) not in self._parts:
            while len(self._parts) >= KEPT:
                self._parts.pop(next(iter(self._parts)))
            self._parts[begin, end] = self.digest.part(begin, end)
        return self._parts[begin, end]

    def measured(self, metric: str) -> np.ndarray:
        """In which buckets a metric was measured."""
        buckets = self.digest.metrics.get(metric)
        return np.empty(0, int) if buckets is None else np.flatnonzero(buckets.number > 0)

    def line(self, bucket: int, metric: str | None = None, first: bool = False) -> tuple[int, Mapping[str, float]]:
        """The step and the numbers of one line of a bucket: the last (or first) in which the metric was measured."""
        if bucket not in self._read:
            self._read[bucket] = self.digest.part(self.digest.first[bucket], self.digest.last[bucket])
        part = self._read[bucket]
        at = 0 if first else len(part.steps) - 1
        if metric is not None and metric in part.columns:
            known = np.flatnonzero(np.isfinite(part.columns[metric]))
            at = int(known[0 if first else -1]) if len(known) else at
        values = {name: float(column[at]) for name, column in part.columns.items() if np.isfinite(column[at])}
        return int(part.steps[at]), values

    def last(self, metric: str) -> tuple[float, int] | None:
        """The last value of a metric, and its step."""
        found = self.digest.ends.get(metric)
        return None if found is None else (found[0], int(found[1]))

    def total(self, metric: str) -> float | None:
        """The sum over all lines; None if a line lacks it."""
        buckets = self.digest.metrics.get(metric)
        if buckets is None or int(buckets.number.sum()) < self.digest.lines:
            return None
        return float(buckets.sum.sum())

    def lines(self, metrics: Sequence[str], most: int) -> list[list[int | float | None]]:
        """Some lines from the first to the last, each its step and these metrics; half of them where the rarest is."""
        held = {name: where for name in metrics if len(where := self.measured(name))}
        if not held:
            return []
        rarest = min(held, key=lambda name: int(self.digest.metrics[name].number.sum()))
        every = np.unique(np.concatenate(list(held.values())))
        half = most // 2 if len(held[rarest]) < len(every) else most
        picked = set(spread(held[rarest], half)) | set(spread(every, half))
        rare = set(held[rarest].tolist())
        found: dict[int, list[int | float | None]] = {}
        for bucket in sorted(picked):
            step, values = self.line(bucket, rarest if bucket in rare else None, first=bucket == int(every[0]))
            found[step] = [step, *(values.get(metric) for metric in metrics)]
        return [found[step] for step in sorted(found)]


def _singly(part: Parsed, names: Collection[str], before: int) -> Piece:
    """Lines as buckets of one step each, as a digest of few lines has them."""
    index = np.maximum.accumulate(np.floor(part.steps)).astype(np.int64)
    cuts = np.flatnonzero(np.diff(index, prepend=index[0] - 1)) if len(index) else np.empty(0, int)
    found = {name: fold(part.columns[name], cuts) for name in names if name in part.columns and len(cuts)}
    last = part.steps[np.append(cuts[1:], len(index)) - 1] if len(index) else part.steps
    return Piece(index[cuts], part.steps[cuts], last, 1, found, before)


def spread(places: np.ndarray, most: int) -> list[int]:
    """So many of some places, evenly, with the first and the last."""
    if len(places) <= most:
        return places.tolist()
    return places[np.unique(np.linspace(0, len(places) - 1, most).round().astype(int))].tolist()

"""The curves of runs as points to draw: all of a run in few points, or a part of it exactly."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ascent.viewer import foreign
from ascent.viewer.charts import DRAWN
from ascent.viewer.digest import Buckets, Digest, merged
from ascent.viewer.exact import Exact
from ascent.viewer.parsing import Parsed, from_dicts
from ascent.viewer.places import Place

POINTS = 600
"""Points of a curve if nobody says how many: about the width of a chart."""
MOST_BYTES = 1 << 27
"""Memory of all curves that are kept; the ones that were asked for longest ago go first."""
DIGITS = 7


class Library:
    """Digests of the runs that were looked at last, each up to date when it is handed out."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, tuple[Digest, Any]] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def digest(self, place: Place) -> Iterator[Digest]:
        """A run's digest, for one reader at a time."""
        with self._lock:
            if place.folder not in self._kept:
                kind = Digest if place.kind == "ascent" else ForeignDigest
                self._kept[place.folder] = kind(path_of(place)), threading.RLock()
            self._kept.move_to_end(place.folder)
            digest, lock = self._kept[place.folder]
        with lock:
            digest.update()
            yield digest
        with self._lock:
            while len(self._kept) > 1 and sum(d.size for d, _ in self._kept.values()) > MOST_BYTES:
                self._kept.popitem(last=False)


class ForeignDigest(Digest):
    """The curves of another trainer's run, from whatever files it left: all of them are read when one changes."""

    def update(self) -> None:
        mark = foreign.mark(self.path)
        if mark == self.tail:
            return
        self.clear()
        self._given = from_dicts(foreign.lines(self.path)[0])
        self._add(self._given)
        self.tail = mark

    def part(self, begin: int | float, end: int | float) -> Parsed:
        keep = (self._given.steps >= begin) & (self._given.steps <= end)
        columns = {name: values[keep] for name, values in self._given.columns.items()}
        return self._given._replace(steps=self._given.steps[keep], columns=columns)


def path_of(place: Place) -> Path:
    return place.folder / "metrics.jsonl" if place.kind == "ascent" else place.folder


def measured(digest: Digest) -> set[str]:
    """The metrics of which a run has numbers, or once had one that was not finite."""
    known = {name for name, b in digest.metrics.items() if b.number.any()} | set(digest.nonfinite)
    return known if known and _largest(digest, "reward_errors") > 0 else known - {"reward_errors"}


def _largest(digest: Digest, name: str) -> float:
    return float(digest.metrics[name].high.max()) if name in digest.metrics else -np.inf


def curves(
    digest: Digest,
    metrics: Collection[str] = DRAWN,
    begin: int | float | None = None,
    end: int | float | None = None,
    points: int = POINTS,
) -> dict[str, Any]:
    """At most so many points of each metric between two steps, as the page draws them.

    Where a point stands for several steps, it is their mean, with the smallest and the largest beside it.
    """
    about = {
        "revision": digest.revision,
        "first": _number(digest.first[0]) if len(digest.first) else None,
        "last": _number(digest.last[-1]) if len(digest.last) else None,
        "nonfinite": {name: digest.nonfinite[name] for name in metrics if name in digest.nonfinite},
    }
    low, high = -np.inf if begin is None else begin, np.inf if end is None else end
    piece = Exact(digest).piece(metrics, low, high, points)
    found, first, last, width = dict(piece.metrics), piece.first, piece.last, piece.width
    together = -(-len(first) // max(points, 1)) or 1
    if together > 1:
        cuts = np.arange(0, len(first), together)
        found = {name: merged(buckets, cuts) for name, buckets in found.items()}
        first, last = first[cuts], last[np.append(cuts[1:], len(last)) - 1]
    x = [_number(v) for v in first / 2 + last / 2]
    series = {name: _series(b, width * together > 1) for name, b in found.items() if b.number.any()}
    return {**about, "bucket": width * together, "x": x, "metrics": series}


def _series(buckets: Buckets, several: bool) -> dict[str, list[float | None]]:
    known = buckets.number > 0
    with np.errstate(invalid="ignore"):
        mean = np.divide(buckets.sum, buckets.number, out=np.full(len(known), np.nan), where=known)
    if not several:
        return {"mean": _listed(mean, known)}
    parts = {"mean": mean, "low": buckets.low, "high": buckets.high}
    return {name: _listed(_rounded(part), known) for name, part in parts.items()}


def _listed(values: np.ndarray, known: np.ndarray) -> list[float | None]:
    there = known & np.isfinite(values)  # a sum may have been too large to be a number
    return [value if ok else None for value, ok in zip(values.tolist(), there.tolist(), strict=True)]


def _rounded(values: np.ndarray) -> np.ndarray:
    """To seven digits: a mean of many steps is drawn, not quoted."""
    size = np.abs(np.where(np.isfinite(values) & (values != 0), values, 1.0))
    with np.errstate(over="ignore", invalid="ignore"):
        scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(size)))
        short = np.round(values * scale) / scale
    return np.where(np.isfinite(short), short, values)


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)


def spark(digest: Digest, metrics: Sequence[str] = ("eval/accuracy", "accuracy", "reward"), points: int = 60) -> dict:
    """The first of some metrics that a run has at least two points of, small."""
    for metric in metrics:
        found = curves(digest, [metric], points=points * 4)["metrics"].get(metric)
        known = [value for value in found["mean"] if value is not None] if found else []
        if len(known) > 1 or (known and metric == metrics[-1]):
            every = -(-len(known) // points)
            return {"metric": metric, "points": known[::every]}
    return {"metric": None, "points": []}

"""The metrics of runs as points to draw: a whole run downsampled, or a range of its steps."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ascent.runs.foreign_runs import fingerprint, foreign_lines
from ascent.runs.metric_columns import (
    MetricColumns,
    bucket_starts,
    bucket_statistics,
    bucket_width,
    numbers_or_none,
    parse_objects,
)
from ascent.runs.metrics import CHART_METRICS
from ascent.runs.run_list import RunEntry

DEFAULT_POINTS = 600
"""Default number of points of a curve, about the width of a chart."""
MAX_CACHE_BYTES = 1 << 30
"""Maximum memory of the cache; the least recently used columns are dropped first."""
DIGITS = 7
"""Significant digits of a mean over several steps."""
StepRange = tuple[float, float]
"""First and last position on the axis of a curve."""
ALL_STEPS = (-np.inf, np.inf)


class ColumnCache:
    """A cache of the metrics of runs, least recently used first out. A run is updated from its files on each access."""

    def __init__(self) -> None:
        self._cached: OrderedDict[Path, tuple[MetricColumns, Any]] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def columns(self, place: RunEntry) -> Iterator[MetricColumns]:
        """Yield the columns of a run, to one reader at a time."""
        with self._lock:
            if place.folder not in self._cached:
                own = place.kind == "ascent"
                made = MetricColumns(place.folder / "metrics.jsonl") if own else ForeignColumns(place.folder)
                self._cached[place.folder] = made, threading.RLock()
            self._cached.move_to_end(place.folder)
            columns, lock = self._cached[place.folder]
        with lock:
            columns.update()
            yield columns
        with self._lock:
            while len(self._cached) > 1 and sum(c.size for c, _ in self._cached.values()) > MAX_CACHE_BYTES:
                self._cached.popitem(last=False)


class ForeignColumns(MetricColumns):
    """The metrics of another trainer's run. All of its files are read again when one changes."""

    def update(self) -> None:
        mark = fingerprint(self.path)
        if mark != self.tail:
            self.clear()
            self.add(parse_objects(foreign_lines(self.path)[0]))
            self.tail = mark


def measured_metrics(columns: MetricColumns) -> set[str]:
    """Return the metrics that have a value, finite or not."""
    known = {name for name in columns.names if len(columns.measured(name))} | set(columns.nonfinite)
    errors = columns["reward_errors"]
    return known if np.nan_to_num(errors).max(initial=0.0) > 0 else known - {"reward_errors"}


def curves(
    columns: MetricColumns,
    metrics: Collection[str] = CHART_METRICS,
    view: StepRange = ALL_STEPS,
    points: int = DEFAULT_POINTS,
) -> dict[str, Any]:
    """Return at most `points` points per metric. A point over several steps has their mean, minimum and maximum."""
    steps = columns.steps
    first, last = (_whole(steps[0]), _whole(steps[-1])) if len(steps) else (None, None)
    inside: Any = slice(None) if view == ALL_STEPS else np.flatnonzero((steps >= view[0]) & (steps <= view[1]))
    steps = steps[inside]
    width = bucket_width(steps, max(points, 1))
    starts = bucket_starts(steps, width)
    ends = np.append(starts[1:], len(steps)) - 1
    x = [_whole(v) for v in steps[starts] / 2 + steps[ends] / 2] if len(starts) else []
    series = {}
    for name in metrics:
        if name in columns and len(starts):
            together = bucket_statistics(columns[name][inside], starts)
            if np.isfinite(together["high"]).any():
                parts, digits = (together, DIGITS) if width > 1 else ({"mean": together["mean"]}, None)
                series[name] = {part: numbers_or_none(values, digits) for part, values in parts.items()}
    return {
        "revision": columns.revision,
        "first": first,
        "last": last,
        "nonfinite": {name: columns.nonfinite[name] for name in metrics if name in columns.nonfinite},
        "bucket": max(width, columns.stride),
        "x": x,
        "metrics": series,
    }


def _whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)


def spark(
    columns: MetricColumns, metrics: Sequence[str] = ("eval/accuracy", "accuracy", "reward"), points: int = 60
) -> dict:
    """Return a small curve of the first metric with at least two points."""
    for metric in metrics:
        line = curves(columns, [metric], points=points * 4)["metrics"].get(metric)
        known = [value for value in line["mean"] if value is not None] if line else []
        if len(known) > 1 or (known and metric == metrics[-1]):
            every = -(-len(known) // points)
            return {"metric": metric, "points": known[::every]}
    return {"metric": None, "points": []}

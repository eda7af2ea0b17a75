"""The curves of runs as points to draw: all of a run in few points, or a part of it exactly."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ascent.runs.foreign_runs import fingerprint, foreign_lines
from ascent.runs.metric_columns import Columns, bucket_starts, bucket_width, buckets, numbers_or_none, parse_objects
from ascent.runs.metrics import CHART_METRICS
from ascent.runs.run_list import RunEntry

POINTS = 600
"""Points of a curve if nobody says how many: about the width of a chart."""
MOST_BYTES = 1 << 30
"""Memory of all columns that are kept; the ones that were asked for longest ago go first."""
DIGITS = 7
"""A mean of many steps is drawn, not quoted."""
View = tuple[float, float]
"""From where to where on the axis of a curve."""
EVERYTHING = (-np.inf, np.inf)


class Library:
    """The columns of the runs that were looked at last, each up to date when it is handed out."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Path, tuple[Columns, Any]] = OrderedDict()
        self._lock = threading.Lock()

    @contextmanager
    def columns(self, place: RunEntry) -> Iterator[Columns]:
        """A run's columns, for one reader at a time."""
        with self._lock:
            if place.folder not in self._kept:
                own = place.kind == "ascent"
                made = Columns(place.folder / "metrics.jsonl") if own else ForeignColumns(place.folder)
                self._kept[place.folder] = made, threading.RLock()
            self._kept.move_to_end(place.folder)
            columns, lock = self._kept[place.folder]
        with lock:
            columns.update()
            yield columns
        with self._lock:
            while len(self._kept) > 1 and sum(c.size for c, _ in self._kept.values()) > MOST_BYTES:
                self._kept.popitem(last=False)


class ForeignColumns(Columns):
    """The numbers of another trainer's run, from whatever files it left: all of them are read when one changes."""

    def update(self) -> None:
        mark = fingerprint(self.path)
        if mark != self.tail:
            self.clear()
            self.add(parse_objects(foreign_lines(self.path)[0]))
            self.tail = mark


def measured_metrics(columns: Columns) -> set[str]:
    """The metrics of which a run has numbers, or once had one that was not finite."""
    known = {name for name in columns.names if len(columns.measured(name))} | set(columns.nonfinite)
    errors = columns["reward_errors"]
    return known if np.nan_to_num(errors).max(initial=0.0) > 0 else known - {"reward_errors"}


def curves(
    columns: Columns, metrics: Collection[str] = CHART_METRICS, view: View = EVERYTHING, points: int = POINTS
) -> dict[str, Any]:
    """At most `points` points of each metric; one of several steps is their mean, with the smallest and the largest."""
    steps = columns.steps
    first, last = (_whole(steps[0]), _whole(steps[-1])) if len(steps) else (None, None)
    inside: Any = slice(None) if view == EVERYTHING else np.flatnonzero((steps >= view[0]) & (steps <= view[1]))
    steps = steps[inside]
    width = bucket_width(steps, max(points, 1))
    starts = bucket_starts(steps, width)
    ends = np.append(starts[1:], len(steps)) - 1
    x = [_whole(v) for v in steps[starts] / 2 + steps[ends] / 2] if len(starts) else []
    series = {}
    for name in metrics:
        if name in columns and len(starts):
            together = buckets(columns[name][inside], starts)
            if np.isfinite(together["high"]).any():
                parts, digits = (together, DIGITS) if width > 1 else ({"mean": together["mean"]}, None)
                series[name] = {part: numbers_or_none(values, digits) for part, values in parts.items()}
    return {
        "revision": columns.revision,
        "first": first,
        "last": last,
        "nonfinite": {name: columns.nonfinite[name] for name in metrics if name in columns.nonfinite},
        "bucket": max(width, columns.every),
        "x": x,
        "metrics": series,
    }


def _whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)


def spark(columns: Columns, metrics: Sequence[str] = ("eval/accuracy", "accuracy", "reward"), points: int = 60) -> dict:
    """The first of some metrics that a run has at least two points of, small."""
    for metric in metrics:
        line = curves(columns, [metric], points=points * 4)["metrics"].get(metric)
        known = [value for value in line["mean"] if value is not None] if line else []
        if len(known) > 1 or (known and metric == metrics[-1]):
            every = -(-len(known) // points)
            return {"metric": metric, "points": known[::every]}
    return {"metric": None, "points": []}

"""Curves of several runs, one upon another: seeds of a setting as one line, their mean, with its 95 % interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ascent.records.columns import Columns, bucket_means, bucket_starts, bucket_width, numbers_or_none, rounded
from ascent.records.metrics import COSTS, bounds_of
from ascent.records.statistics import t_975

AXES: dict[str, str | None] = {"step": None, **COSTS}
"""What a curve may be drawn over, and the metric whose running sum that is."""
DIGITS = 6
View = tuple[float, float]
"""From where to where on the chosen axis."""
EVERYTHING = (-np.inf, np.inf)


class Curve(NamedTuple):
    """One metric at the steps that some runs have in common."""

    steps: np.ndarray
    x: np.ndarray
    """Where each step lies on the chosen axis, on average over the runs."""
    values: np.ndarray
    """[run step]."""

    def at(self, keep: np.ndarray) -> Curve:
        return Curve(self.steps[keep], self.x[keep], self.values[:, keep])


def curve_of(columns: Columns, metric: str, axis: str) -> Curve | None:
    """All that was measured of a metric. None: the run lacks it, or what the axis counts."""
    cost = AXES[axis]
    lies_at = columns.steps if cost is None else columns.running_sum(cost)
    there = columns.measured(metric)
    if lies_at is None or not len(there):
        return None
    found = Curve(columns.steps[there], lies_at[there], columns[metric][there][None])
    single = bucket_starts(found.steps, 1)
    return found if len(single) == len(there) else merged(found, single)  # a step that has several lines


def merged(curve: Curve, starts: np.ndarray) -> Curve:
    """The means of consecutive steps."""
    return Curve(np.floor(curve.steps[starts]), bucket_means(curve.x, starts), bucket_means(curve.values, starts))


def common(curves: Sequence[Curve]) -> Curve:
    """The steps at which all of some runs were measured."""
    steps = curves[0].steps
    for one in curves[1:]:
        if not np.array_equal(steps, one.steps):
            steps = np.intersect1d(steps, one.steps, assume_unique=True)
    own = [one if len(one.steps) == len(steps) else one.at(np.isin(one.steps, steps)) for one in curves]
    with np.errstate(over="ignore", invalid="ignore"):
        return Curve(steps, np.mean([one.x for one in own], axis=0), np.concatenate([one.values for one in own]))


def inside(x: np.ndarray, view: View) -> np.ndarray:
    return (x >= view[0]) & (x <= view[1])


def around(x: np.ndarray, view: View) -> np.ndarray:
    """What is in view, and on either side the next point, to which a line is drawn out of the picture."""
    keep = inside(x, view)
    for outside in (np.flatnonzero(x < view[0])[-1:], np.flatnonzero(x > view[1])[:1]):
        keep[outside] = True
    return keep


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Mean over runs, and half of its 95 % interval at every point (Student's t); one run has none."""
    runs = len(values)
    if runs < 2:
        return values[0], None
    with np.errstate(over="ignore", invalid="ignore"):
        return values.mean(0), t_975(runs - 1) * values.std(0, ddof=1) / np.sqrt(runs)


def overlay(
    groups: Mapping[str, Sequence[str]],
    columns: Mapping[str, Columns],
    metric: str,
    axis: str,
    points: int,
    drawn: bool = True,
    view: View = EVERYTHING,
) -> dict:
    """A metric of every group, and of every run, as lines: to draw, or (`drawn` false) with all their digits.

    A drawn band ends where the metric's values do: at 0 and 1 for a share, at 0 for what cannot be negative. A drawn
    line has a point on either side of the view; `whole` is from where to where all lines go.
    """
    low, high = bounds_of(metric) if drawn else (None, None)
    made: dict[str, Any] = {"metric": metric, "x": axis, "bounds": [low, high], "groups": {}, "runs": {}}
    ends: list[float] = []

    def numbers(values: np.ndarray) -> list[float | None]:
        return numbers_or_none(rounded(values, DIGITS) if drawn else values)

    def line_of(curves: Sequence[Curve]) -> tuple[dict[str, Any], np.ndarray]:
        curve = common(curves)
        ends.extend(curve.x[[0, -1]] if len(curve.x) else [])
        curve = curve.at((around if drawn else inside)(curve.x, view))
        width = bucket_width(curve.steps[inside(curve.x, view)], points)
        curve = merged(curve, bucket_starts(curve.steps, width)) if width > 1 else curve
        return {"x": numbers(curve.x), "bucket": width}, curve.values

    for name, ids in groups.items():
        own = {id: curve for id in ids if (curve := curve_of(columns[id], metric, axis)) is not None}
        if not own:
            continue
        line, values = line_of(list(own.values()))
        mean, half = band(values)
        line |= {"mean": numbers(mean), "seeds": len(own)}
        if half is not None:
            line["low"] = numbers(np.maximum(mean - half, -np.inf if low is None else low))
            line["high"] = numbers(np.minimum(mean + half, np.inf if high is None else high))
            for id, curve in own.items():
                single, values = line_of([curve])
                made["runs"][id] = single | {"mean": numbers(values[0])}
        odd = sorted({mark for id in own for mark in columns[id].nonfinite.get(metric, [])})
        made["groups"][name] = line | {"nonfinite": odd if axis == "step" else []}
    known = bool(ends) and np.isfinite(ends).all()  # what was spent may be too large to be a number
    return made | {"whole": [float(min(ends)), float(max(ends))] if known else None}

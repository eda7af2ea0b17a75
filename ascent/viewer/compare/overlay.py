"""Curves of several runs, one upon another: seeds of a setting as one line, their mean, with its 95 % interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ascent.diagnose.statistics import t_975
from ascent.viewer.compare.bounds import bounds
from ascent.viewer.digest import MOST_BUCKETS, Buckets, Digest, merged
from ascent.viewer.exact import REREAD, Exact, Piece

AXES = {"step": None, "samples": "num_responses", "tokens": "num_tokens", "seconds": "time/step"}
"""What a curve may be drawn over, and the metric whose running sum that is."""
DIGITS = 6
TOGETHER = 3 * REREAD
"""Lines of all runs that are read again for one view."""
View = tuple[int | float, int | float]
"""From where to where on the chosen axis."""
EVERYTHING, NOWHERE = (-np.inf, np.inf), (np.inf, -np.inf)
NO_BUCKETS = Buckets(*(np.empty(0) for _ in Buckets._fields))


class Curve(NamedTuple):
    """One metric of one run: sums over steps that follow one another, as its digest has them."""

    place: np.ndarray
    """Which steps a bucket is for: those from place × width on."""
    buckets: Buckets
    width: int
    """Steps a bucket; a power of two."""
    x: np.ndarray
    """Where each bucket lies on the chosen axis: in the middle of its steps."""
    end: np.ndarray
    """Where it ends."""


class Line(NamedTuple):
    """Points that some runs have in common."""

    place: np.ndarray
    x: np.ndarray
    """Where each lies, on average over the runs."""
    end: np.ndarray
    values: np.ndarray
    """[run point]."""
    width: int
    """Steps of a point."""


def curve(exact: Exact, metric: str, axis: str = "step", **part: Any) -> Curve | None:
    """All that was measured of a metric, or a part of it. None: the run lacks it, or what the axis counts."""
    digest, cost = exact.digest, AXES[axis]
    known = digest.metrics.get(metric)
    if known is None or not known.number.any() or (cost is not None and not _counted(digest, cost)):
        return None
    piece = exact.piece([metric] if cost is None else [metric, cost], rare=metric, **part)
    buckets = piece.metrics.get(metric, NO_BUCKETS)
    there = np.flatnonzero(buckets.number > 0)
    x, end = (piece.first / 2 + piece.last / 2, piece.last) if cost is None else spent(digest, piece, cost)
    return Curve(piece.place[there], Buckets(*(p[there] for p in buckets)), piece.width, x[there], end[there])


def _counted(digest: Digest, cost: str) -> bool:
    """Does every line say what its step has cost?"""
    return cost in digest.metrics and 0 < digest.lines <= int(digest.metrics[cost].number.sum())


def spent(digest: Digest, piece: Piece, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """What a run had cost after the middle line of each bucket, and after its last."""
    cost = piece.metrics.get(metric, NO_BUCKETS)
    with np.errstate(over="ignore", invalid="ignore"):
        so_far = digest.metrics[metric].sum[: piece.before].sum() + np.cumsum(cost.sum)
        return so_far - cost.sum * (cost.number - 1) / (2 * np.maximum(cost.number, 1)), so_far


def coarser(curve: Curve, times: int) -> Curve:
    """Buckets of so many times as many steps."""
    if times <= 1 or not len(curve.place):
        return curve
    index = curve.place // times
    cuts = np.flatnonzero(np.diff(index, prepend=index[0] - 1))
    after = np.append(cuts[1:], len(index))
    x = np.add.reduceat(curve.x, cuts) / (after - cuts)
    return Curve(index[cuts], merged(curve.buckets, cuts), curve.width * times, x, curve.end[after - 1])


def aligned(curves: Sequence[Curve], points: int, steps: View = EVERYTHING) -> Line:
    """Where all of some runs were measured, in at most so many points within these steps.

    Where a bucket holds several steps, it counts if it has as many measured ones in all runs.
    """
    width = max(curve.width for curve in curves)
    same = [coarser(curve, width // curve.width) for curve in curves]
    seen = min(int(np.count_nonzero(inside(curve.place * width, steps))) for curve in same)
    times = max(1, -(-seen // points))
    same = [coarser(curve, times) for curve in same]
    keys = [list(zip(c.place.tolist(), c.buckets.number.tolist(), strict=True)) for c in same]
    known = set.intersection(*map(set, keys))
    xs, ends, rows, place = [], [], [], np.empty(0, int)
    for c, key in zip(same, keys, strict=True):
        keep = np.array([one in known for one in key], bool)
        place = c.place[keep]
        xs.append(c.x[keep])
        ends.append(c.end[keep])
        with np.errstate(invalid="ignore"):
            rows.append(c.buckets.sum[keep] / c.buckets.number[keep])
    return Line(place, np.mean(xs, axis=0), np.mean(ends, axis=0), np.stack(rows), width * times)


def inside(x: np.ndarray, view: View) -> np.ndarray:
    return (x >= view[0]) & (x <= view[1])


def around(x: np.ndarray, view: View) -> np.ndarray:
    """What is in view, and on either side the next point, to which a line is drawn out of the picture."""
    keep = inside(x, view)
    for outside in (np.flatnonzero(x < view[0])[-1:], np.flatnonzero(x > view[1])[:1]):
        keep[outside] = True
    return keep


def line_of(exacts: Sequence[Exact], metric: str, axis: str, points: int, view: View, most: int) -> tuple[Line, View]:
    """The points in view and the ones beside it, as exact as can be drawn; and from where to where all of them lie."""
    every = points if view == EVERYTHING else MOST_BUCKETS
    whole = aligned(_there([curve(one, metric, axis) for one in exacts]), every)
    begins = max(whole.place[0] * whole.width, min(one.digest.first[0] for one in exacts)) if len(whole.x) else 0
    ends = (float(whole.x[0] if AXES[axis] else begins), float(whole.end[-1])) if len(whole.x) else NOWHERE
    seen = around(whole.x, view)
    if view == EVERYTHING or not seen.any():
        return whole, ends
    near, wide = inside(whole.x, view), whole.width
    within = _steps(whole.place[near if near.any() else seen], wide)
    begin, end = _steps(whole.place[seen], wide)
    if end - begin > max(most, 2 * (within[1] - within[0])):
        begin, end = within  # what lies beside is too far away to be read
    part = {"begin": begin, "end": end, "points": points, "most": most}
    found = aligned(_there([curve(one, metric, axis, **part) for one in exacts]), points, within)
    keep = around(found.x, view)
    return Line(found.place[keep], found.x[keep], found.end[keep], found.values[:, keep], found.width), ends


def _steps(places: np.ndarray, width: int) -> View:
    """The first step of some buckets, and the last, which need not be a whole number."""
    return float(places.min() * width), float(np.nextafter(float((places.max() + 1) * width), -np.inf))


def _there(curves: Sequence[Curve | None]) -> list[Curve]:
    return [one for one in curves if one is not None]


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Mean over runs, and half of its 95 % interval at every point (Student's t); one run has none."""
    runs = len(values)
    if runs < 2:
        return values[0], None
    return values.mean(0), t_975(runs - 1) * values.std(0, ddof=1) / np.sqrt(runs)


def overlay(
    groups: Mapping[str, Sequence[str]],
    exacts: Mapping[str, Exact],
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
    low, high = bounds(metric) if drawn else (None, None)
    numbers = listed if drawn else unrounded
    most = min(REREAD, TOGETHER // max(1, len(exacts)))
    made: dict[str, Any] = {"metric": metric, "x": axis, "bounds": [low, high], "groups": {}, "runs": {}}
    reach = []

    def line_for(ids: Sequence[str]) -> tuple[dict[str, Any], np.ndarray]:
        found, ends = line_of([exacts[id] for id in ids], metric, axis, points, view, most)
        keep = np.ones(len(found.x), bool) if drawn else inside(found.x, view)
        reach.append(ends)
        return {"x": numbers(found.x[keep]), "bucket": found.width}, found.values[:, keep]

    for name, ids in groups.items():
        have = [id for id in ids if curve(exacts[id], metric, axis) is not None]
        if not have:
            continue
        line, values = line_for(have)
        mean, half = band(values)
        line |= {"mean": numbers(mean), "seeds": len(have)}
        if half is not None:
            line["low"] = numbers(np.maximum(mean - half, -np.inf if low is None else low))
            line["high"] = numbers(np.minimum(mean + half, np.inf if high is None else high))
            for id in have:
                own, values = line_for([id])
                made["runs"][id] = own | {"mean": numbers(values[0])}
        made["groups"][name] = line | {"nonfinite": odd(have, exacts, metric) if axis == "step" else []}
    least, largest = min((e[0] for e in reach), default=np.inf), max((e[1] for e in reach), default=-np.inf)
    known = least <= largest and np.isfinite([least, largest]).all()  # what was spent may be too large to be a number
    return made | {"whole": [least, largest] if known else None}


def unrounded(values: np.ndarray) -> list[float | None]:
    """Numbers with all their digits; None where a sum was too large to be one."""
    return [value if np.isfinite(value) else None for value in values.tolist()]


def odd(ids: Sequence[str], exacts: Mapping[str, Exact], metric: str) -> list[Any]:
    """(step, what it was) where a number was not finite, in any of the runs."""
    return sorted({tuple(one) for id in ids for one in exacts[id].digest.nonfinite.get(metric, [])})


def listed(values: np.ndarray) -> list[float | None]:
    """Numbers with as many digits as a picture needs; None where a sum was too large to be one."""
    finite = np.isfinite(values)
    size = np.abs(np.where(finite & (values != 0), values, 1.0))
    with np.errstate(over="ignore", invalid="ignore"):
        scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(size)))
        short = np.round(values * scale) / scale
    found = np.where(np.isfinite(short), short, values).tolist()
    return found if finite.all() else [v if ok else None for v, ok in zip(found, finite.tolist(), strict=True)]

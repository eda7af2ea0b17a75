"""Curves of several runs, one upon another: seeds of a setting as one line, their mean, with its 95 % interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ascent.diagnose.statistics import t_975
from ascent.viewer.compare.bounds import bounds
from ascent.viewer.digest import Buckets, Digest, merged

AXES = {"step": None, "samples": "num_responses", "tokens": "num_tokens", "seconds": "time/step"}
"""What a curve may be drawn over, and the metric whose running sum that is."""
DIGITS = 6


class Curve(NamedTuple):
    """One metric of one run: sums over steps that follow one another, as its digest has them."""

    place: np.ndarray
    """Which steps a bucket is for: those from place × width on."""
    buckets: Buckets
    width: int
    """Steps a bucket; a power of two."""
    x: np.ndarray
    """Where each bucket lies on the chosen axis."""


def curve(digest: Digest, metric: str, axis: str = "step") -> Curve | None:
    """None: the run does not have the metric, or not what the axis counts."""
    buckets = digest.metrics.get(metric)
    if buckets is None or not buckets.number.any():
        return None
    x = digest.first / 2 + digest.last / 2 if AXES[axis] is None else spent(digest, AXES[axis] or "")
    return None if x is None else Curve(digest.index, buckets, digest.width, x)


def spent(digest: Digest, metric: str) -> np.ndarray | None:
    """What a run had cost after the middle line of each bucket."""
    cost = digest.metrics.get(metric)
    if cost is None or int(cost.number.sum()) < digest.lines or not digest.lines:
        return None
    return np.cumsum(cost.sum) - cost.sum * (cost.number - 1) / (2 * cost.number)


def coarser(curve: Curve, times: int) -> Curve:
    """Buckets of so many times as many steps."""
    if times <= 1 or not len(curve.place):
        return curve
    index = curve.place // times
    cuts = np.flatnonzero(np.diff(index, prepend=index[0] - 1))
    x = np.add.reduceat(curve.x, cuts) / np.diff(np.append(cuts, len(index)))
    return Curve(index[cuts], merged(curve.buckets, cuts), curve.width * times, x)


def aligned(curves: Sequence[Curve], points: int) -> tuple[np.ndarray, np.ndarray, int]:
    """x and [run point] values at the steps that all of some runs have, at most so many; and the steps of a point.

    Where a bucket holds several steps, it counts if it has as many measured ones in all runs.
    """
    width = max(curve.width for curve in curves)
    same = [coarser(curve, width // curve.width) for curve in curves]
    times = max(1, -(-min(len(curve.place) for curve in same) // points))
    same = [coarser(curve, times) for curve in same]
    keys = [list(zip(c.place.tolist(), c.buckets.number.tolist(), strict=True)) for c in same]
    known = {key for key in set.intersection(*map(set, keys)) if key[1] > 0}
    xs, rows = [], []
    for c, key in zip(same, keys, strict=True):
        keep = np.array([one in known for one in key], bool)
        xs.append(c.x[keep])
        with np.errstate(invalid="ignore"):
            rows.append(c.buckets.sum[keep] / c.buckets.number[keep])
    return np.mean(xs, axis=0), np.stack(rows), width * times


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Mean over runs, and half of its 95 % interval at every point (Student's t); one run has none."""
    runs = len(values)
    if runs < 2:
        return values[0], None
    return values.mean(0), t_975(runs - 1) * values.std(0, ddof=1) / np.sqrt(runs)


def overlay(
    groups: Mapping[str, Sequence[str]],
    digests: Mapping[str, Digest],
    metric: str,
    axis: str,
    points: int,
    drawn: bool = True,
) -> dict:
    """A metric of every group, and of every run, as lines: to draw, or (`drawn` false) with all their digits.

    A drawn band ends where the metric's values do: at 0 and 1 for a share, at 0 for what cannot be negative.
    """
    low, high = bounds(metric) if drawn else (None, None)
    numbers = listed if drawn else unrounded
    made: dict[str, Any] = {"metric": metric, "x": axis, "bounds": [low, high], "groups": {}, "runs": {}}
    for name, ids in groups.items():
        found = {id: c for id in ids if (c := curve(digests[id], metric, axis)) is not None}
        if not found:
            continue
        x, values, bucket = aligned(list(found.values()), points)
        mean, half = band(values)
        line = {"x": numbers(x), "mean": numbers(mean), "seeds": len(found), "bucket": bucket}
        if half is not None:
            line["low"] = numbers(np.maximum(mean - half, -np.inf if low is None else low))
            line["high"] = numbers(np.minimum(mean + half, np.inf if high is None else high))
            for id, one in found.items():
                x, own, bucket = aligned([one], points)
                made["runs"][id] = {"x": numbers(x), "mean": numbers(own[0]), "bucket": bucket}
        made["groups"][name] = line | {"nonfinite": odd(found, digests, metric) if axis == "step" else []}
    return made


def unrounded(values: np.ndarray) -> list[float | None]:
    """Numbers with all their digits; None where a sum was too large to be one."""
    return [value if np.isfinite(value) else None for value in values.tolist()]


def odd(ids: Mapping[str, Any], digests: Mapping[str, Digest], metric: str) -> list[Any]:
    """(step, what it was) where a number was not finite, in any of the runs."""
    return sorted({tuple(one) for id in ids for one in digests[id].nonfinite.get(metric, [])})


def listed(values: np.ndarray) -> list[float | None]:
    """Numbers with as many digits as a picture needs; None where a sum was too large to be one."""
    finite = np.isfinite(values)
    size = np.abs(np.where(finite & (values != 0), values, 1.0))
    with np.errstate(over="ignore", invalid="ignore"):
        scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(size)))
        short = np.round(values * scale) / scale
    found = np.where(np.isfinite(short), short, values).tolist()
    return found if finite.all() else [v if ok else None for v, ok in zip(found, finite.tolist(), strict=True)]

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
    """One metric of one run: sums over consecutive lines, as its digest has them."""

    first: np.ndarray
    last: np.ndarray
    buckets: Buckets
    width: int
    """Lines a bucket; a power of two."""
    x: np.ndarray
    """Where each bucket lies on the chosen axis."""


def curve(digest: Digest, metric: str, axis: str = "step") -> Curve | None:
    """None: the run does not have the metric, or not what the axis counts."""
    buckets = digest.metrics.get(metric)
    if buckets is None or not buckets.number.any():
        return None
    first, last = digest.first, digest.last
    x = (first + last) / 2 if AXES[axis] is None else spent(digest, AXES[axis] or "")
    return None if x is None else Curve(first, last, buckets, digest.width, x)


def spent(digest: Digest, metric: str) -> np.ndarray | None:
    """What a run had cost after the middle line of each bucket."""
    cost = digest.metrics.get(metric)
    if cost is None or int(cost.number.sum()) < digest.lines or not digest.lines:
        return None
    return np.cumsum(cost.sum) - cost.sum * (cost.number - 1) / (2 * cost.number)


def coarser(curve: Curve, times: int) -> Curve:
    """So many neighbouring buckets as one."""
    if times <= 1 or not len(curve.first):
        return curve
    cuts = np.arange(0, len(curve.first), times)
    ends = np.append(cuts[1:], len(curve.first)) - 1
    weight = np.ones(len(curve.x))
    x = np.add.reduceat(curve.x, cuts) / np.add.reduceat(weight, cuts)
    return Curve(curve.first[cuts], curve.last[ends], merged(curve.buckets, cuts), curve.width * times, x)


def aligned(curves: Sequence[Curve], points: int) -> tuple[np.ndarray, np.ndarray, int]:
    """x and [run point] values at the steps that all of some runs have, at most so many; and the lines of a point.

    Where a bucket holds several lines, it counts if it spans the same steps, and as many measured ones, in all runs.
    """
    width = max(curve.width for curve in curves)
    size = min(-(-len(curve.first) // (width // curve.width)) for curve in curves)
    times = max(1, -(-size // points))
    same = [coarser(curve, width // curve.width * times) for curve in curves]
    keys = [np.stack([c.first, c.last, c.buckets.number.astype(float)], 1) for c in same]
    known = {tuple(key) for key in keys[0][keys[0][:, 2] > 0].tolist()} if len(keys) > 1 else set()
    for other in keys[1:]:
        known &= {tuple(key) for key in other.tolist()}
    xs, rows = [], []
    for c, key in zip(same, keys, strict=True):
        keep = np.array([tuple(one) in known for one in key.tolist()], bool) if len(keys) > 1 else key[:, 2] > 0
        xs.append(c.x[keep])
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

"""Settings over seeds: means with their intervals, and differences to the first setting, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from ascent.records.statistics import interval

Finals = Mapping[str, Mapping[Any, Mapping[str, Any]]]
"""Of each setting, by seed, the numbers that a run ended with."""


def over_seeds(finals: Finals, measures: Mapping[str, Collection[str]]) -> dict[str, dict[str, Any]]:
    """For each setting and measure: mean, half of the 95 % interval, values, and the difference to the first setting.

    A difference is taken seed by seed, over the seeds that both have, so that what a seed does to both cancels.
    A measure that a seed of a setting lacks is left out for that setting.
    """
    rows: dict[str, dict[str, Any]] = {}
    first = next(iter(finals), None)
    for name, group in finals.items():
        rows[name] = {}
        for measure in measures[name]:
            values = [final.get(measure) for final in group.values()]
            if not values or any(value is None for value in values):
                continue
            mean, half = interval([float(value) for value in values if value is not None])
            if not math.isfinite(mean):
                continue
            rows[name][measure] = {"mean": mean, "half": known(half), "values": values}
            if name != first and first is not None:
                rows[name][measure] |= difference(finals[first], group, measure)
    return rows


def difference(first: Mapping[Any, Mapping[str, Any]], other: Mapping[Any, Mapping[str, Any]], measure: str) -> dict:
    """The mean of other − first over the seeds of both; nothing where they share none, or the first lacks it."""
    if any(final.get(measure) is None for final in first.values()):
        return {}
    gaps = [float(other[seed][measure] - first[seed][measure]) for seed in other if seed in first]
    if not gaps:
        return {}
    gap, half = interval(gaps)
    return {"difference": gap, "difference_half": known(half), "pairs": len(gaps)}


def known(half: float) -> float | None:
    """One value alone has no interval; nor have numbers whose squares are too large."""
    return half if math.isfinite(half) else None

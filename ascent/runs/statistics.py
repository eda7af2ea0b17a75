"""Means, shares and pass@k with their intervals; settings over seeds, with differences to the first."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_TO_15 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_TO_30 = (2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
T_975 = (*_TO_15, *_TO_30)
"""97.5 % quantile of Student's t for 1 … 30 degrees of freedom."""


def t_975(freedom: int) -> float:
    """Beyond the table, the normal quantile with the first terms of its expansion in 1/freedom."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval (Student's t); one value alone has none: NaN."""
    x = np.asarray(values, dtype=float)
    if len(x) < 2:
        return float(x.mean()), math.nan
    return float(x.mean()), t_975(len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))


class PromptMean(NamedTuple):
    """A mean over prompts with its 95 % interval, where there is one."""

    value: float
    low: float | None
    high: float | None


RESAMPLES = 2000


def prompt_mean(values: Sequence[float]) -> PromptMean | None:
    """The mean of one number per prompt, with its interval; None without prompts.

    Wilson's interval if all are 0 or 1, because the bootstrap of a share near 0 or 1 is too narrow; otherwise the
    percentiles of the bootstrap over prompts, from a fixed seed.
    """
    x = np.asarray(values, dtype=float)
    if not len(x):
        return None
    if bool(np.isin(x, (0.0, 1.0)).all()):
        return wilson(int(x.sum()), len(x))
    if bool((x == x[0]).all()):  # one prompt, or all alike: their spread is unknown, not 0
        return PromptMean(float(x[0]), None, None)
    rng = np.random.default_rng(0)
    blocks = np.array_split(np.arange(RESAMPLES), max(1, RESAMPLES * len(x) // 2_000_000))
    means = np.concatenate([x[rng.integers(len(x), size=(len(block), len(x)))].mean(1) for block in blocks])
    low, high = np.percentile(means, (2.5, 97.5))
    return PromptMean(float(x.mean()), float(low), float(high))


def wilson(right: int, tried: int) -> PromptMean:
    """A share with Wilson's interval: (p + z²/2n ± z√(p(1−p)/n + z²/4n²)) / (1 + z²/n). Wilson, 1927."""
    p, z = right / tried, 1.959964
    middle, width = p + z**2 / (2 * tried), z * math.sqrt(p * (1 - p) / tried + z**2 / (4 * tried**2))
    scale = 1 + z**2 / tried
    return PromptMean(p, max(0.0, (middle - width) / scale), min(1.0, (middle + width) / scale))


def pass_at(k: int, tried: int, right: int) -> float:
    """Chance that of k responses out of `tried`, drawn without replacement, one is right: 1 − C(n−c, k)/C(n, k).

    Unbiased for the chance that one of k fresh responses is right. Chen et al., 2021 (Codex).
    """
    if not 1 <= k <= tried or not 0 <= right <= tried:
        raise ValueError(f"pass@{k} of {tried} responses, {right} of them right")
    return 1.0 - math.comb(tried - right, k) / math.comb(tried, k)


def powers(n: int) -> list[int]:
    """1, 2, 4, … and n itself."""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


Finals = Mapping[str, Mapping[Any, Mapping[str, Any]]]
"""Of each setting, by seed, the numbers that a run ended with."""


def over_seeds(finals: Finals, measures: Mapping[str, Collection[str]]) -> dict[str, dict[str, Any]]:
    """For each setting and measure: mean, half of the 95 % interval, values, and the difference to the first setting.

    A difference is taken seed by seed, over the seeds that both have, so that what a seed does to both cancels.
    A measure that a seed of a setting lacks is left out for that setting.
    """
    rows: dict[str, dict[str, Any]] = {}
    first = next(iter(finals.values()), {})
    for name, group in finals.items():
        rows[name] = {}
        for measure in measures[name]:
            values = [final.get(measure) for final in group.values()]
            if not values or any(value is None for value in values):
                continue
            mean, half = interval([float(value) for value in values if value is not None])
            if not math.isfinite(mean):
                continue
            rows[name][measure] = row = {"mean": mean, "half": known(half), "values": values}
            if group is first or any(final.get(measure) is None for final in first.values()):
                continue
            gaps = [float(group[seed][measure] - first[seed][measure]) for seed in group if seed in first]
            if gaps:
                gap, half = interval(gaps)
                row |= {"difference": gap, "difference_half": known(half), "pairs": len(gaps)}
    return rows


def known(half: float) -> float | None:
    """One value alone has no interval; nor have numbers whose squares are too large."""
    return half if math.isfinite(half) else None

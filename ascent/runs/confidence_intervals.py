"""Means, fractions and pass@k with confidence intervals, and the comparison of settings over seeds."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_TO_15 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_TO_30 = (2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
T_QUANTILES = (*_TO_15, *_TO_30)
"""97.5 % quantile of Student's t for 1 … 30 degrees of freedom."""


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t; beyond the table, by an expansion in 1/freedom."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def mean_and_half_width(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the mean and the half-width of its 95 % interval (Student's t), which is NaN for one value."""
    x = np.asarray(values, dtype=float)
    if len(x) < 2:
        return float(x.mean()), math.nan
    return float(x.mean()), t_quantile(len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))


class PromptMean(NamedTuple):
    """A mean over prompts with its 95 % interval, if it has one."""

    value: float
    low: float | None
    high: float | None


NUM_BOOTSTRAP_SAMPLES = 2000


def mean_over_prompts(values: Sequence[float]) -> PromptMean | None:
    """Return the mean of one number per prompt with its interval; None without prompts.

    The interval is Wilson's if all values are 0 or 1, because the bootstrap is too narrow for fractions near 0 or 1.
    Otherwise it consists of percentiles of a bootstrap over prompts with a fixed seed.
    """
    x = np.asarray(values, dtype=float)
    if not len(x):
        return None
    if bool(np.isin(x, (0.0, 1.0)).all()):
        return wilson(int(x.sum()), len(x))
    if bool((x == x[0]).all()):  # one prompt or equal values: the spread is unknown, not 0
        return PromptMean(float(x[0]), None, None)
    rng = np.random.default_rng(0)
    blocks = np.array_split(np.arange(NUM_BOOTSTRAP_SAMPLES), max(1, NUM_BOOTSTRAP_SAMPLES * len(x) // 2_000_000))
    means = np.concatenate([x[rng.integers(len(x), size=(len(block), len(x)))].mean(1) for block in blocks])
    low, high = np.percentile(means, (2.5, 97.5))
    return PromptMean(float(x.mean()), float(low), float(high))


def wilson(num_right: int, num_tried: int) -> PromptMean:
    """Return a fraction with Wilson's interval: (p + z²/2n ± z√(p(1−p)/n + z²/4n²)) / (1 + z²/n). Wilson, 1927."""
    n = num_tried
    p, z = num_right / n, 1.959964
    middle, width = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    scale = 1 + z**2 / n
    return PromptMean(p, max(0.0, (middle - width) / scale), min(1.0, (middle + width) / scale))


def pass_at_k(k: int, tried: int, right: int) -> float:
    """Return the unbiased estimate of pass@k for c = `right` of n = `tried` responses: 1 − C(n−c, k)/C(n, k).

    Chen et al., 2021 (Codex).
    """
    if not 1 <= k <= tried or not 0 <= right <= tried:
        raise ValueError(f"pass@{k} of {tried} responses, {right} of them right")
    return 1.0 - math.comb(tried - right, k) / math.comb(tried, k)


def powers_of_two(n: int) -> list[int]:
    """Return 1, 2, 4, … and n itself."""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


FinalMetrics = Mapping[str, Mapping[Any, Mapping[str, Any]]]
"""For each setting and seed, the final metrics of the run."""


def compare_over_seeds(finals: FinalMetrics, measures: Mapping[str, Collection[str]]) -> dict[str, dict[str, Any]]:
    """Return mean, half-width of the 95 % interval, values and difference to the first setting, for every measure.

    Differences are paired by seed, over the seeds that both settings have. A measure that is missing for a seed of a
    setting is omitted for that setting.
    """
    rows: dict[str, dict[str, Any]] = {}
    first = next(iter(finals.values()), {})
    for name, group in finals.items():
        rows[name] = {}
        for measure in measures[name]:
            values = [final.get(measure) for final in group.values()]
            if not values or any(value is None for value in values):
                continue
            mean, half = mean_and_half_width([float(value) for value in values if value is not None])
            if not math.isfinite(mean):
                continue
            rows[name][measure] = row = {"mean": mean, "half": finite_or_none(half), "values": values}
            if group is first or any(final.get(measure) is None for final in first.values()):
                continue
            gaps = [float(group[seed][measure] - first[seed][measure]) for seed in group if seed in first]
            if gaps:
                gap, half = mean_and_half_width(gaps)
                row |= {"difference": gap, "difference_half": finite_or_none(half), "pairs": len(gaps)}
    return rows


def finite_or_none(half: float) -> float | None:
    """Return a half-width, or None if it is not finite: for one value, or numbers whose squares overflow."""
    return half if math.isfinite(half) else None

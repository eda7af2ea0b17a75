"""Means with intervals over a few seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

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

"""Where the values of a metric end: shares at 0 and 1, what cannot be negative at 0."""

from __future__ import annotations

from ascent.viewer.charts import CHARTS

CLIPPED = "clip_ratio/"
SHARES = frozenset(
    metric for chart in CHARTS for metric, _ in chart.series if chart.share or metric.startswith(CLIPPED)
)
FROM_ZERO = ("spread", "length", "entropy", "grad", "mismatch", "speed", "time", "errors", "steps")
"""Charts whose values are never negative: deviations, counts, norms, times, squared errors, entropy of tokens."""
NOT_NEGATIVE = frozenset(metric for chart in CHARTS if chart.key in FROM_ZERO for metric, _ in chart.series)


def bounds(metric: str) -> tuple[float | None, float | None]:
    """The smallest and the largest value that a metric can have; None where there is no such bound."""
    if metric in SHARES:
        return 0.0, 1.0
    return (0.0 if metric in NOT_NEGATIVE else None), None

"""The one table of metrics: what each is called, its unit, its bounds, and the order in which a person should look.

plot.png, the report, the pages, comparisons and trackers read it. The loss comes last: it does not measure progress.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from ascent.core.metric_names import MISMATCH

GREEDY = "greedy answers"
"""What an evaluation is called where nobody knows whether its prompts were held out."""
HOLDS_NOTHING_OUT = ("lecture",)
"""Tasks that are evaluated on the prompts that they train on."""
PHASES = ("generate", "reward", "score", "update", "sync", "eval")
UPDATES = "mean over the step's updates"
SHARE = (0.0, 1.0)
"""The bounds of a share."""
NOT_NEGATIVE = (0.0, None)
Bounds = tuple[float | None, float | None]


class Metric(NamedTuple):
    """One line of a chart."""

    name: str
    """As in metrics.jsonl."""
    label: str
    """What it is called beside the title of its chart."""
    colour: int
    """Its colour and dash. Lines that belong together have one color in all charts."""


@dataclass(frozen=True)
class Chart:
    """Metrics that are drawn together: they have one unit, and one pair of bounds."""

    key: str
    title: str
    unit: str
    bounds: Bounds
    """The smallest and the largest value that there can be; None where there is no such bound."""
    series: tuple[Metric, ...]

    @property
    def share(self) -> bool:
        return self.bounds == SHARE


def _chart(key: str, title: str, unit: str, bounds: Bounds, *series: tuple[Any, ...]) -> Chart:
    lines = (Metric(line[0], line[1], line[2] if len(line) > 2 else place) for place, line in enumerate(series))
    return Chart(key, title, unit, bounds, tuple(lines))


ANY: Bounds = (None, None)
CHARTS = (
    _chart(
        *("accuracy", "Exactly right", "share of answers", SHARE),
        ("eval/accuracy", GREEDY),
        ("accuracy", "sampled"),
        ("lenient", "sampled, any form"),
        ("eval/lenient", f"{GREEDY}, any form"),
    ),
    _chart(
        *("pairs", "Pairs rated right", "share of pairs", SHARE),
        ("eval/pairs/accuracy", "held out"),
        ("rewards/accuracies", "batch"),
    ),
    _chart("log-loss", "Log-loss of pairs", "nats per pair", NOT_NEGATIVE, ("eval/pairs/log_loss", "held out")),
    _chart(
        *("margin", "Margin of pairs", "difference of rewards", ANY),
        ("eval/pairs/margin", "held out"),
        ("rewards/margins", "batch"),
    ),
    _chart("calibration", "Calibration error", "expected, share", SHARE, ("eval/pairs/ece", "held out")),
    _chart("log-prob", "Log-prob of held-out demonstrations", "nats per token", ANY, ("eval/logp", "held out")),
    _chart(
        *("steps", "Error of the labels", "squared", NOT_NEGATIVE),
        ("eval/steps/error", "held out"),
        ("steps/error", "batch"),
    ),
    _chart(
        *("explained", "Labels explained", "share of the labels' variance", ANY),
        ("eval/steps/explained", "held out"),
    ),
    _chart(
        *("reward", "Reward", "", ANY),
        ("reward", "sampled", 1),
        ("eval/reward", GREEDY, 0),
        ("exact/reward", "E[R], enumerated"),
    ),
    _chart("spread", "Spread of the reward", "standard deviation", NOT_NEGATIVE, ("reward_std", "sampled", 1)),
    _chart(
        *("length", "Length of a response", "tokens", NOT_NEGATIVE),
        ("completions/mean_length", "mean"),
        ("completions/mean_characters", "mean, characters"),
    ),
    _chart("truncated", "Cut off by the limit", "share of responses", SHARE, ("completions/clipped_ratio", "cut off")),
    _chart("entropy", "Entropy", f"nats per token, {UPDATES}", NOT_NEGATIVE, ("entropy", "entropy")),
    _chart("kl", "KL to the reference", f"per token, {UPDATES}", ANY, ("kl", "KL")),
    _chart(
        *("clip", "Clipped tokens", f"share of tokens, {UPDATES}", SHARE),
        ("clip_ratio/low_mean", "low"),
        ("clip_ratio/high_mean", "high"),
    ),
    _chart(
        *("signal", "Groups with equal rewards", "share of groups, no signal for group credit", SHARE),
        ("frac_reward_zero_std", "equal rewards"),
    ),
    _chart(
        *("extremes", "Groups all right, all wrong", "share of groups", SHARE),
        ("frac_all_right", "all right"),
        ("frac_all_wrong", "all wrong"),
    ),
    _chart("grad", "Gradient norm", "before clipping", NOT_NEGATIVE, ("grad_norm", "norm")),
    _chart("critic", "Critic", "share of the returns' variance", ANY, ("value/explained_variance", "explained")),
    _chart("mismatch", "Sampler mismatch", "mean |logp − logp_sampler|", NOT_NEGATIVE, (MISMATCH, "mismatch")),
    _chart("speed", "Speed", "tokens per second", NOT_NEGATIVE, ("time/tokens_per_second", "sampled tokens")),
    _chart(
        *("time", "Time of each phase", "seconds", NOT_NEGATIVE),
        *((f"time/{phase}", phase) for phase in PHASES),
        ("time/step", "whole step"),
    ),
    _chart("errors", "Rewards that failed", "responses", NOT_NEGATIVE, ("reward_errors", "failed")),
    _chart("loss", "Loss, no measure of progress", "", ANY, ("loss", "loss")),
)
DRAWN = tuple(metric.name for chart in CHARTS for metric in chart.series)
SHARES = frozenset(metric.name for chart in CHARTS if chart.share for metric in chart.series)
_CHART_OF = {metric.name: chart for chart in CHARTS for metric in chart.series}
COSTS = {"samples": "num_responses", "tokens": "num_tokens", "seconds": "time/step"}
"""What a step costs, and the metric that says how much."""

ALWAYS_WRITTEN = (
    *("step", "reward", "reward_std", "accuracy", "eval/accuracy", "eval/reward", "exact/reward", "entropy", "kl"),
    *("clip_ratio/low_mean", "clip_ratio/high_mean", "frac_reward_zero_std", "frac_all_right", "frac_all_wrong"),
    *("completions/mean_length", "completions/clipped_ratio", MISMATCH, "grad_norm", "reward_errors"),
)
"""On every line of metrics.jsonl, in this order; null: not measured in this step. The loss comes last."""
HEADLINES = (
    *("eval/accuracy", "accuracy", "eval/pairs/accuracy", "eval/logp", "exact/reward", "eval/reward", "reward"),
    *("entropy", "kl", "completions/mean_length", "frac_reward_zero_std"),
)
"""What says how a run ended, where it was measured."""


def chart_of(metric: str) -> Chart:
    """The chart that a metric stands in; one that the table does not know has a chart of its own."""
    return _CHART_OF[metric] if metric in _CHART_OF else _chart(metric, metric, "", ANY, (metric, metric))


def bounds_of(metric: str) -> Bounds:
    """The smallest and the largest value that a metric can have; None where there is no such bound."""
    return chart_of(metric).bounds


def label_of(metric: str, greedy: str = GREEDY) -> str:
    """What a metric is called beside the title of its chart."""
    return next(line.label for line in chart_of(metric).series if line.name == metric).replace(GREEDY, greedy)


def title_of(metric: str, greedy: str = GREEDY) -> tuple[str, str]:
    """What a metric is called by itself, and its unit."""
    chart = chart_of(metric)
    return chart.title if len(chart.series) == 1 else f"{chart.title}, {label_of(metric, greedy)}", chart.unit


def greedy_of(task: Any) -> str:
    """What the evaluation of a task is called. The lecture holds nothing out; of a user's own task nobody knows."""
    from ascent.core.menu import name_of
    from ascent.tasks import TASKS

    name = str(task).partition(":")[0]
    if name not in {name_of(cls) for cls in TASKS}:
        return GREEDY
    return "greedy" if name in HOLDS_NOTHING_OUT else "held out, greedy"


def charts_of(metrics: Collection[str], greedy: str = GREEDY) -> list[dict[str, Any]]:
    """The charts for which there are numbers, each with the series that have some, as a page reads them."""
    made = []
    for chart in CHARTS:
        series = [
            {"metric": metric.name, "label": metric.label.replace(GREEDY, greedy), "colour": metric.colour}
            for metric in chart.series
            if metric.name in metrics
        ]
        if series:
            about = {"key": chart.key, "title": chart.title, "unit": chart.unit, "share": chart.share}
            made.append({**about, "series": series})
    return made

"""The table of metrics: names, units, bounds and order. The loss comes last, because it does not measure progress."""

from collections.abc import Collection
from typing import Any, NamedTuple

from ascent.core.menu import name_of
from ascent.core.metric_names import LAG, MISMATCH

EVALUATION_LABEL = "greedy answers"
"""Label of an evaluation if it is unknown whether its prompts were held out."""
PHASES = ("generate", "reward", "score", "update", "sync", "eval")
OVER_UPDATES = "mean over the step's updates"
Bounds = tuple[float | None, float | None]
"""The smallest and the largest possible value; None: unbounded."""
FRACTION, NOT_NEGATIVE, UNBOUNDED = (0.0, 1.0), (0.0, None), (None, None)


class Metric(NamedTuple):
    """A metric of a chart: `label` is its name beside the chart's title, `short` its name in a terminal."""

    name: str
    label: str
    short: str
    colour: int
    """Index of the color and dash. Related metrics have one color in all charts."""


class Chart(NamedTuple):
    """Metrics that are drawn together: they share a unit and bounds."""

    key: str
    title: str
    unit: str
    bounds: Bounds
    series: tuple[Metric, ...]


def _chart(key: str, title: str, unit: str, bounds: Bounds, *series: tuple[Any, ...]) -> Chart:
    """Build a chart from (name, label[, short[, color]]) tuples. By default short is the label and color the index."""
    metrics = (Metric(*fields, *(fields[1], index)[len(fields) - 2 :]) for index, fields in enumerate(series))
    return Chart(key, title, unit, bounds, tuple(metrics))


CHARTS = (
    _chart(
        *("accuracy", "Exactly right", "share of answers", FRACTION),
        ("eval/accuracy", EVALUATION_LABEL, "greedy"),
        ("accuracy", "sampled", "right"),
        ("lenient", "sampled, any form", "right in any form"),
        ("eval/lenient", f"{EVALUATION_LABEL}, any form", "greedy in any form"),
    ),
    _chart(
        *("pairs", "Pairs rated right", "share of pairs", FRACTION),
        ("eval/pairs/accuracy", "held out", "held-out pairs"),
        ("rewards/accuracies", "batch", "pairs right"),
    ),
    _chart(
        *("log-loss", "Log-loss of pairs", "nats per pair", NOT_NEGATIVE),
        ("eval/pairs/log_loss", "held out", "log-loss"),
    ),
    _chart(
        *("margin", "Margin of pairs", "difference of rewards", UNBOUNDED),
        ("eval/pairs/margin", "held out", "held-out margin"),
        ("rewards/margins", "batch", "margin"),
    ),
    _chart("calibration", "Calibration error", "expected, share", FRACTION, ("eval/pairs/ece", "held out", "ECE")),
    _chart(
        *("log-prob", "Log-prob of held-out demonstrations", "nats per token", UNBOUNDED),
        ("eval/logp", "held out", "held-out log-prob"),
    ),
    _chart(
        *("steps", "Error of the labels", "squared", NOT_NEGATIVE),
        ("eval/steps/error", "held out", "held-out error"),
        ("steps/error", "batch", "squared error"),
    ),
    _chart(
        *("explained", "Labels explained", "share of the labels' variance", UNBOUNDED),
        ("eval/steps/explained", "held out", "explained"),
    ),
    _chart(
        *("reward", "Reward", "", UNBOUNDED),
        ("reward", "sampled", "reward", 1),
        ("eval/reward", EVALUATION_LABEL, "greedy reward", 0),
        ("exact/reward", "E[R], enumerated", "E[R]"),
    ),
    _chart("spread", "Spread of the reward", "standard deviation", NOT_NEGATIVE, ("reward_std", "sampled", "±", 1)),
    _chart(
        *("length", "Length of a response", "tokens", NOT_NEGATIVE),
        ("completions/mean_length", "mean", "length"),
        ("completions/mean_characters", "mean, characters", "characters"),
    ),
    _chart("turns", "Turns of a response", "turns", NOT_NEGATIVE, ("turns", "mean"), ("turns/cut", "cut off", "cut")),
    _chart(
        *("calls", "Calls of tools", "calls per response", NOT_NEGATIVE),
        ("tools/calls", "all", "calls"),
        ("tools/unparsed", "unparsed"),
        ("tools/failed", "failed"),
        ("tools/repeated", "repeated"),
    ),
    _chart(
        "waiting", "Waiting for environments", "seconds per response", NOT_NEGATIVE, ("time/environment", "waiting")
    ),
    _chart("truncated", "Truncated", "share of responses", FRACTION, ("completions/clipped_ratio", "truncated")),
    _chart("entropy", "Entropy", f"nats per token, {OVER_UPDATES}", NOT_NEGATIVE, ("entropy", "entropy")),
    _chart("kl", "KL to the reference", f"per token, {OVER_UPDATES}", UNBOUNDED, ("kl", "KL")),
    _chart(
        *("clip", "Clipped tokens", f"share of tokens, {OVER_UPDATES}", FRACTION),
        ("clip_ratio/low_mean", "low", "clip−"),
        ("clip_ratio/high_mean", "high", "clip+"),
    ),
    _chart(
        *("signal", "Groups with equal rewards", "share of groups; their advantages are zero", FRACTION),
        ("frac_reward_zero_std", "equal rewards", "silent"),
    ),
    _chart(
        *("extremes", "Groups all right, all wrong", "share of groups", FRACTION),
        ("frac_all_right", "all right"),
        ("frac_all_wrong", "all wrong"),
    ),
    _chart("grad", "Gradient norm", "before clipping", NOT_NEGATIVE, ("grad_norm", "norm", "‖∇‖")),
    _chart(
        *("critic", "Critic", "share of the returns' variance", UNBOUNDED),
        ("value/explained_variance", "explained", "critic"),
    ),
    _chart("mismatch", "Sampler mismatch", "mean |logp − logp_sampler|", NOT_NEGATIVE, (MISMATCH, "mismatch")),
    _chart("age", "Age of the tokens", "mean, in updates", NOT_NEGATIVE, (LAG, "age")),
    _chart(
        *("drift", "Drift since tokens were drawn", "mean |logp − logp_sampler|, by age", NOT_NEGATIVE),
        (f"{LAG}/logp_difference", "older tokens", "drift"),
        *((f"{LAG}/logp_difference/{age}", f"age {age}", f"drift {age}") for age in range(1, 5)),
    ),
    _chart(
        *("speed", "Speed", "tokens per second", NOT_NEGATIVE),
        ("time/tokens_per_second", "sampled tokens", "tokens/s"),
    ),
    _chart(
        *("time", "Time of each phase", "seconds", NOT_NEGATIVE),
        *((f"time/{phase}", phase) for phase in PHASES),
        ("time/step", "whole step"),
        ("time/tail", "tail of generate", "tail"),
    ),
    _chart("epoch", "Epochs", "epochs over the data", NOT_NEGATIVE, ("epoch", "epochs", "epoch")),
    _chart("errors", "Rewards that failed", "responses", NOT_NEGATIVE, ("reward_errors", "failed", "reward errors")),
    _chart("loss", "Loss, no measure of progress", "", UNBOUNDED, ("loss", "loss")),
)
CHART_METRICS = tuple(metric.name for chart in CHARTS for metric in chart.series)
FRACTION_METRICS = frozenset(metric.name for chart in CHARTS if chart.bounds == FRACTION for metric in chart.series)
_CHART_OF = {metric.name: chart for chart in CHARTS for metric in chart.series}
_SHORT = {metric.name: metric.short for chart in CHARTS for metric in chart.series} | {"trust_region/kl": "moved"}
COST_METRICS = {"samples": "num_responses", "tokens": "num_tokens", "seconds": "time/step"}
"""The costs of a step and the metrics that measure them."""

ALWAYS_WRITTEN = (
    *("step", "reward", "reward_std", "accuracy", "eval/accuracy", "eval/reward", "exact/reward", "entropy", "kl"),
    *("clip_ratio/low_mean", "clip_ratio/high_mean", "frac_reward_zero_std", "frac_all_right", "frac_all_wrong"),
    *("completions/mean_length", "completions/clipped_ratio", MISMATCH, "grad_norm", "reward_errors"),
)
"""Metrics on every line of metrics.jsonl, in this order (null: not measured in this step). The loss comes last."""
RESULT_METRICS = (
    *("eval/accuracy", "accuracy", "eval/pairs/accuracy", "eval/logp", "exact/reward", "eval/reward", "reward"),
    *("entropy", "kl", "completions/mean_length", "frac_reward_zero_std"),
)
"""Metrics that summarize the result of a run, if they were measured."""


def chart_of(metric: str) -> Chart:
    """Return the chart of a metric. A metric that is not in the table gets a separate chart."""
    return _CHART_OF[metric] if metric in _CHART_OF else _chart(metric, metric, "", UNBOUNDED, (metric, metric))


def series_label(metric: str, greedy: str = EVALUATION_LABEL) -> str:
    """Return the label of a metric beside the title of its chart."""
    return next(line.label for line in chart_of(metric).series if line.name == metric).replace(EVALUATION_LABEL, greedy)


def short_name(metric: str) -> str:
    """Return the short name of a metric for a terminal."""
    return _SHORT.get(metric, metric)


def metric_title(metric: str, greedy: str = EVALUATION_LABEL) -> tuple[str, str]:
    """Return the full title of a metric, and its unit."""
    chart = chart_of(metric)
    return chart.title if len(chart.series) == 1 else f"{chart.title}, {series_label(metric, greedy)}", chart.unit


def evaluation_label(task: Any) -> str:
    """Return the label of a task's evaluation. `lecture` holds no prompts out; for custom tasks it is unknown."""
    from ascent.tasks import TASKS

    name = str(task).partition(":")[0]
    if name not in {name_of(cls) for cls in TASKS}:
        return EVALUATION_LABEL
    return "greedy" if name == "lecture" else "held out, greedy"


def charts_with_data(metrics: Collection[str], greedy: str = EVALUATION_LABEL) -> list[dict[str, Any]]:
    """Return the charts of the measured metrics as JSON for a page."""
    charts = []
    for chart in CHARTS:
        lines = [metric for metric in chart.series if metric.name in metrics]
        series = [
            {"metric": m.name, "label": m.label.replace(EVALUATION_LABEL, greedy), "colour": m.colour} for m in lines
        ]
        about = {"key": chart.key, "title": chart.title, "unit": chart.unit, "share": chart.bounds == FRACTION}
        charts += [about | {"series": series}] if series else []
    return charts


def evaluation_score(line: dict[str, Any]) -> tuple[float, float] | None:
    """Return the score of an evaluation: held-out accuracy, then reward; without them log-prob or negative loss."""
    if line.get("eval/logp") is not None:
        return line["eval/logp"], 0.0
    if line.get("eval/accuracy") is None and line.get("eval/reward") is not None:  # correctness is not defined
        return line["eval/reward"], 0.0
    if line.get("eval/accuracy") is None:
        loss = line.get("eval/pairs/log_loss", line.get("eval/steps/error"))
        return None if loss is None else (-loss, 0.0)
    return line["eval/accuracy"], line.get("eval/reward") or 0.0


def best_evaluation(lines: list[dict[str, Any]]) -> tuple[int, tuple[float, float]] | None:
    """Return the step and the score of the best evaluation; the first one among equals."""
    evaluated = [(line["step"] + 1, score) for line in lines if (score := evaluation_score(line)) is not None]
    return max(evaluated, key=lambda pair: (pair[1], -pair[0]), default=None)

"""What a run's page draws, in the order in which a person should look. The loss comes last."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from ascent.correction import MISMATCH
from ascent.records.display import PHASES


@dataclass(frozen=True)
class Chart:
    key: str
    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    """Names of metrics, and how they are called here."""
    share: bool = False
    """Its values lie between 0 and 1."""


CHARTS = (
    Chart(
        "accuracy",
        "Exactly right",
        "share of answers",
        (
            ("eval/accuracy", "held out, greedy"),
            ("accuracy", "sampled"),
            ("lenient", "sampled, any form"),
            ("eval/lenient", "held out, any form"),
        ),
        share=True,
    ),
    Chart(
        "pairs",
        "Pairs rated right",
        "share of pairs",
        (("eval/pairs/accuracy", "held out"), ("rewards/accuracies", "batch")),
        share=True,
    ),
    Chart("log-prob", "Log-prob of held-out demonstrations", "nats a token", (("eval/logp", "held out"),)),
    Chart("steps", "Error of the labels", "squared", (("eval/steps/error", "held out"), ("steps/error", "batch"))),
    Chart(
        "reward",
        "Reward",
        "",
        (("reward", "sampled"), ("eval/reward", "held out, greedy"), ("exact/reward", "E[R], enumerated")),
    ),
    Chart("spread", "Spread of the reward", "standard deviation", (("reward_std", "sampled"),)),
    Chart(
        "length",
        "Length of a response",
        "tokens",
        (("completions/mean_length", "mean"), ("completions/mean_characters", "mean, characters")),
    ),
    Chart(
        "truncated",
        "Cut off by the limit",
        "share of responses",
        (("completions/clipped_ratio", "cut off"),),
        share=True,
    ),
    Chart("entropy", "Entropy", "nats a token", (("entropy", "entropy"),)),
    Chart("kl", "KL to the reference", "a token", (("kl", "KL"),)),
    Chart(
        "clip", "Clipped tokens", "share of tokens", (("clip_ratio/low_mean", "low"), ("clip_ratio/high_mean", "high"))
    ),
    Chart(
        "signal",
        "Groups without signal",
        "share of groups",
        (("frac_reward_zero_std", "equal rewards"), ("frac_all_right", "all right"), ("frac_all_wrong", "all wrong")),
        share=True,
    ),
    Chart("grad", "Gradient norm", "before clipping", (("grad_norm", "norm"),)),
    Chart("critic", "Critic", "share of the returns' variance", (("value/explained_variance", "explained"),)),
    Chart("mismatch", "Sampler mismatch", "mean |logp − logp_sampler|", ((MISMATCH, "mismatch"),)),
    Chart("speed", "Speed", "tokens a second", (("time/tokens_per_second", "sampled tokens"),)),
    Chart(
        "time",
        "Time of each phase",
        "seconds",
        (*((f"time/{phase}", phase) for phase in PHASES), ("time/step", "whole step")),
    ),
    Chart("errors", "Rewards that failed", "responses", (("reward_errors", "failed"),)),
    Chart("loss", "Loss, no measure of progress", "", (("loss", "loss"),)),
)
DRAWN = tuple(metric for chart in CHARTS for metric, _ in chart.series)


def charts_of(metrics: Collection[str]) -> list[dict[str, Any]]:
    """The charts for which there are numbers, each with the series that have some."""
    found = []
    for chart in CHARTS:
        series = [{"metric": metric, "label": label} for metric, label in chart.series if metric in metrics]
        if series:
            found.append({**asdict(chart), "series": series})
    return found

"""What a run's page draws, in the order in which a person should look. The loss comes last."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from ascent.correction import MISMATCH
from ascent.records.display import PHASES

GREEDY = "greedy answers"
"""What an evaluation is called where nobody knows whether its prompts were held out."""
HOLDS_NOTHING_OUT = ("lecture",)
"""Tasks that are evaluated on the prompts that they train on."""
UPDATES = "mean over the step's updates"
COLOURS = {"eval/accuracy": 0, "accuracy": 1, "eval/reward": 0, "reward": 1, "reward_std": 1}
"""Series of one name have one colour and dash in the charts where they stand together; others go by their place."""


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
            ("eval/accuracy", GREEDY),
            ("accuracy", "sampled"),
            ("lenient", "sampled, any form"),
            ("eval/lenient", f"{GREEDY}, any form"),
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
        (("reward", "sampled"), ("eval/reward", GREEDY), ("exact/reward", "E[R], enumerated")),
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
    Chart("entropy", "Entropy", f"nats a token, {UPDATES}", (("entropy", "entropy"),)),
    Chart("kl", "KL to the reference", f"a token, {UPDATES}", (("kl", "KL"),)),
    Chart(
        "clip",
        "Clipped tokens",
        f"share of tokens, {UPDATES}",
        (("clip_ratio/low_mean", "low"), ("clip_ratio/high_mean", "high")),
        share=True,
    ),
    Chart(
        "signal",
        "Groups with equal rewards",
        "share of groups, no signal for group credit",
        (("frac_reward_zero_std", "equal rewards"),),
        share=True,
    ),
    Chart(
        "extremes",
        "Groups all right, all wrong",
        "share of groups",
        (("frac_all_right", "all right"), ("frac_all_wrong", "all wrong")),
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


def greedy_of(task: Any) -> str:
    """How to call a run's evaluation, by its task's name: the lecture holds nothing out; of one's own nobody knows."""
    from ascent.menu import name_of
    from ascent.tasks import TASKS

    name = str(task).partition(":")[0]
    if name not in {name_of(cls) for cls in TASKS}:
        return GREEDY
    return "greedy" if name in HOLDS_NOTHING_OUT else "held out, greedy"


def charts_of(metrics: Collection[str], greedy: str = GREEDY) -> list[dict[str, Any]]:
    """The charts for which there are numbers, each with the series that have some."""
    found = []
    for chart in CHARTS:
        series = [
            {"metric": metric, "label": label.replace(GREEDY, greedy), "colour": COLOURS.get(metric, place)}
            for place, (metric, label) in enumerate(chart.series)
            if metric in metrics
        ]
        if series:
            found.append({**asdict(chart), "series": series})
    return found

"""Pictures of runs: one run's curves, or several compared with their intervals over seeds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

PANELS = (
    (
        "Reward",
        "share of the largest there is",
        (("reward", "sampled"), ("eval/reward", "greedy"), ("exact/reward", "E[R]")),
    ),
    ("Exactly right", "share of answers", (("accuracy", "sampled"), ("eval/accuracy", "greedy"))),
    ("Entropy", "nats a token", (("entropy", "entropy"),)),
    (
        "Groups without signal",
        "share of groups",
        (("frac_reward_zero_std", "all rewards equal"), ("frac_all_right", "all right")),
    ),
)
_PAIRS = ("Pairs right", "share of pairs", (("rewards/accuracies", "batch"), ("eval/pairs/accuracy", "held out")))
OF_REWARDS = (
    _PAIRS,
    ("Log-loss", "nats a pair", (("loss", "batch"), ("eval/pairs/log_loss", "held out"))),
    ("Margin", "reward", (("rewards/margins", "batch"), ("eval/pairs/margin", "held out"))),
    ("Calibration error", "expected, held out", (("eval/pairs/ece", "held out"),)),
)
"""The panels of a reward model's run."""
OF_STEPS = (
    ("Squared error", "of a label", (("steps/error", "batch"), ("eval/steps/error", "held out"))),
    ("Explained", "share of the labels' variance", (("eval/steps/explained", "held out"),)),
    ("Gradient norm", "before clipping", (("grad_norm", "gradient norm"),)),
    ("Labels", "sum over a response", (("reward", "batch"),)),
)
"""The panels of a process reward's run."""
COLORS = ("#1f5fa8", "#c8511b", "#3f8f4f", "#7a4fa3", "#8a6d1d", "#1a8c8c", "#b03a6a", "#555555", "#6b8e23", "#aa3333")
DASHES = ("-", "--", ":", "-.")


TITLES = {
    "reward": "Sampled reward",
    "eval/reward": "Held-out reward, greedy",
    "exact/reward": "E[R], enumerated",
    "eval/accuracy": "Exactly right, greedy",
    "entropy": "Entropy, nats a token",
    "frac_reward_zero_std": "Groups without signal",
}
SHARES = ("eval/accuracy", "frac_reward_zero_std")


def figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure in the house style, drawn without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True})
    pyplot.rcParams.update(
        {"grid.alpha": 0.25, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left"}
    )
    return pyplot.subplots(rows, columns, figsize=size, constrained_layout=True, squeeze=False)


def series(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric, where it was measured."""
    points = [(line["step"] + 1, line[name]) for line in metrics if line.get(name) is not None]
    return np.array([p[0] for p in points]), np.array([p[1] for p in points], dtype=float)


def panels_of(metrics: Sequence[Mapping[str, Any]]) -> Any:
    """What there is to draw of a run: a policy's samples, what it was shown, or a reward model's pairs."""

    def has(name: str) -> bool:
        return any(line.get(name) is not None for line in metrics)

    if has("accuracy") or not (has("rewards/accuracies") or has("loss")):
        return PANELS
    if not has("entropy"):
        return OF_STEPS if has("steps/error") else OF_REWARDS
    greedy = [(head, unit, names[1:]) for head, unit, names in PANELS[:2]]
    shown = ("Log-prob of what is shown", "nats a token", (("eval/logp", "held out"), ("loss", "loss, a batch's")))
    return (*greedy, PANELS[2], _PAIRS if has("rewards/accuracies") else shown)


def plot_runs(runs: Sequence[tuple[str, Sequence[Mapping[str, Any]], float | None]], path: Path, title: str) -> Path:
    """The curves of a few runs, each (name, metrics, largest reward), side by side in four panels."""
    fig, axes = figure(2, 2, (10.0, 6.2))
    for axis, (head, unit, names) in zip(axes.flat, panels_of(runs[0][1]), strict=True):
        for r, (run, metrics, maximum) in enumerate(runs):
            for n, (name, words) in enumerate(names):
                steps, values = series(metrics, name)
                if not len(values):
                    continue
                scale = maximum if head == "Reward" and maximum else 1.0
                color = COLORS[r] if len(runs) > 1 else COLORS[n]
                label = words if len(runs) == 1 else f"{run}: {words}"
                marker = "." if len(values) <= 20 else ""
                axis.plot(steps, values / scale, DASHES[n % 4], color=color, label=label, linewidth=1.6, marker=marker)
        axis.set_title(head)
        axis.set_ylabel(unit if not (head == "Reward" and not any(m for _, _, m in runs)) else "reward")
        if unit.startswith("share"):
            axis.set_ylim(-0.03, 1.03)
        if axis.get_legend_handles_labels()[0] and (len(names) > 1 or len(runs) > 1):
            axis.legend(frameon=False, fontsize=7.5)
    for axis in axes.flat:
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    fig.suptitle(title, x=0.01, ha="left", fontsize=11)
    return _save(fig, path)


Curves = Mapping[str, Mapping[str, list[tuple[np.ndarray, np.ndarray]]]]
"""For each setting and metric the steps and values of each run."""


def plot_bands(curves: Curves, path: Path, title: str, spent: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
    """For each setting the mean over seeds of each metric, with its 95 % interval as a band.

    Below, the map: held-out accuracy against what it cost (`spent`), and where each ended.
    """
    names = list(next(iter(curves.values())))
    fig, axes = figure(2, len(names), (4.4 * len(names), 7.0))
    for axis, name in zip(axes[0], names, strict=True):
        for i, metrics in enumerate(curves.values()):
            _band(axis, metrics[name], i, name in SHARES, lambda _, steps: steps)
        axis.set_title(TITLES.get(name, name))
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis, cost in zip(axes[1], next(iter(spent.values()))[0], strict=False):
        for i, (setting, metrics) in enumerate(curves.items()):
            runs = spent[setting]
            _band(axis, metrics["eval/accuracy"], i, True, lambda r, s, runs=runs, c=cost: np.array(runs[r][c])[s - 1])
        axis.set_title(f"Exactly right, by {cost}")
        axis.set_xlabel(cost)
    _ends(axes[1][3], curves, spent)
    handles = [_line(i, label=setting) for i, setting in enumerate(curves)]
    axes[0][0].legend(handles=handles, frameon=False, fontsize=7.5)
    fig.suptitle(title, x=0.01, ha="left", fontsize=11)
    return _save(fig, path)


def style(i: int) -> dict[str, Any]:
    return {"color": COLORS[i % len(COLORS)], "linestyle": DASHES[(i // len(COLORS)) % 4], "linewidth": 1.6}


def _line(i: int, label: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **style(i))


def _band(axis: Any, runs: list[tuple[np.ndarray, np.ndarray]], i: int, share: bool, place: Any) -> None:
    """The mean of some runs, and its interval; `place` says where on the x axis the steps of a run lie."""
    from ascent.diagnose.statistics import interval

    length = min(len(steps) for steps, _ in runs)
    if not length:
        return
    values = np.stack([v[:length] for _, v in runs])
    mean = values.mean(0)
    half = np.array([interval(column)[1] for column in values.T]) if len(runs) > 1 else np.zeros(length)
    x = np.stack([place(r, steps[:length]) for r, (steps, _) in enumerate(runs)]).mean(0)
    low, high = (mean - half, mean + half) if not share else ((mean - half).clip(0, 1), (mean + half).clip(0, 1))
    axis.plot(x, mean, marker="o" if len(x) == 1 else "", **style(i))
    axis.fill_between(x, low, high, color=COLORS[i % len(COLORS)], alpha=0.15, linewidth=0)
    if share:
        axis.set_ylim(-0.03, 1.03)


def _ends(axis: Any, curves: Curves, spent: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Where each setting ended: the last accuracy against the whole time, both with their intervals."""
    from ascent.diagnose.statistics import interval

    for i, (setting, metrics) in enumerate(curves.items()):
        last = [values[-1] for _, values in metrics["eval/accuracy"] if len(values)]
        if not last:
            continue
        x, dx = interval([run["seconds"][-1] for run in spent[setting]])
        y, dy = interval(last)
        color = COLORS[i % len(COLORS)]
        axis.errorbar(x, y, np.nan_to_num(dy), np.nan_to_num(dx), fmt="o", color=color, capsize=2, markersize=5)
    axis.set_title("Where each ended, exactly right")
    axis.set_xlabel("seconds a run")
    axis.set_ylim(-0.03, 1.03)
    axis.set_xlim(left=0)
    axis.margins(x=0.2)


def _save(fig: Any, path: Path) -> Path:
    from matplotlib import pyplot

    aside = path.with_name(f".{path.name}")
    fig.savefig(aside, dpi=130, format="png")
    os.replace(aside, path)
    pyplot.close(fig)
    return path

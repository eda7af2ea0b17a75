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
COLORS = ("#1f5fa8", "#c8511b", "#3f8f4f", "#7a4fa3", "#8a6d1d", "#1a8c8c", "#b03a6a", "#555555", "#6b8e23", "#aa3333")
DASHES = ("-", "--", ":", "-.")


TITLES = {
    "reward": "Sampled reward",
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


def plot_runs(runs: Sequence[tuple[str, Sequence[Mapping[str, Any]], float | None]], path: Path, title: str) -> Path:
    """The curves of a few runs, each (name, metrics, largest reward), side by side in four panels."""
    fig, axes = figure(2, 2, (10.0, 6.2))
    for axis, (head, unit, names) in zip(axes.flat, PANELS, strict=True):
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


def plot_bands(curves: Mapping[str, Mapping[str, list[tuple[np.ndarray, np.ndarray]]]], path: Path, title: str) -> Path:
    """For each setting the mean over seeds of each metric, with its 95 % interval as a band."""
    from ascent.diagnose.statistics import interval

    names = list(next(iter(curves.values())))
    fig, axes = figure(1, len(names), (4.4 * len(names), 3.6))
    for axis, name in zip(axes.flat, names, strict=True):
        for i, (setting, metrics) in enumerate(curves.items()):
            runs = metrics[name]
            length = min(len(steps) for steps, _ in runs)
            if not length:
                continue
            values = np.stack([v[:length] for _, v in runs])
            mean = values.mean(0)
            half = np.array([interval(column)[1] for column in values.T]) if len(runs) > 1 else np.zeros(length)
            steps = runs[0][0][:length]
            axis.plot(
                steps, mean, DASHES[(i // len(COLORS)) % 4], color=COLORS[i % len(COLORS)], label=setting, linewidth=1.6
            )
            low, high = mean - half, mean + half
            if name in SHARES:
                low, high = low.clip(0, 1), high.clip(0, 1)
            axis.fill_between(steps, low, high, color=COLORS[i % len(COLORS)], alpha=0.15, linewidth=0)
        if name in SHARES:
            axis.set_ylim(-0.03, 1.03)
        axis.set_title(TITLES.get(name, name))
        axis.set_xlabel("step")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes.flat[0].legend(frameon=False, fontsize=7.5)
    fig.suptitle(title, x=0.01, ha="left", fontsize=11)
    return _save(fig, path)


def _save(fig: Any, path: Path) -> Path:
    from matplotlib import pyplot

    aside = path.with_name(f".{path.name}")
    fig.savefig(aside, dpi=130, format="png")
    os.replace(aside, path)
    pyplot.close(fig)
    return path

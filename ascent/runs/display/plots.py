"""Plots of runs: the curves of a few runs, or settings compared with 95 % intervals over seeds."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from ascent.core.metric_names import MISMATCH
from ascent.runs.confidence_intervals import mean_and_half_width
from ascent.runs.metrics import FRACTION_METRICS, chart_of, metric_title, series_label
from ascent.runs.run_folder import unlinked

PAIRS = ("rewards/accuracies", "eval/pairs/accuracy")
GROUPS = ("frac_reward_zero_std", "frac_all_right")
POLICY_PANELS = (("reward", "eval/reward", "exact/reward"), ("accuracy", "eval/accuracy"), ("entropy",), GROUPS)
MARGINS = ("rewards/margins", "eval/pairs/margin")
REWARD_MODEL_PANELS = (PAIRS, ("eval/pairs/log_loss", "loss"), MARGINS, ("eval/pairs/ece",))
PROCESS_REWARD_PANELS = (("steps/error", "eval/steps/error"), ("eval/steps/explained",), ("grad_norm",), ("reward",))
COLORS = ("#1f5fa8", "#c8511b", "#3f8f4f", "#7a4fa3", "#8a6d1d", "#1a8c8c", "#b03a6a", "#555555", "#6b8e23", "#aa3333")
DASHES = ("-", "--", ":", "-.")
MAX_MARKED_POINTS = 20
"""Each point of a curve gets a dot if there are at most this many points."""


def figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """Return a figure and its axes in the style of all plots, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rc("font", size=9)
    pyplot.rc("grid", alpha=0.25)
    pyplot.rc("axes", grid=True, titlesize=10, titleweight="bold", titlelocation="left")
    pyplot.rc("axes.spines", top=False, right=False)
    return pyplot.subplots(rows, columns, figsize=size, constrained_layout=True, squeeze=False)


def series(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of a metric where it was measured."""
    points = [(line["step"] + 1, line[name]) for line in metrics if line.get(name) is not None]
    return np.array([p[0] for p in points]), np.array([p[1] for p in points], dtype=float)


def panels_for(metrics: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """Return the metrics of each panel: for a sampling policy, one trained on offline data, or a reward model."""

    def has(name: str) -> bool:
        return any(line.get(name) is not None for line in metrics)

    if (
        has("accuracy") or has(MISMATCH) or not (has("rewards/accuracies") or has("loss"))
    ):  # runs that sample have a mismatch
        return POLICY_PANELS
    if not has("entropy"):
        return PROCESS_REWARD_PANELS if has("steps/error") else REWARD_MODEL_PANELS
    offline = PAIRS if has("rewards/accuracies") else ("eval/logp", "loss")
    return ("eval/reward", "exact/reward"), ("eval/accuracy",), ("entropy",), offline


Curve = tuple[str, Sequence[Mapping[str, Any]], float | None]
"""The name of a run, its metrics, and the maximum reward."""


def plot_runs(runs: Sequence[Curve], path: Path, heading: str) -> Path:
    return save_figure(draw_runs(runs, heading), path)


def draw_runs(runs: Sequence[Curve], heading: str) -> Any:
    """Draw the curves of a few runs in four panels."""
    fig, axes = figure(2, 2, (10.0, 6.2))
    for axis, names in zip(axes.flat, panels_for(runs[0][1]), strict=True):
        chart = chart_of(names[0])
        scaled = chart.key == "reward" and names != PROCESS_REWARD_PANELS[-1] and all(maximum for _, _, maximum in runs)
        for r, (run, metrics, maximum) in enumerate(runs):
            for n, name in enumerate(names):
                steps, values = series(metrics, name)
                label = series_label(name, "greedy")
                style = line_style(r if len(runs) > 1 else n) | {"linestyle": DASHES[n % 4]}
                values = values / maximum if scaled and maximum else values
                draw_line(axis, steps, values, style | {"label": label if len(runs) == 1 else f"{run}: {label}"})
        title = "Labels" if names == PROCESS_REWARD_PANELS[-1] else chart.title
        unit = "share of the largest there is" if scaled else chart.unit
        finish_panel(axis, title, unit, names[0] in FRACTION_METRICS or scaled, "step" if axis in axes[-1] else "")
        axis.ticklabel_format(axis="y", scilimits=(-3, 4))  # short labels: 1.5 and 1e−4 instead of 0.00015
        if len(axis.get_legend_handles_labels()[0]) > 1:
            axis.legend(frameon=False, fontsize=7.5)
    fig.suptitle(heading, x=0.01, ha="left", fontsize=11)
    fig.set_layout_engine(None)  # a fixed layout: the automatic one takes most of the time
    fig.subplots_adjust(left=0.1, right=0.985, bottom=0.075, top=0.885, hspace=0.26, wspace=0.25)
    return fig


def draw_line(axis: Any, x: Any, mean: Any, style: Mapping[str, Any], band: tuple[Any, Any] | None = None) -> None:
    """Draw a curve, with dots if it has few points, and optionally a band between two curves."""
    if len(x):
        axis.plot(x, mean, **{"marker": "." if len(x) <= MAX_MARKED_POINTS else "", **style})
        if band is not None:
            axis.fill_between(x, *band, color=style["color"], alpha=0.15, linewidth=0)


def finish_panel(axis: Any, title: str, unit: str, share: bool, xlabel: str) -> None:
    """Set the title, labels and limits of a panel."""
    axis.set_title(plain(title))
    axis.set_ylabel(plain(unit.partition(", ")[0]))  # the rest is a remark that is too long for an axis
    axis.set_xlabel(xlabel)
    if share:
        axis.set_ylim(-0.03, 1.03)
    if xlabel in ("step", ""):  # an upper panel shares the x axis of the one below it
        axis.xaxis.get_major_locator().set_params(integer=True)


def plain(text: str) -> str:
    """Escape dollar signs, so that matplotlib does not typeset formulas."""
    return text.replace("$", r"\$")


Curves = Mapping[str, Mapping[str, list[tuple[np.ndarray, np.ndarray]]]]
"""For each setting and metric: the steps and values of each run."""


def plot_bands(curves: Curves, path: Path, title: str, costs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
    """Plot the mean of each setting over seeds with 95 % intervals, and below it held-out accuracy over costs."""
    names = list(next(iter(curves.values())))
    fig, axes = figure(2, len(names), (4.4 * len(names), 7.0))
    for axis, name in zip(axes[0], names, strict=True):
        for i, metrics in enumerate(curves.values()):
            _draw_band(axis, metrics[name], i, name in FRACTION_METRICS, lambda _, steps: steps)
        finish_panel(axis, metric_title(name, "greedy")[0], "", name in FRACTION_METRICS, "step")
    for axis, cost in zip(axes[1], next(iter(costs.values()))[0], strict=False):
        for i, (setting, metrics) in enumerate(curves.items()):
            runs = costs[setting]
            _draw_band(
                axis, metrics["eval/accuracy"], i, True, lambda r, s, runs=runs, c=cost: np.array(runs[r][c])[s - 1]
            )
        finish_panel(axis, f"Exactly right, by {cost}", "", True, cost)
    _plot_costs(axes[1][3], curves, costs)
    axes[0][0].legend(handles=legend_handles(curves), frameon=False, fontsize=7.5)
    fig.suptitle(title, x=0.01, ha="left", fontsize=11)
    return save_figure(fig, path)


def line_style(i: int) -> dict[str, Any]:
    """Return a color and a dash pattern; their combination differs between settings."""
    return {"color": COLORS[i % len(COLORS)], "linestyle": DASHES[i % len(DASHES)], "linewidth": 1.6}


def legend_handles(labels: Iterable[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    return [Line2D([], [], label=plain(label), **line_style(i)) for i, label in enumerate(labels)]


def _draw_band(axis: Any, runs: list[tuple[np.ndarray, np.ndarray]], i: int, share: bool, x_of: Any) -> None:
    """Draw the mean of some runs and its interval at the steps that all of them have measured.

    `x_of` returns the x coordinates of a run's steps.
    """
    common = reduce(np.intersect1d, (steps for steps, _ in runs))
    if not len(common):
        return
    values = np.stack([v[np.isin(steps, common)] for steps, v in runs])
    mean = values.mean(0)
    half = np.array([mean_and_half_width(column)[1] for column in values.T]) if len(runs) > 1 else np.zeros(len(common))
    x = np.stack([x_of(r, common) for r in range(len(runs))]).mean(0)
    limits = (0, 1) if share else (-np.inf, np.inf)
    draw_line(axis, x, mean, line_style(i), ((mean - half).clip(*limits), (mean + half).clip(*limits)))


def _plot_costs(axis: Any, curves: Curves, costs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Plot the last accuracy of each setting over its total time, both with intervals."""
    for i, (setting, metrics) in enumerate(curves.items()):
        last = [values[-1] for _, values in metrics["eval/accuracy"] if len(values)]
        if not last:
            continue
        x, dx = mean_and_half_width([run["seconds"][-1] for run in costs[setting]])
        y, dy = mean_and_half_width(last)
        color = COLORS[i % len(COLORS)]
        axis.errorbar(x, y, np.nan_to_num(dy), np.nan_to_num(dx), fmt="o", color=color, capsize=2, markersize=5)
    finish_panel(axis, "Where each ended, exactly right", "", True, "seconds per run")
    axis.set_xlim(left=0)
    axis.margins(x=0.2)


def save_figure(fig: Any, path: Path) -> Path:
    """Write a figure as a PNG file, atomically."""
    from matplotlib import pyplot

    aside = unlinked(path.with_name(f".{path.name}"))
    fig.savefig(aside, dpi=130, format="png")
    os.replace(aside, path)
    pyplot.close(fig)
    return path

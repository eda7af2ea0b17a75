"""Compare runs: differing settings, groups of seeds, curves with 95 % intervals, and last values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ascent.core.errors import ConfigError
from ascent.core.menu import nearest
from ascent.lab.curves import ALL_STEPS, DEFAULT_POINTS, ColumnCache, StepRange, measured_metrics
from ascent.lab.pages.runs.page import run_row
from ascent.runs.confidence_intervals import compare_over_seeds, t_quantile
from ascent.runs.metric_columns import MetricColumns, bucket_means, bucket_starts, bucket_width, numbers_or_none
from ascent.runs.metrics import (
    CHART_METRICS,
    COST_METRICS,
    EVALUATION_LABEL,
    RESULT_METRICS,
    chart_of,
    charts_with_data,
    evaluation_label,
)
from ascent.runs.run_list import RunEntry, find_run
from ascent.runs.trust import DESCRIPTION
from ascent.runs.untrusted_files import finite_number, read_object

MOST_COMPARED = 50
BRIEF = ("id", "kind", "task", "label", "seed", "status", "said", "step", "steps", "max_reward")
NAMED = 3
"""Maximum number of settings or runs that a name or a sentence lists."""
MAX_ID_LENGTH = 40
LEGEND = 32
"""Maximum length of a setting's name in a legend."""
SPENT = {"responses": COST_METRICS["samples"], "tokens": COST_METRICS["tokens"], "seconds": COST_METRICS["seconds"]}
"""Costs of a run and their metrics."""
MEASURES = (*RESULT_METRICS, "steps", *SPENT)
UNFINISHED = {
    **{"running": "still running, so this is not yet how it ended", "died": "died before its end"},
    **{"failed": "failed before its end", "interrupted": "stopped before its end"},
}
"""Reasons why the last values of a run are not final, by its status."""
AXES: dict[str, str | None] = {"step": None, **COST_METRICS}
"""Possible x axes, and the metric whose running sum each is."""
DIGITS = 6


@dataclass
class Side:
    """One run of a comparison."""

    place: RunEntry
    row: Mapping[str, Any]
    config: Mapping[str, Any]

    @property
    def id(self) -> str:
        return self.place.id

    @property
    def setting(self) -> str:
        """All settings but the seed, as one string; unique if the settings are unknown."""
        if not self.config:
            return f"unknown: {self.id}"
        return json.dumps({k: v for k, v in self.config.items() if k != "seed"}, sort_keys=True)

    @property
    def pairing(self) -> Any:
        """The seed by which runs are paired; unique if it is unknown."""
        return self.id if self.row["seed"] is None else self.row["seed"]


def read_side(place: RunEntry) -> Side:
    config, _ = read_object(place.folder / "config.json") if place.kind == "ascent" else ({}, "")
    row = {key: value for key, value in run_row(place).items() if key in BRIEF}
    if row["seed"] is None:  # run.json may be damaged where config.json is not
        row["seed"] = finite_number(config.get("seed"))
    return Side(place, row, {k: v for k, v in config.items() if k not in DESCRIPTION})


class Comparison:
    """Several runs of a folder. Inside the context manager their metrics do not change."""

    def __init__(self, root: Path, ids: Sequence[str], column_cache: ColumnCache):
        wanted = list(dict.fromkeys(ids))
        if not wanted:
            raise ConfigError("nothing to compare: name at least one run, id=…")
        if len(wanted) > MOST_COMPARED:
            raise ConfigError(f"{len(wanted)} runs: at most {MOST_COMPARED} are compared at once. Leave some out")
        self.runs = [read_side(find_run(root, id)) for id in wanted]
        self.groups = setting_groups(self.runs)
        self.column_cache, self.columns = column_cache, dict[str, MetricColumns]()
        self._held = ExitStack()

    def __enter__(self) -> Comparison:
        """Lock the runs in the order of their folders, so that two comparisons cannot deadlock."""
        with ExitStack() as stack:
            for run in sorted(self.runs, key=lambda run: run.place.folder):
                self.columns[run.id] = stack.enter_context(self.column_cache.columns(run.place))
            self._held = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._held.close()
        self.columns = {}

    def curves(
        self,
        metrics: Sequence[str],
        axis: str = "step",
        view: StepRange = ALL_STEPS,
        points: int = DEFAULT_POINTS,
        drawn: bool = True,
    ) -> dict[str, Any]:
        """Return the curves, downsampled for drawing or with all digits and unclipped intervals."""
        if axis not in AXES:
            raise ConfigError(f"x={axis[:20]}: there are {', '.join(AXES)}")
        known = {*CHART_METRICS, *(name for columns in self.columns.values() for name in columns.names)}
        for metric in metrics:
            if metric not in known:
                raise ConfigError(f"metric={metric[:80]}: none of these runs has it.{nearest(metric, known)}")
        return {metric: self._overlay(metric, axis, points, drawn, view) for metric in metrics}

    def _overlay(self, metric: str, axis: str, points: int, drawn: bool, view: StepRange) -> dict[str, Any]:
        """A metric of every group, and of every run, as lines: to draw, or (`drawn` false) with all their digits.

        A drawn band ends where the metric's values do: at 0 and 1 for a share, at 0 for what cannot be negative.
        A drawn line has a point on either side of the view; `whole` is from where to where all lines go.
        """
        low, high = chart_of(metric).bounds if drawn else (None, None)
        made: dict[str, Any] = {"metric": metric, "x": axis, "bounds": [low, high], "groups": {}, "runs": {}}
        ends: list[float] = []

        def numbers(values: np.ndarray) -> list[float | None]:
            return numbers_or_none(values, DIGITS if drawn else None)

        def line_of(curves: Sequence[Curve]) -> dict[str, Any]:
            curve = common(curves)
            ends.extend(curve.x[[0, -1]] if len(curve.x) else [])
            curve = curve.at(in_view(curve.x, view, beside=drawn))
            width = bucket_width(curve.steps[in_view(curve.x, view)], points)
            curve = curve.merged(width) if width > 1 else curve
            with np.errstate(over="ignore", invalid="ignore"):
                mean = curve.values.mean(0)
                line = {"x": numbers(curve.x), "bucket": width, "mean": numbers(mean)}
                if (n := len(curves)) > 1:  # Student's t at every point
                    half = t_quantile(n - 1) * curve.values.std(0, ddof=1) / np.sqrt(n)
                    line["low"] = numbers(np.maximum(mean - half, -np.inf if low is None else low))
                    line["high"] = numbers(np.minimum(mean + half, np.inf if high is None else high))
            return line

        for name, group in self.groups.items():
            known = {run.id: curve_of(self.columns[run.id], metric, axis) for run in group}
            own = {id: curve for id, curve in known.items() if curve is not None}
            if not own:
                continue
            line = line_of(list(own.values())) | {"seeds": len(own)}
            if len(own) > 1:
                made["runs"] |= {id: line_of([curve]) for id, curve in own.items()}
            odd = sorted({mark for id in own for mark in self.columns[id].nonfinite.get(metric, [])})
            made["groups"][name] = line | {"nonfinite": odd if axis == "step" else []}
        finite = bool(ends) and np.isfinite(ends).all()  # what was spent may be too large to be a number
        return made | {"whole": [float(min(ends)), float(max(ends))] if finite else None}

    def charts(self) -> list[dict[str, Any]]:
        called = {evaluation_label(run.row["task"]) for run in self.runs}
        have = set().union(*(measured_metrics(columns) for columns in self.columns.values()))
        return charts_with_data(have, called.pop() if len(called) == 1 else EVALUATION_LABEL)

    def summary(self) -> dict[str, Any]:
        """Everything but the curves, and how they ended."""
        groups = []
        for i, (name, group) in enumerate(self.groups.items(), 1):
            begin = name[: LEGEND - 4].rsplit(" ", 1)[0].rstrip(" ,…")
            about = {"name": name, "short": name if len(name) <= LEGEND else f"{i}: {begin} …"}
            about["title"] = f"{name} × {len(group)} seeds" if len(group) > 1 else name
            groups.append(about | {"ids": [run.id for run in group], "seeds": [run.row["seed"] for run in group]})
        have = list(self.columns.values())
        return {
            "runs": {run.id: dict(run.row) for run in self.runs},
            "order": [run.id for run in self.runs],
            "groups": groups,
            "difference": differing_settings(self.runs),
            "charts": self.charts(),
            "axes": [axis for axis, metric in AXES.items() if metric is None or any(metric in one for one in have)],
        }

    def ends(self, base: str | None = None) -> dict[str, Any]:
        """A row per group: mean, interval, paired difference to the group of the run `base`, or why there is none."""
        held = {name: {r.pairing: final(self.columns[r.id]) for r in group} for name, group in self.groups.items()}
        of_base = (name for name, group in self.groups.items() if base in [run.id for run in group])
        first = next(of_base, next(iter(self.groups)))
        rows = compare_over_seeds({first: held[first]} | held, dict.fromkeys(held, MEASURES))
        reasons = {n: why for n, group in self.groups.items() if (why := unlike(self.groups[first], group))}
        for one in (one for name in reasons for one in rows[name].values()):
            for difference in one.keys() & {"difference", "difference_half", "pairs"}:
                del one[difference]
        apart = [f"No difference is taken between {first} and {name}: {why}." for name, why in reasons.items()]
        alone = [name for name, ends in held.items() if len(ends) == 1]
        which = "" if len(alone) == len(held) else f": {', '.join(alone)}"
        return {
            "measures": [m for m in MEASURES if any(m in row for row in rows.values())],
            "rows": rows,
            "base": first,
            "apart": reasons,
            "cautions": [*apart, *budgets(first, held), *unfinished(self.runs)],
            "notes": [f"One seed has no interval{which}."] if alone else [],
        }


# ---- settings -------------------------------------------------------------------------------------------


def dotted(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """{"loss": {"name": "clipped", "low": 0.2}} -> loss: clipped, loss.low: 0.2."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= {f"{above}{key}": value["name"]} if "name" in value else {}
            flat |= dotted({k: v for k, v in value.items() if k != "name"}, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def differing_settings(runs: Sequence[Side]) -> list[dict[str, Any]]:
    """The settings that are not the same in all runs: a name, and one value per run (None: it has no such setting)."""
    flat = [dotted(run.config) for run in runs]
    names = list(dict.fromkeys(name for one in flat for name in one))
    axes = list(dict.fromkeys(name.split(".")[0] for name in names))
    names.sort(key=lambda name: axes.index(name.split(".")[0]))  # what belongs to one choice stands together
    return [
        {"name": name, "values": [setting_text(one[name]) if name in one else None for one in flat]}
        for name in names
        if len({repr(one[name]) if name in one else None for one in flat}) > 1
    ]


def setting_text(value: Any) -> str:
    """A setting as config.json has it; a word without its quotes."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    """0.009000000000000001 as 0.009, and no more than a few words."""
    try:
        return f"{float(text):g}"
    except ValueError:
        return text if len(text) <= MAX_ID_LENGTH else f"{text[:MAX_ID_LENGTH]}…"


def setting_groups(runs: Sequence[Side]) -> dict[str, list[Side]]:
    """Group the runs that differ only in their seed, by a name such as "update.lr 0.01, loss.high 0.28".

    A run with the same settings and seed as another one is a separate group.
    """
    firsts: dict[str, Side] = {}
    for run in runs:
        firsts.setdefault(run.setting, run)
    heads = list(firsts.values())
    labels = [str(head.row["label"] or "") or head.id for head in heads]
    tasks = [str(head.row["task"] or "") for head in heads]
    apart = [row for row in differing_settings(heads) if row["name"] not in ("seed", "task")]
    names: dict[str, str] = {}
    for i, head in enumerate(heads):
        alike = [j for j, label in enumerate(labels) if label == labels[i] and tasks[j] == tasks[i]]
        rows = [row for row in apart if len({row["values"][j] for j in alike}) > 1]
        words = [f"{row['name']} {_short(row['values'][i])}" for row in rows if row["values"][i] is not None]
        words = [*words[:NAMED], "…"] if len(words) > NAMED else words
        name = [tasks[i]] if len(set(tasks)) > 1 else []
        name += [labels[i]] if len(set(labels)) > 1 or not words else []
        title = " ".join(filter(None, [*name, *words]))
        names[head.setting] = f"{title} ({head.id})" if title in names.values() else title
    groups: dict[str, list[Side]] = {}
    seen: Counter[Any] = Counter()
    for run in runs:
        seen[run.setting, run.pairing] += 1
        again = seen[run.setting, run.pairing]
        title = names[run.setting] if again == 1 else f"{names[run.setting]}, again {again}"
        groups.setdefault(title, []).append(run)
    return groups


# ---- how they ended, and what cannot be subtracted --------------------------------------------------------


def final(columns: MetricColumns) -> dict[str, Any]:
    """The last value of every measure, and what the run has cost."""
    ends: dict[str, Any] = {m: last[0] for m in RESULT_METRICS if (last := columns.last(m)) is not None}
    costs = {name: columns.total(metric) for name, metric in SPENT.items()}
    return ends | costs | {"steps": int(columns.steps[-1]) + 1 if columns.num_kept else 0}


def unlike(first: Sequence[Side], other: Sequence[Side]) -> str:
    """Why the numbers of two groups do not measure the same; "" where they do."""
    held = (first[0].config, other[0].config)
    settings = [config.get("task") or {} for config in held]
    settings = [task if isinstance(task, Mapping) else {"name": task} for task in settings]
    tasks = [
        str(group[0].row["task"] or own.get("name") or "") for group, own in zip((first, other), settings, strict=True)
    ]
    if tasks[0] != tasks[1]:
        return f"another task ({tasks[1] or 'unknown'}, not {tasks[0] or 'unknown'})"
    if not all(held) and any(held):
        return "the settings of one of them are not known"
    names = [n for n in dict.fromkeys([*settings[0], *settings[1]]) if settings[0].get(n) != settings[1].get(n)]
    if names:
        words = [f"task.{n} {settings[1].get(n, '–')}, not {settings[0].get(n, '–')}" for n in names[:NAMED]]
        return f"another task or reward ({'; '.join(words)}{'; …' if len(names) > NAMED else ''})"
    most = [next((m for run in group if (m := run.row["max_reward"]) is not None), None) for group in (first, other)]
    if None not in most and most[0] != most[1]:
        return f"another reward (its largest is {most[1]}, not {most[0]})"
    return ""


def budgets(first: str, held: Mapping[str, Mapping[Any, Mapping[str, Any]]]) -> list[str]:
    """That seeds of a group, or groups, have done more steps than others."""
    done = {name: sorted({end["steps"] for end in ends.values()}) for name, ends in held.items()}
    cautions = [
        f"{name}: its runs have {steps[0]:,} to {steps[-1]:,} steps, and each is taken at its own end."
        for name, steps in done.items()
        if len(steps) > 1
    ]
    other = [f"{name} {steps[-1]:,}" for name, steps in done.items() if steps[-1] != done[first][-1]]
    if other:
        cautions.append(
            f"Steps done differ: {first} {done[first][-1]:,}, {_some(other)}. "
            "A difference is then also one of budget: compare the curves at a step that all have."
        )
    return cautions


def unfinished(runs: Sequence[Side]) -> list[str]:
    """Runs that have not ended, or that ended earlier than planned: their last values are not final."""
    by_status: dict[str, list[str]] = {}
    for run in runs:
        by_status.setdefault(str(run.row["status"]), []).append(run.id)
    ended = ("finished", "foreign")
    return [f"{_some(ids)}: {UNFINISHED.get(s, s)}." for s, ids in by_status.items() if s not in ended]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


# ---- curves, one upon another -----------------------------------------------------------------------------


class Curve(NamedTuple):
    """One metric at the steps that some runs have in common."""

    steps: np.ndarray
    x: np.ndarray
    """Where each step lies on the chosen axis, on average over the runs."""
    values: np.ndarray
    """[run step]."""

    def at(self, keep: np.ndarray) -> Curve:
        return Curve(self.steps[keep], self.x[keep], self.values[:, keep])

    def merged(self, width: int) -> Curve:
        """The means of consecutive steps, `width` of them together."""
        starts = bucket_starts(self.steps, width)
        if len(starts) == len(self.steps):
            return self
        return Curve(np.floor(self.steps[starts]), bucket_means(self.x, starts), bucket_means(self.values, starts))


def curve_of(columns: MetricColumns, metric: str, axis: str) -> Curve | None:
    """All that was measured of a metric. None: the run lacks it, or what the axis counts."""
    cost = AXES[axis]
    lies_at = columns.steps if cost is None else columns.running_sum(cost)
    there = columns.measured(metric)
    if lies_at is None or not len(there):
        return None
    # a step may have several lines
    return Curve(columns.steps[there], lies_at[there], columns[metric][there][None]).merged(1)


def common(curves: Sequence[Curve]) -> Curve:
    """The steps at which all of some runs were measured."""
    steps = curves[0].steps
    for one in curves[1:]:
        if not np.array_equal(steps, one.steps):
            steps = np.intersect1d(steps, one.steps, assume_unique=True)
    own = [one if len(one.steps) == len(steps) else one.at(np.isin(one.steps, steps)) for one in curves]
    with np.errstate(over="ignore", invalid="ignore"):
        return Curve(steps, np.mean([one.x for one in own], axis=0), np.concatenate([one.values for one in own]))


def in_view(x: np.ndarray, view: StepRange, beside: bool = False) -> np.ndarray:
    """What is in view; and `beside` it the next point on either side, to which a line is drawn out of the picture."""
    keep = (x >= view[0]) & (x <= view[1])
    if beside:
        keep[np.flatnonzero(x < view[0])[-1:]] = True
        keep[np.flatnonzero(x > view[1])[:1]] = True
    return keep

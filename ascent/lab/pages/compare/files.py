"""A comparison as files: the picture as PNG or SVG, the tables as CSV."""

from __future__ import annotations

import csv
import io
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ascent.core.types import Refused
from ascent.lab.pages.compare.comparison import Comparison
from ascent.lab.pages.compare.overlay import EVERYTHING, View
from ascent.records.metrics import SHARES, bounds_of, title_of
from ascent.records.plot import draw_line, figure, finish_panel, legend_handles, line_style, plain

PICTURES = {"png": "image/png", "svg": "image/svg+xml"}
TABLES = ("finals", "curves", "settings")
MOST_PANELS = 60
"""Metrics of a picture or a table: more than there are charts with all of their series."""
_drawing = threading.Lock()
"""matplotlib draws one picture at a time."""


def picture(
    found: Comparison,
    metrics: Sequence[str],
    axis: str = "step",
    kind: str = "png",
    seeds: str = "band",
    view: View = EVERYTHING,
) -> bytes:
    """A panel per metric. A line is a setting: the mean over its seeds with the 95 % interval; or a seed."""
    if not 1 <= len(metrics) <= MOST_PANELS:
        raise Refused(f"{len(metrics)} metrics: a picture has 1 to {MOST_PANELS}")
    made = found.curves(metrics, axis, view=view)
    with _drawing:
        return _draw(found, made, axis, kind, seeds, view)


def _draw(found: Comparison, made: dict[str, Any], axis: str, kind: str, seeds: str, view: View) -> bytes:
    import matplotlib
    from matplotlib import pyplot

    columns = 2 if len(made) == 4 else min(3, len(made))
    rows = -(-len(made) // columns)
    fig, axes = figure(rows, columns, (max(6.0, 4.4 * columns), 0.6 + 3.2 * rows))
    places = list(axes.flat)
    for place, (metric, lines) in zip(places, made.items(), strict=False):
        for i, name in enumerate(found.groups):
            if name not in lines["groups"]:
                continue
            line = lines["groups"][name]
            own = [lines["runs"][run.id] for run in found.groups[name] if run.id in lines["runs"]]
            if seeds == "lines" and own:
                for one in own:
                    draw_line(place, one["x"], one["mean"], line_style(i) | {"linewidth": 0.9, "marker": ""})
            else:
                band = (line["low"], line["high"]) if "low" in line else None
                draw_line(place, line["x"], line["mean"], line_style(i) | {"marker": "o" * (len(line["x"]) == 1)}, band)
        finish_panel(place, *title_of(metric), metric in SHARES, axis)
        if metric not in SHARES and view != EVERYTHING:
            _fit(place, view)
    low, high = ends_of(made, view)
    for place in places:
        place.set_visible(place in places[: len(made)])
        if high > low:  # all panels over the same steps, also what is measured late
            room = 0.02 * (high - low)
            place.set_xlim(low - room, high + room)
    _legend(fig, found, seeds, [bounds_of(metric) for metric in made])
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ascent"}):
        meta = {"Date": None} if kind == "svg" else {"Software": "ascent"}
        fig.savefig(data, dpi=130, format=kind, metadata=meta)
    pyplot.close(fig)
    return data.getvalue()


def ends_of(made: dict[str, Any], view: View) -> View:
    """From where to where something is to be seen: all panels together, or what was asked for of it."""
    found = [lines["whole"] for lines in made.values() if lines["whole"]]
    low, high = min((one[0] for one in found), default=0.0), max((one[1] for one in found), default=0.0)
    return max(low, view[0]), min(high, view[1])


def _fit(place: Any, view: View) -> None:
    """What is in view fills the panel: lines go on beside it, and do not count."""
    y = [v for line in place.lines for x, v in zip(*line.get_data(), strict=True) if view[0] <= x <= view[1]]
    for area in place.collections:
        y += [v for path in area.get_paths() for x, v in path.vertices if view[0] <= x <= view[1]]
    known = [float(v) for v in y if v is not None and math.isfinite(v)]
    if known:
        room = 0.05 * (max(known) - min(known)) or 0.05 * abs(max(known)) or 0.05
        place.set_ylim(min(known) - room, max(known) + room)


def _legend(fig: Any, found: Comparison, seeds: str, ends: Sequence[tuple[Any, Any]]) -> None:
    titles = [f"{name}, {len(group)} seeds" if len(group) > 1 else name for name, group in found.groups.items()]
    columns = 1 if max(map(len, titles)) > 50 else min(4, len(titles))
    fig.legend(handles=legend_handles(titles), loc="outside lower left", ncols=columns, frameon=False, fontsize=8)
    banded = any(len(group) > 1 for group in found.groups.values())
    words = "mean over seeds, 95 % interval (Student's t)" if banded else "one seed each: no interval"
    where = "; bands end at 0 and 1 for shares" if any(high is not None for _, high in ends) else ""
    where += "; bands end at 0 for what is never negative" if (0.0, None) in ends else ""
    words += where if banded else ""
    words = "a line per run" if seeds == "lines" and banded else words
    tasks = dict.fromkeys(str(run.row.get("task") or "") for run in found.runs)
    fig.suptitle(plain(": ".join(filter(None, [", ".join(tasks), words]))), x=0.01, ha="left", fontsize=9)


# ---- tables -------------------------------------------------------------------------------------------


def csv_table(
    found: Comparison,
    what: str,
    metrics: Sequence[str],
    axis: str = "step",
    base: str | None = None,
    view: View = EVERYTHING,
) -> str:
    """One of the tables as CSV, numbers in full."""
    if what not in TABLES:
        raise Refused(f"table={what[:20]}: there are {', '.join(TABLES)}")
    if what == "finals":
        rows = _finals(found, base)
    else:
        rows = _settings(found) if what == "settings" else _curves(found, metrics, axis, view)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([[cell(value) for value in row] for row in rows])
    return out.getvalue()


def _finals(found: Comparison, base: str | None) -> Iterable[list[Any]]:
    groups, ended = found.summary()["groups"], found.ends(base)
    head = ["setting", "measure", "seeds", "mean", "half_of_95_interval"]
    yield [*head, "difference", "half_of_difference", "pairs", "difference_to"]
    for group in groups:
        row = ended["rows"][group["name"]]
        for measure in ended["measures"]:
            if measure in row:
                one = row[measure]
                more = [one.get(key) for key in ("mean", "half", "difference", "difference_half", "pairs")]
                yield [group["name"], measure, len(one["values"]), *more, ended["base"] if "pairs" in one else None]


def _settings(found: Comparison) -> Iterable[list[Any]]:
    summary = found.summary()
    yield ["setting", *summary["runs"]]
    for row in summary["difference"]:
        yield [row["name"], *row["values"]]


def _curves(found: Comparison, metrics: Sequence[str], axis: str, view: View) -> Iterable[list[Any]]:
    """The interval as it was computed: nothing is cut off where values end."""
    yield ["metric", "setting", "seeds", axis, "mean", "low", "high"]
    for metric, lines in found.curves(metrics, axis, drawn=False, view=view).items():
        for name, line in lines["groups"].items():
            empty = [None] * len(line["x"])
            for values in zip(line["x"], line["mean"], line.get("low", empty), line.get("high", empty), strict=True):
                yield [metric, name, line["seeds"], *values]


def cell(value: Any) -> Any:
    """A text that a spreadsheet takes for a formula is marked as text."""
    text = isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r")
    return f"'{value}" if text and not _is_number(value) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

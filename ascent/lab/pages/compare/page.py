"""The page that compares runs, and its downloads: curves as PNG or SVG, tables as CSV."""

import csv
import io
import math
import re
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ascent.core.errors import ConfigError
from ascent.lab.curves import ALL_STEPS, StepRange
from ascent.lab.page_base import Lab, json_route, range_params, viewer_page
from ascent.lab.pages.compare.run_comparison import Comparison
from ascent.runs.display.plots import draw_line, figure, finish_panel, legend_handles, line_style, plain
from ascent.runs.metrics import FRACTION_METRICS, chart_of, metric_title

LONGEST = 80
"""Maximum number of characters of a file name."""
SEEDS = ("band", "lines")
PICTURES = {"png": "image/png", "svg": "image/svg+xml"}
TABLES = ("finals", "curves", "settings")
MOST_PANELS = 60
"""Maximum number of metrics in a picture or a table."""
_drawing = threading.Lock()
"""Held while matplotlib draws, which is not thread-safe."""


def routes(lab: Lab) -> list[BaseRoute]:
    def compared(request: Request) -> Comparison:
        return Comparison(lab.runs, request.query_params.getlist("id"), lab.column_cache)

    def numbers(request: Request) -> dict[str, Any]:
        """Return the comparison with the requested curves; `part=curves`: only these; `part=ends`: the last values."""
        part = request.query_params.get("part", "")
        with compared(request) as comparison:
            if part == "ends":
                return comparison.ends(request.query_params.get("base"))
            summary = {} if part == "curves" else comparison.summary()
            return summary | {"curves": comparison.curves(*selected(request, comparison))}

    def drawn(kind: str, request: Request) -> Response:
        seeds = request.query_params.get("seeds", "band")
        if seeds not in SEEDS:
            raise ConfigError(f"seeds={seeds[:20]}: there are {', '.join(SEEDS)}")
        with compared(request) as comparison:
            chosen = selected(request, comparison)
            data = picture(comparison, chosen, kind, seeds)
        name, runs = f"compare-{chosen.metrics[0]}", len(comparison.runs)
        if len(chosen.metrics) > 1 or len(name) > LONGEST:
            name = f"compare-{runs}-run{'s' * (runs != 1)}"
        return attached(data, PICTURES[kind], name, kind)

    def table(request: Request) -> Response:
        what = request.query_params.get("table", "finals")
        with compared(request) as comparison:
            text = csv_table(comparison, what, selected(request, comparison), request.query_params.get("base"))
        return attached(text.encode("utf-8", "replace"), "text/csv; charset=utf-8", f"compare-{what}", "csv")

    return [
        Route("/compare", viewer_page(lab, "compare", "Compare runs")),
        Route("/api/view/compare", json_route(numbers)),
        *(Route(f"/api/view/compare.{kind}", partial(drawn, kind)) for kind in PICTURES),
        Route("/api/view/compare.csv", table),
    ]


def attached(data: bytes, kind: str, name: str, ending: str) -> Response:
    """Return a download with a safe file name."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")
    return Response(data, media_type=kind, headers={"content-disposition": f'attachment; filename="{safe}.{ending}"'})


class Selection(NamedTuple):
    """The metrics to draw, the x axis, and the range on it."""

    metrics: Sequence[str]
    axis: str = "step"
    view: StepRange = ALL_STEPS


def selected(request: Request, comparison: Comparison) -> Selection:
    """Parse the selection of a request; the default metric is the first series of the first chart."""
    metrics = list(dict.fromkeys(request.query_params.getlist("metric")))
    if len(metrics) > MOST_PANELS:
        raise ConfigError(f"{len(metrics)} metrics: at most {MOST_PANELS} at once")
    metrics = metrics or [one["metric"] for chart in comparison.charts()[:1] for one in chart["series"][:1]]
    low, high = range_params(request)
    if low > high:
        raise ConfigError(f"from={low:g} is behind to={high:g}: nothing lies between")
    return Selection(metrics, request.query_params.get("x", "step"), (low, high))


# ---- the picture ----------------------------------------------------------------------------------------


def picture(found: Comparison, chosen: Selection, kind: str = "png", seeds: str = "band") -> bytes:
    """Draw a panel per metric, with a line per setting (mean over its seeds and 95 % interval) or per seed."""
    if not chosen.metrics:
        raise ConfigError(f"0 metrics: a picture has 1 to {MOST_PANELS}")
    import matplotlib
    from matplotlib import pyplot

    made, view, data = found.curves(*chosen), chosen.view, io.BytesIO()
    with _drawing:
        columns = 2 if len(made) == 4 else min(3, len(made))
        rows = -(-len(made) // columns)
        fig, axes = figure(rows, columns, (max(6.0, 4.4 * columns), 0.6 + 3.2 * rows))
        for place in axes.flat[len(made) :]:
            place.set_visible(False)
        for place, (metric, lines) in zip(axes.flat, made.items(), strict=False):
            _panel(place, metric, found, lines, chosen, seeds)
        wholes = [lines["whole"] for lines in made.values() if lines["whole"]] or [(0.0, 0.0)]
        low, high = max(min(whole[0] for whole in wholes), view[0]), min(max(whole[1] for whole in wholes), view[1])
        for place in axes.flat if high > low else ():  # all panels over the same steps, also what is measured late
            room = 0.02 * (high - low)
            place.set_xlim(low - room, high + room)
        _legend(fig, found, seeds, [chart_of(metric).bounds for metric in made])
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ascent"}):
            meta = {"Date": None} if kind == "svg" else {"Software": "ascent"}
            fig.savefig(data, dpi=130, format=kind, metadata=meta)
        pyplot.close(fig)
    return data.getvalue()


def _panel(place: Any, metric: str, found: Comparison, lines: Any, chosen: Selection, seeds: str) -> None:
    _, axis, view = chosen
    for i, (name, group) in enumerate(found.groups.items()):
        if name not in lines["groups"]:
            continue
        line = lines["groups"][name]
        own = [lines["runs"][run.id] for run in group if run.id in lines["runs"]]
        if seeds == "lines" and own:
            for one in own:
                draw_line(place, one["x"], one["mean"], line_style(i) | {"linewidth": 0.9, "marker": ""})
        else:
            band = (line["low"], line["high"]) if "low" in line else None
            draw_line(place, line["x"], line["mean"], line_style(i) | {"marker": "o" * (len(line["x"]) == 1)}, band)
    finish_panel(place, *metric_title(metric), metric in FRACTION_METRICS, axis)
    if metric in FRACTION_METRICS or view == ALL_STEPS:
        return
    y = [v for line in place.lines for x, v in zip(*line.get_data(), strict=True) if view[0] <= x <= view[1]]
    for area in place.collections:
        y += [v for path in area.get_paths() for x, v in path.vertices if view[0] <= x <= view[1]]
    known = [float(v) for v in y if v is not None and math.isfinite(v)]
    if known:  # what is in view fills the panel: lines go on beside it, and do not count
        room = 0.05 * (max(known) - min(known)) or 0.05 * abs(max(known)) or 0.05
        place.set_ylim(min(known) - room, max(known) + room)


def _legend(fig: Any, found: Comparison, seeds: str, ends: Sequence[tuple[Any, Any]]) -> None:
    titles = [f"{name}, {len(group)} seeds" if len(group) > 1 else name for name, group in found.groups.items()]
    columns = 1 if max(map(len, titles)) > 50 else min(4, len(titles))
    fig.legend(handles=legend_handles(titles), loc="outside lower left", ncols=columns, frameon=False, fontsize=8)
    words = "one seed each: no interval"
    if any(len(group) > 1 for group in found.groups.values()):
        words = "mean over seeds, 95 % interval (Student's t)"
        words += "; bands end at 0 and 1 for shares" if any(high is not None for _, high in ends) else ""
        words += "; bands end at 0 for what is never negative" if (0.0, None) in ends else ""
        words = "a line per run" if seeds == "lines" else words
    tasks = dict.fromkeys(str(run.row["task"] or "") for run in found.runs)
    fig.suptitle(plain(": ".join(filter(None, [", ".join(tasks), words]))), x=0.01, ha="left", fontsize=9)


# ---- tables ---------------------------------------------------------------------------------------------


def csv_table(found: Comparison, what: str, chosen: Selection, base: str | None = None) -> str:
    """Return one of the tables as CSV with all digits."""
    if what not in TABLES:
        raise ConfigError(f"table={what[:20]}: there are {', '.join(TABLES)}")
    if what == "settings":
        summary = found.summary()
        differing = ([row["name"], *row["values"]] for row in summary["difference"])
        rows: Iterable[list[Any]] = [["setting", *summary["order"]], *differing]
    else:
        rows = _finals(found, base) if what == "finals" else _curves(found, chosen)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([[cell(value) for value in row] for row in rows])
    return out.getvalue()


def _finals(found: Comparison, base: str | None) -> Iterable[list[Any]]:
    ended = found.ends(base)
    head = ["setting", "measure", "seeds", "mean", "half_of_95_interval"]
    yield [*head, "difference", "half_of_difference", "pairs", "difference_to"]
    for name in found.groups:
        for measure in ended["measures"]:
            if (one := ended["rows"][name].get(measure)) is not None:
                more = [one.get(key) for key in ("mean", "half", "difference", "difference_half", "pairs")]
                yield [name, measure, len(one["values"]), *more, ended["base"] if "pairs" in one else None]


def _curves(found: Comparison, chosen: Selection) -> Iterable[list[Any]]:
    """Yield the rows of curves; intervals are not clipped to the bounds of a metric."""
    yield ["metric", "setting", "seeds", chosen.axis, "mean", "low", "high"]
    for metric, lines in found.curves(*chosen, drawn=False).items():
        for name, line in lines["groups"].items():
            empty = [None] * len(line["x"])
            for values in zip(line["x"], line["mean"], line.get("low", empty), line.get("high", empty), strict=True):
                yield [metric, name, line["seeds"], *values]


def cell(value: Any) -> Any:
    """Escape a text that a spreadsheet would execute as a formula. Negative numbers stay."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        try:
            float(value)
        except ValueError:
            return f"'{value}"
    return value

"""Several runs side by side: settings that differ, curves with intervals over seeds, how they ended."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ascent.core.types import Refused
from ascent.lab.page import Lab, json_route, number_value, points_value, runs_page
from ascent.lab.pages.compare.comparison import Comparison
from ascent.lab.pages.compare.files import MOST_PANELS, PICTURES, csv_table, picture
from ascent.lab.pages.compare.overlay import EVERYTHING, View

LONGEST = 80
"""Characters of a file's name."""
SEEDS = ("band", "lines")


def routes(lab: Lab) -> list[BaseRoute]:
    def compared(request: Request) -> Comparison:
        return Comparison(lab.runs, request.query_params.getlist("id"), lab.library)

    def numbers(request: Request) -> dict[str, Any]:
        """Everything with the curves that were asked for; `part=curves` these alone, `part=ends` the last values."""
        part = request.query_params.get("part", "")
        with compared(request) as comparison:
            if part == "ends":
                return comparison.ends(request.query_params.get("base"))
            summary = {} if part == "curves" else comparison.summary()
            metrics, axis = metrics_of(request, comparison), axis_of(request)
            return summary | {"curves": comparison.curves(metrics, axis, points_value(request), view=view_of(request))}

    def drawn(kind: str, request: Request) -> Response:
        seeds = request.query_params.get("seeds", "band")
        if seeds not in SEEDS:
            raise Refused(f"seeds={seeds[:20]}: there are {', '.join(SEEDS)}")
        with compared(request) as comparison:
            metrics = metrics_of(request, comparison)
            data = picture(comparison, metrics, axis_of(request), kind, seeds, view_of(request))
        return attached(data, PICTURES[kind], file_name(metrics, len(comparison.runs)), kind)

    def table(request: Request) -> Response:
        what = request.query_params.get("table", "finals")
        with compared(request) as comparison:
            metrics, view = metrics_of(request, comparison), view_of(request)
            text = csv_table(comparison, what, metrics, axis_of(request), request.query_params.get("base"), view)
        return attached(text.encode("utf-8", "replace"), "text/csv; charset=utf-8", f"compare-{what}", "csv")

    return [
        Route("/compare", runs_page(lab, "compare", "Compare runs")),
        Route("/api/view/compare", json_route(numbers)),
        *(Route(f"/api/view/compare.{kind}", partial(drawn, kind)) for kind in PICTURES),
        Route("/api/view/compare.csv", table),
    ]


def file_name(metrics: list[str], runs: int) -> str:
    """compare-reward of one metric, and of several compare-15-runs."""
    one = f"compare-{metrics[0]}" if len(metrics) == 1 else ""
    return one if 0 < len(one) <= LONGEST else f"compare-{runs}-run{'s' * (runs != 1)}"


def attached(data: bytes, kind: str, name: str, ending: str) -> Response:
    """A file to be saved, under a name of plain letters."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")
    return Response(data, media_type=kind, headers={"content-disposition": f'attachment; filename="{safe}.{ending}"'})


def metrics_of(request: Request, comparison: Comparison) -> list[str]:
    """Those that are asked for, or what is looked at first: the first series of the first chart."""
    asked = list(dict.fromkeys(request.query_params.getlist("metric")))
    if len(asked) > MOST_PANELS:
        raise Refused(f"{len(asked)} metrics: at most {MOST_PANELS} at once")
    return asked or [one["metric"] for chart in comparison.charts()[:1] for one in chart["series"][:1]]


def axis_of(request: Request) -> str:
    return request.query_params.get("x", "step")


def view_of(request: Request) -> View:
    """From where to where on the axis; without it all of it."""
    low, high = number_value(request, "from"), number_value(request, "to")
    view = EVERYTHING[0] if low is None else low, EVERYTHING[1] if high is None else high
    if view[0] > view[1]:
        raise Refused(f"from={low:g} is behind to={high:g}: nothing lies between")
    return view

"""One run: what became of it, its flags, its curves, its settings."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from ascent.lab.curves import curves
from ascent.lab.page import MOST_RUNS, Lab, json_route, many_values, number_value, points_value, runs_page
from ascent.lab.pages.run.about import run_page
from ascent.lab.pages.runs.rows import run_row
from ascent.records.metrics import DRAWN
from ascent.records.places import find_run


def routes(lab: Lab) -> list[BaseRoute]:
    def about(request: Request) -> dict[str, Any]:
        return run_page(lab.place(request), lab.library)

    def drawn(request: Request) -> dict[str, Any]:
        ids = many_values(request, "id", MOST_RUNS)
        metrics = request.query_params.getlist("metric") or DRAWN
        begin, end, points = number_value(request, "from"), number_value(request, "to"), points_value(request)
        lines = {}
        for id in ids:
            place = find_run(lab.runs, id)
            with lab.library.columns(place) as columns:
                if len(ids) == 1 and request.query_params.get("have") == columns.revision:
                    return {"unchanged": True, "status": run_row(place)["status"]}
                lines[id] = curves(columns, metrics, begin, end, points)
        return {"runs": lines}

    return [
        Route("/run", runs_page(lab, "run", "A run")),
        Route("/api/view/run", json_route(about)),
        Route("/api/view/curves", json_route(drawn)),
    ]

"""The list of runs: a row for each, with its status and a small curve; and a person's notes and tags."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ascent.core.types import Refused
from ascent.lab.curves import spark
from ascent.lab.page import MOST_RUNS, Lab, html_route, json_route, many_values, viewer_page
from ascent.lab.pages.runs.notes import write_note
from ascent.lab.pages.runs.rows import run_row_or_reason
from ascent.records.places import find_run, runs_below
from ascent.web.bodies import Json, body


def routes(lab: Lab) -> list[BaseRoute]:
    def rows(_: Request) -> dict[str, Any]:
        return {"root": lab.runs.name, "runs": [run_row_or_reason(place) for place in runs_below(lab.runs)]}

    def sparks(request: Request) -> dict[str, Any]:
        """The small curves of some runs; one that is gone meanwhile is left out."""
        curves = {}
        for id in many_values(request, "id", MOST_RUNS):
            with suppress(Refused, OSError), lab.library.columns(find_run(lab.runs, id)) as columns:
                curves[id] = spark(columns)
        return curves

    async def note(request: Request) -> Response:
        asked = await body(request)
        place = find_run(lab.runs, str(asked.get("id", "")))
        words = (asked.get("text"), asked.get("tags"), asked.get("revision"))
        return Json(await run_in_threadpool(write_note, place.folder, *words))

    return [
        Route("/runs", html_route(lambda _: viewer_page("runs", "Runs"))),
        Route("/api/view/runs", json_route(rows)),
        Route("/api/view/spark", json_route(sparks)),
        Route("/api/view/notes", note, methods=["POST"]),
    ]

"""The viewer's routes: thin ones, over `ascent.viewer`. They only read, but for notes and tags."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from ascent.lab import viewer_pages
from ascent.lab.bodies import Json, body
from ascent.types import Refused
from ascent.viewer import about, notes
from ascent.viewer.charts import DRAWN
from ascent.viewer.curves import POINTS, Library, curves, spark
from ascent.viewer.places import find, places

MOST_RUNS = 50
"""Runs whose curves one request may ask for."""
MOST_POINTS = 5_000


def routes(runs: Path, library: Library) -> list[BaseRoute]:
    def listed(_: Request) -> dict[str, Any]:
        return {"root": runs.name, "runs": [about.safe_row(place) for place in places(runs)]}

    def whole(request: Request) -> dict[str, Any]:
        return about.page(find(runs, one(request, "id")), library)

    def drawn(request: Request) -> dict[str, Any]:
        ids = many(request, "id", MOST_RUNS)
        metrics = request.query_params.getlist("metric") or DRAWN
        begin, end = number(request, "from"), number(request, "to")
        points = int(number(request, "points") or POINTS)
        if not 2 <= points <= MOST_POINTS:
            raise Refused(f"points={points}: between 2 and {MOST_POINTS:,}")
        found = {}
        for id in ids:
            place = find(runs, id)
            with library.digest(place) as digest:
                if len(ids) == 1 and request.query_params.get("have") == digest.revision:
                    return {"unchanged": True, "status": about.row(place)["status"]}
                found[id] = curves(digest, metrics, begin, end, points)
        return {"runs": found}

    def sparks(request: Request) -> dict[str, Any]:
        found = {}
        for id in many(request, "id", MOST_RUNS):
            with (
                suppress(Refused, OSError),
                library.digest(find(runs, id)) as digest,
            ):  # one that is gone costs no other
                found[id] = spark(digest)
        return found

    async def noted(request: Request) -> Response:
        asked = await body(request)
        place = find(runs, str(asked.get("id", "")))
        given = (asked.get("text"), asked.get("tags"), asked.get("revision"))
        return Json(await run_in_threadpool(notes.write, place.folder, *given))

    def read_ahead(ids: list[str]) -> None:
        """While the browser still loads its scripts, the files that they will ask for."""
        for id in ids[:MOST_RUNS]:
            with suppress(Refused), library.digest(find(runs, id)):
                pass

    def page(name: str) -> Callable:
        async def shown(request: Request) -> Response:
            ids = request.query_params.getlist("id") if name in ("run", "compare") else []
            return HTMLResponse(viewer_pages.shell(name), background=BackgroundTask(read_ahead, ids))

        return shown

    return [
        *(Route(f"/{name}", page(name)) for name in viewer_pages.PAGES),
        Route("/api/view/runs", answer(listed)),
        Route("/api/view/run", answer(whole)),
        Route("/api/view/curves", answer(drawn)),
        Route("/api/view/spark", answer(sparks)),
        Route("/api/view/notes", noted, methods=["POST"]),
    ]


def answer(make: Callable[[Request], Any]) -> Callable:
    """A route that computes JSON off the event loop."""

    async def answered(request: Request) -> Response:
        try:
            return Json(await run_in_threadpool(make, request))
        except ArithmeticError as error:
            raise Refused(f"a number in these files is too large to compute with: {error}") from None

    return answered


def one(request: Request, name: str) -> str:
    given = request.query_params.get(name)
    if not given:
        raise Refused(f"{name}= is missing")
    return given


def many(request: Request, name: str, most: int) -> list[str]:
    given = list(dict.fromkeys(request.query_params.getlist(name)))
    if not 1 <= len(given) <= most:
        raise Refused(f"{name}= has to be given once to {most} times; it was given {len(given)} times")
    return given


def number(request: Request, name: str) -> float | None:
    given = request.query_params.get(name)
    try:
        found = None if given is None else float(given)
    except ValueError:
        found = float("nan")
    if found is not None and not abs(found) < 1e15:
        raise Refused(f"{name}={str(given)[:20]}: a number is needed")
    return found

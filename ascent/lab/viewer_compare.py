"""The routes of a comparison: its numbers, and the picture and the tables as files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ascent.lab.bodies import Json
from ascent.lab.viewer import number
from ascent.types import Refused
from ascent.viewer.compare import files
from ascent.viewer.compare.comparison import Comparison
from ascent.viewer.compare.overlay import EVERYTHING, View
from ascent.viewer.curves import POINTS, Library

MOST_POINTS = 5_000
MOST_METRICS = files.MOST_PANELS
LONGEST = 80
"""Characters of a file's name."""
SEEDS = ("band", "lines")


def routes(runs: Path, library: Library | None = None) -> list[BaseRoute]:
    """Over one folder of runs; with the library of the other pages, so that no curve is kept twice."""
    library = library or Library()

    def compared(request: Request) -> Comparison:
        return Comparison(runs, request.query_params.getlist("id"), library)

    def told(request: Request) -> dict[str, Any]:
        """Everything with the curves that were asked for; `part=curves` these alone, `part=ends` the last values."""
        part = request.query_params.get("part", "")
        with compared(request) as found:
            if part == "ends":
                return found.ends(base(request))
            known = {} if part == "curves" else found.told()
            wanted = metrics(request, found)
            return known | {"curves": found.curves(wanted, axis(request), points(request), view=view(request))}

    def picture(kind: str) -> Callable[[Request], Response]:
        def made(request: Request) -> Response:
            seeds = request.query_params.get("seeds", "band")
            if seeds not in SEEDS:
                raise Refused(f"seeds={seeds[:20]}: there are {', '.join(SEEDS)}")
            with compared(request) as found:
                wanted = metrics(request, found)
                data = files.picture(found, wanted, axis(request), kind, seeds, view(request))
            return attached(data, files.PICTURES[kind], name_of(wanted, len(found.runs)), kind)

        return made

    def table(request: Request) -> Response:
        what = request.query_params.get("table", "finals")
        with compared(request) as found:
            text = files.table(found, what, metrics(request, found), axis(request), base(request), view(request))
        return attached(text.encode("utf-8", "replace"), "text/csv; charset=utf-8", f"compare-{what}", "csv")

    async def answered(request: Request) -> Response:
        return Json(await run_in_threadpool(told, request))

    return [
        Route("/api/view/compare", answered),
        *(Route(f"/api/view/compare.{kind}", _file(picture(kind))) for kind in files.PICTURES),
        Route("/api/view/compare.csv", _file(table)),
    ]


def _file(make: Callable[[Request], Response]) -> Callable:
    async def file(request: Request) -> Response:
        return await run_in_threadpool(make, request)

    return file


def name_of(metrics: list[str], runs: int) -> str:
    """compare-reward of one metric, and of several compare-15-runs."""
    one = f"compare-{metrics[0]}" if len(metrics) == 1 else ""
    return one if 0 < len(one) <= LONGEST else f"compare-{runs}-run{'s' * (runs != 1)}"


def attached(data: bytes, kind: str, name: str, ending: str) -> Response:
    """A file to be saved, under a name of plain letters."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")
    return Response(data, media_type=kind, headers={"content-disposition": f'attachment; filename="{safe}.{ending}"'})


def metrics(request: Request, found: Comparison) -> list[str]:
    """Those that are asked for, or what is looked at first: the first series of the first chart."""
    asked = list(dict.fromkeys(request.query_params.getlist("metric")))
    if len(asked) > MOST_METRICS:
        raise Refused(f"{len(asked)} metrics: at most {MOST_METRICS} at once")
    return asked or [one["metric"] for chart in found.charts()[:1] for one in chart["series"][:1]]


def base(request: Request) -> str | None:
    """A run of the setting to which differences are taken; without one, or where it is not compared, the first."""
    return request.query_params.get("base")


def axis(request: Request) -> str:
    return request.query_params.get("x", "step")


def view(request: Request) -> View:
    """From where to where on the axis; without it all of it."""
    low, high = number(request, "from"), number(request, "to")
    found = EVERYTHING[0] if low is None else low, EVERYTHING[1] if high is None else high
    if found[0] > found[1]:
        raise Refused(f"from={low:g} is behind to={high:g}: nothing lies between")
    return found


def points(request: Request) -> int:
    given = request.query_params.get("points", str(POINTS))
    if not (given.isdecimal() and len(given) < 6 and 2 <= int(given) <= MOST_POINTS):
        raise Refused(f"points={given[:20]}: between 2 and {MOST_POINTS:,}")
    return int(given)

"""The lab's routes. Pages and figures are read with GET, commands are POST, metrics come as server-sent events.

The guard stands before all of them (`guard.py`). To host more, add to `routes`: the guard covers it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from ascent.lab import pages, viewer, viewer_compare, viewer_completions
from ascent.lab.bodies import body
from ascent.lab.figures import FIGURES, training
from ascent.lab.runs import grid, run_folder, stream
from ascent.lab.trainings import COMMANDS, Trainings
from ascent.types import Refused
from ascent.viewer.curves import Library

STATIC = Path(__file__).parent / "static"
NUMBER = re.compile(r"[0-9]{1,15}")


def application(runs: Path) -> Starlette:
    """The lab over one folder of runs, without its guard."""
    return Starlette(routes=routes(runs), exception_handlers={Refused: _refused, 404: _missing, 405: _missing})


def routes(runs: Path) -> list[BaseRoute]:
    trainings, library = Trainings(runs), Library()
    return [
        Route("/", _page(lambda _: pages.contents())),
        Route("/lesson/{slug}", _page(lambda r: pages.lesson_page(r.path_params["slug"], r.url.query, runs))),
        Route("/figure/{name}", _page(lambda r: pages.figure_page(r.path_params["name"], r.url.query, runs))),
        Route("/api/figure/{name}", _look(runs)),
        Route("/api/runs/{run}/events", _events(runs, trainings)),
        Route("/api/runs/{run}/responses", _responses(runs)),
        Route("/api/trainings", _start(trainings), methods=["POST"]),
        Route("/api/trainings/{run}/{command}", _command(trainings), methods=["POST"]),
        *viewer.routes(runs, library),
        *viewer_completions.routes(runs, library),
        *viewer_compare.routes(runs, library),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]


def _page(make: Callable[[Request], str]) -> Callable:
    async def page(request: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(make, request))

    return page


def _look(runs: Path) -> Callable:
    async def look(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in FIGURES:
            raise Refused(f"there is no figure {name[:80]}")
        return JSONResponse(await run_in_threadpool(FIGURES[name].look, request.url.query, runs))

    return look


def _events(runs: Path, trainings: Trainings) -> Callable:
    async def events(request: Request) -> Response:
        run = request.path_params["run"]
        folder = run_folder(runs, run)
        if not folder.exists() and not trainings.kept(run).exists():
            raise Refused(f"there is no run {run}")
        given = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
        if not NUMBER.fullmatch(given):
            raise Refused(f"after={given[:20]}: a byte offset is needed")
        told = stream(folder, int(given), lambda: trainings.status(run))
        return StreamingResponse(told, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    return events


def _responses(runs: Path) -> Callable:
    async def responses(request: Request) -> Response:
        step = request.query_params.get("step")
        if step is not None and not NUMBER.fullmatch(step):
            raise Refused(f"step={step[:20]}: a number is needed")
        folder = run_folder(runs, request.path_params["run"])
        return JSONResponse(await run_in_threadpool(grid, folder, None if step is None else int(step)))

    return responses


def _start(trainings: Trainings) -> Callable:
    async def start(request: Request) -> Response:
        asked = await body(request)
        sides, steps = asked.get("sides"), asked.get("steps")
        if not (isinstance(sides, list) and sides and set(sides) <= set(training.SIDES)):
            raise Refused("sides: a list of a and b is needed")
        if type(steps) is not int or not 1 <= steps <= 10**9:
            raise Refused("steps: how many steps may be done, 1 or more")
        state = training.FIGURE.read(str(asked.get("state", "")))
        for side in sides:
            training.config_of(state, side)  # both are right, or neither is started
        names = {side: await run_in_threadpool(trainings.start, state, side, steps) for side in sides}
        return JSONResponse(names)

    return start


def _command(trainings: Trainings) -> Callable:
    async def command(request: Request) -> Response:
        run, what = request.path_params["run"], request.path_params["command"]
        if what not in COMMANDS:
            raise Refused(f"{what[:20]}: there are {', '.join(COMMANDS)}")
        return JSONResponse(await run_in_threadpool(trainings.command, run, what))

    return command


async def _refused(request: Request, error: Exception) -> Response:
    wants_page = not request.url.path.startswith("/api/")
    return PlainTextResponse(f"{error}\n", 404) if wants_page else JSONResponse({"error": str(error)}, 400)


async def _missing(_: Request, error: Exception) -> Response:
    return PlainTextResponse("There is nothing here.\n", getattr(error, "status_code", 404))


def warm() -> None:
    """Look at every figure once, so that the first visitor does not wait for what is computed once."""
    import pyarrow.json
    import pyarrow.parquet  # noqa: F401

    for figure in FIGURES.values():
        figure.look()

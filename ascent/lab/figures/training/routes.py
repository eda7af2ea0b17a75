"""The routes of figure 5: a run's metrics as a stream, its responses, and the commands that start and steer it."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from ascent.core.types import Refused
from ascent.lab.figures.training.figure import FIGURE
from ascent.lab.figures.training.processes import COMMANDS, Trainings
from ascent.lab.figures.training.sides import SIDES, config_of
from ascent.lab.figures.training.stream import response_grid, run_folder, stream
from ascent.lab.page import Lab, json_route, read_whole, whole_value
from ascent.web.bodies import body


def routes(lab: Lab) -> list[BaseRoute]:
    trainings = Trainings(lab.runs)

    async def events(request: Request) -> Response:
        run = request.path_params["run"]
        folder = run_folder(lab.runs, run)
        if not folder.exists() and not trainings.kept(run).exists():
            raise Refused(f"there is no run {run}")
        after = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
        parts = stream(folder, read_whole("after", after), lambda: trainings.status(run))
        return StreamingResponse(parts, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    def responses(request: Request) -> dict[str, Any]:
        return response_grid(run_folder(lab.runs, request.path_params["run"]), whole_value(request, "step"))

    async def start(request: Request) -> Response:
        wanted = await body(request)
        sides, steps = wanted.get("sides"), wanted.get("steps")
        if not (isinstance(sides, list) and sides and set(sides) <= set(SIDES)):
            raise Refused("sides: a list of a and b is needed")
        if type(steps) is not int or not 1 <= steps <= 10**9:
            raise Refused("steps: how many steps may be done, 1 or more")
        state = FIGURE.read(str(wanted.get("state", "")))
        for side in sides:
            config_of(state, side)  # both are right, or neither is started
        return JSONResponse({side: await run_in_threadpool(trainings.start, state, side, steps) for side in sides})

    def command(request: Request) -> dict[str, Any]:
        run, name = request.path_params["run"], request.path_params["command"]
        if name not in COMMANDS:
            raise Refused(f"{name[:20]}: there are {', '.join(COMMANDS)}")
        return trainings.command(run, name)

    return [
        Route("/api/runs/{run}/events", events),
        Route("/api/runs/{run}/responses", json_route(responses)),
        Route("/api/trainings", start, methods=["POST"]),
        Route("/api/trainings/{run}/{command}", json_route(command), methods=["POST"]),
    ]

"""The routes of figure 5: metrics of a run as a stream, its responses as a grid, and commands that control it."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from ascent.build.trained_run import Run
from ascent.core.errors import ConfigError
from ascent.lab.figures.training.figure import FIGURE, SIDES, config_of, metrics_in_words, point_of, run_folder
from ascent.lab.figures.training.trainings import ENDED, Trainings
from ascent.lab.page_base import Lab, integer_param, json_route, parse_nonnegative_int, read_json_body
from ascent.runs.rollout_files import recorded_steps, rollout_path
from ascent.runs.untrusted_files import is_metrics_line, naming_file, open_regular, parse_json

MAX_READ_BYTES = 1 << 24
"""Maximum number of bytes per read."""
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 0.1, 1.0
"""Seconds between two reads of a file that grows, and of one that does not."""


def routes(lab: Lab) -> list[BaseRoute]:
    trainings = Trainings(lab.runs)

    async def events(request: Request) -> Response:
        run = request.path_params["run"]
        folder = run_folder(lab.runs, run)
        if not folder.exists() and not trainings.control_folder(run).exists():
            raise ConfigError(f"there is no run {run}")
        after = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
        parts = stream(folder, parse_nonnegative_int("after", after), lambda: trainings.status(run))
        return StreamingResponse(parts, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    def responses(request: Request) -> dict[str, Any]:
        return response_grid(run_folder(lab.runs, request.path_params["run"]), integer_param(request, "step"))

    async def start(request: Request) -> Response:
        wanted = await read_json_body(request)
        sides, steps = wanted.get("sides"), wanted.get("steps")
        if not (isinstance(sides, list) and sides and set(sides) <= set(SIDES)):
            raise ConfigError("sides: set a list of a and b")
        if type(steps) is not int or not 1 <= steps <= 10**9:
            raise ConfigError("steps: set a number of steps, 1 or more")
        state = FIGURE.read(str(wanted.get("state", "")))
        for side in sides:
            config_of(state, side)  # raises an error before either is started
        return JSONResponse({side: await run_in_threadpool(trainings.start, state, side, steps) for side in sides})

    command = json_route(lambda request: trainings.command(**request.path_params))
    return [
        Route("/api/runs/{run}/events", events),
        Route("/api/runs/{run}/responses", json_route(responses)),
        Route("/api/trainings", start, methods=["POST"]),
        Route("/api/trainings/{run}/{command}", command, methods=["POST"]),
    ]


async def stream(folder: Path, after: int, status: Callable[[], dict[str, Any]]) -> AsyncIterator[str]:
    """Yield server-sent events of a run: its metrics from byte `after` on, one event per line, and its status.

    The id of an event is the byte offset at which its line ends, so a client that reconnects gets each line once.
    If the file was truncated (a run resumed from a checkpoint), the stream starts over.
    """
    path, offset = folder / "metrics.jsonl", after
    last: dict[str, Any] | None = None
    pause = MIN_POLL_SECONDS
    yield "retry: 500\n\n"
    while True:
        now = await asyncio.to_thread(status)  # before the file, so that the last line is not missed
        fresh = await asyncio.to_thread(read_from, path, offset)
        if fresh is None:
            offset = 0
            yield _event("reset", {}, 0)
            continue
        maximum = await asyncio.to_thread(_maximum, folder) if fresh else None
        for offset, line in fresh:
            if line is None:
                continue
            event = {"point": point_of(line, maximum), "texts": metrics_in_words(line, maximum), "line": line}
            yield _event("metrics", event, offset)
        pause = MIN_POLL_SECONDS if fresh or now != last else min(MAX_POLL_SECONDS, 1.5 * pause)
        if now != last:
            last = now
            yield _event("status", now)
        if now["status"] in ENDED and not fresh:
            yield _event("end", now)
            return
        await asyncio.sleep(pause)


def _maximum(folder: Path) -> float | None:
    with suppress(ConfigError):
        return Run(folder).max_reward
    return None


def _event(kind: str, data: Any, id: int | None = None) -> str:
    head = "" if id is None else f"id: {id}\n"
    return f"{head}event: {kind}\ndata: {json.dumps(data)}\n\n"


def read_from(path: Path, offset: int) -> list[tuple[int, dict[str, Any] | None]] | None:
    """Return the complete lines after a byte offset with their ends; None if no line ends there (a truncated file).

    A line that is not a line of metrics is None.
    """
    try:
        with open_regular(path) as file:
            file.seek(max(0, offset - 1))
            if offset and file.read(1) != b"\n":
                return None
            data = file.read(MAX_READ_BYTES)
    except OSError:
        return None if offset else []
    lines: list[tuple[int, dict[str, Any] | None]] = []
    for text in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
        offset += len(text)
        line = None
        with suppress(ValueError):
            line = parse_json(text)
        lines.append((offset, line if is_metrics_line(line) else None))
    return lines


def response_grid(folder: Path, step: int | None) -> dict[str, Any]:
    """Return the recorded responses of a step (default: the newest), marked right, rewarded or wrong."""
    run, steps = Run(folder), recorded_steps(folder)
    if not steps:
        return {"step": None, "prompts": []}
    chosen = steps[-1] if step is None else step
    maximum, groups = run.max_reward or 1.0, dict[int, dict[str, Any]]()
    with naming_file(rollout_path(folder, chosen)):
        for row in run.rollouts(chosen):
            group = groups.setdefault(row["group"], {"prompt": row["prompt_text"], "responses": []})
            mark = "right" if row.get("correct") else "rewarded" if row["reward"] >= maximum / 2 else "wrong"
            group["responses"].append({"text": row["response_text"], "reward": f"{row['reward']:g}", "mark": mark})
        for group in groups.values():
            (text, reward), count = Counter((r["text"], r["reward"]) for r in group["responses"]).most_common(1)[0]
            group["common"] = f"{text} × {count}, reward {reward} of {maximum:g}"
    return {"step": chosen + 1, "prompts": list(groups.values()), "maximum": f"{maximum:g}"}

"""The page of one run: status, alerts, curves and settings."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from ascent.lab.curves import ColumnCache, curves, measured_metrics
from ascent.lab.page_base import Lab, integer_param, json_route, range_params, viewer_page
from ascent.lab.pages.runs.page import part_of, read_note, run_events, run_row
from ascent.runs.foreign_runs import foreign_lines
from ascent.runs.metrics import charts_with_data, evaluation_label
from ascent.runs.replica_log import replica_events, replicas_of
from ascent.runs.rollout_files import HELD_OUT, recorded_steps
from ascent.runs.run_list import RunEntry, how_to_resume
from ascent.runs.trust import DESCRIPTION
from ascent.runs.untrusted_files import finite_number, parse_json, read_object, read_regular

MOST_SLICES = 256
"""Maximum number of time slices of a step."""


def routes(lab: Lab) -> list[BaseRoute]:
    def drawn(request: Request) -> dict[str, Any]:
        place, view = lab.place(request), range_params(request)
        with lab.column_cache.columns(place) as columns:
            if request.query_params.get("have") == columns.revision:
                return {"unchanged": True, "status": run_row(place)["status"]}
            return {"runs": {place.id: curves(columns, view=view)}}

    return [
        Route("/run", viewer_page(lab, "run", "A run")),
        Route("/api/view/run", json_route(lambda request: run_page(lab.place(request), lab.column_cache))),
        Route("/api/view/curves", json_route(drawn)),
        Route("/api/view/occupancy", json_route(lambda r: occupancy_at(lab.place(r).folder, integer_param(r, "step")))),
    ]


def occupancy_at(folder: Path, step: int | None) -> dict[str, Any]:
    """Return the number of responses decoded at once over time, in this step or the last one before it with data."""
    try:
        lines = read_regular(folder / "occupancy.jsonl").split(b"\n")[:-1]
    except OSError:
        return {}
    for line in reversed(lines):
        with suppress(ValueError, TypeError, KeyError):
            found = parse_json(line)
            running = found["time/running"][:MOST_SLICES]
            keys = {"step": "step", "max_num_seqs": "max_num_seqs", "seconds": "time/seconds", "tail": "time/tail"}
            values = {name: finite_number(found[key]) for name, key in keys.items()}
            if None in (*values.values(), *map(finite_number, running)):
                continue
            if min(values["max_num_seqs"], values["seconds"]) <= 0:
                continue
            if step is None or values["step"] <= step:
                return values | {"running": running}
    return {}


def run_page(place: RunEntry, column_cache: ColumnCache) -> dict[str, Any]:
    """Return everything about a run except its curves."""
    ours, run, config, problems = place.kind == "ascent", dict[str, Any](), dict[str, Any](), list[str]()
    if ours:
        (run, first), (config, second) = (read_object(place.folder / name) for name in ("run.json", "config.json"))
        problems += filter(None, [first, second])
    with column_cache.columns(place) as columns:
        charts = charts_with_data(measured_metrics(columns), evaluation_label(run.get("task")) if ours else "evaluated")
        problems += [f"metrics.jsonl: {text}" for text in (columns.problem, *columns.bad_lines[:3]) if text]
        if columns.num_bad_lines > 3:
            problems.append(f"metrics.jsonl: {columns.num_bad_lines:,} lines in all cannot be read, and are left out")
        for name, count in columns.nonfinite_counts.items():
            step, text = columns.nonfinite[name][0]
            steps = f"{count:,} step{'s' * (count > 1)}"
            problems.append(f"{name} was not finite in {steps}, first {text} in step {step:g}")
    if not ours:
        problems += foreign_lines(place.folder)[1]
    elif not (place.folder / "metrics.jsonl").exists():
        problems.append("metrics.jsonl is missing, so there are no curves")
    row = run_row(place)
    return {
        **row,
        "going_on": how_to_resume(place.folder, row["status"]),
        "words": part_of(part_of(run, "result", dict), "words", list),
        **{name: config.get(name, "") for name in ("objective", "formula")},
        "config": {key: value for key, value in config.items() if key not in DESCRIPTION},
        **{name: part_of(run, name, dict) for name in ("versions", "machine")},
        "history": part_of(run, "history", list),
        "events": run_events(place),
        "charts": charts,
        "recorded": recorded_steps(place.folder, place.kind),
        "held_out": recorded_steps(place.folder, place.kind, HELD_OUT),
        "greedy": evaluation_label(run.get("task")),
        "replicas": replicas_of(place.folder) if ours else [],
        "replica_events": replica_events(place.folder) if ours else [],
        "notes": read_note(place.folder),
        "problems": problems,
    }

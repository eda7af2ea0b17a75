"""All that the page of a run says besides its curves and responses."""

from __future__ import annotations

from typing import Any

from ascent.lab.curves import Library, measured_metrics
from ascent.lab.pages.runs.notes import read_note
from ascent.lab.pages.runs.rows import run_events, run_row
from ascent.records.columns import Columns
from ascent.records.foreign import foreign_lines
from ascent.records.metrics import charts_of, greedy_of
from ascent.records.places import Place
from ascent.records.reading import read_object
from ascent.records.responses import HELD_OUT, recorded_steps
from ascent.records.status import how_to_resume

DESCRIPTION = ("objective", "formula", "label")
"""What config.json holds only to be read by people."""


def run_page(place: Place, library: Library) -> dict[str, Any]:
    """A run in full, less its curves."""
    run, run_problem = read_object(place.folder / "run.json") if place.kind == "ascent" else ({}, "")
    config, config_problem = read_object(place.folder / "config.json") if place.kind == "ascent" else ({}, "")
    problems = [problem for problem in (run_problem, config_problem) if problem]
    with library.columns(place) as columns:
        evaluated = "evaluated" if place.kind != "ascent" else greedy_of(run.get("task"))
        charts = charts_of(measured_metrics(columns), evaluated)
        problems += problems_of(columns)
    if place.kind != "ascent":
        problems += foreign_lines(place.folder)[1]
    elif not (place.folder / "metrics.jsonl").exists():
        problems.append("metrics.jsonl is missing, so there are no curves")
    result = run.get("result") if isinstance(run.get("result"), dict) else {}
    about = run_row(place)
    return {
        **about,
        "going_on": how_to_resume(place.folder, about["status"]),
        "words": (result or {}).get("words", []),
        "objective": config.get("objective", ""),
        "formula": config.get("formula", ""),
        "config": {key: value for key, value in config.items() if key not in DESCRIPTION},
        "versions": run.get("versions", {}),
        "machine": run.get("machine", {}),
        "history": run.get("history", []),
        "events": run_events(place),
        "charts": charts,
        "recorded": recorded_steps(place.folder, place.kind),
        "held_out": recorded_steps(place.folder, place.kind, HELD_OUT),
        "greedy": greedy_of(run.get("task")),
        "notes": read_note(place.folder),
        "problems": problems,
    }


def problems_of(columns: Columns) -> list[str]:
    """What is wrong with metrics.jsonl, in words."""
    problems = [f"metrics.jsonl: {text}" for text in (columns.problem, *columns.bad[:3]) if text]
    if columns.bad_count > 3:
        problems.append(f"metrics.jsonl: {columns.bad_count:,} lines in all cannot be read, and are left out")
    return problems + [
        f"{name} was not finite in {count:,} step{'s' * (count > 1)}, first {text} in step {step:g}"
        for name, count in columns.nonfinite_counts.items()
        for step, text in columns.nonfinite[name][:1]
    ]

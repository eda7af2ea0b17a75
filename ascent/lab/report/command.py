"""A run as one HTML file to send to a colleague."""

from __future__ import annotations

import os
from pathlib import Path

from ascent.core.types import Refused
from ascent.lab.curves import Library, curves
from ascent.lab.pages.run.about import run_page
from ascent.lab.report.completions import gather_answers, gather_completions
from ascent.lab.report.page import GENERATOR, report_page
from ascent.records.places import Place, run_kind

POINTS = 300
"""Points of a curve in a report."""
LINES = 30
"""Lines of the file behind each chart."""
HEAD = 4096
"""Bytes at the beginning of a file in which a report says that it is one."""


def write_report(run: Path, out: Path | None, force: bool) -> tuple[Path, int]:
    """Write a run's report. Returns its path and its size in bytes; `force` overwrites any file."""
    place = place_of(run)
    out = out or run / "report.html"
    _refuse_file(out, force)
    text = report_of(place)
    write_aside(out, text)
    return out, len(text.encode("utf-8", "replace"))


def place_of(folder: Path) -> Place:
    if not folder.is_dir():
        what = "that is a file" if folder.exists() else "there is no such folder"
        raise Refused(f"{folder}: {what}. A run is a folder: ascent report runs/NAME")
    kind = run_kind(folder)
    if kind is None:
        raise Refused(
            f"{folder}: there is no run.json here, nor completions of TRL or verl, so this is not a run. "
            "Name the folder of one run"
        )
    return Place(folder.resolve().name, folder, kind)


def _refuse_file(out: Path, force: bool) -> None:
    """Refuse a file that cannot be written, or that is somebody's."""
    if out.is_dir():
        raise Refused(f"--out {out}: that is a folder. Name a file in it: --out {out / 'report.html'}")
    if not out.parent.is_dir():
        raise Refused(f"--out {out}: there is no folder {out.parent}. Make it first, or choose another file")
    if out.exists() and not force and not _is_ours(out):
        raise Refused(
            f"--out {out}: already there, and no report of ours. Choose another file, or --force to replace it"
        )


def _is_ours(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return f'name="generator" content="{GENERATOR}"'.encode() in file.read(HEAD)
    except OSError:
        return False


def write_aside(out: Path, text: str) -> None:
    """Aside, then renamed: whoever opens it sees the old report or the new one."""
    aside = out.with_name(f".{out.name}.new")
    try:
        aside.write_bytes(text.encode("utf-8", "replace"))
        os.replace(aside, out)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise Refused(
            f"--out {out}: cannot write there ({error.strerror}). Choose a file of yours with --out"
        ) from None


def report_of(place: Place) -> str:
    """The whole page of a run."""
    library = Library()
    about = run_page(place, library)
    metrics = [one["metric"] for chart in about["charts"] for one in chart["series"]]
    with library.columns(place) as columns:
        drawn = curves(columns, metrics, points=POINTS)
        rows = {c["key"]: columns.some_lines([one["metric"] for one in c["series"]], LINES) for c in about["charts"]}
        last = {metric: value for metric in metrics if (value := columns.last(metric))}
        completions = gather_completions(place.folder, place.kind, about["events"], columns)
    answers = gather_answers(place.folder, place.kind, about["greedy"])
    return report_page(about, drawn, rows, last, completions, answers)

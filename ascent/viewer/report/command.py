"""`ascent report RUN`: a run as one HTML file to send to a colleague."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import tyro

from ascent.types import Refused
from ascent.viewer import about
from ascent.viewer.curves import Library, curves
from ascent.viewer.exact import Exact
from ascent.viewer.places import Place, kind_of
from ascent.viewer.report import answers, steps, tokens
from ascent.viewer.report.page import GENERATOR, Facts, page

POINTS = 300
"""Points of a curve in a report."""
LINES = 30
"""Lines of the file behind each chart."""
HEAD = 4096
"""Bytes at the beginning of a file in which a report says that it is one."""

ABOUT = """One HTML file about a run, to send to a colleague: result, flags, curves, completions, settings.

  ascent report RUN
  ascent report RUN --out findings.html

  It holds all that it shows: no script, nothing from the network. RUN may be
  running, dead or damaged, and may be a folder of TRL's completions or of
  verl's rollouts. An older report is replaced, any other file is not."""


@dataclass
class ReportOptions:
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's folder."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """The file to write. Default: RUN/report.html."""
    force: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write over a file that is no report."""


def command(args: list[str]) -> int:
    options = tyro.cli(ReportOptions, prog="ascent report", description=ABOUT, args=args)
    place = place_of(options.run)
    out = options.out or options.run / "report.html"
    check(out, options.force)
    text = report(place)
    write(out, text)
    print(f"Report: {out} ({len(text.encode('utf-8', 'replace')) / 1000:,.0f} kB, opens in any browser)")
    return 0


def place_of(folder: Path) -> Place:
    if not folder.is_dir():
        what = "that is a file" if folder.exists() else "there is no such folder"
        raise Refused(f"{folder}: {what}. A run is a folder: ascent report runs/NAME")
    kind = kind_of(folder)
    if kind is None:
        raise Refused(
            f"{folder}: there is no run.json here, nor completions of TRL or verl, so this is not a run. "
            "Name the folder of one run"
        )
    return Place(folder.resolve().name, folder, kind)


def check(out: Path, force: bool) -> None:
    """Refuse a file that cannot be written, or that is somebody's."""
    if out.is_dir():
        raise Refused(f"--out {out}: that is a folder. Name a file in it: --out {out / 'report.html'}")
    if not out.parent.is_dir():
        raise Refused(f"--out {out}: there is no folder {out.parent}. Make it first, or choose another file")
    if out.exists() and not force and not is_ours(out):
        raise Refused(
            f"--out {out}: already there, and no report of ours. Choose another file, or --force to replace it"
        )


def is_ours(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return f'name="generator" content="{GENERATOR}"'.encode() in file.read(HEAD)
    except OSError:
        return False


def write(out: Path, text: str) -> None:
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


def report(place: Place) -> str:
    """The whole page of a run."""
    library = Library()
    told = about.page(place, library)
    metrics = [one["metric"] for chart in told["charts"] for one in chart["series"]]
    with library.digest(place) as digest:
        drawn = curves(digest, metrics, points=POINTS)
        exact = Exact(digest)
        rows = {c["key"]: exact.lines([one["metric"] for one in c["series"]], LINES) for c in told["charts"]}
        last = {metric: value for metric in metrics if (value := exact.last(metric))}
        made = steps.gather(place.folder, place.kind, told["events"], digest)
    greedy = answers.section(place.folder, place.kind, told["greedy"])
    return page(Facts(told, drawn, rows, last, tokens.section(made), made.anchors(), greedy, version=_version()))


def _version() -> str | None:
    try:
        return version("ascent-rl")
    except PackageNotFoundError:
        return None

"""What every page of the lab has: a head and a foot, what its routes are given, and how they read and answer a request.

A page is a folder in `pages/`: its `page.py` has `routes(lab)`, its `page.js` and `page.css` are served beside it as
/static/pages/NAME/…; what pages share is in `static/`. A `page.html` extends `document.html`, the template of every
page. What comes from elsewhere is escaped; there is no inline script or style.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from ascent.core.types import Refused
from ascent.lab.curves import POINTS, Library
from ascent.lab.figures import all_figures
from ascent.lab.folders import assets_of
from ascent.lab.templates import TEMPLATES
from ascent.records.places import Place, find_run
from ascent.web.bodies import Json


@dataclass(frozen=True)
class Lab:
    """What routes are given: the folder of runs, and the curves that were read from it."""

    runs: Path
    library: Library = field(default_factory=Library)

    def place(self, request: Request) -> Place:
        """The run that the address names."""
        return find_run(self.runs, one_value(request, "id"))

    def read_ahead(self, ids: list[str]) -> None:
        """While the browser still loads its scripts, the files that they will ask for."""
        for id in ids[:MOST_RUNS]:
            with suppress(Refused), self.library.columns(find_run(self.runs, id)):
                pass


MOST_RUNS = 50
"""Runs that one request may ask for."""
MOST_POINTS = 5_000
EVERYWHERE = ("/static/vendor/uplot.css", "/static/base.css", "/static/chart.css", "/static/app.js")


def page_html(name: str, title: str, template: str = "document.html", styles: Iterable[str] = (), **values: Any) -> str:
    """The page of a folder in `pages/`, with that folder's own style and script. `current` is the figure it shows.

    Without a template of its own it is an empty place, which its script fills by what its address says.
    """
    assets = [*EVERYWHERE, *styles, *assets_of("pages", name)]
    return TEMPLATES.get_template(template).render(
        page=name, title=title, assets=assets, figures=all_figures(), **values
    )


def viewer_page(name: str, title: str) -> str:
    return page_html(name, title, styles=["/static/viewer.css"], current="runs")


def runs_page(lab: Lab, name: str, title: str) -> Callable:
    """A page about the runs that its address names. They are read while the browser loads the page's scripts."""

    def answer(request: Request) -> Response:
        ids = request.query_params.getlist("id")
        return HTMLResponse(viewer_page(name, title), background=BackgroundTask(lab.read_ahead, ids))

    return answer


def html_route(make: Callable[[Request], str]) -> Callable:
    """A route that makes a page. A route that is a plain function runs off the event loop."""
    return lambda request: HTMLResponse(make(request))


def json_route(make: Callable[[Request], Any]) -> Callable:
    """A route that computes JSON."""

    def answer(request: Request) -> Response:
        try:
            return Json(make(request))
        except ArithmeticError as error:
            raise Refused(f"a number in these files is too large to compute with: {error}") from None

    return answer


def one_value(request: Request, name: str) -> str:
    """What the address gives for a name; it has to be there."""
    value = request.query_params.get(name)
    if not value:
        raise Refused(f"{name}= is missing")
    return value


def many_values(request: Request, name: str, most: int) -> list[str]:
    """All that the address gives for a name, each once."""
    values = list(dict.fromkeys(request.query_params.getlist(name)))
    if not 1 <= len(values) <= most:
        raise Refused(f"{name}= has to be given once to {most} times; it was given {len(values)} times")
    return values


def number_value(request: Request, name: str) -> float | None:
    """A number of the address; None without one."""
    text = request.query_params.get(name)
    try:
        value = None if text is None else float(text)
    except ValueError:
        value = float("nan")
    if value is not None and not abs(value) < 1e15:
        raise Refused(f"{name}={str(text)[:20]}: a number is needed")
    return value


def whole_value(request: Request, name: str) -> int | None:
    """A whole number of the address, 0 or more; None without one."""
    text = request.query_params.get(name)
    return None if text is None else read_whole(name, text)


def read_whole(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise Refused(f"{name}={text[:20]}: a whole number, 0 or more, is needed")
    return int(text)


def points_value(request: Request) -> int:
    """How many points of a curve the address asks for."""
    points = whole_value(request, "points")
    if points is not None and not 2 <= points <= MOST_POINTS:
        raise Refused(f"points={points}: between 2 and {MOST_POINTS:,}")
    return points or POINTS

"""What every page of the lab has: a head and a foot, what its routes are given, and how they read and answer a request.

A page is a folder in `pages/`: its `page.py` has `routes(lab)`, its `page.js` and `page.css` are served beside it as
/static/pages/NAME/…; what pages share is in `static/`. A `page.html` extends `document.html`, the template of every
page. What comes from elsewhere is escaped; there is no inline script or style.
"""

import json
import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from ascent.core.errors import ConfigError
from ascent.lab import assets_of
from ascent.lab.curves import Library, View
from ascent.lab.figures import all_figures
from ascent.runs.run_list import RunEntry, find_run


@dataclass(frozen=True)
class Lab:
    """What routes are given: the folder of runs, and the curves that were read from it."""

    runs: Path
    library: Library = field(default_factory=Library)

    def place(self, request: Request) -> RunEntry:
        """The run that the address names."""
        return find_run(self.runs, one_value(request, "id"))

    def read_ahead(self, ids: list[str]) -> None:
        """While the browser still loads its scripts, the files that they will ask for."""
        for id in ids[:MOST_ASKED]:
            with suppress(ConfigError), self.library.columns(find_run(self.runs, id)):
                pass


MOST_ASKED = 50
"""Runs that one request may ask for."""
MOST_BYTES = 100_000
"""The longest command that is read."""
EVERYWHERE = ("/static/vendor/uplot.css", "/static/base.css", "/static/chart.css", "/static/app.js")
VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {0x7F: 0x2421}
"""Control characters, each as the sign that stands for it."""


def visible(value: Any) -> str:
    """Any text as it can be shown, with signs for control characters and for halves of a character."""
    if value is None or isinstance(value, Markup):
        return value or ""
    text = str(value).replace("\r\n", "\n").translate(VISIBLE)
    return text.encode("utf-8", "replace").decode()


_FILES = FileSystemLoader(Path(__file__).parent)
TEMPLATES = Environment(loader=_FILES, autoescape=True, finalize=visible, trim_blocks=True, lstrip_blocks=True)


def page_of(
    request: Request, name: str, title: str, template: str = "document.html", styles: Iterable[str] = (), **values: Any
) -> HTMLResponse:
    """The page of a folder in `pages/`. Without a template its script fills it. `current` is the figure it shows."""
    values |= {"page": name, "title": title, "figures": all_figures(), "root": request.scope["root_path"]}
    assets = [*EVERYWHERE, *styles, *assets_of("pages", name)]
    return HTMLResponse(TEMPLATES.get_template(template).render(assets=assets, **values))


def viewer_page(lab: Lab, name: str, title: str) -> Callable:
    """A page about runs. Those that its address names are read while the browser loads the page's scripts."""

    def answer(request: Request) -> Response:
        page = page_of(request, name, title, styles=["/static/viewer.css"], current="runs")
        page.background = BackgroundTask(lab.read_ahead, request.query_params.getlist("id"))
        return page

    return answer


class Json(JSONResponse):
    """JSON of what may come from anyone's files: numbers that are not finite are null, odd letters are escaped."""

    def render(self, content: Any) -> bytes:
        try:
            text = json.dumps(content, allow_nan=False, separators=(",", ":"))
        except ValueError:
            text = json.dumps(_finite(content), allow_nan=False, separators=(",", ":"))
        return text.encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def json_route(make: Callable[[Request], Any]) -> Callable:
    """A route that computes JSON. A plain function runs off the event loop."""

    def answer(request: Request) -> Response:
        try:
            return Json(make(request))
        except ArithmeticError as error:
            raise ConfigError(f"a number in these files is too large to compute with: {error}") from None

    return answer


async def body(request: Request) -> dict[str, Any]:
    """The JSON object of a command, of bounded length."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > MOST_BYTES:
            raise ConfigError(f"the command is longer than {MOST_BYTES} bytes")
    try:
        asked = json.loads(data)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        raise ConfigError("a command is a JSON object")
    return asked


def one_value(request: Request, name: str) -> str:
    """What the address gives for a name; it has to be there."""
    if not (value := request.query_params.get(name)):
        raise ConfigError(f"{name}= is missing")
    return value


def many_values(request: Request, name: str, most: int) -> list[str]:
    """All that the address gives for a name, each once."""
    values = list(dict.fromkeys(request.query_params.getlist(name)))
    if not 1 <= len(values) <= most:
        raise ConfigError(f"{name}= has to be given once to {most} times; it was given {len(values)} times")
    return values


def view_of(request: Request) -> View:
    """From where to where curves are asked for: two numbers of the address, or no bound."""

    def number(name: str, otherwise: float) -> float:
        if (text := request.query_params.get(name)) is None:
            return otherwise
        with suppress(ValueError):
            if abs(value := float(text)) < 1e15:
                return value
        raise ConfigError(f"{name}={text[:20]}: a number is needed")

    return number("from", -math.inf), number("to", math.inf)


def whole_value(request: Request, name: str) -> int | None:
    """A whole number of the address, 0 or more; None without one."""
    text = request.query_params.get(name)
    return None if text is None else read_whole(name, text)


def read_whole(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise ConfigError(f"{name}={text[:20]}: a whole number, 0 or more, is needed")
    return int(text)

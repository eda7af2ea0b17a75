"""The base of every page of the lab: its template, the state that routes share, and helpers for requests and responses.

A page is a folder in `pages/`. Its `page.py` has `routes(lab)`; its `page.js` and `page.css` are served as
/static/pages/NAME/…; shared files are in `static/`. A `page.html` extends `document.html`, the template of every
page. All values are escaped, and there are no inline scripts or styles.
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
from ascent.lab.curves import ColumnCache, StepRange
from ascent.lab.figures import all_figures
from ascent.runs.run_list import RunEntry, find_run


@dataclass(frozen=True)
class Lab:
    """The state that routes share: the folder of runs, and a cache of their metrics."""

    runs: Path
    column_cache: ColumnCache = field(default_factory=ColumnCache)

    def place(self, request: Request) -> RunEntry:
        """Return the run that the parameter `id` names."""
        return find_run(self.runs, required_param(request, "id"))

    def prefetch(self, ids: list[str]) -> None:
        """Read the metrics of these runs while the browser loads the scripts that will request them."""
        for id in ids[:MAX_RUNS_PER_REQUEST]:
            with suppress(ConfigError), self.column_cache.columns(find_run(self.runs, id)):
                pass


MAX_RUNS_PER_REQUEST = 50
"""Maximum number of runs in one request."""
MAX_BODY_BYTES = 100_000
"""Maximum size of a request body."""
COMMON_ASSETS = ("/static/vendor/uplot.css", "/static/base.css", "/static/chart.css", "/static/app.js")
CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {0x7F: 0x2421}
"""Control characters and the Unicode symbols that picture them."""


def displayable(value: Any) -> str:
    """Return a text in which symbols replace control characters, and question marks replace lone surrogates."""
    if value is None or isinstance(value, Markup):
        return value or ""
    text = str(value).replace("\r\n", "\n").translate(CONTROL_PICTURES)
    return text.encode("utf-8", "replace").decode()


_FILES = FileSystemLoader(Path(__file__).parent)
TEMPLATES = Environment(loader=_FILES, autoescape=True, finalize=displayable, trim_blocks=True, lstrip_blocks=True)


def render_page(
    request: Request, name: str, title: str, template: str = "document.html", styles: Iterable[str] = (), **values: Any
) -> HTMLResponse:
    """Render the page of a folder in `pages/`. Without a template, its script fills it. `current`: the shown figure."""
    values |= {"page": name, "title": title, "figures": all_figures(), "root": request.scope["root_path"]}
    assets = [*COMMON_ASSETS, *styles, *assets_of("pages", name)]
    return HTMLResponse(TEMPLATES.get_template(template).render(assets=assets, **values))


def viewer_page(lab: Lab, name: str, title: str) -> Callable:
    """Return the route of a page about runs. The runs in its address are read in the background."""

    def answer(request: Request) -> Response:
        page = render_page(request, name, title, styles=["/static/viewer.css"], current="runs")
        page.background = BackgroundTask(lab.prefetch, request.query_params.getlist("id"))
        return page

    return answer


class FiniteJSONResponse(JSONResponse):
    """A JSON response for data from untrusted files: numbers that are not finite become null."""

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
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def json_route(compute: Callable[[Request], Any]) -> Callable:
    """Return a route that answers with JSON. Starlette runs it in a thread."""

    def answer(request: Request) -> Response:
        try:
            return FiniteJSONResponse(compute(request))
        except ArithmeticError as error:
            raise ConfigError(f"a number in these files is too large to compute with: {error}") from None

    return answer


async def read_json_body(request: Request) -> dict[str, Any]:
    """Read the JSON object in a request body of limited size."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > MAX_BODY_BYTES:
            raise ConfigError(f"the request body is longer than {MAX_BODY_BYTES} bytes")
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError("the request body must be a JSON object")
    return value


def required_param(request: Request, name: str) -> str:
    """Return the query parameter with this name, which must be set."""
    if not (value := request.query_params.get(name)):
        raise ConfigError(f"{name}= is missing")
    return value


def repeated_param(request: Request, name: str, max_values: int) -> list[str]:
    """Return the distinct values of a query parameter that may be repeated."""
    values = list(dict.fromkeys(request.query_params.getlist(name)))
    if not 1 <= len(values) <= max_values:
        raise ConfigError(f"{name}= must be given 1 to {max_values} times; it was given {len(values)} times")
    return values


def range_params(request: Request) -> StepRange:
    """Return the range of steps in the query parameters `from` and `to`; each may be absent."""

    def number(name: str, default: float) -> float:
        if (text := request.query_params.get(name)) is None:
            return default
        with suppress(ValueError):
            if abs(value := float(text)) < 1e15:
                return value
        raise ConfigError(f"{name}={text[:20]}: set a number")

    return number("from", -math.inf), number("to", math.inf)


def integer_param(request: Request, name: str) -> int | None:
    """Return the query parameter with this name as an integer, 0 or more; None if it is absent."""
    text = request.query_params.get(name)
    return None if text is None else parse_nonnegative_int(name, text)


def parse_nonnegative_int(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise ConfigError(f"{name}={text[:20]}: set a whole number, 0 or more")
    return int(text)

"""The lab's server: the routes of every page and figure, and the scripts and styles beside them.

Pages and figures are read with GET, commands are POST, metrics come as server-sent events. The guard stands before all
of them (`ascent/web/guard.py`), also before what is added later.
"""

from __future__ import annotations

import os
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles

from ascent.core.types import Refused
from ascent.lab.figures import all_figures
from ascent.lab.folders import modules_in, places_of
from ascent.lab.page import Lab

STATIC = Path(__file__).parent / "static"
SERVED = {".js", ".mjs", ".css", ".svg", ".woff2"}
"""Endings of the files that a browser may fetch: not Python, nor data."""


class Assets(StaticFiles):
    """The scripts and styles in some folders, and nothing else that lies there."""

    def __init__(self, folders: list[Path]):
        super().__init__(directory=folders[0])
        self.all_directories = list(folders)

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        return super().lookup_path(path) if Path(path).suffix in SERVED else ("", None)


def application(runs: Path) -> Starlette:
    """The lab over one folder of runs, without its guard."""
    return Starlette(routes=all_routes(runs), exception_handlers={Refused: _refused, 404: _missing, 405: _missing})


def all_routes(runs: Path) -> list[BaseRoute]:
    lab = Lab(runs)
    modules = [*modules_in("ascent.lab.pages", "page"), *modules_in("ascent.lab.figures", "routes")]
    return [
        *(route for module in modules for route in module.routes(lab)),
        *(Mount(f"/static/{kind}", Assets(places_of(kind))) for kind in ("figures", "pages")),
        Mount("/static", Assets([STATIC])),
    ]


async def _refused(request: Request, error: Exception) -> Response:
    wants_page = not request.url.path.startswith("/api/")
    return PlainTextResponse(f"{error}\n", 404) if wants_page else JSONResponse({"error": str(error)}, 400)


async def _missing(_: Request, error: Exception) -> Response:
    return PlainTextResponse("There is nothing here.\n", getattr(error, "status_code", 404))


def warm() -> None:
    """Look at every figure once, so that the first visitor does not wait for what is computed once."""
    import pyarrow.json
    import pyarrow.parquet  # noqa: F401

    for figure in all_figures().values():
        figure.look()

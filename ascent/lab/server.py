"""The server behind `ascent lab`: the routes, scripts and styles of every page and figure, behind one guard."""

import os
import signal
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from ascent.core.errors import ConfigError
from ascent.lab import modules_in, places_of
from ascent.lab.figures import all_figures
from ascent.lab.page_base import Lab
from ascent.server.connections import Connection, bind, configure, is_local
from ascent.server.guard import REDIRECT_PAGE, Guard, host_name, host_names
from ascent.server.lab_secret import load_secret

STATIC = Path(__file__).parent / "static"
SERVED = {".js", ".mjs", ".css", ".svg", ".woff2"}
"""Endings of the files that a browser may fetch: not Python, nor data."""
MOMENT = 0.5
"""Seconds after which a browser is opened."""


def serve_lab(runs: Path, host: str, port: int, open_browser: bool) -> int:
    """Listen until Ctrl-C."""
    torch.set_num_threads(1)  # figures are small, and trainings want the other cores
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--runs {runs}: cannot write there ({error.strerror}). Choose a folder of yours") from None
    secret, unkept = load_secret(runs)
    server, listening, guard = lab_server(runs.resolve(), host, port, secret)
    print(f"The lab is at {guard.address}\nCtrl-C closes it. Trainings continue.", flush=True)
    if not is_local(host):
        print(f"It listens on {host}, to other machines too, without encryption: they need the token.", flush=True)
    if unkept:
        print(f"An open page will not survive a restart, for its secret cannot be kept: {unkept}", flush=True)
    threading.Thread(target=_warm, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # uvicorn hands it on when it has ended
    with browser_opened(guard, runs.resolve() if open_browser else None):
        server.run(sockets=[listening])
    return 0


def lab_server(runs: Path, host: str, port: int, secret: bytes) -> tuple[uvicorn.Server, socket.socket, Guard]:
    """The guarded lab over a folder of runs: its server, the socket that it listens on, the guard with its address."""
    listening = bind(host, port)
    port = listening.getsockname()[1]
    guard = Guard(application(runs), host_names(host, port), secret, f"http://{host_name(host)}:{port}")
    return uvicorn.Server(configure(guard, Connection)), listening, guard


@contextmanager
def browser_opened(guard: Guard, folder: Path | None) -> Iterator[None]:
    """Open a browser, if there is a folder for the page that leads it; print another address after each exchange.

    Every user of the machine sees the arguments of a process. So the browser is given a file with the address, for
    its owner alone, which is gone after the exchange. A browser in a box of its own (snap) may read it in the
    folder of runs, though not among the temporary files.
    """
    page = None if folder is None else private_page(guard.address, folder)

    def exchanged() -> None:
        if page is not None:
            page.unlink(missing_ok=True)
        with suppress(OSError):  # nobody reads it
            print(f"A browser has opened the lab. For another one: {guard.address}", flush=True)

    guard.opened = exchanged
    if page is not None:
        threading.Timer(MOMENT, webbrowser.open, [page.as_uri()]).start()
    try:
        yield
    finally:
        if page is not None:
            page.unlink(missing_ok=True)


def private_page(address: str, folder: Path) -> Path | None:
    """A file that leads a browser to an address, readable by its owner alone; None where nothing can be written."""
    for place in (folder, None):  # None: the system's own for temporary files
        with suppress(OSError):
            handle, name = tempfile.mkstemp(suffix=".html", prefix=".open-", dir=place)
            with open(handle, "w") as file:
                file.write(REDIRECT_PAGE.format(to=address))
            return Path(name)
    return None


def _warm() -> None:
    """Look at every figure once, so that the first visitor does not wait for what is computed once."""
    import pyarrow.json
    import pyarrow.parquet  # noqa: F401

    for figure in all_figures().values():
        figure.look()


class Assets(StaticFiles):
    """The scripts and styles in some folders, and nothing else that lies there."""

    def __init__(self, folders: list[Path]):
        super().__init__(directory=folders[0])
        self.all_directories = list(folders)

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        return super().lookup_path(path) if Path(path).suffix in SERVED else ("", None)


def application(runs: Path) -> Starlette:
    """The lab over one folder of runs, without its guard."""
    lab = Lab(runs)
    modules = [*modules_in("ascent.lab.pages", "page"), *modules_in("ascent.lab.figures", "routes")]
    routes = [
        *(route for module in modules for route in module.routes(lab)),
        *(Mount(f"/static/{kind}", Assets(places_of(kind))) for kind in ("figures", "pages")),
        Mount("/static", Assets([STATIC])),
    ]
    return Starlette(routes=routes, exception_handlers={ConfigError: _refused, 404: _missing, 405: _missing})


async def _refused(request: Request, error: Exception) -> Response:
    wants_page = not request.url.path.removeprefix(request.scope["root_path"]).startswith("/api/")
    return PlainTextResponse(f"{error}\n", 404) if wants_page else JSONResponse({"error": str(error)}, 400)


async def _missing(_: Request, error: Exception) -> Response:
    return PlainTextResponse("Not found.\n", getattr(error, "status_code", 404))

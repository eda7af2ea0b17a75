"""The web server of `ascent lab`: routes, scripts and styles of all pages and figures, behind the access guard."""

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
from ascent.lab import folders_of, modules_in
from ascent.lab.figures import all_figures
from ascent.lab.page_base import Lab
from ascent.server.connections import Connection, bind, configure, is_local
from ascent.server.guard import REDIRECT_PAGE, Guard, host_name, host_names
from ascent.server.lab_secret import load_secret

STATIC = Path(__file__).parent / "static"
STATIC_SUFFIXES = {".js", ".mjs", ".css", ".svg", ".woff2"}
"""Suffixes of the files that are served: no Python and no data."""
BROWSER_DELAY_SECONDS = 0.5
"""Seconds after the start at which a browser is opened."""


def serve_lab(runs: Path, host: str, port: int, open_browser: bool) -> int:
    """Serve the lab until Ctrl-C."""
    torch.set_num_threads(1)  # figures are small; the other cores are for trainings
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--runs {runs}: cannot write there ({error.strerror}). Choose another folder") from None
    secret, secret_error = load_secret(runs)
    server, listening, guard = lab_server(runs.resolve(), host, port, secret)
    print(f"The lab is at {guard.address}\nCtrl-C closes it. Trainings continue.", flush=True)
    if not is_local(host):
        print(f"It listens on {host}: other machines can reach it, unencrypted, with the token.", flush=True)
    if secret_error:
        print(
            f"Open pages will not work after a restart, because the secret cannot be saved: {secret_error}", flush=True
        )
    threading.Thread(target=_compute_figures, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # uvicorn passes it on after its shutdown
    with open_in_browser(guard, runs.resolve() if open_browser else None):
        server.run(sockets=[listening])
    return 0


def lab_server(runs: Path, host: str, port: int, secret: bytes) -> tuple[uvicorn.Server, socket.socket, Guard]:
    """Return the server of a folder of runs, the socket that it listens on, and the guard with its address."""
    listening = bind(host, port)
    port = listening.getsockname()[1]
    guard = Guard(application(runs), host_names(host, port), secret, f"http://{host_name(host)}:{port}")
    return uvicorn.Server(configure(guard, Connection)), listening, guard


@contextmanager
def open_in_browser(guard: Guard, folder: Path | None) -> Iterator[None]:
    """Open a browser if `folder` is set; print a new address each time one was used.

    All users of the machine can read the arguments of a process. So the browser opens a file that redirects to the
    address, which only its owner can read and which is deleted after use. It is in the folder of runs, because a
    sandboxed browser (snap) cannot read temporary files.
    """
    page = None if folder is None else write_redirect_page(guard.address, folder)

    def on_opened() -> None:
        if page is not None:
            page.unlink(missing_ok=True)
        with suppress(OSError):  # the output is closed
            print(f"A browser has opened the lab. For another one: {guard.address}", flush=True)

    guard.opened = on_opened
    if page is not None:
        threading.Timer(BROWSER_DELAY_SECONDS, webbrowser.open, [page.as_uri()]).start()
    try:
        yield
    finally:
        if page is not None:
            page.unlink(missing_ok=True)


def write_redirect_page(address: str, folder: Path) -> Path | None:
    """Write a page that redirects to an address, readable by its owner only; return None if that fails."""
    for parent in (folder, None):  # None: the folder of temporary files
        with suppress(OSError):
            handle, name = tempfile.mkstemp(suffix=".html", prefix=".open-", dir=parent)
            with open(handle, "w") as file:
                file.write(REDIRECT_PAGE.format(to=address))
            return Path(name)
    return None


def _compute_figures() -> None:
    """Compute each figure once, so that cached results are ready for the first visitor."""
    import pyarrow.json
    import pyarrow.parquet  # noqa: F401

    for figure in all_figures().values():
        figure.look()


class Assets(StaticFiles):
    """The scripts and styles in these folders, without their other files."""

    def __init__(self, folders: list[Path]):
        super().__init__(directory=folders[0])
        self.all_directories = list(folders)

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        return super().lookup_path(path) if Path(path).suffix in STATIC_SUFFIXES else ("", None)


def application(runs: Path) -> Starlette:
    """Return the application for a folder of runs, without the guard."""
    lab = Lab(runs)
    modules = [*modules_in("ascent.lab.pages", "page"), *modules_in("ascent.lab.figures", "routes")]
    routes = [
        *(route for module in modules for route in module.routes(lab)),
        *(Mount(f"/static/{kind}", Assets(folders_of(kind))) for kind in ("figures", "pages")),
        Mount("/static", Assets([STATIC])),
    ]
    return Starlette(routes=routes, exception_handlers={ConfigError: _config_error, 404: _not_found, 405: _not_found})


async def _config_error(request: Request, error: Exception) -> Response:
    wants_page = not request.url.path.removeprefix(request.scope["root_path"]).startswith("/api/")
    return PlainTextResponse(f"{error}\n", 404) if wants_page else JSONResponse({"error": str(error)}, 400)


async def _not_found(_: Request, error: Exception) -> Response:
    return PlainTextResponse("Not found.\n", getattr(error, "status_code", 404))

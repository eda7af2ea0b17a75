"""`ascent lab`: its flags, and the server behind it."""

from __future__ import annotations

import importlib.util
import ipaddress
import socket
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ascent.types import Refused

ABOUT = """Lessons and five live figures on policy gradients, in the browser.

  Everything is computed by the library, on this machine. The page is served to
  this machine alone, and only to who has the address that is printed. A
  training that was started there goes on when the lab is closed."""


@dataclass
class LabOptions:
    port: int = 8321
    """Where to listen; 0: any free port."""
    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """The address to listen on. Anything but this machine is without encryption."""
    runs: Path = Path("runs")
    """The folder of runs: trainings are written there, and their batches are shown."""
    open: bool = True
    """Open a browser."""


def main(args: list[str]) -> int:
    options = tyro.cli(LabOptions, prog="ascent lab", description=ABOUT, args=args)
    missing = [name for name in ("starlette", "uvicorn", "markdown_it") if importlib.util.find_spec(name) is None]
    if missing:
        raise Refused(f"the lab needs {' and '.join(missing)}, which is not installed: pip install 'ascent-rl[lab]'")
    if not 0 <= options.port <= 65535:
        raise Refused(f"--port {options.port}: ports go from 0 to 65535; 0 takes a free one")
    return serve(options)


def serve(options: LabOptions) -> int:
    """Listen until Ctrl-C."""
    import torch
    import uvicorn

    from ascent.lab.guard import Guard, called, kept_secret, names, new_token
    from ascent.lab.server import application, warm

    torch.set_num_threads(1)  # figures are small, and trainings want the other cores
    runs = options.runs.resolve()
    try:
        secret = kept_secret(runs / ".lab")
    except OSError as error:
        raise Refused(
            f"--runs {options.runs}: cannot write there ({error.strerror}). Choose a folder of yours"
        ) from None
    listening = bind(options.host, options.port)
    port, token = listening.getsockname()[1], new_token()
    app = Guard(application(runs), names(options.host, port), token, secret)
    address = f"http://{called(options.host)}:{port}/?token={token}"
    print(f"The lab is at {address}\nCtrl-C closes it. Trainings go on.", flush=True)
    if not is_local(options.host):
        print(
            f"It listens on {options.host}, to other machines too, without encryption: they need the token.", flush=True
        )
    threading.Thread(target=warm, daemon=True).start()
    if options.open:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off")
    uvicorn.Server(config).run(sockets=[listening])
    return 0


def is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or why there is none."""
    listening = None
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen()  # who opens the address at once waits a moment, and is not turned away
    except OSError as error:
        if listening is not None:
            listening.close()
        raise Refused(
            f"--host {host} --port {port}: cannot listen there ({error.strerror}). Another lab may have it: choose "
            "another --port, or 0 for a free one"
        ) from None
    return listening

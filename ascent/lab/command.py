"""The server behind `ascent lab`."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from ascent.core.types import Refused

if TYPE_CHECKING:
    import uvicorn


def serve_lab(runs: Path, host: str, port: int, open_browser: bool) -> int:
    """Listen until Ctrl-C."""
    import torch

    from ascent.lab.server import warm

    torch.set_num_threads(1)  # figures are small, and trainings want the other cores
    try:
        server, listening, address = lab_server(runs.resolve(), host, port)
    except OSError as error:
        raise Refused(f"--runs {runs}: cannot write there ({error.strerror}). Choose a folder of yours") from None
    print(f"The lab is at {address}\nCtrl-C closes it. Trainings continue.", flush=True)
    if not is_local(host):
        print(f"It listens on {host}, to other machines too, without encryption: they need the token.", flush=True)
    threading.Thread(target=warm, daemon=True).start()
    if open_browser:
        threading.Timer(0.5, webbrowser.open, [address]).start()
    server.run(sockets=[listening])
    return 0


def lab_server(runs: Path, host: str, port: int) -> tuple[uvicorn.Server, socket.socket, str]:
    """The guarded lab over a folder of runs: its server, the socket that it listens on, its address with the token."""
    import uvicorn

    from ascent.lab.server import application
    from ascent.web.guard import Guard, host_name, host_names, kept_secret

    secret = kept_secret(runs / ".lab")
    listening = bind(host, port)
    port, token = listening.getsockname()[1], secrets.token_urlsafe(24)
    app = Guard(application(runs), host_names(host, port), token, secret)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, lifespan="off")
    return uvicorn.Server(config), listening, f"http://{host_name(host)}:{port}/?token={token}"


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
        listening.listen()  # a browser that comes before the server is ready waits, and is not refused
    except OSError as error:
        if listening is not None:
            listening.close()
        raise Refused(
            f"--host {host} --port {port}: cannot listen there ({error.strerror}). Another lab may have it: choose "
            "another --port, or 0 for a free one"
        ) from None
    return listening

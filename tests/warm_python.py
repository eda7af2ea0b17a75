"""A `python` that has the libraries loaded: what is started with it is a fork of a process that waits for that.

For processes that the library or a benchmark starts by `sys.executable`. The program that they start is small: it hands
its folder, environment, arguments and outputs over, waits, and ends as the fork did. If it is killed, so is the fork.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch

from tests.processes import Forked, as_a_program

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({path!r})
    asked = json.dumps([os.getcwd(), dict(os.environ), sys.argv[1:]]).encode()
    socket.send_fds(server, [len(asked).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(asked)
    status = int(server.recv(16) or -9)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if status != -9 else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`sys` with another `executable`, to be set where something starts processes by it."""
    folder = tmp_path_factory.mktemp("warm")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        listening.listen()
        server = Forked(lambda: serve(listening), folder / "output")
    client = folder / "python"
    client.write_text(CLIENT.format(python=sys.executable, path=str(folder / "socket")))
    client.chmod(0o700)
    yield types.SimpleNamespace(**vars(sys) | {"executable": str(client)})
    server.kill()
    server.wait()


def serve(listening: socket.socket) -> None:
    """A keeper per program, which nobody waits for. One thread each: those of a pool do not survive a fork."""
    torch.set_num_threads(1)
    jaxtyping.config.update("jaxtyping_disable", True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            os._exit(keep(connection))
        connection.close()


def keep(connection: socket.socket) -> int:
    """Fork the program, and tell how it ended; end it if nobody waits for that any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, outputs, _, _ = socket.recv_fds(connection, 4, 3)
    asked = connection.makefile("rb").read(int.from_bytes(size, "big"))
    child = os.fork()
    if child == 0:
        connection.close()
        os._exit(as_a_program(lambda: program(*json.loads(asked)), *outputs))
    for number in outputs:
        os.close(number)
    ended = os.pidfd_open(child)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall(str(status).encode())
    return 0


def program(folder: str, environment: dict[str, str], arguments: list[str]) -> None:
    """`python -m MODULE …` or `python FILE …`."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if arguments[0] == "-m":
        sys.path.insert(0, folder)
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")

"""A server that Ascent starts from an environment of its own, watches, and ends with all that it started."""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ascent.core.errors import ConfigError, RunError
from ascent.inference.remote.engine_adapter import EngineAdapter, ServerConfig
from ascent.inference.remote.server_client import ServerLostError

START = 600.0
"""Seconds that a server may take to start."""
ENDING, CLEARING = 10.0, 2.0
"""Seconds that it has to end by itself, and those that it has started after it."""
SAY = 10.0
"""Seconds between two words about a server that starts."""
LINES = 12
"""Lines of its log in an error."""
WITH_PARENT = (
    "import ctypes, os, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)
"""It is told to end (signal 15) when the process that started it is no more."""


class ServerProcess:
    """One server, in a process group of its own, listening on loopback only."""

    def __init__(self, environment: str, dialect: EngineAdapter, serving: ServerConfig, args: str, folder: Path):
        self.python, self.dialect, self.serving = find_python(environment), dialect, serving
        self.args, self.folder, self.port = shlex.split(args), folder, 0
        self.log = folder / f"{dialect.name}.log"
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it on a free port. Whether it answers is asked of it over HTTP."""
        model = self.folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(self.serving.config, indent=2))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        mine = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
        default, always = self.dialect.environment(self.serving)
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                [self.python, "-c", WITH_PARENT, str(os.getpid()), self.python, *self._arguments(model)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=default | mine | {"HF_HUB_OFFLINE": "1"} | always,
                start_new_session=True,
            )

    def _arguments(self, model: Path) -> list[str]:
        return [*self.dialect.arguments(self.serving, model, self.port), *self.args]

    def wait(self, answers: Callable[[], bool], tell: Callable[[str], None] = lambda _: None) -> None:
        """Until `answers()` is true. RunError with the end of its log where it ends before, or takes too long.

        Lost: somebody has killed it. `tell` hears how long it takes.
        """
        begun = time.monotonic()
        until, told = begun + START, begun - SAY
        while not answers():
            if time.monotonic() - told >= SAY:
                told, passed = time.monotonic(), time.monotonic() - begun
                tell(
                    f"{self.dialect.name} is starting: {passed:.0f} of at most {START:g} seconds. Its log is {self.log}"
                )
            if self.ended == -signal.SIGKILL:
                self.end()
                raise ServerLostError(f"the server of --engine {self.dialect.name} was killed while it started")
            if self.ended is not None or time.monotonic() > until:
                why = f"has not answered within {START:g} seconds" if self.ended is None else f"ended with {self.ended}"
                self.end()
                raise RunError(f"the server of --engine {self.dialect.name} {why}. {self.last_words()}")
            time.sleep(0.2)

    @property
    def running(self) -> bool:
        return self._running is not None and self._running.poll() is None

    @property
    def ended(self) -> int | None:
        """Its exit status; None: it runs."""
        return None if self._running is None else self._running.poll()

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"Its log, {self.log}, ends with:\n" + "\n".join(lines[-LINES:])

    def end(self) -> None:
        """It may end by itself, and those that it has started after it; then what is left of its group is killed."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(running.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    running.wait(ENDING)
                until = time.monotonic() + CLEARING
                while time.monotonic() < until:  # they clear up shared memory
                    os.killpg(running.pid, 0)
                    time.sleep(0.05)
        finally:  # also after a second Ctrl-C
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def find_python(environment: str) -> str:
    """The interpreter of a virtual environment, or the interpreter that was given."""
    given = Path(environment).expanduser().absolute()
    for python in (given / "bin" / "python", given):
        if python.is_file() and os.access(python, os.X_OK):
            return str(python)
    raise ConfigError(
        f"--engine.python {environment}: there is no bin/python in it. Set the folder of the virtual environment that "
        "the engine is installed in (`make engines` makes .engines/vllm)"
    )

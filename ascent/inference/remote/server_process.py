"""A server that Ascent starts from a separate virtual environment, watches, and terminates with its children."""

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

STARTUP_TIMEOUT = 600.0
"""Seconds that a server may take to start."""
TERMINATE_TIMEOUT, CLEANUP_TIMEOUT = 10.0, 2.0
"""Seconds that the server has to end after SIGTERM, and that its children have afterwards, before SIGKILL."""
STATUS_INTERVAL = 10.0
"""Seconds between two status messages while a server starts."""
LOG_TAIL_LINES = 12
"""Lines of the log that an error message quotes."""
LAUNCHER = (
    "import ctypes, os, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)
"""Starts the server with a parent-death signal: it gets SIGTERM (15) when the process that started it ends."""


class ServerProcess:
    """One server, in its own process group, listening on loopback only."""

    def __init__(self, environment: str, adapter: EngineAdapter, config: ServerConfig, args: str, folder: Path):
        self.python, self.adapter, self.config = find_python(environment), adapter, config
        self.args, self.folder, self.port = shlex.split(args), folder, 0
        self.log = folder / f"{adapter.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server on a free port. `wait_until_ready` waits for it."""
        model = self.folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(self.config.model_config, indent=2))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
        defaults, required = self.adapter.server_environment(self.config)
        arguments = [*self.adapter.server_arguments(self.config, model, self.port), *self.args]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [self.python, "-c", LAUNCHER, str(os.getpid()), self.python, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=defaults | inherited | {"HF_HUB_OFFLINE": "1"} | required,
                start_new_session=True,
            )

    def wait_until_ready(self, is_ready: Callable[[], bool], on_status: Callable[[str], None] = lambda _: None) -> None:
        """Wait until `is_ready()` is true.

        RunError, with the end of the log, if the server ends first or takes too long. ServerLostError if it was killed.
        """
        begun = time.monotonic()
        deadline, last_status = begun + STARTUP_TIMEOUT, begun - STATUS_INTERVAL
        while not is_ready():
            now = time.monotonic()
            if now - last_status >= STATUS_INTERVAL:
                last_status = now
                on_status(
                    f"{self.adapter.name} is starting: {now - begun:.0f} of at most {STARTUP_TIMEOUT:g} seconds. "
                    f"Its log is {self.log}"
                )
            exit_code = self.exit_code
            if exit_code == -signal.SIGKILL:
                self.terminate()
                raise ServerLostError(f"the server of --engine {self.adapter.name} was killed while it started")
            if exit_code is not None or now > deadline:
                what = f"has not answered within {STARTUP_TIMEOUT:g} seconds"
                what = what if exit_code is None else f"ended with exit code {exit_code}"
                self.terminate()
                raise RunError(f"the server of --engine {self.adapter.name} {what}. {self.log_tail()}")
            time.sleep(0.2)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit status; None while it runs."""
        return None if self._process is None else self._process.poll()

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"Its log, {self.log}, ends with:\n" + "\n".join(lines[-LOG_TAIL_LINES:])

    def terminate(self) -> None:
        """Send SIGTERM to the process group, wait for it to end, and kill what remains of it."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(TERMINATE_TIMEOUT)
                deadline = time.monotonic() + CLEANUP_TIMEOUT
                while time.monotonic() < deadline:  # children may still have to remove shared memory
                    os.killpg(process.pid, 0)
                    time.sleep(0.05)
        finally:  # also after a second Ctrl-C
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def find_python(environment: str) -> str:
    """Return the interpreter of a virtual environment, or `environment` itself if it is an interpreter."""
    path = Path(environment).expanduser().absolute()
    for python in (path / "bin" / "python", path):
        if python.is_file() and os.access(python, os.X_OK):
            return str(python)
    raise ConfigError(
        f"--engine.python {environment}: it has no bin/python. Set the folder of the virtual environment in which the "
        "engine is installed (`make engines` creates .engines/vllm)"
    )

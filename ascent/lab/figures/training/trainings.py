"""Trainings started on the page, each in a process that outlives the server.

    python -m ascent.lab.figures.training.trainings GATE OUT TASK SETTINGS

Each is an ordinary run, with a gate between steps. OUT is its folder, SETTINGS is JSON, GATE a file:

runs/.lab/<run>/gate     the number of steps that it may do: a large one to play, a smaller one to pause, −1 to stop
runs/.lab/<run>/waiting  exists while the run waits at the gate
runs/.lab/<run>/log      its output
runs/.lab/<run>/process  pid of the shell that waits for it, and its start time if /proc has it
runs/.lab/<run>/exit     its exit code, written by that shell
runs/.lab/lock           held while a training is started
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ascent.api import start
from ascent.build.trained_run import Run
from ascent.core.config import Config
from ascent.core.errors import ConfigError, RunError
from ascent.lab.figures.training.figure import config_of, run_folder, side_settings
from ascent.processes.torch_variables import torch_variables
from ascent.processes.user_state import lock_file
from ascent.runs.display.plots import plot_runs
from ascent.runs.display.terminal import LineDisplay
from ascent.runs.run_folder import write_json
from ascent.runs.run_info import run_label
from ascent.runs.untrusted_files import is_metrics_line, open_regular, parse_json, read_regular
from ascent.settings import configure

MAX_TRAININGS = 4
"""Maximum number of concurrent trainings."""
MAX_LOG_LINES = 6
TAIL_BYTES = 1 << 14
"""Bytes at the end of metrics.jsonl that contain its last line."""
WAIT_SCRIPT = '"$@" >"$ASCENT_LAB_KEPT/log" 2>&1 </dev/null; echo $? >"$ASCENT_LAB_KEPT/exit"'
ENDED = ("finished", "interrupted", "failed", "died")
POLL_SECONDS = 0.02
"""Seconds between two reads of a closed gate."""
MAX_PAUSE_SECONDS = 3600.0
"""Seconds at a closed gate after which a run is saved and ends."""


class Trainings:
    """Starts, gates and describes the trainings in a folder of runs. All state is on disk."""

    def __init__(self, runs: Path):
        self.runs = runs
        self._children: list[subprocess.Popen] = []

    def control_folder(self, run: str) -> Path:
        """Return the folder of a training's gate and log. Links (in a copied folder of runs) are refused."""
        kept = self.runs / ".lab" / run_folder(self.runs, run).name
        for folder in (kept.parent, kept):
            if folder.is_symlink():
                raise ConfigError(f"{folder} is a link, which could lead out of the folder of runs: remove it")
        return kept

    def start(self, state: dict[str, Any], side: str, steps: int) -> str:
        """Start a run with the settings of a side, which may do `steps` steps for now; return its name."""
        config = config_of(state, side)  # raises an error before a process is started
        try:
            with self._one_at_a_time():
                return self._start(config, *side_settings(state, side), side, steps)
        except OSError as error:
            raise ConfigError(f"{self.runs}: cannot write trainings there ({error.strerror or error})") from None

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Hold the lock under which trainings are counted and started, also by another lab in this folder."""
        folder = self.control_folder("lock").parent
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(folder / "lock", flags, 0o600)) as lock:
            lock_file(lock)
            yield

    def _start(self, config: Config, task: str, settings: dict[str, Any], side: str, steps: int) -> str:
        alive = []
        for gate in (self.runs / ".lab").glob("*/gate"):
            with suppress(ConfigError):  # not a training
                alive += [gate] if self.status(gate.parent.name)["status"] not in ENDED else []
        if len(alive) >= MAX_TRAININGS:
            raise ConfigError(f"{len(alive)} trainings are running, the maximum: wait, or reset one of them")
        label = re.sub(r"[^A-Za-z0-9._+-]+", "-", run_label(config))[:40]
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{task}-{label}-s{config.seed}-{side}"
        names = itertools.chain([stem], (f"{stem}-{count}" for count in itertools.count(2)))
        name = next(n for n in names if not (self.control_folder(n).exists() or (self.runs / n).exists()))
        kept = self.control_folder(name)
        kept.mkdir(parents=True)
        write_json(kept / "gate", steps)
        trainer = [sys.executable, "-m", __name__]
        call = [*trainer, str(kept / "gate"), str(self.runs / name), task, json.dumps(settings)]
        environment = torch_variables() | os.environ | {"ASCENT_LAB_KEPT": str(kept), "PYTHONUNBUFFERED": "1"}
        self._children = [child for child in self._children if child.poll() is None]
        shell = subprocess.Popen(["sh", "-c", WAIT_SCRIPT, "sh", *call], start_new_session=True, env=environment)
        self._children.append(shell)
        (kept / "process").write_text(f"{shell.pid} {_process_start_time(shell.pid)}")
        return name

    def command(self, run: str, command: str) -> dict[str, Any]:
        """Do play, pause, step or stop; return the status after it."""
        gate = self.control_folder(run) / "gate"
        done = self.status(run)["step"]
        allowed = {"play": sys.maxsize, "pause": done, "step": done + 1, "stop": -1}
        if command not in allowed:
            raise ConfigError(f"{command[:20]}: there are {', '.join(allowed)}")
        if not gate.exists():
            raise ConfigError(f"{run}: this run was not started on this page, so {command} does not apply")
        write_json(gate, allowed[command])
        return self.status(run)

    def status(self, run: str) -> dict[str, Any]:
        """Return the status of a run from its files: steps done, paused or not, and the end of its log if it died."""
        folder, kept = run_folder(self.runs, run), self.control_folder(run)
        for child in self._children:
            child.poll()  # reap it: a zombie would still have its pid
        alive = _alive(kept / "process")  # before reading the exit code, which exists once the shell is gone
        code = read_int(kept / "exit")
        steps = 0
        try:
            begun = Run(folder)
            status, steps = begun.status, begun.info.get("steps", 0)
        except ConfigError:  # not started, or refused before its start
            status = "failed" if code is not None or not kept.exists() else "starting" if alive else "died"
        if status == "died" and alive and code is None:
            status = "running"  # until its shell has written the exit code
        step = steps_done(folder / "metrics.jsonl")
        about: dict[str, Any] = {"run": run, "status": status, "exit": code, "step": step, "steps": steps}
        about["paused"] = status == "running" and (kept / "waiting").exists()
        about["pausing"] = status == "running" and step >= read_gate(kept / "gate") and not about["paused"]
        about["words"] = _words(about)
        if status in ("failed", "died"):
            about["last_lines"] = _read(kept / "log").decode(errors="replace").splitlines()[-MAX_LOG_LINES:]
        return about


def _read(path: Path) -> bytes:
    """Return the contents of a file; empty if it is missing or not a regular file."""
    try:
        return read_regular(path)
    except OSError:
        return b""


def steps_done(path: Path) -> int:
    """Return the number of steps in metrics.jsonl from its last complete line."""
    with suppress(OSError), open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for text in reversed(file.read(TAIL_BYTES).split(b"\n")[:-1]):
            with suppress(ValueError):
                if is_metrics_line(line := parse_json(text)):
                    return line["step"] + 1
    return 0


def _words(about: dict[str, Any]) -> str:
    status, step, steps, code = (about[key] for key in ("status", "step", "steps", "exit"))
    if status == "starting":
        return "starting: a process is loading the library"
    if status == "running":
        now = "paused after" if about["paused"] else "pausing after" if about["pausing"] else "training,"
        return f"{now} step {step} of {steps}"
    if status == "finished":
        return f"finished, {steps} steps"
    if status == "interrupted":
        return f"stopped and saved after step {step} of {steps}"
    ended = "no exit code" if code is None else f"exit code {code}"
    killed = f", killed by signal {code - 128}" if code is not None and code > 128 else ""
    return f"{status} after step {step} ({ended}{killed})"


def _alive(path: Path) -> bool:
    """Return whether the recorded process is alive, and its pid was not reused."""
    try:
        pid, _, began = _read(path).decode().partition(" ")
        return _process_start_time(int(pid)) == began
    except (OverflowError, ValueError):
        return False


def _process_start_time(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot; empty without /proc; None if it is gone."""
    try:
        if not Path("/proc/self/stat").exists():
            os.kill(pid, 0)
            return ""
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # from the third field on: the second, a name, may contain anything
    return None if fields[0] in "ZX" else fields[19]


# ---- the process of a training --------------------------------------------------------------------------


class GatedDisplay(LineDisplay):
    """A display that makes the run wait after a step while the gate is closed."""

    def __init__(self, gate: Path):
        self.gate = gate

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        super().step(step, metrics)
        began, waiting = time.monotonic(), self.gate.with_name("waiting")
        while step + 1 < self.total:
            allowed = read_gate(self.gate)
            if allowed < 0 or time.monotonic() - began > MAX_PAUSE_SECONDS:
                os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: the step is saved, and the run can be resumed
                break
            if step + 1 < allowed:
                break
            if not waiting.exists():
                waiting.touch()  # the page says "paused" only when the run really waits
            time.sleep(POLL_SECONDS)
        waiting.unlink(missing_ok=True)


def read_int(path: Path) -> int | None:
    """Return the number in a file that another process writes; None if there is none yet."""
    try:
        return int(_read(path))
    except ValueError:
        return None


def read_gate(path: Path) -> int:
    """Return the number of steps that may be done; all of them without a gate."""
    steps = read_int(path)
    return sys.maxsize if steps is None else steps


def train_gated(gate: str, out: str, task: str, settings: str) -> int:
    """Train, and return the exit status of `ascent train`: 0 finished, 1 failed, 2 invalid input, 130 interrupted."""
    try:
        run = start(configure(task, json.loads(settings)), out, GatedDisplay(Path(gate)))
    except (ConfigError, RunError, OSError) as error:
        print(f"ascent: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    if run.status != "finished":
        return 130
    title = f"{run.info['task']}, {run.info['label']}, seed {run.info['seed']}"
    plot_runs([(run.folder.name, run.metrics, run.max_reward)], run.folder / "plot.png", title)
    return 0


if __name__ == "__main__":
    sys.exit(train_gated(*sys.argv[1:]))

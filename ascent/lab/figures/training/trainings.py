"""Trainings that the page has asked for: each a process of its own, which outlives the server.

    python -m ascent.lab.figures.training.trainings GATE OUT TASK SETTINGS

It is a run as `ascent train` makes it, with a gate between steps. OUT is its folder, SETTINGS is JSON, GATE a file:

runs/.lab/<run>/gate     how many steps it may do: a large number is play, a smaller one pause, −1 stop
runs/.lab/<run>/waiting  is there while it stands before the gate
runs/.lab/<run>/log      what it prints
runs/.lab/<run>/process  the shell that waits for it: its pid and, where /proc tells, when that began
runs/.lab/<run>/exit     its exit code, written by the shell that waits for it, whoever killed it
runs/.lab/lock           is held while one is started
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
from ascent.runs.display.terminal import Lines
from ascent.runs.run_folder import write_json
from ascent.runs.run_info import run_label
from ascent.runs.untrusted_files import is_metrics_line, open_regular, parse_json, read_regular
from ascent.settings import configure

MOST = 4
"""Trainings at a time: more would only slow one another down."""
LAST_LINES = 6
TAIL = 1 << 14
"""Bytes at the end of metrics.jsonl that hold its last line."""
WAIT = '"$@" >"$ASCENT_LAB_KEPT/log" 2>&1 </dev/null; echo $? >"$ASCENT_LAB_KEPT/exit"'
ENDED = ("finished", "interrupted", "failed", "died")
POLL = 0.02
"""Seconds between two looks at a shut gate."""
PATIENCE = 3600.0
"""Seconds at a shut gate after which a run saves itself and ends: nobody is coming back."""


class Trainings:
    """Starts, gates and describes the trainings of one runs folder. It remembers nothing that is not on disk."""

    def __init__(self, runs: Path):
        self.runs = runs
        self._children: list[subprocess.Popen] = []

    def kept(self, run: str) -> Path:
        """Where a training's gate and log are. It lies in the folder of runs: links that came with it are refused."""
        kept = self.runs / ".lab" / run_folder(self.runs, run).name
        for folder in (kept.parent, kept):
            if folder.is_symlink():
                raise ConfigError(f"{folder} is a link, which could lead out of the folder of runs: remove it")
        return kept

    def start(self, state: dict[str, Any], side: str, steps: int) -> str:
        """A new run with the settings of a side, which may do `steps` steps for now. Returns its name."""
        config = config_of(state, side)  # refused here, before a process is started
        try:
            with self._one_at_a_time():
                return self._start(config, *side_settings(state, side), side, steps)
        except OSError as error:
            raise ConfigError(f"{self.runs}: no training can be kept there ({error.strerror or error})") from None

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Whoever starts a training, here or in another lab over this folder, has counted those that are running."""
        folder = self.kept("lock").parent
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(folder / "lock", flags, 0o600)) as lock:
            lock_file(lock)
            yield

    def _start(self, config: Config, task: str, settings: dict[str, Any], side: str, steps: int) -> str:
        alive = []
        for gate in (self.runs / ".lab").glob("*/gate"):
            with suppress(ConfigError):  # what is not ours counts for nothing
                alive += [gate] if self.status(gate.parent.name)["status"] not in ENDED else []
        if len(alive) >= MOST:
            raise ConfigError(f"{len(alive)} trainings are running, and {MOST} is the most: wait, or reset one of them")
        label = re.sub(r"[^A-Za-z0-9._+-]+", "-", run_label(config))[:40]
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{task}-{label}-s{config.seed}-{side}"
        names = itertools.chain([stem], (f"{stem}-{count}" for count in itertools.count(2)))
        name = next(n for n in names if not (self.kept(n).exists() or (self.runs / n).exists()))
        kept = self.kept(name)
        kept.mkdir(parents=True)
        write_json(kept / "gate", steps)
        trainer = [sys.executable, "-m", __name__]
        call = [*trainer, str(kept / "gate"), str(self.runs / name), task, json.dumps(settings)]
        environment = torch_variables() | os.environ | {"ASCENT_LAB_KEPT": str(kept), "PYTHONUNBUFFERED": "1"}
        self._children = [child for child in self._children if child.poll() is None]
        shell = subprocess.Popen(["sh", "-c", WAIT, "sh", *call], start_new_session=True, env=environment)
        self._children.append(shell)
        (kept / "process").write_text(f"{shell.pid} {_began(shell.pid)}")
        return name

    def command(self, run: str, command: str) -> dict[str, Any]:
        """play, pause, step or stop, and the status after it."""
        gate = self.kept(run) / "gate"
        done = self.status(run)["step"]
        allowed = {"play": sys.maxsize, "pause": done, "step": done + 1, "stop": -1}
        if command not in allowed:
            raise ConfigError(f"{command[:20]}: there are {', '.join(allowed)}")
        if not gate.exists():
            raise ConfigError(f"{run}: {command} is not for this run; it was not started from this page")
        write_json(gate, allowed[command])
        return self.status(run)

    def status(self, run: str) -> dict[str, Any]:
        """Where a run stands, from its files: status, steps done, paused or not; of a dead one its last words."""
        folder, kept = run_folder(self.runs, run), self.kept(run)
        for child in self._children:
            child.poll()  # a child that nobody waited for would still have its pid
        alive = _alive(kept / "process")  # before the exit code, which is there when the shell is gone
        code = read_number(kept / "exit")
        steps = 0
        try:
            begun = Run(folder)
            status, steps = begun.status, begun.info.get("steps", 0)
        except ConfigError:  # not begun, or refused before it began
            status = "failed" if code is not None or not kept.exists() else "starting" if alive else "died"
        if status == "died" and alive and code is None:
            status = "running"  # for the moment until its shell has written down how it ended
        step = steps_done(folder / "metrics.jsonl")
        about: dict[str, Any] = {"run": run, "status": status, "exit": code, "step": step, "steps": steps}
        about["paused"] = status == "running" and (kept / "waiting").exists()
        about["pausing"] = status == "running" and step >= read_gate(kept / "gate") and not about["paused"]
        about["words"] = _words(about)
        if status in ("failed", "died"):
            about["last_lines"] = _read(kept / "log").decode(errors="replace").splitlines()[-LAST_LINES:]
        return about


def _read(path: Path) -> bytes:
    """What a file holds; nothing if there is none, or it is no file."""
    try:
        return read_regular(path)
    except OSError:
        return b""


def steps_done(path: Path) -> int:
    """The steps in metrics.jsonl by its last whole line, whatever its length: it is looked at again and again."""
    with suppress(OSError), open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        for text in reversed(file.read(TAIL).split(b"\n")[:-1]):
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
    ended = "no exit code was left" if code is None else f"exit code {code}"
    killed = f", killed by signal {code - 128}" if code is not None and code > 128 else ""
    return f"{status} after step {step} ({ended}{killed})"


def _alive(path: Path) -> bool:
    """Is the process that was noted down still there, and not another one with its pid?"""
    try:
        pid, _, began = _read(path).decode().partition(" ")
        return _began(int(pid)) == began
    except (OverflowError, ValueError):
        return False


def _began(pid: int) -> str | None:
    """When a process began, in ticks since the boot; empty where there is no /proc; None if it is gone."""
    try:
        if not Path("/proc/self/stat").exists():
            os.kill(pid, 0)
            return ""
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # from the third on: the second, a name, may hold anything
    return None if fields[0] in "ZX" else fields[19]


# ---- the process of a training --------------------------------------------------------------------------


class Gated(Lines):
    """A display that keeps the run waiting after a step while the gate is shut."""

    def __init__(self, gate: Path):
        self.gate = gate

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        super().step(step, metrics)
        began, waiting = time.monotonic(), self.gate.with_name("waiting")
        while step + 1 < self.total:
            allowed = read_gate(self.gate)
            if allowed < 0 or time.monotonic() - began > PATIENCE:
                os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: the step is saved, and the run can be resumed
                break
            if step + 1 < allowed:
                break
            if not waiting.exists():
                waiting.touch()  # the page says "paused" only when the run really waits
            time.sleep(POLL)
        waiting.unlink(missing_ok=True)


def read_number(path: Path) -> int | None:
    """The number in a file that another process writes; None as long as there is none."""
    try:
        return int(_read(path))
    except ValueError:
        return None


def read_gate(path: Path) -> int:
    """How many steps may be done; with no gate, all of them."""
    steps = read_number(path)
    return sys.maxsize if steps is None else steps


def train_gated(gate: str, out: str, task: str, settings: str) -> int:
    """Exit status as that of `ascent train`: 0 finished, 1 stopped by trouble, 2 refused, 130 interrupted."""
    try:
        run = start(configure(task, json.loads(settings)), out, Gated(Path(gate)))
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

"""Trainings that the page has asked for: each a process of its own, which outlives the server.

runs/.lab/<run>/gate     how many steps it may do
runs/.lab/<run>/waiting  is there while it stands before the gate
runs/.lab/<run>/log      what it prints
runs/.lab/<run>/process  the shell that waits for it: its pid and, where /proc tells, when that began
runs/.lab/<run>/exit     its exit code, written by the shell that waits for it, whoever killed it
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ascent.core.types import Refused
from ascent.lab.figures.training.sides import config_of, side_settings
from ascent.lab.figures.training.stream import ENDED, run_folder
from ascent.lab.figures.training.trainer import read_gate, write_gate
from ascent.records import Run
from ascent.records.naming import run_label

MOST = 4
"""Trainings at a time: more would only slow one another down."""
LAST_LINES = 6
WAIT = '"$@" >"$ASCENT_LAB_KEPT/log" 2>&1 </dev/null; echo $? >"$ASCENT_LAB_KEPT/exit"'
COMMANDS = ("play", "pause", "step", "stop")


class Trainings:
    """Starts, gates and describes the trainings of one runs folder. It remembers nothing that is not on disk."""

    def __init__(self, runs: Path):
        self.runs = runs
        self._children: list[subprocess.Popen] = []

    def kept(self, run: str) -> Path:
        return self.runs / ".lab" / run_folder(self.runs, run).name

    def start(self, state: dict[str, Any], side: str, steps: int) -> str:
        """A new run with the settings of a side, which may do `steps` steps for now. Returns its name."""
        config = config_of(state, side)  # refused here, before a process is started
        alive = [run for run in self._known() if self.status(run)["status"] not in ENDED]
        if len(alive) >= MOST:
            raise Refused(f"{len(alive)} trainings are running, and {MOST} is the most: wait, or reset one of them")
        task, settings = side_settings(state, side)
        label = re.sub(r"[^A-Za-z0-9._+-]+", "-", run_label(config))[:40]
        name = self._free(f"{time.strftime('%Y%m%d-%H%M%S')}-{task}-{label}-s{config.seed}-{side}")
        kept = self.kept(name)
        kept.mkdir(parents=True)
        write_gate(kept / "gate", steps)
        trainer = [sys.executable, "-m", "ascent.lab.figures.training.trainer"]
        call = [*trainer, str(kept / "gate"), str(self.runs / name), task, json.dumps(settings)]
        environment = os.environ | {"ASCENT_LAB_KEPT": str(kept), "PYTHONUNBUFFERED": "1"}
        self._children = [child for child in self._children if child.poll() is None]
        shell = subprocess.Popen(["sh", "-c", WAIT, "sh", *call], start_new_session=True, env=environment)
        self._children.append(shell)
        (kept / "process").write_text(f"{shell.pid} {_began(shell.pid)}")
        return name

    def _free(self, name: str) -> str:
        taken, count = name, 1
        while self.kept(taken).exists() or (self.runs / taken).exists():
            count += 1
            taken = f"{name}-{count}"
        return taken

    def _known(self) -> list[str]:
        return [path.parent.name for path in (self.runs / ".lab").glob("*/gate")]

    def command(self, run: str, command: str) -> dict[str, Any]:
        """play, pause, step or stop, and the status after it."""
        kept = self.kept(run)
        if command not in COMMANDS or not (kept / "gate").exists():
            raise Refused(f"{run}: {command} is not for this run; it was not started from this page")
        done = self.status(run)["step"]
        allowed = {"play": sys.maxsize, "pause": done, "step": done + 1, "stop": -1}[command]
        write_gate(kept / "gate", allowed)
        return self.status(run)

    def status(self, run: str) -> dict[str, Any]:
        """Where a run stands, from its files: status, steps done, paused or not; of a dead one its last words."""
        folder, kept = run_folder(self.runs, run), self.kept(run)
        for child in self._children:
            child.poll()  # a child that nobody waited for would still have its pid
        alive = _alive(kept / "process")  # before the exit code, which is there when the shell is gone
        code = _number(kept / "exit")
        try:
            found = Run(folder)
            status = found.status
        except Refused:  # not begun, or refused before it began
            status = "failed" if code is not None or not kept.exists() else "starting" if alive else "died"
        if status == "died" and alive and code is None:
            status = "running"  # for the moment until its shell has written down how it ended
        about: dict[str, Any] = {"run": run, "status": status, "exit": code, "step": _steps(folder)}
        about["steps"] = Run(folder).info["steps"] if (folder / "run.json").exists() else 0
        about["paused"] = status == "running" and (kept / "waiting").exists()
        about["pausing"] = status == "running" and about["step"] >= read_gate(kept / "gate") and not about["paused"]
        about["words"] = _words(about)
        if status in ("failed", "died"):
            about["last_lines"] = _tail(kept / "log")
        return about


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


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _alive(path: Path) -> bool:
    """Is the process that was noted down still there, and not another one with its pid?"""
    try:
        pid, _, began = path.read_text().partition(" ")
        return _began(int(pid)) == began
    except (FileNotFoundError, ValueError):
        return False


def _began(pid: int) -> str | None:
    """When a process began, in ticks since the boot; empty where there is no /proc; None if it is gone."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except OSError:
            return None
        return ""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # from the third on: the second, a name, may hold anything
    return None if fields[0] in "ZX" else fields[19]


def _steps(folder: Path) -> int:
    """Whole lines of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _tail(path: Path) -> list[str]:
    if not path.exists():
        return []
    return path.read_text(errors="replace").splitlines()[-LAST_LINES:]

"""A terminal that is closed: the run is saved and resumes; with nohup it goes on."""

from __future__ import annotations

import os
import pty
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import ascent
from ascent.cli.main import main
from tests.browser import PATIENCE
from tests.test_resume import bits, differing

SETTINGS = ["--length", "3", "--numbers", "4", "--policy.width", "8", "--policy.layers", "1", "--policy.heads", "2"]
SETTINGS += ["--prompts", "3", "--samples", "2", "--threads", "1", "--checkpoint-every", "100", "--eval-prompts", "3"]


def in_a_terminal(args: list[str], before: Callable[[], object]) -> tuple[int, int]:
    """`ascent` in a fork of this process that has a terminal of its own: its pid, and our end of the terminal."""
    child, terminal = pty.fork()
    if child == 0:
        status = 70
        try:
            before()
            status = main(args)
        finally:
            os._exit(status)
    return child, terminal


def exit_status(child: int) -> int:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("it did not end")


def close_after(terminal: int, run: Path, steps: int) -> None:
    """Close the terminal once the run has made these steps."""
    end = time.monotonic() + PATIENCE
    os.set_blocking(terminal, False)
    while time.monotonic() < end:
        with suppress(BlockingIOError):
            os.read(terminal, 1 << 16)  # or the run would wait for us to read
        metrics = run / "metrics.jsonl"
        if metrics.exists() and metrics.read_text().count("\n") >= steps:
            return os.close(terminal)
        time.sleep(0.005)
    raise AssertionError("the run makes no steps")


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_is_saved_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    steps = ["--steps", "150"]
    run = tmp_path / "run"
    child, terminal = in_a_terminal(["train", "sort", *SETTINGS, *steps, "--out", str(run)], lambda: None)
    close_after(terminal, run, 3)
    assert exit_status(child) == 130
    left = ascent.Run(run)
    assert left.status == "interrupted" and left.checkpoints and len(left.metrics) < 150
    assert main(["train", "sort", *SETTINGS, *steps, "--out", str(tmp_path / "whole")]) == 0
    assert main(["resume", str(run)]) == 0
    assert not differing(run, bits(tmp_path / "whole"))


@pytest.mark.slow
def test_nohup_keeps_a_run_going(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for file in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), file)

    args = ["train", "sort", *SETTINGS, "--steps", "60", "--out", str(tmp_path / "run")]
    child, terminal = in_a_terminal(args, nohup)
    close_after(terminal, tmp_path / "run", 2)
    assert exit_status(child) == 0 and ascent.Run(tmp_path / "run").status == "finished"

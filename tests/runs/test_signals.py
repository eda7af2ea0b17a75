"""A closed terminal or SIGTERM saves the run, which can be resumed; under nohup it continues."""

from __future__ import annotations

import os
import pty
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ascent
from ascent.api import interruptible, start
from ascent.cli.main import main
from ascent.runs import checkpoint
from ascent.runs.display.terminal import Display
from ascent.runs.run_writer import RunWriter
from ascent.settings import configure
from ascent.workflows import rounds
from tests.browser import PATIENCE
from tests.processes import ascent_process
from tests.runs.test_resume import bits, differing

SETTINGS = ["--length", "3", "--numbers", "4", "--policy.width", "8", "--policy.layers", "1", "--policy.heads", "2"]
SETTINGS += ["--prompts", "3", "--samples", "2", "--threads", "1", "--checkpoint-every", "100", "--eval-prompts", "3"]


def in_a_terminal(args: list[str], before: Callable[[], object]) -> tuple[int, int]:
    """Run `ascent` in a fork with a pseudo-terminal; return its pid and the master end of the terminal."""
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
    """Close the terminal after a number of steps."""
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
def test_run_whose_terminal_is_closed_is_saved_and_resumes_bitwise(tmp_path: Path) -> None:
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


# ---- SIGTERM and SIGHUP outside of the steps of a run ----------------------------------------------------------------

ENDS = [signal.SIGTERM, signal.SIGHUP]


def signals_itself(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that the process receives a signal before the call."""

    def call(*args: Any, **more: Any) -> Any:
        os.kill(os.getpid(), number)
        return function(*args, **more)

    return call


@pytest.mark.parametrize("number", ENDS)
def test_rounds_that_are_stopped_between_two_runs_say_how_to_continue(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["rounds", "sort", "--rounds", "1", "--pairs", "12", *SETTINGS, "--steps", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(rounds, "sample_pairs", signals_itself(number, rounds.sample_pairs))
        stopped = ascent_process(tmp_path / "output", *command, "--out", tmp_path / "out")
    assert stopped.wait() == 130
    assert f"To continue: ascent rounds {tmp_path / 'out'}" in stopped.stderr and "Traceback" not in stopped.stderr


@pytest.mark.parametrize("number", ENDS)
def test_a_run_that_is_stopped_while_its_last_checkpoint_is_written_is_finished(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "wait_for_checkpoint", signals_itself(number, RunWriter.wait_for_checkpoint))
        process = ascent_process(
            tmp_path / "output", "train", "sort", *SETTINGS, "--steps", 2, "--out", tmp_path / "run"
        )
    assert process.wait() == 0, process.stderr
    assert ascent.Run(tmp_path / "run").status == "finished"


def test_a_second_interrupt_stops_at_once_and_says_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = RunWriter.step

    def interrupted(self: Any, number: int, *more: Any) -> None:
        if number == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        step(self, number, *more)

    monkeypatch.setattr(RunWriter, "step", interrupted)
    run = tmp_path / "run"
    assert main(["train", "sort", *SETTINGS, "--steps", "3", "--out", str(run)]) == 130
    assert f"stopped at once. Resume it with: ascent resume {run}" in capsys.readouterr().err
    assert ascent.load(run).status == "interrupted" and len(ascent.load(run).metrics) == 1, "the step was not finished"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_closed_terminal_is_replaced_by_dev_null(number: int) -> None:
    """SIGHUP replaces stdout with /dev/null if it is a terminal, and keeps it if it is a file."""
    work, (ours, terminal), before = SimpleNamespace(stop=False), pty.openpty(), os.dup(1)
    error = os.fstat(2)
    os.dup2(terminal, 1)
    try:
        with interruptible(work):
            os.kill(os.getpid(), number)
            silenced = os.fstat(1).st_rdev == os.stat(os.devnull).st_rdev
            assert work.stop and os.path.samestat(os.fstat(2), error)
            with pytest.raises(KeyboardInterrupt, match=signal.Signals(number).name):
                os.kill(os.getpid(), number)
            with pytest.raises(KeyboardInterrupt) as second:
                os.kill(os.getpid(), signal.SIGINT)
            assert second.value.args == ()
    finally:
        os.dup2(before, 1)
        for file in (ours, terminal, before):
            os.close(file)
    assert silenced == (number == signal.SIGHUP)


def test_a_note_about_threads_is_shown_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Heard(Display):
        def show_message(self, text: str) -> None:
            said.append((text, (tmp_path / "run").exists()))

    said: list[tuple[str, bool]] = []
    monkeypatch.setattr("ascent.api.choose_num_threads", lambda: (1, "others compute here"))
    config = configure("lecture", {"steps": 1})
    assert start(config, tmp_path / "run", Heard()).config.threads == 1
    assert said[0] == ("others compute here", False)


@pytest.mark.parametrize("number", ENDS)
def test_a_resume_that_is_stopped_while_it_loads_says_how_to_resume(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ascent.steps("sort", length=3, numbers=4, steps=3, threads=1, out=tmp_path / "run"):
        step.stop()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "load_checkpoint", signals_itself(number, checkpoint.load_checkpoint))
        stopped = ascent_process(tmp_path / "output", "resume", tmp_path / "run")
    assert stopped.wait() == 130 and f"ascent resume {tmp_path / 'run'}" in stopped.stderr
    assert main(["resume", str(tmp_path / "run")]) == 0 and ascent.Run(tmp_path / "run").status == "finished"

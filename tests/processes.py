"""`python -m ascent` in a fork of this process: a process of its own that need not load the library first."""

from __future__ import annotations

import gc
import io
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from ascent.runs.run_writer import RunWriter


def as_a_program(program: Callable[[], Any], *files: int) -> int:
    """Run it in this process, a fork, as Python runs one in a session of its own, with these files as 0, 1 and 2."""
    gc.freeze()  # what the other process made ends there: its threads, for which its end may wait, are not here
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.stdin = io.TextIOWrapper(os.fdopen(0, "rb", closefd=False))
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), write_through=True)
    try:
        return int(program() or 0)
    except SystemExit as ended:
        return int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        return 70
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python does at its end: threads and workers end first


class Forked:
    """A fork of this process that runs a program in a session of its own, as far as `subprocess.Popen` offers it."""

    def __init__(self, program: Callable[[], Any], folder: Path, cwd: Path | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.outputs = [folder / "stdout", folder / "stderr"]
        for path in self.outputs:
            path.write_bytes(b"")  # may be read at once, and holds nothing of an earlier process
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if cwd is not None:
                os.chdir(cwd)
            os._exit(as_a_program(program, 0, *(os.open(path, os.O_WRONLY) for path in self.outputs)))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, seconds: float = 120) -> int:
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"it did not end within {seconds} s: {self.stdout}{self.stderr}")
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def stdout(self) -> str:
        return self.outputs[0].read_text()

    @property
    def stderr(self) -> str:
        return self.outputs[1].read_text()


def ascent_process(folder: Path, *args: Any, cwd: Path | None = None) -> Forked:
    """The command with these arguments; what it prints goes to files in the folder."""

    def program() -> None:
        sys.argv = ["ascent", *map(str, args)]
        runpy.run_module("ascent", run_name="__main__")

    return Forked(program, folder, cwd)


def wait_after(patch: pytest.MonkeyPatch, step: int, run: Path | None = None) -> None:
    """Let runs, or this one, wait after a step until they are told to stop: a fork of this process is caught there."""
    write = RunWriter.step

    def waiting(writer: RunWriter, now: int, *args: Any) -> None:
        write(writer, now, *args)
        while now >= step and run in (None, writer.folder.path) and not writer.should_stop():
            time.sleep(0.01)

    patch.setattr(RunWriter, "step", waiting)


def write_sigint(_: Any, folder: str) -> None:
    """What this process does on Ctrl-C, into a folder: work for a worker of another process."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "sigint").write_text(repr(signal.getsignal(signal.SIGINT)))


class Here:
    """A pool of processes that does the work at once, in this one: no import of torch to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def shutdown(self, **_: Any) -> None: ...

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args))
        except Exception as error:
            future.set_exception(error)
        return future

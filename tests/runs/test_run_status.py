"""The heartbeat file of a run: present while its process runs, removed or old afterwards."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ascent
from ascent.cli.main import main
from ascent.core.errors import ConfigError
from ascent.runs import run_folder
from ascent.runs.run_folder import RunFolder, check_new_folder
from ascent.runs.run_list import read_heartbeat
from ascent.tasks.small.lecture import Lecture


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "HEARTBEAT_INTERVAL", 0.02)


def made(path: Path) -> RunFolder:
    return RunFolder.create(path, {}, {})


def later(path: Path, than: float) -> dict[str, Any]:
    """Return the first heartbeat after a time."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        sign = read_heartbeat(path)
        if sign and sign["time"] > than:
            return sign
        time.sleep(0.01)
    raise AssertionError("no heartbeat")


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ascent-alive"]


def test_heartbeat_continues_between_steps_and_ends_with_the_run(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    first = read_heartbeat(tmp_path / "run")
    assert first, "from the first moment"
    assert (first["host"], first["pid"]) == (socket.gethostname(), os.getpid()) and time.time() - first["time"] < 5
    later(tmp_path / "run", first["time"])
    folder.close()
    assert read_heartbeat(tmp_path / "run") == {} and not list((tmp_path / "run").glob(".alive*")) and not threads()
    folder.close()


@pytest.mark.long
def test_heartbeat_file_exists_only_during_training(tmp_path: Path) -> None:
    sign = tmp_path / "run" / ".alive"  # read as text: ascent.runs.run_list would load torch in every grading process
    read = f"return float(bool(json.loads(Path({str(sign)!r}).read_text())))"
    (tmp_path / "own.py").write_text(f"import json\nfrom pathlib import Path\ndef own(prompt, response):\n    {read}\n")
    given = {"reward": f"python:{tmp_path / 'own.py'}:own", "eval_every": 9, "threads": 1}
    run = ascent.train("lecture", out=tmp_path / "run", show=False, steps=2, **given)
    assert run.status == "finished" and [line["reward_errors"] for line in run.metrics] == [0, 0]
    assert not list((tmp_path / "run").glob(".alive*")) and not threads()
    assert run.info["machine"]["host"] == socket.gethostname()


def test_stale_heartbeat_does_not_block_a_new_run(tmp_path: Path) -> None:
    """A killed run leaves its heartbeat file. If it had no run.json yet, its folder can be used again."""
    for name in (".alive", ".alive.new", ".lock"):
        (tmp_path / name).write_text("{}")
    check_new_folder(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError):
        check_new_folder(tmp_path)


@pytest.mark.slow
def test_killed_run_leaves_a_heartbeat_and_is_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """After SIGKILL in the third step the heartbeat file remains and ages, and `ascent resume` continues the run."""
    run = tmp_path / "run"
    child = os.fork()
    if child == 0:
        score = Lecture.score

        def deadly(task: Lecture, rollouts: Any) -> Any:
            if (run / "checkpoints" / "step_000002").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            return score(task, rollouts)

        try:
            Lecture.score = deadly  # type: ignore[method-assign]
            ascent.train("lecture", out=run, show=False, steps=4, eval_every=9, checkpoint_every=2, threads=1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    sign = read_heartbeat(run)
    assert sign and sign["pid"] == child and ascent.load(run).status == "died"
    time.sleep(5 * run_folder.HEARTBEAT_INTERVAL)
    assert read_heartbeat(run) == sign, "nobody writes it any more"
    assert main(["resume", str(run)]) == 0
    again = ascent.load(run)
    assert again.status == "finished" and [line["step"] for line in again.metrics] == [0, 1, 2, 3]
    assert not list(run.glob(".alive*")) and not threads()


def test_deleted_folder_is_not_recreated(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    time.sleep(0.2)
    assert not (tmp_path / "run").exists()
    assert threads(), "and nothing is raised"
    other = made(tmp_path / "run")
    (tmp_path / "run" / ".alive").write_text(json.dumps({"host": "another", "pid": 1, "time": time.time() + 60}))
    other._alive._stopped.set()  # type: ignore[union-attr]
    other._alive._thread.join()  # type: ignore[union-attr]
    (tmp_path / "run" / ".alive").write_text(json.dumps({"host": "another", "pid": 1, "time": 5}))
    time.sleep(0.2)
    assert read_heartbeat(tmp_path / "run") == {"host": "another", "pid": 1, "time": 5}, (
        "the first is not ours any more"
    )
    folder.close()
    assert (tmp_path / "run" / ".alive").exists(), "nor ours to take along"
    other.close()


def test_heartbeat_survives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path / "run")
    before = read_heartbeat(tmp_path / "run")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.os, "rename", full)
        time.sleep(0.2)
    later(tmp_path / "run", before["time"])
    folder.close()


def test_fork_neither_writes_nor_removes_the_heartbeat(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    child = os.fork()
    if child == 0:
        folder.close()
        os._exit(0 if (tmp_path / "run" / ".alive").exists() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert later(tmp_path / "run", time.time())["pid"] == os.getpid()
    folder.close()


def test_heartbeat_ends_with_an_unclosed_folder(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    kept = [folder]
    del folder
    with pytest.warns(ResourceWarning):
        kept.clear()
    gc.collect()
    end = time.monotonic() + 120
    while threads() and time.monotonic() < end:
        time.sleep(0.01)
    assert not threads()


def test_invalid_heartbeat_is_ignored(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"time": "now"}'):
        (tmp_path / ".alive").write_text(text)
        assert read_heartbeat(tmp_path) == {}

"""A run's threads where others compute: a fair share, said, and kept in the config."""

import os
from pathlib import Path

import pytest
import torch

from ascent.api import resolve_machine_settings
from ascent.build import cpu_threads
from ascent.core.config import Config
from ascent.settings import configure


def processes(folder: Path, ticks: dict[int, int]) -> Path:
    """A folder as /proc, in which these processes have computed for so many clock ticks."""
    for pid, used in ticks.items():
        (folder / str(pid)).mkdir(exist_ok=True)
        line = f"{pid} (a (strange) name) R 1 1 1 0 -1 4194560 1 0 0 0 {used} 0 0 0 20 0 1 0 5"
        (folder / str(pid) / "stat").write_text(line)
    return folder


@pytest.mark.parametrize(
    ("every", "others", "mine"),
    [
        (2, [], 2),
        (2, [2.0], 1),
        (2, [1.0], 1),
        (2, [1.0, 1.0], 1),
        (16, [16.0], 8),
        (16, [1.0], 15),
        (8, [4.0, 4.0], 2),
    ],
)
def test_a_share_is_what_is_free_or_an_equal_part(every: int, others: list[float], mine: int) -> None:
    assert cpu_threads.fair_share(every, others) == mine


def test_those_that_compute_are_told_from_those_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = os.sysconf("SC_CLK_TCK")
    processes(tmp_path, {1: 0, 2: 50, 3: 7, os.getpid(): 0})
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "stat").write_text("damaged")
    later = {1: 2 * second, 2: 50, 3: 7 + second // 10, os.getpid(): second, 5: 900}
    monkeypatch.setattr(cpu_threads.time, "sleep", lambda _: processes(tmp_path, later))
    assert cpu_threads.busy_cores(tmp_path, 1.0) == [pytest.approx(2.0, rel=0.01)]
    assert cpu_threads.busy_cores(tmp_path / "none") == []


def test_a_run_takes_its_share_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "busy_cores", lambda _proc: [2.0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = configure("lecture", {})
    chosen, note = resolve_machine_settings(config)
    assert chosen.threads == 2
    assert note == "threads: 2 of 4, because another process computes on this machine (--threads 4 takes all)"
    assert resolve_machine_settings(chosen) == (chosen, ""), "a number in the config stays"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert resolve_machine_settings(config)[0].threads == 4, "so does one that the user has set"
    assert isinstance(chosen, Config)


def test_where_nobody_else_computes_all_threads_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cpu_threads.choose_num_threads(tmp_path) == (4, "")

"""`ascent cluster` on a Ray cluster of this machine, asked for by `make cluster-test` alone: minutes.

Learners and samplers train a tiny model on the CPU. With samplers killed under way, tokens and parameters are those of
a run without kills. `python -m benchmarks.cluster` kills learners too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray  # noqa: F401 (make cluster-test sets it up first)

from ascent.build.trained_run import Run
from ascent.runs.replica_log import replica_events, replicas_of
from benchmarks.cluster import Launched, difference, lines_of, training
from tests.inference.remote.test_remote_engine import fake_environment


@pytest.fixture
def train(tmp_path: Path) -> tuple[Any, ...]:
    return (*training(tmp_path), "--threads", 1)


@pytest.fixture
def launch() -> Iterator[Callable[..., Launched]]:
    """Begins commands, which end with the test."""
    begun: list[Launched] = []

    def begin(*args: Any) -> Launched:
        begun.append(Launched(*args))
        return begun[-1]

    yield begin
    for one in begun:
        if one.process.poll() is None:
            one.process.kill()


def said(*words: Any) -> str:
    """What another `ascent cluster` says meanwhile."""
    command = [sys.executable, "-m", "ascent", "cluster", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_samplers_that_are_killed_change_no_token_and_no_parameter(
    tmp_path: Path, train: tuple[Any, ...], launch: Any
) -> None:
    words = ("--learners", 2, "--samplers", 2, *train, "--steps", 8, "--eval-every", 8)
    whole = launch(tmp_path, *words, "--out", "whole")
    assert whole.end() == 0, whole.text()
    killed, seen = launch(tmp_path, *words, "--out", "killed"), set[int]()
    for step in (1, 2, 3):
        killed.until(lambda step=step: len(lines_of(tmp_path / "killed")) >= step)
        alive = killed.until(lambda: killed.actors()["sampler"])
        seen |= set(alive)
        os.kill(alive[step % len(alive)], signal.SIGKILL)
    assert killed.end() == 0, killed.text()
    assert difference(tmp_path / "whole", tmp_path / "killed") == []
    assert len({line["reward"] for line in lines_of(tmp_path / "whole")}) > 3, "there is nothing to learn"
    assert [event["event"] for event in replica_events(tmp_path / "killed")].count("lost") > 0
    assert not any(whole.actors().values()) and not any(killed.actors().values())


def test_samplers_come_and_go_while_it_runs_and_an_interrupt_saves(
    tmp_path: Path, train: tuple[Any, ...], launch: Any
) -> None:
    run = launch(tmp_path, "--samplers", 1, *train, "--steps", 10_000, "--ahead", 1, "--out", "run")
    folder = tmp_path / "run"
    run.until(lambda: len(lines_of(folder)) >= 2)
    there = ("--address", re.search(r"Ray cluster at (\S+)", run.text())[1])  # type: ignore[index]
    actors = json.loads(said(*there, "status", "--json"))["actors"]
    assert {"learner-0", "sampler-0"} <= {actor["name"] for actor in actors}
    assert any(actor.get("tokens", 0) > 0 for actor in actors)
    assert "asked for 1 more" in said(*there, "add", 1)
    run.until(lambda: any(row["name"] == "sampler-1" and row["tokens"] for row in replicas_of(folder)))
    assert "has left" in said(*there, "remove", "sampler-0")
    run.until(lambda: {row["name"]: row["state"] for row in replicas_of(folder)}["sampler-0"] == "left")
    steps = len(lines_of(folder))
    run.until(lambda: len(lines_of(folder)) > steps + 1)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.text()
    ended = Run(folder)
    assert ended.status == "interrupted" and ended.checkpoints[-1].name == f"step_{len(ended.metrics):06d}"
    assert [line["step"] for line in ended.metrics] == list(range(len(ended.metrics)))


def test_samplers_with_an_engine_are_killed_and_their_servers_end_with_them(
    tmp_path: Path, train: tuple[Any, ...], launch: Any
) -> None:
    venv = fake_environment(tmp_path, sys.executable)
    engine = ("--engine", "vllm", "--engine.python", venv, "--temperature", 0.8)
    words = ("--samplers", 2, *train, "--steps", 5, "--eval-every", 5, *engine)
    whole = launch(tmp_path, *words, "--out", "whole")
    assert whole.end() == 0, whole.text()
    assert "2 samplers draw on the cluster, each with vllm" in whole.text()
    killed = launch(tmp_path, *words, "--out", "killed")
    killed.until(lambda: len(lines_of(tmp_path / "killed")) >= 2)
    victim = killed.until(lambda: killed.actors()["sampler"])[0]
    servers = [pid for pid in children(victim) if "stand_in.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(victim, signal.SIGKILL)
    assert killed.end() == 0, killed.text()
    assert difference(tmp_path / "whole", tmp_path / "killed") == []
    assert servers and not any(Path(f"/proc/{pid}").exists() for pid in servers)


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    own = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [each for child in own for each in (child, *children(child))]

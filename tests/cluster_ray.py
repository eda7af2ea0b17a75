"""`ascent cluster` on a Ray cluster of this machine, asked for by `make cluster-test` alone: minutes.

Two learners and two samplers train a tiny model on the CPU. With samplers killed under way, tokens and parameters are
those of a run without kills.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray  # noqa: F401 (make cluster-test sets it up first)
from safetensors.torch import load_file

from ascent.records.run import Run

FLAGS = ("--steps", 6, "--prompts", 4, "--samples", 4, "--max-tokens", 48, "--eval-every", 6, "--eval-prompts", 4)
DEADLINE = 400.0


class Launched:
    """The command in a session of its own."""

    def __init__(self, folder: Path, *args: Any):
        self.said = folder / f"said-{random.randrange(10**9)}.txt"
        with self.said.open("wb") as file:
            command = [sys.executable, "-m", "ascent", "cluster", *map(str, args)]
            self.process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file, start_new_session=True)

    def text(self) -> str:
        return self.said.read_text()

    def samplers(self) -> list[int]:
        """The processes of the replicas, by their place among our descendants."""
        mine, found = {self.process.pid}, []
        parents: dict[int, tuple[int, str]] = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                parents[int(path.name)] = int(fields[1]), (path / "cmdline").read_text()
            except OSError:
                continue
        while more := {pid for pid, (parent, _) in parents.items() if parent in mine} - mine:
            mine |= more
        found = [pid for pid in mine if pid in parents and "SamplerActor" in parents[pid][1]]
        return sorted(found)

    def end(self) -> int:
        return self.process.wait(DEADLINE)


def until(condition: Callable[[], Any], launched: Launched) -> Any:
    """What a condition says as soon as it holds."""
    begin = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() - begin < DEADLINE, launched.text()
        assert launched.process.poll() is None, launched.text()
        time.sleep(0.05)
    return found


@pytest.fixture
def rows(tmp_path: Path, tiny_folder: Path) -> tuple[Path, tuple[Any, ...]]:
    lines = [json.dumps({"prompt": f"Say {i}.", "answer": str(i)}) for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "reward.py").write_text("def vowels(response):\n    return sum(c in 'aeiou' for c in response) / 50\n")
    flags = (*FLAGS, "--reward", "python:reward.py:vowels", "--lr", 0.01, "--no-preflight", "--threads", 1)
    return tmp_path, ("train", "jsonl:rows.jsonl", "--model", tiny_folder, *flags)


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


def numbers(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    run = Run(folder)
    assert run.status == "finished", run.info
    lines = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in [*run.metrics, *run.updates]]
    return lines, load_file(folder / "checkpoints" / "step_000006" / "params.safetensors")


def test_samplers_that_are_killed_change_no_token_and_no_parameter(rows: Any, launch: Any) -> None:
    folder, train = rows
    whole = launch(folder, "--learners", 2, "--samplers", 2, *train, "--out", "whole")
    assert whole.end() == 0, whole.text()
    killed = launch(folder, "--learners", 2, "--samplers", 2, *train, "--out", "killed")
    metrics, seen = folder / "killed" / "metrics.jsonl", set[int]()
    for step in (1, 2, 3):
        until(lambda step=step: metrics.exists() and len(metrics.read_text().splitlines()) >= step, killed)
        alive = until(killed.samplers, killed)
        seen |= set(alive)
        os.kill(alive[step % len(alive)], signal.SIGKILL)
    assert killed.end() == 0, killed.text()
    assert len(seen) > 2, "no sampler was started again"
    one, two = numbers(folder / "whole"), numbers(folder / "killed")
    assert one[0] == two[0]
    assert one[1].keys() == two[1].keys() and all(bool((one[1][name] == two[1][name]).all()) for name in one[1])
    assert len({line["reward"] for line in one[0] if "reward" in line}) > 3, "there is nothing to learn"
    assert not whole.samplers() and not killed.samplers()


def test_an_interrupt_saves_and_the_status_says_who_is_there(rows: Any, launch: Any) -> None:
    folder, train = rows
    run = launch(folder, "--samplers", 1, *train, "--steps", 10_000, "--checkpoint-every", 10_000, "--out", "run")
    metrics = folder / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, run)
    status = subprocess.run(
        [sys.executable, "-m", "ascent", "cluster", "status", "--json"], capture_output=True, text=True, check=False
    )
    assert status.returncode == 0, status.stderr
    actors = json.loads(status.stdout)["actors"]
    assert {"learner-0", "sampler-0"} <= {actor["name"] for actor in actors}
    assert any(actor.get("tokens", 0) > 0 for actor in actors)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.text()
    ended = Run(folder / "run")
    assert ended.status == "interrupted" and ended.checkpoints[-1].name == f"step_{len(ended.metrics):06d}"

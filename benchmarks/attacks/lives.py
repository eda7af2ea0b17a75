"""Attacks on the life of a run: kills at many moments, and a disk that is full. The result has to be bit-identical.

A run lives in a fork of this process. The moments of its life are numbered, one before and one after every access to a
file; a kill happens at one of them, or from outside after some milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors.torch import load_file

from ascent import api
from ascent.core.errors import RunError
from ascent.runs import checkpoint, rollout_files, run_writer
from ascent.runs import run_folder as folders
from ascent.runs.display.terminal import Display
from ascent.runs.untrusted_files import read_lines
from ascent.settings import configure
from benchmarks.attacks.attempt import BROKEN, Attack, Fork, scratch

KILLS, DISK = "kills", "a full disk"
SETTINGS = {
    **{"length": 3, "numbers": 4, "end": True, "prompts": 4, "samples": 3, "minibatches": 2, "eval_prompts": 5},
    **{"policy.width": 8, "policy.layers": 1, "policy.heads": 2, "steps": 6, "checkpoint_every": 2, "record_every": 2},
    **{"algorithm": "grpo", "kl": "in-loss", "kl.target": 0.01, "reference": "moving-average", "threads": 1},
}
LIFE = 30.0
"""Seconds that a whole life may take."""


def live(path: Path) -> Any:
    """Do what a user would: start the run, or resume it if it has begun."""
    run_writer.HEARTBEAT = float("inf")  # what the clock decides would be another moment in every life
    config = configure("sort", SETTINGS)
    return api.resume(path, Display()) if (path / "run.json").exists() else api.start(config, path, Display())


def bits(run: Path) -> dict[str, Any]:
    """All that has to be the same: every record but its times, and every tensor of the last checkpoint."""
    found: dict[str, Any] = {}
    for name in folders.JSONL_FILES:
        lines = read_lines(run / name)
        found[name] = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]
    last = checkpoint.complete_checkpoints(run / "checkpoints")[-1]
    for path in last.glob("*.safetensors"):
        found |= {f"{path.stem} {k}": v.flatten().numpy().tobytes() for k, v in load_file(path).items()}
    state = json.loads((last / "state.json").read_text())
    found["state"] = (last.name, state["step"], state["state"])
    for where in folders.STEP_FOLDERS:
        found |= {f"{where} {path.name}": pq.read_table(path).to_pylist() for path in (run / where).iterdir()}
    return found


def differing(run: Path, whole: dict[str, Any]) -> list[str]:
    mine = bits(run)
    return sorted(name for name in mine.keys() | whole.keys() if mine.get(name) != whole.get(name))


# ---- kills -----------------------------------------------------------------------------------------------------

TOUCHES: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("replace", "fsync", "truncate")),
    (shutil, "rmtree"),
    *((Path, name) for name in ("mkdir", "write_text", "unlink", "rename")),
    (checkpoint, "save"),
    (checkpoint, "save_file"),
    (rollout_files, "write_rollouts"),
    (rollout_files, "write_answers"),
    (run_writer.RunWriter, "_line"),
)


def count_moments(last: int | None, number: int = signal.SIGKILL) -> Callable[[], int]:
    """Number the moments of this process's life from now on, and send it a signal at the last.

    Returns how many there were.
    """
    count = 0

    def moment() -> None:
        nonlocal count
        if count == last:
            os.kill(os.getpid(), number)
        count += 1

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            moment()
            result = function(*args, **more)
            moment()
            return result

        return call

    for owner, name in TOUCHES:
        setattr(owner, name, watched(getattr(owner, name)))
    return lambda: count


def whole_life(path: Path) -> int:
    """Complete a run without a kill and return its number of moments."""

    def work() -> int:
        count = count_moments(None)
        live(path)
        return count()

    moments = Fork(work, 4 * LIFE).result()
    assert isinstance(moments, int), moments
    return moments


def die(path: Path, moment: int | None, seconds: float) -> bool:
    """Run until a moment, or for some time; return whether it was killed."""

    def work() -> str:
        count_moments(moment)
        if moment is None:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return live(path).status

    ended = Fork(work, LIFE).result()
    if isinstance(ended, str) and (ended.startswith(BROKEN) or "hung" in ended):
        raise AssertionError(ended)
    return ended != "finished"


def killed(path: Path, whole: dict[str, Any], moments: int, rng: random.Random) -> tuple[int, str | None]:
    """Kill a run once or twice and resume it; return the number of kills and what is wrong with the result."""
    kills = 0
    for _ in range(rng.choice((1, 1, 2))):
        by_clock = rng.random() < 0.2
        kills += die(path, None if by_clock else rng.randrange(moments), rng.uniform(0.01, 0.6))
    ended = Fork(lambda: live(path).status, LIFE).result()
    if ended != "finished":
        return kills, str(ended)[-300:]
    wrong = differing(path, whole)
    litter = [one.name for one in path.rglob(".*") if one.name != ".lock"]
    return kills, f"differing: {wrong}" if wrong else f"litter: {litter}" if litter else None


def kill_many(seed: int, count: int) -> tuple[int, list[str]]:
    """Kill runs at least this often; return the number of kills and the complaints."""
    rng, kills, complaints = random.Random(seed), 0, list[str]()
    with scratch() as folder:
        moments = whole_life(folder / "whole")
        whole = bits(folder / "whole")
        while kills < count:
            with scratch() as place:
                more, wrong = killed(place / "run", whole, moments, rng)
            kills += more
            complaints += [wrong] if wrong else []
    return kills, complaints


def forgetting(_: Path) -> str | None:
    """A resume that does not cut the records back: do the bits differ?"""
    with scratch() as folder:
        moments = whole_life(folder / "whole")
        whole = bits(folder / "whole")
        for share in (0.5, 0.6, 0.7, 0.8):
            die(folder / f"run{share}", int(share * moments), 0)
            assert Fork(lambda share=share: live(folder / f"run{share}").status, LIFE).result() == "finished"  # type: ignore[misc]
            if wrong := differing(folder / f"run{share}", whole):
                return f"differing: {wrong}"
    return None


def cut_nothing() -> None:
    folders.RunFolder.cut = lambda *_: None  # type: ignore[method-assign]


# ---- a full disk -------------------------------------------------------------------------------------------------


def full_disk(room: int) -> Callable[[Path], str | None]:
    """Limit file sizes, as if the disk were full: is the error clear, and can the run be resumed?"""

    def attempt(folder: Path) -> str | None:
        whole_life(folder / "whole")

        def work() -> str:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            try:
                live(folder / "run")
                return "it finished"
            except RunError as trouble:
                return str(trouble)

        said = Fork(work, LIFE).result()
        if "cannot be written" not in said or "Make room" not in said:
            return f"it says: {said[-200:]}"
        ended = Fork(lambda: live(folder / "run").status, LIFE).result()
        if ended != "finished":
            return f"it cannot be resumed: {str(ended)[-200:]}"
        wrong = differing(folder / "run", bits(folder / "whole"))
        return f"differing: {wrong}" if wrong else None

    return attempt


def words_of_the_disk() -> None:
    """Report errors with their own messages only."""

    class Other(Exception): ...

    checkpoint.SafetensorError = Other
    api._run_error = lambda error, _: RunError(f"{type(error).__name__}: {error}")


def attacks(_: Path) -> list[Attack]:
    disks = [
        Attack(DISK, f"{room:,} bytes", full_disk(room), words_of_the_disk) for room in (3_000, 5_000, 7_000, 9_000)
    ]
    return [Attack(KILLS, "a kill and a resume", forgetting, cut_nothing), *disks]

"""Runs under torchrun with a rank killed at a random moment.

    python -m benchmarks.ranks --kills 20

A small policy and a tiny language model: replicated, sharded, and sharded with one checkpoint part per rank. After a
kill the run has to end on every rank in time, name the killed rank, and leave nothing half-written. Then it is resumed
on 1, 2 or 3 ranks, or `torchrun --max-restarts 1` has continued it. At the end its numbers have to equal those of a run
without a kill: bit-identical on 2 ranks, and on other numbers of ranks within rounding up to the kill, because rounding
may change a sampled token later.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT

KILLED_AFTER = 60.0
"""Seconds within which a run has to be over after one of its ranks was killed."""
OFTEN = ("--checkpoint-every", "6", "--eval-every", "9", "--ranks.deadline", "20", "--no-preflight")
NOISE = "import zlib\n\n\ndef noise(prompt, response, **columns):\n    return zlib.crc32(response.encode()) % 97 / 97\n"


class Launched:
    """A training by torchrun, on so many ranks, that a test or a benchmark disturbs."""

    def __init__(self, ranks: int, *words: str, **more: Any):
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        head = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (until the process is over)
        head += [f"--{name.replace('_', '-')}={value}" for name, value in more.items()]
        self.process = subprocess.Popen(
            [*head, "-m", "ascent", *words], env=env, cwd=ROOT, stdout=self.log, stderr=subprocess.STDOUT
        )

    def reach(self, folder: Path, steps: int) -> None:
        """Wait until a run has recorded so many steps."""
        until = time.monotonic() + 300
        while len(lines_of(folder)) < steps:
            assert self.process.poll() is None and time.monotonic() < until, self.said()
            time.sleep(0.02)

    def ranks(self) -> dict[int, int]:
        """The process of each rank."""
        found = {}
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found |= {int(word[5:]): int(child) for word in words if word.startswith(b"RANK=")}
        return found

    def end(self, timeout: float = 300) -> tuple[int, str, float]:
        """Its exit status, what it said, and how long it took from now on."""
        begin = time.monotonic()
        try:
            status = self.process.wait(timeout)
        finally:
            self.process.kill()
        return status, self.said(), time.monotonic() - begin

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The numbers of each step, without times."""
    file = folder / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [{k: v for k, v in line.items() if "time" not in k} for line in lines]


def trainings(folder: Path) -> dict[str, tuple[str, ...]]:
    """What is trained, by its name: the words of its command."""
    from tests.language import write_tiny

    (folder / "problems.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}?"}) + "\n" for i in range(24)))
    (folder / "rewards.py").write_text(NOISE)
    model = ("--model", str(write_tiny(folder / "model")), "--reward", f"python:{folder / 'rewards.py'}:noise")
    words = ("train", f"jsonl:{folder / 'problems.jsonl'}", *model, "--prompts", "4", "--samples", "4", "--lr", "1e-3")
    words += ("--max-tokens", "8", "--eval-prompts", "2", "--steps", "24", "--algorithm", "grpo", *OFTEN)
    return {
        "lecture": ("train", "lecture", "--steps", "40", *OFTEN),
        "llama": words,
        "llama, in shards": (*words, "--ranks.shard", "shard"),
        "llama, in shards and parts": (*words, "--ranks.shard", "shard", "--ranks.gather", "0"),
    }


def killed(
    words: tuple[str, ...], folder: Path, victim: int, steps: int, wait: float, again: int,
    wanted: list[dict[str, Any]],
) -> list[str]:  # fmt: skip
    """What went wrong when this rank was killed after so many steps, and the run went on.

    `again`: on how many ranks it is resumed; 0: torchrun itself starts it again.
    """
    launched = Launched(2, *words, "--out", str(folder), max_restarts=int(not again))
    launched.reach(folder, steps)
    pids = launched.ranks()
    time.sleep(wait)
    if victim not in launched.ranks():
        return []  # it was over before
    os.kill(pids[victim], signal.SIGKILL)
    status, said, seconds = launched.end()
    named = f"rank {victim} of 2, in the phase"
    wrong = [] if named in said else [f"nobody said who it was: {said[-900:]}"]
    wrong += ["a rank is left"] if any(Path(f"/proc/{pid}").exists() for pid in pids.values()) else []
    if again:
        wrong += [f"it ended after {seconds:.0f} s"] if seconds > KILLED_AFTER else []
        wrong += ["its exit status is 0"] if status == 0 else []
        torn = [line["step"] for line in lines_of(folder)]
        wrong += [f"its records are torn: {torn}"] if torn != list(range(len(torn))) else []
        status, said, _ = Launched(again, "resume", str(folder)).end()
    found = lines_of(folder)
    wrong += [] if status == 0 and len(found) == len(wanted) else [f"it did not go on: {said[-900:]}"]
    same, last = again in (0, 2), len(wanted) if again in (0, 2) else steps
    pairs = zip(found[:last], wanted[:last], strict=False)
    apart = max((abs((a[k] or 0) - (b[k] or 0)) for a, b in pairs for k in b), default=0.0)
    wrong += [f"it is {apart:.1e} apart"] if apart > (0.0 if same else 1e-3) else []
    left = [path.name for path in (folder / "checkpoints").glob(".*")]
    return wrong + ([f"left half-written: {left}"] if left else [])


def kills(count: int, say: Callable[..., None] = print) -> list[str]:
    """What went wrong in so many runs of which a random rank was killed at a random moment."""
    rng, wrong, whole = random.Random(0), [], {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        every = trainings(folder)
        for i in range(count):
            name = list(every)[i % len(every)]
            words, out = every[name], folder / f"whole {name}"
            if name not in whole:
                status, said, _ = Launched(2, *words, "--out", str(out)).end()
                assert status == 0, said
                whole[name] = lines_of(out)
            victim, steps = rng.randrange(2), rng.randrange(1, len(whole[name]) - 3)
            wait, again = rng.random() / 2, rng.choice((0, 1, 2, 3))
            found = killed(words, folder / str(i), victim, steps, wait, again, whole[name])
            after = f"resumed on {again}" if again else "started again by torchrun"
            say(
                f"kill {i}: {name}, rank {victim} after step {steps}, {after}: {'; '.join(found) or 'as promised'}",
                flush=True,
            )
            wrong += found
    return wrong

"""Two concurrent runs on one machine: the slowdown of each.

    python -m benchmarks.side_by_side [--steps 12] [--vocab 4096] [--smoke]

A run is GRPO of a random Llama (4 layers, width 256) on 8 prompts × 8 samples of 32 tokens, in its own process, started
like `ascent train`: it counts the processes that compute here, and takes its share of torch's threads. Three cases, one
after the other: a run alone; two that start together; and one that starts while another, which has all threads, is
running.

`value` is the time of a step beside another run, over the time of a step alone: the larger of two that begin together,
by the medians of as many steps of each, during which both computed. At most 2, so that two runs at once are done no
later than one after the other. `later` has both of the third case: the first keeps the threads that its config names,
and there are then more threads than cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import ROOT, close, show
from benchmarks.peers.models import SMOKE, TINY, random_model, random_prompts

MOST = 2.0
"""Times a step alone."""
DEADLINE = 600
"""Seconds for a case."""
WARM = 2
"""First steps, which do not count."""


def child(model: str, out: str, steps: int, words: list[str]) -> None:
    """A run in the folder `out`, and beside it a file of when it began and when each of its steps ended."""
    import ascent
    from benchmarks.peers.fixed_prompts import FixedPrompts

    settings: dict[str, Any] = {"model": model, "algorithm": "grpo", "prompts": 8, "samples": 8, "max_tokens": 32}
    settings |= {"max_prompt": 64, "steps": steps, "eval_every": 10 * steps, "lr": 1e-6}
    ends = [time.time()]
    for _ in ascent.steps(FixedPrompts(words=tuple(words)), out=out, preflight=False, **settings):
        ends.append(time.time())
        Path(f"{out}.json").write_text(json.dumps(ends))


class Side:
    """A run in a process of its own."""

    def __init__(self, work: tuple[str, list[str]], out: Path, steps: int):
        model, words = work
        self.out = out
        about = json.dumps([model, str(out), steps, words])
        command = [sys.executable, "-m", "benchmarks.side_by_side", "--child", about]
        own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.DEVNULL)

    @property
    def ends(self) -> list[float]:
        """Of its steps; the first is when it began."""
        try:
            return list(json.loads(Path(f"{self.out}.json").read_text()))
        except (OSError, ValueError):  # not yet, or being written
            return []

    def after(self, since: float) -> list[float]:
        """Seconds of the steps that began then or later."""
        return [end - begun for begun, end in pairwise(self.ends) if begun >= since]

    def wait(self, steps: int, deadline: float, since: float = 0.0) -> None:
        """Until so many steps are done that began then or later."""
        while len(self.after(since)) < steps:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{self.out.name} did not get beyond {len(self.after(since))} of {steps} steps")
            time.sleep(0.05)

    @property
    def threads(self) -> int:
        return int(json.loads((self.out / "config.json").read_text())["threads"])

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=30)


def case(name: str, work: Any, folder: Path, steps: int, second: str | None) -> list[dict[str, float]]:
    """Threads and seconds per step of the runs of a case. `second`: when another run begins, if one does."""
    deadline = time.monotonic() + DEADLINE
    sides = [Side(work, folder / f"{name}-first", 50 * steps)]
    try:
        if second == "later":
            sides[0].wait(WARM + 1, deadline)
        if second is not None:
            sides.append(Side(work, folder / f"{name}-second", 50 * steps))
        for side in sides:
            side.wait(WARM, deadline)
        since = max(side.ends[WARM] for side in sides)
        for side in sides:
            side.wait(steps, deadline, since)
        found = [{"threads": side.threads, "seconds": median(side.after(since))} for side in sides]
        print(f"{name}:", " and ".join(f"{side['seconds']:.2f} s per step" for side in found), flush=True)
        return found
    finally:
        for side in sides:
            side.stop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--smoke", action="store_true", help="a smaller model and few steps, only to see that it runs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        child(*json.loads(options.child))
        return 0
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: at least 1")
    shape = SMOKE if options.smoke else TINY | {"vocab_size": options.vocab}
    steps = 2 if options.smoke else options.steps
    with tempfile.TemporaryDirectory() as folder:
        work = str(random_model(Path(folder) / "model", shape)), random_prompts(8, 16, shape["vocab_size"])
        cases = {"alone": None, "together": "at once", "later": "later"}
        found = {name: case(name, work, Path(folder), steps, second) for name, second in cases.items()}
    alone = found["alone"][0]["seconds"]
    for sides in found.values():
        for side in sides:
            side["times"] = side["seconds"] / alone
    rows = [
        [name, which, f"{side['threads']}", f"{side['seconds']:.2f}", f"{side['times']:.2f}"]
        for name, sides in found.items()
        for which, side in zip(("first", "second"), sides, strict=False)
    ]
    show(["case", "run", "threads", "seconds per step", "times alone"], rows)
    value = max(side["times"] for side in found["together"])
    ok = options.smoke or value <= MOST
    return close("side_by_side", value, 1.0, MOST, ok, cases=found, cores=os.cpu_count())[1]


if __name__ == "__main__":
    sys.exit(main())

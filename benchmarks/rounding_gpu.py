"""Which rounding costs a model its samples? SmolLM2-135M-Instruct learns sums in several precisions, on paired seeds.

    python -m benchmarks.rounding_gpu [--seeds 8] [--side-by-side 8] [--seconds 400] [--out rounding.json]
    python -m benchmarks.rounding_gpu --draw rounding.json       # only the tables of an earlier run

The work is that of benchmarks/learn.py: 32 prompts × 16 samples, 24 new tokens, Adam at 1e-5. Each run takes 50 steps
(25,600 samples), and greedy answers to 1,000 held-out problems are scored after every tenth. Precisions:

    float32    everything (no TF32)
    mixed      parameters and products in bfloat16; residual stream, norms and logits in float32
    bfloat16   all but the logits, which are float32 in the learner and in the sampler
    drawn      bfloat16 whose sampler draws from logits in bfloat16, as it did until now
    float16    as bfloat16, with 3 more bits, and gradients that are scaled

A small model's run waits for launches, so as many processes as there are seeds share the card; each takes its seed
through all precisions, and those that time is left for. The figure of a run is the mean of its five evaluations. It is
compared with float32's of the same seed, and Student's interval is that of the differences over the seeds.

`value` is the difference of the fastest precision that loses nothing, in points, and the target is that its interval
excludes a loss of 1 point. ok also asks that float32's update takes at most 5 times bfloat16's, which is measured
beside the runs, one after the other. `--smoke` takes two steps of a tiny random model on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from ascent.engines.language.sampling.cuda import GraphDecoder
from ascent.records.statistics import interval
from benchmarks.common import ROOT, close, show
from benchmarks.learn import ours
from benchmarks.peers.models import SMOKE, random_model, smollm2

PRECISIONS = ("float32", "bfloat16", "mixed", "drawn", "float16")
FASTEST_FIRST = ("bfloat16", "float16", "mixed", "float32")
STEPS, EVERY, PROBLEMS, LOSS, FACTOR = 50, 10, 1000, 1.0, 5.0
LATE = 60.0
"""Seconds after the last start of a run in which it has to end."""


def draw_from_rounded(on: bool) -> None:
    """Let the sampler draw from logits in bfloat16, or from float32 ones again."""
    step = GraphDecoder.__dict__.get("exact_step", GraphDecoder.step)

    def rounded(self: Any, rows: int, splits: int, support: Any, greedy: bool) -> None:
        hidden, head = self.net.hidden(self.ops, self.board, self.tables, rows, splits), self.net.head
        self.ops.draw(F.linear(hidden, head.weight, head.bias), self.board, support, greedy)

    GraphDecoder.exact_step = step  # type: ignore[attr-defined]
    GraphDecoder.step = rounded if on else step  # type: ignore[method-assign]


def learn(model: str, precision: str, seed: int, steps: int, more: dict[str, Any]) -> list[dict[str, float]]:
    """The evaluations of one run."""
    draw_from_rounded(precision == "drawn")
    dtype = "bfloat16" if precision == "drawn" else precision
    settings = {"seed": seed, "policy.dtype": dtype, "eval_every": EVERY, "eval_prompts": PROBLEMS, **more}
    return ours(model, 1e9, steps, settings)


def take_seed(model: str, seed: int, steps: int, until: float, more: dict[str, Any]) -> None:
    """All precisions of a seed, one JSON line each, as long as time is left for one more."""
    longest, order = 0.0, list(PRECISIONS)
    if seed % 2:  # the card has less to do at once than if all began with float32
        order[:2], order[3:] = order[1::-1], order[:2:-1]
    for precision in order:
        begin = time.time()
        if begin + longest > until:
            return
        points = learn(model, precision, seed, steps, more)
        gc.collect()
        torch.cuda.empty_cache()
        longest = max(longest, time.time() - begin)
        line = {"precision": precision, "seed": seed, "wall": time.time() - begin, "points": points}
        print("FOUND " + json.dumps(line), flush=True)


def take_seeds(model: str, seeds: list[int], at_once: int, steps: int, seconds: float) -> list[dict[str, Any]]:
    """Every seed in a process of its own, so many side by side; what they found."""
    until, waiting, running, found = time.time() + seconds, list(seeds), [], []
    while waiting or running:
        while waiting and len(running) < at_once:
            flags = ["--seed", str(waiting.pop(0)), "--model", model, "--steps", str(steps), "--until", str(until)]
            log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (the process writes to it)
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.rounding_gpu", *flags],
                cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            running.append((process, log))
        time.sleep(0.2)
        late = time.time() > until + LATE
        for process, _ in running if late else []:
            process.kill()
        for process, log in [pair for pair in running if late or pair[0].poll() is not None]:
            running.remove((process, log))
            process.wait()
            log.seek(0)
            lines = log.read().splitlines()
            found += [json.loads(line.removeprefix("FOUND ")) for line in lines if line.startswith("FOUND ")]
            if process.returncode:
                print("\n".join(lines[-25:]), flush=True)
    return found


def update_seconds(model: str, precision: str) -> dict[str, float]:
    """Of runs of 14 steps alone on the card, the median seconds of a step's phases."""
    from ascent.assemble import assemble
    from ascent.core.loop import train
    from ascent.settings import configure
    from benchmarks.common import NoRecords
    from benchmarks.learn import SETTINGS

    phases: dict[str, list[float]] = {"generate": [], "update": []}

    class Phases(NoRecords):
        def step(self, step: int, metrics: dict[str, Any], *_: Any) -> None:
            for name, seconds in phases.items():
                seconds.append(metrics[f"time/{name}"])

    settings = {**SETTINGS, "steps": 14, "eval_every": 0, "policy.dtype": precision, "model": model}
    parts = assemble(configure("reasoning-gym:chain_sum", settings))
    try:
        list(train(parts.config, parts.task, parts.sampler, parts.learner, Phases(), parts.streams))
    finally:
        parts.close()
    return {name: median(seconds[4:]) for name, seconds in phases.items()}


def paired(found: list[dict[str, Any]], precision: str, when: int | None = None) -> tuple[int, float, float, float]:
    """Seeds, mean in %, and the difference from float32 in points with half of its interval; at one evaluation or over
    all."""

    def figure(one: dict[str, Any]) -> float:
        strict = [point["strict"] for point in one["points"][1:]]
        return 100 * (sum(strict) / len(strict) if when is None else strict[when])

    by_seed = {(one["precision"], one["seed"]): figure(one) for one in found}
    seeds = [seed for name, seed in by_seed if name == precision and ("float32", seed) in by_seed]
    values = [by_seed[precision, seed] for seed in seeds]
    gaps = [value - by_seed["float32", seed] for value, seed in zip(values, seeds, strict=True)]
    return len(seeds), sum(values) / max(1, len(seeds)), *(interval(gaps) if gaps else (0.0, float("nan")))


def tables(found: list[dict[str, Any]]) -> None:
    samples = [f"{round(point['samples']):,}" for point in found[0]["points"][1:]]
    rows = []
    for precision in PRECISIONS:
        every = [paired(found, precision, when) for when in (None, *range(len(samples)))]
        if every[0][0]:
            cells = [f"{mean:.1f} % ({gap:+.1f} ± {half:.1f})" for _, mean, gap, half in every]
            rows.append([precision, str(every[0][0]), *cells])
    show(["precision", "seeds", "mean (less float32's)", *samples], rows)


def closing(found: list[dict[str, Any]], seconds: dict[str, dict[str, float]]) -> int:
    tables(found)
    every = {name: paired(found, name) for name in PRECISIONS}
    nothing_lost = [name for name in FASTEST_FIRST if name != "float32" and every[name][2] - every[name][3] > -LOSS]
    choice = nothing_lost[0] if nothing_lost else "float32"
    factor = seconds["float32"]["update"] / seconds["bfloat16"]["update"] if seconds else None
    more = {"choice": choice, "seconds": seconds, "factor": factor}
    differences = {name: {"seeds": n, "gap": gap, "half": half} for name, (n, _, gap, half) in every.items() if n}
    ok = bool(nothing_lost) and factor is not None and factor <= FACTOR
    return close("rounding_gpu", every[choice][2], None, -LOSS, ok, differences=differences, **more)[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first", type=int, default=100, help="the first seed")
    parser.add_argument("--side-by-side", type=int, default=8, help="processes on the card at once")
    parser.add_argument("--seconds", type=float, default=400.0, help="after which no run begins")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path("rounding.json"))
    parser.add_argument("--model", default="", help="a folder; SmolLM2 where it is missing")
    parser.add_argument("--draw", type=Path, nargs="+", help="only the tables of earlier runs")
    parser.add_argument("--seed", type=int, help="take this seed through the precisions, in this process")
    parser.add_argument("--until", type=float, default=float("inf"))
    parser.add_argument("--smoke", action="store_true", help="two steps of a tiny model on the CPU")
    options = parser.parse_args(argv)
    if options.smoke:
        small = {"prompts": 2, "samples": 2, "eval_every": 1, "eval_prompts": 4, "max_tokens": 4}
        with tempfile.TemporaryDirectory() as folder:
            model, more = random_model(Path(folder), SMOKE), small | {"policy.device": "cpu"}
            runs = [{"precision": p, "seed": 0, "points": learn(model, p, 0, 2, more)} for p in ("float32", "mixed")]
        tables(runs)
        return close("rounding_gpu", None, None, -LOSS, True, smoke=True, runs=runs)[1]
    if options.draw:
        saved = [json.loads(path.read_text()) for path in options.draw]
        return closing([one for part in saved for one in part["found"]], saved[0]["seconds"])
    model = options.model or smollm2()
    if options.seed is not None:
        take_seed(model, options.seed, options.steps, options.until, {})
        return 0
    seeds = list(range(options.first, options.first + options.seeds))
    found = take_seeds(model, seeds, options.side_by_side, options.steps, options.seconds)
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
    options.out.write_text(json.dumps({"found": found, "seconds": {}, **about}))
    seconds = {name: update_seconds(model, name) for name in PRECISIONS if name != "drawn"}
    options.out.write_text(json.dumps({"found": found, "seconds": seconds, **about}))
    return closing(found, seconds)


if __name__ == "__main__":
    sys.exit(main())

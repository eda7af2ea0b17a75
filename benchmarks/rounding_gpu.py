"""What rounding costs in samples: SmolLM2-135M-Instruct learns sums in several precisions, on paired seeds.

    python -m benchmarks.rounding_gpu [--seeds 120 121 …] [--side-by-side 8] [--seconds 330] [--go-on rounding.json]
    python -m benchmarks.rounding_gpu --draw rounding.json       # only the tables of an earlier run
    python -m benchmarks.rounding_gpu --time seconds.json        # only the seconds of an update, alone on the GPU

The work is that of benchmarks/learn.py: 32 prompts × 16 samples, 24 new tokens, Adam at 1e-5. A run takes 10 steps
(5,120 samples, in which accuracy rises from 7 to 37 %), and then greedy answers to 3,000 held-out problems are scored:
with 1,000, most of the difference between two runs was sampling noise of the problems. `--steps 30` takes longer runs,
which are evaluated after every tenth step. Precisions:

    float32    everything (no TF32)
    mixed      parameters and matmuls in bfloat16; residual stream, norms and logits in float32
    bfloat16   all but the logits, which are float32 in the learner and in the sampler
    drawn      bfloat16 with sampling from bfloat16 logits
    float16    as bfloat16, with 3 more bits, and loss scaling
    compact    bfloat16 with bfloat16 optimizer state (`--policy.optimizer-state bfloat16`); see seven_gpu

A small model's run is limited by kernel launches, so several processes share the GPU, and each takes the next run in
the queue. The figure of a run is the mean of its evaluations. It is compared with that of the float32 run of the same
seed on the same problems, and Student's interval is that of the differences over the seeds. Runs of an earlier call
(`--go-on`) count too, up to as many steps. `--also` shows the same for the mean accuracy in training, which costs
nothing: it is that of all samples so far.

`value` is the difference of the fastest precision that loses nothing, in points; the target is that its interval
excludes a loss of 1 point. ok also asks that float32's update takes at most 5 times bfloat16's: random parameters of
the same shape, 24 tokens in every response, nothing else on the GPU. `--smoke` takes two steps of a tiny random model
on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from ascent.build.assemble import assemble
from ascent.core.loop import train
from ascent.inference.runners.cuda_graph import CudaGraphRunner
from ascent.runs.confidence_intervals import mean_and_half_width
from ascent.settings import configure
from benchmarks.common import ROOT, NoRecords, close, options_with_gpu, show
from benchmarks.learn import SETTINGS, ours
from benchmarks.peers.models import GPU_SHAPES, SMOKE, random_model, smollm2

PRECISIONS = ("float32", "float16", "mixed", "bfloat16", "compact", "drawn")
SETTINGS_OF: dict[str, dict[str, Any]] = {
    "drawn": {"policy.dtype": "bfloat16"},
    "compact": {"policy.dtype": "bfloat16", "policy.optimizer_state": "bfloat16"},
}
"""Of those that are not a dtype."""
FASTEST_FIRST = ("bfloat16", "float16", "mixed")
STEPS, EVERY, PROBLEMS, LOSS, FACTOR = 10, 10, 3000, 1.0, 5.0
EARLIER = 1000
"""Problems of runs that do not say how many."""
SMALL = {"micro_batch": 3000, "policy.rows": 512, "reward_workers": 3}
"""Memory and processes only: no number depends on it. So many runs fit on a GPU."""
Found = dict[str, Any]
"""A run: its precision, its seed, and by samples its strict accuracies in %, held-out and in training so far."""


# ---- one run -------------------------------------------------------------------------------------------


def draw_from_rounded(on: bool) -> None:
    """Let the sampler draw from logits in bfloat16, or from float32 ones again."""
    step = CudaGraphRunner.__dict__.get("exact_step", CudaGraphRunner.decode_step)

    def rounded(self: Any, rows: int, splits: int, support: Any, greedy: bool) -> None:
        hidden, head = self.model.hidden(self.ops, self.decode_state, self.tables, rows, splits), self.model.head
        self.ops.sample_next_tokens(F.linear(hidden, head.weight, head.bias), self.decode_state, support, greedy)

    CudaGraphRunner.exact_step = step  # type: ignore[attr-defined]
    CudaGraphRunner.decode_step = rounded if on else step  # type: ignore[method-assign]


def learn(model: str, precision: str, seed: int, steps: int, more: dict[str, Any]) -> None:
    """Says which run it is, and then its evaluations, as they come."""
    draw_from_rounded(precision == "drawn")
    print(f"RUN {precision} {seed}", flush=True)
    own = SETTINGS_OF.get(precision, {"policy.dtype": precision})
    ours(model, 1e9, steps, {"seed": seed, "eval_every": EVERY, "eval_prompts": PROBLEMS, **own, **more}, start=False)
    gc.collect()
    torch.cuda.empty_cache()


def heard(text: str) -> list[Found]:
    """The runs that a process told of. One that was cut short has fewer evaluations."""
    runs: list[Found] = []
    for line in text.splitlines():
        if line.startswith("RUN "):
            _, precision, seed = line.split()
            runs.append({"precision": precision, "seed": int(seed), "problems": PROBLEMS, "right": {}, "training": {}})
        elif match := re.match(r" *([\d.]+) s +(\d+) samples: strict ([\d.]+), in training ([\d.]+)", line):
            runs[-1]["right"][match[2]] = round(100 * float(match[3]), 2)
            runs[-1]["training"][match[2]] = round(100 * float(match[4]), 2)
            runs[-1]["seconds"] = float(match[1])
    return runs


def update_seconds(model: str, precision: str, more: dict[str, Any]) -> dict[str, float]:
    """Of a few steps alone on the GPU, the median seconds of generation and update."""
    phases: dict[str, list[float]] = {"generate": [], "update": []}

    class Phases(NoRecords):
        def step(self, step: int, metrics: dict[str, Any], *_: Any) -> None:
            for name, seconds in phases.items():
                seconds.append(metrics[f"time/{name}"])

    settings = {**SETTINGS, "steps": 9, "eval_every": 1000, "policy.dtype": precision, "model": model, **more}
    parts = assemble(configure("reasoning-gym:chain_sum", settings))
    try:
        how = (parts.task, parts.engine, parts.learner, Phases(), parts.streams)
        list(train(parts.config, *how, lambda: {}))
    finally:
        parts.close()
    del parts, how
    gc.collect()
    torch.cuda.empty_cache()
    return {name: median(seconds[3:]) for name, seconds in phases.items()}


# ---- many runs -----------------------------------------------------------------------------------------


def take(model: str, jobs: list[tuple[str, int]], at_once: int, steps: int, seconds: float) -> list[Found]:
    """These runs in so many processes, each of which takes the next one; what they found until time was over."""
    some, end = [f"{precision}:{seed}" for precision, seed in jobs], time.time() + seconds
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for i in range(min(at_once, len(jobs))):
            flags = ["--model", model, "--steps", str(steps), "--claims", folder, "--runs", *some]
            with (Path(folder) / f"{i}.txt").open("w") as log:
                how = {
                    "cwd": ROOT,
                    "stdout": log,
                    "stderr": subprocess.STDOUT,
                    "env": {**os.environ, "OMP_NUM_THREADS": "1"},
                }
                command = [sys.executable, "-m", "benchmarks.rounding_gpu", *flags]
                started.append(subprocess.Popen(command, **how))  # type: ignore[call-overload]
        while time.time() < end and any(process.poll() is None for process in started):
            time.sleep(0.2)
        for process in started:
            process.kill()
        codes, texts = (
            [p.wait() for p in started],
            [(Path(folder) / f"{i}.txt").read_text() for i in range(len(started))],
        )
    for code, text in zip(codes, texts, strict=True):
        if code > 0:
            print(text[-3000:], flush=True)
    return [run for text in texts for run in heard(text)]


def claim(folder: Path | None, run: str) -> bool:
    """Is a run left to this process? Whoever makes its file first takes it."""
    try:
        if folder is not None:
            (folder / run.replace(":", "-")).touch(exist_ok=False)
        return True
    except FileExistsError:
        return False


def paired(
    runs: list[Found], precision: str, at: list[str], than: str = "float32", what: str = "right"
) -> tuple[int, float, float, float]:
    """Seeds, mean in %, and the difference from float32 in points with half of its interval, after these samples."""
    means = {
        (run["precision"], (run["seed"], run.get("problems", EARLIER))): sum(run[what][n] for n in at) / len(at)
        for run in runs
        if all(samples in run.get(what, {}) for samples in at)
    }
    seeds = [seed for name, seed in means if name == precision and (than, seed) in means]
    values = [means[precision, seed] for seed in seeds]
    gaps = [value - means[than, seed] for value, seed in zip(values, seeds, strict=True)]
    return len(seeds), sum(values) / max(1, len(seeds)), *(mean_and_half_width(gaps) if gaps else (0.0, float("nan")))


def evaluations(steps: int) -> list[str]:
    each = SETTINGS["prompts"] * SETTINGS["samples"]
    return [str(each * step) for step in range(EVERY, steps + 1, EVERY)]


def closing(found: dict[str, Any], steps: int, what: str = "right") -> int:
    runs, seconds, at = found["runs"], found["seconds"], evaluations(steps)
    rows, every = [], {}
    for precision in PRECISIONS:
        count, *_ = every[precision] = paired(runs, precision, at, what=what)
        cells = [every[precision], *(paired(runs, precision, [samples], what=what) for samples in at)]
        rows.append([precision, str(count), *(f"{mean:.1f} ({gap:+.1f} ± {half:.1f})" for _, mean, gap, half in cells)])
        rows[-1] += [f"{1000 * seconds[precision][name]:.0f}" if precision in seconds else "" for name in PHASES]
    show(["precision", "seeds", "mean, % (less float32's)", *(f"{int(n):,}" for n in at), *PHASES.values()], rows)
    kept = [name for name in FASTEST_FIRST if every[name][2] - every[name][3] > -LOSS]
    factor = seconds["float32"]["update"] / seconds["bfloat16"]["update"] if seconds else None
    differences = {name: {"seeds": n, "gap": gap, "half": half} for name, (n, _, gap, half) in every.items() if n > 1}
    more = {"choice": kept[0] if kept else "float32", "factor": factor, "seconds": seconds, "differences": differences}
    value, ok = every[kept[0]][2] if kept else None, bool(kept) and factor is not None and factor <= FACTOR
    return close("rounding_gpu", value, None, -LOSS, ok, **more)[1]


PHASES = {"generate": "generate, ms", "update": "update, ms"}


def timed(model: str, more: dict[str, Any]) -> dict[str, dict[str, float]]:
    seconds = {}
    for precision in ("bfloat16", "float16", "mixed", "float32"):
        seconds[precision] = update_seconds(model, precision, more)
        print(precision, seconds[precision], flush=True)
    return seconds


def smoke() -> int:
    more = {"prompts": 2, "samples": 2, "eval_every": 1, "eval_prompts": 4, "max_tokens": 4, "policy.device": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), SMOKE)
        learn(model, "mixed", 0, 2, more)
        seconds = update_seconds(model, "float32", more | {"steps": 4})
    runs = [
        {"precision": name, "seed": seed, "right": dict.fromkeys(evaluations(STEPS), 40.0 + seed)}
        for name in PRECISIONS
        for seed in range(3)
    ]
    closing({"runs": runs, "seconds": {}}, STEPS)
    return close("rounding_gpu", None, None, -LOSS, True, smoke=True, seconds=seconds)[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(120, 136)))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS[:5]))
    parser.add_argument("--side-by-side", type=int, default=8, help="processes on the GPU at once")
    parser.add_argument("--seconds", type=float, default=330.0, help="for the runs; then they are ended")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path("rounding.json"))
    parser.add_argument("--model", default="", help="a folder; SmolLM2 where it is missing")
    parser.add_argument("--go-on", type=Path, help="runs of an earlier call, which are not made again")
    parser.add_argument("--draw", type=Path, help="only the tables of an earlier call")
    parser.add_argument("--time", type=Path, help="only the seconds of an update; they are written here")
    parser.add_argument("--also", action="store_true", help="with --draw: the accuracy in training, instead")
    parser.add_argument("--runs", nargs="+", help="precision:seed …, one after the other in this process")
    parser.add_argument("--claims", type=Path, help="with --runs: only those that no other process has begun")
    parser.add_argument("--smoke", action="store_true", help="two steps of a tiny model on the CPU")
    options = options_with_gpu(parser, argv, "draw", "runs")
    if options.smoke:
        return smoke()
    if options.draw:
        return closing(json.loads(options.draw.read_text()), options.steps, "training" if options.also else "right")
    if options.runs:
        for run in options.runs:
            precision, seed = run.split(":")
            if claim(options.claims, run):
                learn(options.model, precision, int(seed), options.steps, SMALL)
        return 0
    found: dict[str, Any] = {"runs": [], "seconds": {}}
    if options.go_on:
        found = json.loads(options.go_on.read_text())
    if not found["seconds"]:
        with tempfile.TemporaryDirectory() as folder:
            found["seconds"] = timed(random_model(Path(folder), GPU_SHAPES["135m"], "cuda"), {})
    if options.time:
        options.time.write_text(json.dumps(found))
        return 0
    model, last = options.model or smollm2(), evaluations(options.steps)[-1]
    done = {(run["precision"], run["seed"]) for run in found["runs"] if last in run["right"]}
    every = [(precision, seed) for seed in options.seeds for precision in options.precisions]  # whole pairs first
    jobs = [job for job in every if job not in done]
    found["runs"] += take(model, jobs, options.side_by_side, options.steps, options.seconds)
    found |= {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
    options.out.write_text(json.dumps(found))
    return closing(found, options.steps)


if __name__ == "__main__":
    sys.exit(main())

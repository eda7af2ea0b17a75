"""Sampling ahead on one GPU: tokens per second of whole steps, and what stale policies cost in learning.

    python -m benchmarks.ahead_gpu [--steps 20] [--learn 60] [--seeds 2] [--smoke]

**Speed**: the loop itself (generate, reward, update) on SmolLM2-135M's shape with random weights, 32 prompts × 16
responses per step, lengths log-normal with mean 256 and σ = 1, at most 2,048, each with its own fixed
length. `--ahead 4` takes `--steps` steps, including the slow first step (which waits for its longest response) and the
responses that are unfinished at the end; `--ahead 0` takes six equal steps. Both come after a run that compiles and
captures. `value` is tokens per second with `--ahead 4`, the peer that with 0, and the target is 1.8 times.

**Learning** (`--learn STEPS`): SmolLM2-135M-Instruct on sums, as in `benchmarks.learn`, with `--ahead` 0, 1 and 4, and
with 4 by a clip alone: held-out accuracy after the same number of responses, over the seeds.
`--smoke` runs tiny models on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascent.build.assemble import assemble
from ascent.core.loop import train
from ascent.core.types import Prompts
from ascent.settings import configure
from benchmarks import learn
from benchmarks.common import NoRecords, close, options_with_gpu, show
from benchmarks.peers.fixed_prompts import FixedPrompts
from benchmarks.peers.models import GPU_SHAPES, SMOKE, random_model, random_prompts, smollm2
from benchmarks.peers.steps import NEVER
from benchmarks.ragged_gpu import lengths_of

FASTER = 1.8
GROUPS, SAMPLES, MEAN, LIMIT = 32, 16, 256, 2048
SIDES: dict[str, dict[str, Any]] = {
    "ahead 0": {"ahead": 0},
    "ahead 1": {"ahead": 1},
    "ahead 4": {"ahead": 4},
    "ahead 4, clip alone": {"ahead": 4, "correction": "no-correction"},
}


class Watch(NoRecords):
    """Records that keep how long each phase of each step took."""

    def __init__(self) -> None:
        self.tokens, self.phases, self.ages = 0, dict.fromkeys(("generate", "reward", "update"), 0.0), [0.0]

    def step(self, step: int, metrics: dict[str, Any], *_: Any) -> None:
        self.tokens += int(metrics["num_tokens"])
        self.ages.append(metrics.get("sampling/lag", 0.0))
        for name in self.phases:
            self.phases[name] += metrics[f"time/{name}"]


def speed(steps: int, smoke: bool) -> dict[str, dict[str, Any]]:
    """Tokens per second of so many steps, by how far sampling may run ahead."""
    groups, samples, mean, limit = (2, 4, 4, 32) if smoke else (GROUPS, SAMPLES, MEAN, LIMIT)
    device = "cpu" if smoke else "cuda"
    shape = SMOKE if smoke else GPU_SHAPES["135m"] | {"max_position_embeddings": 8192}
    words = random_prompts(groups * steps, 60, shape["vocab_size"])
    settings = {"policy.device": device, "algorithm": "grpo", "prompts": groups, "samples": samples, "lr": 1e-6}
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), shape, device)
        settings |= {"model": model, "max_tokens": limit, "kl": "no-kl", "reference": "no-reference"}
        settings |= {"correction": "truncated", "old_logp": "learner"}
        parts = assemble(configure(FixedPrompts(words=tuple(words)), settings))
    parts.policy.stop_token_ids = NEVER
    table = lengths_of(len(words) * samples, mean, limit).view(-1, samples)

    def limits(prompts: Prompts, count: int, most: int) -> Tensor:
        return table[prompts.problem, :count].flatten().clamp(max=most)

    parts.engine.length_limits = limits  # type: ignore[attr-defined]
    found: dict[str, dict[str, Any]] = {}
    for ahead, count in ((0, 1), (4, 5), (0, min(steps, 6)), (4, steps)):
        watch, config = Watch(), replace(parts.config, ahead=ahead, steps=count)
        begin = time.perf_counter()
        list(train(config, parts.task, parts.engine, parts.learner, watch, parts.streams, dict))
        seconds = time.perf_counter() - begin
        line = {"ahead": ahead, "seconds": seconds, "tokens": watch.tokens, "oldest": max(watch.ages), **watch.phases}
        found[str(ahead)] = line | {"tokens_per_second": watch.tokens / seconds}
        print(f"ahead {ahead}, {count} steps: {found[str(ahead)]}", flush=True)
    parts.close()
    return found


def learning(steps: int, seeds: int, more: dict[str, Any], model: str) -> dict[str, list[list[dict[str, float]]]]:
    """By side, the learning curve of each seed."""
    curves: dict[str, list[list[dict[str, float]]]] = {}
    for seed in range(seeds):
        for side, own in SIDES.items():
            print(f"--- {side}, seed {seed}", flush=True)
            points = learn.ours(model, float("inf"), None, {"seed": seed, "steps": steps, **own, **more})
            curves.setdefault(side, []).append(points)
            gc.collect()
    return curves


def table_of(curves: dict[str, list[list[dict[str, float]]]]) -> tuple[list[str], list[list[str]]]:
    """Strict accuracy by samples, the mean over seeds, and the seconds of training."""
    first = next(iter(curves.values()))[0]
    rows = []
    for side, runs in curves.items():
        means = [sum(run[i]["strict"] for run in runs) / len(runs) for i in range(len(first))]
        seconds = sum(run[-1]["seconds"] for run in runs) / len(runs)
        rows.append([side, *(f"{mean:.1%}" for mean in means), f"{seconds:.1f} s"])
    return ["", *(f"{int(point['samples']):,}" for point in first), "training"], rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learn", type=int, default=0, help="steps of learning; 0: only speed")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU, only to see that they run")
    options = options_with_gpu(parser, argv)
    found = speed(5 if options.smoke else options.steps, options.smoke)
    rates = [found[ahead]["tokens_per_second"] for ahead in ("0", "4")]
    more: dict[str, Any] = {"found": found, "torch": torch.__version__}
    if options.smoke or options.learn:
        small = {
            "prompts": 2,
            "samples": 2,
            "eval_every": 1,
            "eval_prompts": 4,
            "max_tokens": 4,
            "policy.device": "cpu",
        }
        with tempfile.TemporaryDirectory() as folder:
            model = random_model(Path(folder), SMOKE) if options.smoke else smollm2()
            own = small if options.smoke else {"eval_every": max(1, options.learn // 4)}
            curves = learning(2 if options.smoke else options.learn, 1 if options.smoke else options.seeds, own, model)
        show(*table_of(curves))
        more["curves"] = curves
    show(["ahead", "tokens/s"], [["0", f"{rates[0]:,.0f}"], ["4", f"{rates[1]:,.0f}"]])
    if options.smoke:
        return close("ahead_gpu", None, None, FASTER, True, smoke=True, torch=torch.__version__)[1]
    more["device"] = torch.cuda.get_device_name()
    return close("ahead_gpu", rates[1], rates[0], FASTER, rates[1] >= FASTER * rates[0], **more)[1]


if __name__ == "__main__":
    sys.exit(main())

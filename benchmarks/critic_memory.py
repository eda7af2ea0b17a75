"""One PPO update of SmolLM2-135M on the CPU: a critic with its own backbone, against one on the policy's backbone.

    python -m benchmarks.critic_memory [--repeats 1] [--smoke]

The update computes values and advantages, then updates the policy and the critic, in float32 with Adam, on 4 prompts ×
4 samples × 64 tokens after prompts of 32. Each side runs in its own process. A small update comes first, so that every
optimizer state is allocated.

`value` is the peak resident memory with the shared backbone as a share of the memory with a separate one (so the
peer is 1). It must be below 1. The JSON line has bytes and seconds of both. `--smoke` runs a tiny random model in
seconds, without measuring.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ascent.build.model_verification import verify_model
from ascent.core.algorithms import ALGORITHMS
from ascent.core.critics import OwnCritic, SharedCritic
from ascent.core.types import Batch
from ascent.models import CausalLM
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from benchmarks.common import GIVEN_BACK, ROOT, close, random_batch, show
from benchmarks.peers import THREADS
from benchmarks.peers.models import SMOKE, random_model, smollm2

SHARE = 1.0
PROMPTS, SAMPLES, PROMPT_TOKENS, TOKENS = 4, 4, 32, 64
SIDES = {"own": OwnCritic(lr=1e-5), "shared": SharedCritic()}


def measure(side: str, model: str, tokens: int) -> dict[str, Any]:
    """Seconds of a whole update on one side, and the peak memory of this process, in bytes."""
    torch.set_num_threads(THREADS)
    algorithm = replace(ALGORITHMS["ppo"], critic=SIDES[side])
    lm = CausalLM(model, dtype="float32", device="cpu").load()
    verify_model(lm, PROMPT_TOKENS + tokens)
    critic = LanguageCritic(lm, algorithm.critic.shared)
    outputs, update = algorithm.outputs, algorithm.critic.update
    learner = LanguageLearner(lm, algorithm.update, False, outputs, critic=critic, critic_update=update)

    def whole(batch: Batch) -> float:
        begin = time.perf_counter()
        batch = batch.add(**learner.score(batch, algorithm.needs | {"logp_old"}))
        batch, state = algorithm.compute_advantages(batch, algorithm.initial_state())
        batch = batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0))
        learner.step(batch, algorithm.objective, algorithm.update)
        algorithm.critic(learner, batch)
        return time.perf_counter() - begin

    whole(random_batch(lm.vocab_size, 1, SAMPLES, PROMPT_TOKENS, 2))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = whole(random_batch(lm.vocab_size, PROMPTS, SAMPLES, PROMPT_TOKENS, tokens))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "before": before * 1024, "peak": peak * 1024}


def in_process(side: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.critic_memory", "--side", side]
    env = os.environ | GIVEN_BACK
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="a tiny model in this process, only to see that it runs")
    parser.add_argument("--side", choices=SIDES, help="measure only this side, in this process")
    options = parser.parse_args(argv)
    if options.side:
        print(json.dumps(measure(options.side, smollm2(), TOKENS)))
        return 0
    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            model = random_model(Path(folder), SMOKE)
            found = {side: [measure(side, model, 4)] for side in SIDES}
        return close("critic_memory", None, None, SHARE, True, smoke=True, seconds=found)[1]
    found = {side: [in_process(side) for _ in range(options.repeats)] for side in SIDES}
    middle = {(s, k): median(m[k] for m in found[s]) for s in SIDES for k in ("before", "peak", "seconds")}
    rows = [
        [s, f"{middle[s, 'seconds']:.1f} s", *(f"{middle[s, k] / 2**30:.2f} GiB" for k in ("before", "peak"))]
        for s in SIDES
    ]
    show(["backbone", "one update", "before it", "peak"], rows)
    value = middle["shared", "peak"] / middle["own", "peak"]
    return close("critic_memory", value, 1.0, SHARE, value <= SHARE, sides=found)[1]


if __name__ == "__main__":
    sys.exit(main())

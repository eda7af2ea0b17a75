"""PPO's update on one GPU, with its own critic and with a shared one, against GRPO's on the same tokens.

    python -m benchmarks.critic_gpu [--shape 135m|1.5b] [--repeats 5] [--smoke]

16 prompts of 60 tokens × 8 samples of 256 tokens, random parameters in bfloat16 with float32 master weights,
micro-batches of the learner's choice. An update is the loop's phase `update`: the policy's step and, with a separate
critic, the critic's step. The loss of a shared critic is part of the policy's objective. Each side has one warm-up
update, and its values are scored before (their seconds are shown, but not counted).

`value` is the update with a separate critic over GRPO's (the peer, 1): at most 2.2. With a shared critic the same
ratio may be at most 1.3. The JSON line has every second. `--smoke` runs a tiny model on the CPU, without measuring.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ascent.build.model_verification import verify_model
from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.critics import OwnCritic, SharedCritic
from ascent.core.types import Batch
from ascent.models import CausalLM, LanguageModel
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from benchmarks.common import close, options_with_gpu, random_batch, show
from benchmarks.peers.models import GPU_SHAPES, SMOKE, random_model

OWN, SHARED = 2.2, 1.3
PROMPTS, SAMPLES, PROMPT_TOKENS, TOKENS = 16, 8, 60, 256
ADAM = replace(ALGORITHMS["ppo"].update, lr=1e-6, max_norm=1.0)
SIDES = {
    "grpo": replace(ALGORITHMS["grpo"], update=ADAM),
    "ppo, shared critic": replace(ALGORITHMS["ppo"], critic=SharedCritic(), update=ADAM),
    "ppo, own critic": replace(ALGORITHMS["ppo"], critic=OwnCritic(lr=1e-5, max_norm=1.0), update=ADAM),
}


def measure(lm: LanguageModel, algorithm: Algorithm, batch: Batch, repeats: int) -> dict[str, Any]:
    """Seconds of scoring and of updates, and the most memory that they took."""
    choice, on_gpu = algorithm.critic, lm.device.type == "cuda"
    critic = LanguageCritic(lm, choice.shared) if choice.enabled else None
    learner = LanguageLearner(
        lm, algorithm.update, False, algorithm.outputs, critic=critic, critic_update=choice.update
    )
    needs = frozenset({"logp_old"}) | (algorithm.needs & {"value"})
    found: dict[str, Any] = {"score": [], "update": [], "value_loss": []}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        scored = batch.add(**learner.score(batch, needs))
        found["score"].append(time.perf_counter() - begin)
        ready, state = algorithm.compute_advantages(scored.add(logp_ref=scored.logp_old), algorithm.initial_state())
        ready = ready.add(weight=algorithm.weights(ready), **algorithm.scalars(state, 0.5))
        begin = time.perf_counter()
        stepped = learner.step(ready, algorithm.objective, algorithm.update)
        sums = stepped.sums | choice(learner, ready)  # on a GPU both wait for their numbers
        found["update"].append(time.perf_counter() - begin)
        found["value_loss"].append(float(sums.get("value/loss", 0.0)) / ready.tokens)
    found["peak"] = torch.cuda.max_memory_allocated() if on_gpu else 0
    found["micro_tokens"] = learner.plan.tokens
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(GPU_SHAPES), default="1.5b")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, only to see that it runs")
    options = options_with_gpu(parser, argv)
    device, shape = ("cpu", SMOKE) if options.smoke else ("cuda", GPU_SHAPES[options.shape])
    prompts, tokens, repeats = (2, 4, 1) if options.smoke else (PROMPTS, TOKENS, options.repeats)
    with tempfile.TemporaryDirectory() as folder:
        lm = CausalLM(random_model(Path(folder), shape, device), device=device).load()
    verify_model(lm, PROMPT_TOKENS + tokens)
    batch, sides = random_batch(lm.vocab_size, prompts, SAMPLES, PROMPT_TOKENS, tokens), {}
    for name, algorithm in SIDES.items():
        sides[name] = measure(lm, algorithm, batch, repeats)
        gc.collect()
        torch.cuda.empty_cache()
    middle = {name: {what: median(side[what][1:]) for what in ("score", "update")} for name, side in sides.items()}
    ratio = {name: middle[name]["update"] / middle["grpo"]["update"] for name in SIDES}
    rows = [
        [
            name,
            f"{m['score']:.3f} s",
            f"{m['update']:.3f} s",
            f"{ratio[name]:.2f}",
            f"{sides[name]['peak'] / 2**30:.1f}",
        ]
        for name, m in middle.items()
    ]
    show(["side", "score", "an update", "over GRPO's", "peak GiB"], rows)
    more = {"shape": options.shape, "sides": sides, "ratios": ratio, "torch": torch.__version__}
    if options.smoke:
        return close("critic_gpu", None, None, OWN, True, smoke=True, **more)[1]
    own, shared = ratio["ppo, own critic"], ratio["ppo, shared critic"]
    more |= {"device": torch.cuda.get_device_name(), "shared_target": SHARED}
    return close("critic_gpu", own, 1.0, OWN, own <= OWN and shared <= SHARED, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

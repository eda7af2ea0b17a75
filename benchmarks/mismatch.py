"""What rounding between sampler and learner does to the first update in bfloat16: GSPO, GRPO and CISPO.

    python -m benchmarks.mismatch [--shape 135m 1.5b] [--model FOLDER] [--smoke]

A run in bfloat16 decides before step 0 whose log-probs logp_old is. This samples one batch, computes its first update
with logp_old as it was resolved, with the learner's and with the sampler's, and compares the gradients, all in
bfloat16. On a GPU the model has one of the two shapes (or is the one in FOLDER), with 256 new tokens per response. On
a CPU it is a tiny model whose matmuls are rounded to bfloat16. Weights, prompts and rewards are random, and no
response ends early.

`value` is the largest ‖g(as resolved) − g(learner)‖ / ‖g(learner)‖ of the three. It must be at most 1 %, and no token
may be clipped. `peer` is the same with the sampler's log-probs. `clipped_minibatch` is the share of tokens that are
clipped in the first of four mini-batches, whose matmuls may be rounded differently from those of the whole batch.
`--smoke` samples less, on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascent.build.assemble import RunParts, assemble
from ascent.core.correction import mismatch
from ascent.core.metric_names import MISMATCH
from ascent.core.types import Batch, to_batch
from ascent.settings import configure
from benchmarks.common import close, show
from benchmarks.peers.fixed_prompts import FixedPrompts
from benchmarks.peers.models import GPU_SHAPES, SMOKE, random_model, random_prompts
from benchmarks.peers.steps import NEVER

MOST = 0.01
ROWS = ("gspo", "grpo", "cispo")
ON_CPU = SMOKE | {
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "initializer_range": 0.12,
}
"""Weights that make tokens far from equally likely: so the gap is about that of a real model."""
SIZES = {"135m": (32, 16, 256), "1.5b": (16, 8, 256), "cpu": (4, 8, 32), "smoke": (2, 2, 4)}
"""Prompts, samples and tokens."""


def drawn(parts: RunParts) -> Batch:
    """A batch as the first step draws it, with random rewards."""
    config, learner = parts.config, parts.learner
    parts.engine.load(learner.params(), version=0)
    prompts = parts.task.draw(config.prompts, parts.streams.prompts)
    rollouts = parts.engine.generate(prompts, config.samples)
    shape, rng = rollouts.mask.shape[:2], torch.Generator().manual_seed(0)
    reward, valid = torch.randn(*shape, 1, generator=rng), torch.ones(shape, dtype=torch.bool)
    batch = to_batch(rollouts, reward=reward, valid=valid, logp_old=rollouts.logp_sampler)
    return batch.add(**learner.score(batch, config.algorithm.needs))


def first_update(parts: RunParts, batch: Batch, logp_old: Tensor | None) -> tuple[list[Tensor], float]:
    """The gradient of the first update with this logp_old (None: the update's own), and the share of clipped tokens."""
    algorithm = parts.config.algorithm
    batch, state = algorithm.compute_advantages(batch.add(logp_old=logp_old), algorithm.initial_state())
    batch = batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0))
    sums = parts.learner.gradient(batch, algorithm.objective).sums
    clipped = sums["clip_ratio/low_mean"] + sums["clip_ratio/high_mean"]
    return [p.grad.clone() for p in parts.learner.trainable() if p.grad is not None], float(clipped) / batch.tokens


def apart(gradient: list[Tensor], other: list[Tensor]) -> float:
    difference = torch.stack(torch._foreach_norm(torch._foreach_sub(gradient, other))).norm()
    return float(difference / torch.stack(torch._foreach_norm(other)).norm())


def measure(name: str, model: str, size: tuple[int, int, int], vocab: int, device: str) -> dict[str, Any]:
    prompts, samples, tokens = size
    settings = {"model": model, "algorithm": name, "policy.dtype": "bfloat16", "policy.device": device}
    shape = {"prompts": prompts, "samples": samples, "max_tokens": tokens, "max_prompt": 64}
    parts = assemble(configure(FixedPrompts(words=tuple(random_prompts(prompts, 16, vocab))), settings | shape))
    try:
        parts.policy.stop_token_ids = NEVER
        parts.resolve_old_logp()
        batch = drawn(parts)
        score = parts.learner.score(batch, frozenset({"logp_old"}))["logp_old"]
        by_learner, _ = first_update(parts, batch, score)
        by_sampler, noise = first_update(parts, batch, batch.logp_sampler)
        own = parts.config.old_logp == "learner"
        resolved, clipped = first_update(parts, batch, None if own else batch.logp_sampler)
        quarter = slice(0, max(1, prompts // 4))
        _, repacked = first_update(parts, batch.select(quarter), score[quarter])
        return {
            "old_logp": parts.config.old_logp,
            "gap": float(mismatch(score, batch)[MISMATCH]),
            "clipped": clipped,
            "difference": apart(resolved, by_learner),
            "clipped_sampler": noise,
            "difference_sampler": apart(by_sampler, by_learner),
            "clipped_minibatch": repacked,
        }
    finally:
        parts.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=list(GPU_SHAPES), default=["135m"])
    parser.add_argument("--model", help="a folder with a model, in place of random weights")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, only to see that it runs")
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() and not options.smoke else "cpu"
    shapes = options.shape if device == "cuda" else ["smoke" if options.smoke else "cpu"]
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # a CPU without bfloat16 matmuls
        for shape in shapes:
            own = GPU_SHAPES.get(shape, ON_CPU) | {"max_position_embeddings": 512, "kind": "Llama"}
            own |= {"num_hidden_layers": 1, "vocab_size": 64} if shape == "smoke" else {}
            model = options.model or random_model(Path(folder) / shape, own, device)
            for name in ROWS:
                found[f"{name} {shape}"] = measure(name, model, SIZES[shape], own["vocab_size"], device)
    shares = ("clipped", "difference", "clipped_sampler", "difference_sampler", "clipped_minibatch")
    head = ["", "logp_old", "gap", "clipped", "gradient", "sampler's: clipped", "gradient", "mini-batch: clipped"]
    rows = [[n, m["old_logp"], f"{m['gap']:.4f}", *(f"{m[key]:.2%}" for key in shares)] for n, m in found.items()]
    show(head, rows)
    worst, noisy = (max(m[key] for m in found.values()) for key in ("difference", "difference_sampler"))
    ok = worst <= MOST and not any(m["clipped"] for m in found.values())
    return close("mismatch", worst, noisy, MOST, ok, device=device, smoke=options.smoke, rows=found)[1]


if __name__ == "__main__":
    sys.exit(main())

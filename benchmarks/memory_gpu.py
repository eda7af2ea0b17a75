"""Peak memory of one update of a 1.5B model on one GPU: the chunked head against all logits at once.

    python -m benchmarks.memory_gpu [--smoke]

One update (forward, backward, AdamW) of a model of Qwen2.5-1.5B's shape with random parameters in bfloat16 and
float32 masters, on one micro-batch of 16 prompts of 60 tokens × 8 samples × 256 tokens, which is 32,768 loss tokens,
with gradient checkpointing. Ours is the normal learner. The peer is memory_cpu's `Materialised`: the same learner,
but its log-probs come from a log-softmax over all logits, [32,768 × 151,936], through autograd. A small update comes
first, so that the optimizer state is allocated.

`value` is torch's peak of allocated bytes of ours as a share of the peer's (so the peer is 1). The target is 0.4.
The JSON line has the seconds of both updates. Both sides must compute the same: entropy and gradient norm are
compared. `--smoke` runs a tiny model on the CPU, without measuring.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ascent.build.model_verification import verify_model
from ascent.models import CausalLM
from benchmarks.common import close, options_with_gpu, show
from benchmarks.memory_cpu import ALGORITHM, SIDES, batch_of
from benchmarks.peers.models import GPU_SHAPES, SMOKE, random_model

SHARE, SAME = 0.4, 2e-2
PROMPTS, TOKENS = 16, 256


def measure(side: str, model: str, device: str, prompts: int, tokens: int) -> dict[str, Any]:
    """One update on one side: bytes before it and at its peak, seconds, and what it computed."""
    lm = CausalLM(model, device=device, checkpointing=True).load()
    verify_model(lm, 1024)
    learner = SIDES[side](lm, ALGORITHM.update, False, ALGORITHM.outputs, micro_batch=2**40, checkpointing=True)
    learner.step(batch_of(lm, 1, 2), ALGORITHM.objective, ALGORITHM.update)
    batch, on_gpu = batch_of(lm, prompts, tokens), device == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    begin = time.perf_counter()
    stepped = learner.step(batch, ALGORITHM.objective, ALGORITHM.update)
    entropy = float(stepped.sums["entropy"]) / batch.tokens
    return {
        "before": before,
        "peak": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "seconds": time.perf_counter() - begin,
        "grad_norm": float(stepped.metrics["grad_norm"]),
        "entropy": entropy,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, only to see that it runs")
    options = options_with_gpu(parser, argv)
    device = "cpu" if options.smoke else "cuda"
    shape = SMOKE if options.smoke else GPU_SHAPES["1.5b"] | {"kind": "Llama"}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), shape, device)
        for side in SIDES:
            found[side] = measure(side, model, device, *((2, 4) if options.smoke else (PROMPTS, TOKENS)))
            gc.collect()
            torch.cuda.empty_cache()
    ours, peer = found["chunked"], found["materialised"]
    gap = max(abs(ours[k] / peer[k] - 1) for k in ("grad_norm", "entropy"))
    print(f"gradient norm and entropy of the two agree to {gap:.1e}")
    more = {"sides": found, "gap": gap, "loss_tokens": PROMPTS * 8 * TOKENS, "torch": torch.__version__}
    if options.smoke:
        return close("memory_gpu", None, None, SHARE, gap < SAME, smoke=True, **more)[1]
    rows = [
        [side, *(f"{f[when] / 2**30:.1f} GiB" for when in ("before", "peak")), f"{f['seconds']:.2f} s"]
        for side, f in found.items()
    ]
    show(["head", "before the update", "peak", "update"], rows)
    value = ours["peak"] / peer["peak"]
    more["device"] = torch.cuda.get_device_name()
    return close("memory_gpu", value, 1.0, SHARE, gap < SAME and value <= SHARE, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

"""Peak memory of one update of SmolLM2-135M: the chunked head against all logits at once.

    python -m benchmarks.memory_cpu [--repeats 1] [--smoke]

One update (forward, backward, AdamW) in float32 on one micro-batch of 8 prompts × 8 samples × 128 tokens, which is
8,192 loss tokens, with gradient checkpointing. Ours is the normal learner. The peer is `Materialised` below: the
same learner, but its log-probs come from a log-softmax over all logits, [8,192 × 49,152], through autograd. A small
update comes first, so that the optimizer state is allocated. Each side runs in its own process.

`value` is the peak resident memory of ours (getrusage, the whole process) as a share of the peer's (so the peer is
1), from medians over the repeats. The target is 0.5. The JSON line has the bytes of both, at the peak and before the
update. Freed memory is given back at once on both sides: what allocators keep would count as resident. Both
must compute the same: objective and gradient norm are compared. `--smoke` runs a tiny random model in seconds, in one
process and without measuring.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ascent.build.model_verification import verify_model
from ascent.core.algorithms import ALGORITHMS
from ascent.core.types import Batch, Outputs
from ascent.models import CausalLM, LanguageModel
from ascent.models.lm_head import LMHead
from ascent.training.language_learner import LanguageLearner
from ascent.training.packing import scatter_tokens, targets
from benchmarks.common import GIVEN_BACK, ROOT, close, show
from benchmarks.peers import THREADS
from benchmarks.peers.models import SMOKE, random_model, smollm2

SHARE = 0.5
PROMPTS, SAMPLES, PROMPT_TOKENS, TOKENS = 8, 8, 32, 128
SAME = 1e-3
ALGORITHM = ALGORITHMS["dr-grpo"]


class Materialised(LanguageLearner):
    """The same learner with the logits of every loss token at once; with as little memory as autograd allows."""

    def evaluate(self, batch: Batch) -> Outputs:
        target = targets(batch, self.lm.device)
        logp_all = torch.log_softmax(self._forward(batch, LMHead.logits) / batch.temperature, -1)
        with torch.no_grad():
            entropy = torch.cat([-(part.exp() * part).sum(-1) for part in logp_all.split(512)])
        logp = logp_all.gather(-1, target[:, None])[:, 0]
        return Outputs(scatter_tokens(logp, batch.mask), scatter_tokens(entropy, batch.mask))


SIDES = {"chunked": LanguageLearner, "materialised": Materialised}


def batch_of(lm: LanguageModel, prompts: int, tokens: int) -> Batch:
    """Random tokens with random advantages."""
    rng = torch.Generator().manual_seed(0)
    shape = (prompts, SAMPLES, tokens)
    batch = Batch(
        prompt=torch.randint(lm.vocab_size, (prompts, PROMPT_TOKENS), generator=rng),
        response=torch.randint(lm.vocab_size, shape, generator=rng),
        mask=torch.ones(shape, dtype=torch.bool),
        logp_sampler=torch.zeros(shape),
        limit=tokens,
        truncated=torch.zeros(shape[:2], dtype=torch.bool),
        reward=torch.zeros(*shape[:2], 1),
        valid=torch.ones(shape[:2], dtype=torch.bool),
        advantage=torch.randn(*shape[:2], 1, generator=rng),
    )
    return batch.add(weight=ALGORITHM.weights(batch))


def measure(side: str, model: str, tokens: int) -> dict[str, Any]:
    """One update on one side, with the memory of this process before it and at its peak, in bytes."""
    torch.set_num_threads(THREADS)
    lm = CausalLM(model, dtype="float32", device="cpu", checkpointing=True).load()
    verify_model(lm, PROMPT_TOKENS + tokens)
    learner = SIDES[side](lm, ALGORITHM.update, False, ALGORITHM.outputs, micro_batch=2**40, checkpointing=True)
    learner.step(batch_of(lm, 1, 2), ALGORITHM.objective, ALGORITHM.update)
    batch, before = batch_of(lm, PROMPTS, tokens), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stepped = learner.step(batch, ALGORITHM.objective, ALGORITHM.update)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    norm, entropy = float(stepped.metrics["grad_norm"]), float(stepped.sums["entropy"]) / batch.tokens
    return {"before": before * 1024, "peak": peak * 1024, "grad_norm": norm, "entropy": entropy}


def in_process(side: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.memory_cpu", "--side", side]
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
    else:
        found = {side: [] for side in SIDES}
        for _ in range(options.repeats):
            for side in SIDES:
                found[side].append(in_process(side))
    gap = max(abs(found["chunked"][0][k] / found["materialised"][0][k] - 1) for k in ("grad_norm", "entropy"))
    print(f"gradient norm and entropy of the two agree to {gap:.1e}")
    if options.smoke:
        return close("memory_cpu", None, None, SHARE, gap < SAME, smoke=True, gap=gap)[1]
    middle = {(side, when): median(m[when] for m in found[side]) for side in SIDES for when in ("before", "peak")}
    rows = [[s, *(f"{middle[s, when] / 2**30:.2f} GiB" for when in ("before", "peak"))] for s in SIDES]
    show(["head", "before the update", "peak"], rows)
    value = middle["chunked", "peak"] / middle["materialised", "peak"]
    more = {"bytes": found, "gap": gap, "loss_tokens": PROMPTS * SAMPLES * TOKENS}
    return close("memory_cpu", value, 1.0, SHARE, gap < SAME and value <= SHARE, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

"""A whole GRPO step of a tiny language model on two cores: Ascent against TRL.

    python -m benchmarks.step_cpu_tiny [--repeats 7] [--vocab 16384] [--smoke]

The model is random, of Llama's shape: 4 layers, width 256, 4 heads of 64, MLP 1024, vocabulary 16,384 with tied
embeddings. A step is 8 prompts of 16 tokens × 8 samples of 16 new tokens: generation, reward, loss, backward pass,
optimizer. Ascent's step is that of its loop on its own task, sampler and learner, including reward processes. The
peer's step is that of TRL 1.16's GRPOTrainer with its fastest settings for this work (benchmarks/peers/trl_step.py).
Both have the same prompts, the same number of tokens (no response may end early), float32, two threads, Dr. GRPO's
loss without KL, and fused AdamW with clipped gradients. Neither records anything.

Each runs in its own process. They take turns, after a warm-up step each that does not count. `value` is the median
of TRL's seconds divided by the median of Ascent's (the peer is 1); the target is 2. The JSON line has every single
measurement. `--smoke` runs a smaller model in seconds, without the peer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.peers.models import SMOKE, TINY, random_model, random_prompts
from benchmarks.peers.steps import Work, compare

SPEEDUP = 2.0
PROMPTS, SAMPLES, PROMPT_TOKENS, TOKENS = 8, 8, 16, 16


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--vocab", type=int, default=TINY["vocab_size"])
    parser.add_argument("--smoke", action="store_true", help="no peer, a smaller model, only to see that it runs")
    options = parser.parse_args(argv)
    shape = SMOKE if options.smoke else TINY | {"vocab_size": options.vocab}
    with tempfile.TemporaryDirectory() as folder:
        prompts = random_prompts(PROMPTS, PROMPT_TOKENS, shape["vocab_size"])
        work = Work(random_model(Path(folder), shape), prompts, SAMPLES, TOKENS)
        return compare("step_cpu_tiny", work, options.repeats, SPEEDUP, options.smoke)


if __name__ == "__main__":
    sys.exit(main())

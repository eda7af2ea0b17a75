"""A whole GRPO step of SmolLM2-135M in float32 on two cores: Ascent against TRL.

    python -m benchmarks.step_cpu_smollm2 [--repeats 3] [--smoke]

A step is 4 prompts × 4 samples × 64 new tokens. The prompts are short sums in the model's chat template, about 50
tokens each. Everything else is as in benchmarks/step_cpu_tiny.py; the target is 1.9. `--smoke` runs a tiny random
model in seconds, without the peer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.peers.models import SMOKE, random_model, random_prompts, smollm2, sums
from benchmarks.peers.steps import Work, compare

SPEEDUP = 1.9
PROMPTS, SAMPLES, TOKENS = 4, 4, 64


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="no peer, a tiny model, only to see that it runs")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            prompts = random_prompts(PROMPTS, 8, SMOKE["vocab_size"])
            work = Work(random_model(Path(folder), SMOKE), prompts, SAMPLES, 8)
        else:
            work = Work(smollm2(), sums(PROMPTS), SAMPLES, TOKENS)
        return compare("step_cpu_smollm2", work, options.repeats, SPEEDUP, options.smoke)


if __name__ == "__main__":
    sys.exit(main())

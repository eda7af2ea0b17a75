"""Cost of a step per token on one GPU with 64, 256 and 1,024 samples.

    python -m benchmarks.scaling_gpu [--repeats 3] [--smoke]

SmolLM2-135M's shape with random parameters in bfloat16, prompts of 60 tokens, groups of 16, 256 new tokens. Whole
steps are measured as in step_gpu, each size after a warm-up step. `value` is the largest number
of seconds per generated token, as a share of that with 64 samples (the peer, 1). The target is 1: never more.
`--smoke` runs a tiny model on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.common import close, options_with_gpu, show
from benchmarks.peers import in_turns, middle
from benchmarks.peers.models import GPU_SHAPES, SMOKE, random_model, random_prompts
from benchmarks.peers.steps import Ours, Work

GROUP, PROMPT_TOKENS, TOKENS = 16, 60, 256
SIZES = (64, 256, 1024)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, only to see that it runs")
    options = options_with_gpu(parser, argv)
    device = "cpu" if options.smoke else "cuda"
    shape, sizes, tokens = (SMOKE, (16, 32), 4) if options.smoke else (GPU_SHAPES["135m"], SIZES, TOKENS)
    seconds: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), shape, device)
        for size in sizes:
            prompts = random_prompts(size // GROUP, PROMPT_TOKENS, shape["vocab_size"])
            side = Ours(Work(model, prompts, GROUP, tokens, device))
            try:
                seconds[size] = middle(in_turns({f"{size} samples": side}, options.repeats)[f"{size} samples"])
            finally:
                side.close()
    each = {size: s / (size * tokens) for size, s in seconds.items()}
    rows = [[str(n), f"{seconds[n]:.3f} s", f"{1e6 * each[n]:.2f} µs", f"{1 / each[n]:,.0f}"] for n in sizes]
    show(["samples", "a step", "a token", "tokens/s"], rows)
    value = max(each[n] for n in sizes[1:]) / each[sizes[0]]
    more = {"seconds": seconds, "per_token": each, "torch": torch.__version__}
    if options.smoke:
        return close("scaling_gpu", None, None, 1.0, True, smoke=True, **more)[1]
    more["device"] = torch.cuda.get_device_name()
    return close("scaling_gpu", value, 1.0, 1.0, value <= 1.0, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

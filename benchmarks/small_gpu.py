"""A small update on one GPU, as captured graphs, against the same update launched kernel by kernel.

    python -m benchmarks.small_gpu [--repeats 20] [--smoke]

SmolLM2-135M's shape with random parameters in bfloat16 and float32 master weights, Dr. GRPO's loss. 8 prompts of 60
tokens × 8 samples of 64 tokens; and 32 × 16 × 24. Both sides are the same learner; one does not capture. They alternate
after three warm-up updates, of which the second captures. An update is `learner.step`: the gradient, the optimizer and
the numbers that it reports.

`value` is the captured update of 8 × 8 × 64 as a share of the launched one (the peer, 1): at most 0.5. The JSON line
has every second, and the norms of the first gradients of both sides, which must agree to 2 %. `--smoke` runs a tiny
model on the CPU, where nothing is captured.
"""

from __future__ import annotations

import argparse
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
from ascent.core.types import Batch
from ascent.models import CausalLM, LanguageModel
from ascent.training.language_learner import LanguageLearner
from benchmarks.common import close, options_with_gpu, show
from benchmarks.peers.models import GPU_SHAPES, SMOKE, random_model
from benchmarks.update_gpu import batch_of

SHARE, CLOSE = 0.5, 0.02
PROMPT = 60
WORK = {"8 x 8 x 64": (8, 8, 64), "32 x 16 x 24": (32, 16, 24)}
ALGORITHM = replace(ALGORITHMS["dr-grpo"], update=replace(ALGORITHMS["dr-grpo"].update, lr=1e-9, max_norm=1.0))


class Launching(LanguageLearner):
    captures = False


def seconds_of(learner: LanguageLearner, batch: Batch) -> tuple[float, float]:
    """Seconds of an update, and the norm of its gradient."""
    begin = time.perf_counter()
    stepped = learner.step(batch, ALGORITHM.objective, ALGORITHM.update)  # on a GPU it waits for the numbers
    return time.perf_counter() - begin, float(stepped.metrics["grad_norm"])


def measure(lm: LanguageModel, batch: Batch, repeats: int) -> dict[str, Any]:
    """Seconds of both sides, in turns, and what the captured one captured."""
    kinds = {"captured": LanguageLearner, "launched": Launching}
    sides = {name: kind(lm, ALGORITHM.update, False, ALGORITHM.outputs) for name, kind in kinds.items()}
    first = {name: [seconds_of(side, batch) for _ in range(3)] for name, side in sides.items()}
    found: dict[str, Any] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            found[name].append(seconds_of(side, batch)[0])
    captured = sides["captured"]._captured_backbone
    rows = [] if captured is None else [vars(size) for size in captured.rows]
    norms = {name: [norm for _, norm in own] for name, own in first.items()}
    return found | {
        "first": {name: [seconds for seconds, _ in own] for name, own in first.items()},
        "norms": norms,
        "rows": rows,
        "why_not": None if captured is None else captured.capture_error,
        "loss_tokens": batch.tokens,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, only to see that it runs")
    options = options_with_gpu(parser, argv)
    device, shape = ("cpu", SMOKE) if options.smoke else ("cuda", GPU_SHAPES["135m"])
    with tempfile.TemporaryDirectory() as folder:
        lm = CausalLM(random_model(Path(folder), shape, device), device=device).load()
    verify_model(lm, 256)
    works = {"2 x 2 x 4": (2, 2, 4)} if options.smoke else WORK
    repeats, found = 1 if options.smoke else options.repeats, {}
    for name, (prompts, samples, tokens) in works.items():
        found[name] = measure(lm, batch_of(lm, [(PROMPT, [tokens] * samples)] * prompts), repeats)
    middle = {name: {side: median(one[side]) for side in ("captured", "launched")} for name, one in found.items()}
    rows = [
        [name, f"{m['launched'] * 1e3:.1f} ms", f"{m['captured'] * 1e3:.1f} ms", f"{m['captured'] / m['launched']:.2f}"]
        for name, m in middle.items()
    ]
    show(["work", "launched", "captured", "share"], rows)
    more = {"work": found, "torch": torch.__version__}
    if options.smoke:
        return close("small_gpu", None, None, SHARE, True, smoke=True, **more)[1]
    value = middle["8 x 8 x 64"]["captured"] / middle["8 x 8 x 64"]["launched"]
    pairs = [(one["norms"]["captured"][-1], one["norms"]["launched"][-1]) for one in found.values()]
    same = all(abs(a - b) <= CLOSE * b for a, b in pairs) and all(one["rows"] for one in found.values())
    more |= {"device": torch.cuda.get_device_name()}
    return close("small_gpu", value, 1.0, SHARE, same and value <= SHARE, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

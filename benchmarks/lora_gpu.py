"""LoRA against every parameter on one GPU: rollouts, whole steps, and the sampler–trainer mismatch.

    python -m benchmarks.lora_gpu [--shape 135m 1.5b 7b] [--rank 16] [--targets all-linear] [--repeats 3] [--smoke]

135m: SmolLM2-135M's shape, 32 prompts × 16 samples. 1.5b and 7b: Qwen2.5's shapes, 32 × 8 and 16 × 8. Prompts have 60
tokens, and each response 256 tokens (none may end early). Random parameters in bfloat16, adapters on all
matrices. A step is that of benchmarks/step_gpu.py: generation, reward, Dr. GRPO's loss and update. One step before
those that count compiles and captures. 7b is measured with adapters alone.

`rollouts` is the full model's seconds of generation over LoRA's, and `step` LoRA's seconds of a step over the full
model's, medians of the same run. `value` is the smaller rollout ratio of 135m and 1.5b over its target. `mismatch` is
the mean |log-prob of the sampler − log-prob of the learner| of a step; LoRA's is taken after its adapters, which are
initialized to 0, were set to noise. `--smoke` tries a tiny model on the CPU, without graphs.
"""

from __future__ import annotations

import argparse
import gc
import sys
from typing import Any

import torch

from ascent.core.correction import MISMATCH
from ascent.models.causal_lm import PYTHON_MODELS, register_model
from benchmarks.common import close, options_with_gpu, show
from benchmarks.peers import in_turns, middle
from benchmarks.peers.models import GPU_SHAPES, SMOKE, random_parts, random_prompts
from benchmarks.peers.steps import Ours, Work

PROMPT_TOKENS, TOKENS = 60, 256
SIZES = {"135m": (32, 16), "1.5b": (32, 8), "7b": (16, 8)}
"""Prompts, and samples of each."""
ROLLOUTS = {"135m": 0.75, "1.5b": 0.85}
"""The least that LoRA's tokens per second may be, as a share of the full model's."""
STEP, SEVEN = 1.15, 4.5
"""The most that a step of 1.5b may take, as a share of the full one's; and the most seconds of one of 7b."""
NOISE = 0.02


def side(name: str, options: argparse.Namespace, rank: int) -> dict[str, float]:
    """Medians of a step's seconds and its parts, with adapters of this rank or (0) every parameter."""
    device = "cpu" if options.smoke else "cuda"
    shape, tokens = (SMOKE, 8) if options.smoke else (GPU_SHAPES[name], TOKENS)
    prompts, samples = (2, 2) if options.smoke else SIZES[name]
    model = register_model(*random_parts(shape | {"max_position_embeddings": 1024}, device))
    work = Work(model, random_prompts(prompts, PROMPT_TOKENS, shape["vocab_size"]), samples, tokens, device)
    ours = Ours(work, {"policy.lora": rank, "policy.lora_targets": options.targets} if rank else {})
    assert ours.parts.engine.note is None, ours.parts.engine.note
    try:
        answers = in_turns({"side": ours}, options.repeats)["side"]
        if rank:
            with torch.no_grad():
                for parameter, tensor in ours.parts.policy.trained().items():  # type: ignore[union-attr]
                    if "lora_B" in parameter:
                        tensor.normal_(0, NOISE)
            ours()
        apart = float(ours.metrics[MISMATCH])
    finally:
        ours.close()
        del PYTHON_MODELS[model]
    found = {part: middle(answers, part) for part in ("seconds", "generate", "reward", "update")}
    found |= {"tokens_per_second": work.loss_tokens / found["generate"], "mismatch": apart}
    if device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=sorted(SIZES), default=list(SIZES))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="all-linear")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, only to see that it runs")
    options = options_with_gpu(parser, argv)
    found: dict[str, Any] = {}
    rows = []
    for name in ["135m"] if options.smoke else options.shape:
        sides = ("lora",) if name == "7b" else ("full", "lora")
        for which in sides:
            one = found.setdefault(name, {})[which] = side(name, options, options.rank if which == "lora" else 0)
            forget()
            times = [f"{one[part]:.2f}" for part in ("seconds", "generate", "update")]
            rows.append([name, which, f"{one['tokens_per_second']:.0f}", *times, f"{one['mismatch']:.4f}"])
            print(*rows[-1], flush=True)
        if len(sides) > 1:
            full, lora = (found[name][which] for which in sides)
            found[name] |= {
                "rollouts": full["generate"] / lora["generate"],
                "step": lora["seconds"] / full["seconds"],
            }
    show(["shape", "trained", "tokens/s", "s a step", "generation", "update", "mismatch"], rows)
    more: dict[str, Any] = {"shapes": found, "rank": options.rank, "targets": options.targets}
    more["torch"] = torch.__version__
    if options.smoke:
        return close("lora_gpu", None, None, 1.0, True, smoke=True, **more)[1]
    ratios = [found[name]["rollouts"] / least for name, least in ROLLOUTS.items() if name in found]
    ok = all(ratio >= 1 for ratio in ratios)
    ok &= "1.5b" not in found or found["1.5b"]["step"] <= STEP
    ok &= "7b" not in found or found["7b"]["lora"]["seconds"] < SEVEN
    more["device"] = torch.cuda.get_device_name()
    return close("lora_gpu", min(ratios, default=None), 1.0, 1.0, ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

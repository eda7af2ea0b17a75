"""Small GPUs, emulated on a large one by a memory limit: what fits, and how long a step takes.

    python -m benchmarks.small_cards_gpu [--side NUMBER …] [--repeats 2] [--gap] [--smoke]

Each side is a process with `--policy.gpu-memory`, and all share the GPU at the same time, so that
their seconds are only a rough guide:

    22 GiB     1.5B with every parameter, 16 × 8 × 256, once with a frozen reference and once without
    14 GiB     135M in float16, without Triton and without flash attention, as on a T4, 8 × 8 × 128
    22 GiB     7B with LoRA of rank 16 on a base in 4 bits, 16 × 8 × 256

Each side chooses its form of optimizer state itself. `value` is how many of the sides took their
steps within their limit, with finite losses; ok: all of them. `peak` is the most that torch reserved, the limit's own
measure. A T4's missing bfloat16 is emulated by `--policy.dtype float16`, its speed is not. `mismatch` is the mean
|log-prob of the sampler − log-prob of the learner| of the last step; `from_base`, of the base in 4 bits, the mean
|log-prob − log-prob of the same model in bfloat16| over random tokens. With random parameters that is a poor guide:
`--gap` measures it on SmolLM2-135M instead, on the CPU in float32, over responses of its own to 8 questions.
`--smoke` runs a tiny model on the CPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import torch

from benchmarks.common import close, options_with_gpu, show, workers
from benchmarks.peers.models import GPU_SHAPES, SMOKE, random_parts, random_prompts

SIDES: dict[str, dict[str, Any]] = {
    "1.5b, 22 GiB": {"shape": "1.5b", "limit": 22.0, "algorithm": "dr-grpo", "work": (16, 8, 256)},
    "1.5b, 22 GiB, reference": {"shape": "1.5b", "limit": 22.0, "algorithm": "grpo", "work": (16, 8, 256)},
    "135m, 14 GiB, float16": {"shape": "135m", "limit": 14.0, "algorithm": "dr-grpo", "work": (8, 8, 128)}
    | {"dtype": "float16", "plain": True},
    "7b, 22 GiB, LoRA on 4 bits": {"shape": "7b", "limit": 22.0, "algorithm": "dr-grpo", "work": (16, 8, 256)}
    | {"more": {"policy.lora": 16, "policy.bits": 4}},
}
SMALLEST = SMOKE | {"hidden_size": 64, "head_dim": 16}


@torch.no_grad()
def log_probs(model: Any) -> torch.Tensor:
    """Of random tokens, each behind those before it."""
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocab, (4, 64), generator=torch.Generator().manual_seed(1)).to(model.device)
    logits = model(ids[:, :-1]).logits.float()
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])


def run(side: dict[str, Any], repeats: int, smoke: bool) -> dict[str, Any]:
    """A few steps in this process: seconds, the most memory, and the last loss; or what went wrong."""
    from ascent import ops
    from ascent.core.metric_names import MISMATCH
    from ascent.models.causal_lm import register_model
    from benchmarks.peers.steps import Ours, Work

    if side.get("plain") and not smoke:  # what such a GPU lacks
        ops._triton_works = lambda: False
        torch.backends.cuda.is_flash_attention_available = lambda: False  # type: ignore[assignment]
    device, shape = ("cpu", SMALLEST) if smoke else ("cuda", GPU_SHAPES[side["shape"]])
    prompts, samples, tokens = (2, 2, 8) if smoke else side["work"]
    dtype = side.get("dtype", "bfloat16")
    model, tokenizer = random_parts(shape | {"max_position_embeddings": 1024}, device)
    name = register_model(model.to(torch.float32 if smoke else torch.bfloat16), tokenizer)
    torch.manual_seed(0)
    work = Work(name, random_prompts(prompts, 60, shape["vocab_size"]), samples, tokens, device)
    settings = {"policy.gpu_memory": side["limit"], "policy.dtype": dtype, "algorithm": side["algorithm"]}
    settings |= side.get("more", {}) | ({"policy.dtype": "float32"} if smoke else {})
    if device == "cuda":
        torch.cuda.empty_cache()
    found: dict[str, Any] = {"seconds": [], "update": []}
    before = log_probs(model) if "policy.bits" in settings else None
    try:
        ours = Ours(work, settings)
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if before is not None:
            found["from_base"] = float((log_probs(model) - before).abs().mean())
        learner: Any = ours.parts.learner
        found |= {"compact": learner.compact is not None, "micro_tokens": learner.plan.tokens}
        for _ in range(repeats + 1):
            answer = ours()
            found["seconds"].append(answer["seconds"])
            found["update"].append(answer["update"])
        found["loss"], found["mismatch"] = (float(ours.metrics[key]) for key in ("loss", MISMATCH))
        ours.close()
    except Exception as error:  # what it says is the result
        found["failed"] = f"{type(error).__name__}: {error}"[:300]
    if device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_reserved() / 2**30
    return found


@torch.no_grad()
def gap() -> int:
    """How far a real model in 4 bits is from itself, on responses of its own: the KL, and log-probs of their tokens."""
    from ascent.models.causal_lm import CausalLM
    from benchmarks.peers.models import smollm2, sums

    plain, packed = (CausalLM(smollm2(), dtype="float32", device="cpu", lora=1, bits=bits).load() for bits in (0, 4))
    torch.manual_seed(0)
    apart, kl = [], []
    for question in sums(8):
        prompt = torch.tensor([plain.encode([{"role": "user", "content": question}])])
        ids = plain.model.generate(prompt, do_sample=True, top_k=0, max_new_tokens=24, pad_token_id=plain.eos_token_id)
        kept, drawn = ids.shape[1] - prompt.shape[1], ids[0, prompt.shape[1] :, None]
        base, other = (
            torch.log_softmax(lm.model(ids[:, :-1], logits_to_keep=kept).logits[0], -1) for lm in (plain, packed)
        )
        apart.append((other - base).gather(-1, drawn)[:, 0].abs())
        kl.append((base.exp() * (base - other)).sum(-1))
    gaps, kls = torch.cat(apart), torch.cat(kl)
    print(
        f"{len(gaps)} tokens: log-probs {float(gaps.mean()):.4f} apart on average, KL {float(kls.mean()):.4f} per token"
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--side", type=int, nargs="+", default=list(range(1, len(SIDES) + 1)), help="which of them, counted from 1"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, only to see that it runs")
    parser.add_argument("--gap", action="store_true", help="only how far a real model in 4 bits is from itself")
    options = options_with_gpu(parser, argv, "gap")
    if options.gap:
        return gap()
    sides = {name: SIDES[name] for number, name in enumerate(SIDES, 1) if number in options.side}
    with workers(1 if options.smoke else max(2, len(sides))) as pool:
        runs = {name: pool.submit(run, side, options.repeats, options.smoke) for name, side in sides.items()}
        found = {name: one.result() for name, one in runs.items()}
    rows = []
    for name, one in found.items():
        what = one.get("failed") or f"{min(one['seconds']):.2f} s, update {min(one['update']):.2f} s"
        form = {True: "10 bytes", False: "18 bytes"}.get(one.get("compact", None), "")
        rows.append([name, form, f"{one.get('micro_tokens', 0):,}", f"{one.get('peak_gib', 0.0):.1f} GiB", what])
    show(["side", "state", "micro-batch", "peak", "a step"], rows)
    good = [
        "failed" not in one and math.isfinite(one["loss"]) and one.get("peak_gib", 0.0) <= SIDES[name]["limit"]
        for name, one in found.items()
    ]
    more = {"sides": found, "torch": torch.__version__}
    if options.smoke:
        return close("small_cards_gpu", None, None, len(SIDES), True, smoke=True, **more)[1]
    more["device"] = torch.cuda.get_device_name()
    return close("small_cards_gpu", sum(good), len(good), len(good), all(good), **more)[1]


if __name__ == "__main__":
    sys.exit(main())

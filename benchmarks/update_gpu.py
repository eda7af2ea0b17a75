"""The update at 8,192 tokens on one GPU: its speed against that at 2,048, and its memory at any mixture of lengths.

    python -m benchmarks.update_gpu [--shape 135m|1.5b] [--repeats 3] [--smoke]

Random parameters in bfloat16 and float32 master weights, Dr. GRPO's loss, groups of 8, prompts of 60 tokens, 131,072
loss tokens per update: 64 responses of 2,048 tokens, or 16 of 8,192. Operations are counted by
`plan.update_operations`: those of the model, attention included, each once (what flash attention computes again is not
counted). `value` is TFLOP/s at 8,192 tokens as a share of those at 2,048 (the peer, 1). The target is 0.85.

Then updates at the edge of the memory: a quarter of what is free is taken, as the engine's KV cache does, and five
batches of several micro-batches each go through, with micro-batches of the learner's choice. For each, the largest
predicted and measured numbers of bytes are shown. None may run out of memory, or take more than was
predicted. `--smoke` runs a tiny model on the CPU, without measuring.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ascent.build.model_verification import verify_model
from ascent.core.algorithms import ALGORITHMS
from ascent.core.types import Batch
from ascent.models import CausalLM, LanguageModel
from ascent.training.language_learner import LanguageLearner
from ascent.training.micro_batches import bytes_per_token, head_bytes, update_operations
from ascent.training.packing import split_batch
from benchmarks.common import close, options_with_gpu, show
from benchmarks.peers.models import GPU_SHAPES, SMOKE, random_model

SHARE, CACHES = 0.85, 0.25
LOSS_TOKENS, SAMPLES, PROMPT = 131_072, 8, 60
LENGTHS = (2048, 8192)
ALGORITHM = ALGORITHMS["dr-grpo"]
Lengths = list[tuple[int, list[int]]]
"""Of each group, the length of its prompt and those of its responses."""


def batch_of(lm: LanguageModel, lengths: Lengths) -> Batch:
    """Random tokens of these lengths, with advantages, ready for an update."""
    generator = torch.Generator().manual_seed(0)
    prompts, width = torch.tensor([n for n, _ in lengths]), max(max(own) for _, own in lengths)
    mask = torch.arange(width) < torch.tensor([own for _, own in lengths]).unsqueeze(-1)
    shape = mask.shape[:2]
    prompt = torch.randint(lm.vocab_size, (len(lengths), int(prompts.max())), generator=generator)
    batch = Batch(
        prompt=torch.where(torch.arange(prompt.shape[1]) < prompts[:, None], prompt, -1),
        response=torch.randint(lm.vocab_size, mask.shape, generator=generator),
        mask=mask,
        logp_sampler=torch.zeros(mask.shape),
        limit=width,
        truncated=torch.zeros(shape, dtype=torch.bool),
        reward=torch.zeros(*shape, 1),
        valid=torch.ones(shape, dtype=torch.bool),
        logp_old=torch.zeros(mask.shape),
        advantage=torch.randn(*shape, 1, generator=generator),
    )
    return batch.add(weight=ALGORITHM.weights(batch))


def seconds_of(learner: LanguageLearner, batch: Batch) -> float:
    begin = time.perf_counter()
    learner.step(batch, ALGORITHM.objective, ALGORITHM.update)  # on a GPU it waits for the numbers
    return time.perf_counter() - begin


def speed(learner: LanguageLearner, tokens: int, loss_tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds and TFLOP/s of updates with responses of this length."""
    groups = max(1, loss_tokens // (SAMPLES * tokens))
    lengths: Lengths = [(PROMPT, [tokens] * SAMPLES)] * groups
    every, attention = update_operations(learner.lm, [n for n, _ in lengths], [own for _, own in lengths])
    batch = batch_of(learner.lm, lengths)
    seconds = [seconds_of(learner, batch) for _ in range(repeats + 1)][1:]
    rate = every / median(seconds) / 1e12
    return {"tokens": tokens, "seconds": seconds, "tflop": every / 1e12, "attention": attention / every, "rate": rate}


def mixtures(room: int, limit: int) -> dict[str, Lengths]:
    """Batches of about twice what goes through at once, or of one response at the limit and others beside it."""
    generator = torch.Generator().manual_seed(0)
    ragged = (torch.randn(64, SAMPLES, generator=generator).exp() * limit / 13.5).clamp(1, limit).long().tolist()
    many = max(1, 2 * room // (SAMPLES * limit))
    long = max(1, 2 * room // (3 * limit))
    return {
        "log-normal lengths": [(PROMPT, own) for own in ragged][: max(1, 2 * room // (limit * SAMPLES // 8))],
        "all at the limit": [(PROMPT, [limit] * SAMPLES)] * many,
        "one long, others short": [(PROMPT, [limit, *[1] * (SAMPLES - 1)])] * max(1, 2 * room // limit),
        "long prompts, short responses": [(limit // 4, [8] * 16)] * max(1, 8 * room // (3 * limit)),
        "long prompts and responses": [(limit, [limit] * 2)] * long,
    }


def edge(learner: LanguageLearner, limit: int) -> list[dict[str, Any]]:
    """Updates with little memory to spare: the bytes foreseen of the largest micro-batch, and those measured."""
    lm, plan, on_gpu = learner.lm, learner.plan, learner.lm.device.type == "cuda"
    found, taken = [], None
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        taken = torch.empty(int(CACHES * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device="cuda")
    for name, lengths in mixtures(plan.tokens, limit).items():
        batch = batch_of(lm, lengths)
        parts = list(split_batch(batch, plan.tokens, lm.can_share_prompts, plan.repeat, plan.padded))
        most = max(_cost(part, plan.repeat) for part in parts)
        foreseen = int(most * bytes_per_token(lm, plan.needs_recompute(int(most)))) + head_bytes(lm)
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        try:
            seconds, failed = seconds_of(learner, batch), None
        except torch.OutOfMemoryError as error:
            seconds, failed = 0.0, str(error).splitlines()[0]
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        found.append(
            {"mixture": name, "tokens": int(batch.tokens), "micro_batches": len(parts), "foreseen": foreseen}
            | {"measured": peak - before, "peak": peak, "seconds": seconds, "failed": failed}
        )
    del taken
    return found


def _cost(part: Batch, repeat: float) -> float:
    prompts, responses = (part.prompt >= 0).sum(-1), part.present.sum()
    return float(prompts.sum() * (1 + repeat * part.mask.shape[1]) + responses)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(GPU_SHAPES), default="135m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, only to see that it runs")
    options = options_with_gpu(parser, argv)
    device = "cpu" if options.smoke else "cuda"
    shape = SMOKE if options.smoke else GPU_SHAPES[options.shape] | {"max_position_embeddings": 32_768}
    lengths, loss_tokens = ((8, 32), 512) if options.smoke else (LENGTHS, LOSS_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        lm = CausalLM(random_model(Path(folder), shape, device), device=device).load()
    verify_model(lm, 256)
    learner = LanguageLearner(lm, ALGORITHM.update, False, ALGORITHM.outputs, micro_batch=300 if options.smoke else 0)
    speeds = [speed(learner, tokens, loss_tokens, options.repeats) for tokens in lengths]
    edges = edge(learner, lengths[-1])
    rows = [[f"{s['tokens']:,}", f"{median(s['seconds']):.3f} s", f"{s['tflop']:,.0f}"] for s in speeds]
    rows = [[*r, f"{s['attention']:.0%}", f"{s['rate']:,.0f}"] for r, s in zip(rows, speeds, strict=True)]
    show(["tokens of a response", "an update", "TFLOP", "attention", "TFLOP/s"], rows)
    table = []
    for e in edges:
        sizes = [f"{e[what] / 2**30:.1f} GiB" for what in ("foreseen", "measured", "peak")]
        table.append([e["mixture"], f"{e['micro_batches']}", *sizes, e["failed"] or f"{e['seconds']:.2f} s"])
    show(["at the edge", "micro-batches", "foreseen", "measured", "with all else", "update"], table)
    more = {"shape": options.shape, "speeds": speeds, "edges": edges, "micro_tokens": learner.plan.tokens}
    more |= {"repeat": learner.plan.repeat, "bytes_per_token": bytes_per_token(lm, False), "torch": torch.__version__}
    fits = all(e["failed"] is None for e in edges)
    if options.smoke:
        return close("update_gpu", None, None, SHARE, fits, smoke=True, **more)[1]
    value = speeds[1]["rate"] / speeds[0]["rate"]
    ok = fits and value >= SHARE and all(e["measured"] <= e["foreseen"] for e in edges)
    more |= {"device": torch.cuda.get_device_name(), "memory": torch.cuda.get_device_properties(0).total_memory}
    return close("update_gpu", value, 1.0, SHARE, ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

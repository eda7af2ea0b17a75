"""Rollouts, scores and updates of models of many shapes on one GPU: the measurements behind `ascent plan`.

    python -m benchmarks.plan_gpu [--shape 135m 360m …] [--out FILE] [--smoke]

Random weights in bfloat16, prompts of 60 random tokens, no response ends early. Every measurement is a line: the shape,
prompts × samples × tokens (or the lengths of every response), the seconds of each call after a warm-up call that
compiles and captures, and the peak of torch's allocated bytes. `python -m benchmarks.plan` reads them
from benchmarks/results/plan_gpu.json. `value` is the number of lines. `--smoke` measures a tiny model on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ascent.build.model_verification import verify_model
from ascent.core.types import Prompts
from ascent.inference.engine import LocalEngine
from ascent.models import LanguageModel
from ascent.training.language_learner import LanguageLearner
from ascent.training.micro_batches import bytes_per_token
from benchmarks.common import close, options_with_gpu, show
from benchmarks.peers.models import GPU_SHAPES
from benchmarks.ragged_gpu import lengths_of
from benchmarks.rollouts_gpu import SMOKE, model_of
from benchmarks.update_gpu import ALGORITHM, batch_of, seconds_of

PROMPT = 60


def llama_shape(
    layers: int, width: int, inner: int, heads: int, shared: int, vocab: int, **more: Any
) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner, "vocab_size": vocab}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": shared, "tie_word_embeddings": True} | more


SHAPES: dict[str, dict[str, Any]] = {
    **GPU_SHAPES,
    "360m": llama_shape(32, 960, 2560, 15, 5, 49_152, kind="Llama"),
    "0.6b": llama_shape(28, 1024, 3072, 16, 8, 151_936, kind="Qwen3", head_dim=128),
    "1b": llama_shape(16, 2048, 8192, 32, 8, 128_256, kind="Llama", head_dim=64),
    "3b": llama_shape(36, 2048, 11_008, 16, 2, 151_936, kind="Qwen2"),
    "7b": llama_shape(28, 3584, 18_944, 28, 4, 152_064, kind="Qwen2", tie_word_embeddings=False),
}
"""The shapes of SmolLM2-360M, Qwen3-0.6B, Llama-3.2-1B, Qwen2.5-3B and -7B beside those of the other benchmarks."""


class Job(NamedTuple):
    """One measurement: prompts × samples × tokens; `ragged`: with lengths that are log-normal with this mean."""

    prompts: int
    samples: int
    tokens: int
    ragged: int = 0


ROLLOUTS: dict[str, list[Job]] = {
    "135m": [Job(32, 16, 256), Job(4, 16, 256), Job(4, 16, 2048), Job(16, 16, 1024)],
    "1.5b": [Job(32, 8, 256), Job(8, 8, 256), Job(16, 8, 2048), Job(16, 16, 512)],
    "360m": [Job(32, 16, 512), Job(8, 8, 1024), Job(32, 16, 2048, ragged=384)],
    "0.6b": [Job(32, 8, 512), Job(4, 4, 512)],
    "1b": [Job(16, 8, 1024)],
    "3b": [Job(32, 8, 256), Job(8, 8, 1024)],
    "7b": [Job(16, 8, 512), Job(64, 8, 128)],
}
UPDATES: dict[str, list[Job]] = {
    "135m": [Job(32, 16, 256), Job(4, 16, 256), Job(4, 16, 2048), Job(16, 16, 1024)],
    "1.5b": [Job(32, 8, 256), Job(4, 8, 256), Job(4, 8, 2048), Job(8, 8, 1024)],
    "360m": [Job(32, 16, 512), Job(8, 8, 1024), Job(32, 16, 2048, ragged=384)],
    "0.6b": [Job(32, 8, 512), Job(4, 4, 512)],
    "1b": [Job(16, 8, 1024)],
    "3b": [Job(32, 8, 256), Job(8, 8, 1024)],
}


def lengths_in(job: Job) -> list[list[int]]:
    """Of each prompt, the tokens of its responses."""
    if not job.ragged:
        return [[job.tokens] * job.samples] * job.prompts
    return lengths_of(job.prompts * job.samples, job.ragged, job.tokens).view(job.prompts, -1).tolist()


def timed(work: Callable[[], Any], repeats: int, on_gpu: bool) -> tuple[list[float], int]:
    """Seconds of each call after the first, and the most bytes that were allocated."""
    seconds = []
    for turn in range(repeats + 1):
        if on_gpu and turn == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:], torch.cuda.max_memory_allocated() if on_gpu else 0


def rollout(lm: LanguageModel, job: Job, repeats: int) -> dict[str, Any]:
    on_gpu = lm.device.type == "cuda"
    sampler = LocalEngine(lm, job.tokens, 1.0, torch.Generator().manual_seed(0))
    table = torch.tensor(lengths_in(job))
    sampler.length_limits = lambda *_: table.flatten()  # type: ignore[assignment, method-assign, misc]
    ids = torch.randint(3, lm.vocab_size, (job.prompts, PROMPT), generator=torch.Generator().manual_seed(0))
    seconds, peak = timed(lambda: sampler.generate(Prompts.of(ids), job.samples), repeats, on_gpu)
    return {"seconds": seconds, "peak": peak}


def learning(lm: LanguageModel, jobs: list[Job], repeats: int, note: Callable[..., None]) -> None:
    """Updates and scores of these batches."""
    on_gpu = lm.device.type == "cuda"
    learner = LanguageLearner(lm, ALGORITHM.update, False, ALGORITHM.outputs, micro_batch=0 if on_gpu else 300)
    for job in jobs:
        batch = batch_of(lm, [(PROMPT, own) for own in lengths_in(job)])
        seconds, peak = timed(partial(seconds_of, learner, batch), repeats, on_gpu)
        own = {"micro_tokens": learner.plan.tokens, "bytes_per_token": bytes_per_token(lm, False)}
        note("update", job, {"seconds": seconds, "peak": peak, **own})
        seconds, peak = timed(partial(learner.score, batch, frozenset({"logp_old"})), repeats, on_gpu)
        note("score", job, {"seconds": seconds, "peak": peak})


def measure(name: str, smoke: bool, lines: list[dict[str, Any]], out: Path | None) -> None:
    shape = SHAPES[name] | SMOKE if smoke else SHAPES[name]

    def note(phase: str, job: Job, found: dict[str, Any]) -> None:
        lines.append({"shape": name, "phase": phase, **job._asdict(), **found})
        print(json.dumps(lines[-1]), flush=True)
        if out is not None:
            out.write_text("[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n")

    lm = model_of(shape, "cpu" if smoke else "cuda")
    repeats = 1 if smoke or name == "7b" else 2
    verify_model(lm, 256)
    for job in [Job(2, 2, 8), Job(2, 4, 16, ragged=6)] if smoke else ROLLOUTS[name]:
        note("rollout", job, rollout(lm, job, repeats))
    jobs = [Job(2, 2, 8)] if smoke else UPDATES.get(name, [])
    if jobs:
        learning(lm, jobs, repeats, note)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=list(ROLLOUTS))
    parser.add_argument("--out", type=Path, default=None, help="also write the lines into this file, as JSON")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, only to see that it runs")
    options = options_with_gpu(parser, argv)
    lines: list[dict[str, Any]] = []
    for name in options.shape[:1] if options.smoke else options.shape:
        try:
            measure(name, options.smoke, lines, options.out)
        except torch.OutOfMemoryError as error:
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    rows = [[x["shape"], x["phase"], f"{x['prompts']}×{x['samples']}×{x['tokens']}"] for x in lines]
    rows = [
        [*row, f"{min(x['seconds']):.3f} s", f"{x['peak'] / 2**30:.1f} GiB"] for row, x in zip(rows, lines, strict=True)
    ]
    show(["shape", "phase", "work", "seconds", "peak"], rows)
    more: dict[str, Any] = {"torch": torch.__version__}
    if options.smoke:
        return close("plan_gpu", None, None, 1.0, True, smoke=True, **more)[1]
    more["device"] = torch.cuda.get_device_name()
    return close("plan_gpu", len(lines), None, 1.0, True, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

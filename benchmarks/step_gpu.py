"""A whole GRPO step on one GPU: Ascent against TRL with transformers' generation.

    python -m benchmarks.step_gpu [--shape 135m|1.5b] [--tokens 256] [--repeats 3] [--alone] [--profile] [--smoke]

135m: SmolLM2-135M's shape, 32 prompts of 60 tokens × 16 samples of 256 new tokens. 1.5b: Qwen2.5-1.5B's shape, 32 ×
8 × 256. Random parameters in bfloat16; no response may end early. A step is generation, reward (in worker processes
here, in TRL's own process there), loss, backward pass and optimizer. Ascent's step is that of its loop on its own
parts, with float32 master parameters and micro-batches of its own choice. TRL's step is that of
benchmarks/peers/trl_step.py, in pure bfloat16, without checkpointing, with the micro-batches in `TRL_ROWS`. Both use
Dr. GRPO's loss without KL and clipped gradients, and record nothing.

They run one after the other, because they do not fit on the card together, each after a warm-up step that does not
count. `value` is the median of TRL's seconds divided by the median of Ascent's. TRL 1.16.0 must be installed in the
same environment as Ascent. `--alone` leaves TRL out. `--tokens 24` is a step of short answers, which waits for the host
more than for the card. `--profile` prints where the time of one of our steps goes, on the card and on the host.
`--smoke` runs a tiny model on the CPU without TRL.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import close, show
from benchmarks.peers import HERE_TOO, Answer, Peer, in_turns, middle, raw
from benchmarks.peers.models import GPU_SHAPES, SMOKE, random_model, random_prompts
from benchmarks.peers.steps import LR, MAX_NORM, Ours, Work

PROMPTS, PROMPT_TOKENS, TOKENS = 32, 60, 256
SAMPLES = {"135m": 16, "1.5b": 8}
SPEEDUP = {"135m": 6.0, "1.5b": 4.0}
TRL_ROWS = {"135m": 128, "1.5b": 32}
"""Responses in TRL's micro-batches: what fits the card with room to spare."""


def ours(work: Work, repeats: int, profiled: bool) -> list[Answer]:
    side = Ours(work)
    try:
        answers = in_turns({"ascent": side}, repeats)["ascent"]
        if profiled:
            profile(side)
        return answers
    finally:
        side.close()


def profile(side: Ours) -> None:
    """The kernels of one step by the time that they take on the card; of another, the functions on the host."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    host = cProfile.Profile()
    host.runcall(side)
    pstats.Stats(host).sort_stats("tottime").print_stats(25).sort_stats("cumtime").print_stats("ascent", 60)

    with profiling(activities=[ProfilerActivity.CUDA]) as found:
        side()
    events = sorted(found.key_averages(), key=lambda e: -e.device_time_total)
    whole = sum(e.device_time_total for e in events)
    rows = [[e.key[:90], str(e.count), f"{e.device_time_total / 1e3:.1f}"] for e in events[:40]]
    show(["kernel", "times", "ms"], [*rows, ["all", "", f"{whole / 1e3:.0f}"]])


def theirs(work: Work, repeats: int) -> tuple[list[Answer], dict[str, Any]]:
    peer = Peer(HERE_TOO, "trl_step", {**vars(work), "lr": LR, "max_norm": MAX_NORM})
    try:
        return in_turns({"trl": peer}, repeats)["trl"], peer.about
    finally:
        peer.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SAMPLES), default="135m")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="new tokens of a response")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without TRL")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="try a tiny model on the CPU, without TRL")
    options = parser.parse_args(argv)
    device, name = "cpu" if options.smoke else "cuda", options.shape
    shape, tokens = (SMOKE, 8) if options.smoke else (GPU_SHAPES[name] | {"kind": "Llama"}, options.tokens)
    prompts = random_prompts(4 if options.smoke else PROMPTS, PROMPT_TOKENS, shape["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), shape, device)
        work = Work(model, prompts, SAMPLES[name], tokens, device, TRL_ROWS[name])
        answers = {"ascent": ours(work, options.repeats, options.profile)}
        about: dict[str, Any] = {"torch": torch.__version__}
        if device == "cuda":
            about |= {"device": torch.cuda.get_device_name(), "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
            gc.collect()
            torch.cuda.empty_cache()
        if not (options.alone or options.smoke):
            answers["trl"], about["trl"] = theirs(work, options.repeats)
    for found in (answer for side in answers.values() for answer in side):
        assert found["tokens"] == work.loss_tokens, f"{found['tokens']} loss tokens, not {work.loss_tokens}"
    more = {"shape": name, "tokens": tokens, "seconds": raw(answers), "loss_tokens": work.loss_tokens, **about}
    own = middle(answers["ascent"])
    print(f"Ascent {own:.3f} s per step, {work.loss_tokens / own:,.0f} tokens/s")
    if "trl" not in answers:
        return close("step_gpu", None, None, SPEEDUP[name], options.smoke, smoke=options.smoke, **more)[1]
    given, asked = ([list(ids) for ids in answers[side][0]["prompts"]] for side in ("trl", "ascent"))
    assert given == asked, "the two sides were given different prompts"
    speedup = middle(answers["trl"]) / own
    print(f"TRL {middle(answers['trl']):.2f} s: Ascent is {speedup:.2f} times as fast")
    return close("step_gpu", speedup, 1.0, SPEEDUP[name], speedup >= SPEEDUP[name], **more)[1]


if __name__ == "__main__":
    sys.exit(main())

"""A whole GRPO step on one GPU: Ascent against TRL, with transformers' generation or with vLLM's.

    python -m benchmarks.step_gpu [--shape 135m|1.5b] [--tokens 256] [--repeats 3] [--vllm] [--alone] [--profile]
        [--smoke]

135m: SmolLM2-135M's shape, 32 prompts of 60 tokens × 16 samples of 256 new tokens. 1.5b: Qwen2.5-1.5B's shape, 32 ×
8 × 256. Random parameters in bfloat16; no response may end early. A step is generation, reward (in worker processes
here, in TRL's own process there), loss, backward pass and optimizer. Ascent's step is that of its loop on its own
parts, with float32 master parameters and micro-batches of its own choice. TRL's step is that of
benchmarks/peers/trl_step.py, in pure bfloat16, without checkpointing, with the micro-batches in `TRL_ROWS`. Both use
Dr. GRPO's loss without KL and clipped gradients, and record nothing.

They run one after the other, because they do not fit on the GPU together, each after a warm-up step. `value` is the
median of TRL's seconds divided by the median of Ascent's. TRL 1.16.0 must be installed in the same environment as
Ascent. `--vllm` lets vLLM 0.24.0 generate for TRL, in its process (colocated mode), and takes both shapes: the two TRL
are started together, because a start takes a minute, and then take their steps one after the other. It has to be
installed there too. `--alone` leaves TRL out. `--tokens 24` is a step of short answers, which is limited by the host
more than by the GPU. `--profile` prints where the time of one of our steps goes, on the GPU and on the host. `--smoke`
runs a tiny model on the CPU without TRL.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import close, options_with_gpu, show
from benchmarks.peers import HERE_TOO, Answer, Peer, in_turns, middle, raw
from benchmarks.peers.models import GPU_SHAPES, SMOKE, random_model, random_prompts
from benchmarks.peers.steps import LR, MAX_NORM, Ours, Work

PROMPTS, PROMPT_TOKENS, TOKENS = 32, 60, 256
SAMPLES = {"135m": 16, "1.5b": 8}
SPEEDUP = {"135m": 6.0, "1.5b": 4.0}
OVER_VLLM = 2.0
CACHES = 8.0
"""GiB for vLLM's caches: all rows at their full length take 4."""
TRL_ROWS = {"135m": 128, "1.5b": 32}
"""Responses in TRL's micro-batches: what fits the GPU with room to spare."""


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
    """The kernels of one step by the time that they take on the GPU; of another, the functions on the host."""
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
    peer = trl_of(work)
    try:
        return in_turns({"trl": peer}, repeats)["trl"], peer.about
    finally:
        peer.close()


def trl_of(work: Work, caches: float = 0.0) -> Peer:
    """TRL; `caches`: the GiB of vLLM's, if that generates."""
    return Peer(HERE_TOO, "trl_step", {**vars(work), "lr": LR, "max_norm": MAX_NORM, "vllm": caches})


def work_of(name: str, folder: Path, tokens: int, smoke: bool = False) -> Work:
    device = "cpu" if smoke else "cuda"
    shape, tokens = (SMOKE, 8) if smoke else (GPU_SHAPES[name] | {"kind": "Llama"}, tokens)
    prompts = random_prompts(4 if smoke else PROMPTS, PROMPT_TOKENS, shape["vocab_size"])
    return Work(random_model(folder, shape, device), prompts, SAMPLES[name], tokens, device, TRL_ROWS[name])


def check(work: Work, answers: dict[str, list[Answer]]) -> None:
    """Both sides did the same work."""
    for found in (answer for side in answers.values() for answer in side):
        assert found["tokens"] == work.loss_tokens, f"{found['tokens']} loss tokens, not {work.loss_tokens}"
    prompts = [[list(ids) for ids in side[0]["prompts"]] for side in answers.values()]
    assert all(given == prompts[0] for given in prompts), "the two sides were given different prompts"


def forget() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def against_vllm(repeats: int, tokens: int) -> int:
    """Both shapes against TRL with vLLM."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        works = {name: work_of(name, Path(folder) / name, tokens) for name in SAMPLES}
        forget()
        starting = {name: pool.submit(trl_of, work, CACHES) for name, work in works.items()}
        peers = {name: start.result() for name, start in starting.items()}
        for name, peer in peers.items():
            found[name] = {"about": peer.about, "trl": in_turns({f"{name}: trl, vllm": peer}, repeats).popitem()[1]}
            peer.close()
        for name, work in works.items():
            found[name]["ascent"] = ours(work, repeats, False)
            forget()
            sides = {side: found[name][side] for side in ("trl", "ascent")}
            check(work, sides)
            own, other = (middle(sides[side]) for side in ("ascent", "trl"))
            found[name] = {"speedup": other / own, "about": found[name]["about"], "seconds": raw(sides)}
            print(
                f"{name}: Ascent {own:.3f} s per step, TRL with vLLM {other:.2f} s: {other / own:.2f} times", flush=True
            )
    least = min(one["speedup"] for one in found.values())
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    return close("step_gpu", least, 1.0, OVER_VLLM, least >= OVER_VLLM, peer_is="TRL with vLLM", shapes=found, **about)[
        1
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SAMPLES), default="135m")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="new tokens of a response")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="without TRL")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="try a tiny model on the CPU, without TRL")
    parser.add_argument("--vllm", action="store_true", help="both shapes against TRL with vLLM's generation")
    options = options_with_gpu(parser, argv)
    if options.vllm:
        return against_vllm(options.repeats, options.tokens)
    name = options.shape
    with tempfile.TemporaryDirectory() as folder:
        work = work_of(name, Path(folder), options.tokens, options.smoke)
        answers = {"ascent": ours(work, options.repeats, options.profile)}
        about: dict[str, Any] = {"torch": torch.__version__}
        if work.device == "cuda":
            about |= {"device": torch.cuda.get_device_name(), "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
            forget()
        if not (options.alone or options.smoke):
            answers["trl"], about["trl"] = theirs(work, options.repeats)
    check(work, answers)
    more = {"shape": name, "tokens": work.tokens, "seconds": raw(answers), "loss_tokens": work.loss_tokens, **about}
    own = middle(answers["ascent"])
    print(f"Ascent {own:.3f} s per step, {work.loss_tokens / own:,.0f} tokens/s")
    if "trl" not in answers:
        return close("step_gpu", None, None, SPEEDUP[name], options.smoke, smoke=options.smoke, **more)[1]
    speedup = middle(answers["trl"]) / own
    print(f"TRL {middle(answers['trl']):.2f} s: Ascent is {speedup:.2f} times as fast")
    return close("step_gpu", speedup, 1.0, SPEEDUP[name], speedup >= SPEEDUP[name], **more)[1]


if __name__ == "__main__":
    sys.exit(main())

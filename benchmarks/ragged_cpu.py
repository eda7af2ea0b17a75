"""Rollouts of ragged lengths on two cores: a paged KV cache against one that reserves the limits, in equal memory.

    python -m benchmarks.ragged_cpu [--repeats 1] [--samples 8] [--smoke]

SmolLM2-135M in float32, 4 prompts × 8 samples, each response with its own fixed length, from 8 to 256 tokens.
The KV caches of all sides have room for the same number of tokens: 8 sequences of 256 tokens, and their prompts.

    before     sequences reserve their limit, so 8 run at once, and a finished one makes room for the next; decoded by
               the model's own layers, as before the paged cache
    reserved   the same sequences, decoded as today (inference/runners)
    paged      a sequence allocates blocks as it grows, so more run at once; when blocks run out, the youngest is
               preempted and prefilled again

They sample the same tokens, and alternate after a short warm-up. `value` is the tokens per second of `paged` over
`before` (target 1.5), and `paged_alone` is the same over `reserved`; `cpu_seconds` is the CPU time of the process,
which other processes disturb less. Progress is printed every few seconds. `--smoke` runs a tiny random model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascent.build.model_verification import verify_model
from ascent.core.sampling_params import SamplingParams
from ascent.inference.engine import LocalEngine
from ascent.inference.generation_state import GenerationState
from ascent.inference.runners.paged import BLOCK_SIZE, PagedRunner
from ascent.models import CausalLM, LanguageModel
from benchmarks.common import close, show
from benchmarks.peers import THREADS
from benchmarks.peers.models import SMOKE, random_model, random_prompts, smollm2, sums

SPEEDUP = 1.5
PROMPTS, LEAST, LIMIT, ROWS = 4, 8, 256, 8
WARM = 4
"""Tokens of each response in the warm-up."""
EVERY = 10.0
"""Seconds between two words on how far it is."""


@torch.no_grad()
def draw(
    name: str, lm: LanguageModel, prompts: list[list[int]], lengths: Tensor, rows: int, room: int = 0
) -> tuple[GenerationState, Any, float, float]:
    limit, total = int(lengths.max()), int(lengths.sum())
    seeds = torch.arange(len(lengths))
    sampler = LocalEngine(lm, limit, 1.0, torch.Generator())
    if name == "before":
        sampler.packed_model, sampler.runner = None, PagedRunner
    with sampler.prepared() as head:
        drawn = GenerationState(
            len(lengths), limit, lm.stop_token_ids, head, seeds, 1.0, SamplingParams(), limits=lengths
        )
        decoder = sampler.runner(lm, prompts, len(lengths) // len(prompts), rows, drawn, room)
        with telling(lambda: f"{name}: {int(drawn.lengths.sum())} of {total} tokens"):
            begin, cpu = time.perf_counter(), time.process_time()
            decoder()
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    print(f"{name}: {total} tokens in {seconds:.1f} s, {cpu:.1f} s of computing", flush=True)
    return drawn, decoder.scheduler, seconds, cpu


@contextmanager
def telling(words: Callable[[], str]) -> Iterator[None]:
    """Print these words every few seconds."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(EVERY):
            print(words(), flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--samples", type=int, default=8, help="per prompt; there are four prompts")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, only to see that it runs")
    options = parser.parse_args(argv)
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            model, words, least, limit = random_model(Path(folder), SMOKE), random_prompts(PROMPTS, 8, 128), 2, 16
        else:
            model, words, least, limit = smollm2(), sums(PROMPTS), LEAST, LIMIT
        lm = CausalLM(model, dtype="float32", device="cpu").load()
    prompts = [lm.encode([{"role": "user", "content": text}]) for text in words]
    verify_model(lm, max(map(len, prompts)) + limit)
    lm.stop_token_ids = frozenset({-1})  # no response ends before its length
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(least, limit + 1, (PROMPTS * options.samples,), generator=generator)
    lengths[0] = limit
    slots = -(-ROWS // options.samples) + 1
    room = BLOCK_SIZE * (ROWS * -(-limit // BLOCK_SIZE) + slots * -(-max(map(len, prompts)) // BLOCK_SIZE))
    sides = {"before": (ROWS, 0), "reserved": (ROWS, 0), "paged": (len(lengths), room)}
    seconds, computed = ({name: list[float]() for name in sides} for _ in range(2))
    for rows in (ROWS, len(lengths)):
        draw("warm-up", lm, prompts, lengths.clamp(max=WARM), rows)
    for _ in range(options.repeats):
        tokens: dict[str, Tensor] = {}
        for name, side in sides.items():
            drawn, schedule, wall, cpu = draw(name, lm, prompts, lengths, *side)
            seconds[name].append(wall)
            computed[name].append(cpu)
            tokens[name] = drawn.tokens
    same = {name: float((tokens[name] == tokens["before"]).float().mean()) for name in ("reserved", "paged")}
    rates = {name: int(lengths.sum()) / statistics.median(found) for name, found in seconds.items()}
    show(["cache", "tokens/s"], [[name, f"{rate:.0f}"] for name, rate in rates.items()])
    value = rates["paged"] / rates["before"]
    more = {
        "paged_alone": rates["paged"] / rates["reserved"],
        "seconds": seconds,
        "cpu_seconds": computed,
        "tokens_per_second": rates,
        "room": room,
        "preemptions": schedule.num_preemptions,
    }
    more |= {"peak_blocks": schedule.block_manager.peak_used, "same_tokens": same}
    if options.smoke:
        return close("ragged_cpu", None, None, SPEEDUP, True, smoke=True, **more)[1]
    return close("ragged_cpu", value, 1.0, SPEEDUP, value >= SPEEDUP and min(same.values()) > 0.95, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

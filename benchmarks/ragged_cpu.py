"""Rollouts of ragged lengths on two cores: a cache in pages against rows that reserve their limit, at the same memory.

    python -m benchmarks.ragged_cpu [--repeats 2] [--smoke]

SmolLM2-135M in float32, 4 prompts × 8 samples, every response with a fixed length of its own, from 8 to 256 tokens.
Both sides may hold as many tokens in their caches: what 8 rows of 256 tokens take, and their prompts. Rows that reserve
their limit are then 8 at once, and a row that ends makes room for the next. With pages a row takes what it uses, so
more of them run at once; where room runs out, the youngest is evicted and encoded again. Both are the same sampler,
and draw the same tokens. They take turns, after a warm-up turn that does not count. `value` is the ratio of tokens per
second (target 1.5). `--smoke` runs a tiny random model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascent.engines.language.learning.head import Head
from ascent.engines.language.proof import prove
from ascent.engines.language.sampling.draw import Drawn, Support
from ascent.engines.language.sampling.sampler import PAGE, GroupDecoder
from ascent.policies import CausalLM, LanguageModel
from benchmarks.common import close, show
from benchmarks.peers import THREADS
from benchmarks.peers.models import SMOKE, random_model, random_prompts, smollm2, sums

SPEEDUP = 1.5
PROMPTS, SAMPLES, LEAST, LIMIT, ROWS = 4, 8, 8, 256, 8


@torch.no_grad()
def draw(
    lm: LanguageModel, prompts: list[list[int]], lengths: Tensor, rows: int, room: int
) -> tuple[Drawn, Any, float]:
    begin = time.perf_counter()
    limit = int(lengths.max())
    seeds = torch.arange(len(lengths))
    drawn = Drawn(len(lengths), limit, lm.ends, Head.of(lm.model), seeds, 1.0, Support(), limits=lengths)
    decoder = GroupDecoder(lm, prompts, SAMPLES, rows, drawn, room)
    decoder()
    return drawn, decoder.schedule, time.perf_counter() - begin


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
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
    prove(lm, max(map(len, prompts)) + limit)
    lm.ends = frozenset({-1})  # no response ends before its length
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(least, limit + 1, (PROMPTS * SAMPLES,), generator=generator)
    lengths[0] = limit
    slots = -(-ROWS // SAMPLES) + 1
    room = PAGE * (ROWS * -(-limit // PAGE) + slots * -(-max(map(len, prompts)) // PAGE))
    seconds: dict[str, list[float]] = {"reserved": [], "pages": []}
    for turn in range(options.repeats + 1):
        whole, _, first = draw(lm, prompts, lengths, ROWS, 0)
        paged, schedule, second = draw(lm, prompts, lengths, len(lengths), room)
        same = float((whole.token == paged.token).float().mean())
        if turn:
            seconds["reserved"].append(first)
            seconds["pages"].append(second)
    rates = {name: int(lengths.sum()) / statistics.median(found) for name, found in seconds.items()}
    show(["cache", "tokens/s"], [[name, f"{rate:.0f}"] for name, rate in rates.items()])
    value = rates["pages"] / rates["reserved"]
    more = {"seconds": seconds, "tokens_per_second": rates, "room": room, "evictions": schedule.evictions}
    more |= {"most_pages": schedule.pages.most, "same_tokens": same}
    if options.smoke:
        return close("ragged_cpu", None, None, SPEEDUP, True, smoke=True, **more)[1]
    return close("ragged_cpu", value, 1.0, SPEEDUP, value >= SPEEDUP and same > 0.95, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

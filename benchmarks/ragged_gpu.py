"""Long and ragged answers on one GPU: responses of log-normal lengths in a smaller batch, against the memory's floor.

    python -m benchmarks.ragged_gpu [--shape 1.5b] [--responses 2048] [--max-num-seqs 512] [--floors] [--smoke]

Each response has its own fixed length: log-normal with mean 1,000 and σ = 1, at most 8,192. The floor is the time
in which the memory (4.3 TB/s) can move what an ideal schedule has to: for every step, the weights once and the keys and
values of all live tokens. In an ideal schedule a finished response is replaced at once, and a group's prompt is held
once. `floor_with_arithmetic_s` also counts the operations: in large batches, matmuls take longer to
compute (at 790 TFLOP/s) than their weights take to be read. `--floors` prints the two floors alone, which takes no GPU.
`tail_s` are the seconds with fewer than half of the maximum number of running sequences. `reserved` is the largest
number of tokens in allocated blocks over the largest sum of live tokens.

The log-probs of all tokens are computed and returned. They are checked against a training forward of the first
responses.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ascent.build.model_verification import verify_model
from ascent.core.sampling_params import SamplingParams
from ascent.inference.generation_state import GenerationState
from ascent.inference.runners.cuda_graph import cuda_graph_runner
from ascent.models import LanguageModel
from ascent.models.lm_head import LMHead, token_stats
from ascent.models.packed_attention import packed_attention_enabled
from ascent.ops.decode_state import BLOCK_SIZE
from benchmarks.common import close, options_with_gpu, show
from benchmarks.rollouts_gpu import BANDWIDTH, SHAPES, SMOKE, model_of, prompts_of

MEAN, SIGMA, LIMIT, SAMPLES = 1000, 1.0, 8192, 8
ARITHMETIC = 790e12
"""Operations per second of bfloat16 matmuls on an H200, measured."""
WARM = 4
"""Responses of the call before the measurement are shorter by this factor."""
TIME, RESERVED = 1.6, 1.15
"""The figures to reach: time over the floor, and allocated tokens over live tokens."""


def lengths_of(count: int, mean: float, limit: int) -> Tensor:
    draws = torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.exp(math.log(mean) - SIGMA**2 / 2 + SIGMA * draws).long().clamp(1, limit)


def ideal(lengths: list[int], prompts: list[int], max_num_seqs: int) -> tuple[Counter[int], float, int]:
    """Where a finished response is replaced at once: steps by their rows, and live tokens, all steps' and the most."""
    waiting, running = list(range(len(lengths)))[::-1], {}
    left = [SAMPLES] * len(prompts)
    begun: set[int] = set()
    steps, total, most = Counter[int](), 0.0, 0
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            response = waiting.pop()
            running[response] = 0
            begun.add(response // SAMPLES)
        stride = min(lengths[r] - n for r, n in running.items())  # steps until the next one ends
        shared = sum(prompts[p] for p in begun)
        own = sum(running.values())
        steps[len(running)] += stride
        total += stride * (shared + own) + len(running) * stride * (stride + 1) / 2
        most = max(most, shared + own + len(running) * stride)
        for r in list(running):
            running[r] += stride
            if running[r] == lengths[r]:
                del running[r]
                left[r // SAMPLES] -= 1
                if not left[r // SAMPLES]:
                    begun.discard(r // SAMPLES)
    return steps, total, most


def bytes_of(lm: LanguageModel) -> tuple[int, int]:
    """Of the weights, and of one token's keys and values."""
    config, size = lm.model.config, next(lm.model.parameters()).element_size()
    head_dim = config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return sum(p.numel() for p in lm.model.parameters()) * size, token * size


def floors(lm: LanguageModel, lengths: Tensor, prompts: list[int], max_num_seqs: int) -> dict[str, Any]:
    """The least time by bytes alone, and where matmuls with the weights take as long as their operations."""
    weights, token = bytes_of(lm)
    steps, live, most = ideal(lengths.tolist(), prompts, max_num_seqs)
    caches, count = live * token / BANDWIDTH, sum(p.numel() for p in lm.model.parameters())
    matmuls = sum(n * max(weights / BANDWIDTH, 2 * count * rows / ARITHMETIC) for rows, n in steps.items())
    floor = steps.total() * weights / BANDWIDTH + caches
    return {
        "floor_s": floor,
        "floor_with_arithmetic_s": matmuls + caches,
        "steps": steps.total(),
        "steps_with_full_batch": steps[max_num_seqs],
        "live_most": most,
    }


@torch.no_grad()
def apart(lm: LanguageModel, prompts: list[list[int]], drawn: GenerationState, count: int) -> float:
    """Mean |difference| of the log-probs of the first responses from one plain forward pass over each."""
    gaps = []
    for response in range(count):
        prompt, own = prompts[response // SAMPLES], drawn.tokens[response, : drawn.lengths[response]]
        ids = torch.cat([torch.tensor(prompt), own]).to(lm.device)[None]
        hidden = lm.backbone(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
        logp = token_stats(LMHead.of(lm.model), hidden, own.to(lm.device), 1.0)[0].cpu()
        gaps.append((logp - drawn.logp[response, : len(own)]).abs())
    return float(torch.cat(gaps).mean())


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    smoke = options.smoke
    shape, device = (SHAPES[name] | SMOKE, "cpu") if smoke else (SHAPES[name], "cuda")
    count, max_num_seqs, limit, mean = (
        (48, 16, 64, 12) if smoke else (options.responses, options.max_num_seqs, LIMIT, MEAN)
    )
    lm = model_of(shape, device)
    table = prompts_of(count // SAMPLES, lm.vocab_size, *((5, 9) if smoke else (50, 70)))
    prompts = [row[row >= 0].tolist() for row in table]
    verify_model(lm, table.shape[1] + limit)
    lengths = lengths_of(count, mean, limit)
    decoder, note = cuda_graph_runner(lm)
    assert decoder is not None, note
    seconds = []
    for limits in [lengths] if smoke else [lengths // WARM + 1, lengths]:  # the first call captures the graphs
        seeds = torch.arange(count)
        head = LMHead.of(lm.model)
        drawn = GenerationState(count, limit, lm.stop_token_ids, head, seeds, 1.0, SamplingParams(), limits=limits)
        begin = time.perf_counter()
        with torch.no_grad(), packed_attention_enabled(lm.model):
            run = decoder(lm, prompts, SAMPLES, max_num_seqs, drawn)
            run()
        seconds.append(time.perf_counter() - begin)
    assert torch.equal(drawn.lengths, lengths)
    least, schedule = floors(lm, lengths, [len(p) for p in prompts], max_num_seqs), run.scheduler
    return {
        "seconds": seconds[-1],
        "first_call_s": seconds[0],
        **least,
        "over_floor": seconds[-1] / least["floor_s"],
        "over_floor_with_arithmetic": seconds[-1] / least["floor_with_arithmetic_s"],
        "tail_s": drawn.timeline.tail_seconds,
        "tokens_per_second": int(lengths.sum()) / seconds[-1],
        "tokens": int(lengths.sum()),
        "launches": run.num_launches,
        "reserved": schedule.block_manager.peak_used * BLOCK_SIZE / least["live_most"],
        "num_blocks": schedule.block_manager.num_blocks,
        "preemptions": schedule.num_preemptions,
        "graphs": len(decoder.graphs),
        "mismatch": apart(lm, prompts, drawn, 2 if smoke else 8),
        **({} if smoke else {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.5b")
    parser.add_argument("--responses", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--floors", action="store_true", help="only the least times, computed on any machine")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU, only to see that they run")
    options = options_with_gpu(parser, argv, "floors")
    if options.floors:
        lm = model_of(SHAPES[options.shape], "meta")
        lm.model.to(torch.bfloat16)
        prompts = (prompts_of(options.responses // SAMPLES, lm.vocab_size, 50, 70) >= 0).sum(-1).tolist()
        least = floors(lm, lengths_of(options.responses, MEAN, LIMIT), prompts, options.max_num_seqs)
        show(list(least), [[f"{value:.4g}" for value in least.values()]])
        return 0
    found = measure(options.shape, options)
    names = ["seconds", "floor_s", "over_floor", "tokens_per_second", "reserved", "preemptions", "mismatch"]
    show(["shape", *names], [[options.shape, *(f"{found[name]:.4g}" for name in names)]])
    more = {"shape": options.shape, "found": found, "torch": torch.__version__}
    if options.smoke:
        return close("ragged_gpu", None, None, TIME, True, smoke=True, **more)[1]
    more["device"] = torch.cuda.get_device_name()
    ok = found["over_floor"] <= TIME and found["reserved"] <= RESERVED
    return close("ragged_gpu", found["seconds"], found["floor_s"], TIME, ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

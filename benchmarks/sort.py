"""Five numbers out of ten, sorted: what `ascent train sort` does by default.

    python -m benchmarks.sort [--seeds 3]

`value` is the lowest exact-match accuracy of any seed, of greedy answers to all held-out prompts (about 20,000).
None of them is ever a training prompt, which is checked on a large sample. The target is 99 %, in at most 90 s on two
cores. The seconds are those of the whole call, including records and evaluations. The peer is the same policy before
training.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

import ascent
from ascent.core.config import Config
from ascent.models import Policy
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from benchmarks.common import close, show

ACCURACY, SECONDS = 0.99, 90.0


def accuracy(policy: Policy, config: Config) -> tuple[float, int]:
    """The share of all held-out prompts whose greedy answer is exactly right, and their number."""
    prompt = config.task.held_out(config.task.numbers**config.task.length)
    sampler = SmallPolicyEngine(policy, 1.0, torch.Generator())
    parts = torch.arange(len(prompt)).split(2_000)
    right = [config.task.score(sampler.generate(prompt[part], 1, greedy=True)).correct for part in parts]
    return torch.cat(right).double().mean().item(), len(prompt)


def disjoint(config: Config) -> bool:
    """Are held-out prompts never drawn to train on?"""
    drawn = config.task.draw(200_000, torch.Generator().manual_seed(0)).prompt
    code = config.task.numbers ** torch.arange(config.task.length)
    return not torch.isin((drawn * code).sum(-1), (config.task.held_out(10**9).prompt * code).sum(-1)).any()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=None, help="fewer steps, to try the benchmark itself")
    options = parser.parse_args(argv)
    fewer = {} if options.steps is None else {"steps": options.steps}
    rows, found, seconds = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            begin = time.perf_counter()
            run = ascent.train("sort", out=Path(folder) / str(seed), show=False, seed=seed, **fewer)
            seconds.append(time.perf_counter() - begin)
            share, prompts = accuracy(run.policy, run.config)
            found.append(share)
            rows.append([str(seed), f"{share:.2%}", f"{prompts:,}", f"{seconds[-1]:.1f}"])
        config = run.config
    show(["seed", "exactly sorted", "held-out prompts", "seconds"], rows)
    before, _ = accuracy(config.policy(config.task.space, torch.Generator().manual_seed(0)), config)
    apart = disjoint(config) and prompts >= 1_000
    ok = apart and min(found) >= ACCURACY and max(seconds) <= SECONDS
    more = {"seconds": max(seconds), "seconds_target": SECONDS, "held_out": prompts, "seeds": options.seeds}
    return close("sort", min(found), before, ACCURACY, ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

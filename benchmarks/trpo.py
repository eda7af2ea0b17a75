"""TRPO on `sort` from random parameters: KL within the trust region, share of it used, gain per step.

    python -m benchmarks.trpo [--seeds 5]

Each seed takes 200 updates of `trpo` (Δ = 0.01). The realized KL(π_old ‖ π) is computed here, from a copy of the
policy that sampled, over the full vocabulary at every token of the batch. The update's own report is not used.
`value` is the largest KL/Δ of any update. ok: at most 1, with at least 95 % of the steps accepted while groups still
carry signal, and a median KL/Δ of at least 0.5. The peer is `ppo` with equal samples (512 per step) and the task's
Adam. The gain per step is the rise of the sampled reward from the first ten steps to the last ten, divided by the
steps between.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from statistics import median
from typing import Any

import torch

from benchmarks.common import NoRecords, close, markdown, show, workers, write_page

RATIO, ACCEPTED, MEDIAN, UPDATES, ENDS = 1.0, 0.95, 0.5, 200, 10


class Watched(NoRecords):
    """Records that keep the reward of each step, and whether any group had signal."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.signal: list[bool] = []

    def step(self, step: int, metrics: dict[str, Any], batch: Any, minis: Any, updates: Any) -> None:
        self.rewards.append(metrics["reward"])
        self.signal.append(metrics["frac_reward_zero_std"] < 1)


@torch.no_grad()
def realised(old: Any, new: Any, batch: Any) -> float:
    """The mean over counted tokens of KL(π_old ‖ π), in float64."""
    from ascent.training.small_learner import log_probs

    p, q = (log_probs(policy, batch).double().expand(*batch.mask.shape, -1) for policy in (old, new))
    return float((p.exp() * (p - q)).sum(-1)[batch.loss_mask].mean())


def run(row: str, seed: int, updates: int) -> dict[str, Any]:
    """One run; for every update its KL and whether the parameters moved."""
    from ascent.build.assemble import assemble
    from ascent.core.loop import train
    from ascent.settings import configure

    config = configure("sort", {"algorithm": row, "seed": seed, "steps": updates, "threads": 1, "eval_every": updates})
    parts, records = assemble(config), Watched()
    kls: list[float] = []
    step = parts.learner.step

    def watched(mini: Any, objective: Any, update: Any) -> Any:
        old = copy.deepcopy(parts.policy)
        stepped = step(mini, objective, update)
        kls.append(realised(old, parts.policy, mini))
        return stepped

    parts.learner.step = watched  # type: ignore[method-assign]
    began = time.perf_counter()
    list(train(config, config.task, parts.engine, parts.learner, records, parts.streams, evaluate=dict))
    delta = getattr(config.algorithm.update, "delta", None)
    return {
        "row": row,
        "seed": seed,
        "kl": kls,
        "delta": delta,
        "rewards": records.rewards,
        "signal": records.signal,
    } | {"seconds": time.perf_counter() - began}


def gain(rewards: list[float]) -> float:
    """The rise of the reward per step."""
    ends = min(ENDS, len(rewards) // 2)
    return (sum(rewards[-ends:]) - sum(rewards[:ends])) / ends / max(len(rewards) - ends, 1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=UPDATES, help="fewer, to try the benchmark itself")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(argv)
    with workers(options.jobs) as pool:
        jobs = [(row, seed) for seed in range(options.seeds) for row in ("trpo", "ppo")]
        work = [pool.submit(run, row, seed, options.updates) for row, seed in jobs]
        found = []
        for done in work:
            found.append(done.result())
            print(f"{found[-1]['row']} seed {found[-1]['seed']}: {found[-1]['seconds']:.0f} s", flush=True)
    trpo, ppo = ([f for f in found if f["row"] == row] for row in ("trpo", "ppo"))
    rows = []
    for ours, peer in zip(trpo, ppo, strict=True):
        shares = [kl / ours["delta"] for kl, signal in zip(ours["kl"], ours["signal"], strict=True) if signal]
        taken = sum(s > 0 for s in shares) / len(shares)
        rows.append([str(ours["seed"]), f"{max(shares):.4f}", f"{median(shares):.2f}", f"{taken:.1%}"])
        rows[-1] += [f"{gain(f['rewards']):.4f}" for f in (ours, peer)]
        rows[-1] += [f"{sum(f['rewards'][-ENDS:]) / len(f['rewards'][-ENDS:]):.2f}" for f in (ours, peer)]
    head = ["seed", "largest KL/Δ", "median KL/Δ", "steps accepted", "gain per step", "PPO's", "last reward", "PPO's"]
    show(head, rows)
    every = [kl / f["delta"] for f in trpo for kl, signal in zip(f["kl"], f["signal"], strict=True) if signal]
    accepted = sum(s > 0 for s in every) / len(every)
    ok = max(every) <= RATIO and accepted >= ACCEPTED and median(every) >= MEDIAN
    gains = {row: sum(gain(f["rewards"]) for f in group) / len(group) for row, group in (("trpo", trpo), ("ppo", ppo))}
    if options.updates == UPDATES and options.seeds >= 5:
        write_page("trpo", f"# The trust region, measured\n\n{__doc__}\n\n{markdown(head, rows)}")
    more = {"accepted": accepted, "median": median(every), "updates": len(every), "seeds": options.seeds}
    more |= {f"gain_{row}": value for row, value in gains.items()}
    return close("trpo", max(every), None, RATIO, ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

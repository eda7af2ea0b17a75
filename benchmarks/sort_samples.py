"""How many samples PPO, TRPO and GRPO need to sort five numbers out of ten, from random parameters.

    python -m benchmarks.sort_samples [--seeds 5]

The task is `sort` with its autoregressive transformer, without demonstrations, and with the same reward for all
three (the number of right positions, at the end). There is an evaluation every five steps. Each run stops at the
first one at which 99 % of the greedy answers to 5,000 held-out prompts are exactly right, and its samples so far are
counted. `value` is the mean over seeds of the algorithm that needs the fewest, `peer` is GRPO's. ok: every algorithm
reaches 99 % on every seed. `SETTINGS` has the settings that differ from the algorithms' own; GRPO and PPO share the
task's learning rate and schedule.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import NoRecords, close, markdown, show, workers, write_page

ACCURACY = 0.99
COMMON: dict[str, Any] = {"eval_every": 5, "threads": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"steps": 250, "minibatches": 2},
    "trpo": {"steps": 800, "update.delta": 0.05},
    "grpo": {"steps": 250, "minibatches": 2},
}


@dataclass
class Stopwatch(NoRecords):
    """Records that count, and stop the run once it is accurate."""

    samples: int = 0
    updates: int = 0
    seconds: float = 0.0
    accuracy: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)

    def step(self, step: int, metrics: dict[str, Any], batch: Any, minis: Any, updates: list[Any]) -> None:
        self.samples += metrics["num_responses"]
        self.updates += len(updates)
        self.seconds += metrics["time/step"] - metrics.get("time/eval", 0.0)
        if "eval/accuracy" in metrics:
            self.accuracy = metrics["eval/accuracy"]
            self.curve.append((self.samples, self.accuracy))

    def should_stop(self) -> bool:
        return self.accuracy >= ACCURACY


def run(row: str, seed: int, more: dict[str, Any]) -> tuple[str, int, Stopwatch]:
    """One run, until it is accurate or its steps are over."""
    from ascent.build.assemble import assemble
    from ascent.core.loop import train
    from ascent.settings import configure

    config = configure("sort", {"algorithm": row, "seed": seed, **COMMON, **SETTINGS[row], **more})
    parts, records = assemble(config), Stopwatch()
    evaluate = parts.evaluator()
    list(train(config, config.task, parts.engine, parts.learner, records, parts.streams, evaluate))
    return row, seed, records


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", default="ppo,trpo,grpo")
    parser.add_argument("--steps", type=int, default=None, help="fewer steps, to try the benchmark itself")
    parser.add_argument("--eval-prompts", type=int, default=5_000, help="held-out prompts per evaluation")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(argv)
    rows, began = options.rows.split(","), time.perf_counter()
    found: dict[str, list[Stopwatch]] = {row: [] for row in rows}
    with workers(options.jobs) as pool:
        fewer = {"eval_prompts": options.eval_prompts}
        fewer |= {} if options.steps is None else {"steps": options.steps}
        work = [pool.submit(run, row, seed, fewer) for seed in range(options.seeds) for row in rows]
        for done in work:
            row, seed, records = done.result()
            found[row].append(records)
            print(
                f"{row} seed {seed}: {records.accuracy:.2%} after {records.samples:,} samples, "
                f"{records.updates} updates, {records.seconds:.0f} s",
                flush=True,
            )
    head = ["row", "seeds at 99 %", "samples, mean", "least", "most", "updates, mean", "seconds, mean"]
    table = []
    for row, group in found.items():
        counts = [r.samples for r in group]
        reached = sum(r.accuracy >= ACCURACY for r in group)
        updates, seconds = (sum(getattr(r, n) for r in group) / len(group) for n in ("updates", "seconds"))
        table.append([row, f"{reached} of {len(group)}", f"{sum(counts) / len(counts):,.0f}"])
        table[-1] += [f"{min(counts):,}", f"{max(counts):,}", f"{updates:.0f}", f"{seconds:.0f}"]
    show(head, table)
    means = {row: sum(r.samples for r in group) / len(group) for row, group in found.items()}
    ok = all(r.accuracy >= ACCURACY for group in found.values() for r in group)
    if len(rows) == len(SETTINGS) and options.seeds >= 5:
        write_page("sort_samples", f"# Samples to sort five numbers out of ten\n\n{__doc__}\n\n{markdown(head, table)}")
    more = {f"samples_{row}": [r.samples for r in group] for row, group in found.items()}
    more |= {"lowest_accuracy": min(r.accuracy for group in found.values() for r in group)}
    more |= {"seconds": time.perf_counter() - began}
    return close("sort_samples", min(means.values()), means.get("grpo"), ACCURACY, ok, seeds=options.seeds, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

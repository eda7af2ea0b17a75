"""Six ways to learn to sort: data, cost and accuracy of each.

    python -m benchmarks.map [--seeds 1] [--steps 300]

`ascent compare sort --algorithms sft,dpo,reinforce,grpo,ppo,trpo`, all from random parameters and with the task's
own settings, 64 prompts per step. They learn from different data. sft gets the right answer to every prompt. dpo
gets a pair of corrupted answers of which one was preferred (and it starts from a random reference, which it was not
made for). The four others sample eight answers per prompt and get the reward of each. `labels` counts the
demonstrations, pairs or rewards. Accuracy is exact match of greedy answers on 1,000 held-out prompts.

`value` is the best accuracy of an algorithm that learns from rewards; the peer is sft's. ok: every algorithm ran,
and labels are counted correctly: as many as samples for those that sample, and no samples for those that use offline
data.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ascent.settings import configure
from ascent.workflows.seed_comparison import draw_comparison, run_all, summarize_runs
from benchmarks.common import COLORS, RESULTS, close, figure, markdown, save_picture, show, write_page

ROWS = ("sft", "dpo", "reinforce", "grpo", "ppo", "trpo")
SHOWN = {"sft": "demonstrations", "dpo": "pairs"}


def picture(runs: dict[str, Any], found: dict[str, Any]) -> None:
    """Accuracy against labels and against seconds, and the sizes of both."""
    from ascent.runs.display.plots import series
    from ascent.workflows.seed_comparison import costs_by_step

    fig, axes = figure(1, 3, (14.0, 4.4))
    for i, (name, group) in enumerate(runs.items()):
        for run in group:
            steps, values = series(run.metrics, "eval/accuracy")
            costs = costs_by_step(run, "labels")
            for axis, cost in zip(axes[0], ("labels", "seconds"), strict=False):
                at = [costs[cost][step - 1] for step in steps]
                axis.plot(
                    at, values, color=COLORS[i], linewidth=1.7, marker=".", label=name if run is group[0] else None
                )
    for axis, cost in zip(axes[0], ("labels: demonstrations, pairs or rewards", "seconds of training"), strict=False):
        axis.set_xscale("log")
        axis.set_ylim(-0.03, 1.03)
        axis.set_xlabel(cost)
    axes[0][0].set_ylabel("exactly right, held out, greedy")
    axes[0][0].set_title("Labels it needed")
    axes[0][1].set_title("What it took")
    axes[0][0].legend(frameon=False, fontsize=8)
    bars = axes[0][2]
    bars.barh(
        range(len(found)),
        [row["eval/accuracy"]["mean"] for row in found.values()],
        color=COLORS[: len(found)],
        alpha=0.45,
    )
    bars.set_yticks(range(len(found)), list(found))
    bars.invert_yaxis()
    for i, row in enumerate(found.values()):
        label = f"{row['eval/accuracy']['mean']:.0%} · {row['labels']:,.0f} labels · {row['seconds']:.0f} s"
        bars.annotate(label, (0.02, i), va="center", fontsize=8, color="#111111")
    bars.set_xlim(0, 1.03)
    bars.grid(False)
    bars.set_title("Where each ended")
    bars.set_xlabel("exactly right, held out, greedy")
    save_picture(fig, "map")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300, help="fewer, to try the benchmark itself")
    parser.add_argument("--eval-prompts", type=int, default=1_000, help="held-out prompts per evaluation")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--out", type=Path, default=None, help="keep the runs in this folder, and resume those that are already there"
    )
    parser.add_argument("--no-page", action="store_true", help="write neither page nor picture")
    options = parser.parse_args(argv)
    often = {"steps": options.steps, "eval_every": max(1, options.steps // 20), "record_rollouts": "none"}
    often["eval_prompts"] = options.eval_prompts
    configs = {row: configure("sort", {"algorithm": row, **often}) for row in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        runs = run_all(configs, list(range(options.seeds)), options.out or Path(folder), options.jobs)
        found = summarize_runs(runs)
        if not options.no_page:
            picture(runs, found)
            draw_comparison(runs, RESULTS / "map_curves.png", options.seeds)
    head = ["row", "learns from", "samples", "labels", "updates", "seconds", "exactly right"]
    rows = [
        [
            name,
            SHOWN.get(name, "rewards of its own samples"),
            f"{row['responses']:,.0f}",
            f"{row['labels']:,.0f}",
            f"{row['updates']:,.0f}",
            f"{row['seconds']:.0f}",
            f"{row['eval/accuracy']['mean']:.1%}",
        ]
        for name, row in found.items()
    ]
    show(head, rows)
    if not options.no_page:
        pictures = "![Accuracy by labels and by seconds](map.png)\n\n![The curves of the comparison](map_curves.png)"
        seeds = f"{options.seeds} seed{'s' if options.seeds > 1 else ''}"
        note = f"{seeds}, {options.steps} steps; seconds are of one thread, {options.jobs} runs at a time."
        write_page("map", f"# A map of six methods\n\n{__doc__}\n\n{markdown(head, rows)}\n\n{note}\n\n{pictures}")
    accuracy = {name: row["eval/accuracy"]["mean"] for name, row in found.items()}
    best = max((name for name in ROWS if name not in SHOWN), key=lambda name: accuracy[name])
    counted = all((row["labels"] == row["responses"]) == (name not in SHOWN) for name, row in found.items())
    ok = counted and len(found) == len(ROWS)
    more = {"best": best, **{f"accuracy_{name}": value for name, value in accuracy.items()}}
    more |= {f"labels_{name}": row["labels"] for name, row in found.items()}
    return close("map", accuracy[best], accuracy["sft"], 0.0, ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

"""The limit of imitation: SFT on demonstrations that are 30 % wrong, then GRPO from there and from random.

    python -m benchmarks.ceiling [--jobs 2]

The task is `sort`, five numbers out of ten. The demonstrator always makes the same mistake: if a prompt begins with
0, 1 or 2, it swaps the last two numbers of the answer that differ. So 30 % of the demonstrations are wrong (slightly
fewer, because nothing can be swapped if all numbers are equal), and a good imitator learns the mistake too. GRPO
then starts from that policy (`--init`) with the true reward, the number of right positions. For contrast it also
starts from random parameters and takes as many steps.

Accuracy is exact match of greedy answers on 1,000 held-out prompts. The demonstrator's accuracy is the ceiling.
`value` is GRPO's accuracy after SFT; the peer is SFT's. ok: SFT ends within 3 points of the ceiling, and GRPO after
SFT ends at least 10 points above SFT and above GRPO from random parameters.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import COLORS, close, figure, markdown, save_picture, show, workers, write_page

WRONG, NEAR, BEYOND = 0.3, 0.03, 0.10
NAMES = ("SFT", "GRPO from SFT", "GRPO from random")


def train(folder: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """One run; its metrics."""
    import ascent

    quiet = {"threads": 1, "record_rollouts": "none", "checkpoint_every": 10_000}
    return ascent.train("sort", out=folder, show=False, wrong=WRONG, **quiet, **settings).metrics


def ceiling() -> float:
    """How often the demonstrator is right on the prompts of the evaluation."""
    import torch

    from ascent.tasks.small.sorting import Sort

    task = Sort(wrong=WRONG)
    prompt = task.held_out(1_000).prompt
    shown = task.demonstrate(prompt, torch.Generator())[:, 0]
    return float((shown == prompt.sort(-1).values).all(-1).float().mean())


def curve(metrics: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    points = [(line["step"] + 1, line["eval/accuracy"]) for line in metrics if line.get("eval/accuracy") is not None]
    steps, values = zip(*points, strict=True)
    return list(steps), list(values)


def draw(found: dict[str, list[dict[str, Any]]], top: float) -> None:
    fig, axes = figure(1, 1, (7.4, 4.4))
    axis, start = axes[0][0], 0
    for i, name in enumerate(NAMES):
        steps, values = curve(found[name])
        start = curve(found["SFT"])[0][-1] if name != "SFT" else 0
        steps, values = [0, *steps], [curve(found["SFT"])[1][-1] if i == 1 else 0.0, *values]
        axis.plot([start + s for s in steps], values, color=COLORS[i], linewidth=1.8, marker=".", label=name)
    axis.axhline(top, color="#555555", linestyle="--", linewidth=1, label="the demonstrator")
    axis.axvline(curve(found["SFT"])[0][-1], color="#cccccc", linewidth=1, zorder=0)
    axis.set_title("Imitation stops at its demonstrator; a reward goes beyond")
    axis.set_xlabel("step: SFT first, then GRPO")
    axis.set_ylabel("exactly right, held out, greedy")
    axis.set_ylim(-0.03, 1.03)
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    save_picture(fig, "ceiling")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sft", type=int, default=400, help="steps of SFT; fewer, to try the benchmark itself")
    parser.add_argument("--grpo", type=int, default=200, help="steps of GRPO")
    parser.add_argument("--no-page", action="store_true", help="write neither page nor picture")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        every = {"eval_every": max(1, options.sft // 16)}
        found = {"SFT": train(str(root / "sft"), {"algorithm": "sft", "steps": options.sft, **every})}
        grpo = {"algorithm": "grpo", "steps": options.grpo, "eval_every": max(1, options.grpo // 10)}
        starts = {"GRPO from SFT": {"init": str(root / "sft")}, "GRPO from random": {}}
        with workers(options.jobs) as pool:
            work = {name: pool.submit(train, str(root / name), grpo | start) for name, start in starts.items()}
            found |= {name: job.result() for name, job in work.items()}
    top = ceiling()
    ends = {name: curve(found[name])[1][-1] for name in NAMES}
    rows = [["the demonstrator", f"{top:.1%}", "·"]]
    rows += [[name, f"{ends[name]:.1%}", f"{found[name][-1]['step'] + 1}"] for name in NAMES]
    head = ["policy", "exactly right, held out", "steps"]
    show(head, rows)
    sft, best = ends["SFT"], ends["GRPO from SFT"]
    ok = abs(sft - top) <= NEAR and best >= sft + BEYOND and best > ends["GRPO from random"]
    if not options.no_page:
        draw(found, top)
        picture = "![Accuracy of SFT and of GRPO from it](ceiling.png)"
        write_page("ceiling", f"# The ceiling of imitation\n\n{__doc__}\n\n{markdown(head, rows)}\n\n{picture}")
    more = {"ceiling": top, "from_random": ends["GRPO from random"], "wrong": WRONG}
    return close("ceiling", best, sft, sft + BEYOND, ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

"""The course's settings over its whole menu: four advantages × three losses × with and without KL × three rewards.

    python -m benchmarks.course_grid [--seeds 20] [--steps 100] [--jobs 2]

Each cell is `ascent train lecture --preset course` (Adam 1e-3, 10 samples, 100 epochs of 10 inner steps) on every
seed. All seeds of a cell run in one stacked loop (benchmarks/many.py). The clip is the course's, 0.01. The KL is k3
in the loss to a reference that is renewed every 10 epochs; the course's published runs have no KL, so the
coefficient is GRPO's, 0.04. For contrast there is ascent on the exact, enumerated gradient: the same Adam and 1,000
updates from the same initial parameters, and ten times as many updates.

Measured at the end: E[R] by enumeration, the share of prompts that the greedy answer sorts, and the share of groups
without signal over the last ten epochs. `value` is the best cell's mean E[R] with the course's reward. The peer is
the mean of the exact ascent. The target is the published figure for where that ascent stops. ok: every run ended
with a finite E[R], the exact ascent stops within 0.25 of that figure, and none of its seeds reaches 4.9. Writes
benchmarks/results/course_grid.md and its picture.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from ascent.oracle.exact import enumerate_responses, probability, reward_table
from ascent.runs.confidence_intervals import mean_and_half_width
from benchmarks.common import COLORS, close, figure, markdown, pair, save_picture, show, write_page
from benchmarks.many import Lectures, Stack, outcome, train_many

ADVANTAGES = ("raw", "centered", "normalized", "best-only")
LOSSES = ("log-prob", "ratio", "clipped")
KL = {"no KL": {}, "KL": {"kl": "in-loss", "kl.estimator": "k3", "kl.coef": 0.04, "reference": "every"}}
REWARDS = {"inclusion-ordering": 5, "positions": 3, "exact": 1}
"""The rewards, with the maximum of each."""
UPDATES = (1_000, 10_000)
STOPS, NEAR, SOLVED = 3.9, 0.25, 4.9

Cell = tuple[str, str, str, str]
Grid = dict[Cell, dict[str, np.ndarray]]


def run_cell(cell: Cell, seeds: int, steps: int) -> dict[str, np.ndarray]:
    """E[R], share of sorted prompts and share of groups without signal, for every seed."""
    reward, advantage, loss, kl = cell
    settings = {"preset": "course", "reward": reward, "advantage": advantage, "loss": loss, "steps": steps, **KL[kl]}
    ended = train_many(seeds, **settings)
    return {name: getattr(ended, name).numpy() for name in ("expected", "sorted", "silent")}


def ascend(reward: str, seeds: int, updates: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    """Adam (1e-3) on ∇E[R] itself: how each seed stands after each of these numbers of updates."""
    task = Lectures(reward, runs=seeds)
    policy = Stack(task.space, torch.Generator(), tuple(range(seeds)))
    prompt = task.held_out(0).prompt
    responses, table = enumerate_responses(task.space, prompt), reward_table(task, prompt)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3, fused=True)
    found = []
    for update in range(1, max(updates) + 1):
        optimizer.zero_grad()
        (-(probability(policy, responses) * table).sum() / 3).backward()
        optimizer.step()
        if update in updates:
            expected, right = outcome(policy, task)
            found.append({"expected": expected.numpy(), "sorted": right.numpy()})
    return found


def one_thread() -> None:
    torch.set_num_threads(1)


def measure(seeds: int, steps: int, jobs: int, updates: tuple[int, ...]) -> tuple[Grid, dict[str, list[Any]]]:
    cells = list(itertools.product(REWARDS, ADVANTAGES, LOSSES, KL))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=one_thread) as pool:
        ascents = {reward: pool.submit(ascend, reward, seeds, updates) for reward in REWARDS}
        waiting = {cell: pool.submit(run_cell, cell, seeds, steps) for cell in cells}
        grid = {}
        for cell, future in waiting.items():
            grid[cell] = future.result()
            print(*cell, f"E[R] {grid[cell]['expected'].mean():.3f}", file=sys.stderr, flush=True)
        return grid, {reward: future.result() for reward, future in ascents.items()}


def rows_of(grid: Grid, ascents: dict[str, list[Any]], updates: tuple[int, ...]) -> list[list[str]]:
    rows = []
    for (reward, advantage, loss, kl), cell in grid.items():
        expected = pair(*mean_and_half_width(cell["expected"]))
        numbers = [expected, f"{cell['sorted'].mean():.0%}", f"{cell['silent'].mean():.0%}"]
        rows.append([f"{reward} (of {REWARDS[reward]})", advantage, loss, kl, *numbers])
    for reward, found in ascents.items():
        for count, cell in zip(updates, found, strict=True):
            numbers = [pair(*mean_and_half_width(cell["expected"])), f"{cell['sorted'].mean():.0%}", "·"]
            rows.append([f"{reward} (of {REWARDS[reward]})", "exact gradient", f"{count:,} updates", "no KL", *numbers])
    return rows


def effect(grid: Grid, axis: int, one: str, other: str) -> tuple[float, float]:
    """E[R] / maximum, one choice minus another, all else and the seed equal: mean and half of its interval.

    The interval is over seeds, each the mean of its differences, since runs of one seed share their start.
    """
    gaps = []
    for cell, found in grid.items():
        if cell[axis] == one:
            twin = (*cell[:axis], other, *cell[axis + 1 :])
            gaps.append((found["expected"] - grid[twin]["expected"]) / REWARDS[cell[0]])
    return mean_and_half_width(np.mean(gaps, axis=0))


def findings(grid: Grid, ascents: dict[str, list[Any]], updates: tuple[int, ...]) -> str:
    """The paragraph of findings, every number in it from the data."""
    course = {cell: found["expected"].mean() for cell, found in grid.items() if cell[0] == "inclusion-ordering"}
    best, worst = max(course, key=course.get), min(course, key=course.get)
    advantage = {c: np.mean([v for cell, v in course.items() if cell[1] == c]) for c in ADVANTAGES}
    order = sorted(advantage, key=advantage.get, reverse=True)
    solved = sum(int((found["expected"] >= 0.98 * REWARDS[cell[0]]).sum()) for cell, found in grid.items())
    runs = sum(len(found["expected"]) for found in grid.values())
    accurate = max(grid, key=lambda cell: grid[cell]["sorted"].mean())
    silent = np.mean([found["silent"].mean() for found in grid.values()])
    found = ascents["inclusion-ordering"]
    ends = ", ".join(
        f"{pair(*mean_and_half_width(cell['expected']))} after {count:,} updates"
        for count, cell in zip(updates, found, strict=True)
    )

    def exact_share(reward: str) -> str:
        return f"{ascents[reward][0]['expected'].mean() / REWARDS[reward]:.0%}"

    def best_share(reward: str) -> str:
        best = max(found["expected"].mean() for cell, found in grid.items() if cell[0] == reward)
        return f"{best / REWARDS[reward]:.0%}"

    def change(axis: int, one: str, other: str) -> str:
        mean, half = effect(grid, axis, one, other)
        unsure = "" if abs(mean) > half else ", which could be chance"
        return f"{mean:+.1%} ± {half:.1%} of the largest reward{unsure}"

    return (
        f"With the course's reward E[R] ends between {course[worst]:.2f} ({', '.join(worst[1:])}) and "
        f"{course[best]:.2f} ({', '.join(best[1:])}) of 5; by advantage, over losses and KL: "
        + ", ".join(f"{name} {advantage[name]:.2f}" for name in order)
        + f". Only {solved} of all {runs:,} runs came within 2 % of the largest reward, and the cell that sorts most "
        f"({', '.join(accurate)}) sorts {grid[accurate]['sorted'].mean():.0%} of the prompts. The ratio in place of "
        f"the log-prob changes E[R] by {change(2, 'ratio', 'log-prob')}; the clip in place of the ratio by "
        f"{change(2, 'clipped', 'ratio')}; the KL by {change(3, 'KL', 'no KL')}. At the end {silent:.0%} of the groups "
        "have no signal. Better gradients alone would not mend it: with the course's reward, ascent on the exact "
        f"gradient, with no noise at all, stops at {ends} (prompts sorted at the first of these: "
        f"{found[0]['sorted'].mean():.0%}; the best seed reaches {found[0]['expected'].max():.2f}), which is "
        f"{found[0]['expected'].mean() - course[best]:+.2f} to the best cell. With the positions reward it is worth "
        f"more: {exact_share('positions')} of the largest reward in place of {best_share('positions')}. The landscape "
        "is the limit: an entropy bonus that fades gets past it (`python -m benchmarks.lecture_solve`)."
    )


def draw(grid: Grid, ascents: dict[str, list[Any]], seeds: int) -> Any:
    """E[R] above, sorted prompts below, one column per reward; filled marks are without KL, hollow ones with KL."""
    fig, axes = figure(2, len(REWARDS), (11, 6.2))
    for column, reward in enumerate(REWARDS):
        for axis, measure, scale in zip(axes[:, column], ("expected", "sorted"), (REWARDS[reward], 1), strict=True):
            for i, (loss, kl) in enumerate(itertools.product(LOSSES, KL)):
                color, x = COLORS[i // 2], np.arange(len(ADVANTAGES)) + (i - 2.5) * 0.12
                values = [
                    mean_and_half_width(grid[reward, advantage, loss, kl][measure] / scale) for advantage in ADVANTAGES
                ]
                means, halves = np.array(values).T
                face = color if kl == "no KL" else "white"
                axis.errorbar(
                    x, means, np.nan_to_num(halves), fmt="o", color=color, markerfacecolor=face, markersize=5,
                    elinewidth=1, label=f"{loss}, {kl}",
                )  # fmt: skip
            exact = ascents[reward][0][measure].mean() / scale
            axis.axhline(exact, color="#555555", linestyle="--", linewidth=1.2, label="exact gradient, 1,000 updates")
            axis.set_xticks(range(len(ADVANTAGES)), ADVANTAGES)
            axis.set_ylim(-0.03, 1.03)
        axes[0, column].set_title(f"{reward} reward")
    axes[0, 0].set_ylabel("E[R], share of the largest reward")
    axes[1, 0].set_ylabel("prompts sorted exactly, greedy")
    axes[1, 0].legend(frameon=False, fontsize=7.5, loc="upper left")
    fig.suptitle(f"The course's settings, {seeds} seeds, 95 % intervals", x=0.01, ha="left", fontsize=11)
    return fig


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(argv)
    seeds, updates = options.seeds, tuple(count * options.steps // 100 for count in UPDATES)
    grid, ascents = measure(seeds, options.steps, options.jobs, updates)
    head = ["reward", "advantage", "loss", "KL", "E[R]", "sorted", "silent groups"]
    rows, words = rows_of(grid, ascents, updates), findings(grid, ascents, updates)
    show(head, rows)
    print(f"\n{words}")
    if options.steps == 100:
        save_picture(draw(grid, ascents, seeds), "course_grid")
        note = (
            f"`python -m benchmarks.course_grid --seeds {seeds}`: means over {seeds} seeds ± half of the 95 % interval."
        )
        what = (
            "Sorted: greedy answers. Silent groups: all rewards equal, over the last ten epochs. KL: k3 in the loss, "
        )
        what += "0.04, the reference renewed every ten epochs. Clip: 0.01."
        page = ("# The course's settings", words, "![The grid](course_grid.png)", markdown(head, rows), note, what)
        write_page("course_grid", "\n\n".join(page))
    course = [found["expected"].mean() for cell, found in grid.items() if cell[0] == "inclusion-ordering"]
    exact = ascents["inclusion-ordering"][0]["expected"]
    finite = all(math.isfinite(found["expected"].sum()) for found in grid.values())
    ok = finite and abs(exact.mean() - STOPS) <= NEAR and exact.max() < SOLVED
    return close("course_grid", float(max(course)), float(exact.mean()), STOPS, ok, seeds=seeds, cells=len(grid))[1]


if __name__ == "__main__":
    sys.exit(main())

"""What happens when one batch is used again: the exact bias of inner steps 1 to 16.

    python -m benchmarks.reuse [--seeds 20] [--pairs 3]

The task is `lecture`. The library's loop runs with 16 inner steps per batch, with the course's settings (Adam 1e-3,
clip 0.01) and with the defaults of `ascent train lecture` (Adam 1e-2, clip 0.2, entropy bonus). Before every inner
step its policy is copied. That gives pairs (old policy, policy at inner step k) on real paths, at batches 0, 5 and
20; medians over pairs are reported. For each pair the oracle enumerates every group of 10 fresh responses sampled from
the old policy, with leave-one-out advantages, so that at k = 1 the expected update is ∇E[R] itself:

    bias = ‖E[g] − ∇E[R]‖ / ‖∇E[R]‖, and the cosine of the two,  ∇E[R] at the current policy

This is done for the log-prob, ratio and clipped losses, and as a control for the unclipped product ratio, whose bias
must be 0. The effective sample size is (E w)² / E w², with w the ratio of whole responses. Then whole runs: 100
batches (3,000 responses) with k inner steps each, and E[R] at the end over the seeds.

`value` is the bias of the ratio loss at inner step 16 with the default settings; the peer is that of the log-prob
loss. The target bounds the control's largest bias (1e-9). Writes benchmarks/results/reuse.md.
"""

from __future__ import annotations

import argparse
import copy
import sys
from typing import Any

import numpy as np
import torch

from ascent.build.assemble import assemble
from ascent.core.advantages import LeaveOneOut
from ascent.core.algorithms import Algorithm, SequenceSum
from ascent.core.loop import train as loop
from ascent.core.losses import Clipped, LogProb, Ratio, SequenceRatio
from ascent.models import Policy
from ascent.oracle.estimator import average_over_prompts, estimate
from ascent.oracle.exact import ResponseTable
from ascent.runs.confidence_intervals import mean_and_half_width
from ascent.settings import configure
from ascent.tasks.small.lecture import LECTURE_PROMPTS, Lecture
from benchmarks.common import COLORS, close, figure, markdown, pair, save_picture, show, write_page
from benchmarks.many import Memory, train_many

STEPS = (1, 2, 4, 8, 16)
BATCHES = (0, 5, 20)
SAMPLES = 10
CONTROL = "product ratio"
LOSSES = ("log-prob", "ratio", "clipped")
EXACT = 1e-9
SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "course": ({"preset": "course", "advantage": "centered"}, 0.01),
    "default": ({"preset": "default"}, 0.2),
}
"""Settings of `ascent train lecture`, and the clip that goes with them."""

Found = dict[str, dict[int, np.ndarray]]


def surrogates(clip: float) -> dict[str, Any]:
    product = SequenceRatio("product", low=None, high=None)
    return {"log-prob": LogProb(), "ratio": Ratio(), "clipped": Clipped(clip, clip), CONTROL: product}


def path(settings: dict[str, Any], seed: int) -> list[list[Policy]]:
    """For each of the batches the policy before each inner step, from a run of the library's loop."""
    steps = max(BATCHES) + 1
    config = configure("lecture", {**settings, "epochs": max(STEPS), "seed": seed})
    parts, seen = assemble(config), []
    take = parts.learner.step

    def watched(*args: Any) -> Any:
        seen.append(copy.deepcopy(parts.policy))
        return take(*args)

    parts.learner.step = watched  # type: ignore[method-assign]
    stop = Stopped(steps)
    list(loop(config, config.task, parts.engine, parts.learner, stop, parts.streams, evaluate=dict))
    return [seen[batch * max(STEPS) : (batch + 1) * max(STEPS)] for batch in BATCHES]


class Stopped(Memory):
    """Records that end the run after a given number of batches; its schedules stay those of the whole run."""

    def __init__(self, batches: int):
        super().__init__(runs=1)
        self.batches = batches

    def should_stop(self) -> bool:
        return len(self.silent) >= self.batches

    def is_best(self) -> bool:
        return False


def compare(old: Policy, now: Policy, clip: float) -> dict[str, float]:
    """Bias and cosine of every loss's expected update for one pair; effective sample size; KL(old ‖ now)."""
    tables = [ResponseTable(now, torch.tensor(prompt), Lecture(), old=old) for prompt in LECTURE_PROMPTS]
    gradient = torch.stack([table.gradient for table in tables]).mean(0)
    found = {}
    for name, loss in surrogates(clip).items():
        algorithm = Algorithm(LeaveOneOut(), loss, SequenceSum())
        whole = average_over_prompts([estimate(table, algorithm, SAMPLES) for table in tables])
        found[f"{name} bias"], found[f"{name} cosine"] = whole.bias(gradient), whole.cosine(gradient)
    sizes, kls = [], []
    for table in tables:
        log_w = (table.outputs().logp.detach() - table.batch.logp_old).sum(-1)[0]
        sizes.append(1 / float(table.probability @ (2 * log_w).exp()))
        kls.append(-float(table.probability @ log_w))
    return found | {"ess": sum(sizes) / len(sizes), "kl": sum(kls) / len(kls)}


def biases(settings: dict[str, Any], clip: float, seeds: int) -> dict[int, dict[str, float]]:
    """For each inner step the medians over pairs: where a gradient all but vanished, its relative bias has no bound."""
    found: dict[int, list[dict[str, float]]] = {k: [] for k in STEPS}
    for seed in range(seeds):
        for policies in path(settings, seed):
            for k in STEPS:
                found[k].append(compare(policies[0], policies[k - 1], clip))
            print(f"seed {seed}: a path's pairs are done", file=sys.stderr, flush=True)
    return {k: {name: float(np.median([f[name] for f in rows])) for name in rows[0]} for k, rows in found.items()}


def endings(settings: dict[str, Any], clip: float, seeds: int) -> Found:
    """E[R] at the end of 100 batches with k inner steps each; [seed]."""
    bounds = {"clipped": {"loss.low": clip, "loss.high": clip}}
    return {
        loss: {
            k: train_many(seeds, **settings, loss=loss, epochs=k, **bounds.get(loss, {})).expected.numpy()
            for k in STEPS
        }
        for loss in LOSSES
    }


def rows_of(bias: dict[int, dict[str, float]], ends: Found) -> list[list[str]]:
    rows = []
    for k, mean in bias.items():
        row = [str(k), f"{mean['kl']:.4f}", f"{mean['ess']:.0%}"]
        row += [f"{mean[f'{name} bias']:.1%} ({mean[f'{name} cosine']:.3f})" for name in LOSSES]
        row += [f"{mean[f'{CONTROL} bias']:.0e}"]
        rows.append([*row, *(pair(*mean_and_half_width(ends[name][k])) for name in LOSSES)])
    return rows


HEAD = ["inner step", "KL(old ‖ now)", "sample size", *(f"{name}: bias (cosine)" for name in LOSSES)]
HEAD += [f"{CONTROL}: bias", *(f"{name}: E[R]" for name in LOSSES)]


def draw(bias: dict[str, Any], ends: dict[str, Found], seeds: int) -> Any:
    """Bias, effective sample size and final E[R] against the inner step, one row for each setting."""
    fig, axes = figure(len(SETTINGS), 3, (11, 6.2))
    for row, name in zip(axes, SETTINGS, strict=True):
        for i, loss in enumerate(LOSSES):
            row[0].plot(STEPS, [bias[name][k][f"{loss} bias"] for k in STEPS], ".-", color=COLORS[i], label=loss)
            means, halves = np.array([mean_and_half_width(ends[name][loss][k]) for k in STEPS]).T
            row[2].errorbar(STEPS, means, np.nan_to_num(halves), fmt=".-", color=COLORS[i], label=loss, capsize=2)
        control = [bias[name][k][f"{CONTROL} bias"] for k in STEPS]
        row[0].plot(STEPS, control, "--", color="#555555")
        row[0].text(STEPS[-1], -0.02, f"{CONTROL}: 0", color="#555555", ha="right", va="top", fontsize=7.5)
        row[1].plot(STEPS, [bias[name][k]["ess"] for k in STEPS], ".-", color=COLORS[3])
        row[0].set_ylabel(f"{name} settings: bias / ‖∇E[R]‖")
        row[0].set_ylim(-0.1, 1.05)
        row[1].set_ylim(0, 1.03)
        row[2].set_ylim(2, 5.05)
        rate = configure("lecture", SETTINGS[name][0]).algorithm.update.lr
        row[0].set_title(f"Bias of the update, lr {rate:g}")
        row[1].set_title("Effective sample size, share")
        row[2].set_title("E[R] of 5 after 100 batches")
        row[2].legend(frameon=False, fontsize=7.5, loc="lower left")
        for axis in row:
            axis.set_xscale("log", base=2)
            axis.set_xticks(STEPS, STEPS)
    for axis, words in zip(axes[-1], ("inner step", "inner step", "inner steps per batch"), strict=True):
        axis.set_xlabel(words)
    title = f"Reusing a batch: fresh samples of the old policy, exact; E[R] over {seeds} seeds, 95 % intervals"
    fig.suptitle(title, x=0.01, ha="left", fontsize=11)
    return fig


def findings(bias: dict[str, Any], ends: dict[str, Found]) -> str:
    """The paragraph of findings, every number in it from the data."""
    parts = []
    for name in SETTINGS:
        last = bias[name][max(STEPS)]
        rates = ", ".join(f"{loss} {last[f'{loss} bias']:.0%}" for loss in LOSSES)
        worth = {loss: {k: ends[name][loss][k].mean() for k in STEPS} for loss in LOSSES}
        best = {loss: max(worth[loss], key=worth[loss].get) for loss in LOSSES}
        tops = ", ".join(f"{loss} at {best[loss]} ({worth[loss][best[loss]]:.2f})" for loss in LOSSES)
        parts.append(
            f"Under the {name} settings the policy at inner step 16 is KL {last['kl']:.3f} from the one that was "
            f"sampled, the effective sample size {last['ess']:.0%}, and the bias of the expected update as a share of "
            f"the gradient: {rates}. Of 1 to 16 inner steps on each of 100 batches, E[R] is highest with {tops}."
        )
        most = max(LOSSES, key=lambda loss: last[f"{loss} bias"])
        if most == max(LOSSES, key=lambda loss: worth[loss][max(STEPS)]):
            parts.append(
                f"At 16 the {most} loss is the most biased and yet ends highest: bias is not what decides here, but "
                "how far one batch may carry the policy."
            )
    return " ".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="seeds of the whole runs")
    parser.add_argument("--pairs", type=int, default=3, help="seeds whose paths give the pairs")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    bias, ends, sections = {}, {}, []
    for name, (settings, clip) in SETTINGS.items():
        bias[name], ends[name] = biases(settings, clip, options.pairs), endings(settings, clip, options.seeds)
        rows = rows_of(bias[name], ends[name])
        print(f"\n{name}: {settings}, clip {clip}")
        show(HEAD, rows)
        sections.append(f"## {name.capitalize()} settings (clip {clip:g})\n\n{markdown(HEAD, rows)}")
    words = findings(bias, ends)
    print(f"\n{words}")
    save_picture(draw(bias, ends, options.seeds), "reuse")
    what = "What is measured, and how: `benchmarks/reuse.py`. Medians over "
    what += f"{options.pairs * len(BATCHES)} pairs; E[R] over {options.seeds} seeds ± half of the 95 % interval."
    write_page("reuse", "\n\n".join(["# Using a batch again", words, "![Reuse](reuse.png)", *sections, what]))
    control = max(mean[f"{CONTROL} bias"] for found in bias.values() for mean in found.values())
    last = bias["default"][max(STEPS)]
    return close("reuse", last["ratio bias"], last["log-prob bias"], EXACT, control <= EXACT, control=control)[1]


if __name__ == "__main__":
    sys.exit(main())

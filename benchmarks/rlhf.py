"""A full round of RLHF on a small model: demonstrations, SFT, pairs, a reward model, then PPO and DPO.

    python -m benchmarks.rlhf [--jobs 2]

The task is `sort`, five numbers out of ten. The true reward, the number of right positions (of 5), is hidden: it
only labels 2,000 pairs of samples of the SFT policy. A reward model is trained on these pairs. PPO is trained on the
reward model, starting from the SFT policy, with k1 in the reward (per token) at several coefficients β. DPO is
trained on the same pairs.

Every stage is measured on 1,000 held-out prompts, with two samples each at temperature 1: the true reward, the
learned reward, and the KL to the SFT policy. Without a KL the learned reward is highest and the true one is lower
than at the start. This is over-optimization; at some larger β the KL stops it.

`value` is the best true reward of a PPO with KL; the peer is the SFT policy's. ok: the reward model ranks 65 % of
held-out pairs correctly; PPO without KL has a higher learned and a lower true reward than SFT; PPO with KL and DPO
have a higher true reward than SFT; and everything takes under 180 seconds on two cores.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import COLORS, close, figure, markdown, save_picture, show, workers, write_page

SECONDS, ACCURACY = 180.0, 0.65
PPO, DPO = (0.0, 0.1, 0.3, 1.0), (0.1, 0.5)
"""The KL coefficients of PPO, and β of DPO."""
QUIET = {"threads": 1, "record_rollouts": "none", "checkpoint_every": 10_000, "eval_every": 10_000}


def train(folder: Path, **settings: Any) -> Any:
    import ascent

    return ascent.train("sort", out=folder, show=False, **QUIET | settings)


def ppo(root: Path, β: float, steps: int) -> Path:
    """PPO on the reward model, from the SFT policy, held to it by β."""
    kl = {"kl": "in-reward", "kl.estimator": "k1", "kl.coef": β, "kl.per": "token", "reference": "frozen"}
    small = {"prompts": 32, "lr": 1e-3, "steps": steps, "init": str(root / "sft")}
    return train(root / f"ppo-{β:g}", algorithm="ppo", reward=f"model:{root / 'rewards'}", **kl, **small).folder


def dpo(root: Path, β: float, steps: int) -> Path:
    settings = {"pairs": str(root / "pairs.jsonl"), "init": str(root / "sft"), "steps": steps, "lr": 5e-4}
    return train(root / f"dpo-{β:g}", algorithm="dpo", **settings, **{"loss.beta": β}).folder


def measured(root: Path, run: str, prompts: int) -> dict[str, float]:
    """True and learned reward of a policy's samples, its KL to the SFT policy, and the share of exact answers."""
    import torch

    from ascent.build.reward_loading import load_reward_model
    from ascent.build.trained_run import Run
    from ascent.rollout.small_policy_engine import SmallPolicyEngine
    from ascent.tasks.small import sorting
    from ascent.training.small_learner import action_logprobs, log_probs

    torch.set_num_threads(1)
    policy, anchor = Run(root / run).policy, Run(root / "sft").policy
    task = Run(root / "sft").config.task
    rollouts = SmallPolicyEngine(policy, 1.0, torch.Generator().manual_seed(1)).generate(task.held_out(prompts), 2)
    scores = sorting.score_sorting("positions", rollouts, task.space)
    with torch.no_grad():
        gap = rollouts.logp_sampler - action_logprobs(log_probs(anchor, rollouts), rollouts)
    return {
        "true": float(scores.reward.mean()),
        "learned": float(load_reward_model(root / "rewards")(rollouts).mean()),
        "kl": float(gap.sum(-1).mean()),
        "right": float(scores.correct.float().mean()),  # type: ignore[union-attr]
    }


def prepare(root: Path, options: argparse.Namespace) -> Any:
    """Demonstrations → SFT → pairs → the reward model."""
    from ascent.build.reward_loading import assess
    from ascent.workflows.labels import make_pairs

    train(root / "sft", algorithm="sft", steps=options.sft)
    make_pairs(root / "sft", root / "pairs.jsonl", options.pairs)
    pairs = {"pairs": str(root / "pairs.jsonl"), "eval_every": 20, "keep_best": True}
    train(root / "rewards", algorithm="reward-model", steps=options.rewards, **pairs)
    return assess(root / "rewards")


def path_of(root: Path, run: str) -> list[tuple[float, float, float]]:
    """Where a PPO run went: KL to the SFT policy (per response), learned and true reward of each step's samples."""
    from ascent.build.trained_run import Run

    found = Run(root / run)
    return [(line["kl"] * found.config.task.length, line["reward"], line["positions"]) for line in found.metrics]


def draw(paths: dict[str, list[tuple[float, float, float]]], stages: dict[str, dict[str, float]], rm: Any) -> None:
    """Learned and true reward over PPO's steps; both at the end against β's grip; the reward model's calibration."""
    from ascent.runs.held_out_evaluation import draw_calibration as reliability

    fig, axes = figure(2, 2, (10.4, 7.4))
    learned, true, far, sure = axes.flat
    for i, (name, path) in enumerate(paths.items()):
        for axis, column in ((learned, 1), (true, 2)):
            values = [point[column] for point in path]
            smooth = [
                sum(values[max(0, t - 4) : t + 1]) / len(values[max(0, t - 4) : t + 1]) for t in range(len(values))
            ]
            axis.plot(range(1, len(values) + 1), smooth, color=COLORS[i], linewidth=1.6, label=name)
    learned.set_title("Learned reward: what PPO maximises")
    true.set_title("True reward: what we want")
    for axis in (learned, true):
        axis.set_xlabel("PPO step")
    true.axhline(stages["SFT"]["true"], color="#555555", linestyle="--", linewidth=1, label="SFT, where all began")
    true.set_ylabel("positions right, of 5")
    learned.set_ylabel("the reward model's")
    learned.legend(frameon=False, fontsize=7.5)
    true.legend(*([part[-1:] for part in true.get_legend_handles_labels()]), frameon=False, fontsize=7.5)
    ends(far, stages)
    reliability(sure, rm)
    sure.set_ylim(0.4, 1.03)
    sure.set_title(f"The reward model: {rm.accuracy:.0%} of held-out pairs right")
    fig.suptitle("RLHF on sort: the true reward is hidden, and labels 2,000 pairs", x=0.01, ha="left", fontsize=11)
    save_picture(fig, "rlhf")


def ends(axis: Any, stages: dict[str, dict[str, float]]) -> None:
    """True reward against √KL, as Gao et al. 2023 draw it: how far each stage went, and what that was worth."""
    held = [name for name in stages if not name.startswith("DPO")]
    line = sorted((max(stages[name]["kl"], 0.0) ** 0.5, stages[name]["true"]) for name in held)
    axis.plot(*zip(*line, strict=True), color="#bbbbbb", linewidth=1, zorder=0)
    colors = {name: COLORS[i] for i, name in enumerate(name for name in stages if name.startswith("PPO"))}
    colors |= {name: COLORS[5 + i] for i, name in enumerate(name for name in stages if name.startswith("DPO"))}
    for name, row in stages.items():
        marker = "s" if name.startswith("DPO") else "o"
        place = max(row["kl"], 0.0) ** 0.5
        axis.scatter(place, row["true"], color=colors.get(name, "#555555"), s=36, marker=marker, label=name)
    axis.set_title("True reward against the distance from SFT")
    axis.set_xlabel("√KL(π ‖ SFT) per response, in nats")
    axis.set_ylabel("positions right, of 5")
    axis.legend(frameon=False, fontsize=7.5)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    for name, count in (
        ("sft", 60),
        ("pairs", 2_000),
        ("rewards", 120),
        ("ppo", 100),
        ("dpo", 100),
        ("prompts", 1_000),
    ):
        parser.add_argument(f"--{name}", type=int, default=count, help="fewer, to try the benchmark itself")
    parser.add_argument("--no-page", action="store_true", help="write neither page nor picture")
    options = parser.parse_args(argv)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rm = prepare(root, options)
        with workers(options.jobs) as pool:
            work = [pool.submit(ppo, root, β, options.ppo) for β in PPO]
            work += [pool.submit(dpo, root, β, options.dpo) for β in DPO]
            names = ["SFT", *(f"PPO, β = {β:g}" for β in PPO), *(f"DPO, β = {β:g}" for β in DPO)]
            runs = ["sft", *(job.result().name for job in work)]
            found = [pool.submit(measured, root, run, options.prompts) for run in runs]
            stages = {name: job.result() for name, job in zip(names, found, strict=True)}
        seconds = time.perf_counter() - begin
        paths = {name: path_of(root, run) for name, run in zip(names, runs, strict=True) if name.startswith("PPO")}
    return report(stages, paths, rm, seconds, options)


def report(stages: dict[str, dict[str, float]], paths: Any, rm: Any, seconds: float, options: Any) -> int:
    head = ["stage", "learned reward", "true reward, of 5", "exactly right", "KL to SFT, per response"]
    rows = [
        [name, f"{row['learned']:+.2f}", f"{row['true']:.2f}", f"{row['right']:.1%}", f"{row['kl']:.2f}"]
        for name, row in stages.items()
    ]
    show(head, rows)
    figures = f"accuracy {rm.accuracy:.1%}, log-loss {rm.log_loss:.3f}, expected calibration error {rm.ece:.3f}"
    print(f"the reward model on {rm.pairs} held-out pairs: {figures}; {seconds:.0f} s in all")
    sft, free = stages["SFT"], stages["PPO, β = 0"]
    held = {name: row["true"] for name, row in stages.items() if name.startswith("PPO") and name != "PPO, β = 0"}
    best, direct = max(held.values()), max(row["true"] for name, row in stages.items() if name.startswith("DPO"))
    shows = free["learned"] > sft["learned"] and free["true"] < sft["true"]
    ok = shows and best > sft["true"] and direct > sft["true"] and rm.accuracy >= ACCURACY and seconds <= SECONDS
    if not options.no_page:
        draw(paths, stages, rm)
        text = f"The reward model on {rm.pairs} held-out pairs: {figures}. {seconds:.0f} seconds for everything."
        picture = "![Learned and true reward of each stage](rlhf.png)"
        write_page("rlhf", f"# A round of RLHF\n\n{__doc__}\n\n{markdown(head, rows)}\n\n{text}\n\n{picture}")
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    more = {"seconds": seconds, "seconds_target": SECONDS, "cpu_seconds": sum(u.ru_utime + u.ru_stime for u in spent)}
    more |= {"pair_accuracy": rm.accuracy, "ece": rm.ece}
    more |= {"best": max(held, key=lambda name: held[name]), "dpo": direct, "unconstrained": free["true"]}
    return close("rlhf", best, sft["true"], sft["true"], ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

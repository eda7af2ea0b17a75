"""`ascent demo`: the lecture's policy stuck and solved, and a reward being hacked, in under a minute."""

from __future__ import annotations

import time
from pathlib import Path

from ascent.api import start
from ascent.layout import wrapped
from ascent.records import Run
from ascent.records.display import for_stream
from ascent.records.plot import COLORS, figure, series
from ascent.settings import configure

RUNS: tuple[tuple[str, str, str, dict[str, object]], ...] = (
    (
        "course",
        "The course's settings",
        "lecture",
        {"preset": "course", "advantage": "normalized"},
    ),
    ("ours", "Ours: ratio clipped, entropy bonus annealed", "lecture", {}),
    (
        "loophole",
        "Five numbers out of three: a hackable reward",
        "sort",
        {"length": 5, "numbers": 3, "reward": "inclusion-ordering", "steps": 60, "eval_every": 5, "record_every": 20},
    ),
)


def main() -> int:
    began = time.monotonic()
    out = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-demo"
    runs: dict[str, Run] = {}
    for name, title, task, settings in RUNS:
        config = configure(task, settings)
        print(f"\n{title}:\n{wrapped(f'  ascent train {task} {_flags(settings)}'.rstrip(), 4)}", flush=True)
        runs[name] = start(config, out / name, for_stream())
        if runs[name].status != "finished":
            print(f"Interrupted. What has run is in {out}")
            return 130
    print("\n" + "\n".join([*_lecture(runs["course"], runs["ours"]), "", *_loophole(runs["loophole"])]))
    print(f"\nCurves: {draw(runs, out / 'demo.png')}")
    print("Runs:   " + "\n        ".join(str(run.folder) for run in runs.values()))
    print("\nWhat to try next:")
    for command, words in (
        (f"ascent show {runs['ours'].folder} --step 0", "what was sampled, and the credit it got"),
        ("ascent explain grpo", "what GRPO computes, and where it is biased"),
        ("ascent compare lecture --algorithms reinforce,rloo,grpo,dr-grpo", "over seeds, with intervals"),
        ("ascent train sort", "sort five numbers out of ten, in a minute"),
    ):
        print(f"  {command}\n      {words}")
    print(f"\nThe demo took {time.monotonic() - began:.0f} s.")
    return 0


def _flags(settings: dict[str, object]) -> str:
    return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in settings.items())


def answers(run: Run, prompts: int) -> list[str]:
    """The greedy answers of the trained policy to some held-out prompts, with their rewards."""
    import torch

    from ascent.engines import LocalSampler

    task = run.config.task
    rollouts = LocalSampler(run.policy, 1.0, torch.Generator()).generate(task.held_out(prompts), 1, greedy=True)
    scores = task.score(rollouts)
    lines = []
    for i, prompt in enumerate(rollouts.prompt.tolist()):
        mark = "sorted" if scores.correct[i, 0] else "wrong"
        reward = f"{scores.reward[i].sum():g} of {task.max_reward:g}"
        lines.append(
            f"    {task.text(prompt)} → {task.text(rollouts.response[i, 0].tolist())}  reward {reward}  {mark}"
        )
    return lines


def _lecture(course: Run, ours: Run) -> list[str]:
    stuck, solved = course.result or {}, ours.result or {}
    return [
        wrapped(f"1. With the course's settings E[R] ends at {stuck['exact/reward']:.2f} of 5, and it stays there.", 3),
        *answers(course, 3),
        *(wrapped(f"   {word}", 3) for word in stuck["words"][1:]),
        wrapped(
            "   More samples would not help: even ascent on the exact gradient stops short, because the reward has "
            "local optima. The one answer [1 2 3] earns 4, 4 and 5 of 5 on the three prompts.",
            3,
        ),
        "",
        wrapped(
            "2. With an entropy bonus that fades, a higher rate and clipping, as many responses and updates reach "
            f"{solved['exact/reward']:.2f} of 5.",
            3,
        ),
        *answers(ours, 3),
    ]


def _loophole(run: Run) -> list[str]:
    result = run.result or {}
    return [
        wrapped(
            "3. A reward for numbers included and pairs in order, where every prompt repeats a number: "
            f"{result['eval/reward']:.2f} of {result['max_reward']:g} is earned, and {result['eval/accuracy']:.0%} of "
            "the answers are sorted.",
            3,
        ),
        *answers(run, 3),
        *(wrapped(f"   {word}", 3) for word in result["words"][1:]),
    ]


def draw(runs: dict[str, Run], path: Path) -> Path:
    """For each run the share of the reward that it earned and the share that it got right, on one axis."""
    from matplotlib import pyplot

    fig, axes = figure(1, len(runs), (11.0, 3.6))
    for axis, (name, title, _, _) in zip(axes.flat, RUNS, strict=True):
        metrics, maximum = runs[name].metrics, runs[name].config.task.max_reward or 1.0
        for key, words, color, dash in (
            ("reward", "reward", COLORS[0], "-"),
            ("accuracy", "exactly right", COLORS[1], "--"),
        ):
            steps, values = series(metrics, key)
            axis.plot(
                steps, values / (maximum if key == "reward" else 1.0), dash, color=color, linewidth=2, label=words
            )
        axis.set_ylim(-0.03, 1.05)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("step")
    axes.flat[0].legend(frameon=False, loc="center right")
    axes.flat[0].set_ylabel("share of the largest there is")
    fig.savefig(path, dpi=130)
    pyplot.close(fig)
    return path

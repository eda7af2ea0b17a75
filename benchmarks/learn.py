"""A real model learns on one GPU: SmolLM2-135M-Instruct on sums and differences, Ascent against TRL in the same time.

    python -m benchmarks.learn [--seconds 180] [--seed 0] [--out learn.json]    # needs a GPU and TRL 1.16.0
    python -m benchmarks.learn --draw learn.json [other-seed.json …]            # the picture and the page of such runs

The task is reasoning-gym's chain_sum with two numbers of one or two digits. The reward is the task's own: 1 for a
response that ends with the answer, 0.5 for the answer elsewhere. Both sides use GRPO without KL, 32 prompts × 16
samples, 24 new tokens, Adam at 1e-5, gradients clipped at 1, temperature 1. TRL's parameters are float32 under
bfloat16 autocast (in pure bfloat16 such small steps are lost); ours are bfloat16 with float32 masters. Both use
the same problems, each in its own order, which the seed decides.

Each side trains for the same number of seconds. Loading and evaluations are the same on both sides and are not
counted. Every ten steps, greedy answers to 500 held-out problems are scored: strictly (the response ends with the
answer) and leniently (its last number is the answer). `value` is our strict accuracy at the end, with Wilson's
interval in the JSON line; `peer` is TRL's. ok: from at least 5 % to at least twice that, and up by at least 15
points, within 8 minutes. At equal numbers of samples, the two are compared wherever both were evaluated, by the
difference of their means over the seeds with Student's interval. `--smoke` takes two steps of a tiny random model on
the CPU, without TRL.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ascent.build.assemble import assemble
from ascent.core.loop import train
from ascent.runs.confidence_intervals import mean_and_half_width, wilson
from ascent.settings import configure
from benchmarks.common import (
    COLORS,
    RESULTS,
    NoRecords,
    close,
    figure,
    markdown,
    options_with_gpu,
    save_picture,
    show,
    write_page,
)
from benchmarks.peers import HERE_TOO, Peer
from benchmarks.peers.models import SMOKE, random_model, smollm2

LIMIT, LEAST, GAIN, TOKENS = 480.0, 0.05, 0.15, 24
SETTINGS: dict[str, Any] = {
    "options": json.dumps({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    "algorithm": "grpo",
    "kl": "no-kl",
    "reference": "no-reference",
    "prompts": 32,
    "samples": 16,
    "max_tokens": TOKENS,
    "lr": 1e-5,
    "update.max_norm": 1.0,
    "eval_every": 10,
    "eval_prompts": 500,
    "steps": 100_000,
}


class Curve(NoRecords):
    """Records that keep a learning curve, and end the run when its time is over."""

    def __init__(self, seconds: float, steps: int | None):
        self.limit, self.steps = seconds, steps
        self.points: list[dict[str, float]] = []
        self.spent, self.samples, self.done = 0.0, 0, 0
        self.right = 0.0
        """Responses of all steps so far that were right."""
        self.phases: dict[str, float] = {}

    def note(self, found: dict[str, float]) -> None:
        point = {"seconds": self.spent, "samples": self.samples, "steps": self.done}
        self.points.append(point | {"strict": found["eval/accuracy"], "lenient": found["eval/lenient"]})
        last = self.points[-1]
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.phases.items())
        right = f"strict {last['strict']:.4f}, in training {self.right / max(self.samples, 1):.4f}"
        print(f"{last['seconds']:6.1f} s {self.samples:7d} samples: {right}  {phases}", flush=True)

    def step(self, step: int, metrics: dict[str, Any], *_: Any) -> None:
        self.spent += metrics["time/step"] - metrics.get("time/eval", 0.0)
        self.samples += metrics["num_responses"]
        self.right += metrics["accuracy"] * metrics["num_responses"]
        self.done += 1
        for name in ("generate", "reward", "update"):
            self.phases[name] = self.phases.get(name, 0.0) + metrics[f"time/{name}"]
        if "eval/accuracy" in metrics:
            self.note(metrics)

    def should_stop(self) -> bool:
        return self.spent >= self.limit or self.done == self.steps


def ours(
    model: str, seconds: float, steps: int | None, more: dict[str, Any], start: bool = True
) -> list[dict[str, float]]:
    """Our curve; `start`: with an evaluation before the first step."""
    parts = assemble(configure("reasoning-gym:chain_sum", {"model": model, **SETTINGS, **more}))
    try:
        for note in parts.notes:
            print(f"note: {note}", flush=True)
        evaluate, curve = parts.evaluator(), Curve(seconds, steps)
        if start:
            curve.note(evaluate())  # type: ignore[arg-type]
        list(train(parts.config, parts.task, parts.engine, parts.learner, curve, parts.streams, evaluate))
        return curve.points
    finally:
        parts.close()


def theirs(model: str, seconds: float, found: dict[str, Any], out: Path) -> None:
    """TRL's curve, written down point by point."""
    peer = Peer(
        HERE_TOO, "trl_learn", {"model": model, "seconds": seconds, "seed": found["seed"], "settings": SETTINGS}
    )
    found["trl"], points = peer.about, found["curves"].setdefault("trl", [])
    try:
        said = peer()
        while "point" in said:
            points.append(said["point"])
            print("TRL", said["point"], flush=True)
            out.write_text(json.dumps(found))
            said = peer.answer()
    finally:
        peer.close()


def draw(runs: list[dict[str, Any]]) -> None:
    """Strict accuracy of both over samples and over seconds, each seed a line; the lenient one dotted."""
    fig, grid = figure(1, 2, (10.5, 4.2))
    axes = grid[0]
    for color, (side, name) in zip(COLORS, (("ascent", "Ascent"), ("trl", "TRL 1.16")), strict=False):
        for i, points in enumerate(found["curves"][side] for found in runs):
            for axis, x, scale in zip(axes, ("samples", "seconds"), (1e-3, 1.0), strict=True):
                xs = [scale * p[x] for p in points]
                first = i == 0
                ys = [100 * p["strict"] for p in points]
                axis.plot(xs, ys, color=color, marker="o", ms=3, label=f"{name}, strict" if first else None)
                ys = [100 * p["lenient"] for p in points]
                axis.plot(xs, ys, color=color, ls=":", lw=3, label=f"{name}, lenient" if first else None)
                bounds = [wilson(round(p["strict"] * 500), 500) for p in points]
                low, high = [100 * b.low for b in bounds], [100 * b.high for b in bounds]
                axis.fill_between(xs, low, high, color=color, alpha=0.12 / len(runs) ** 0.5)
    axes[0].set(xlabel="samples, thousands", ylabel="held-out accuracy, %", ylim=(0, 100))
    axes[0].set_xlim(0, 1e-3 * max(found["curves"]["trl"][-1]["samples"] for found in runs) * 1.05)
    axes[1].set(xlabel="seconds of training", ylim=(0, 100))
    axes[1].legend(loc="lower right", frameon=False)
    save_picture(fig, "learn")


def summary(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for side, points in found["curves"].items():
        for when, point in (("start", points[0]), ("end", points[-1])):
            strict = wilson(round(point["strict"] * 500), 500)
            rows.append([side, str(found["seed"]), when, f"{point['seconds']:.0f} s", f"{point['samples']:,}"])
            rows[-1] += [f"{strict.value:.1%}", f"{strict.low:.1%} to {strict.high:.1%}", f"{point['lenient']:.1%}"]
    return ["side", "seed", "", "training", "samples", "strict", "95 % interval", "lenient"], rows


def by_samples(runs: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Both sides after the same samples, over the seeds: means, and ours minus TRL's with its interval."""
    sides = {
        side: [{p["samples"]: p["strict"] for p in found["curves"][side]} for found in runs]
        for side in ("ascent", "trl")
    }
    shared = set.intersection(*({*points} for group in sides.values() for points in group))
    rows = []
    for samples in sorted(shared):
        ours, peers = ([points[samples] for points in sides[side]] for side in ("ascent", "trl"))
        gap, half = mean_and_half_width([a - b for a, b in zip(ours, peers, strict=True)])
        row = [f"{samples:,}", f"{sum(ours) / len(ours):.1%}", f"{sum(peers) / len(peers):.1%}"]
        rows.append([*row, f"{100 * gap:+.1f} ± {100 * half:.1f} points"])
    return ["samples", "Ascent", "TRL", f"difference, {len(runs)} seeds, 95 %"], rows


def page(runs: list[dict[str, Any]]) -> None:
    head, rows = summary(runs[0])
    for found in runs[1:]:
        rows += summary(found)[1]
    about = {k: v for k, v in runs[0].items() if k not in ("curves", "seed", "seconds")}
    write_page(
        "learn",
        f"# A real model learns\n\n{__doc__}\n\n![Accuracy over samples and over seconds](learn.png)\n\n"
        f"{markdown(head, rows)}\n\n{markdown(*by_samples(runs))}\n\n"
        f"```json\n{json.dumps(about)}\n```\n\nThe curves are in `learn.json`.",
    )
    (RESULTS / "learn.json").write_text(json.dumps(runs))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0, help="of training, each side")
    parser.add_argument("--out", type=Path, default=Path("learn.json"), help="where the curves go")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", type=Path, nargs="+", help="only draw the curves of earlier runs")
    parser.add_argument("--alone", action="store_true", help="without TRL")
    parser.add_argument("--smoke", action="store_true", help="two steps of a tiny model on the CPU")
    options = options_with_gpu(parser, argv, "draw")
    if options.draw:
        runs = [json.loads(path.read_text()) for path in options.draw]
        draw(runs)
        page(runs)
        show(*by_samples(runs))
        return 0
    if options.smoke:
        small = {"prompts": 2, "samples": 2, "eval_every": 1, "eval_prompts": 4, "max_tokens": 4}
        with tempfile.TemporaryDirectory() as folder:
            points = ours(random_model(Path(folder), SMOKE), 1e9, 2, small | {"policy.device": "cpu"})
        return close("learn", None, None, GAIN, len(points) == 3, smoke=True, points=points)[1]
    model = smollm2()
    curves = {"ascent": ours(model, options.seconds, None, {"seed": options.seed})}
    gc.collect()
    torch.cuda.empty_cache()
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
    found = {"curves": curves, "seconds": options.seconds, "seed": options.seed, **about}
    options.out.write_text(json.dumps(found))
    if not options.alone:
        theirs(model, options.seconds, found, options.out)
    show(*summary(found))
    first, last = curves["ascent"][0]["strict"], curves["ascent"][-1]["strict"]
    ok = first >= LEAST and last >= max(2 * first, first + GAIN) and options.seconds <= LIMIT
    strict = wilson(round(last * 500), 500)
    more = {"start": first, "low": strict.low, "high": strict.high, "lenient": curves["ascent"][-1]["lenient"]}
    peer = curves["trl"][-1]["strict"] if "trl" in curves else None
    return close("learn", last, peer, max(2 * first, first + GAIN), ok, **more, **about)[1]


if __name__ == "__main__":
    sys.exit(main())

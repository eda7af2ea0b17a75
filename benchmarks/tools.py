"""A real model learns to use a tool on one GPU: SmolLM2-135M-Instruct and a calculator, on hard products.

    python -m benchmarks.tools [--steps 40] [--seed 0] [--smoke]        # needs a GPU

The task is the product of two numbers of three digits. Two runs of GRPO, with the same number of steps, responses and
problems: with `--tools calculator`, and without. SmolLM2 never writes a call by itself, so the run with the tool starts
from a short `ascent sft` on 2 × 64 demonstrations of other problems: how a product is asked for, and how a result is
read. 32 prompts × 16 responses per step, at most 48 sampled tokens, Adam at 1e-5, temperature 1. `value` is the
accuracy of greedy answers to 200 held-out problems after training with the tool, `peer` that after training without.
ok: at least 30 points between them. `--smoke` takes one step of a tiny random model on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import ascent
from ascent.build.assemble import assemble
from ascent.core.loop import train
from ascent.environments.tool_chat import tool_instruction, with_instruction
from ascent.environments.tools import BUILT_IN, schemas_of
from ascent.runs.confidence_intervals import wilson
from ascent.settings import configure
from benchmarks.common import close, show
from benchmarks.learn import Curve
from benchmarks.peers.models import SMOKE, random_model, smollm2

GAIN, HELD_OUT = 0.3, 200
CHAT = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <end> ' }}{% endfor %}"
SETTINGS: dict[str, Any] = {
    "algorithm": "grpo",
    "kl": "no-kl",
    "reference": "no-reference",
    "check": "number",
    "prompts": 32,
    "samples": 16,
    "max_tokens": 48,
    "lr": 1e-5,
    "update.max_norm": 1.0,
    "eval_every": 10,
    "eval_prompts": HELD_OUT,
}
WARM_UP: dict[str, Any] = {"algorithm": "sft", "prompts": 16, "steps": 8, "lr": 2e-5}


def problems(count: int, seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(count)]


def demonstrations(count: int) -> list[dict[str, Any]]:
    """Of each problem two: the call, and the answer behind its result, as the conversation will have them."""
    told = tool_instruction(schemas_of([BUILT_IN["calculator"]]))
    rows: list[dict[str, Any]] = []
    for a, b in problems(count, seed=1):
        call = f"<call>calculator {json.dumps({'expression': f'{a} * {b}'})}</call>"
        asked = with_instruction([{"role": "user", "content": f"What is {a} * {b}?"}], told)
        results = [{"role": "assistant", "content": call}, {"role": "user", "content": str(a * b)}]
        rows += [{"prompt": asked, "response": call}, {"prompt": [*asked, *results], "response": str(a * b)}]
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(task: str, steps: int, more: dict[str, Any]) -> Curve:
    """Train, and evaluate before, meanwhile and at the end."""
    parts = assemble(configure(task, {**more, "steps": steps}))
    try:
        for note in parts.notes:
            print(f"note: {note}", flush=True)
        evaluate, curve = parts.evaluator(), Answers(float("inf"), None)
        curve.note(evaluate())  # type: ignore[arg-type]
        list(train(parts.config, parts.task, parts.engine, parts.learner, curve, parts.streams, evaluate))
        return curve
    finally:
        parts.close()


class Answers(Curve):
    """A learning curve whose task has no lenient accuracy; rewards while it trains are printed too."""

    def note(self, found: dict[str, float]) -> None:
        super().note({"eval/lenient": float("nan")} | found)

    def step(self, step: int, metrics: dict[str, Any], *rest: Any) -> None:
        named = ("reward", "turns", "tools/calls", "reward_errors", "time/generate", "time/environment", "time/update")
        print(step, {name: round(metrics[name], 3) for name in named if name in metrics}, flush=True)
        super().step(step, metrics, *rest)


def warm_start(model: str, folder: Path, warm: dict[str, Any], count: int) -> str:
    """The folder of a short run on demonstrations."""
    rows = write(folder / "demonstrations.jsonl", demonstrations(count))
    ascent.train(f"demonstrations:{rows}", model=model, out=str(folder / "sft"), **warm)
    return str(folder / "sft")


def both(model: str, folder: Path, steps: int, more: dict[str, Any], warm: dict[str, Any]) -> dict[str, Curve]:
    rows = [{"prompt": f"What is {a} * {b}?", "answer": str(a * b)} for a, b in problems(4000, seed=2)]
    task = f"jsonl:{write(folder / 'products.jsonl', rows)}"
    curves = {}
    started = warm_start(model, folder, warm, 4 if steps == 1 else 64)
    for name, own in (("calculator", {"tools": "calculator", "init": started}), ("alone", {})):
        print(f"--- {name}", flush=True)
        curves[name] = run(task, steps, {"model": model, **SETTINGS, **more, **own})
        gc.collect()
    return curves


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a step of a tiny model on the CPU")
    options = parser.parse_args(argv)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.smoke:
            cpu = {"policy.device": "cpu", "max_tokens": 4, "max_prompt": 400}
            small = cpu | {"prompts": 2, "samples": 2, "eval_every": 1, "eval_prompts": 4}
            model = random_model(folder / "tiny", SMOKE)
            (folder / "tiny" / "chat_template.jinja").write_text(CHAT)
            curves = both(model, folder, 1, small, WARM_UP | cpu | {"prompts": 2, "steps": 1})
        else:
            curves = both(smollm2(), folder, options.steps, {"seed": options.seed}, WARM_UP)
    found = {name: curve.points for name, curve in curves.items()}
    rows = []
    for name, points in found.items():
        for when, point in (("start", points[0]), ("end", points[-1])):
            share = wilson(round(point["strict"] * HELD_OUT), HELD_OUT)
            rows.append([name, when, str(point["samples"]), f"{point['seconds']:.0f} s", f"{share.value:.1%}"])
            rows[-1].append(f"{share.low:.1%} to {share.high:.1%}")
    show(["", "", "responses", "training", "accuracy", "95 % interval"], rows)
    if options.smoke:
        return close("tools", None, None, GAIN, all(len(points) == 2 for points in found.values()), smoke=True)[1]
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "seconds": time.perf_counter() - begin}
    ends = {name: points[-1]["strict"] for name, points in found.items()}
    ok = ends["calculator"] - ends["alone"] >= GAIN
    return close("tools", ends["calculator"], ends["alone"], ends["alone"] + GAIN, ok, curves=found, **about)[1]


if __name__ == "__main__":
    sys.exit(main())

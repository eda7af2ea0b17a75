"""The first minutes: from an installed package to a trained policy, with a custom reward on custom data.

    python -m benchmarks.first_minutes [--repeats 3] [--smoke]

Two scripts of the same content, one for Ascent and one for TRL 1.16, each as short as its documentation allows: rows, a
reward function, five steps of GRPO on a tiny model, 8 prompts × 8 samples of 16 tokens, on the CPU. Counted are the
characters that a person types, the files that a person writes, and the seconds of a fresh process, which take turns.

Then the overhead of a function passed as an object, over the same function as python:FILE:NAME: the rewards of
64 responses, in turns, as a share of a step. `value` is the number of characters, `peer` TRL's. ok: no more than TRL's
on every count, and an overhead below 5 % of a step. `--smoke`: without TRL, and one step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from benchmarks.common import close, show

ASCENT = """
import ascent

rows = [{"prompt": f"What is {a} + {b}?"} for a in range(20) for b in range(20)]

def brevity(response):
    return -len(response)

ascent.train(rows, model="MODEL", reward=brevity, algorithm="grpo", steps=5, max_tokens=16)
"""
TRL = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

rows = Dataset.from_list([{"prompt": f"What is {a} + {b}?"} for a in range(20) for b in range(20)])

def brevity(completions, **kwargs):
    return [-len(completion) for completion in completions]

config = GRPOConfig(max_steps=5, per_device_train_batch_size=64, max_completion_length=16, use_cpu=True)
trainer = GRPOTrainer("MODEL", reward_funcs=brevity, args=config, train_dataset=rows)
trainer.train()
trainer.save_model()
"""
SCRIPTS = {"ascent": ASCENT, "trl": TRL}
OVERHEAD = 0.05
"""Of a step, at most."""
REWARD = "def brevity(response):\n    return -len(response)\n"


def seconds(script: str, model: Path, folder: Path) -> float:
    """A fresh process that runs a script in an empty folder, with one thread."""
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text(script.replace("MODEL", str(model)))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "mine.py"], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the script failed: {done.stderr[-2000:]}")
    return time.perf_counter() - begin


def overhead(model: Path, folder: Path, calls: int) -> float:
    """What the rewards of a step take more if the function is an object and not in a file, as a share of the step.

    The two take turns, call by call, so that a busy machine slows down both.
    """
    import ascent
    from ascent.rewards.reward_manager import RewardManager
    from ascent.settings import configure

    (folder / "mine.py").write_text(REWARD)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(REWARD, space)
    rows = [{"prompt": f"What is {a} + {b}?"} for a in range(20) for b in range(20)]
    times: dict[str, list[float]] = {"object": [], "file": []}
    rewards = {"object": space["brevity"], "file": f"python:{folder / 'mine.py'}:brevity"}
    tasks = {name: configure(rows, {"reward": reward}).task for name, reward in rewards.items()}
    with ExitStack() as stack:
        gradings = {name: stack.enter_context(closing(RewardManager(task))) for name, task in tasks.items()}
        problems = [(tasks["file"].train(i // 8), "response " * (i % 8)) for i in range(64)]
        for turn in range(calls + 1):
            for name in list(gradings)[:: 1 if turn % 2 else -1]:
                begin = time.perf_counter()
                gradings[name](problems)
                times[name] += [time.perf_counter() - begin] if turn else []  # in the first, processes start
    small = {
        "max_tokens": 16,
        "steps": min(calls, 4) + 2,
        "eval_prompts": 1,
        "show": False,
        "preflight": False,
        "threads": 1,
    }
    run = ascent.train(rows, model=model, reward=space["brevity"], algorithm="grpo", **small, out=folder / "run")
    step = statistics.median(line["time/step"] for line in run.metrics[1:-1])
    both = ", ".join(f"{name} {statistics.median(spent):.4f} s" for name, spent in times.items())
    print(f"rewards of 64 responses: {both}; a step: {step:.3f} s")
    return (statistics.median(times["object"]) - statistics.median(times["file"])) / step


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(argv)
    from tests.language import write_tiny

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = write_tiny(folder / "model")
        names = ["ascent"] if args.smoke else list(SCRIPTS)
        repeats = 1 if args.smoke else args.repeats
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(repeats):
            for name in names[:: 1 if turn % 2 else -1]:
                script = SCRIPTS[name].replace("steps=5", "steps=1") if args.smoke else SCRIPTS[name]
                times[name].append(seconds(script, model, folder / f"{name}-{turn}"))
        extra = overhead(model, folder, 2 if args.smoke else 100)
    typed = {name: len(script.strip()) for name, script in SCRIPTS.items()}
    took = {name: statistics.median(values) for name, values in times.items()}
    rows = [[name, str(typed[name]), "1", f"{took[name]:.1f}" if name in took else "·"] for name in SCRIPTS]
    show(["", "characters", "files", "seconds"], rows)
    print(f"a reward function as an object instead of a file: {extra:+.1%} of a step")
    fewer = typed["ascent"] <= typed["trl"] and took["ascent"] <= took.get("trl", float("inf"))
    more = {"seconds": times, "files": {"ascent": 1, "trl": 1}, "overhead": extra}
    ok = fewer and (args.smoke or extra < OVERHEAD)
    return close("first_minutes", typed["ascent"], typed["trl"], typed["trl"], ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

"""A real model learns to write programs that a sandbox judges: SmolLM2-135M-Instruct, short functions on strings.

    python -m benchmarks.programs [--steps 40] [--seed 0] [--smoke]        # needs a GPU

`code:FILE` with problems of our own: "Write a Python function `cut(s)` that returns the first 3 characters of s."
Twenty kinds, each with names, numbers and letters of its own; the tests call the function in the sandbox that
`--sandbox auto` finds. GRPO from the model as it is, 32 prompts × 16 responses per step, at most 96 tokens, Adam at
1e-5, temperature 1. `value` is the share of 200 held-out problems that greedy answers solve at the end, `peer` that at
the start. ok: the start is above zero, and the end 20 points above it. `--smoke` takes one step of a tiny random model
on the CPU.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ascent.runs.confidence_intervals import wilson
from benchmarks.common import close, show
from benchmarks.peers.models import SMOKE, random_model, smollm2
from benchmarks.tools import CHAT, run, write

GAIN, HELD_OUT = 0.2, 200
SETTINGS: dict[str, Any] = {
    "algorithm": "grpo",
    "kl": "no-kl",
    "reference": "no-reference",
    "prompts": 32,
    "samples": 16,
    "max_tokens": 96,
    "lr": 1e-5,
    "update.max_norm": 1.0,
    "eval_every": 10,
    "eval_prompts": HELD_OUT,
}
NAMES = ("cut", "make", "change", "solve", "convert", "work", "handle", "treat", "build", "answer", "shape", "text")
WORDS = ("apple pie", "Banana", "a-b-c", "hello world", "ANNA", "x", "two  spaces", "Otto and Anna", "zebra zoo", "")
KINDS = {
    "s in upper case": "s.upper()",
    "s in lower case": "s.lower()",
    "s reversed": "s[::-1]",
    "the length of s": "len(s)",
    "the first {n} characters of s": "s[:{n}]",
    "the last {n} characters of s": "s[-{n}:]",
    "s without its first {n} characters": "s[{n}:]",
    "s repeated {n} times": "s * {n}",
    "how many times '{a}' is in s": "s.count('{a}')",
    "s with every '{a}' replaced by '{b}'": "s.replace('{a}', '{b}')",
    "s without any '{a}'": "s.replace('{a}', '')",
    "True if s begins with '{a}', else False": "s.startswith('{a}')",
    "True if s ends with '{a}', else False": "s.endswith('{a}')",
    "True if '{a}' is in s, else False": "'{a}' in s",
    "s with '{a}' in front": "'{a}' + s",
    "s with '{b}' at its end": "s + '{b}'",
    "s between '{a}' and '{b}'": "'{a}' + s + '{b}'",
    "the words of s as a list": "s.split()",
    "how many words s has": "len(s.split())",
    "every {n}. character of s, from the first on": "s[::{n}]",
}
"""What a function returns, in words and in Python."""


def problems(count: int, seed: int) -> list[dict[str, Any]]:
    """Different ones, with tests that a function which ignores its argument does not pass."""
    rng, found = random.Random(seed), {}
    while len(found) < count:
        kind, name, n = rng.choice(list(KINDS)), rng.choice(NAMES), rng.randint(2, 6)
        a, b = rng.sample("abehlnorstz", 2)
        what, code = (part.format(n=n, a=a, b=b) for part in (kind, KINDS[kind]))
        prompt, words = f"Write a Python function `{name}(s)` that returns {what}.", (*WORDS, f"{a}oo{b}")
        tests = [f"assert {name}({word!r}) == {eval(code, {'s': word})!r}" for word in words]
        solution = f"def {name}(s):\n    return {code}\n"
        found[prompt] = {"prompt": prompt, "entry_point": name, "tests": tests, "solution": solution}
    return list(found.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a step of a tiny model on the CPU")
    options = parser.parse_args(argv)
    begin, rows = time.perf_counter(), problems(2200, seed=2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        test, task = (
            write(folder / "test.jsonl", rows[:HELD_OUT]),
            f"code:{write(folder / 'rows.jsonl', rows[HELD_OUT:])}",
        )
        more: dict[str, Any] = SETTINGS | {"test_file": str(test), "seed": options.seed}
        if options.smoke:
            more |= {"policy.device": "cpu", "max_tokens": 4, "max_prompt": 400, "prompts": 2, "samples": 2}
            more |= {"eval_every": 1, "eval_prompts": 4}
            model = random_model(folder / "tiny", SMOKE)
            (folder / "tiny" / "chat_template.jinja").write_text(CHAT)
            points = run(task, 1, {"model": model, **more}).points
        else:
            points = run(task, options.steps, {"model": smollm2(), **more}).points
    start, end = points[0]["strict"], points[-1]["strict"]
    found = []
    for point in points:
        share = wilson(round(point["strict"] * HELD_OUT), HELD_OUT)
        found.append([str(point["samples"]), f"{point['seconds']:.0f} s", f"{share.value:.1%}"])
        found[-1].append(f"{share.low:.1%} to {share.high:.1%}")
    show(["responses", "training", "solved", "95 % interval"], found)
    if options.smoke:
        return close("programs", None, None, GAIN, len(points) == 2, smoke=True)[1]
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "seconds": time.perf_counter() - begin}
    return close("programs", end, start, start + GAIN, 0 < start <= end - GAIN, curve=points, **about)[1]


if __name__ == "__main__":
    sys.exit(main())

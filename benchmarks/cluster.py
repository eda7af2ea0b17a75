"""A run on a Ray cluster of this machine, with actors killed at random moments.

    PYTHONPATH=.engines/ray python -m benchmarks.cluster --kills 6 [--weights]

Two learners and two samplers train a tiny language model with --ahead 0, and then with --ahead 1: first without kills,
then with kills of a sampler, which is restarted while the others sample its responses, or of a learner (its rank
or its actor), after which `--restarts` continues from the newest checkpoint. After every kill the next step has a time
limit. At the end every step exists once, with the same numbers and bit-identical parameters as without kills.

`--weights` measures two ways to send a model's weights from one process to two others: Ray's object store, and gloo.
`make cluster-test` installs Ray in that folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ascent.distributed.weight_transfer import WeightSender, WeightSnapshot, receive_weights
from benchmarks.common import ROOT, close, show
from benchmarks.killed_ranks import lines_of

AGAIN = 120.0
"""Seconds within which the next step has to be there after a kill."""
STEPS = 40
DEADLINE = 300.0
KINDS = ("sampler", "rank", "learner")
FLAGS = ("--prompts", 4, "--samples", 4, "--max-tokens", 32, "--eval-prompts", 4, "--lr", 0.01, "--no-preflight")
REWARD = "def vowels(response):\n    return sum(c in 'aeiou' for c in response) / 50\n"


class Launched:
    """`ascent cluster` in a session of its own."""

    def __init__(self, folder: Path, *args: Any):
        self.said = folder / f"said-{time.time_ns()}.txt"
        command = [sys.executable, "-m", "ascent", "cluster", *map(str, args)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        with self.said.open("wb") as file:
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=file, stderr=file, start_new_session=True
            )

    def text(self) -> str:
        return self.said.read_text()

    def actors(self) -> dict[str, list[int]]:
        """Our processes on the cluster: `sampler` and `learner` actors, and each learner's `rank`."""
        mine, found = {self.process.pid}, dict[str, list[int]](sampler=[], learner=[], rank=[])
        parents: dict[int, tuple[int, str]] = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                parents[int(path.name)] = int(fields[1]), (path / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        while more := {pid for pid, (parent, _) in parents.items() if parent in mine} - mine:
            mine |= more
        kinds = {"SamplerActor": "sampler", "LearnerProcess": "learner", "-m ascent train": "rank"}
        for pid in sorted(mine & parents.keys()):
            kind = next((kind for word, kind in kinds.items() if word in parents[pid][1]), None)
            found.get(kind or "", []).append(pid)
        return found

    def until(self, condition: Callable[[], Any], deadline: float = DEADLINE) -> Any:
        """What a condition says as soon as it holds."""
        begin = time.monotonic()
        while not (found := condition()):
            assert time.monotonic() - begin < deadline, f"not within {deadline:g} s: {self.text()[-900:]}"
            assert self.process.poll() is None, self.text()[-900:]
            time.sleep(0.05)
        return found

    def end(self) -> int:
        return self.process.wait(DEADLINE)


def training(folder: Path) -> tuple[Any, ...]:
    """The words of a training that changes something."""
    from tests.language import write_tiny

    rows = [json.dumps({"prompt": f"Say {i}.", "answer": str(i)}) for i in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "reward.py").write_text(REWARD)
    model = write_tiny(folder / "tiny")
    return ("train", "jsonl:rows.jsonl", "--model", model, *FLAGS, "--reward", "python:reward.py:vowels")


def last_params(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(sorted((folder / "checkpoints").glob("step_*"))[-1] / "params.safetensors")


def difference(whole: Path, other: Path) -> list[str]:
    """In which way a run is not the same as another."""
    one, two = lines_of(whole), lines_of(other)
    steps = [line["step"] for line in two]
    wrong = [] if steps == list(range(len(one))) else [f"its steps are {steps}"]
    wrong += [] if one == two else ["its metrics are others"]
    a, b = last_params(whole), last_params(other)
    same = a.keys() == b.keys() and all(bool((a[name] == b[name]).all()) for name in a)
    return wrong + ([] if same else ["its parameters are others"])


# ---- kills


def killed(launched: Launched, folder: Path, kind: str, rng: random.Random, say: Callable[..., None]) -> float:
    """Kill a process of this kind at a random moment; the seconds until a step came that was not there before."""
    begun = len(lines_of(folder))
    launched.until(lambda: len(lines_of(folder)) >= begun + rng.randrange(1, 3))
    time.sleep(rng.random() / 2)
    victims = launched.until(lambda: launched.actors()[kind])
    victim, steps, begin = rng.choice(victims), len(lines_of(folder)), time.monotonic()
    os.kill(victim, signal.SIGKILL)
    launched.until(lambda: len(lines_of(folder)) > steps + 1)
    seconds = time.monotonic() - begin
    say(f"  {kind} {victims.index(victim)} killed after step {steps}: a new step after {seconds:.1f} s", flush=True)
    return seconds


def kills(count: int, aheads: tuple[int, ...], say: Callable[..., None] = print) -> tuple[list[float], list[str]]:
    """Seconds that each of so many kills took, and what went wrong."""
    rng, took, wrong = random.Random(0), list[float](), list[str]()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        words = (*training(folder), "--steps", STEPS, "--eval-every", 9, "--checkpoint-every", 6, "--threads", 1)
        for part, ahead in enumerate(aheads):
            more = (*words, "--ahead", ahead) if ahead else words
            whole = Launched(folder, "--learners", 2, "--samplers", 2, *more, "--out", f"whole-{ahead}")
            assert whole.end() == 0, whole.text()
            kinds = [KINDS[(i + part) % 3] for i in range(len(range(part, count, len(aheads))))]
            say(f"--ahead {ahead}: {', '.join(kinds)}", flush=True)
            out = folder / f"killed-{ahead}"
            run = Launched(folder, "--learners", 2, "--samplers", 2, "--restarts", 20, *more, "--out", out)
            try:
                took += [killed(run, out, kind, rng, say) for kind in kinds]
                status = run.end()
            except AssertionError as error:
                wrong.append(str(error))
                continue
            finally:
                run.process.kill()
            wrong += [] if status == 0 else [f"it ended with status {status}: {run.text()[-900:]}"]
            wrong += [f"--ahead {ahead}: {what}" for what in difference(folder / f"whole-{ahead}", out)]
            wrong += [f"left: {left}" for left in (out / "checkpoints").glob(".*")]
    return took, wrong


# ---- weights


class Taker:
    """A process with parameters of these shapes, into which it takes others'."""

    def __init__(self, shapes: dict[str, Any]):
        import torch

        self.own = {name: torch.zeros(shape) for name, shape in shapes.items()}

    def take(self, sent: dict[str, Any]) -> None:
        for name, tensor in sent.items():
            self.own[name].copy_(tensor)

    def receive(self, offer: Any) -> None:
        import torch

        for part in receive_weights(offer, torch.device("cpu"), "127.0.0.1"):
            self.take(part)

    def sums(self) -> float:
        return sum(float(tensor.double().sum()) for tensor in self.own.values())


def shapes_of(name: str) -> dict[str, Any]:
    """The parameters of a shape of benchmarks/peers/models.py, without any."""
    import torch
    import transformers

    from benchmarks.peers.models import GPU_SHAPES

    own = {key: value for key, value in GPU_SHAPES[name].items() if key != "kind"}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**own))
    return {name: p.shape for name, p in model.named_parameters()}


def weights(say: Callable[..., None] = print, shape: str = "135m", turns: int = 7) -> dict[str, float]:
    """Median seconds to bring a model of this shape, in float32, into two other processes, in either way."""
    import ray
    import torch

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
    shapes = shapes_of(shape)
    own = {name: torch.randn(size) for name, size in shapes.items()}
    others = [ray.remote(Taker).remote(shapes) for _ in range(2)]
    sender = WeightSender("127.0.0.1", torch.device("cpu"), DEADLINE)

    def stored() -> None:
        sent = ray.put(own)
        ray.get([other.take.remote(sent) for other in others])

    def by_gloo() -> None:
        snapshot, calls = WeightSnapshot(own), list[Any]()
        for other in others:
            offer = sender.offer(snapshot)
            calls.append(other.receive.remote(offer))
            sender.start(offer, snapshot, calls[-1].future())
        ray.get(calls)

    took: dict[str, list[float]] = {"gloo": [], "object store": []}
    expected = sum(float(p.double().sum()) for p in own.values())
    for turn in range(turns + 1):
        for name, how in (("object store", stored), ("gloo", by_gloo)):
            begin = time.monotonic()
            how()
            took[name] += [time.monotonic() - begin] if turn else []  # the first one starts processes
            assert all(abs(total - expected) < 1e-6 for total in ray.get([other.sums.remote() for other in others]))
    ray.shutdown()
    megabytes = sum(size.numel() for size in shapes.values()) * 4 / 1e6
    medians = {name: statistics.median(each) for name, each in took.items()}
    rows = [[name, f"{medians[name]:.2f}", f"{min(each):.2f} to {max(each):.2f}"] for name, each in took.items()]
    say(f"{megabytes:.0f} MB ({shape}) to two processes, each with its own copy:")
    show(["by", f"seconds (median of {turns})", "range"], rows)
    ratios = sorted(store / gloo for gloo, store in zip(*took.values(), strict=True))
    say(f"the object store takes {statistics.median(ratios):.2f} times as long ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return medians | {"ratio": statistics.median(ratios)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--ahead", type=int, action="append", default=[])
    parser.add_argument("--weights", action="store_true")
    args = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    measured = weights() if args.weights else None
    took, wrong = kills(args.kills, tuple(args.ahead) or (0, 1)) if args.kills else ([], [])
    ok = not wrong and len(took) == args.kills and max(took, default=0.0) <= AGAIN
    slowest = max(took, default=None)
    return close("cluster", slowest, None, AGAIN, ok, kills=len(took), wrong=wrong, weights=measured)[1]


if __name__ == "__main__":
    sys.exit(main())

"""What the library costs beyond its mathematics: a `lecture` run of 1,000 updates against a plain loop.

    python -m benchmarks.overhead [--repeats 7]

Ours is `ascent.train("lecture", preset="course", advantage="centered")` with its default records, written to a
temporary folder. The peer is `plain` below: the same mathematics, random stream and seed in a straight line. It
records nothing and wastes nothing (no einops, rewards from Python lists, fused Adam). Both run on one thread in one
process and take turns, after a warm-up of each. `value` and `peer` are the medians in seconds; their ratio must be
at most 1.4. `processor` is the ratio of the medians in processor seconds, which other processes on the machine
disturb less. Both must do the same work: the final parameters are compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import ascent
from ascent.build.trained_run import Run
from benchmarks.common import close

RATIO = 1.4
SAME = 1e-3
PROMPTS = [[1, 0, 2], [3, 2, 4], [1, 2, 3]]
SEED, SAMPLES, EPOCHS, INNER = 5, 10, 100, 10


def reward(prompt: list[int], response: list[int]) -> float:
    a, b, c = response
    return float((prompt[0] in response) + (prompt[1] in response) + (prompt[2] in response) + (a <= b) + (b <= c))


def plain(epochs: int = EPOCHS) -> torch.Tensor:
    """The course's run with centered advantages and nothing else; its embedding at the end."""
    generator = torch.Generator().manual_seed(SEED)
    embedding = torch.randn(5, 10, generator=generator).requires_grad_()
    encode = (torch.randn(3, 10, 10, generator=generator) / 10**0.5).requires_grad_()
    decode = (torch.randn(3, 10, 10, generator=generator) / 10**0.5).requires_grad_()
    optimizer = torch.optim.Adam([embedding, encode, decode], lr=1e-3, fused=True)
    prompt = torch.tensor(PROMPTS)

    def log_probs() -> torch.Tensor:
        """[prompt position vocab]."""
        encoded = embedding[prompt].view(3, 30) @ encode.view(30, 10)
        decoded = (encoded @ decode).transpose(0, 1)
        return torch.log_softmax(decoded @ embedding.T, -1)

    for _ in range(epochs):
        logp = log_probs()
        rows = logp.detach().exp().view(9, 5)
        drawn = torch.multinomial(rows, SAMPLES, replacement=True, generator=generator).view(3, 3, SAMPLES)
        groups = drawn.transpose(1, 2).tolist()
        rewards = torch.tensor([[reward(p, r) for r in group] for p, group in zip(PROMPTS, groups, strict=True)])
        δ = (rewards - rewards.mean(1, keepdim=True)).unsqueeze(1)
        for inner in range(INNER):
            logp = log_probs() if inner else logp
            loss = -(logp.gather(2, drawn) * δ).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return embedding.detach()


def ours(folder: Path) -> Run:
    return ascent.train("lecture", out=folder, show=False, preset="course", advantage="centered", seed=SEED)


def parts(metrics: list[dict[str, float]], total: float) -> str:
    """The share of each phase that the run itself timed; the rest is records, metrics and start-up."""
    names = sorted(
        {key for line in metrics for key in line if key.startswith("time/")} - {"time/step", "time/tokens_per_second"}
    )
    spent = {name.removeprefix("time/"): sum(line.get(name) or 0.0 for line in metrics) for name in names}
    spent["advantages, metrics"] = sum(line["time/step"] for line in metrics) - sum(spent.values())
    spent["records, start and end"] = total - sum(spent.values())
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in spent.items())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args(argv).repeats
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    processor: dict[str, list[float]] = {"ours": [], "plain": []}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats + 1):
            times = [(time.perf_counter(), time.process_time())]
            embedding = plain()
            times.append((time.perf_counter(), time.process_time()))
            run = ours(Path(folder) / str(repeat))
            times.append((time.perf_counter(), time.process_time()))
            spent = {name: times[i + 1][0] - times[i][0] for i, name in enumerate(("plain", "ours"))}
            if repeat:
                print(", ".join(f"{name} {took:.3f} s" for name, took in spent.items()), flush=True)
                for i, name in enumerate(("plain", "ours")):
                    seconds[name].append(spent[name])
                    processor[name].append(times[i + 1][1] - times[i][1])
        gap = (run.policy.embedding.detach() - embedding).abs().max().item()
        print(f"the last run's time: {parts(run.metrics, spent['ours'])}")
    print(f"largest difference of a final embedding: {gap:.1e}")
    value, peer = median(seconds["ours"]), median(seconds["plain"])
    more = {"repeats": repeats, "processor": median(processor["ours"]) / median(processor["plain"])}
    return close("overhead", value, peer, RATIO, gap < SAME and value <= RATIO * peer, **more)[1]


if __name__ == "__main__":
    sys.exit(main())

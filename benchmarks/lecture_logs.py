"""The course's published run, reproduced: responses and rewards exactly, floats within 0.001, all 100 epochs.

    python -m benchmarks.lecture_logs --advantage raw|centered|normalized

Runs `ascent train lecture --preset course --advantage NAME --seed 5 --record-rollouts all`. From the records of
the run it prints one JSON line for updates 0 and 5 of every epoch: epoch, step (the update in the epoch), loss,
responses [prompt][sample][position], log_probs (the same shape, of the policy at that update), rewards and deltas
[prompt][sample].

The peer is `straight_line` below: the course's specification (SPEC, section 3) in plain torch on the global
generator, without any code of Ascent. `value` is the largest difference of any float between the two, over every
update of every epoch. Responses and rewards must be equal, and the published landmarks must be met.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import ascent
from ascent.build.trained_run import Run
from benchmarks.common import close

PRINTED = (0, 5)
EPOCHS, INNER, SAMPLES, SEED = 100, 10, 10, 5
TOLERANCE = 1e-3
LANDMARKS = {
    "raw": ((1.164, 1.061), (2.333, 2.667, 2.667)),
    "centered": ((0.029, -0.235), (2.333, 3.333, 3.333)),
    "normalized": ((0.061, -0.487), (2.333, 3.333, 3.333)),
}
"""Published: the loss at updates 0 and 9 of the first epoch; the mean reward of epochs 0, 50 and 99."""


def straight_line(advantage: str) -> Iterator[dict[str, Any]]:
    """The course's run from SPEC section 3; one dictionary per update."""
    torch.manual_seed(SEED)
    embedding = torch.randn(5, 10).requires_grad_()
    encode = (torch.randn(3, 10, 10) / 10**0.5).requires_grad_()
    decode = (torch.randn(3, 10, 10) / 10**0.5).requires_grad_()
    optimizer = torch.optim.Adam([embedding, encode, decode], lr=1e-3)
    prompts = torch.tensor([[1, 0, 2], [3, 2, 4], [1, 2, 3]])

    def log_probs() -> torch.Tensor:
        encoded = sum(embedding[prompts[:, i]] @ encode[i] for i in range(3))
        decoded = torch.stack([encoded @ decode[i] for i in range(3)], dim=1)
        return torch.log_softmax(decoded @ embedding.T, dim=-1)

    for epoch in range(EPOCHS):
        with torch.no_grad():
            rows = log_probs().softmax(-1).flatten(0, 1)
        responses = torch.multinomial(rows, SAMPLES, replacement=True).view(3, 3, SAMPLES).transpose(1, 2)
        pairs = zip(prompts.tolist(), responses.tolist(), strict=True)
        rewards = torch.tensor([[reward(prompt, response) for response in group] for prompt, group in pairs])
        deltas = rewards if advantage == "raw" else rewards - rewards.mean(1, keepdim=True)
        if advantage == "normalized":
            deltas = deltas / (rewards.std(1, keepdim=True) + 1e-5)
        for step in range(INNER):
            logp = log_probs().unsqueeze(1).expand(-1, SAMPLES, -1, -1).gather(-1, responses.unsqueeze(-1)).squeeze(-1)
            loss = -(deltas.unsqueeze(-1) * logp).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield line(epoch, step, loss.item(), responses, logp, rewards, deltas)


def reward(prompt: list[int], response: list[int]) -> float:
    """One point for each prompt number in the response, one for each adjacent pair in order."""
    return float(sum(x in response for x in prompt) + sum(x <= y for x, y in itertools.pairwise(response)))


def line(epoch: int, step: int, loss: float, *tensors: torch.Tensor) -> dict[str, Any]:
    names = ("responses", "log_probs", "rewards", "deltas")
    return {"epoch": epoch, "step": step, "loss": loss} | dict(zip(names, (t.tolist() for t in tensors), strict=True))


def recorded(run: Run) -> Iterator[dict[str, Any]]:
    """The same dictionaries from a run's folder: updates.jsonl and the rollouts' Parquet files."""
    losses = {(u["step"], u["update"]): u["loss"] for u in run.updates}
    for epoch in range(EPOCHS):
        rows = run.rollouts(epoch)
        groups = [[row for row in rows if row["group"] == g] for g in range(3)]
        for step in range(INNER):
            assert all(row["logp_update"][step] == step for row in rows)
            yield {
                "epoch": epoch,
                "step": step,
                "loss": losses[epoch, step],
                "responses": [[row["response"] for row in group] for group in groups],
                "log_probs": [[row["logp"][step] for row in group] for group in groups],
                "rewards": [[row["reward"] for row in group] for group in groups],
                "deltas": [[row["advantage"][0] for row in group] for group in groups],
            }


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest difference of a float; infinite if something differs that must be equal."""
    exact = ("epoch", "step", "responses", "rewards")
    if any(ours[name] != theirs[name] for name in exact):
        return float("inf")
    floats = ("loss", "log_probs", "deltas")
    gaps = [torch.tensor(ours[name]).sub(torch.tensor(theirs[name])).abs().max() for name in floats]
    return torch.stack(gaps).nan_to_num(nan=float("inf")).max().item()


def landmarks_met(advantage: str, lines: list[dict[str, Any]]) -> bool:
    """Do the run's own numbers round to the published ones?"""
    found = {(entry["epoch"], entry["step"]): entry for entry in lines}
    losses = [found[0, step]["loss"] for step in (0, 9)]
    rewards = [torch.tensor(found[epoch, 0]["rewards"]).mean().item() for epoch in (0, 50, 99)]
    expected = [x for part in LANDMARKS[advantage] for x in part]
    gaps = [abs(x - y) for x, y in zip(losses + rewards, expected, strict=True)]
    print(f"landmarks of {advantage}: {losses + rewards}, published {expected}", file=sys.stderr)
    return max(gaps) < TOLERANCE


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--advantage", choices=list(LANDMARKS), default="centered")
    advantage = parser.parse_args(argv).advantage
    with tempfile.TemporaryDirectory() as folder:
        settings = {"preset": "course", "advantage": advantage, "seed": SEED, "record_rollouts": "all"}
        run = ascent.train("lecture", out=Path(folder) / "run", show=False, **settings)
        ours = list(recorded(run))
    for entry in ours:
        if entry["step"] in PRINTED:
            print(json.dumps(entry))
    gap = max(difference(a, b) for a, b in zip(ours, straight_line(advantage), strict=True))
    ok = gap <= TOLERANCE and landmarks_met(advantage, ours)
    return close("lecture_logs", gap, 0.0, TOLERANCE, ok, advantage=advantage)[1]


if __name__ == "__main__":
    sys.exit(main())

"""Sampling ahead: what it costs per sample, what it saves, and whether any token is older than allowed.

    python -m benchmarks.ahead [--seeds 100] [--schedules 1000] [--smoke]

Three parts. **Schedules**: the loop's rollout requests, with a simulated engine whose responses have random lengths and
speeds, killed and resumed at random: no token may be older than K updates. **Learning**:
`lecture` with K = 0, 1 and 4, with a clip alone and with `--correction truncated`; small policies sample every
request whole, K updates early, so every token has the maximum staleness. **Batch**: responses of log-normal
lengths (σ = 1, limit 8 times the mean), sampled by the engine with room for two steps' responses: the number of decode
steps, and the mean number of running sequences, with K = 0 and K = 4. On a GPU a decode step takes about as long for a
small batch as for a large one, so their ratio bounds what sampling ahead can save.

The part with a serving engine is `python -m benchmarks.ahead_engine`.
`value` is the number of decode steps with K = 4, the peer that with K = 0, and the target the ratio 1/1.8. Writes
benchmarks/results/ahead.md.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascent.core.algorithms import ALGORITHMS
from ascent.core.config import Config
from ascent.core.loop import PhaseTimer, collect
from ascent.core.protocols import FinishedRollouts, RolloutEngine, RolloutRequest
from ascent.core.sampling_params import SamplingParams
from ascent.core.types import Prompts, Rollouts
from ascent.inference.engine import LocalEngine
from ascent.models import CausalLM, PerPosition
from ascent.runs.confidence_intervals import mean_and_half_width
from ascent.tasks.small.sorting import Sort
from benchmarks import ahead_engine
from benchmarks.common import close, markdown, pair, show, write_page
from benchmarks.many import train_many
from benchmarks.peers.models import SMOKE, random_model
from benchmarks.ragged_gpu import lengths_of

SAVED = 1 / 1.8
AGES = (0, 1, 4)
CORRECTIONS = {"clip alone": {"correction": "no-correction"}, "truncated": {"correction": "truncated"}}
LECTURE: dict[str, Any] = {"advantage": "leave-one-out", "loss": "clipped", "steps": 40}


# ---- schedules ------------------------------------------------------------------------------------------------


class Simulated(RolloutEngine):
    """Responses of random lengths, of which any number of tokens appears between two looks."""

    limit = 30

    def __init__(self, rng: random.Random):
        self.rng, self.version = rng, -1
        self.written: dict[RolloutRequest, list[list[int]]] = {}
        """The version of each token of each response so far, by request."""

    def load(self, params: dict[str, Tensor], version: int) -> None:
        self.version = version

    def copy(self) -> dict[RolloutRequest, list[list[int]]]:
        return {request: [list(row) for row in rows] for request, rows in self.written.items()}

    def iter_finished(self, step: int, deadline: float) -> Iterator[FinishedRollouts]:
        for one in self.pending:
            count = len(one.request.prompts) * one.request.samples
            rows = self.written.setdefault(one.request, [[] for _ in range(count)])
            for response, row in enumerate(rows):
                length = 1 + hash((one.request.step, response)) % self.limit
                more = length if one.request.step == step else self.rng.randint(0, self.limit)
                row += [self.version] * (min(length, len(row) + more) - len(row))
        mine = [one for one in self.pending if one.request.step == step]
        self.pending = tuple(one for one in self.pending if one.request.step != step)
        for one in mine:
            yield FinishedRollouts(one.request, torch.arange(len(one.request.prompts)), self.rollouts(one.request))

    def rollouts(self, request: RolloutRequest) -> Rollouts:
        """Return responses whose tokens encode the step that they belong to."""
        rows = self.written.pop(request)
        shape, width = (len(request.prompts), request.samples), max(map(len, rows))
        version = torch.tensor([row + [-1] * (width - len(row)) for row in rows]).view(*shape, width)
        response = torch.full((*shape, width), request.step % 4)
        logp, cut = torch.zeros(*shape, width), torch.zeros(shape, dtype=torch.bool)
        return Rollouts(request.prompts.prompt, response, version >= 0, logp, self.limit, cut, version=version)


def try_schedule(rng: random.Random, steps: int = 8) -> tuple[int, int, int]:
    """Return the largest staleness of a token, the limit on it, and the number of resumes of one simulated run."""
    task, ahead = Sort(length=3, numbers=4, end=True), rng.randint(0, 5)
    given: dict[str, Any] = {"prompts": 2, "samples": 2, "steps": steps, "seed": rng.randrange(1000)}
    config = Config(task, PerPosition(), ALGORITHMS["grpo"], ahead=ahead, **given)
    sampler, prompts = Simulated(rng), torch.Generator().manual_seed(1)
    trained: dict[int, Tensor] = {}
    step, oldest, resumes = 0, 0, 0
    saved = (0, sampler.pending, sampler.copy(), prompts.get_state())
    while step < steps:
        sampler.load({}, step)
        batch, _ = collect(task, sampler, config.algorithm, config, prompts, PhaseTimer(), step)
        age = step - batch.version[batch.mask]
        oldest = max(oldest, int(age.max()))
        assert int(age.min()) >= 0 and oldest <= ahead, f"a token is {oldest} updates old, and {ahead} are allowed"
        assert (batch.response[batch.mask] == step % 4).all(), "a group was trained in another step than its own"
        assert torch.equal(trained.setdefault(step, batch.prompt), batch.prompt), "a resume has other prompts"
        step += 1
        open_steps = [one.request.step for one in sampler.pending]
        assert open_steps == list(range(step, min(step + ahead, steps))), f"pending requests: {open_steps}"
        if rng.random() < 0.2:
            saved = (step, sampler.pending, sampler.copy(), prompts.get_state())
        elif rng.random() < 0.1:
            step, pending, written, state = saved
            sampler, prompts, resumes = Simulated(rng), torch.Generator(), resumes + 1
            sampler.pending, sampler.written = pending, written
            saved = (step, pending, sampler.copy(), state)
            prompts.set_state(state)
    return oldest, ahead, resumes


# ---- learning -------------------------------------------------------------------------------------------------


def learn(seeds: int) -> list[dict[str, Any]]:
    """By age and correction, how runs of `lecture` end: E[R], enumerated, and the share of sorted answers."""
    found = []
    for age in AGES:
        for name, settings in CORRECTIONS.items():
            ends = train_many(seeds, **LECTURE, **settings, ahead=age)
            found.append({"ahead": age, "correction": name, "reward": ends.expected.tolist()})
            found[-1]["sorted"] = ends.sorted.double().tolist()
            print(f"ahead {age}, {name}: E[R] {ends.expected.mean():.3f}", flush=True)
    return found


# ---- batch size ----------------------------------------------------------------------------------------------------


class Ragged(LocalEngine):
    """Every response has a length of its own, by its problem and its place."""

    lengths: Tensor

    def length_limits(self, prompts: Prompts, samples: int, limit: int) -> Tensor:
        return self.lengths[prompts.problem].flatten().clamp(max=limit)


def decode_steps(ahead: int, smoke: bool) -> dict[str, Any]:
    """Return the decoding steps, seconds and mean batch size of eight training steps."""
    steps, groups, samples, mean = (3, 2, 4, 4) if smoke else (8, 8, 8, 24)
    with tempfile.TemporaryDirectory() as folder:
        lm = CausalLM(random_model(Path(folder), SMOKE), dtype="float32", device="cpu").load()
    lm.stop_token_ids = frozenset({-1})  # no response ends before its length
    rows = 2 * groups * samples
    sampler = Ragged(lm, 8 * mean, 1.0, torch.Generator().manual_seed(0), SamplingParams(), rows)
    sampler.lengths = lengths_of(steps * groups * samples, mean, 8 * mean).view(-1, samples)
    net: Any = sampler.packed_model or lm
    passes, hidden = 0, net.hidden

    def counted(ids: Tensor, *rest: Any) -> Tensor:
        nonlocal passes
        passes += ids.shape[1] == 1
        return hidden(ids, *rest)

    net.hidden = counted
    begin, tokens, asked = time.perf_counter(), 0, 0
    for step in range(steps):
        sampler.load({}, step)
        while asked < min(step + ahead + 1, steps):
            problem = torch.arange(asked * groups, (asked + 1) * groups)
            sampler.submit([RolloutRequest(asked, Prompts(problem[:, None] % 100 + 2, problem), samples)])
            asked += 1
        tokens += sum(int(done.rollouts.length.sum()) for done in sampler.iter_finished(step, 3600.0))
    assert tokens == int(sampler.lengths.sum()) and not sampler.pending
    return {"ahead": ahead, "passes": passes, "busy": tokens / passes, "seconds": time.perf_counter() - begin}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--smoke", action="store_true", help="few and short, only to see that it runs")
    options = parser.parse_args(argv)
    smoke = options.smoke
    rng = random.Random(0)
    tried = [try_schedule(rng) for _ in range(5 if smoke else options.schedules)]
    resumes = sum(resumes for _, _, resumes in tried)
    print(f"{len(tried)} schedules with {resumes} resumes: no token is older than allowed", flush=True)
    found = [decode_steps(ahead, smoke) for ahead in (0, 4)]
    table = [[str(f["ahead"]), str(f["passes"]), f"{f['busy']:.1f}", f"{f['seconds']:.1f}"] for f in found]
    head = ["ahead", "decoding steps", "running sequences", "seconds on this CPU"]
    show(head, table)
    passes = [float(f["passes"]) for f in found]
    more = {"schedules": len(tried), "resumes": resumes, "batches": found}
    if smoke:
        return close("ahead", None, None, SAVED, True, smoke=True, **more)[1]
    learned = learn(options.seeds)
    rows = [
        [str(f["ahead"]), f["correction"], *(pair(*mean_and_half_width(f[name]), 3) for name in ("reward", "sorted"))]
        for f in learned
    ]
    columns = ["ahead", "correction", "E[R]", "sorted"]
    show(columns, rows)
    text = PAGE.format(
        schedules=len(tried), resumes=resumes, batches=markdown(head, table), learned=markdown(columns, rows),
        seeds=options.seeds, ratio=passes[0] / passes[1],
    )  # fmt: skip
    write_page("ahead", f"{text}\n\n{ahead_engine.section()}")
    return close("ahead", passes[1], passes[0], SAVED, passes[1] <= SAVED * passes[0], learning=rows, **more)[1]


PAGE = """
# Sampling ahead

`python -m benchmarks.ahead`, two cores.

**Schedules.** {schedules} random schedules (K from 0 to 5, random lengths and speeds, {resumes} kills with a resume
from an older checkpoint): no token is older than K updates, every group is trained in its own step, and a resume has
the same prompts.

**Batch size.** 512 responses in eight steps of 64, lengths log-normal with mean 24, σ = 1 and a limit of 192, at most
128 at once, by a tiny random model. With K = 4 it takes {ratio:.2f} times fewer decoding steps. On a GPU a decoding
step takes about as long for few rows as for many, so this is what sampling ahead can save there at most; on a CPU the
time of a step grows with its rows. [On a GPU](ahead_gpu.md) it is 1.8 times as many tokens per second.

{batches}

**Learning.** `lecture` with leave-one-out advantages and a clipped loss, 40 steps, {seeds} seeds, mean and 95 %
interval at the end. A small policy generates each request whole, so every token is K updates old from step K on: the
largest staleness that is allowed.

{learned}
"""


if __name__ == "__main__":
    sys.exit(main())

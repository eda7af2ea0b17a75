"""Short trials before a run: how long a step will take on this machine.

    sampling   seconds = e · prompts + a · steps + b · tokens, fitted to three calls of the sampler
    update     seconds = operations / rate, with the rate of a forward and a backward pass over a few tokens

A step of decoding costs a, however many rows it has (the weights are read once), and b for each of them. The trials are
short and the model is rough: what is predicted may well be off by half. Random streams and parameters stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ascent.core.config import Config
from ascent.core.protocols import RolloutEngine
from ascent.core.types import Prompts, Rollouts, Terms, to_batch
from ascent.training.language_learner import LanguageLearner
from ascent.training.micro_batches import update_operations

SHORT_RESPONSE_TOKENS = 16
"""Tokens of the responses to a short call."""
MAX_TRIAL_RESPONSE_TOKENS = {"cuda": 512, "cpu": 64}
"""Tokens of a response in the trial of an update, at most."""
TRIAL_BATCH_TOKENS = {"cuda": 16_384, "cpu": 256}
"""Tokens in that trial: a GPU needs many of them to be as fast as it can be."""


class TimedCall(NamedTuple):
    """What the sampler was asked for, and how long it took."""

    seconds: float
    prompts: int
    steps: int
    """Tokens of the longest response."""
    tokens: int


def time_generation(
    engine: RolloutEngine, prompts: Prompts, samples: int, limit: int | None = None
) -> tuple[Rollouts, TimedCall]:
    begin = time.perf_counter()
    rollouts = engine.generate(prompts, samples, limit=limit)
    seconds = time.perf_counter() - begin
    length = rollouts.present.sum(-1)
    return rollouts, TimedCall(seconds, len(prompts), int(length.max()), int(length.sum()))


def sampling_costs(calls: Sequence[TimedCall]) -> list[float]:
    """e, a and b, none below 0, so that the calls' seconds come out with the least relative error."""
    parts = torch.tensor([call[1:] for call in calls], dtype=torch.float64)
    parts /= torch.tensor([call.seconds for call in calls], dtype=torch.float64)[:, None]
    scale = parts.amax(0)
    left = [0, 1, 2]
    while True:
        solved = torch.linalg.lstsq(parts[:, left] / scale[left], torch.ones(len(parts), 1).double(), driver="gelsd")
        costs = solved.solution[:, 0] / scale[left]
        if bool((costs >= 0).all()) or len(left) == 1:
            found = dict(zip(left, costs.clamp(min=0).tolist(), strict=True))
            return [found.get(i, 0.0) for i in range(3)]
        left = [i for i, cost in zip(left, costs.tolist(), strict=True) if cost >= 0]


def sampling_seconds(costs: Sequence[float], prompts: int, samples: int, rows: int, mean: float, longest: int) -> float:
    """For responses of this mean length, `rows` at once: those of a lane follow on each other."""
    tokens = prompts * samples * mean
    return sum(cost * part for cost, part in zip(costs, (prompts, max(longest, tokens / rows), tokens), strict=True))


def update_rate(learner: LanguageLearner, prompt: int, limit: int) -> float:
    """Operations per second of a forward and a backward pass over a few tokens, as this learner computes them."""
    lm, kind = learner.lm, "cuda" if learner.lm.device.type == "cuda" else "cpu"
    length = min(limit, MAX_TRIAL_RESPONSE_TOKENS[kind])
    samples = max(1, min(TRIAL_BATCH_TOKENS[kind], learner.plan.tokens) // length)
    ids = torch.arange(prompt + length) % lm.vocab_size
    mask = torch.ones(1, samples, length, dtype=torch.bool)
    tokens = ids[None, None, prompt:].expand(1, samples, -1).contiguous()
    none = torch.zeros(mask.shape[:2])
    drawn = Rollouts(ids[None, :prompt], tokens, mask, torch.zeros(mask.shape), length, none.bool())
    batch = to_batch(drawn, reward=none.unsqueeze(-1), valid=~none.bool())
    for _ in range(2 + learner.captures if kind == "cuda" else 1):  # the first call compiles, the second may capture
        begin = time.perf_counter()
        terms = learner.gradient(batch, lambda mini, out: Terms(torch.where(mini.mask, out.logp, 0.0).sum(), {}))
        terms.objective.item()  # here the host waits
        seconds = time.perf_counter() - begin
    for parameter in learner.trainable():
        parameter.grad = None
    return update_operations(lm, [prompt], [[length] * samples])[0] / seconds


def update_seconds(config: Config, learner: LanguageLearner, rate: float, prompt: int, length: int) -> float:
    """For all epochs over responses of this length, and what is scored before them: a forward pass is a third."""
    groups = [[length] * config.samples] * config.prompts
    once = update_operations(learner.lm, [prompt] * config.prompts, groups)[0] / rate
    critic = config.algorithm.critic
    scored = critic.enabled + config.algorithm.reference.enabled + (config.old_logp == "learner")
    return once * (config.epochs * (1 + (critic.enabled and not critic.shared)) + scored / 3)


def format_duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

"""Short trials before a run, to estimate the duration of a step on this machine.

    sampling   seconds = e · prompts + a · steps + b · tokens, fitted to three calls of the engine
    update     seconds = operations / rate, with the rate of a forward and a backward pass over a few tokens

A decode step costs `a` for any batch size (the weights are read once), plus `b` for each sequence. The trials are short
and the model is rough: an estimate may be off by half. Random streams and parameters are not changed.
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
"""Response length of a short call, in tokens."""
MAX_TRIAL_RESPONSE_TOKENS = {"cuda": 512, "cpu": 64}
"""Maximum response length in the trial of an update, by device."""
TRIAL_BATCH_TOKENS = {"cuda": 16_384, "cpu": 256}
"""Number of tokens in the trial of an update: a GPU reaches its full speed only with many."""


class TimedCall(NamedTuple):
    """The size of a call of the engine, and how long it took."""

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
    """Fit e, a and b, all at least 0, to the calls by least squares of the relative error."""
    parts = torch.tensor([call[1:] for call in calls], dtype=torch.float64)
    parts /= torch.tensor([call.seconds for call in calls], dtype=torch.float64)[:, None]
    scale = parts.amax(0)
    left = [0, 1, 2]
    while True:
        solved = torch.linalg.lstsq(parts[:, left] / scale[left], torch.ones(len(parts), 1).double(), driver="gelsd")
        costs = solved.solution[:, 0] / scale[left]
        if bool((costs >= 0).all()) or len(left) == 1:
            by_index = dict(zip(left, costs.clamp(min=0).tolist(), strict=True))
            return [by_index.get(i, 0.0) for i in range(3)]
        left = [i for i, cost in zip(left, costs.tolist(), strict=True) if cost >= 0]


def sampling_seconds(costs: Sequence[float], prompts: int, samples: int, rows: int, mean: float, longest: int) -> float:
    """Estimate the seconds of sampling, with `rows` sequences decoded at once and new ones following finished ones."""
    tokens = prompts * samples * mean
    return sum(cost * part for cost, part in zip(costs, (prompts, max(longest, tokens / rows), tokens), strict=True))


def update_rate(learner: LanguageLearner, prompt: int, limit: int) -> float:
    """Measure the operations per second of a forward and a backward pass of this learner over a few tokens."""
    lm, kind = learner.lm, "cuda" if learner.lm.device.type == "cuda" else "cpu"
    length = min(limit, MAX_TRIAL_RESPONSE_TOKENS[kind])
    samples = max(1, min(TRIAL_BATCH_TOKENS[kind], learner.plan.tokens) // length)
    ids = torch.arange(prompt + length) % lm.vocab_size
    mask = torch.ones(1, samples, length, dtype=torch.bool)
    tokens = ids[None, None, prompt:].expand(1, samples, -1).contiguous()
    none = torch.zeros(mask.shape[:2])
    rollouts = Rollouts(ids[None, :prompt], tokens, mask, torch.zeros(mask.shape), length, none.bool())
    batch = to_batch(rollouts, reward=none.unsqueeze(-1), valid=~none.bool())
    for _ in range(2 + learner.captures if kind == "cuda" else 1):  # the first call compiles, the second may capture
        begin = time.perf_counter()
        terms = learner.gradient(batch, lambda mini, out: Terms(torch.where(mini.mask, out.logp, 0.0).sum(), {}))
        terms.objective.item()  # synchronizes with the device
        seconds = time.perf_counter() - begin
    for parameter in learner.trainable():
        parameter.grad = None
    return update_operations(lm, [prompt], [[length] * samples])[0] / seconds


def update_seconds(config: Config, learner: LanguageLearner, rate: float, prompt: int, length: int) -> float:
    """Estimate the seconds of a step's epochs and of the forward passes before them (a third of an update each)."""
    groups = [[length] * config.samples] * config.prompts
    once = update_operations(learner.lm, [prompt] * config.prompts, groups)[0] / rate
    critic = config.algorithm.critic
    scored = critic.enabled + config.algorithm.reference.enabled + (config.old_logp == "learner")
    return once * (config.epochs * (1 + (critic.enabled and not critic.shared)) + scored / 3)


def format_duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

"""The bounds of every numeric setting: the last value that is accepted, and the first that is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ascent.core.errors import ConfigError
from ascent.settings import configure

TINY = 1e-9
TEXT = {"model": "m", "policy": "causal-lm"}
BOUNDS: dict[str, tuple[str, dict[str, Any], str, tuple[Any, ...], tuple[Any, ...]]] = {
    # name: task, other settings, setting, accepted, refused
    "steps between references": (
        "sort", {"algorithm": "grpo", "reference": "every"}, "reference.n", (1, 2), (0, -1)),
    "rate of a moving reference": (
        "sort", {"algorithm": "grpo", "reference": "moving-average"}, "reference.rate", (0.0, 1.0), (-TINY, 1 + TINY)),
    "momentum": (
        "sort", {"algorithm": "reinforce", "advantage": "running-mean"}, "advantage.momentum", (0.0, 0.99),
        (-TINY, 1.0)),
    "epsilon of the deviation": ("sort", {"algorithm": "grpo"}, "advantage.eps", (0.0, 1.0), (-TINY,)),
    "degrees of freedom": ("sort", {"algorithm": "grpo"}, "advantage.ddof", (0, 1), (-1, 2)),
    "dual clip": ("sort", {"algorithm": "ppo"}, "loss.dual", (1.001, None), (1.0, 0.5)),
    "learning rate": ("sort", {}, "lr", (TINY, 1.0), (0.0, -1.0)),
    "warm-up": ("sort", {}, "update.warmup", (0.0, 0.99), (-TINY, 1.0)),
    "gradient norm": ("sort", {}, "update.max_norm", (TINY, None), (0.0, -1.0)),
    "beta1": ("sort", {}, "update.beta1", (0.0, 0.99), (-TINY, 1.0)),
    "beta2": ("sort", {}, "update.beta2", (0.0, 0.99), (-TINY, 1.0)),
    "epsilon of Adam": ("sort", {}, "update.eps", (0.0,), (-TINY,)),
    "weight decay": ("sort", {}, "update.weight_decay", (0.0,), (-TINY,)),
    "trust region": ("sort", {"algorithm": "trpo"}, "update.delta", (TINY,), (0.0, -1.0)),
    "shrink": ("sort", {"algorithm": "trpo"}, "update.shrink", (TINY, 0.99), (0.0, 1.0)),
    "gamma": ("sort", {"algorithm": "ppo"}, "advantage.gamma", (0.0, 1.0), (-TINY, 1 + TINY)),
    "lambda": ("sort", {"algorithm": "ppo"}, "advantage.lam", (0.0, 1.0), (-TINY, 1 + TINY)),
    "k of k-step returns": ("sort", {"algorithm": "ppo", "advantage": "k-step"}, "advantage.k", (1,), (0, -1)),
    "critic's learning rate": ("sort", {"algorithm": "ppo"}, "critic.lr", (TINY,), (0.0,)),
    "critic's steps": ("sort", {"algorithm": "ppo"}, "critic.steps", (1,), (0,)),
    "critic's warm-up": ("sort", {"algorithm": "ppo"}, "critic.warmup", (0.0, 0.99), (-TINY, 1.0)),
    "coefficient of a shared critic": (
        "sort", {"algorithm": "ppo", "critic": "shared-critic"}, "critic.coef", (TINY,), (0.0,)),
    "coefficient of the KL": ("sort", {"algorithm": "grpo"}, "kl.coef", (0.0, 1.0), (-TINY,)),
    "coefficient of an adaptive KL": ("sort", {"algorithm": "grpo", "kl.target": 0.1}, "kl.coef", (TINY,), (0.0,)),
    "target of the KL": ("sort", {"algorithm": "grpo"}, "kl.target", (TINY, None), (0.0, -1.0)),
    "cap of truncated weights": ("sort", {"correction": "truncated"}, "correction.cap", (TINY,), (0.0,)),
    "floor of truncated weights": (
        "sort", {"correction": "truncated", "correction.cap": 2.0}, "correction.floor", (0.0, 2.0), (-TINY, 2 + 1e-6)),
    "low bound of masked weights": (
        "sort", {"correction": "masked", "correction.high": 2.0}, "correction.low", (0.0, 2.0), (-TINY, 2 + 1e-6)),
    "rounds of dynamic sampling": ("sort", {"algorithm": "dapo"}, "groups.rounds", (1,), (0,)),
    "samples of a group": ("sort", {"algorithm": "grpo"}, "samples", (2,), (1, 0)),
    "temperature": ("sort", {}, "temperature", (TINY, 2.0), (0.0, -1.0)),
    "mini-batches": ("sort", {"prompts": 4}, "minibatches", (1, 4), (5, 0)),
    "length to sort": ("sort", {}, "length", (2,), (1, 0)),
    "numbers to sort": ("sort", {}, "numbers", (2,), (1, 0)),
    "share of wrong demonstrations": ("sort", {}, "wrong", (0.0, 1.0), (-TINY, 1 + TINY)),
    "length to swap": ("swaps", {}, "length", (2, 6), (7,)),
    "slips": ("swaps", {}, "slip", (0.0, 0.99), (-TINY, 1.0)),
    "numbers of a countdown": ("countdown", TEXT, "numbers", (2, 8), (1, 9)),
    "largest number of a countdown": ("countdown", TEXT, "largest", (2,), (1,)),
    "largest target of a countdown": ("countdown", TEXT, "largest_target", (2,), (1,)),
    "partial reward of a countdown": ("countdown", TEXT | {"lenient": 0.5}, "partial", (0.0, 0.5), (-TINY, 0.6)),
    "lenient reward": ("countdown", TEXT | {"partial": 0.0}, "lenient", (0.0, 1.0), (-TINY, 1 + TINY)),
    "rate of exploration's end": (
        "sort", {"algorithm": "grpo", "exploration": "annealed"}, "exploration.until", (TINY, 1.0), (0.0, 1 + TINY)),
    "β of DPO": ("sort", {"algorithm": "dpo", "pairs": "x.jsonl"}, "loss.beta", (TINY,), (0.0,)),
    "smoothing of DPO": ("sort", {"algorithm": "dpo", "pairs": "x.jsonl"}, "loss.smoothing", (0.0, 0.49), (-TINY, 0.5)),
    "margin of overlong responses": (
        "sort", {"algorithm": "grpo", "shaping": "overlong"}, "shaping.margin", (1,), (0,)),
    "seconds of a rank": ("sort", {}, "ranks.deadline", (TINY,), (0.0,)),
    "replicas of an engine": (
        "countdown", TEXT | {"engine": "vllm", "engine.url": "http://127.0.0.1:1"}, "engine.deadline", (TINY,), (0.0,)),
    "fewest tokens": ("countdown", TEXT | {"max_tokens": 8}, "min_tokens", (0, 8), (-1, 9)),
    "seconds of a reward": ("countdown", TEXT, "reward_seconds", (TINY,), (0.0,)),
    "memory of a reward": ("countdown", TEXT, "reward_memory", (0.0,), (-TINY,)),
    "scale of LoRA": ("countdown", TEXT | {"policy.lora": 4}, "policy.lora_alpha", (TINY,), (0.0,)),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_the_last_accepted_and_the_first_refused_value(name: str) -> None:
    task, others, setting, accepted, refused = BOUNDS[name]
    for value in accepted:
        configure(task, others | {setting: value})
    for value in refused:
        with pytest.raises(ConfigError) as error:
            configure(task, others | {setting: value})
        words = setting.rpartition(".")[2].replace("_", "-")
        assert words in str(error.value) or setting.rpartition(".")[2] in str(error.value)

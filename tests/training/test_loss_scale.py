"""Gradients in float16: those of float32 to rounding, for any size of the loss, with a scale that checkpoints hold."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from ascent.core.algorithms import ALGORITHMS
from ascent.core.critics import OwnCritic
from ascent.core.errors import ConfigError, RunError
from ascent.core.types import Batch
from ascent.core.update import Adam
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from ascent.training.loss_scale import GROWTH_INTERVAL, LossScale
from tests.language import batch_of, gradient_of, model_of

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 101}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROW = ALGORITHMS["dr-grpo"]
PPO = replace(ALGORITHMS["ppo"], critic=OwnCritic())


def learner_of(dtype: torch.dtype, row: Any = ROW) -> LanguageLearner:
    """Of small parameters, so that gradients are small; the same ones in every precision."""
    lm = model_of(dtype=torch.float32, **SHAPE)
    with torch.no_grad():
        for p in lm.model.parameters():
            p.copy_((p * (0.3 if p.dim() > 1 else 1)).half())
    lm.model.to(DEVICE, dtype)
    critic = LanguageCritic(lm, shared=False) if row.critic.enabled else None
    return LanguageLearner(lm, Adam(lr=1e-3), False, row.outputs, 0, False, critic, row.critic.update)


def mini_of(factor: float, limit: int, row: Any = ROW, learner: LanguageLearner | None = None) -> Batch:
    """A batch whose rewards are multiplied, with a limit on lengths that the loss is divided by."""
    batch = batch_of(model_of(dtype=torch.float32, **SHAPE), samples=3, limit=5)
    batch = batch.add(reward=batch.reward.float() * factor, limit=limit, logp_old=None)
    if learner is not None:
        batch = batch.add(**learner.score(batch, frozenset({"value", "logp_old"})))
    batch, state = row.compute_advantages(batch, row.initial_state())
    batch = batch.add(weight=row.weights(batch), **row.scalars(state, 0.0))
    return batch.add(**{name: getattr(batch, name).float() for name in ("logp_sampler", "advantage", "weight")})


def error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


@pytest.mark.long
@pytest.mark.parametrize("factor", [1e-12, 1e-4, 1e-2, 1.0, 1e7])
def test_gradients_neither_underflow_nor_overflow_for_any_advantage_scale(factor: float) -> None:
    for limit in (12, 4096):
        exact, narrow = learner_of(torch.float32), learner_of(torch.float16)
        mini = mini_of(factor, limit)
        for learner in (exact, narrow):
            learner.gradient(mini, ROW.objective)
        assert error(gradient_of(narrow), gradient_of(exact)) < 0.01, f"limit {limit}"


@pytest.mark.long
@pytest.mark.parametrize("factor", [1e-5, 1.0, 1e5])
def test_separate_critic_has_separate_loss_scale(factor: float) -> None:
    found = []
    for dtype in (torch.float32, torch.float16):
        learner = learner_of(dtype, PPO)
        with torch.no_grad():
            learner.critic.head.weight.copy_(torch.linspace(-0.1, 0.1, 32)[None])
        mini = mini_of(factor, 12, PPO, learner)
        mini = mini.add(returns=mini.returns * factor if factor < 1 else mini.returns)
        learner.fit_critic(mini, PPO.critic.loss)
        found.append(torch.cat([p.grad.flatten() for p in learner.critic.trained()]))
    assert error(found[1], found[0]) < 0.02


def test_loss_scale_is_saved_and_resume_is_bitwise_equal() -> None:
    mini = mini_of(1e-4, 4096)
    one = learner_of(torch.float16)
    for _ in range(2):
        one.step(mini, ROW.objective, Adam(lr=1e-3))
    one.loss_scale = one.loss_scale._replace(good=GROWTH_INTERVAL - 1)  # the next update doubles the scale
    saved = {group: {name: t.clone() for name, t in own.items()} for group, own in one.state().items()}
    two = learner_of(torch.float16)
    assert one.loss_scale.scale > two.loss_scale.scale, "it was raised by what was measured"
    two.restore(saved)
    for learner in (one, two):
        learner.step(mini, ROW.objective, Adam(lr=1e-3))
        learner.step(mini, ROW.objective, Adam(lr=1e-3))
    for group, own in one.state().items():
        assert all(torch.equal(t, two.state()[group][name]) for name, t in own.items()), group
    assert float(one.state()["loss_scale"]["policy"][0]) == 2 * float(saved["loss_scale"]["policy"][0])


def test_gradient_without_step_keeps_loss_scale() -> None:
    """Trials before a run compute gradients too."""
    learner = learner_of(torch.float16)
    before = learner.state()["loss_scale"]["policy"]
    learner.gradient(mini_of(1e-6, 4096), ROW.objective)
    assert torch.equal(learner.state()["loss_scale"]["policy"], before)


def test_non_finite_gradient_at_any_scale_raises_with_advice() -> None:
    learner = learner_of(torch.float16)
    mini = mini_of(1.0, 12)
    with pytest.raises(RunError, match=r"--policy\.dtype mixed or float32"):
        learner.gradient(mini.add(advantage=mini.advantage * math.nan), ROW.objective)


def test_trust_region_in_float16_is_rejected() -> None:
    row = ALGORITHMS["trpo"]
    with pytest.raises(ConfigError, match="trust-region with parameters in half precision"):
        LanguageLearner(model_of(dtype=torch.float16), row.update, False, row.outputs)


@pytest.mark.parametrize("seed", range(4))
def test_loss_scale_adapts_to_random_losses(seed: int) -> None:
    """Against exact gradients, rounded to float16 as a backward pass would. Few updates are computed twice."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    p = torch.zeros(64, requires_grad=True)
    activations, size, scale, calls, updates = (
        2.0 ** rng.randint(-4, 6),
        2.0 ** rng.randint(-40, 20),
        LossScale(),
        0,
        600,
    )
    for update in range(updates):
        if rng.random() < 0.01:
            size *= 2.0 ** rng.randint(-12, 12)
        zero = rng.random() < 0.1
        exact = torch.randn(64, generator=generator).double() * size * (0 if zero else 2.0 ** rng.uniform(-2, 2))

        def gradients(factor: float, exact: torch.Tensor = exact) -> None:
            nonlocal calls
            calls += 1
            through = (exact * activations * factor).half()
            p.grad = (through / activations).half().float()

        _, scale = scale.compute(gradients, [p])
        found = p.grad.double()
        assert float((found - exact).abs().max()) <= 2e-3 * float(exact.abs().max()), f"update {update}"
        assert math.log2(scale.scale).is_integer()
    assert calls < 1.25 * updates, "overflows are rare"

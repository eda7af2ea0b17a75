"""The trust region: the Fisher matrix itself, a KL that never exceeds Δ, and why a step is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import ENDED, F64, FIXED, TINY, close, learner_of, policy_of, rollouts_of, with_rewards
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ascent.core.advantages import Raw
from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.critics import OwnCritic
from ascent.core.errors import ConfigError
from ascent.core.exploration import Constant
from ascent.core.losses import Ratio
from ascent.core.types import Batch
from ascent.core.update import Adam, TrustRegion, conjugate_gradients
from ascent.core.values import GAE
from ascent.core.weights import TokenMean
from ascent.models import PerPosition, Policy
from ascent.runs.alerts.step_alerts import metric_warnings
from ascent.settings import configure, row_label
from ascent.training.small_learner import SmallLearner, log_probs

TRPO = ALGORITHMS["trpo"]


def prepared(policy: Policy, algorithm: Algorithm = TRPO, seed: int = 2, micro_batch: int = 0) -> tuple[Any, Batch]:
    """A learner and its batch: lengths may differ, one reward failed, one response is wholly masked."""
    learner = learner_of(policy, algorithm, micro_batch)
    batch = with_rewards(rollouts_of(policy, 3, 4, temperature=0.8, seed=seed), seed=seed)
    batch.valid[0, 1] = False
    batch.mask[1, 2] = False
    batch = batch.add(logp_old=batch.logp_sampler)
    batch = batch.add(**learner.score(batch, algorithm.needs))
    batch, _ = algorithm.compute_advantages(batch, algorithm.initial_state())
    return learner, batch.add(weight=algorithm.weights(batch))


@torch.no_grad()
def mean_kl(old: Policy, new: Policy, batch: Batch) -> float:
    """KL(π_old ‖ π), written out state by state: the mean over the tokens that count."""
    p, q = (log_probs(m, batch).expand(*batch.mask.shape, -1) for m in (old, new))
    total = [(p[i].exp() * (p[i] - q[i])).sum() for i in zip(*batch.loss_mask.nonzero(as_tuple=True), strict=True)]
    return float(torch.stack(total).mean())


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


@pytest.mark.long
@pytest.mark.parametrize("micro_batch", [0, 1, 5])
def test_products_are_those_of_the_hessian_of_the_kl(policy: Policy, micro_batch: int) -> None:
    """F·v against the second derivative of the mean KL, taken by finite differences of its gradient; and vᵀFv > 0."""
    learner, batch = prepared(policy, micro_batch=micro_batch)
    old = copy.deepcopy(policy)
    g = torch.Generator().manual_seed(0)
    v = [torch.randn(p.shape, generator=g, dtype=F64) for p in learner.trainable()]
    start = [p.detach().clone() for p in learner.trainable()]

    def slope(scale: float) -> Tensor:
        learner.set_trainable([p + scale * x for p, x in zip(start, v, strict=True)])
        p, q = (log_probs(m, batch).expand(*batch.mask.shape, -1) for m in (old, policy))
        kl = (p.detach().exp() * (p.detach() - q)).sum(-1)[batch.loss_mask].mean()
        gradient = flat(torch.autograd.grad(kl, learner.trainable(), materialize_grads=True))
        learner.set_trainable(start)
        return gradient

    expected = (slope(1e-5) - slope(-1e-5)) / 2e-5
    product = learner.fisher_product(batch)
    found = flat(product(v))
    close(found, expected, 1e-6)
    assert float(found @ flat(v)) > 0
    close(flat(product(v)), found)  # once more from the same graph


@pytest.mark.parametrize("micro_batch", [0, 1, 5])
def test_the_kl_and_the_objective_are_those_of_the_whole_batch(policy: Policy, micro_batch: int) -> None:
    learner, batch = prepared(policy, micro_batch=micro_batch)
    old, before = copy.deepcopy(policy), [p.detach().clone() for p in learner.trainable()]
    learner.set_trainable([p + 0.05 * torch.sin(1 + p) for p in before])
    assert float(learner.kl_from(batch, before)) == pytest.approx(mean_kl(old, policy, batch), rel=1e-10)
    assert mean_kl(old, policy, batch) > 1e-5
    close(learner.evaluate_objective(batch, TRPO.objective), learner.gradient(batch, TRPO.objective).objective)


def test_conjugate_gradients_solve() -> None:
    g = torch.Generator().manual_seed(0)
    M = torch.randn(6, 6, generator=g, dtype=F64)
    A, b = M @ M.T + 0.1 * torch.eye(6, dtype=F64), torch.randn(6, generator=g, dtype=F64)

    def product(v: list[Tensor]) -> list[Tensor]:
        return list((A @ torch.cat(v)).split(2))

    close(torch.cat(conjugate_gradients(product, list(b.split(2)), 6)), torch.linalg.solve(A, b), 1e-8)
    rough = torch.cat(conjugate_gradients(product, list(b.split(2)), 2))
    assert 0 < float((A @ rough - b).norm()) < float(b.norm()) * 2


@pytest.mark.long
@pytest.mark.unchecked
@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    delta=st.sampled_from([1e-4, 0.01, 0.1, 1.0]),
    damping=st.sampled_from([0.0, 0.01, 0.3]),
    kind=st.sampled_from(["per-position", "transformer", "ended"]),
    fisher_tokens=st.sampled_from([0, 10]),
    bonus=st.booleans(),
)
def test_the_realised_kl_never_exceeds_delta(
    seed: int, delta: float, damping: float, kind: str, fisher_tokens: int, bonus: bool
) -> None:
    """And an accepted step raises the objective; a refused one leaves every parameter where it was."""
    choice, space = (
        (PerPosition(4), FIXED) if kind == "per-position" else (TINY, FIXED if kind == "transformer" else ENDED)
    )
    policy = policy_of(choice, space, seed=seed)
    update = TrustRegion(delta, damping, iterations=3, fisher_tokens=fisher_tokens, backtracks=8)
    algorithm = replace(TRPO, update=update) if not bonus else replace(TRPO, update=update, exploration=Constant(0.1))
    learner, batch = prepared(policy, algorithm, seed=seed)
    old = copy.deepcopy(policy)
    stepped = learner.step(batch, algorithm.objective, update)
    said = {k.removeprefix("trust_region/"): float(v) for k, v in stepped.metrics.items()}
    kl = mean_kl(old, policy, batch)
    assert kl <= delta * (1 + 1e-9)
    assert kl == pytest.approx(said["kl"], rel=1e-6, abs=1e-14)
    gain = float(learner.evaluate_objective(batch, algorithm.objective)) + said["loss"]
    if said["accepted"]:
        assert gain > 0 and gain == pytest.approx(said["gain"])
    else:
        assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), old.parameters(), strict=True))


def test_a_small_step_has_the_kl_and_the_gain_that_were_expected() -> None:
    """Where the expansions hold, the first trial is right, its KL near Δ and its gain near gᵀs."""
    policy = policy_of(TINY, ENDED)
    update = TrustRegion(1e-6, 0.1, iterations=30, fisher_tokens=0, backtracks=2)
    learner, batch = prepared(policy)
    said = learner.step(batch, TRPO.objective, update).metrics
    assert said["trust_region/accepted"] == 1
    assert 0.85 < float(said["trust_region/kl"]) / 1e-6 <= 1
    assert float(said["trust_region/gain"]) == pytest.approx(float(said["trust_region/expected_gain"]), rel=0.05)


def test_it_goes_further_up_than_the_plain_gradient_within_the_same_region() -> None:
    """At equal KL the natural gradient gains more: that is what F is for."""
    policy = policy_of(PerPosition(4), FIXED)
    learner, batch = prepared(policy)
    start = [p.detach().clone() for p in learner.trainable()]
    said = learner.step(batch, TRPO.objective, TrustRegion(1e-3, 1e-3, iterations=30, fisher_tokens=0)).metrics
    learner.set_trainable(start)
    before = learner.gradient(batch, TRPO.objective).objective
    g = [-p.grad for p in learner.trainable()]
    low, high = 0.0, 10.0
    for _ in range(40):
        learner.set_trainable([p + (low + high) / 2 * x for p, x in zip(start, g, strict=True)])
        far = float(learner.kl_from(batch, start)) > float(said["trust_region/kl"])
        low, high = (low, (low + high) / 2) if far else ((low + high) / 2, high)
    assert float(learner.evaluate_objective(batch, TRPO.objective) - before) < float(said["trust_region/gain"])


# ---- refusals, and why ----------------------------------------------------------------------------------


class Stubborn(SmallLearner):
    """A learner that lies: about the KL, or about the objective."""

    kl: float | None = None
    objective: float | None = None

    def kl_from(self, mini: Batch, params: list[Tensor]) -> Tensor:
        return super().kl_from(mini, params) if self.kl is None else torch.tensor(self.kl, dtype=F64)

    def evaluate_objective(self, mini: Batch, objective: Any) -> Tensor:
        return (
            super().evaluate_objective(mini, objective)
            if self.objective is None
            else torch.tensor(self.objective, dtype=F64)
        )


@pytest.mark.parametrize(
    ("lie", "reason"),
    [({"kl": 0.02}, "too_far"), ({"kl": float("nan")}, "too_far"), ({"objective": -1e9, "kl": 0.001}, "no_gain")],
)
def test_a_refused_step_says_why_and_leaves_the_parameters(lie: dict[str, float], reason: str) -> None:
    policy = policy_of(TINY, ENDED)
    _, batch = prepared(policy)
    learner = Stubborn(policy, TRPO.update, False, frozenset())
    vars(learner).update(lie)
    before = [p.detach().clone() for p in policy.parameters()]
    stepped = learner.step(batch, TRPO.objective, TrustRegion(backtracks=4))
    said = {k: float(v) for k, v in stepped.metrics.items()}
    assert said["trust_region/accepted"] == 0 and said["trust_region/kl"] == 0
    assert {r: said[f"trust_region/{r}"] for r in ("too_far", "no_gain")} == {"too_far": 0, "no_gain": 0} | {reason: 5}
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), before, strict=True))
    assert stepped.logp.shape == batch.mask.shape
    ((name, text),) = metric_warnings(said, configure("sort").task)
    assert (name == "trust-region-refused" and "5 trials exceeded the KL bound" in text) or "5 within it" in text


def test_without_signal_no_step_is_taken_and_none_was_refused() -> None:
    policy = policy_of(TINY, ENDED)
    learner, batch = prepared(policy)
    before = [p.detach().clone() for p in policy.parameters()]
    stepped = learner.step(batch.add(advantage=torch.zeros_like(batch.advantage)), TRPO.objective, TRPO.update)
    said = {k: float(v) for k, v in stepped.metrics.items()}
    assert [v for k, v in said.items() if k != "loss"] == [0.0] * 8
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), before, strict=True))
    assert metric_warnings(said, configure("sort").task) == []


def test_it_works_with_a_critic_that_is_its_own() -> None:
    """GAE in place of leave-one-out: two choices, and the critic takes steps of its own."""
    algorithm = replace(TRPO, advantage=GAE(), critic=OwnCritic())
    policy = policy_of(TINY, ENDED)
    learner, batch = prepared(policy, algorithm)
    stepped = learner.step(batch, algorithm.objective, algorithm.update)
    assert stepped.metrics["trust_region/accepted"] == 1
    moved = [p.detach().clone() for p in policy.parameters()]
    assert algorithm.critic(learner, batch)["value/loss"] > 0
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), moved, strict=True))


# ---- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"epochs": 2}, {"minibatches": 2}])
def test_it_takes_the_whole_batch_once(more: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"--update trust-region with --epochs.*set both to 1"):
        configure("sort", {"algorithm": "trpo", **more})


@pytest.mark.parametrize(
    "wrong", [{"delta": 0.0}, {"damping": -1.0}, {"iterations": 0}, {"shrink": 1.0}, {"backtracks": -1}]
)
def test_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="delta > 0"):
        TrustRegion(**wrong)


def test_a_row_brings_its_update_and_another_row_the_last_optimizer() -> None:
    """What the task says of Adam outlives a row with another update; --lr has no place in that one."""
    adam = configure("sort").algorithm.update
    assert isinstance(adam, Adam) and adam.lr == 2e-3
    trpo = configure("sort", {"algorithm": "trpo", "update.delta": 0.02})
    assert trpo.algorithm.update == TrustRegion(0.02)
    assert configure("sort", {"algorithm": "trpo"}, {"algorithm": "grpo"}).algorithm.update == adam
    assert configure("sort", {"lr": 0.1}, {"algorithm": "trpo"}, {"algorithm": "ppo"}).algorithm.update.lr == 0.1
    with pytest.raises(ConfigError, match="trust-region has no such field"):
        configure("sort", {"algorithm": "trpo", "lr": 0.1})
    assert row_label(Algorithm(Raw(), Ratio(), TokenMean(), update=TrustRegion())) == "trpo+raw"
    assert row_label(replace(TRPO, update=Adam())).endswith("+adam")

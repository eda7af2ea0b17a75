"""KL to a reference: the estimators as values, the penalty in the reward, and the coefficient that adapts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import F64, batch_of, close, f64
from hypothesis import given
from hypothesis import strategies as st

from ascent.core.algorithms import Algorithm
from ascent.core.errors import ConfigError
from ascent.core.kl import ESTIMATORS, InLoss, InReward, NoKL, adapt, estimate_kl, k1, k2, k3
from ascent.core.reference import Frozen
from ascent.core.types import Outputs
from ascent.core.weights import WEIGHTS, SequenceMean

LOG2 = math.log(2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("log_ratio", "one", "two", "three"),
    [
        # π is twice π_ref: ℓ = log 2, e^−ℓ = ½.
        (LOG2, LOG2, LOG2**2 / 2, 0.5 + LOG2 - 1),
        # π is half of π_ref: ℓ = −log 2, e^−ℓ = 2. k1 is negative, the others are not.
        (-LOG2, -LOG2, LOG2**2 / 2, 2 - LOG2 - 1),
        (0.0, 0.0, 0.0, 0.0),
    ],
)
def test_goldens(log_ratio: float, one: float, two: float, three: float) -> None:
    gap = f64(log_ratio)
    close(k1(gap), one)
    close(k2(gap), two)
    close(k3(gap), three)


def test_estimate_takes_policy_minus_reference() -> None:
    """More likely under the policy than under the reference: ℓ > 0, and k1 says so."""
    logp, logp_ref = f64([[[-1.0]]]), f64([[[-3.0]]])
    close(estimate_kl("k1", logp, logp_ref, None), [[[2.0]]])
    close(estimate_kl("abs", logp_ref, logp, None), [[[2.0]]])
    close(estimate_kl("k2", logp, logp_ref, None), [[[2.0]]])
    close(estimate_kl("k3", logp, logp_ref, None), [[[math.exp(-2) + 1]]])
    close(estimate_kl("exact", logp, logp_ref, f64([[[0.25]]])), [[[0.25]]])


@given(st.floats(-30, 30))
def test_k2_and_k3_are_never_negative(log_ratio: float) -> None:
    assert k3(f64(log_ratio)).item() >= 0
    assert k2(f64(log_ratio)).item() >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_is_exact_near_zero(dtype: torch.dtype) -> None:
    """Early in a run ℓ is tiny and k3 ≈ ½ℓ² − ℓ³/6; e^−ℓ − 1 loses it to rounding in float32, sign and all."""
    for size in (1e-2, 1e-3, 1e-4, 1e-5, -1e-5, -1e-4, -1e-3):
        gap = torch.tensor(size, dtype=dtype)
        value = k3(gap).item()
        assert value >= 0, size
        assert value == pytest.approx(size**2 / 2 - size**3 / 6, rel=0.02, abs=1e-9), size


@given(st.lists(st.floats(-3, 3), min_size=4, max_size=4), st.lists(st.floats(-3, 3), min_size=4, max_size=4))
def test_k1_and_k3_are_unbiased_and_k2_is_not(one: list[float], two: list[float]) -> None:
    """E over the vocabulary, enumerated: E[k1] = E[k3] = KL(π ‖ π_ref); the other way round they are not."""
    logp, logp_ref = torch.log_softmax(f64(one), -1), torch.log_softmax(f64(two), -1)
    p, q = logp.exp(), logp_ref.exp()
    kl = sum(pi * math.log(pi / qi) for pi, qi in zip(p.tolist(), q.tolist(), strict=True))
    close((p * k1(logp - logp_ref)).sum(), kl, 1e-10)
    close((p * k3(logp - logp_ref)).sum(), kl, 1e-10)


def test_k2_is_biased() -> None:
    """π = (¾, ¼), π_ref = (½, ½): KL = ¾ log 3/2 + ¼ log ½ = 0.13081; E[k2] = ½(¾ log² 3/2 + ¼ log² ½) = 0.12171."""
    p = f64([0.75, 0.25])
    gap = p.log() - math.log(0.5)
    close((p * k1(gap)).sum(), 0.75 * math.log(1.5) - 0.25 * LOG2)
    close((p * k2(gap)).sum(), 0.5 * (0.75 * math.log(1.5) ** 2 + 0.25 * LOG2**2))
    assert abs(float((p * k2(gap)).sum()) - float((p * k1(gap)).sum())) > 0.009


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator_is_zero_where_the_policies_agree(name: Any) -> None:
    logp = f64([[[-1.3, -0.2]]])
    close(estimate_kl(name, logp, logp, None), [[[0.0, 0.0]]])


# ---- in the reward --------------------------------------------------------------------------------

# Two responses of 3 and 2 tokens; the KL at the masked token is garbage.
KLS_ = f64([[[0.1, 0.2, 0.3], [1.0, 2.0, 99.0]]])
ENDS = [[3, 2]]


def test_per_response_sums_over_unmasked_tokens() -> None:
    """10 − 2·(0.1+0.2+0.3) = 8.8;  5 − 2·(1+2) = −1."""
    shaped = InReward("k1", 2.0, "response").shaped(batch_of([[10, 5]], ENDS), KLS_, 2.0)
    close(shaped, [[[8.8], [-1.0]]])


def test_per_token_lays_the_outcome_on_the_last_unmasked_token() -> None:
    shaped = InReward("k1", 2.0, "token").shaped(batch_of([[10, 5]], ENDS), KLS_, 2.0)
    close(shaped, [[[-0.2, -0.4, 10 - 0.6], [-2.0, 5 - 4.0, 0.0]]])


def test_per_token_and_per_response_have_the_same_total() -> None:
    batch = batch_of([[10, 5]], ENDS)
    shaped = [InReward("k1", 2.0, per).shaped(batch, KLS_, 2.0).sum(-1) for per in ("response", "token")]
    close(shaped[0], shaped[1])


def test_with_rewards_per_token_the_sum_goes_to_the_last_token() -> None:
    batch = batch_of([[[1, 1, 1], [2, 2, 0]]], ENDS)
    close(InReward("k1", 2.0, "response").shaped(batch, KLS_, 2.0), [[[1, 1, 1 - 1.2], [2, 2 - 6.0, 0]]])
    close(InReward("k1", 2.0, "token").shaped(batch, KLS_, 2.0), [[[0.8, 0.6, 0.4], [0, -2.0, 0]]])


def test_masks_may_have_holes() -> None:
    """A tool's tokens in the middle of a response are no actions: neither KL nor the outcome lands on them."""
    batch = batch_of([[10]], [[4]]).add(mask=torch.tensor([[[True, False, True, False]]]))
    kl = f64([[[0.1, 50.0, 0.3, 50.0]]])
    close(InReward("k1", 1.0, "token").shaped(batch, kl, 1.0), [[[-0.1, 0, 10 - 0.3, 0]]])
    close(InReward("k1", 1.0, "response").shaped(batch, kl, 1.0), [[[9.6]]])


def test_a_wholly_masked_response_has_no_penalty() -> None:
    shaped = InReward("k1", 1.0, "response").shaped(batch_of([[10, 5]], [[3, 0]]), KLS_, 1.0)
    close(shaped, [[[9.4], [5.0]]])


@pytest.mark.parametrize("per", ["response", "token"])
def test_credit_is_given_for_the_shaped_reward_and_records_keep_the_tasks(per: Any) -> None:
    """logp_old − logp_ref = 0.5 at each token, β = 0.1: totals 10 − 0.15 and 5 − 0.1."""
    algorithm = Algorithm(kl=InReward("k1", 0.1, per), reference=Frozen())
    old = torch.full((1, 2, 3), -1.0, dtype=F64)
    batch = batch_of([[10, 5]], ENDS, logp_old=old, logp_ref=old - 0.5)
    credited, _ = algorithm.compute_advantages(batch, algorithm.initial_state())
    assert credited.advantage is not None
    close(credited.advantage[..., :1], [[[9.85], [4.9]]])
    close(credited.reward, [[[10.0], [5.0]]])


def test_the_penalty_in_the_reward_is_a_constant() -> None:
    """It comes from logp_old; the current policy's KL is no part of the loss."""
    algorithm = Algorithm(kl=InReward("k1", 0.1), reference=Frozen())
    old = torch.full((1, 2, 3), -1.0, dtype=F64)
    batch = batch_of([[10, 5]], ENDS, logp_old=old, logp_ref=old - 0.5)
    batch, state = algorithm.compute_advantages(batch, algorithm.initial_state())
    batch = batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0))
    x = (old - 0.25).requires_grad_()
    terms = algorithm.objective(batch, Outputs(x, torch.zeros_like(x)))
    assert batch.advantage is not None and batch.weight is not None
    close(terms.objective.detach(), (batch.weight * batch.advantage * x).sum().detach())
    close(terms.sums["kl"], 5 * 0.25)  # measured all the same: ℓ = −1.25 + 1.5 at five tokens


# ---- in the loss ----------------------------------------------------------------------------------


def test_importance_golden() -> None:
    """ρ = 2 and ℓ = log 2 at the one token that counts: β·ρ·k3 = 0.3·2·(½ + log 2 − 1).

    ∂/∂logp of ρ·k3 is ρ·k3 + ρ·(1 − e^−ℓ) = ρ·ℓ = 2 log 2: k2's gradient times ρ.
    """
    algorithm = Algorithm(kl=InLoss("k3", 0.3, importance=True), reference=Frozen())
    ref = torch.full((1, 1, 2), -1.0, dtype=F64)
    batch = batch_of([[0]], [[1]], width=2, logp_ref=ref, logp_old=ref.clone(), kl_coef=0.3)
    batch = batch.add(advantage=torch.zeros(1, 1, 1, dtype=F64), weight=SequenceMean()(batch))
    x = (ref + LOG2).requires_grad_()
    terms = algorithm.objective(batch, Outputs(x, torch.zeros_like(x)))
    close(terms.objective.detach(), -0.3 * 2 * (0.5 + LOG2 - 1))
    close(terms.sums["kl"], 2 * (0.5 + LOG2 - 1))
    (gradient,) = torch.autograd.grad(terms.objective, x)
    close(gradient, [[[-0.3 * 2 * LOG2, 0]]])


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "exact"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_in_the_loss_the_penalty_has_the_surrogates_weights(name: Any, weights: type) -> None:
    algorithm = Algorithm(kl=InLoss(name, 0.3), reference=Frozen(), weights=weights())
    gap = f64([[[0.2, -0.4, 7.0], [0.5, 0.1, 0.6]]])
    ref = torch.full((1, 2, 3), -1.0, dtype=F64)
    batch = batch_of([[0, 0]], [[2, 3]], limit=5, logp_ref=ref, advantage=torch.zeros(1, 2, 1, dtype=F64), kl_coef=0.3)
    batch = batch.add(weight=weights()(batch))
    full = gap**2
    terms = algorithm.objective(batch, Outputs(ref + gap, torch.zeros_like(gap), full))
    value = full if name == "exact" else ESTIMATORS[name](gap)
    assert batch.weight is not None
    close(terms.objective, -0.3 * (batch.weight * value).sum())
    close(terms.sums["kl"], value[batch.mask].sum())


def test_a_reference_without_a_penalty_is_only_measured() -> None:
    algorithm = Algorithm(kl=NoKL(), reference=Frozen())
    ref = torch.full((1, 2, 2), -1.0, dtype=F64)
    batch = batch_of([[0, 0]], [[2, 2]], logp_ref=ref, advantage=torch.zeros(1, 2, 1, dtype=F64))
    batch = batch.add(weight=SequenceMean()(batch))
    terms = algorithm.objective(batch, Outputs(ref + LOG2, torch.zeros_like(ref)))
    assert terms.objective.item() == 0
    close(terms.sums["kl"], 4 * (0.5 + LOG2 - 1))


# ---- the coefficient ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.5),  # on target: stays
        (0.11, 0.5 * 1.01),  # 10 % above: β·(1 + 0.1·0.1)
        (0.09, 0.5 * 0.99),
        (5.0, 0.5 * 1.02),  # far above: the error is cut at 0.2
        (0.0, 0.5 * 0.98),
        (-3.0, 0.5 * 0.98),  # k1 may be negative
    ],
)
def test_the_adaptive_coefficient(kl: float, expected: float) -> None:
    assert adapt(0.5, kl, 0.1) == pytest.approx(expected, rel=1e-12)


def test_the_coefficient_is_remembered_and_moves_only_with_a_target() -> None:
    fixed = Algorithm(kl=InLoss("k3", 0.5), reference=Frozen())
    moving = Algorithm(kl=InLoss("k3", 0.5, target=0.1), reference=Frozen())
    assert fixed.initial_state() == moving.initial_state() == {"kl_coef": 0.5}
    assert fixed.update_state({"kl_coef": 0.5}, {"kl": 9.0}) == {"kl_coef": 0.5}
    assert moving.update_state({"kl_coef": 0.5}, {"kl": 9.0}) == {"kl_coef": pytest.approx(0.51)}
    assert moving.scalars({"kl_coef": 0.51}, 0.0)["kl_coef"] == 0.51
    assert Algorithm(kl=NoKL()).initial_state() == {}


@pytest.mark.parametrize("cls", [InLoss, InReward])
def test_refusals(cls: Any) -> None:
    with pytest.raises(ConfigError, match=r"--kl\.coef is -0\.1"):
        cls(coef=-0.1)
    with pytest.raises(ConfigError, match=r"--kl\.coef is nan"):
        cls(coef=math.nan)
    with pytest.raises(ConfigError, match=r"--kl\.target 0: .*above 0"):
        cls(target=0.0)

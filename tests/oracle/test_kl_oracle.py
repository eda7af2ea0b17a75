"""SPEC's statements on the KL, both ways: what is exact, and what is not and by how much.

On the policy's own samples, by enumeration in float64, with a reference some way off (KL ≈ 0.03). The
reward is 0, so that the penalty is all that pushes: with β = 1 the expected gradient of the
library's own objective is minus that of the penalty. ∇KL(π ‖ π_ref) and ∇KL(π_ref ‖ π) come from
differentiating the sums over all responses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pin_estimators import INDEPENDENT, RAGGED, Tiny, moved, nothing, policy_of, prompt_of
from torch import Tensor

from ascent.core import kl
from ascent.core.advantages import Centered, LeaveOneOut, Raw
from ascent.core.algorithms import Algorithm
from ascent.core.kl import InLoss, InReward
from ascent.core.losses import Ratio, SequenceRatio
from ascent.core.reference import Frozen
from ascent.core.types import Space
from ascent.core.weights import FixedLength, SequenceMean, SequenceSum
from ascent.oracle.estimator import estimate
from ascent.oracle.exact import ResponseTable
from ascent.training.small_learner import action_logprobs, log_probs

ONE_TOKEN = Space(prompt_length=1, vocab=5, limit=1)
SPACES = {"one token": ONE_TOKEN, "independent": INDEPENDENT, "ragged": RAGGED}


class Against:
    """A policy and its reference, every response, and the two gradients that a penalty could have."""

    def __init__(self, space: Space, temperature: float = 1.0):
        policy = policy_of(space)
        reference = moved(policy, 0.0, 0.2)
        self.table = ResponseTable(policy, prompt_of(space), Tiny(space, nothing), temperature, reference=reference)
        with torch.no_grad():
            self.logp_ref = action_logprobs(log_probs(reference, self.table.batch), self.table.batch)[0].sum(-1)
        log_ratio = self.log_ratio()
        value = (log_ratio + self.logp_ref).exp() @ log_ratio
        self.kl, self.forward = float(value.detach()), self.table.differentiate(value)
        self.reverse = self.table.differentiate(self.logp_ref.exp() @ -self.log_ratio())

    def log_ratio(self) -> Tensor:
        """ℓ of every whole response, with a gradient."""
        return self.table.outputs().logp[0].sum(-1) - self.logp_ref

    def pushes(self, penalty: Any, credit: Any = None, samples: int = 1, weights: Any = None) -> Tensor:
        """What the penalty's gradient is in expectation, through credit, weights and objective."""
        algorithm = Algorithm(credit or Raw(), weights=weights or SequenceSum(), kl=penalty, reference=Frozen())
        return -estimate(self.table, algorithm, samples).mean


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


@pytest.fixture(params=SPACES)
def against(request: pytest.FixtureRequest) -> Against:
    return Against(SPACES[request.param])


@pytest.fixture
def ragged() -> Against:
    return Against(RAGGED)


def test_the_reference_differs(against: Against) -> None:
    assert 1e-3 < against.kl < 0.2
    assert error(against.forward, against.reverse) > 1e-2


# ---- in the loss -----------------------------------------------------------------------------------


def test_of_whole_responses_each_estimator_has_one_exact_gradient(against: Against) -> None:
    """E[∇k1] = 0, E[∇k2] = ∇KL(π ‖ π_ref), E[∇k3] = ∇KL(π_ref ‖ π), with ℓ of the whole response."""

    def through(estimator: str) -> Tensor:
        return against.table.differentiate(against.table.probability @ kl.ESTIMATORS[estimator](against.log_ratio()))

    assert through("k1").norm() < 1e-10
    torch.testing.assert_close(through("k2"), against.forward, rtol=0, atol=1e-10)
    torch.testing.assert_close(through("k3"), against.reverse, rtol=0, atol=1e-10)


@pytest.mark.parametrize("space", [ONE_TOKEN, INDEPENDENT], ids=["one token", "independent"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_per_token_is_exact_where_no_token_changes_later_states(space: Space, temperature: float) -> None:
    against = Against(space, temperature)
    assert against.pushes(InLoss("k1", 1.0)).norm() < 1e-10
    torch.testing.assert_close(against.pushes(InLoss("k2", 1.0)), against.forward, rtol=0, atol=1e-10)
    torch.testing.assert_close(against.pushes(InLoss("exact", 1.0)), against.forward, rtol=0, atol=1e-10)
    torch.testing.assert_close(against.pushes(InLoss("k3", 1.0)), against.reverse, rtol=0, atol=1e-10)


def test_per_token_on_an_autoregressive_policy_k1_still_pushes_nowhere(ragged: Against) -> None:
    assert ragged.pushes(InLoss("k1", 1.0)).norm() < 1e-10


@pytest.mark.parametrize(
    ("estimator", "target", "off", "along"),
    [
        ("k2", "forward", 0.0598167689, 0.9992222762),
        ("exact", "forward", 0.0598167689, 0.9992222762),
        ("k3", "reverse", 0.0683106988, 0.9999814191),
    ],
)
def test_per_token_on_an_autoregressive_policy_is_off(
    ragged: Against, estimator: Any, target: str, off: float, along: float
) -> None:
    """They hold the visited states fixed, and miss what a token does to the KL of later ones."""
    found, expected = ragged.pushes(InLoss(estimator, 1.0)), getattr(ragged, target)
    assert error(found, expected) == pytest.approx(off, rel=1e-6)
    assert cosine(found, expected) == pytest.approx(along, rel=1e-6)


def test_k2_and_exact_agree_per_token(ragged: Against) -> None:
    """At a fixed state E[∇k2] = E[ℓ ∇logp] = ∇ of the exact KL there."""
    torch.testing.assert_close(
        ragged.pushes(InLoss("k2", 1.0)), ragged.pushes(InLoss("exact", 1.0)), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("space", [ONE_TOKEN, INDEPENDENT], ids=["one token", "independent"])
def test_abs_has_the_gradient_of_the_total_variation(space: Space) -> None:
    """E[∇|ℓ|] = Σ_v sign(π − π_ref) ∇π = ∇Σ_v |π − π_ref|, position by position."""
    against = Against(space)
    reference = against.table.reference
    assert reference is not None
    with torch.no_grad():
        q = log_probs(reference, against.table.batch).exp()
    p = log_probs(against.table.policy, against.table.batch).exp()
    variation = (p - q).abs()[0, 0].sum()  # the same states for every response
    torch.testing.assert_close(
        against.pushes(InLoss("abs", 1.0)), against.table.differentiate(variation), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_importance_gives_k1_and_k3_the_gradient_of_k2(against: Against, estimator: Any) -> None:
    """On fresh samples ∇(ρ·k1) = (ℓ + 1)·∇logp and ∇(ρ·k3) = ℓ·∇logp; k2 and the exact KL stay as they are."""
    found = against.pushes(InLoss(estimator, 1.0, importance=True))
    torch.testing.assert_close(found, against.pushes(InLoss("k2", 1.0)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("loss", [Ratio("per-decision"), SequenceRatio("product", None, None)], ids=repr)
@pytest.mark.parametrize("estimator", ["k1", "k3", "exact"])
def test_with_the_ratio_of_all_that_led_there_importance_is_exact(loss: Any, estimator: Any) -> None:
    """Samples of an older policy, autoregressive: E[Σ_t ρ_{1:t}·KL_t] is KL(π ‖ π_ref), and so is its gradient."""
    policy = policy_of(RAGGED)
    reference = moved(policy, 0.0, 0.2)
    table = ResponseTable(
        policy, prompt_of(RAGGED), Tiny(RAGGED, nothing), old=moved(policy, 1.0, 0.25), reference=reference
    )
    exact = Against(RAGGED).forward
    for importance in (True, False):
        kl_ = InLoss(estimator, 1.0, importance=importance)
        found = -estimate(table, Algorithm(Raw(), loss, kl=kl_, reference=Frozen()), 1).mean
        assert (error(found, exact) < 1e-10) is importance


def test_with_token_ratios_importance_is_off_by_the_states(ragged: Against) -> None:
    found = ragged.pushes(InLoss("k3", 1.0, importance=True))
    assert error(found, ragged.forward) == pytest.approx(0.0598167689, rel=1e-6)  # as k2


def test_the_loss_has_the_surrogates_own_weights(ragged: Against) -> None:
    """Fixed length divides the penalty by L_max as it does the surrogate; sequence mean turns it."""
    whole = ragged.pushes(InLoss("k2", 1.0))
    fixed = ragged.pushes(InLoss("k2", 1.0), weights=FixedLength())
    torch.testing.assert_close(fixed, whole / RAGGED.limit, rtol=0, atol=1e-12)
    assert cosine(ragged.pushes(InLoss("k2", 1.0), weights=SequenceMean()), whole) < 1 - 1e-4


# ---- in the reward ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("per", ["response", "token"])
def test_in_the_reward_k1_is_exact_at_any_length(against: Against, per: Any) -> None:
    """−β∇KL(π ‖ π_ref), for raw and leave-one-out credit; (G−1)/G of it for centered."""
    for coef in (1.0, 0.05):
        expected = coef * against.forward
        found = against.pushes(InReward("k1", coef, per))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        found = against.pushes(InReward("k1", coef, per), LeaveOneOut(), 2)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        found = against.pushes(InReward("k1", coef, per), Centered(), 2)
        torch.testing.assert_close(found, 0.5 * expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("per", ["response", "token"])
@pytest.mark.parametrize(
    ("estimator", "along"),
    [("abs", -0.9416897694), ("k2", -0.9401994996), ("k3", -0.9527370498), ("exact", -0.7253853199)],
)
def test_in_the_reward_the_others_are_not_the_kls_gradient(
    ragged: Against, estimator: Any, along: float, per: Any
) -> None:
    """A negative cosine: on this policy the penalty raises the KL that it is meant to hold down."""
    found = ragged.pushes(InReward(estimator, 1.0, per))
    assert cosine(found, ragged.forward) == pytest.approx(along, rel=1e-6)
    assert along < 0
    assert error(found, ragged.forward) > 1


def test_in_the_reward_exact_pushes_nowhere_on_independent_positions() -> None:
    """The KL of a state is a constant there, whatever was drawn: a baseline, and no penalty at all."""
    against = Against(INDEPENDENT)
    for per in ("response", "token"):
        assert against.pushes(InReward("exact", 1.0, per)).norm() < 1e-10  # type: ignore[arg-type]

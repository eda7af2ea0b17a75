"""Every estimator on the menu against the exact gradient, by enumeration in float64."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pin_estimators import (
    ELSEWHERE,
    INDEPENDENT,
    PINS,
    RAGGED,
    SAMPLES,
    SPACES,
    STATE,
    WORLDS,
    Tiny,
    a_point_each,
    credits,
    exactly,
    losses,
    measure,
    measure_corrected,
    moved,
    nothing,
    policy_of,
    positions,
    prompt_of,
    sampled_elsewhere,
    space_name,
    table,
)
from torch import Tensor

from ascent.core.advantages import (
    BatchNormalized,
    Centered,
    Greedy,
    LeaveOneOut,
    Normalized,
    OptimalBaseline,
    Raw,
    RunningMean,
)
from ascent.core.algorithms import Algorithm
from ascent.core.correction import Truncated
from ascent.core.critics import NoCritic, OwnCritic
from ascent.core.errors import ConfigError
from ascent.core.exploration import Constant
from ascent.core.groups import All
from ascent.core.losses import LogProb, Ratio, SequenceRatio
from ascent.core.types import Space
from ascent.core.values import Valued
from ascent.core.weights import WEIGHTS, FixedLength, SequenceMean, SequenceSum, TokenMean, Weights
from ascent.explain.about import fill_in
from ascent.explain.explain import about_of
from ascent.oracle.estimator import Estimate, average_over_prompts, enumerate_groups, estimate
from ascent.oracle.exact import ResponseTable, probability
from tests.cases import mostly_smokes

PRODUCT = SequenceRatio("product", None, None)
UNBIASED = [Raw(), LeaveOneOut(), RunningMean(), Greedy(), OptimalBaseline("length")]


def exact_to(e: Estimate, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(e.mean, expected, rtol=0, atol=tolerance)


# ---- what is unbiased -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("space", SPACES, ids=space_name)
@pytest.mark.parametrize("credit", UNBIASED, ids=repr)
def test_unbiased_with_sequence_sum(space: Space, credit: object) -> None:
    found = table(space)
    for samples in range(2, 9):
        exact_to(estimate(found, Algorithm(credit), samples, STATE), found.gradient)


@pytest.mark.long
@pytest.mark.parametrize(("space", "most"), [(INDEPENDENT, 5), (RAGGED, 4)], ids=space_name)
def test_optimal_baseline_with_exact_norms_is_unbiased(space: Space, most: int) -> None:
    """Every response is a class of its own here, so groups are fewer."""
    found = table(space)
    for samples in range(2, most + 1):
        exact_to(estimate(found, Algorithm(OptimalBaseline("exact")), samples), found.gradient)


@pytest.mark.long
@pytest.mark.parametrize("space", SPACES, ids=space_name)
@pytest.mark.parametrize("reward", [positions, a_point_each, exactly])
def test_centered_is_shorter_by_its_own_share(space: Space, reward: object) -> None:
    """(G−1)/G of the gradient; with rewards per token too, on responses of different lengths."""
    found = table(space, reward)
    assert found.batch.reward.shape[-1] == (space.limit if reward is a_point_each else 1)
    for samples in (2, 3, 4) if reward is a_point_each else range(2, 9):
        exact_to(estimate(found, Algorithm(Centered()), samples), (samples - 1) / samples * found.gradient)


@pytest.mark.long
@pytest.mark.parametrize("space", SPACES, ids=space_name)
@pytest.mark.parametrize("credit", [*UNBIASED, OptimalBaseline("exact")], ids=repr)
def test_unbiased_with_rewards_per_token(space: Space, credit: object) -> None:
    found = table(space, a_point_each)
    for samples in (2, 3):
        exact_to(estimate(found, Algorithm(credit), samples, STATE), found.gradient)


@pytest.mark.long
@pytest.mark.parametrize("space", SPACES, ids=space_name)
@pytest.mark.parametrize("reward", [positions, a_point_each])
def test_per_decision_ratios_are_unbiased_and_vary_less_with_rewards_per_token(space: Space, reward: object) -> None:
    """Samples of an older policy. An outcome lies on the last token, where ρ_t is the product over the response."""
    policy, task = policy_of(space), Tiny(space, reward)
    found = ResponseTable(policy, prompt_of(space), task, old=moved(policy, 1.0, 0.25))
    for credit in (Raw(), LeaveOneOut()):
        each, whole = (estimate(found, Algorithm(credit, loss), 2) for loss in (Ratio("per-decision"), PRODUCT))
        exact_to(each, found.gradient)
        exact_to(whole, found.gradient)  # with rewards per token in the form of GSPO-token
        assert (each.variance < 0.999 * whole.variance) is (reward is a_point_each)
        if reward is positions:
            assert each.variance == pytest.approx(whole.variance, rel=1e-9)


def test_normalized_weights_are_less_biased_in_larger_batches() -> None:
    found = sampled_elsewhere()
    choice = Truncated("sequence", 1e9, normalized=True)
    biases = [estimate(found, Algorithm(LeaveOneOut(), correction=choice), n).bias(found.gradient) for n in (2, 3, 4)]
    assert biases[0] > biases[1] > biases[2] > 1e-3
    with pytest.raises(ConfigError, match="statistics across groups"):
        average_over_prompts([estimate(found, Algorithm(Raw(), correction=choice), 2)] * 2)


def test_masking_is_no_bias_where_nothing_is_truncated() -> None:
    found = table(INDEPENDENT)
    exact_to(estimate(found, Algorithm(LeaveOneOut(), groups=All(mask_truncated=True)), 2), found.gradient)


def test_corrections_and_masks_are_pinned() -> None:
    pinned, measured = json.loads(PINS.read_text())[ELSEWHERE], measure_corrected()
    assert pinned.keys() == measured.keys()
    for name, row in measured.items():
        assert row == pytest.approx(pinned[name], rel=1e-9, abs=1e-9), name


@pytest.mark.long
@pytest.mark.parametrize("space", SPACES, ids=space_name)
@pytest.mark.parametrize("credit", UNBIASED, ids=repr)
def test_product_ratio_is_unbiased_on_samples_of_another_policy(space: Space, credit: object) -> None:
    """The exact importance weight. A baseline has to be fixed or from other samples for that: δ is ρ's own factor."""
    found = table(space, stale=True)
    for samples in (2, 4, 8):
        exact_to(estimate(found, Algorithm(credit, PRODUCT), samples, STATE), found.gradient)
    for loss in (LogProb(), SequenceRatio("mean", None, None)):
        assert estimate(found, Algorithm(credit, loss), 2, STATE).bias(found.gradient) > 1e-3


def test_token_ratios_are_exact_only_where_positions_are_independent() -> None:
    """Given a reward that is a sum over positions; else the ratios of earlier tokens are missing."""
    for space, unbiased in ((INDEPENDENT, True), (RAGGED, False)):
        found = table(space, stale=True)
        assert (estimate(found, Algorithm(Raw(), Ratio()), 2).bias(found.gradient) < 1e-10) is unbiased


@pytest.mark.parametrize("space", SPACES, ids=space_name)
def test_temperature_is_on_both_sides(space: Space) -> None:
    policy, task = policy_of(space), Tiny(space, positions)
    found = ResponseTable(policy, prompt_of(space), task, temperature=0.6)
    assert not torch.allclose(found.gradient, ResponseTable(policy, prompt_of(space), task).gradient, atol=1e-2)
    exact_to(estimate(found, Algorithm(LeaveOneOut()), 3), found.gradient)


@pytest.mark.long
@pytest.mark.parametrize("space", SPACES, ids=space_name)
def test_correction_makes_up_for_another_sampler(space: Space) -> None:
    """Drawn by one policy, trained as another: the whole response's weight, never truncated, is exact."""
    policy, task = policy_of(space), Tiny(space, positions)
    found = ResponseTable(policy, prompt_of(space), task, old=policy, behavior_policy=moved(policy, 1.0, 0.2))
    for credit in (Raw(), LeaveOneOut()):
        exact_to(estimate(found, Algorithm(credit, correction=Truncated("sequence", 1e9)), 3), found.gradient)
        assert estimate(found, Algorithm(credit), 3).bias(found.gradient) > 1e-2
        capped = estimate(found, Algorithm(credit, correction=Truncated("sequence", 1.0)), 3)
        assert capped.bias(found.gradient) > 1e-3


# ---- what is not: the pinned table --------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("world", WORLDS)
def test_every_estimator_is_pinned(world: str) -> None:
    """Scale, cosine and variance of every credit × surrogate × weights on the menus, to the digits pinned."""
    gone = json.loads(PINS.read_text())[world].keys() - compared(world).keys()
    assert not gone, f"no longer on the menus: {sorted(gone)}. If so meant: python tests/pin_estimators.py --anew"


@pytest.mark.long
@pytest.mark.unchecked
@pytest.mark.parametrize("world", mostly_smokes(WORLDS, "independent, stale"))
def test_every_pair_of_choices_is_pinned(world: str) -> None:
    """Of credit, surrogate and weights: a quarter of the table, in which each two of them meet."""
    assert len(compared(world, every=False)) >= len(credits()) * len(WEIGHTS)


def compared(world: str, every: bool = True) -> dict[str, list[float]]:
    """What was measured, which is what was pinned."""
    pinned, measured = json.loads(PINS.read_text())[world], measure(world, every)
    for name, row in measured.items():
        assert name not in pinned or row == pytest.approx(pinned[name], rel=1e-9, abs=1e-9), name
    new = [name for name in measured if name not in pinned]
    if new:
        pytest.skip(f"{len(new)} rows are not pinned yet, {new[0]} first: python tests/pin_estimators.py adds them")
    return measured


@pytest.mark.long
@pytest.mark.unchecked
@pytest.mark.parametrize("choice", [*credits(), *(cls() for cls in WEIGHTS)], ids=repr)
def test_what_is_said_of_a_gradient_holds(choice: Any) -> None:
    """About.gradient of every credit and of all weights, on responses of different lengths, with the exact V."""
    weights = isinstance(choice, Weights)
    critic = OwnCritic() if isinstance(choice, Valued) else NoCritic()
    algorithm = Algorithm(weights=choice) if weights else Algorithm(choice, critic=critic)
    enumerated, known = table(RAGGED), about_of(type(choice))
    assert known is not None, f"there is no About of {type(choice).__name__} in ascent/explain"
    e = estimate(enumerated, algorithm, SAMPLES, algorithm.initial_state() | STATE)
    along, same = e.cosine(enumerated.gradient) > 1 - 1e-10, e.bias(enumerated.gradient) < 1e-10
    assert {"exact": (True, True), "critic": (True, True), "scaled": (True, False), "other": (False, False)}[
        str(fill_in(known, choice).gradient)
    ] == (along, same)


@pytest.mark.long
@pytest.mark.unchecked
@pytest.mark.parametrize("weights", [w() for w in WEIGHTS], ids=repr)
def test_on_fresh_samples_all_surrogates_are_one(weights: object) -> None:
    found = table(RAGGED)
    for credit in (Raw(), Normalized(), BatchNormalized()):
        groups = enumerate_groups(found, Algorithm(credit, weights=weights), 2, STATE)
        naive = estimate(found, Algorithm(credit, LogProb(), weights), 2, STATE, groups=groups)
        for loss in losses():
            e = estimate(found, Algorithm(credit, loss, weights), 2, STATE, groups=groups)
            torch.testing.assert_close(e.mean, naive.mean, rtol=0, atol=1e-12)
            assert e.variance == pytest.approx(naive.variance, rel=1e-10)


@pytest.mark.long
def test_weights_turn_the_direction_where_lengths_differ() -> None:
    """Sequence sum is ∇E[R], fixed length 1/L_max of it; the two means turn it, even for raw credit."""
    found = table(RAGGED)
    cosines = {w: estimate(found, Algorithm(Raw(), weights=w()), SAMPLES).cosine(found.gradient) for w in WEIGHTS}
    assert cosines[SequenceSum] == pytest.approx(1, abs=1e-12)
    assert cosines[FixedLength] == pytest.approx(1, abs=1e-12)
    assert cosines[SequenceMean] < cosines[TokenMean] < 1 - 1e-4
    fixed = estimate(found, Algorithm(Raw(), weights=FixedLength()), SAMPLES)
    exact_to(fixed, found.gradient / RAGGED.limit)


# ---- variance -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_baseline_can_raise_the_variance() -> None:
    """A far one does, and on sparse 0/1 rewards so does leave-one-out at small G; none of them is biased."""
    found = table(INDEPENDENT)

    def variance(credit: object, samples: int, b: float = 0.0, of: ResponseTable = found) -> float:
        e = estimate(of, Algorithm(credit), samples, {"baseline": b})
        exact_to(e, of.gradient)
        return e.variance

    raw = variance(Raw(), 2)
    assert variance(RunningMean(), 2, b=found.expected_reward) < raw < variance(RunningMean(), 2, b=10.0)
    assert variance(RunningMean(), 2, b=0.0) == pytest.approx(raw, rel=1e-12)
    sparse = table(INDEPENDENT, exactly)
    assert sparse.expected_reward < 0.2
    for samples in (2, 3):
        assert variance(LeaveOneOut(), samples, of=sparse) > variance(Raw(), samples, of=sparse)
    assert variance(LeaveOneOut(), 8, of=found) < variance(Raw(), 8, of=found)


@pytest.mark.long
def test_variance_of_raw_falls_as_one_over_samples() -> None:
    found = table(RAGGED)
    one = estimate(found, Algorithm(Raw()), 1).variance
    for samples in (2, 5):
        assert estimate(found, Algorithm(Raw()), samples).variance == pytest.approx(one / samples, rel=1e-12)


# ---- the entropy bonus ----------------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES, ids=space_name)
def test_entropy_bonus_climbs_the_entropy(space: Space) -> None:
    """c·∇H(π) on independent positions; per token on an autoregressive policy it misses the states to come."""
    found = table(space, nothing)
    p = probability(found.policy, found.batch)[0]
    gradient = found.differentiate(-(p * p.log()).sum())
    e = estimate(found, Algorithm(Raw(), exploration=Constant(0.3)), 2)
    if space is INDEPENDENT:
        exact_to(e, 0.3 * gradient)
    else:
        assert e.cosine(gradient) == pytest.approx(0.5504264495, rel=1e-6)

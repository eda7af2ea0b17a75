"""Credit: a hand-computed golden for every choice, then properties on drawn groups."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import F64, batch_of, close, f64
from hypothesis import assume, given
from hypothesis import strategies as st

from ascent.core.advantages import (
    ADVANTAGES,
    BatchNormalized,
    BestOnly,
    ByTurn,
    Centered,
    Greedy,
    LeaveOneOut,
    Normalized,
    OptimalBaseline,
    Raw,
    RunningMean,
)
from ascent.core.errors import ConfigError
from ascent.core.types import Batch

S3 = math.sqrt(3)

# Rewards [1 2 6] and [4 4 4]. First group: mean 3, deviations −2 −1 3, std² = (4+1+9)/2 = 7.
GOLDENS: dict[type, Any] = {
    Raw: (Raw(), {}, {}, [[1, 2, 6], [4, 4, 4]]),
    Centered: (Centered(), {}, {}, [[-2, -1, 3], [0, 0, 0]]),
    # The others' means: (2+6)/2 = 4, (1+6)/2 = 3.5, (1+2)/2 = 1.5.
    LeaveOneOut: (LeaveOneOut(), {}, {}, [[-3, -1.5, 4.5], [0, 0, 0]]),
    Normalized: (Normalized(eps=0.5), {}, {}, [[d / (math.sqrt(7) + 0.5) for d in (-2, -1, 3)], [0, 0, 0]]),
    # Only the 6 is its group's best; three 4s tie, and ties are kept.
    BestOnly: (BestOnly(), {}, {}, [[0, 0, 6], [4, 4, 4]]),
    RunningMean: (RunningMean(0.9), {}, {"baseline": 2.5}, [[-1.5, -0.5, 3.5], [1.5, 1.5, 1.5]]),
    Greedy: (Greedy(), {"reward_greedy": [[[5.0]], [[1.0]]]}, {}, [[-4, -3, 1], [3, 3, 3]]),
    # Norms 1 2 3: b₁ = (2·2 + 3·6)/5 = 4.4, b₂ = (1·1 + 3·6)/4 = 4.75, b₃ = (1·1 + 2·2)/3 = 5/3.
    OptimalBaseline: (
        OptimalBaseline("exact"),
        {"score_norm": [[[1.0], [2.0], [3.0]], [[1.0], [2.0], [3.0]]]},
        {},
        [[1 - 4.4, 2 - 4.75, 6 - 5 / 3], [0, 0, 0]],
    ),
    # Six tokens 1 2 6 4 4 4: mean 3.5, squares 6.25 + 2.25 + 6.25 + 3·0.25 = 15.5, std² = 15.5/5 = 3.1.
    BatchNormalized: (
        BatchNormalized(eps=0.25),
        {},
        {},
        [[d / (math.sqrt(3.1) + 0.25) for d in row] for row in ((-2.5, -1.5, 2.5), (0.5, 0.5, 0.5))],
    ),
    # One turn each: leave-one-out. Several turns: tests/tasks/test_multi_turn.py.
    ByTurn: (ByTurn(), {}, {}, [[-3, -1.5, 4.5], [0, 0, 0]]),
}


@pytest.mark.parametrize("choice", ADVANTAGES)
def test_every_credit_has_a_golden(choice: type) -> None:
    assert choice in GOLDENS, f"{choice.__name__} is on the menu and has no golden: add one, with its derivation"
    credit, fields, state, expected = GOLDENS[choice]
    assert type(credit) is choice
    batch = batch_of([[1, 2, 6], [4, 4, 4]], **fields)
    close(credit(batch, state), f64(expected).unsqueeze(-1))


def test_length_stands_for_the_norm() -> None:
    """OPO: as the exact golden, with lengths 1 2 3 in place of norms."""
    δ = OptimalBaseline("length")(batch_of([[1, 2, 6]], [[1, 2, 3]]), {})
    close(δ.flatten(), [1 - 4.4, 2 - 4.75, 6 - 5 / 3])


def test_a_norm_of_zero_falls_back_on_the_plain_mean() -> None:
    """Others with norm 0 (a saturated policy): b₁ is the plain mean 4, b₂ = b₃ = 1."""
    norm = [[[1.0], [0.0], [0.0]]]
    close(OptimalBaseline("exact")(batch_of([[1, 2, 6]], score_norm=norm), {}).flatten(), [-3, 1, 5])


def test_degrees_of_freedom() -> None:
    """Ddof 0: std² = 14/3."""
    δ = Normalized(eps=0.0, ddof=0)(batch_of([[1, 2, 6]]), {})
    close(δ.flatten(), [d / math.sqrt(14 / 3) for d in (-2, -1, 3)])


# ---- properties -----------------------------------------------------------------------------------

REWARDS = st.integers(1, 3).flatmap(
    lambda prompts: st.integers(2, 5).flatmap(
        lambda samples: st.lists(
            st.lists(st.floats(-50, 50, width=32), min_size=samples, max_size=samples),
            min_size=prompts,
            max_size=prompts,
        )
    )
)


def full_batch(rewards: Any, shift: float = 0.0, scale: float = 1.0, seed: int = 0) -> Batch:
    """A batch that has what every credit asks for."""
    reward = f64(rewards) * scale + shift
    generator = torch.Generator().manual_seed(seed)
    norm = 0.1 + torch.rand(*reward.shape, 1, generator=generator, dtype=F64)
    lengths = torch.randint(1, 4, reward.shape, generator=generator)
    greedy = (torch.rand(len(reward), 1, 1, generator=generator, dtype=F64) * scale) + shift
    return batch_of(reward, lengths, score_norm=norm, reward_greedy=greedy)


@pytest.mark.long
@given(REWARDS, st.floats(-20, 20))
@pytest.mark.parametrize(
    "credit",
    [Centered(), LeaveOneOut(), Normalized(), OptimalBaseline("exact"), OptimalBaseline("length"), Greedy()],
    ids=repr,
)
def test_adding_a_constant_to_every_reward_changes_nothing(credit: Any, rewards: Any, shift: float) -> None:
    if isinstance(credit, Normalized):  # a spread that rounding could make 0 or not is not this property's concern
        spread = f64(rewards).amax(1) - f64(rewards).amin(1)
        assume(bool(((spread == 0) | (spread > 1e-6)).all()))
        shifted = f64(rewards) + shift
        assume(bool(((shifted.amax(1) - shifted.amin(1) == 0) == (spread == 0)).all()))
    close(credit(full_batch(rewards, shift), {}), credit(full_batch(rewards), {}), 1e-7)


@pytest.mark.long
@given(REWARDS)
@pytest.mark.parametrize("credit", [Centered(), Normalized()], ids=repr)
def test_group_credit_sums_to_zero(credit: Any, rewards: Any) -> None:
    spread = f64(rewards).amax(1) - f64(rewards).amin(1)
    assume(bool(((spread == 0) | (spread > 1e-6)).all()))
    total = credit(batch_of(rewards), {}).sum(1)
    close(total, torch.zeros_like(total), 1e-9)


@given(REWARDS)
def test_leave_one_out_is_g_over_g_minus_one_times_centered(rewards: Any) -> None:
    G = len(rewards[0])
    close(LeaveOneOut()(batch_of(rewards), {}), Centered()(batch_of(rewards), {}) * G / (G - 1), 1e-10)


@given(REWARDS)
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(rewards: Any) -> None:
    """The definition itself, which the library does not compute this way."""
    expected = [[r - (sum(row) - r) / (len(row) - 1) for r in row] for row in rewards]
    close(LeaveOneOut()(batch_of(rewards), {}).squeeze(-1), expected, 1e-9)


@given(REWARDS, st.floats(0.1, 100))
def test_scale_does_not_matter_to_normalized_as_eps_goes_to_zero(rewards: Any, scale: float) -> None:
    spread = f64(rewards).amax(1) - f64(rewards).amin(1)
    assume(bool(((spread == 0) | (spread > 1e-3)).all()))
    credit = Normalized(eps=1e-300)
    close(credit(batch_of(f64(rewards) * scale), {}), credit(batch_of(rewards), {}), 1e-6)


def test_scale_matters_to_normalized_with_a_real_eps() -> None:
    credit = Normalized(eps=0.5)
    assert not torch.allclose(credit(batch_of([[1, 2, 6]]), {}), credit(batch_of([[10, 20, 60]]), {}))


# ---- degenerate groups ----------------------------------------------------------------------------


def every_credit() -> list[Any]:
    return [cls() for cls in ADVANTAGES] + [OptimalBaseline("length")]


STATE = {"baseline": 0.5}


@pytest.mark.parametrize("credit", every_credit(), ids=repr)
def test_a_group_of_one(credit: Any) -> None:
    """A group credit has nothing to compare with and gives 0; the others are defined as ever."""
    δ = credit(full_batch([[3.0], [-2.0]]), STATE)
    assert bool(δ.isfinite().all())
    if credit.group_relative:
        assert torch.equal(δ, torch.zeros_like(δ))
    else:
        assert bool((δ != 0).all())


@pytest.mark.long
@pytest.mark.parametrize("credit", every_credit(), ids=repr)
@given(value=st.floats(-50, 50, width=32), samples=st.integers(2, 6))
def test_an_all_equal_group_is_finite(credit: Any, value: float, samples: int) -> None:
    δ = credit(full_batch([[value] * samples]), STATE)
    assert bool(δ.isfinite().all())
    if isinstance(credit, Centered | LeaveOneOut | OptimalBaseline):
        close(δ, torch.zeros_like(δ), 1e-12)
    if isinstance(credit, Normalized | BatchNormalized):
        assert torch.equal(δ, torch.zeros_like(δ))


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 0.7, 1e-3])
@pytest.mark.parametrize("samples", [3, 6, 7, 10])
def test_normalized_is_exactly_zero_on_an_all_equal_group_in_float32(value: float, samples: int) -> None:
    """Seven float32 rewards of 0.1 have a mean that is not 0.1; over a tiny ε its residue is no longer tiny."""
    batch = batch_of([[value] * samples])
    batch = batch.add(reward=batch.reward.float())
    for credit in (Normalized(eps=1e-12), BatchNormalized(eps=1e-12)):
        assert torch.equal(credit(batch, {}), torch.zeros(1, samples, 1))


def test_float32_centering_does_leave_a_residue() -> None:
    """Why the test above is not empty: for these numbers the plain formula is not 0."""
    reward = torch.full((1, 7, 1), 0.1)
    left = Centered()(batch_of([[0.1] * 7]).add(reward=reward), {})
    assert left.abs().max() > 0
    assert (left / (left.std() + 1e-12)).abs().max() > 1000


@pytest.mark.parametrize("credit", every_credit(), ids=repr)
@pytest.mark.parametrize("garbage", [0.0, 1e6, math.nan, math.inf])
def test_a_failed_response_is_left_out(credit: Any, garbage: float) -> None:
    """Credit for the other responses is what it is in a group without the failed one, whose own is 0."""
    whole = full_batch([[1.0, 2.0, 6.0, 4.0], [3.0, 3.0, 5.0, 0.0]])
    valid = torch.tensor([[True, True, False, True]] * 2)
    reward = torch.where(valid.unsqueeze(-1), whole.reward, garbage)
    δ = credit(whole.add(valid=valid, reward=reward), STATE)
    left = [0, 1, 3]
    assert whole.score_norm is not None
    without = whole.add(
        **{name: getattr(whole, name)[:, left] for name in ("reward", "valid", "mask", "score_norm", "correct")},
        **{
            name: getattr(whole, name)[:, left]
            for name in ("response", "logp_sampler", "truncated", "present", "version")
        },
    )
    close(δ[:, left], credit(without, STATE))
    assert torch.equal(δ[:, 2], torch.zeros_like(δ[:, 2]))


@pytest.mark.parametrize("credit", every_credit(), ids=repr)
def test_all_failed(credit: Any) -> None:
    batch = full_batch([[1.0, 2.0], [3.0, 4.0]])
    batch = batch.add(
        valid=torch.tensor([[False, False], [True, True]]), reward=batch.reward * f64([[[math.nan]], [[1]]])
    )
    δ = credit(batch, STATE)
    assert bool(δ.isfinite().all())
    assert torch.equal(δ[0], torch.zeros_like(δ[0]))
    nothing = credit(batch.add(valid=torch.zeros(2, 2, dtype=torch.bool)), STATE)
    assert torch.equal(nothing, torch.zeros_like(nothing))


@pytest.mark.parametrize("credit", every_credit(), ids=repr)
def test_one_of_a_group_left_is_a_group_of_one(credit: Any) -> None:
    batch = full_batch([[3.0, 5.0, 7.0]]).add(valid=torch.tensor([[False, True, False]]))
    δ = credit(batch, STATE)
    assert bool(δ.isfinite().all())
    if credit.group_relative:
        assert torch.equal(δ, torch.zeros_like(δ))


def test_an_empty_batch() -> None:
    """Dynamic sampling may leave no group at all."""
    empty = full_batch([[1.0, 2.0]]).select(torch.tensor([], dtype=torch.long))
    for credit in every_credit():
        assert credit(empty, STATE).shape[:2] == (0, 2)


@pytest.mark.parametrize(
    ("norms", "reward"), [([1.8089e-8, 0.188946, 7.09955e-9], 5.0), ([0.21719, 8.9046e-9, 7.6703e-9], 5.0)]
)
def test_one_dominant_norm_does_not_break_the_optimal_baseline(norms: list[float], reward: float) -> None:
    """All rewards are 5, so every baseline is 5, whatever the norms (two near-certain responses, one rare).

    Taken as the sum over the group minus the response's own, b* is lost to rounding in float32.
    """
    batch = batch_of([[reward] * 3]).add(
        reward=torch.full((1, 3, 1), reward), score_norm=torch.tensor(norms).view(1, 3, 1)
    )
    δ = OptimalBaseline("exact")(batch, {})
    torch.testing.assert_close(δ, torch.zeros(1, 3, 1), rtol=0, atol=1e-3)


# ---- rewards per token ----------------------------------------------------------------------------

# Two responses, the second ends after two tokens. Rewards-to-go: [6 5 3] and [4 3 0].
STEPS = [[[1, 2, 3], [1, 3, 0]]]
ENDS = [[3, 2]]


def per_token(credit: Any, **more: Any) -> torch.Tensor:
    return credit(batch_of(STEPS, ENDS, **more), STATE)[0]


def test_reward_to_go() -> None:
    close(per_token(Raw()), [[6, 5, 3], [4, 3, 0]])


def test_means_are_taken_at_each_index_over_the_whole_group() -> None:
    """Means 5 4 1.5: at the third token the ended response counts as 0, and is not left out."""
    close(per_token(Centered()), [[1, 1, 1.5], [-1, -1, -1.5]])
    close(per_token(LeaveOneOut()), [[2, 2, 3], [-2, -2, -3]])


def test_the_spread_is_that_of_the_totals() -> None:
    """Totals 6 and 4: std √2 at every token, also where the spread of rewards-to-go is another."""
    close(per_token(Normalized(eps=0.5)), f64([[1, 1, 1.5], [-1, -1, -1.5]]) / (math.sqrt(2) + 0.5))


def test_equal_totals_give_zero_however_they_are_spread() -> None:
    δ = Normalized()(batch_of([[[4, 0], [0, 4]]]), {})
    assert torch.equal(δ, torch.zeros_like(δ))


def test_the_maximum_is_that_of_the_totals() -> None:
    """The second response has the larger last reward but the smaller total."""
    δ = BestOnly()(batch_of([[[5, 1, 0], [0, 0, 4]]]), {})
    close(δ[0], [[6, 1, 0], [0, 0, 0]])


def test_greedy_and_running_mean_per_token() -> None:
    close(per_token(Greedy(), reward_greedy=[[[2.0]]]), [[4, 3, 1], [2, 1, -2]])
    close(per_token(RunningMean()), [[5.5, 4.5, 2.5], [3.5, 2.5, -0.5]])


def test_optimal_baseline_per_token() -> None:
    """With two responses the baseline of one is the other's reward-to-go, whatever the norms."""
    δ = per_token(OptimalBaseline("exact"), score_norm=[[[1.0], [7.0]]])
    close(δ, [[2, 2, 3], [-2, -2, -3]])


def test_batch_normalized_sees_unmasked_tokens_only() -> None:
    """Five tokens 6 5 3 4 3: mean 4.2, squares 3.24 + 0.64 + 1.44 + 0.04 + 1.44 = 6.8, std² = 1.7."""
    δ = per_token(BatchNormalized(eps=0.0))
    expected = (f64([[6, 5, 3], [4, 3, 0]]) - 4.2) / math.sqrt(1.7)
    close(δ[0], expected[0])
    close(δ[1, :2], expected[1, :2])


def test_batch_normalized_counts_an_outcome_once_for_each_of_its_tokens() -> None:
    """Rewards 1 and 5 with lengths 3 and 1: mean (3·1 + 5)/4 = 2, std² = (3·1 + 9)/3 = 4."""
    δ = BatchNormalized(eps=0.0)(batch_of([[1, 5]], [[3, 1]]), {})
    close(δ.flatten(), [-0.5, 1.5])


def test_batch_normalized_leaves_failed_responses_out() -> None:
    batch = batch_of([[1, 5, 99]], [[3, 1, 2]], valid=[[True, True, False]])
    close(BatchNormalized(eps=0.0)(batch, {}).flatten(), [-0.5, 1.5, 0.0])


# ---- what is remembered ---------------------------------------------------------------------------


def test_running_mean_over_several_steps() -> None:
    """From 0, m = 0.75: used 0, then 0.25·4 = 1, then 0.75·1 + 0.25·8 = 2.75; always after use."""
    credit = RunningMean(0.75)
    state = credit.initial_state()
    seen = []
    for rewards in ([[3, 5]], [[8, 8]], [[1, 1]]):
        batch = batch_of(rewards)
        seen.append(credit(batch, state).flatten().tolist())
        state = credit.update_state(batch, state)
    assert seen == [[3, 5], [7, 7], [-1.75, -1.75]]
    assert state == {"baseline": pytest.approx(0.75 * 2.75 + 0.25 * 1)}


def test_running_mean_skips_failed_responses_and_keeps_other_memories() -> None:
    credit = RunningMean(0.5)
    batch = batch_of([[4, 100]], valid=[[True, False]])
    assert credit.update_state(batch, {"baseline": 2.0, "kl_coef": 0.1}) == {"baseline": 3.0, "kl_coef": 0.1}
    nothing = batch.add(valid=torch.zeros(1, 2, dtype=torch.bool))
    assert credit.update_state(nothing, {"baseline": 2.0}) == {"baseline": 2.0}


def test_running_mean_remembers_totals() -> None:
    """Per token, the step's mean is that of the whole responses: (6 + 4)/2 = 5."""
    assert RunningMean(0.5).update_state(batch_of(STEPS, ENDS), {"baseline": 0.0}) == {"baseline": 2.5}


@pytest.mark.parametrize("wrong", [{"eps": -1e-3}, {"eps": float("nan")}, {"ddof": 2}, {"ddof": -1}])
def test_a_normalization_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--advantage\.eps is .*ddof 0 or 1"):
        Normalized(**wrong)

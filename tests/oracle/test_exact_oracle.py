"""The oracle itself, held to what shares nothing with it.

∇E[R] to finite differences of E[R]; the expectation and the variance of an estimator to a plain loop
over all ordered groups through the learner that trains, and to sampling.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from pin_estimators import (
    INDEPENDENT,
    RAGGED,
    SHORT,
    SPACES,
    STATE,
    Tiny,
    a_point_each,
    corrected,
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
    BestOnly,
    Centered,
    Greedy,
    LeaveOneOut,
    Normalized,
    OptimalBaseline,
    Raw,
    RunningMean,
)
from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.errors import ConfigError
from ascent.core.exploration import Constant
from ascent.core.groups import All, Overlong, WithSignal
from ascent.core.kl import InLoss, InReward
from ascent.core.losses import Cispo, Clipped, LogProb, Ratio, SequenceRatio
from ascent.core.reference import Frozen
from ascent.core.types import Prompts, Rollouts, Scores, Space, join, to_batch
from ascent.core.weights import FixedLength, SequenceMean, TokenMean
from ascent.models import PerPosition
from ascent.oracle import exact
from ascent.oracle.estimator import average_over_prompts, estimate, pick
from ascent.oracle.exact import ResponseTable, all_responses, count_responses, expected_reward, reward_table
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.tasks.small.lecture import Lecture
from ascent.tasks.small.multi_turn import Guess
from ascent.training.small_learner import SmallLearner

PRODUCT = SequenceRatio("product", None, None)


# ---- the enumeration --------------------------------------------------------------------------------


def test_every_response_once() -> None:
    """Two tokens and an end, at most three: 1 of length 1, 2 of length 2, 4 + 8 of length 3."""
    response, mask, truncated = all_responses(RAGGED)
    assert len(response) == len({tuple(r[m].tolist()) for r, m in zip(response, mask, strict=True)}) == 15
    assert mask.sum(-1).bincount().tolist() == [0, 1, 2, 12]
    assert int(truncated.sum()) == 8
    assert [count_responses(s) for s in (RAGGED, INDEPENDENT, Space(1, 7, 1, end=0))] == [15, 9, 7]
    assert len(all_responses(Space(1, 2, 20, end=0)).response) == 21


@pytest.mark.parametrize("space", SPACES, ids=space_name)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_probabilities_are_the_samplers(space: Space, temperature: float) -> None:
    """They sum to 1, and the sampler says the same of what it draws."""
    found = ResponseTable(policy_of(space), prompt_of(space), Tiny(space, positions), temperature)
    assert found.probability.sum().item() == pytest.approx(1, abs=1e-12)
    sampler = SmallPolicyEngine(policy_of(space), temperature, torch.Generator().manual_seed(0))
    drawn = sampler.generate(Prompts.of(prompt_of(space).unsqueeze(0)), 50)
    known = {tuple(r[m].tolist()): p for r, m, p in zip(*all_responses(space)[:2], found.probability, strict=True)}
    for r, m, logp in zip(drawn.response[0], drawn.mask[0], drawn.logp_sampler[0], strict=True):
        assert logp.sum().exp().item() == pytest.approx(known[tuple(r[m].tolist())].item(), abs=1e-12)


def test_too_large_is_refused_with_its_size() -> None:
    with pytest.raises(ConfigError, match="1,000,000 responses"):
        all_responses(Space(3, 10, 6))
    with pytest.raises(ConfigError, match=r"9 responses in 9 classes.*groups of 20"):
        estimate(table(INDEPENDENT), Algorithm(OptimalBaseline()), 20)
    with pytest.raises(ConfigError, match="the group size is 0: set 1 or more"):
        estimate(table(INDEPENDENT), Algorithm(), 0)
    with pytest.raises(ConfigError, match="needs nonsense, which the exact oracle cannot compute"):
        table(INDEPENDENT).batch_with_fields(frozenset({"nonsense"}))
    with pytest.raises(ConfigError, match="reference"):
        estimate(ResponseTable(policy_of(RAGGED), prompt_of(RAGGED), Tiny(RAGGED, positions)), ALGORITHMS["grpo"], 2)


def test_gradients_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine responses of two tokens."""
    policy = policy_of(INDEPENDENT)
    size = sum(p.numel() for p in policy.parameters())
    every = ResponseTable(policy, prompt_of(INDEPENDENT), Tiny(INDEPENDENT, positions))
    monkeypatch.setattr(exact, "MAX_JACOBIAN_SIZE", 18 * size - 1)
    with pytest.raises(ConfigError, match=f"of 18 tokens by {size:,} parameters are {18 * size:,} numbers"):
        every.jacobian("logp")
    monkeypatch.setattr(exact, "MAX_JACOBIAN_SIZE", 18 * size)
    assert every.jacobian("logp").shape == (9, 2, size)


def test_conversations_that_are_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Guess(numbers=3, questions=2)
    count = len(exact.enumerate_episodes(task, task.held_out(1))[1])
    monkeypatch.setattr(exact, "MAX_RESPONSES", count - 1)
    with pytest.raises(ConfigError, match=f"more than {count - 1:,} conversations: lower"):
        exact.enumerate_episodes(task, task.held_out(1))
    monkeypatch.setattr(exact, "MAX_RESPONSES", count)
    assert len(exact.enumerate_episodes(task, task.held_out(1))[1]) == count


def test_a_reward_that_fails_has_no_exact_gradient() -> None:
    class Failing(Tiny):
        def score(self, rollouts: Rollouts) -> Scores:
            scores = super().score(rollouts)
            valid = scores.valid.clone()
            valid[0, :2] = False
            return replace(scores, valid=valid, errors=("no number", "again"))

    with pytest.raises(ConfigError, match=r"failed on 2 of 9; the first: no number\. Fix the reward"):
        ResponseTable(policy_of(INDEPENDENT), prompt_of(INDEPENDENT), Failing(INDEPENDENT, positions))


def test_lecture_by_two_ways() -> None:
    """All three prompts at once, and one at a time; per token or as a sum."""
    task = Lecture()
    policy = PerPosition()(task.space, torch.Generator().manual_seed(5)).double()
    prompt = task.held_out(3).prompt
    mean = expected_reward(policy, prompt, reward_table(task, prompt).double())
    assert mean == pytest.approx(sum(ResponseTable(policy, p, task).expected_reward for p in prompt) / 3, abs=1e-12)
    assert mean == pytest.approx(2.2676, abs=1e-4)  # the exact value behind the course's first epoch (2.333 sampled)


# ---- ∇E[R], from outside ----------------------------------------------------------------------------


@pytest.mark.parametrize("space", SPACES, ids=space_name)
@pytest.mark.parametrize(("reward", "temperature"), [(positions, 1.0), (a_point_each, 0.7)])
def test_gradient_is_finite_differences(space: Space, reward: object, temperature: float) -> None:
    """Along thirty directions, which no wrong gradient survives."""
    policy, prompt, task = policy_of(space), prompt_of(space).unsqueeze(0), Tiny(space, reward)
    rewards, exact, h = (
        reward_table(task, prompt).double(),
        ResponseTable(policy, prompt[0], task, temperature).gradient,
        1e-4,
    )
    start, generator = torch.nn.utils.parameters_to_vector(policy.parameters()).detach(), torch.Generator()
    for _ in range(30):
        along = torch.randn(len(exact), generator=generator, dtype=exact.dtype) / math.sqrt(len(exact))
        ends = []
        for step in (h, -h):
            torch.nn.utils.vector_to_parameters(start + step * along, policy.parameters())
            ends.append(expected_reward(policy, prompt, rewards, temperature))
        assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(float(exact @ along), abs=1e-8)
    assert exact.norm() > 0.3


# ---- expectation and variance, from outside ---------------------------------------------------------


def brute_force(
    found: ResponseTable, algorithm: Algorithm, samples: int, state: dict[str, float]
) -> tuple[Tensor, float]:
    """Every ordered group, trained on by the learner itself."""
    learner = SmallLearner(found.policy, algorithm.update, False, algorithm.outputs)
    learner.reference = found.reference
    every = found.batch_with_fields(algorithm.needs)
    mass, mean, second = 0.0, torch.zeros(()), 0.0
    for group in itertools.product(range(len(found.probability)), repeat=samples):
        batch = pick(every, torch.tensor([group]))
        if not bool(algorithm.groups(batch).all()):
            continue
        batch, _ = algorithm.compute_advantages(batch, state)
        mini = batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.25))
        learner.gradient(mini, algorithm.objective)
        none = [torch.zeros_like(p) if p.grad is None else p.grad for p in learner.trainable()]
        gradient = -torch.cat([g.flatten() for g in none])
        p = float(found.probability[list(group)].prod())
        mass, mean, second = mass + p, mean + p * gradient, second + p * float(gradient @ gradient)
    mean = mean / mass
    return mean, second / mass - float(mean @ mean)


BRUTE = {
    "grpo": ALGORITHMS["grpo"],
    "rloo": ALGORITHMS["rloo"],
    "reinforce++": ALGORITHMS["reinforce++"],
    "dapo": replace(ALGORITHMS["dapo"], shaping=Overlong(2)),
    "gspo": ALGORITHMS["gspo"],
    "cispo": ALGORITHMS["cispo"],
    "token mean, dual clip": Algorithm(LeaveOneOut(), Clipped(0.1, 0.05, dual=1.1), TokenMean()),
    "optimal baseline": Algorithm(OptimalBaseline(), Clipped(0.05, 0.05), SequenceMean()),
    "greedy, product": Algorithm(Greedy(), PRODUCT),
    "running mean, entropy": Algorithm(RunningMean(), Cispo(0.1, 0.1), exploration=Constant(0.3)),
    "exact KL in the loss": Algorithm(
        Centered(), Ratio(), FixedLength(), InLoss("exact", 0.3), Frozen(), exploration=Constant(0.1)
    ),
    "per-decision": Algorithm(LeaveOneOut(), Ratio("per-decision"), TokenMean()),
    "a KL with the ratio on it": Algorithm(
        Centered(), Clipped(0.1, 0.1), SequenceMean(), InLoss("k3", 0.3, importance=True), Frozen()
    ),
    "GSPO, a KL per token": Algorithm(
        LeaveOneOut(), SequenceRatio("mean", 0.05, 0.05), kl=InReward("abs", 0.3, "token"), reference=Frozen()
    ),
    "truncated are masked": Algorithm(LeaveOneOut(), Clipped(0.1, 0.1), groups=All(mask_truncated=True)),
    "exact KL in the reward": Algorithm(BestOnly(), Ratio(), kl=InReward("exact", 0.3), reference=Frozen()),
}


@pytest.mark.long
@pytest.mark.unchecked
@pytest.mark.parametrize("name", [name for name in corrected() if "no-correction" not in name])
def test_corrections_and_masks_agree_with_brute_force(name: str) -> None:
    """On samples of another policy; weights over their mean see the other responses of the group."""
    found, algorithm = sampled_elsewhere(), corrected()[name]
    mean, variance = brute_force(found, algorithm, 2, {})
    e = estimate(found, algorithm, 2, {}, progress=0.25)
    torch.testing.assert_close(e.mean, mean, rtol=0, atol=1e-12)
    assert e.variance == pytest.approx(variance, rel=1e-10)


BRUTE_AND_SPACE = [(name, SHORT) for name in BRUTE] + [(n, INDEPENDENT) for n in ("grpo", "token mean, dual clip")]


@pytest.mark.long
@pytest.mark.unchecked
@pytest.mark.parametrize(("name", "space"), BRUTE_AND_SPACE, ids=space_name)
def test_classes_agree_with_brute_force(name: str, space: Space) -> None:
    """Stale samples, groups of two: the same mean and variance as a loop over all ordered pairs."""
    algorithm, found = BRUTE[name], table(space, stale=True)
    state = algorithm.initial_state() | STATE
    mean, variance = brute_force(found, algorithm, 2, state)
    e = estimate(found, algorithm, 2, state, progress=0.25)
    torch.testing.assert_close(e.mean, mean, rtol=0, atol=1e-12)
    assert e.variance == pytest.approx(variance, rel=1e-10)
    assert e.variance > 1e-6


@pytest.mark.long
@pytest.mark.unchecked
def test_groups_of_three_agree_with_brute_force() -> None:
    """Multiplicities beyond pairs, with token mean, where each group has its own denominator."""
    found, algorithm = table(SHORT, stale=True), Algorithm(Normalized(), Clipped(0.1, 0.1), TokenMean())
    mean, variance = brute_force(found, algorithm, 3, {})
    e = estimate(found, algorithm, 3)
    torch.testing.assert_close(e.mean, mean, rtol=0, atol=1e-12)
    assert e.variance == pytest.approx(variance, rel=1e-10)


@pytest.mark.long
@pytest.mark.unchecked
def test_variance_is_what_sampling_shows() -> None:
    """Normalized credit with token mean on 400 sampled groups of four: within five standard errors."""
    found, algorithm = table(RAGGED), Algorithm(Normalized(), LogProb(), TokenMean())
    learner = SmallLearner(found.policy, algorithm.update, False, algorithm.outputs)
    sampler = SmallPolicyEngine(found.policy, 1.0, torch.Generator().manual_seed(0))
    rollouts = sampler.generate(Prompts.of(found.batch.prompt.expand(400, -1)), 4)
    scores = found.task.score(rollouts)
    batch = to_batch(rollouts, reward=scores.reward.double(), valid=scores.valid)
    batch, _ = algorithm.compute_advantages(batch, {})
    gradients = []
    for i in range(400):
        group = batch.select(slice(i, i + 1))
        learner.gradient(group.add(weight=algorithm.weights(group)), algorithm.objective)
        gradients.append(-torch.cat([p.grad.flatten() for p in learner.trainable()]))  # type: ignore[union-attr]
    drawn, e = torch.stack(gradients), estimate(found, algorithm, 4)
    squares = ((drawn - e.mean) ** 2).sum(-1)
    assert squares.mean().item() == pytest.approx(e.variance, abs=5 * squares.std().item() / math.sqrt(400))
    assert (drawn.mean(0) - e.mean).norm().item() < 5 * math.sqrt(e.variance / 400)


# ---- several prompts, dynamic sampling ------------------------------------------------------------------


@pytest.mark.long
def test_several_prompts_are_a_mean_of_single_ones() -> None:
    """Checked on a batch of two prompts with one response each, all 81 of them."""
    policy, task = policy_of(INDEPENDENT), Tiny(INDEPENDENT, positions)
    both = [ResponseTable(policy, torch.tensor(p), task) for p in ([2, 0], [1, 1])]
    algorithm = Algorithm(Raw(), weights=FixedLength())
    e = average_over_prompts([estimate(t, algorithm, 1) for t in both])
    mean, second = torch.zeros(()), 0.0
    learner = SmallLearner(both[0].policy, algorithm.update, False, algorithm.outputs)
    for i, j in itertools.product(range(9), repeat=2):
        batch = join([pick(t.batch, torch.tensor([[k]])) for t, k in zip(both, (i, j), strict=True)])
        batch, _ = algorithm.compute_advantages(batch, {})
        learner.gradient(batch.add(weight=algorithm.weights(batch)), algorithm.objective)
        gradient = -torch.cat([p.grad.flatten() for p in learner.trainable()])  # type: ignore[union-attr]
        p = float(both[0].probability[i] * both[1].probability[j])
        mean, second = mean + p * gradient, second + p * float(gradient @ gradient)
    torch.testing.assert_close(e.mean, mean, rtol=0, atol=1e-12)
    assert e.variance == pytest.approx(second - float(mean @ mean), rel=1e-10)


@pytest.mark.long
def test_what_couples_prompts_is_refused_for_several() -> None:
    ragged, fixed = table(RAGGED), table(INDEPENDENT)
    for found, algorithm, coupled in (
        (ragged, Algorithm(Raw(), weights=TokenMean()), True),
        (ragged, Algorithm(BatchNormalized()), True),
        (fixed, Algorithm(BatchNormalized()), True),
        (fixed, Algorithm(Raw(), weights=TokenMean()), False),
        (ragged, Algorithm(Normalized(), weights=SequenceMean()), False),
    ):
        e = estimate(found, algorithm, 3)
        assert e.coupled is coupled
        if coupled:
            with pytest.raises(ConfigError, match="2 prompts"):
                average_over_prompts([e, e])
        assert average_over_prompts([e]).variance == e.variance


def test_dynamic_sampling_is_of_the_groups_that_are_kept() -> None:
    """Groups without signal have no gradient under a group credit: leaving them out only lengthens the mean."""
    found = table(RAGGED)
    every, kept = (estimate(found, Algorithm(LeaveOneOut(), groups=g), 2) for g in (Algorithm().groups, WithSignal()))
    assert kept.cosine(every.mean) == pytest.approx(1, abs=1e-12)
    assert kept.scale(every.mean) > 1.2
    flat = table(RAGGED, nothing)
    with pytest.raises(ConfigError, match="no group is ever kept"):
        estimate(flat, Algorithm(LeaveOneOut(), groups=WithSignal()), 2)

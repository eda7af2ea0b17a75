"""No memory knob changes a gradient: any micro-batch size, and any number of ranks, sum to the same one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from conftest import (
    ENDED,
    SAMPLED,
    TINY,
    close,
    critic_of,
    gradient_of,
    learner_of,
    policy_of,
    rollouts_of,
    shake,
    with_rewards,
)
from torch import Tensor

from ascent.core.advantages import OptimalBaseline
from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.correction import Masked, Truncated
from ascent.core.critics import SharedCritic
from ascent.core.exploration import Constant
from ascent.core.groups import All, Overlong
from ascent.core.kl import InLoss
from ascent.core.losses import Ratio, SequenceRatio
from ascent.core.reference import Frozen
from ascent.core.types import Batch, Outputs, Terms
from ascent.core.values import VTrace
from ascent.core.weights import WEIGHTS, SequenceMean, TokenMean
from ascent.training.small_learner import SmallLearner, score_small_responses, score_small_steps
from tests.cases import mostly_smokes

PROMPTS, SAMPLES = 2, 3
SIZES = (1, 2, 3, 4, 5, 6, 7)
"""Responses in a micro-batch: below, at and above G = 3, up to all N = 6 and more."""


def prepared(algorithm: Algorithm) -> tuple[Any, Batch]:
    """A learner that has moved since it sampled, and its batch with credit and weights.

    Lengths differ; one response failed and one is wholly masked. Ratios are off 1 on both sides of every clip.
    """
    policy = policy_of(TINY, ENDED)
    learner = learner_of(policy, algorithm)
    batch = with_rewards(rollouts_of(policy, PROMPTS, SAMPLES, temperature=0.9))
    batch.mask[1, 1] = False
    batch.valid[0, 2] = False
    assert len(batch.length.unique()) > 2
    if learner.reference is not None:
        shake(learner.reference, 0.2, seed=1)
    batch = batch.add(logp_old=batch.logp_sampler - 0.02)
    batch = batch.add(**learner.score(batch, algorithm.needs))
    shake(policy, 0.1, seed=2)
    batch, state = algorithm.compute_advantages(batch, algorithm.initial_state())
    return learner, batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0))


def tokens(responses: int, batch: Batch) -> int:
    """The budget in tokens that so many responses take."""
    return responses * (batch.prompt.shape[1] + batch.mask.shape[2])


def gradients(
    algorithm: Algorithm, objective: Callable[[Batch, Outputs], Terms], sizes: tuple[int, ...]
) -> list[Tensor]:
    learner, mini = prepared(algorithm)
    found = []
    for size in sizes:
        learner.micro_batch = tokens(size, mini)
        terms = learner.gradient(mini, objective)
        found.append(torch.cat([gradient_of(learner), terms.objective.view(1), torch.stack(list(terms.sums.values()))]))
    return found


def check_split(algorithm: Algorithm, objective: Callable[[Batch, Outputs], Terms] | None = None) -> None:
    """Gradient, objective and every reported sum are those of the whole mini-batch, to 1e-12."""
    whole, *parts = gradients(algorithm, objective or algorithm.objective, (0, *SIZES))
    assert whole.abs().max() > 1e-4
    for size, part in zip(SIZES, parts, strict=True):
        difference = float((part - whole).abs().max() / whole.abs().max())
        assert difference < 1e-12, f"micro-batches of {size} change the gradient by {difference:.1e}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "weights"),
    mostly_smokes(
        itertools.product(SAMPLED, WEIGHTS),
        *(("grpo", weights) for weights in WEIGHTS),
        *((row, WEIGHTS[i % len(WEIGHTS)]) for i, row in enumerate(SAMPLED)),
    ),
)
def test_every_row_with_every_weight(row: str, weights: type) -> None:
    algorithm = replace(ALGORITHMS[row], weights=weights())
    check_split(replace(algorithm, shaping=Overlong(2)) if row == "dapo" else algorithm)


@pytest.mark.parametrize(
    "algorithm",
    [
        Algorithm(correction=Truncated("token"), weights=TokenMean()),
        replace(ALGORITHMS["gspo"], correction=Masked("sequence", 0.1, 10.0)),
        replace(ALGORITHMS["grpo"], kl=InLoss("exact", 0.3), exploration=Constant(0.1)),
        Algorithm(advantage=OptimalBaseline("exact"), reference=Frozen(), weights=SequenceMean()),
        Algorithm(correction=Truncated(cap=1.0, floor=0.9, normalized=True, geometric=1.01), weights=TokenMean()),
        replace(ALGORITHMS["gspo"], correction=Masked("sequence", 0.1, 10.0, normalized=True)),
        replace(ALGORITHMS["grpo"], kl=InLoss("k3", 0.3, importance=True), groups=All(mask_truncated=True)),
        replace(ALGORITHMS["gspo"], kl=InLoss("abs", 0.3, importance=True), reference=Frozen()),
        Algorithm(loss=Ratio("per-decision"), kl=InLoss("k1", 0.3, importance=True), reference=Frozen()),
        Algorithm(VTrace(), SequenceRatio(), TokenMean(), critic=SharedCritic(clip=0.01), correction=Truncated()),
    ],
    ids=[
        *("token correction", "sequence correction", "exact KL and entropy", "optimal baseline"),
        *("normalized, floor, rejection", "normalized sequences", "k3 times the ratio, masked", "abs times GSPO's"),
        *("per-decision", "v-trace, GSPO-token, a clipped value"),
    ],
)
def test_what_no_row_has(algorithm: Algorithm) -> None:
    check_split(algorithm)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_denominator_of_each_micro_batch_is_caught(weights: type) -> None:
    """The mistake itself: weights computed from the micro-batch. Each has a denominator, so each shows it."""
    algorithm = replace(ALGORITHMS["dr-grpo"], weights=weights())

    def broken(micro: Batch, out: Outputs) -> Terms:
        return algorithm.objective(micro.add(weight=weights()(micro)), out)

    with pytest.raises(AssertionError, match="change the gradient"):
        check_split(algorithm, broken)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_mean_over_micro_batches_is_caught(weights: type) -> None:
    """Accumulation that divides by the number of micro-batches, as if each were a mean."""
    algorithm = replace(ALGORITHMS["dr-grpo"], weights=weights())

    def broken(micro: Batch, out: Outputs) -> Terms:
        terms = algorithm.objective(micro, out)
        share = micro.mask.shape[0] * micro.mask.shape[1] / (PROMPTS * SAMPLES)
        return Terms(terms.objective * share, terms.sums)

    with pytest.raises(AssertionError, match="change the gradient"):
        check_split(algorithm, broken)


@pytest.mark.parametrize("row", SAMPLED)
def test_ranks_sum_to_the_whole(row: str) -> None:
    """Each rank has some prompts and the weights of the whole step; their gradients add up."""
    algorithm = ALGORITHMS[row]
    learner, mini = prepared(algorithm)
    learner.gradient(mini, algorithm.objective)
    whole = gradient_of(learner)
    total = torch.zeros_like(whole)
    for part in torch.arange(PROMPTS).tensor_split(2):
        learner.gradient(mini.select(part), algorithm.objective)
        total += gradient_of(learner)
    close(total, whole)


@pytest.mark.parametrize("size", SIZES)
def test_scoring_is_the_same_in_parts(size: int) -> None:
    algorithm = Algorithm(reference=Frozen())
    learner, batch = prepared(algorithm)
    whole = learner.score(batch, learner.provides)
    learner.micro_batch = tokens(size, batch)
    for name, tensor in learner.score(batch, learner.provides).items():
        close(tensor, whole[name])


@pytest.mark.parametrize("size", SIZES)
def test_micro_batches_hold_every_response_once(size: int) -> None:
    """And never more than they may, unless a single response is more."""
    _, mini = prepared(ALGORITHMS["grpo"])
    number = torch.arange(6.0).view(2, 3, 1)
    numbered = mini.add(reward=number, advantage=number)
    parts = list(numbered.microbatches(size))
    assert sorted(x for part in parts for x in part.reward.flatten().tolist()) == list(range(6))
    assert all(part.reward.numel() <= size for part in parts)
    for part in parts:
        assert part.advantage is not None
        assert torch.equal(part.advantage, part.reward)
        assert part.prompt.shape[0] == part.reward.shape[0]


def test_the_logp_of_a_step_is_in_the_batchs_order() -> None:
    """What `mismatch` reads: the same numbers in the same places, however the step was cut."""
    algorithm = ALGORITHMS["grpo"]
    found = []
    for size in (0, *SIZES):
        learner, mini = prepared(algorithm)
        learner.micro_batch = tokens(size, mini)
        found.append(learner.step(mini, algorithm.objective, algorithm.update).logp)
    for logp in found[1:]:
        close(logp, found[0])


@pytest.mark.parametrize(("epochs", "count"), [(1, 1), (2, 1), (3, 2)])
def test_mini_batches_are_whole_prompts_each_once_an_epoch(epochs: int, count: int) -> None:
    _, batch = prepared(ALGORITHMS["grpo"])
    batch = batch.add(prompt_index=torch.arange(PROMPTS))
    minis = list(batch.minibatches(epochs, count, torch.Generator().manual_seed(0)))
    assert len(minis) == epochs * count
    for epoch in range(epochs):
        part = minis[epoch * count : (epoch + 1) * count]
        assert sorted(i for mini in part for i in mini.prompt_index.tolist()) == list(range(PROMPTS))
        assert all(mini.mask.shape[1] == SAMPLES for mini in part)
    one, two = (list(batch.minibatches(6, 2, torch.Generator().manual_seed(s))) for s in (0, 0))
    assert [m.prompt_index.tolist() for m in one] == [m.prompt_index.tolist() for m in two]
    assert len({tuple(m.prompt_index.tolist()) for m in one}) > 1


def numbers_of(learner: Any, mini: Batch, algorithm: Algorithm, vector: list[Tensor], old: list[Tensor]) -> Tensor:
    """All that a learner sums up for a mini-batch: gradient, terms, Fisher product, KL, and the critic's fit."""
    terms = learner.gradient(mini, algorithm.objective)
    parts = [gradient_of(learner), terms.objective.view(1), *(value.view(1) for value in terms.sums.values())]
    parts += [value.view(1) for value in terms.means.values()]
    parts.append(learner.evaluate_objective(mini, algorithm.objective).view(1))
    if algorithm.loss.trains == "policy" and not algorithm.critic.shared:
        parts += [part.flatten() for part in learner.fisher_product(mini)(vector)] + [
            learner.kl_from(mini, old).view(1)
        ]
    if algorithm.critic.enabled and not algorithm.critic.shared:  # a shared critic is in the objective
        parts.append(learner.fit_critic(mini, algorithm.critic.loss)[0].flatten())
        parts += [torch.zeros(1) if p.grad is None else p.grad.flatten() for p in learner.critic.trained()]
    return torch.cat([part.to(torch.float64) for part in parts]).detach()


def offline(row: str) -> tuple[Any, Batch]:
    """A learner of a row that learns from offline data, and a batch of its kind."""
    algorithm, policy = ALGORITHMS[row], policy_of(TINY, ENDED)
    pairs = algorithm.loss.data == "pairs"
    batch = with_rewards(rollouts_of(policy, 4, 2 if pairs else 1, temperature=1.0))
    if algorithm.loss.trains == "policy":
        learner: Any = learner_of(policy, algorithm)
    else:
        score = score_small_responses if algorithm.loss.trains == "rewards" else score_small_steps
        model = critic_of(policy)
        learner = SmallLearner(model, algorithm.update, False, frozenset())
        learner.train_reward(partial(score, model))
    if algorithm.loss.data == "steps":
        batch = batch.add(reward=torch.where(batch.mask, batch.reward, 0.0))
    batch = replace(batch, sampled=False).add(logp_old=batch.logp_sampler)
    if learner.reference is not None:
        shake(learner.reference, 0.2, seed=1)
    batch = batch.add(**learner.score(batch, algorithm.needs))
    batch, state = algorithm.compute_advantages(batch, algorithm.initial_state())
    return learner, batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0))


def held(row: str) -> tuple[Any, Batch, Algorithm]:
    algorithm = replace(ALGORITHMS["ppo"], critic=SharedCritic()) if row == "shared critic" else ALGORITHMS[row]
    learner, mini = prepared(algorithm) if algorithm.loss.data == "samples" else offline(row)
    if learner.critic_update is not None:  # at the very beginning of a warm-up a fit leaves the critic where it is
        learner.critic_update = replace(learner.critic_update, warmup=0.5)
    return learner, mini.add(progress=0.0), algorithm


@pytest.mark.parametrize("by", ["prompts", "samples"])
@pytest.mark.parametrize("row", [*ALGORITHMS, "shared critic"])
def test_shares_add_up_to_the_mini_batch(row: str, by: str) -> None:
    """Cut in two at random: whatever a learner sums up of the two shares is that of the whole, to 1e-12."""
    learner, mini, algorithm = held(row)
    prompts, samples = mini.valid.shape
    if by == "samples" and (algorithm.loss.data == "pairs" or samples < 2):
        pytest.skip("a pair is never cut, and one response cannot be")
    g = torch.Generator().manual_seed(5)
    vector = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in learner.trainable()]
    old = [p.detach() + 0.05 * v for p, v in zip(learner.trainable(), vector, strict=True)]
    if by == "prompts":
        order = torch.randperm(prompts, generator=g)
        cut = int(torch.randint(1, prompts, (), generator=g))
        shares = [mini.sub_batch(order[:cut].sort().values), mini.sub_batch(order[cut:].sort().values)]
    else:
        cut = int(torch.randint(1, samples, (), generator=g))
        shares = [mini.sub_batch(slice(None), slice(cut)), mini.sub_batch(slice(None), slice(cut, None))]
    assert all(share.tokens == mini.tokens > int(share.loss_mask.sum()) for share in shares)
    whole = numbers_of(learner, mini, algorithm, vector, old)
    total = sum(numbers_of(learner, share, algorithm, vector, old) for share in shares)
    assert (total - whole).abs().max() < 1e-12 * max(1.0, float(whole.abs().max()))

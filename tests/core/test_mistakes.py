"""The field's known mistakes (SPEC section 6), each put in on purpose.

Every test has a check that the library passes and that a broken version, made here, fails: so none of
these checks is one that cannot fail.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import (
    ENDED,
    F64,
    TINY,
    batch_of,
    f64,
    gradient_of,
    learner_of,
    policy_of,
    prompts_of,
    rollouts_of,
    shake,
    with_rewards,
)
from torch import Tensor

import ascent.models.small_policies as transformer
import ascent.training.small_learner as local
from ascent.core.advantages import ADVANTAGES, LeaveOneOut, Normalized, OptimalBaseline, Raw
from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.correction import log_weight
from ascent.core.kl import InLoss, InReward, k1, k3
from ascent.core.loop import train
from ascent.core.losses import LOSSES, Clipped, LogProb, Ratio
from ascent.core.reference import Frozen
from ascent.core.types import Batch, Outputs, Prompts, Rollouts, Streams, Terms
from ascent.core.weights import WEIGHTS, SequenceMean
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.settings import configure

ONE = torch.ones(1, 1, 1, dtype=torch.bool)


def gradient_at(loss: Any, logp: float, logp_old: float, advantage: float) -> float:
    x = f64([[[logp]]]).requires_grad_()
    value = loss(x, f64([[[logp_old]]]), f64([[[advantage]]]), ONE)
    return torch.autograd.grad(value.sum(), x)[0].item()


# ---- ratio computed as logp / logp_old --------------------------------------------------------------


class QuotientOfLogs(Ratio):
    def __call__(self, logp: Tensor, logp_old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        return logp / logp_old * advantage


def check_a_good_token_is_made_likelier(loss: Any) -> None:
    assert gradient_at(loss, -1.0, -1.0, 2.0) > 0
    assert gradient_at(loss, -1.0, -1.0, -2.0) < 0


def test_ratio_of_log_probs_flips_the_sign() -> None:
    for cls in LOSSES:
        check_a_good_token_is_made_likelier(cls())
    with pytest.raises(AssertionError):
        check_a_good_token_is_made_likelier(QuotientOfLogs())


# ---- gradient flowing through logp_old --------------------------------------------------------------


class OldIsNow(Ratio):
    """As if logp_old had been computed with its graph, from the same forward."""

    def __call__(self, logp: Tensor, logp_old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        return torch.exp(logp - logp) * advantage


def check_the_first_update_moves(loss: Any) -> None:
    algorithm = Algorithm(loss=loss)
    learner = learner_of(policy_of(TINY, ENDED), algorithm)
    batch = with_rewards(rollouts_of(learner.policy))
    for logp_old in (None, batch.logp_sampler, learner.score(batch, frozenset({"logp_old"}))["logp_old"]):
        assert logp_old is None or not logp_old.requires_grad
        mini, _ = algorithm.compute_advantages(batch.add(logp_old=logp_old), {})
        learner.gradient(mini.add(weight=algorithm.weights(mini)), algorithm.objective)
        assert gradient_of(learner).abs().max() > 1e-3


@pytest.mark.long
def test_gradient_through_logp_old_would_cancel() -> None:
    for cls in LOSSES:
        check_the_first_update_moves(cls())
    with pytest.raises(AssertionError):
        check_the_first_update_moves(OldIsNow())


# ---- the loss denominator depending on micro-batch, accumulation or world size ----------------------


def check_the_denominator_is_the_steps(objective: Callable[[Batch, Outputs], Terms], algorithm: Algorithm) -> None:
    learner = learner_of(policy_of(TINY, ENDED), algorithm)
    batch = with_rewards(rollouts_of(learner.policy))
    assert len(batch.length.unique()) > 1
    batch, _ = algorithm.compute_advantages(batch.add(logp_old=batch.logp_sampler), {})
    mini = batch.add(weight=algorithm.weights(batch))
    found = []
    width = mini.prompt.shape[1] + mini.mask.shape[2]
    for learner.micro_batch in (0, 4 * width, width):
        learner.gradient(mini, objective)
        found.append(gradient_of(learner))
    assert torch.allclose(found[0], found[1], rtol=0, atol=1e-12)
    assert torch.allclose(found[0], found[2], rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("weights", WEIGHTS)
def test_denominator_of_a_micro_batch(weights: type) -> None:
    algorithm = Algorithm(loss=Clipped(), weights=weights())

    def broken(micro: Batch, out: Outputs) -> Terms:
        return algorithm.objective(micro.add(weight=weights()(micro)), out)

    check_the_denominator_is_the_steps(algorithm.objective, algorithm)
    with pytest.raises(AssertionError):
        check_the_denominator_is_the_steps(broken, algorithm)


# ---- sampler log-probs renormalised over top-p/top-k support ----------------------------------------


def top_two(logits: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """A draw from the two likeliest tokens that reports the renormalised log-prob: the mistake."""
    cut = torch.full_like(logits, -math.inf).scatter(-1, *logits.topk(2, -1)[::-1])
    logp = torch.log_softmax(cut / temperature, -1)
    token = torch.multinomial(logp.exp(), 1, replacement=True, generator=generator)[:, 0]
    return token, logp.gather(-1, token[:, None])[:, 0]


def check_log_probs_are_over_the_full_vocabulary() -> None:
    policy = policy_of(TINY, ENDED)
    rollouts = rollouts_of(policy)
    trained = local.action_logprobs(local.log_probs(policy, rollouts), rollouts)
    assert torch.allclose(trained, rollouts.logp_sampler, rtol=0, atol=1e-10)


def test_log_probs_renormalised_over_a_cut_support(monkeypatch: pytest.MonkeyPatch) -> None:
    check_log_probs_are_over_the_full_vocabulary()
    monkeypatch.setattr(transformer, "draw_next", top_two)
    with pytest.raises(AssertionError):
        check_log_probs_are_over_the_full_vocabulary()


def check_the_weight_is_the_true_importance_weight(reported: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A sampler that keeps the top 2 of 4 draws from q = π/m; with π_old = π the true weight of a token is m."""
    π = f64([0.4, 0.3, 0.2, 0.1])
    m = π[:2].sum()
    said = reported(π[:2], m).log().view(1, 2, 1)
    batch = batch_of([[0, 0]], [[1, 1]], logp_sampler=said, kept_mass=m.expand(1, 2, 1).clone())
    w = log_weight(π[:2].log().view(1, 2, 1), batch).exp().flatten()
    q = π[:2] / m
    assert torch.allclose(w, π[:2] / q, rtol=0, atol=1e-12)


def test_renormalised_log_probs_break_the_correction() -> None:
    check_the_weight_is_the_true_importance_weight(lambda π, _: π)
    with pytest.raises(AssertionError):
        check_the_weight_is_the_true_importance_weight(lambda π, m: π / m)


# ---- temperature applied on one side only -----------------------------------------------------------


def check_temperature_is_on_both_sides() -> None:
    """At temperature 0.6 the first update still has ρ = 1, and logp_old of the learner is the sampler's."""
    policy = policy_of(TINY, ENDED)
    learner = learner_of(policy, Algorithm(reference=Frozen()))
    batch = with_rewards(rollouts_of(policy, temperature=0.6))
    scored = learner.score(batch, frozenset({"logp_old", "logp_ref"}))
    for logp in (learner.evaluate(batch).logp, scored["logp_old"], scored["logp_ref"]):
        assert torch.allclose(logp, batch.logp_sampler, rtol=0, atol=1e-10)


def without_temperature(policy: Any, batch: Rollouts) -> Tensor:
    return torch.log_softmax(policy.logits(batch.prompt, batch.response), -1)


def draw_without_temperature(logits: Tensor, temperature: float, generator: Any) -> tuple[Tensor, Tensor]:
    token, _ = DRAW(logits, temperature, generator)
    return token, torch.log_softmax(logits, -1).gather(-1, token[:, None])[:, 0]


DRAW = transformer.draw_next


def test_temperature_on_one_side_only(monkeypatch: pytest.MonkeyPatch) -> None:
    check_temperature_is_on_both_sides()
    for module, name, broken in (
        (local, "log_probs", without_temperature),
        (transformer, "draw_next", draw_without_temperature),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            with pytest.raises(AssertionError):
                check_temperature_is_on_both_sides()
    check_temperature_is_on_both_sides()


# ---- 0/0 in a ratio when a token's probability saturates at 1 ---------------------------------------


class QuotientOfProbs(Ratio):
    def __call__(self, logp: Tensor, logp_old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        return logp.exp() / logp_old.exp() * advantage


def check_saturated_tokens_are_finite(loss: Any) -> None:
    for logp in (0.0, -1e-12, -800.0):  # certain, almost certain, and so unlikely that its probability underflows
        gradient = gradient_at(loss, logp, logp, 1.5)
        assert math.isfinite(gradient)
        assert gradient == pytest.approx(1.5)


def test_zero_over_zero_when_a_token_saturates() -> None:
    for cls in LOSSES:
        check_saturated_tokens_are_finite(cls())
    for broken in (QuotientOfLogs(), QuotientOfProbs()):
        with pytest.raises(AssertionError):
            check_saturated_tokens_are_finite(broken)


def test_a_saturated_policy_trains_without_nan() -> None:
    """Logits so large that every probability is exactly 0 or 1: entropy, KL and gradient stay finite."""
    algorithm = replace(ALGORITHMS["grpo"], kl=InLoss("exact", 0.1))
    policy = policy_of(TINY, ENDED, sharpen=1e6)
    learner = learner_of(policy, algorithm)
    batch = with_rewards(rollouts_of(policy))
    batch = batch.add(logp_old=batch.logp_sampler, **learner.score(batch, algorithm.needs))
    batch, state = algorithm.compute_advantages(batch, algorithm.initial_state())
    mini = batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0))
    stepped = learner.step(mini, algorithm.objective, algorithm.update)
    assert {name: float(v) for name, v in stepped.metrics.items() if not math.isfinite(v)} == {}


# ---- k1 with the wrong sign; k3 with the ratio the wrong way round ----------------------------------


def check_is_the_kl_in_expectation(estimator: Callable[[Tensor], Tensor]) -> None:
    logp = torch.log_softmax(f64([2.0, 0.5, -1.0, 0.0]), -1)
    logp_ref = torch.log_softmax(f64([0.0, 1.0, 0.5, -2.0]), -1)
    kl = (logp.exp() * (logp - logp_ref)).sum()
    assert kl > 0.5
    assert torch.allclose((logp.exp() * estimator(logp - logp_ref)).sum(), kl, rtol=0, atol=1e-12)


def test_k1_with_the_wrong_sign() -> None:
    check_is_the_kl_in_expectation(k1)
    with pytest.raises(AssertionError):
        check_is_the_kl_in_expectation(lambda gap: -gap)


def test_k3_with_the_ratio_the_wrong_way_round() -> None:
    check_is_the_kl_in_expectation(k3)
    for broken in (lambda gap: torch.exp(gap) - gap - 1, lambda gap: torch.exp(gap) + gap - 1):
        with pytest.raises(AssertionError):
            check_is_the_kl_in_expectation(broken)


# ---- k2 or k3 subtracted from the reward as if its gradient were the KL's ---------------------------


class Table:
    """Two tokens out of three, the second's logits depending on the first: every response can be listed."""

    V = 3

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(self.V + self.V**2, generator=generator, dtype=F64).requires_grad_()
        self.responses = torch.tensor(list(itertools.product(range(self.V), repeat=2)))

    def logp(self) -> Tensor:
        """Log π of both tokens of every response, `[1 response 2]`."""
        first = torch.log_softmax(self.logits[: self.V], -1)[self.responses[:, 0]]
        second = torch.log_softmax(self.logits[self.V :].view(self.V, self.V), -1)
        return torch.stack([first, second[self.responses[:, 0], self.responses[:, 1]]], -1).unsqueeze(0)


def check_in_reward_the_gradient_is_the_kls(penalty: InReward) -> None:
    """All nine responses, weighted by their probabilities: the credit's gradient is −β ∇KL(π ‖ π_ref)."""
    policy, reference = Table(0), Table(1)
    logp, logp_ref = policy.logp(), reference.logp().detach()
    kl = (logp.sum(-1).exp() * (logp - logp_ref).sum(-1)).sum()
    (expected,) = torch.autograd.grad(-penalty.coef * kl, policy.logits, retain_graph=True)
    algorithm = Algorithm(kl=penalty, reference=Frozen())
    batch = batch_of([[0.0] * 9], [[2] * 9], logp_old=logp.detach(), logp_ref=logp_ref)
    batch, _ = algorithm.compute_advantages(batch, algorithm.initial_state())
    batch = batch.add(weight=logp.detach().sum(-1, keepdim=True).exp().expand(1, 9, 2).clone())
    terms = algorithm.objective(batch, Outputs(logp, torch.zeros_like(logp)))
    (gradient,) = torch.autograd.grad(terms.objective, policy.logits)
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)


def test_k2_or_k3_in_the_reward_is_not_the_kls_gradient() -> None:
    for per in ("response", "token"):
        check_in_reward_the_gradient_is_the_kls(InReward("k1", 0.3, per))
        for broken in ("k2", "k3"):
            with pytest.raises(AssertionError):
                check_in_reward_the_gradient_is_the_kls(InReward(broken, 0.3, per))


def test_every_row_with_a_kl_in_its_reward_takes_k1() -> None:
    found = {name: row.kl.estimator for name, row in ALGORITHMS.items() if row.kl.where == "reward"}
    assert found == {"rloo": "k1", "reinforce++": "k1"}


# ---- a mask made from id != pad ---------------------------------------------------------------------


class MaskFromIds(SmallPolicyEngine):
    """Pad and end are one id, and the mask is where the response is not pad."""

    def generate(self, prompts: Prompts, samples: int, greedy: bool = False, **more: int | None) -> Rollouts:
        rollouts = super().generate(prompts, samples, greedy, **more)
        return replace(rollouts, mask=rollouts.mask & (rollouts.response != self.policy.space.end))


def check_the_end_token_is_learned(sampler_class: type) -> None:
    """Reward 1 for ending at once, else 0: the gradient must push the end token's logit up."""
    algorithm = Algorithm(advantage=Raw())
    policy = policy_of(TINY, ENDED)
    learner = learner_of(policy, algorithm)
    rollouts = sampler_class(policy, 1.0, torch.Generator().manual_seed(0)).generate(
        Prompts.of(prompts_of(ENDED, 20)), 8
    )
    ended = rollouts.response[..., 0] == ENDED.end
    assert ended.any()
    assert bool(rollouts.mask[..., 0].all())
    batch, _ = algorithm.compute_advantages(with_rewards(rollouts, reward=ended.to(F64).unsqueeze(-1)), {})
    learner.gradient(batch.add(weight=algorithm.weights(batch)), algorithm.objective)
    assert policy.head.bias.grad[ENDED.end] < 0, "the loss falls as the end token becomes likelier"


def test_mask_from_pad_ids_never_learns_the_end_token() -> None:
    check_the_end_token_is_learned(SmallPolicyEngine)
    with pytest.raises(AssertionError):
        check_the_end_token_is_learned(MaskFromIds)


# ---- a group of one, or an all-equal group ----------------------------------------------------------


@dataclass(frozen=True)
class TextbookNormalized:
    """torch's own mean and std, and nothing else: NaN for one response, noise for equal ones."""

    group = True
    eps: float = 1e-12

    def __call__(self, batch: Batch, state: dict[str, float]) -> Tensor:
        R = batch.reward
        return (R - R.mean(1, keepdim=True)) / (R.std(1, keepdim=True) + self.eps)


@dataclass(frozen=True)
class SingletonKeepsItsReward(Normalized):
    """A group of one has mean 0 and std 1, as in verl."""

    def __call__(self, batch: Batch, state: dict[str, float]) -> Tensor:
        return batch.reward if batch.reward.shape[1] == 1 else super().__call__(batch, state)


@dataclass(frozen=True)
class EpsInsteadOfATest(Normalized):
    """Trusts ε to silence an all-equal group."""

    def __call__(self, batch: Batch, state: dict[str, float]) -> Tensor:
        R = batch.reward
        mean = R.sum(1, keepdim=True) / R.shape[1]
        return (R - mean) / ((R - mean).std(1, keepdim=True).nan_to_num() + self.eps)


def check_degenerate_groups(credit: Any) -> None:
    """0 for a group of one; no NaN and no number larger than the rewards for an all-equal one, in float32."""
    for value, samples in ((3.0, 1), (0.1, 7), (0.3, 6), (0.7, 9), (1 / 3, 11)):
        reward = torch.full((1, samples, 1), value)
        batch = batch_of(reward.double()).add(reward=reward, score_norm=torch.ones(1, samples, 1))
        δ = credit(batch.add(reward_greedy=torch.ones(1, 1, 1)), {"baseline": 0.0})
        assert bool(δ.isfinite().all())
        assert bool((δ.abs() <= 1.0).all()) or samples == 1
        if credit.group_relative and samples == 1:
            assert torch.equal(δ, torch.zeros_like(δ))
        if isinstance(credit, Normalized | TextbookNormalized):
            assert torch.equal(δ, torch.zeros_like(δ))


@pytest.mark.filterwarnings("ignore:std")
def test_degenerate_groups() -> None:
    for credit in [cls() for cls in ADVANTAGES] + [Normalized(eps=1e-12), OptimalBaseline("length")]:
        check_degenerate_groups(credit)
    for broken in (TextbookNormalized(), SingletonKeepsItsReward(), EpsInsteadOfATest(eps=1e-12)):
        with pytest.raises(AssertionError):
            check_degenerate_groups(broken)


# ---- a KL summed over positions beside a loss averaged over them ------------------------------------


def check_the_kl_has_the_losses_weights(objective: Callable[[Batch, Outputs], Terms], weights: Any) -> None:
    """Surrogate and KL are both 0.3 at every token and β = 1: they cancel for any weights and any lengths."""
    for lengths in ([[1, 1]], [[4, 2]], [[1, 7]]):
        batch = batch_of([[0.0, 0.0]], lengths, limit=9, kl_coef=1.0)
        old = torch.zeros_like(batch.logp_sampler)
        batch = batch.add(logp_old=old, logp_ref=old - 0.3, advantage=torch.full((1, 2, 1), 0.3, dtype=F64))
        terms = objective(batch.add(weight=weights(batch)), Outputs(old, old))
        assert abs(terms.objective.item()) < 1e-12


@pytest.mark.parametrize("weights", [cls() for cls in WEIGHTS], ids=repr)
def test_kl_summed_beside_a_loss_averaged(weights: Any) -> None:
    algorithm = Algorithm(loss=Ratio(), kl=InLoss("k1", 1.0), reference=Frozen(), weights=weights)
    plain = Algorithm(loss=Ratio(), reference=Frozen(), weights=weights)

    def summed(mini: Batch, out: Outputs) -> Terms:
        terms = plain.objective(mini, out)
        kl = torch.where(mini.mask, out.logp - mini.logp_ref, 0.0).sum()
        return Terms(terms.objective - mini.kl_coef * kl, terms.sums)

    check_the_kl_has_the_losses_weights(algorithm.objective, weights)
    with pytest.raises(AssertionError):
        check_the_kl_has_the_losses_weights(summed, weights)


# ---- "a baseline can only reduce variance" ----------------------------------------------------------


def variance(credit: Any, p: float, group: int) -> tuple[float, float]:
    """Exact mean and variance of ∂E[R]/∂θ's estimate: one token, right with probability p = σ(θ), reward 0 or 1."""
    outcomes = list(itertools.product((0.0, 1.0), repeat=group))
    mean = square = 0.0
    for rewards in outcomes:
        probability = math.prod(p if r else 1 - p for r in rewards)
        δ = credit(batch_of([list(rewards)]), {"baseline": 0.0}).flatten().tolist()
        estimate = sum(d * (r - p) for d, r in zip(δ, rewards, strict=True)) / group
        mean += probability * estimate
        square += probability * estimate**2
    return mean, square - mean**2


def check_the_claim(with_baseline: float, without: float) -> None:
    """What is often said."""
    assert with_baseline <= without


def test_a_baseline_can_only_reduce_variance_is_false() -> None:
    raw, loo = variance(Raw(), 0.2, 2), variance(LeaveOneOut(), 0.2, 2)
    assert raw[0] == pytest.approx(0.16)  # ∂p/∂θ = p(1 − p): both are unbiased
    assert loo[0] == pytest.approx(0.16)
    assert raw[1] == pytest.approx(0.2 * 0.8**3 / 2)  # Var(R(1−p))/2 = p(1−p)³/2
    assert loo[1] == pytest.approx(0.2 * 0.8 / 2 - 0.16**2)  # ½·1{R₁≠R₂}: pq/2 − (pq)²
    with pytest.raises(AssertionError):
        check_the_claim(loo[1], raw[1])


def test_the_two_state_example() -> None:
    """SPEC section 5: rewards 11 9 | 0 2. Without a baseline the weights spread by 5.323, with (10, 1) by 1.155.

    A far baseline spreads them more than none.
    """
    rewards = f64([[11, 9], [0, 2]])

    def spread(*baselines: float) -> float:
        return float((rewards - f64(baselines).unsqueeze(-1)).std())

    assert spread(0, 0) == pytest.approx(5.323, abs=5e-4)
    assert spread(10, 1) == pytest.approx(1.155, abs=5e-4)
    check_the_claim(spread(10, 1), spread(0, 0))
    with pytest.raises(AssertionError):
        check_the_claim(spread(-20, 20), spread(0, 0))
    centered = LeaveOneOut()(batch_of(rewards), {})
    assert centered.flatten().tolist() == [2, -2, -2, 2]


# ---- resume that forgets ----------------------------------------------------------------------------

CONFIG = {
    "algorithm": "reinforce-baseline",
    "kl": "in-loss",
    "kl.target": 0.001,
    "reference": "moving-average",
    "length": 3,
    "numbers": 4,
    "policy.width": 8,
    "policy.heads": 2,
    "policy.layers": 1,
    "prompts": 4,
    "samples": 3,
    "epochs": 2,
    "minibatches": 2,
    "steps": 6,
    "checkpoint_every": 3,
}


class Memory:
    """Records in memory: metrics without their times, and every checkpoint as plain copies."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.saved: dict[int, tuple[Any, Any, Any]] = {}

    def step(self, step: int, metrics: dict[str, float], *rest: Any) -> None:
        self.metrics.append({k: v for k, v in metrics.items() if not k.startswith("time/")})

    def checkpoint(self, step: int, learner: Any, streams: Streams, state: dict[str, float], ahead: Any) -> None:
        tensors = {group: {k: v.clone() for k, v in named.items()} for group, named in learner.state().items()}
        self.saved[step] = (tensors, {k: v.clone() for k, v in streams.state().items()}, dict(state))

    def dump(self, step: int, batch: Batch) -> str:
        return "nowhere"

    def should_stop(self) -> bool:
        return False

    def is_best(self) -> bool:
        return False


def steps(begin: int, saved: tuple[Any, Any, Any] | None, forget: str) -> tuple[Memory, list[Tensor]]:
    """The run from this step on, in a fresh process's objects; `forget` names what the resume leaves behind."""
    config = configure("sort", CONFIG)
    streams = Streams(11)
    policy = config.policy(config.task.space, streams.sampling)
    learner = learner_of(policy, config.algorithm)
    state = None
    if saved is not None:
        tensors, random, state = saved
        tensors = {group: {} if group == forget else named for group, named in tensors.items()}
        if forget == "reference":
            tensors["reference"] = dict(learner.reference.state_dict())
        learner.restore(tensors)
        streams.restore({**random, **({forget: Streams(11).state()[forget]} if forget in random else {})})
        state = {k: v for k, v in config.algorithm.initial_state().items() if k == forget} | {
            k: v for k, v in state.items() if k != forget
        }
    sampler = SmallPolicyEngine(policy, config.temperature, streams.sampling)
    memory = Memory()
    list(train(config, config.task, sampler, learner, memory, streams, dict, begin, state))
    return memory, [p.detach().clone() for p in learner.trainable()]


def check_resume(forget: str = "") -> None:
    whole, params = steps(0, None, "")
    rest, resumed = steps(3, whole.saved[3], forget)
    assert rest.metrics == whole.metrics[3:]
    assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True))


@pytest.mark.long
def test_resume_remembers_everything() -> None:
    check_resume()


@pytest.mark.long
@pytest.mark.parametrize("forget", ["sampling", "prompts", "order", "optimizer", "reference", "baseline", "kl_coef"])
def test_resume_that_forgets(forget: str) -> None:
    """Each source of randomness (the data position is the prompts' one), the optimizer, a moved reference, memories."""
    with pytest.raises(AssertionError):
        check_resume(forget)


def test_pending_rollouts_do_not_outlive_a_step() -> None:
    """A checkpoint lies between steps, when every rollout has been used: nothing is pending that it could forget."""
    whole, _ = steps(0, None, "")
    assert sorted(whole.saved) == [3, 6]
    assert all(set(saved[0]) == {"params", "optimizer", "reference"} for saved in whole.saved.values())


# ---- the check of the checks ------------------------------------------------------------------------


def test_a_moved_policy_has_other_numbers() -> None:
    """What `shake` does is large enough to be seen: parity checks above compare real differences."""
    policy = policy_of(TINY, ENDED)
    rollouts = rollouts_of(policy)
    shake(policy, 0.1)
    trained = local.action_logprobs(local.log_probs(policy, rollouts), rollouts)
    assert (trained - rollouts.logp_sampler).abs().max() > 0.01
    assert SequenceMean() != LogProb()

"""Dynamic sampling and overlong shaping, how a reference moves, and weights between sampler and trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import (
    F64,
    FIXED,
    SAMPLED,
    TINY,
    batch_of,
    close,
    f64,
    learner_of,
    policy_of,
    rollouts_of,
    shake,
    with_rewards,
)
from torch import Tensor

from ascent.core.advantages import Centered
from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.config import Config
from ascent.core.correction import Masked, NoCorrection, Truncated, log_weight, mismatch
from ascent.core.errors import ConfigError, RunError
from ascent.core.exploration import Annealed, Constant, NoBonus
from ascent.core.groups import All, NoShaping, Overlong, WithSignal, groups_without_signal
from ascent.core.kl import InLoss, InReward
from ascent.core.loop import PhaseTimer, Streams, collect, train
from ascent.core.reference import Every, Frozen, MovingAverage, NoReference
from ascent.core.types import Batch, Outputs, Prompts, Rollouts, Scores
from ascent.core.weights import SequenceMean
from ascent.models import PerPosition
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.settings import configure
from ascent.tasks.small.sorting import Sort

# ---- groups ---------------------------------------------------------------------------------------


def test_without_signal_means_all_scored_rewards_are_equal() -> None:
    rewards = [[1, 2, 2], [3, 3, 3], [5, 1, 5], [7, 8, 9]]
    valid = [[True] * 3, [True] * 3, [True, False, True], [False] * 3]
    assert groups_without_signal(batch_of(rewards, valid=valid)).tolist() == [False, True, True, True]
    assert WithSignal()(batch_of(rewards, valid=valid)).tolist() == [True, False, False, False]
    assert All()(batch_of(rewards, valid=valid)).tolist() == [True] * 4


def test_without_signal_compares_totals() -> None:
    """Equal sums, spread differently over the tokens, are equal rewards."""
    assert groups_without_signal(batch_of([[[1, 2], [2, 1]], [[1, 2], [2, 2]]])).tolist() == [True, False]


@dataclass(frozen=True)
class Counted(Sort):
    """Prompts 0 0 0, 1 1 1, …: one after the other; the reward of a group says whether its number is on a list."""

    def draw(self, count: int, generator: torch.Generator) -> Prompts:
        first = int(torch.randint(10**6, (1,), generator=generator))  # uses up the stream as a real task does
        assert first >= 0
        start = LOG[-1][-1] + 1 if LOG else 0
        LOG.append(list(range(start, start + count)))
        return Prompts.of(torch.tensor([[i % self.numbers] * self.length for i in LOG[-1]]))

    def score(self, rollouts: Rollouts) -> Scores:
        shape = rollouts.mask.shape[:2]
        differing = torch.arange(shape[1], dtype=torch.float32).expand(shape).clone()
        silent = torch.tensor([i not in SIGNAL for i in LOG[-1]])
        reward = torch.where(silent.unsqueeze(-1), 1.0, differing)
        return Scores(reward.unsqueeze(-1), torch.ones(shape, dtype=torch.bool), reward > 1)


LOG: list[list[int]] = []
SIGNAL: set[int] = set()


def drawn(signal: set[int], rounds: int, prompts: int = 3, **more: Any) -> tuple[Batch, dict[str, float]]:
    LOG.clear()
    SIGNAL.clear()
    SIGNAL.update(signal)
    task = Counted(length=3, numbers=50)
    dynamic = {"algorithm": "dapo", "groups.rounds": rounds, "prompts": prompts, "samples": 2}
    config = configure(task, dynamic, more)
    policy = policy_of(TINY, task.space)
    sampler = SmallPolicyEngine(policy, 1.0, torch.Generator().manual_seed(0))
    return collect(task, sampler, config.algorithm, config, torch.Generator().manual_seed(0), PhaseTimer())


def test_dynamic_sampling_draws_new_prompts_for_groups_without_signal() -> None:
    """Rounds 0–2, 3–4, 5: each draws what is still missing; 1, 4 and 5 have signal and are kept, in order."""
    batch, metrics = drawn({1, 4, 5, 7}, rounds=4)
    assert batch.prompt[:, 0].tolist() == [1, 4, 5]
    assert LOG == [[0, 1, 2], [3, 4], [5]]
    assert batch.prompt_index is not None and batch.prompt_index.tolist() == [0, 1, 2]
    assert metrics["num_responses"] == 12


def test_what_is_reported_is_over_everything_sampled() -> None:
    """Six groups of two: three with rewards 0 1, three with 1 1. Mean (3·½ + 3·1)/6 = 0.75, half without signal."""
    _, metrics = drawn({1, 4, 5, 7}, rounds=4)
    assert metrics["reward"] == pytest.approx(0.75)
    assert metrics["frac_reward_zero_std"] == pytest.approx(0.5)


def test_dynamic_sampling_gives_up_after_its_rounds() -> None:
    batch, metrics = drawn({1}, rounds=4)
    assert len(LOG) == 4
    assert batch.prompt[:, 0].tolist() == [1]
    assert metrics["num_responses"] == 18


def test_enough_in_the_first_round_draws_once() -> None:
    batch, _ = drawn({0, 1, 2}, rounds=4)
    assert len(LOG) == 1
    assert batch.prompt[:, 0].tolist() == [0, 1, 2]


def test_without_dynamic_sampling_every_group_is_kept() -> None:
    batch, _ = drawn({1}, rounds=4, groups="all")
    assert batch.prompt[:, 0].tolist() == [0, 1, 2]
    assert len(LOG) == 1


class NoRecords:
    """Keeps what the loop reports, and nothing on disk."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def step(self, step: int, metrics: dict[str, float], *rest: Any) -> None:
        self.metrics.append(metrics)

    def checkpoint(self, *state: Any) -> None:
        return None

    def dump(self, step: int, batch: Batch) -> str:
        return "nowhere"

    def should_stop(self) -> bool:
        return False

    def is_best(self) -> bool:
        return False


def run(config: Config, seed: int = 0, sampler_class: type = SmallPolicyEngine) -> tuple[NoRecords, Any]:
    """A run in this process, with nothing written down."""
    streams = Streams(seed)
    policy = config.policy(config.task.space, streams.sampling)
    learner = learner_of(policy, config.algorithm, config.micro_batch)
    sampler = sampler_class(policy, config.temperature, streams.sampling)
    records = NoRecords()
    list(train(config, config.task, sampler, learner, records, streams, dict))
    return records, learner


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("policy", ["per-position", "transformer"])
@pytest.mark.parametrize("signal", [set(), {1}], ids=["none", "one"])
def test_a_step_in_which_few_groups_or_none_have_signal_does_not_stop_the_run(
    minibatches: int, policy: str, signal: set[int]
) -> None:
    """It trains on what there is, and every number that it reports is finite."""
    LOG.clear()
    SIGNAL.clear()
    SIGNAL.update(signal)
    task = Counted(length=3, numbers=50)
    settings = {"algorithm": "dapo", "steps": 1, "prompts": 3, "samples": 2, "policy": policy, "groups.rounds": 2}
    records, learner = run(configure(task, settings, {"minibatches": minibatches}))
    assert len(records.metrics) == 1
    assert {k: v for k, v in records.metrics[0].items() if not math.isfinite(v)} == {}
    assert all(bool(p.isfinite().all()) for p in learner.trainable())


# ---- shaping --------------------------------------------------------------------------------------


def test_overlong_golden() -> None:
    """L = 10, c = 4: 0 up to 6 tokens, (6 − length)/4 after it, −1 at 10 and for a truncated response of any length."""
    lengths = [[1, 6, 7, 8, 9, 10, 10, 3]]
    truncated = [[False] * 6 + [True, True]]
    batch = batch_of([[0.0] * 8], lengths, limit=10, truncated=truncated)
    close(Overlong(4)(batch).flatten(), [0, 0, -0.25, -0.5, -0.75, -1, -1, -1])
    assert NoShaping()(batch) is None


def test_overlong_is_added_to_the_reward_right_or_wrong() -> None:
    algorithm = Algorithm(shaping=Overlong(4))
    batch = batch_of([[5, 0]], [[8, 10]], limit=10)
    credited, _ = algorithm.compute_advantages(batch, {})
    assert credited.advantage is not None
    close(credited.advantage.flatten(), [4.5, -1])
    close(credited.reward.flatten(), [5, 0])


def test_overlong_with_rewards_per_token_goes_to_the_last_one() -> None:
    algorithm = Algorithm(shaping=Overlong(2))
    credited = algorithm.shape_rewards(batch_of([[[1, 1, 1], [1, 1, 0]]], [[3, 2]], limit=3), {})
    close(credited.reward, [[[1, 1, 0], [1, 1 - 0.5, 0]]])


# ---- exploration ----------------------------------------------------------------------------------


def test_entropy_schedules() -> None:
    """From 0.5 to 0.1 over 0.8 of the run: 0.5, 0.3 halfway, 0.1 at 0.8 and after."""
    annealed = Annealed(0.5, 0.1, 0.8)
    assert [annealed(p) for p in (0.0, 0.4, 0.8, 0.9, 1.0)] == pytest.approx([0.5, 0.3, 0.1, 0.1, 0.1])
    assert Constant(0.2)(0.7) == 0.2
    assert NoBonus()(0.0) == 0.0
    with pytest.raises(ConfigError, match=r"--exploration\.until is 0"):
        Annealed(until=0.0)


# ---- reference ------------------------------------------------------------------------------------


def learner_with(reference: Any) -> Any:
    return learner_of(policy_of(PerPosition(dim=4), FIXED), Algorithm(reference=reference))


def moved(learner: Any, by: float) -> None:
    with torch.no_grad():
        for p in learner.trainable():
            p.add_(by)


def gap(learner: Any, start: list[Tensor]) -> set[float]:
    """How far the reference's parameters are from where they started."""
    return {
        round(float(x), 9)
        for now, then in zip(learner.reference.parameters(), start, strict=True)
        for x in (now - then).flatten()
    }


def over_steps(reference: Any, steps: int) -> list[set[float]]:
    """The policy moves by 1 in every step; where does the reference lie after each?"""
    learner = learner_with(reference)
    start = [p.clone() for p in learner.reference.parameters()]
    found = []
    for step in range(steps):
        moved(learner, 1.0)
        reference(learner, step)
        found.append(gap(learner, start))
    return found


def test_a_frozen_reference_stays() -> None:
    assert over_steps(Frozen(), 3) == [{0.0}] * 3


def test_every_n_steps_it_is_the_policy() -> None:
    assert over_steps(Every(3), 7) == [{0.0}, {0.0}, {3.0}, {3.0}, {3.0}, {6.0}, {6.0}]


def test_a_moving_average_follows() -> None:
    """R = ¼, policy at 1, 2, 3: 0.25, 0.75·0.25 + 0.25·2 = 0.6875, 0.75·0.6875 + 0.25·3 = 1.265625."""
    assert over_steps(MovingAverage(0.25), 3) == [{0.25}, {0.6875}, {1.265625}]


def test_the_ends_of_a_moving_average() -> None:
    assert over_steps(MovingAverage(0.0), 2) == [{0.0}, {0.0}]
    assert over_steps(MovingAverage(1.0), 2) == [{1.0}, {2.0}]


def test_no_reference_is_kept_unless_asked_for() -> None:
    learner = learner_with(NoReference())
    assert learner.reference is None
    NoReference()(learner, 0)
    assert not NoReference().enabled


def test_a_reference_is_a_copy_and_has_no_gradient() -> None:
    algorithm = Algorithm(reference=Frozen())
    learner = learner_with(Frozen())
    batch = with_rewards(rollouts_of(learner.policy))
    before = learner.score(batch, frozenset({"logp_ref"}))["logp_ref"]
    shake(learner.policy, 0.5)
    after = learner.score(batch, frozenset({"logp_ref", "logp_old"}))
    assert torch.equal(before, after["logp_ref"])
    assert not torch.allclose(after["logp_old"], before)
    assert not any(p.requires_grad for p in learner.reference.parameters())
    assert not after["logp_ref"].requires_grad
    assert algorithm.needs == {"logp_ref"}


@pytest.mark.parametrize("make", [lambda: Every(0), lambda: MovingAverage(1.5), lambda: MovingAverage(-0.1)])
def test_reference_refusals(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"--reference\.(n|rate) is"):
        make()


# ---- correction -----------------------------------------------------------------------------------

# Token weights 4 ½ | 1 1.5 (the third token of each is masked); their products are 2 and 1.5.
WEIGHTS = f64([[[4.0, 0.5, 77.0], [1.0, 1.5, 77.0]]])


def mismatched(mass: Any = None) -> Batch:
    sampler = torch.full((1, 2, 3), -2.0, dtype=F64)
    kept = {} if mass is None else {"kept_mass": f64(mass)}
    return batch_of([[0, 0]], [[2, 2]], width=3, logp_sampler=sampler, logp_old=sampler + WEIGHTS.log(), **kept)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Truncated("token", 2.0), [[[2, 0.5, 1], [1, 1.5, 1]]]),
        (Truncated("sequence", 1.8), [[[1.8], [1.5]]]),
        (Truncated("sequence", 10.0), [[[2], [1.5]]]),
        (Masked("token", 0.6, 2.0), [[[0, 0, 1], [1, 1.5, 1]]]),
        (Masked("token", 0.49, 4.01), [[[4, 0.5, 1], [1, 1.5, 1]]]),
        (Masked("sequence", 0.5, 1.8), [[[0], [1.5]]]),
        (Truncated("token", 2.0, 0.8), [[[2, 0.8, 1], [1, 1.5, 1]]]),
        (Truncated("token", 1.0, 1.0), [[[1, 1, 1], [1, 1, 1]]]),
        # Normalized: over the mean of the four tokens that count, (2 + ½ + 1 + 1.5)/4 = 1.25; of both responses, 1.75.
        (Truncated("token", 2.0, normalized=True), [[[1.6, 0.4, 0.8], [0.8, 1.2, 0.8]]]),
        (Truncated("sequence", 10.0, normalized=True), [[[2 / 1.75], [1.5 / 1.75]]]),
        # What is outside counts as 0 in the mean: (0 + 0 + 1 + 1.5)/4 = 0.625. If all is outside, nothing divides.
        (Masked("token", 0.6, 2.0, normalized=True), [[[0, 0, 1.6], [1.6, 2.4, 1.6]]]),
        (Masked("token", 7.0, 8.0, normalized=True), [[[0, 0, 0], [0, 0, 0]]]),
    ],
    ids=repr,
)
def test_correction_golden(choice: Any, expected: Any) -> None:
    close(choice(mismatched()), expected)
    assert NoCorrection()(mismatched()) is None


def test_the_mass_of_a_cut_support_is_in_the_weight() -> None:
    """What was really drawn has log-prob logp_sampler − log m, so w = exp(logp_old − logp_sampler)·m."""
    batch = mismatched([[[0.5, 0.8, 0.0], [1.0, 0.9, 0.0]]])
    close(log_weight(batch.logp_old, batch).exp(), [[[2.0, 0.4, 1], [1.0, 1.35, 1]]])
    close(Truncated("sequence", 10.0)(batch), [[[0.8], [1.35]]])


def test_rejection_golden() -> None:
    """Geometric means of the token weights: √(4·½) = √2 and √1.5. At g = 1.3 the first is rejected, at 1.2 both."""
    for g, expected in ((1.5, [False, False]), (1.3, [True, False]), (1.2, [True, True])):
        for choice in (Truncated(geometric=g), Masked("sequence", geometric=g)):
            assert choice.rejected(mismatched()).tolist() == [expected]
    below = mismatched().add(logp_old=mismatched().logp_sampler - WEIGHTS.log())  # 1/√2 and 1/√1.5
    assert Truncated(geometric=1.3).rejected(below).tolist() == [[True, False]]


def test_what_is_rejected_or_truncated_is_in_no_denominator_but_in_its_group() -> None:
    """Rewards 3 and 5, of which the first response is not trained on: credit is −1 and 1 for all that, N is 1."""
    reject = {"correction": Truncated("token", 2.0, geometric=1.3)}
    for choices in (reject, {"groups": All(mask_truncated=True)}, {"groups": WithSignal(mask_truncated=True)}):
        algorithm = Algorithm(Centered(), weights=SequenceMean(), kl=InLoss("k2", 0.25), reference=Frozen(), **choices)
        batch = mismatched().add(reward=f64([[[3.0], [5.0]]]), truncated=torch.tensor([[True, False]]))
        batch = batch.add(logp_ref=torch.full((1, 2, 3), -5.0, dtype=F64))
        batch, state = algorithm.compute_advantages(batch, algorithm.initial_state())
        assert batch.excluded is not None and batch.excluded.tolist() == [[True, False]] and batch.tokens == 2
        close(batch.advantage, [[[-1.0], [1.0]]])
        close(algorithm.weights(batch), [[[0, 0, 0], [0.5, 0.5, 0]]])
        batch = batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0))
        x = f64([[[-1.0, -2.0, 0], [-3.0, -4.0, 0]]]).requires_grad_()
        terms = algorithm.objective(batch, Outputs(x, torch.ones_like(x)))
        (gradient,) = torch.autograd.grad(terms.objective, x)
        assert not gradient[0, 0].any() and gradient[0, 1, :2].all()
        close(terms.sums["entropy"], 2)
        close(terms.sums["kl"], 0.5 * (2**2 + 1**2))


def test_rejected_responses_are_in_the_mean_of_normalized_weights() -> None:
    """As in verl, where the weights are normalized before anything is rejected."""
    plain, rejecting = Truncated("token", 2.0, normalized=True), Truncated("token", 2.0, normalized=True, geometric=1.3)
    credited = [
        Algorithm(correction=choice).compute_advantages(mismatched(), {})[0].correction for choice in (plain, rejecting)
    ]
    close(credited[0], credited[1])


def test_a_masked_response_pays_no_kl_in_the_reward() -> None:
    algorithm = Algorithm(kl=InReward("k1", 1.0), reference=Frozen(), groups=All(mask_truncated=True))
    batch = mismatched().add(logp_ref=mismatched().logp_old - 1, truncated=torch.tensor([[True, False]]))
    batch, _ = algorithm.compute_advantages(batch, algorithm.initial_state())
    close(batch.advantage, [[[0.0], [-2.0]]])


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_run_in_which_everything_is_masked_goes_on_and_says_so(minibatches: int) -> None:
    """Where nothing is left to train on there is no update; the share that is masked is reported all the same."""
    settings = {
        "algorithm": "grpo",
        "steps": 2,
        "prompts": 4,
        "samples": 4,
        "length": 3,
        "numbers": 4,
    }
    more = {"minibatches": minibatches, "groups.mask_truncated": True, "end": True}
    records, learner = run(configure("sort", settings, more))
    masked = [line["frac_masked"] for line in records.metrics]
    cut = [line["completions/clipped_ratio"] for line in records.metrics]
    assert masked == cut and max(masked) > 0
    rejecting = {"correction": "truncated", "correction.geometric": 1.0, "minibatches": minibatches}
    records, learner = run(configure("sort", settings, rejecting), sampler_class=Off)
    assert [line["frac_masked"] for line in records.metrics] == [1.0, 1.0]
    assert all("loss" not in line for line in records.metrics)
    assert all(bool(p.isfinite().all()) for p in learner.trainable())


class Off(SmallPolicyEngine):
    """It says that its tokens are a little more likely than they are."""

    def generate(self, *args: Any, **more: Any) -> Rollouts:
        drawn = super().generate(*args, **more)
        return replace(drawn, logp_sampler=drawn.logp_sampler + 0.01)


def test_the_mass_makes_importance_weighting_exact() -> None:
    """Top-2 of four tokens, enumerated: E_q[w·f] = Σ over the support of π_old·f, q the renormalised sampler."""
    π_sampler, π_old, f = f64([0.4, 0.3, 0.2, 0.1]), f64([0.25, 0.35, 0.3, 0.1]), f64([3.0, -1.0, 2.0, 5.0])
    m = π_sampler[:2].sum()
    batch = batch_of(
        [[0, 0]], [[1, 1]], logp_sampler=π_sampler[:2].log().view(1, 2, 1), kept_mass=m.expand(1, 2, 1).clone()
    )
    batch = batch.add(logp_old=π_old[:2].log().view(1, 2, 1))
    w = Truncated("token", 100.0)(batch).flatten()
    q = π_sampler[:2] / m
    close((q * w * f[:2]).sum(), (π_old * f)[:2].sum())


def test_the_correction_is_a_constant_factor_on_the_surrogate_alone() -> None:
    algorithm = Algorithm(correction=Truncated("token", 2.0))
    batch = mismatched().add(reward=f64([[[3.0], [5.0]]]))
    batch, _ = algorithm.compute_advantages(batch, {})
    assert batch.correction is not None
    batch = batch.add(weight=algorithm.weights(batch))
    x = f64([[[-1.0, -2.0, 0], [-3.0, -4.0, 0]]]).requires_grad_()
    terms = algorithm.objective(batch, Outputs(x, torch.zeros_like(x)))
    (gradient,) = torch.autograd.grad(terms.objective, x)
    close(gradient, f64([[[2 * 3, 0.5 * 3, 0], [1 * 5, 1.5 * 5, 0]]]) / 2)


def test_mismatch_values() -> None:
    """Weights 4 ½ 1 1.5 on four tokens: Σw = 7, Σw² = 19.5, so ESS = 49/19.5/4; gaps log 4, log ½, 0, log 1.5."""
    gaps = [math.log(4), math.log(0.5), 0.0, math.log(1.5)]
    batch = mismatched()
    found = mismatch(batch.logp_old, batch)
    close(found["sampling/effective_sample_size"], 49 / 19.5 / 4)
    close(found["sampling/sampling_logp_difference/mean"], sum(map(abs, gaps)) / 4)
    close(found["sampling/sampling_logp_difference/max"], math.log(4))
    close(found["sampling/kl"], sum(math.exp(g) - g - 1 for g in gaps) / 4)


def test_mismatch_of_equal_policies_is_zero() -> None:
    batch = mismatched().add(logp_old=mismatched().logp_sampler)
    found = {k.split("/")[-1]: float(v) for k, v in mismatch(batch.logp_old, batch).items()}
    assert found == {"mean": 0.0, "max": 0.0, "effective_sample_size": 1.0, "kl": 0.0}


def test_mismatch_leaves_failed_responses_and_padding_out() -> None:
    batch = mismatched().add(valid=torch.tensor([[False, True]]))
    found = mismatch(batch.logp_old, batch)
    close(found["sampling/sampling_logp_difference/mean"], math.log(1.5) / 2)
    close(found["sampling/effective_sample_size"], 2.5**2 / 3.25 / 2)


def test_mismatch_of_nothing_is_finite() -> None:
    """All responses of a step failed."""
    batch = mismatched().add(valid=torch.zeros(1, 2, dtype=torch.bool))
    found = mismatch(batch.logp_old, batch)
    assert {name: float(v) for name, v in found.items() if not math.isfinite(v)} == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Truncated(cap=0.0), r"--correction\.cap is 0"),
        (lambda: Masked(low=3.0, high=2.0), "band 3 to 2 is empty"),
        (lambda: Masked(low=-1.0), "band -1 to 2"),
        (lambda: WithSignal(rounds=0), r"--groups\.rounds is 0"),
        (lambda: Overlong(0), r"--shaping\.margin is 0"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# ---- through the loop -----------------------------------------------------------------------------


def test_too_many_reward_errors_stop_the_run(tmp_path: Any) -> None:
    file = tmp_path / "own.py"
    file.write_text("def f(prompt, response):\n    raise ValueError('no')\n")
    config = configure(
        "sort", {"reward": f"python:{file}:f", "length": 3, "numbers": 4, "prompts": 2, "samples": 2, "steps": 1}
    )
    with pytest.raises(RunError, match=r"failed on 4 of 4 responses.*--max-reward-errors 0\.1.*ValueError: no"):
        run(config)


def test_tolerated_reward_errors_are_counted_and_left_out(tmp_path: Any) -> None:
    file = tmp_path / "own.py"
    file.write_text("def f(prompt, response):\n    return float('nan') if response[0] == 0 else 1.0\n")
    config = configure(
        "sort",
        {"reward": f"python:{file}:f", "length": 3, "numbers": 4, "prompts": 8, "samples": 8, "steps": 1},
        {"max_reward_errors": 1.0},
    )
    records, _ = run(config)
    assert 0 < records.metrics[0]["reward_errors"] < 64
    assert records.metrics[0]["reward"] == 1.0
    assert records.metrics[0]["reward_std"] == 0.0


@pytest.mark.long
def test_every_row_takes_a_step_with_finite_numbers() -> None:
    for name in SAMPLED:
        settings = {"algorithm": name, "length": 3, "numbers": 4, "prompts": 3, "samples": 3, "steps": 2, "epochs": 2}
        shaping = {"dapo": {"shaping.margin": 2}, "trpo": {"epochs": 1}}.get(name, {})
        config = configure("sort", {**settings, **shaping, "end": True, "policy.width": 8, "policy.heads": 2})
        records, learner = run(config)
        bad = {k: v for metrics in records.metrics for k, v in metrics.items() if not math.isfinite(v)}
        assert bad == {}, name
        assert max(metrics["grad_norm"] for metrics in records.metrics) > 0, name
        assert all(bool(p.isfinite().all()) for p in learner.trainable()), name


def test_old_logp_from_the_learner_measures_the_same_mismatch() -> None:
    """One process, one policy: 0 to rounding, wherever logp_old comes from."""
    for old in ("sampler", "learner"):
        config = configure("sort", {"length": 3, "numbers": 4, "prompts": 3, "samples": 3, "steps": 1, "old_logp": old})
        records, _ = run(config)
        assert records.metrics[0]["sampling/sampling_logp_difference/mean"] < 1e-6
        assert records.metrics[0]["sampling/effective_sample_size"] == pytest.approx(1.0, abs=1e-6)


def test_a_stale_sampler_is_measured() -> None:
    """A sampler whose parameters are not the learner's has a mismatch above 0, and a smaller effective sample."""
    config = configure("sort", {"length": 3, "numbers": 4, "prompts": 6, "samples": 4, "steps": 1})
    streams = Streams(0)
    policy = config.policy(config.task.space, streams.sampling)
    learner = learner_of(policy, config.algorithm)
    stale = config.policy(config.task.space, torch.Generator().manual_seed(7))

    class Stale(SmallPolicyEngine):
        def load(self, params: dict[str, Tensor], version: int) -> None:
            self.version = version

    records = NoRecords()
    list(train(config, config.task, Stale(stale, 1.0, streams.sampling), learner, records, streams, dict))
    assert records.metrics[0]["sampling/sampling_logp_difference/mean"] > 0.05
    assert records.metrics[0]["sampling/effective_sample_size"] < 0.999
    assert records.metrics[0]["sampling/kl"] > 0


def test_needs_that_nobody_fills_are_refused() -> None:
    config = configure("sort", {"advantage": "optimal-baseline", "length": 3, "numbers": 4, "steps": 1})
    streams = Streams(0)
    policy = config.policy(config.task.space, streams.sampling)
    learner = learner_of(policy, config.algorithm)
    learner.provides = frozenset()
    with pytest.raises(ConfigError, match="need score_norm"):
        list(
            train(
                config,
                config.task,
                SmallPolicyEngine(policy, 1.0, streams.sampling),
                learner,
                NoRecords(),
                streams,
                dict,
            )
        )


def test_groups_choice_is_replaceable() -> None:
    assert replace(ALGORITHMS["dapo"], groups=All()).groups.rounds == 1
    assert ALGORITHMS["dapo"].groups == WithSignal()


@pytest.mark.long
@pytest.mark.parametrize("row", SAMPLED)
def test_what_a_sampler_leaves_in_its_padding_never_matters(row: str) -> None:
    """A serving engine may leave anything after the end of a response: the run's numbers are the same to the bit."""
    settings = {"algorithm": row, "length": 3, "numbers": 4, "prompts": 4, "samples": 4, "steps": 2, "epochs": 2}
    shaping = {"dapo": {"shaping.margin": 2}, "trpo": {"epochs": 1}}.get(row, {})
    config = configure("sort", {**settings, **shaping, "end": True, "policy.width": 8, "policy.heads": 2})

    def numbers(garbage: float) -> tuple[list[dict[str, float]], Tensor]:
        class Untidy(SmallPolicyEngine):
            def generate(self, prompts: Prompts, samples: int, greedy: bool = False, **more: int | None) -> Rollouts:
                rollouts = super().generate(prompts, samples, greedy, **more)
                assert greedy or not bool(rollouts.mask.all())
                return replace(rollouts, logp_sampler=torch.where(rollouts.mask, rollouts.logp_sampler, garbage))

        records, learner = run(config, sampler_class=Untidy)
        timeless = [{k: v for k, v in m.items() if not k.startswith("time/")} for m in records.metrics]
        return timeless, torch.cat([p.detach().flatten() for p in learner.trainable()])

    metrics, params = numbers(0.0)
    for garbage in (-1e9, math.nan) if row != "grpo" else (9.0, -1e9, math.nan, -math.inf):
        other, moved_to = numbers(garbage)
        assert other == metrics, garbage
        assert torch.equal(moved_to, params), garbage

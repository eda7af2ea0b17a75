"""Tickets: groups come back in any order and are trained in their place; what is late stops the run with its name.

And redraws of dynamic sampling come from streams of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import TINY
from torch import Tensor

from ascent.core.advantages import Greedy
from ascent.core.algorithms import ALGORITHMS
from ascent.core.config import Config
from ascent.core.errors import RunError
from ascent.core.groups import NoShaping
from ascent.core.loop import PhaseTimer, collect
from ascent.core.protocols import FinishedRollouts
from ascent.core.types import Batch, Prompts, Rollouts, Scores
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.tasks.small.sorting import Sort


class Elsewhere(SmallPolicyEngine):
    """Draws whole tickets as ever, but hands the groups over one by one, the last first; `late` ones never."""

    late: tuple[int, ...] = ()
    twice: tuple[int, ...] = ()

    def iter_finished(self, step: int, deadline: float) -> Iterator[FinishedRollouts]:
        done = list(super().iter_finished(step, deadline))
        for whole in reversed(done):
            for place in reversed(whole.prompt_indices.tolist()):
                one = torch.tensor([place])
                if place not in self.late:
                    for _ in range(2 if place in self.twice else 1):
                        yield FinishedRollouts(whole.request, one, whole.rollouts.select(one))


class Counting(Sort):
    """A task that counts how often it is asked to score."""

    def score(self, rollouts: Rollouts) -> Scores:
        SCORED.append(len(rollouts.prompt))
        return super().score(rollouts)


SCORED: list[int] = []


def collected(kind: type, algorithm: str = "grpo", step: int = 0, **more: Any) -> tuple[Batch, dict[str, Any]]:
    task = Counting(length=3, numbers=4, end=True)
    row = ALGORITHMS[algorithm]
    row = replace(row, shaping=NoShaping(), advantage=Greedy() if algorithm == "reinforce" else row.advantage)
    config = Config(task, TINY, row, prompts=12, samples=2, seed=7)
    policy = TINY(task.space, torch.Generator().manual_seed(0))
    sampler = kind(policy, 1.0, torch.Generator().manual_seed(1))
    for name, value in more.items():
        setattr(sampler, name, value)
    SCORED.clear()
    return collect(task, sampler, row, config, torch.Generator().manual_seed(2), PhaseTimer(), step)


def same(one: Batch, other: Batch) -> None:
    for name, value in vars(one).items():
        if isinstance(value, Tensor):
            assert torch.equal(value, getattr(other, name)), name


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "reinforce"])
def test_groups_out_of_order_are_put_in_their_place(algorithm: str) -> None:
    (here, numbers), scored_here = collected(SmallPolicyEngine, algorithm), list(SCORED)
    (there, others), scored_there = collected(Elsewhere, algorithm), list(SCORED)
    same(here, there)
    assert numbers == others
    assert set(scored_there) == {1} and sum(scored_there) == sum(scored_here), "each group is scored on arrival"
    assert scored_here[0] == 12, "in one process a ticket is scored in one piece"


def test_a_late_group_stops_the_run_and_is_named() -> None:
    with pytest.raises(RunError, match=r"groups \[1, 3\] of 12 did not finish within 3600 seconds"):
        collected(Elsewhere, late=(1, 3))


def test_a_group_that_comes_twice_stops_the_run() -> None:
    with pytest.raises(RunError, match="returned twice"):
        collected(Elsewhere, twice=(2,))


def test_what_a_step_draws_again_moves_no_other_stream() -> None:
    """The streams of prompts and responses stand where one round leaves them, however many rounds there were."""
    task, states = Sort(length=3, numbers=4, end=True), []
    policy = TINY(task.space, torch.Generator().manual_seed(0))
    for algorithm in ("grpo", "dapo"):
        row = replace(ALGORITHMS[algorithm], shaping=NoShaping())
        config = Config(task, TINY, row, prompts=12, samples=2, seed=7)
        prompts, responses = torch.Generator().manual_seed(2), torch.Generator().manual_seed(1)
        _, metrics = collect(task, SmallPolicyEngine(policy, 1.0, responses), row, config, prompts, PhaseTimer(), 3)
        states.append((prompts.get_state(), responses.get_state(), metrics["num_responses"]))
    assert states[1][2] > states[0][2], "dynamic sampling has drawn again"
    assert torch.equal(states[0][0], states[1][0]) and torch.equal(states[0][1], states[1][1])


def test_redraws_are_keyed_by_seed_step_and_round() -> None:
    drawn = [collected(SmallPolicyEngine, "dapo", step)[0] for step in (3, 3, 4)]
    same(drawn[0], drawn[1])
    assert drawn[0].response.shape != drawn[2].response.shape or not torch.equal(drawn[0].response, drawn[2].response)


def test_a_seed_alone_decides_what_is_drawn() -> None:
    task = Sort(length=3, numbers=4, end=True)
    policy, prompts = (
        TINY(task.space, torch.Generator().manual_seed(0)),
        Prompts.of(torch.zeros(4, 3, dtype=torch.long)),
    )
    one, other = (SmallPolicyEngine(policy, 1.0, torch.Generator().manual_seed(s)) for s in (1, 2))
    assert torch.equal(one.generate(prompts, 6, seed=9).response, other.generate(prompts, 6, seed=9).response)
    assert not torch.equal(one.generate(prompts, 6, seed=9).response, one.generate(prompts, 6, seed=10).response)


class Unsure(Sort):
    """A reward per token, 1 on padding too, that is not a number for the greedy response to the first prompt."""

    def score(self, rollouts: Rollouts) -> Scores:
        reward = torch.ones(rollouts.mask.shape)
        if rollouts.mask.shape[1] == 1:
            reward[0] = torch.nan
        return replace(super().score(rollouts), reward=reward)


def test_a_failed_greedy_baseline_takes_its_group_out_and_its_padding_earns_nothing() -> None:
    task = Unsure(length=3, numbers=4, end=True)
    row = replace(ALGORITHMS["reinforce"], advantage=Greedy())
    policy = TINY(task.space, torch.Generator().manual_seed(0))
    with torch.no_grad():
        policy.head.bias[4] = 3.0  # responses end early

    def collected(limit: float) -> tuple[Batch, dict[str, Any]]:
        config = Config(task, TINY, row, prompts=5, samples=3, max_reward_errors=limit)
        sampler = SmallPolicyEngine(policy, 1.0, torch.Generator().manual_seed(1))
        return collect(task, sampler, row, config, torch.Generator().manual_seed(2), PhaseTimer())

    batch, metrics = collected(limit=0.5)
    assert batch.valid.all(1).tolist() == [False, True, True, True, True] and not batch.valid[0].any()
    (error,) = batch.errors
    assert "greedy response" in error and "not finite" in error and metrics["reward_errors"] == 1
    assert batch.reward_greedy is not None and batch.reward_greedy[1:].max() < 4, "as many as there are actions"
    assert torch.equal(batch.reward.sum(-1)[1:], batch.length[1:].float())
    δ = row.advantage(batch, {})
    assert δ.isfinite().all() and not δ[0].any()
    with pytest.raises(RunError, match=r"3 of 15 responses.*greedy response"):
        collected(limit=0.1)

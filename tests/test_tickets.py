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
from ascent.core.groups import NoShaping
from ascent.core.loop import Clock, collect
from ascent.core.protocols import Finished
from ascent.core.types import Batch, Prompts, Rollouts, Scores, Trouble
from ascent.engines.small import SmallSampler
from ascent.tasks.small.sort import Sort


class Elsewhere(SmallSampler):
    """Draws whole tickets as ever, but hands the groups over one by one, the last first; `late` ones never."""

    late: tuple[int, ...] = ()
    twice: tuple[int, ...] = ()

    def finished(self, step: int, deadline: float) -> Iterator[Finished]:
        done = list(super().finished(step, deadline))
        for whole in reversed(done):
            for place in reversed(whole.place.tolist()):
                one = torch.tensor([place])
                if place not in self.late:
                    for _ in range(2 if place in self.twice else 1):
                        yield Finished(whole.ticket, one, whole.rollouts.select(one))


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
    return collect(task, sampler, row, config, torch.Generator().manual_seed(2), Clock(), step)


def same(one: Batch, other: Batch) -> None:
    for name, value in vars(one).items():
        if isinstance(value, Tensor):
            assert torch.equal(value, getattr(other, name)), name


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "reinforce"])
def test_groups_out_of_order_are_put_in_their_place(algorithm: str) -> None:
    (here, numbers), scored_here = collected(SmallSampler, algorithm), list(SCORED)
    (there, others), scored_there = collected(Elsewhere, algorithm), list(SCORED)
    same(here, there)
    assert numbers == others
    assert set(scored_there) == {1} and sum(scored_there) == sum(scored_here), "each group is scored on arrival"
    assert scored_here[0] == 12, "in one process a ticket is scored in one piece"


def test_a_late_group_stops_the_run_and_is_named() -> None:
    with pytest.raises(Trouble, match=r"groups \[1, 3\] of 12 did not finish within 3600 seconds"):
        collected(Elsewhere, late=(1, 3))


def test_a_group_that_comes_twice_stops_the_run() -> None:
    with pytest.raises(Trouble, match="came back twice"):
        collected(Elsewhere, twice=(2,))


def test_what_a_step_draws_again_moves_no_other_stream() -> None:
    """The streams of prompts and responses stand where one round leaves them, however many rounds there were."""
    task, states = Sort(length=3, numbers=4, end=True), []
    policy = TINY(task.space, torch.Generator().manual_seed(0))
    for algorithm in ("grpo", "dapo"):
        row = replace(ALGORITHMS[algorithm], shaping=NoShaping())
        config = Config(task, TINY, row, prompts=12, samples=2, seed=7)
        prompts, responses = torch.Generator().manual_seed(2), torch.Generator().manual_seed(1)
        _, metrics = collect(task, SmallSampler(policy, 1.0, responses), row, config, prompts, Clock(), 3)
        states.append((prompts.get_state(), responses.get_state(), metrics["num_responses"]))
    assert states[1][2] > states[0][2], "dynamic sampling has drawn again"
    assert torch.equal(states[0][0], states[1][0]) and torch.equal(states[0][1], states[1][1])


def test_redraws_are_keyed_by_seed_step_and_round() -> None:
    drawn = [collected(SmallSampler, "dapo", step)[0] for step in (3, 3, 4)]
    same(drawn[0], drawn[1])
    assert drawn[0].response.shape != drawn[2].response.shape or not torch.equal(drawn[0].response, drawn[2].response)


def test_a_seed_alone_decides_what_is_drawn() -> None:
    task = Sort(length=3, numbers=4, end=True)
    policy, prompts = (
        TINY(task.space, torch.Generator().manual_seed(0)),
        Prompts.of(torch.zeros(4, 3, dtype=torch.long)),
    )
    one, other = (SmallSampler(policy, 1.0, torch.Generator().manual_seed(s)) for s in (1, 2))
    assert torch.equal(one.generate(prompts, 6, seed=9).response, other.generate(prompts, 6, seed=9).response)
    assert not torch.equal(one.generate(prompts, 6, seed=9).response, one.generate(prompts, 6, seed=10).response)

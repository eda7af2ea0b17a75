"""Conversations of small policies: exact gradients with an environment in the middle, and environments that fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from pin_estimators import blank, moved

from ascent.build.small_backend import SmallBackend
from ascent.core.advantages import Advantage, ByTurn, Centered, LeaveOneOut, Raw, RunningMean
from ascent.core.algorithms import Algorithm
from ascent.core.critics import OwnCritic
from ascent.core.errors import ConfigError
from ascent.core.loop import score_rollouts
from ascent.core.losses import Ratio
from ascent.core.types import Batch, Prompts, Rollouts, Space, State
from ascent.core.values import GAE, TD, KStep, MonteCarlo
from ascent.models.small_policies import Transformer
from ascent.oracle.estimator import estimate
from ascent.oracle.exact import ResponseTable, enumerate_episodes
from ascent.rewards.small_task import BoundSmallTask
from ascent.rollout.conversation_task import bind_small_environment
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.settings import configure
from ascent.tasks.environment import Environment, Step
from ascent.tasks.small.multi_turn import Guess, Swaps, TurnsTask
from ascent.tasks.text.text_task import Problem
from ascent.training.small_learner import action_logprobs, log_probs


@dataclass(frozen=True)
class Rambling(TurnsTask):
    """Up to three turns; an observation has one token or two, by chance and by the action; action 0 ends it."""

    outcome: bool = False

    @property
    def space(self) -> Space:
        return Space(prompt_length=1, vocab=3, limit=7)

    def held_out(self, count: int) -> Prompts:
        return Prompts.of(torch.tensor([[1]]))

    def problem(self, prompts: Any, place: int) -> Problem:
        return Problem("?")

    def make_environment(self) -> Environment:
        return RamblingOn(self.outcome)

    def solved(self, rollouts: Rollouts) -> Any:
        return torch.ones(rollouts.mask.shape[:2], dtype=torch.bool)

    def text(self, ids: list[int]) -> str:
        return str(ids)


class RamblingOn(Environment):
    def __init__(self, outcome: bool):
        self.outcome = outcome

    def begin(self, problem: Problem, rng: Any) -> None:
        self.rng, self.state = rng, ()

    def step(self, action: str) -> Step:
        ways = self.outcomes(self.state, action)
        _, self.state, step = self.rng.choices(ways, [way[0] for way in ways])[0]
        return step

    def outcomes(self, state: Any, action: str) -> Sequence[tuple[float, Any, Step]]:
        a = int(action)
        done = a == 0 or len(state) == 4
        ways = [(1.0, 0)] if done else [(0.3 + 0.2 * a, 0), (0.7 - 0.2 * a, 1)]
        found = []
        for chance, o in ways:
            after = (*state, a, o)
            reward = 0.0 if self.outcome and not done else float(torch.sin(torch.tensor(1.7 * sum(after) + len(after))))
            found.append((chance, after, Step("1 2" if o else "0", reward, done)))
        return found


WORLDS: dict[str, tuple[TurnsTask, list[int], int]] = {
    "swaps": (Swaps(turns=2), [2, 1, 0], 0),
    "swaps, outcome": (Swaps(turns=2, outcome=True), [1, 0, 2], 0),
    "three turns": (Swaps(length=2, turns=3, slip=0.3), [1, 0], 0),
    "guess": (Guess(numbers=3, questions=2), [0], 1),
    "rambling": (Rambling(), [1], 0),
    "rambling, outcome": (Rambling(outcome=True), [1], 0),
}


def policy_for(task: TurnsTask) -> Any:
    return moved(blank(Transformer(width=8, layers=1, heads=2)(task.space, torch.Generator())), 3.0, 0.5)


def table_of(name: str, **more: Any) -> ResponseTable:
    task, prompt, problem = WORLDS[name]
    return ResponseTable(policy_for(task), torch.tensor(prompt), task, problem=problem, **more)


def bias(table: ResponseTable, credit: Advantage, samples: int = 2, scale: float = 1.0) -> float:
    critic = OwnCritic() if "value" in credit.needs else Algorithm().critic
    estimated = estimate(table, Algorithm(credit, Ratio(), critic=critic), samples, {"baseline": 0.4})
    return float((estimated.mean - scale * table.gradient).norm() / table.gradient.norm())


# ---- the exact gradient ---------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", WORLDS)
def test_every_unbiased_credit_has_the_exact_gradient_of_a_conversation(name: str) -> None:
    table = table_of(name)
    assert float(table.probability.sum()) == pytest.approx(1, abs=1e-12)
    assert float(table.gradient.norm()) > 1e-3
    for credit in (Raw(), LeaveOneOut(), ByTurn(), RunningMean()):
        assert bias(table, credit) < 1e-10, credit
    assert bias(table, Centered(), 2, 0.5) < 1e-10, "in length only"
    for credit in (TD(), KStep(k=2), GAE(1.0, 0.9), MonteCarlo(), GAE(1.0, 0.9, per="turn")):
        assert bias(table, credit, 1) < 1e-10, credit


def test_groups_of_three_too() -> None:
    table = table_of("three turns")
    for credit in (LeaveOneOut(), ByTurn()):
        assert bias(table, credit, 3) < 1e-10


@pytest.mark.long
def test_observations_that_are_trained_on_bias_the_gradient() -> None:
    """The same test fails for the usual mistake: a mask without holes."""
    table = table_of("rambling")
    batch = table.batch.add(mask=table.batch.present)
    with torch.no_grad():
        logp = action_logprobs(log_probs(table.policy, batch), batch)
    chance = table.probability
    table.batch = batch.add(logp_old=logp, logp_sampler=logp)
    table.environment_probability = chance / logp.sum(-1).exp()[0]  # what happens is as likely as before
    assert bias(table, LeaveOneOut()) > 0.1


@dataclass(frozen=True)
class AmongThoseWhoGotThere(Advantage):
    """What code for multi-turn GRPO often does: a turn's reward minus its mean over the responses that reached it.

    Here over the others, because a mean that includes the response itself is shorter by its own share in any case.
    """

    def __call__(self, batch: Batch, state: State) -> Any:
        assert batch.turn is not None
        δ = torch.zeros_like(batch.reward)
        for k in range(int(batch.turn.max()) + 1):
            acted = (batch.turn == k) & batch.mask
            there, reward = acted.any(-1, keepdim=True), (batch.reward * acted).sum(-1, keepdim=True)
            others = (there.sum(1, keepdim=True) - there.long()).clamp(min=1)
            mean = (reward.sum(1, keepdim=True) - reward) / others
            δ += torch.where((batch.turn <= k) & there, reward - mean, 0.0)
        return δ


@pytest.mark.long
def test_comparing_only_those_that_reached_a_turn_is_biased_where_some_do_not() -> None:
    biases = {name: bias(table_of(name), AmongThoseWhoGotThere()) for name in WORLDS}
    assert biases["swaps"] < 1e-10, "where all have the same number of turns, nothing is wrong with it"
    assert biases["three turns"] > 0.2 and biases["rambling, outcome"] > 0.15 and biases["guess"] > 0.1


def group(mask: list[list[int]], turn: list[list[int]], reward: list[list[float]], **more: Any) -> Batch:
    """One group of responses with these actions, turns and rewards."""
    actions = torch.tensor([mask], dtype=torch.bool)
    return Batch(
        prompt=torch.zeros(1, 1, dtype=torch.long),
        response=torch.zeros(actions.shape, dtype=torch.long),
        mask=actions,
        logp_sampler=torch.zeros(actions.shape),
        limit=actions.shape[-1],
        truncated=torch.zeros(actions.shape[:2], dtype=torch.bool),
        turn=torch.tensor([turn]),
        reward=torch.tensor([reward]),
        valid=torch.ones(actions.shape[:2], dtype=torch.bool),
        **more,
    )


def test_by_turn_compares_turns_and_not_places() -> None:
    """Two responses whose second turns begin at other tokens: each is compared with the other's second turn."""
    batch = group(
        mask=[[1, 0, 1, 0], [1, 0, 0, 1]],
        turn=[[0, 0, 1, 0], [0, 0, 0, 1]],
        reward=[[1.0, 0, 2, 0], [4.0, 0, 0, 8]],
    )
    δ = torch.where(batch.mask, ByTurn()(batch, {}), 0.0)
    assert δ.tolist() == [[[3 - 12, 0, 2 - 8, 0], [12 - 3, 0, 0, 8 - 2]]]
    one = batch.add(turn=None, reward=torch.tensor([[[1.0], [5.0]]]))
    assert torch.equal(ByTurn()(one, {}).expand(-1, -1, 4), LeaveOneOut()(one, {}).expand(-1, -1, 4))


def test_by_turn_leaves_failed_responses_out_of_the_baseline() -> None:
    """Of three responses the last has failed: the others are compared with each other alone, and it gets 0."""
    batch = group(
        mask=[[1, 0, 1], [1, 0, 1], [1, 0, 1]],
        turn=[[0, 0, 1]] * 3,
        reward=[[1.0, 0, 2], [4.0, 0, 8], [100.0, 0, 1000]],
    )
    batch = batch.add(valid=torch.tensor([[True, True, False]]))
    δ = torch.where(batch.mask, ByTurn()(batch, {}), 0.0)
    assert δ.tolist() == [[[3 - 12, 0, 2 - 8], [12 - 3, 0, 8 - 2], [0, 0, 0]]]


def test_gamma_and_lambda_per_turn_leave_a_turn_whole() -> None:
    """Three actions in turn 0 and one in turn 1, all observations stepped over: discounted once, between the turns."""
    value = torch.tensor([[[1.0, 2, 3, 0, 4, 0]]])
    batch = group([[1, 1, 1, 0, 1]], [[0, 0, 0, 0, 1]], [[0.0, 0, 1, 0, 10]], value=value)
    γ, λ = 0.5, 0.25
    last = 10 - 4
    third = (1 + γ * 4 - 3) + γ * λ * last
    assert GAE(γ, λ, per="turn")(batch, {})[batch.mask].tolist() == pytest.approx(
        [2 - 1 + (3 - 2) + third, 3 - 2 + third, third, last]
    )
    full = group([[1, 1, 1]], [[0, 1, 1]], [[0.0, 0, 10]], value=torch.tensor([[[1.0, 2, 4, 20]]]))
    cut = full.add(truncated=torch.tensor([[True]]))
    assert GAE(γ, λ, per="turn", bootstrap=True)(cut, {})[0, 0, 2] == 10 + γ * 20 - 4, "the last turn ended, too"
    with pytest.raises(ConfigError, match="its k counts tokens"):
        KStep(per="turn")


# ---- what is sampled ------------------------------------------------------------------------------


def drawn(task: TurnsTask, samples: int = 40, seed: int = 0, **more: Any) -> tuple[Rollouts, Any]:
    bound = SmallBackend().bind(task, None, {})
    sampler = SmallPolicyEngine(policy_for(task), 1.0, torch.Generator().manual_seed(seed))
    return sampler.generate(bound.held_out(5), samples, **more), bound


@pytest.mark.parametrize("name", WORLDS)
def test_what_is_sampled_is_among_what_is_enumerated_with_its_reward(name: str) -> None:
    task = WORLDS[name][0]
    rollouts, bound = drawn(task)
    batch, errors = score_rollouts(bound, rollouts)
    assert not errors and bool(batch.valid.all()) and not bool(batch.truncated.any())
    for place in range(len(rollouts.prompt)):
        prompts = Prompts(rollouts.prompt[place : place + 1], rollouts.problem[place : place + 1])  # type: ignore[index]
        every, _ = enumerate_episodes(task, prompts)

        def known(batch: Any, reward: Any, place: int) -> set[Any]:
            parts = (batch.response[place], batch.mask[place], batch.turn[place], reward[place].float())
            return {
                tuple(tuple(part[sample][there].tolist()) for part in parts)
                for sample, there in enumerate(batch.present[place])
            }

        assert known(rollouts, batch.reward, place) <= known(every, every.reward, 0)


def test_the_samplers_log_probs_are_those_of_a_plain_forward_pass() -> None:
    task = WORLDS["rambling"][0]
    rollouts, _ = drawn(task)
    want = action_logprobs(log_probs(policy_for(task), rollouts), rollouts)
    assert (rollouts.present & ~rollouts.mask).any()
    assert (rollouts.logp_sampler - want).abs().max() < 1e-5


@pytest.mark.long
def test_sampled_frequencies_are_the_enumerated_ones() -> None:
    task = WORLDS["rambling"][0]
    rollouts, _ = drawn(task, samples=2000)
    every, table = enumerate_episodes(task, task.held_out(1))[0], table_of("rambling")
    counts: dict[Any, int] = {}
    for tokens, there in zip(rollouts.response[0], rollouts.present[0], strict=True):
        key = tuple(tokens[there].tolist())
        counts[key] = counts.get(key, 0) + 1
    for tokens, there, chance in zip(every.response[0], every.present[0], table.probability.tolist(), strict=True):
        share = counts.get(tuple(tokens[there].tolist()), 0) / 2000
        assert abs(share - chance) < 5 * (chance * (1 - chance) / 2000) ** 0.5 + 1e-3


def test_a_group_shares_its_problem_and_every_episode_has_its_own_luck() -> None:
    slips = Swaps(slip=0.5, turns=1)
    rollouts, _ = drawn(slips, samples=64)
    same_action = rollouts.response[0, :, 0] == 0
    assert len(rollouts.reward[0][same_action].unique()) == 2  # type: ignore[index]
    again, _ = drawn(slips, samples=64)
    assert torch.equal(again.response, rollouts.response) and torch.equal(again.reward, rollouts.reward)  # type: ignore[arg-type]
    greedy = [drawn(slips, samples=1, seed=seed, greedy=True)[0].reward for seed in (1, 2)]
    assert torch.equal(greedy[0], greedy[1]), "an evaluation has the same luck every time"  # type: ignore[arg-type]


class Failing(Environment):
    """Fails at its second turn, if its luck says so."""

    def begin(self, problem: Problem, rng: Any) -> None:
        self.rng, self.turns = rng, 0

    def step(self, action: str) -> Step:
        self.turns += 1
        if self.turns == 2 and self.rng.random() < 0.3:
            raise ValueError("the world fell over")
        return Step("1", 1.0, done=self.turns == 3)


@dataclass(frozen=True)
class FailingTask(Rambling):
    def make_environment(self) -> Environment:
        return Failing()


def test_an_environment_that_fails_makes_its_response_invalid_and_no_other() -> None:
    rollouts, bound = drawn(FailingTask(), samples=60)
    batch, errors = score_rollouts(bound, rollouts)
    failed = ~batch.valid[0]
    assert errors == batch.notes[0][failed.numpy()].tolist(), "each is counted, with its reason"  # type: ignore[index]
    assert 0 < int(failed.sum()) < 40
    for valid, note, reward in zip(batch.valid[0], batch.notes[0], batch.reward[0], strict=True):  # type: ignore[index]
        assert bool(valid) != ("ValueError: the world fell over" in note)
        assert not bool(valid) or float(reward.sum()) == 3.0


def test_an_observation_that_leaves_no_room_cuts_the_response_off() -> None:
    class Talking(Environment):
        def step(self, action: str) -> Step:
            return Step("1 1 1")

    task = replace(Rambling())
    bound = BoundSmallTask(task)
    object.__setattr__(task, "make_environment", Talking)
    played = bind_small_environment(bound)
    rollouts = SmallPolicyEngine(policy_for(task), 1.0, torch.Generator().manual_seed(0)).generate(
        played.held_out(1), 3
    )
    assert bool(rollouts.truncated.all())
    assert rollouts.mask[0, 0].tolist() == [True, False, False, False, True], "seven tokens: no third turn fits"


def test_a_policy_that_cannot_read_what_is_answered_is_refused() -> None:
    """Before anything is made. Where a response is one turn, it may be trained."""
    with pytest.raises(ConfigError, match=r"--policy per-position with swaps.*Use --policy transformer"):
        SmallBackend().check(configure("swaps", {"policy": "per-position"}))
    SmallBackend().check(configure("swaps", {}))
    SmallBackend().check(configure("sort", {"policy": "per-position"}))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda: Guess(numbers=1), "at least 2"),
        (lambda: Guess(questions=0), "at least 1"),
        (lambda: Swaps(slip=1.0), "from 0 to below 1"),
        (lambda: Swaps(length=9), "at most 6"),
    ],
)
def test_worlds_that_cannot_be_are_refused(wrong: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        wrong()

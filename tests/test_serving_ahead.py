"""Sampling ahead with a serving engine: it goes on writing while the learner trains, and new weights arrive in flight.

The server is a stand-in (tests/stand_in.py); tests/engines_vllm.py asks a real vLLM the same.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ascent
from ascent.core.protocols import Open, Ticket
from ascent.core.types import Prompts, Rollouts, Scores
from ascent.engines.serving import probe
from ascent.engines.serving.fleet import Fleet
from ascent.engines.serving.sampler import ServedSampler
from ascent.policies import CausalLM
from ascent.records.ahead import put_together, take_apart
from ascent.records.run import Run
from ascent.tasks.text.tokenized import TokenizedTask
from tests.language import VOCAB, prompts_of, write_tiny
from tests.stand_in import StandIn, serving
from tests.test_serving import World, gap


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def tickets(*steps: int, samples: int = 2) -> list[Ticket]:
    return [Ticket(step, Prompts.of(prompts_of()), samples) for step in steps]


def wait_until_held(server: StandIn, count: int) -> None:
    with server.lock:
        assert server.lock.wait_for(lambda: server.held == count, 60)


def go_on(server: StandIn) -> None:
    with server.lock:
        server.hold_at = -1
        server.lock.notify_all()


def step(sampler: ServedSampler, number: int) -> list[Rollouts]:
    """The groups of a step in their order, each of which came once."""
    done = {int(each.place[0]): each.rollouts for each in sampler.finished(number, 60.0)}
    assert sorted(done) == [0, 1, 2]
    return [done[place] for place in sorted(done)]


def another(world: World, stack: ExitStack) -> ServedSampler:
    """A sampler of the same policy on the same servers, as after a resume."""
    policy = CausalLM("tiny", engine="vllm", engine_url=tuple(server.url for server in world.servers))
    sampler = ServedSampler(policy, world.lm, 5, 32, 0.7, torch.Generator().manual_seed(2))
    sampler.look = 0.05
    stack.callback(sampler.close)
    return sampler


def endless(stack: ExitStack, **more: Any) -> World:
    """Responses of just as many tokens as are allowed."""
    world = World(stack, **more)
    world.lm.ends = frozenset({VOCAB})
    world.load(0)
    return world


# ---- new weights in flight ----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kept", [False, True], ids=["computed anew", "old keys and values"])
def test_each_token_has_the_log_prob_of_the_version_that_drew_it(stack: ExitStack, kept: bool) -> None:
    world = endless(stack)
    world.server.hold_at, world.server.keep_running = 2, kept
    world.sampler.submit(tickets(0, 1))
    wait_until_held(world.server, 12)
    old = deepcopy(world.lm)
    world.move()
    world.load(1)
    go_on(world.server)
    far = 0.0
    for number in (0, 1):
        for rollouts in step(world.sampler, number):
            version = rollouts.version.expand(rollouts.mask.shape)
            assert version[0, 0].tolist() == [0, 0, 1, 1, 1]
            assert gap(old, rollouts, version == 0) < 1e-5
            far = max(far, gap(world.lm, rollouts, version == 1))
    assert far > 1e-3 if kept else far < 1e-5
    assert not world.sampler.pending


@pytest.mark.long
def test_whatever_was_begun_early_the_same_seeds_are_asked_for_in_the_same_step(stack: ExitStack) -> None:
    world = endless(stack)
    whole = []
    for number in range(3):
        world.sampler.submit(tickets(number))
        whole.append(step(world.sampler, number))
    early = another(world, stack)
    early.generator.manual_seed(1)
    early.load({}, 0)
    early.submit(tickets(0, 1, 2))
    for number, groups in enumerate(whole):
        for one, other in zip(groups, step(early, number), strict=True):
            assert torch.equal(one.response, other.response) and torch.equal(one.logp_sampler, other.logp_sampler)


@pytest.mark.long
def test_a_step_goes_before_later_ones_whenever_it_asks(stack: ExitStack) -> None:
    """A redraw of this step, or an evaluation, does not wait for all that was asked ahead."""
    world = endless(stack, rows=1)
    world.server.hold_at = 0
    world.sampler.submit(tickets(0, 3))
    world.sampler.submit([replace(one, seed=7, samples=1) for one in tickets(0)])
    wait_until_held(world.server, 1)
    known = len(world.server.asked)
    go_on(world.server)
    step_of = {}
    for one in world.sampler.pending:
        assert one.seeds is not None
        step_of |= dict.fromkeys(one.seeds.flatten().tolist(), (one.ticket.step, one.ticket.seed))
    list(world.sampler.finished(0, 60.0))
    step(world.sampler, 3)
    order = [step_of[body["sampling_params"]["seed"]] for body in world.server.asked[known:]]
    assert order == [(0, None)] * 5 + [(0, 7)] * 3 + [(3, None)] * 6


# ---- checkpoints ------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_checkpoint_holds_whole_responses_and_the_rest_is_drawn_with_the_same_seeds(stack: ExitStack) -> None:
    world = endless(stack)
    world.sampler.submit(tickets(0))
    step(world.sampler, 0)
    world.server.die_after = len(world.server.asked) + 2  # two answers, and then none
    world.server.hold_at = 2
    world.sampler.submit(tickets(1, 2))
    wait_until_held(world.server, 2)
    go_on(world.server)
    while len([one for one in world.sampler.held() if one.drawn is not None]) == 0:
        time.sleep(0.01)
    while sum(int(one.drawn.mask.any(-1).sum()) for one in world.sampler.held() if one.drawn is not None) < 2:
        time.sleep(0.01)
    tensors, plain = take_apart(world.sampler.held())
    world.sampler.close()
    held = put_together(tensors, plain)
    drawn = [one for one in held if one.drawn is not None]
    kept = {(i, *place) for i, one in enumerate(held) for place in whole(one)}
    assert len(kept) == 2 and [one.ticket.step for one in held] == [1, 2] and drawn
    world.server.revive()
    before = len(world.server.asked)
    again = another(world, stack)
    again.pending = held
    again.load({}, 0)
    groups = [step(again, number) for number in (1, 2)]
    seeds = [body["sampling_params"]["seed"] for body in world.server.asked[before + 2 :]]  # behind the probe
    expected = [int(one.seeds[place]) for i, one in enumerate(held) for place in places(one) if (i, *place) not in kept]
    assert sorted(seeds) == sorted(expected)
    for i, p, s in kept:
        assert torch.equal(groups[i][p].response[0, s], held[i].drawn.response[p, s])
        assert torch.equal(groups[i][p].logp_sampler[0, s], held[i].drawn.logp_sampler[p, s])


def places(one: Open) -> list[tuple[int, int]]:
    return [(p, s) for p in range(len(one.ticket.prompts)) for s in range(one.ticket.samples)]


def whole(one: Open) -> list[tuple[int, int]]:
    """Places of responses that a checkpoint has brought."""
    return [place for place in places(one) if one.drawn is not None and (one.going is None or not one.going[place])]


@pytest.mark.long
def test_what_is_asked_before_any_weights_waits_for_them(stack: ExitStack) -> None:
    world = World(stack)
    world.sampler.submit(tickets(0))
    assert world.sampler.pending[0].seeds is not None and not world.server.calls
    world.load(0)
    step(world.sampler, 0)


# ---- servers that fail -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_that_dies_while_the_learner_trains_is_seen_at_the_next_load(stack: ExitStack, servers: int) -> None:
    world = endless(stack, servers=servers)
    world.server.hold_at = 2
    world.sampler.submit(tickets(0, 1))
    wait_until_held(world.server, 12 if servers == 1 else 8)
    world.server.hold_at = -1
    world.server.kill()
    if servers == 1:
        world.server.revive()
    world.move()
    world.load(1)
    assert world.sampler.fleet.servers[0].down is (servers == 2), "alone it has come back"
    for number in (0, 1):
        for rollouts in step(world.sampler, number):
            version = rollouts.version.expand(rollouts.mask.shape)
            assert gap(world.lm, rollouts, version == 1) < 1e-5
    loads = world.server.calls.count("/finish_weight_update")
    assert loads == (2 if servers == 1 else 1), "weights came once more, however many responses were lost"


@pytest.mark.long
def test_a_server_that_stays_away_for_good_is_no_trouble_while_another_serves(stack: ExitStack) -> None:
    world = World(stack, servers=2)
    world.load(0)
    world.server.kill()
    for version in range(1, 7):
        world.load(version)
        world.sampler.submit(tickets(version))
        step(world.sampler, version)
    assert world.sampler.fleet.servers[0].down
    world.server.revive()
    world.load(7)
    assert not world.sampler.fleet.servers[0].down and world.server.version == "7"


# ---- whole runs -----------------------------------------------------------------------------------------


ENGINE = {"engine": "vllm", "max_prompt": 64, "threads": 1, "policy.device": "cpu"}
SMALL = {"steps": 4, "prompts": 2, "samples": 2, "max_tokens": 4, "eval_prompts": 2, "lr": 1e-3, "checkpoint_every": 9}


@pytest.fixture
def trained(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    monkeypatch.setattr(probe, "PROMPT", 24), monkeypatch.setattr(probe, "TOKENS", 8)
    score = TokenizedTask.score

    def parity(task: TokenizedTask, rollouts: Rollouts) -> Scores:
        """Some responses earn more than others, and no process is started to say so."""
        reward = (rollouts.response * rollouts.mask).sum(-1, keepdim=True) % 2
        return replace(score(task, rollouts), reward=reward.float())

    monkeypatch.setattr(TokenizedTask, "score", parity)
    return Trained(stack, tmp_path)


class Trained:
    """A model in a folder, a stand-in that serves it, and rows to train on."""

    def __init__(self, stack: ExitStack, folder: Path):
        self.folder, self.model = folder, write_tiny(folder / "tiny", max_position_embeddings=128)
        self.server = stack.enter_context(
            serving(AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32))
        )
        rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(8)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def __call__(self, name: str = "run", **more: Any) -> Run:
        settings = {"model": str(self.model), "engine.url": self.server.url} | SMALL | ENGINE | more
        return ascent.train(f"jsonl:{self.folder}/rows.jsonl", out=self.folder / name, show=False, **settings)


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        {"ahead": 2},
        {"ahead": 9, "algorithm": "dapo", "shaping": "no-shaping", "policy.lora": 4, "stop": ("b",)},
        {"ahead": 1, "advantage": "greedy", "eval_every": 1},
    ],
    ids=["grpo", "redraws and adapters, more than there are steps", "greedy baselines and evaluations"],
)
def test_a_run_samples_ahead_and_no_token_is_older_than_allowed(
    trained: Trained, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    load = Fleet.load

    def late(fleet: Fleet, version: int) -> None:
        """The learner is so slow that all is written before the next version."""
        assert not wait([future for server in fleet.servers for future in server.owed], 60).not_done
        load(fleet, version)

    monkeypatch.setattr(Fleet, "load", late)
    run = trained(**more)
    assert run.status == "finished"
    lags = [line.get("sampling/lag") or 0.0 for line in run.metrics]
    oldest = [min(step, more["ahead"]) for step in range(4)]
    if "redraws" in request.node.name:
        assert all(lag <= most for lag, most in zip(lags, oldest, strict=True)) and max(lags) > 0
    else:
        assert lags == oldest
    assert all((line["sampling/sampling_logp_difference/mean"] or 0) < 1e-5 for line in run.metrics)

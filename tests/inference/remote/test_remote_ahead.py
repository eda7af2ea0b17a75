"""Sampling ahead with a serving engine: it goes on writing while the learner trains, and new weights arrive in flight.

The server is a stand-in (tests/stand_in.py); tests/engines_vllm.py asks a real vLLM the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import ascent
from ascent.build.trained_run import Run
from ascent.core.errors import ConfigError, RunError
from ascent.core.protocols import PendingRollout, RolloutRequest
from ascent.core.types import Batch, Prompts, Rollouts, Scores
from ascent.inference.remote import server_pool, weight_probe
from ascent.inference.remote.remote_engine import RemoteEngine
from ascent.inference.remote.server_pool import ServerPool
from ascent.models import CausalLM
from ascent.rewards.tokenized_task import TokenizedTask
from ascent.runs import checkpoint
from ascent.runs.batch_serialization import pack_rollouts, unpack_rollouts
from ascent.runs.journal import Journal
from tests.inference.remote.test_remote_engine import EngineSetup, max_logprob_error
from tests.language import VOCAB, prompts_of, write_tiny
from tests.stand_in import StandIn, serving


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def rollout_requests(*steps: int, samples: int = 2) -> list[RolloutRequest]:
    return [RolloutRequest(step, Prompts.of(prompts_of()), samples) for step in steps]


def wait_until_held(server: StandIn, count: int) -> None:
    with server.lock:
        assert server.lock.wait_for(lambda: server.held == count, 60)


def resume_server(server: StandIn) -> None:
    with server.lock:
        server.hold_at = -1
        server.lock.notify_all()


def collect_step(engine: RemoteEngine, number: int) -> list[Rollouts]:
    """Return the groups of a step in order, after checking that each was yielded once."""
    done = {int(each.prompt_indices[0]): each.rollouts for each in engine.iter_finished(number, 60.0)}
    assert sorted(done) == [0, 1, 2]
    return [done[place] for place in sorted(done)]


def create_second_engine(setup: EngineSetup, stack: ExitStack) -> RemoteEngine:
    """Create an engine of the same policy on the same servers, as a resume does."""
    policy = CausalLM("tiny", engine="vllm", engine_url=tuple(server.url for server in setup.servers))
    engine = RemoteEngine(policy, setup.lm, 5, 32, 0.7, torch.Generator().manual_seed(2))
    engine.health_check_interval = 0.05
    stack.callback(engine.close)
    return engine


def setup_without_stop_tokens(stack: ExitStack, **more: Any) -> EngineSetup:
    """Return a setup whose responses always have the maximum length."""
    setup = EngineSetup(stack, **more)
    setup.lm.stop_token_ids = frozenset({VOCAB})
    setup.load(0)
    return setup


# ---- new weights in flight ----------------------------------------------------------------------------


@pytest.mark.long
def test_each_token_has_the_logprob_of_its_policy_version(stack: ExitStack) -> None:
    setup = setup_without_stop_tokens(stack)
    setup.server.hold_at = 2
    setup.engine.submit(rollout_requests(0, 1))
    wait_until_held(setup.server, 12)
    old = deepcopy(setup.lm)
    setup.perturb_weights()
    setup.load(1)
    resume_server(setup.server)
    for number in (0, 1):
        for rollouts in collect_step(setup.engine, number):
            version = rollouts.version.expand(rollouts.mask.shape)
            assert version[0, 0].tolist() == [0, 0, 1, 1, 1]
            assert max_logprob_error(old, rollouts, version == 0) < 1e-5
            assert max_logprob_error(setup.lm, rollouts, version == 1) < 1e-5
    assert not setup.engine.pending


@pytest.mark.long
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("kept", [False, True], ids=["computed anew", "old keys and values"])
def test_probe_covers_responses_that_continue_across_a_load(
    stack: ExitStack, kept: bool, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = setup_without_stop_tokens(stack, engine=engine)
    server, probe, sleep = setup.server, setup.engine.server_pool.probe, asyncio.sleep

    async def until_it_is_begun(_: float) -> None:
        while not server.probe_held:
            await sleep(0.001)

    monkeypatch.setattr(server_pool.asyncio, "sleep", until_it_is_begun)
    server.hold_at, server.keep_running = 0, kept
    setup.engine.submit(rollout_requests(0, 1))
    wait_until_held(server, 12)
    server.hold_probe_at = 3
    setup.perturb_weights()
    with pytest.raises(RunError, match="continues with an old KV cache") if kept else nullcontext():
        setup.load(1)
    resume_server(server)
    assert probe.continued == (3, 5)


@pytest.mark.long
def test_each_step_uses_the_same_seeds_with_and_without_ahead(stack: ExitStack) -> None:
    setup = setup_without_stop_tokens(stack)
    whole = []
    for number in range(3):
        setup.engine.submit(rollout_requests(number))
        whole.append(collect_step(setup.engine, number))
    early = create_second_engine(setup, stack)
    early.generator.manual_seed(1)
    early.load({}, 0)
    early.submit(rollout_requests(0, 1, 2))
    for number, groups in enumerate(whole):
        for one, other in zip(groups, collect_step(early, number), strict=True):
            assert torch.equal(one.response, other.response) and torch.equal(one.logp_sampler, other.logp_sampler)


@pytest.mark.long
def test_requests_of_earlier_steps_have_priority(stack: ExitStack) -> None:
    """Requests for the present step or an evaluation do not wait for requests ahead."""
    setup = setup_without_stop_tokens(stack, rows=1)
    setup.server.hold_at = 0
    setup.engine.submit(rollout_requests(0, 3))
    setup.engine.submit([replace(one, seed=7, samples=1) for one in rollout_requests(0)])
    wait_until_held(setup.server, 1)
    known = len(setup.server.asked)
    resume_server(setup.server)
    step_of = {}
    for one in setup.engine.pending:
        assert one.seeds is not None
        step_of |= dict.fromkeys(one.seeds.flatten().tolist(), (one.request.step, one.request.seed))
    list(setup.engine.iter_finished(0, 60.0))
    collect_step(setup.engine, 3)
    order = [step_of[body["sampling_params"]["seed"]] for body in setup.server.asked[known:]]
    assert order == [(0, None)] * 5 + [(0, 7)] * 3 + [(3, None)] * 6


# ---- checkpoints ------------------------------------------------------------------------------------


@pytest.mark.long
def test_checkpoint_keeps_complete_responses_and_the_rest_keep_their_seeds(stack: ExitStack) -> None:
    setup = setup_without_stop_tokens(stack)
    setup.server.hold_at = 2  # the first prompt allows two tokens, so its responses are whole
    prompts = Prompts(prompts_of(), torch.arange(3), limits=torch.tensor([2, 5, 5]))
    setup.engine.submit([RolloutRequest(number, prompts, 2) for number in (1, 2)])
    wait_until_held(setup.server, 8)
    while sum(len(complete_indices(one)) for one in setup.engine.snapshot_pending()) < 4:
        time.sleep(0.01)
    tensors, plain = pack_rollouts(setup.engine.snapshot_pending())
    setup.engine.close()
    pending = unpack_rollouts(tensors, plain)
    complete = {(i, *index) for i, one in enumerate(pending) for index in complete_indices(one)}
    assert len(complete) == 4 and [one.request.step for one in pending] == [1, 2]
    resume_server(setup.server)
    before = len(setup.server.asked)
    resumed = create_second_engine(setup, stack)
    resumed.pending = pending
    resumed.load({}, 0)
    groups = [collect_step(resumed, number) for number in (1, 2)]
    seeds = [body["sampling_params"]["seed"] for body in setup.server.asked[before + 2 :]]  # behind the probe
    expected = [
        int(one.seeds[index])
        for i, one in enumerate(pending)
        for index in response_indices(one)
        if (i, *index) not in complete
    ]
    assert sorted(seeds) == sorted(expected)
    for i, p, s in complete:
        assert torch.equal(groups[i][p].response[0, s], pending[i].rollouts.response[p, s])
        assert torch.equal(groups[i][p].logp_sampler[0, s], pending[i].rollouts.logp_sampler[p, s])


def response_indices(one: PendingRollout) -> list[tuple[int, int]]:
    return [(p, s) for p in range(len(one.request.prompts)) for s in range(one.request.samples)]


def complete_indices(one: PendingRollout) -> list[tuple[int, int]]:
    """Return the indices of responses that are complete in a checkpoint."""
    return [
        place
        for place in response_indices(one)
        if one.rollouts is not None and (one.unfinished is None or not one.unfinished[place])
    ]


@pytest.mark.long
def test_requests_before_the_first_load_wait(stack: ExitStack) -> None:
    setup = EngineSetup(stack)
    setup.engine.submit(rollout_requests(0))
    assert setup.engine.pending[0].seeds is not None and not setup.server.calls
    setup.load(0)
    collect_step(setup.engine, 0)


# ---- servers that fail -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("servers", [1, 2])
def test_server_that_dies_during_training_is_detected_at_the_next_load(stack: ExitStack, servers: int) -> None:
    setup = setup_without_stop_tokens(stack, servers=servers)
    setup.server.hold_at = 2
    setup.engine.submit(rollout_requests(0, 1))
    wait_until_held(setup.server, 12 if servers == 1 else 8)
    setup.server.hold_at = -1
    setup.server.kill()
    if servers == 1:
        setup.server.revive()
    setup.perturb_weights()
    setup.load(1)
    assert setup.engine.server_pool.servers[0].is_down is (servers == 2), "a single server has recovered"
    for number in (0, 1):
        for rollouts in collect_step(setup.engine, number):
            version = rollouts.version.expand(rollouts.mask.shape)
            assert max_logprob_error(setup.lm, rollouts, version == 1) < 1e-5
    loads = setup.server.calls.count("/finish_weight_update")
    assert loads == (2 if servers == 1 else 1), "weights were sent once more, for any number of lost responses"


@pytest.mark.long
@pytest.mark.smoke
def test_permanently_lost_server_is_tolerated_while_another_serves(stack: ExitStack) -> None:
    setup = EngineSetup(stack, servers=2)
    setup.load(0)
    setup.server.kill()
    for version in range(1, 7):
        setup.load(version)
        setup.engine.submit(rollout_requests(version))
        collect_step(setup.engine, version)
    assert setup.engine.server_pool.servers[0].is_down
    setup.server.revive()
    setup.load(7)
    assert not setup.engine.server_pool.servers[0].is_down and setup.server.version == "7"


@pytest.mark.long
def test_responses_of_an_externally_restarted_server_are_discarded(stack: ExitStack) -> None:
    setup = EngineSetup(stack)
    setup.load(0)
    setup.server.kill()
    setup.server.revive()
    rollouts = setup.generate()
    assert max_logprob_error(setup.lm, rollouts) < 1e-5 and (rollouts.version == 0).all()


@pytest.mark.smoke
@pytest.mark.parametrize("servers", [1, 2])
def test_twenty_kills_lose_and_duplicate_no_response(
    stack: ExitStack, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server is killed while it generates, loads weights or is probed: connections break and it restarts."""
    (
        monkeypatch.setattr(weight_probe, "MAX_RESPONSE_TOKENS", 2),
        monkeypatch.setattr(server_pool, "MAX_CONSECUTIVE_FAILURES", 20),
    )
    setup, rng, ahead = EngineSetup(stack, servers=servers, rows=3), random.Random(servers), 2
    for server in setup.servers:
        server.kills = [rng.randrange(90) for _ in range(20 // servers)]
    number, asked = 0, dict[int, int]()
    while any(server.kills for server in setup.servers):
        setup.load(number)
        for later in range(number, number + ahead + 1):
            if later not in asked.values():
                setup.engine.submit(rollout_requests(later, samples=3))
                (seeds,) = [one.seeds for one in setup.engine.pending if one.request.step == later]
                assert seeds is not None
                asked |= dict.fromkeys(seeds.flatten().tolist(), later)
        groups = collect_step(setup.engine, number)
        versions = torch.cat([each.version.expand(each.mask.shape)[each.mask] for each in groups])
        assert number - ahead <= int(versions.min()) <= int(versions.max()) <= number
        assert [one.request.step for one in setup.engine.pending] == [number + 1, number + 2]
        setup.perturb_weights(0.01)
        number += 1
        assert number < 100
    bodies = [body for server in setup.servers for body in server.asked if body]  # one that was given up may be empty
    sent = {body["sampling_params"]["seed"] for body in bodies} - {0, 1}  # probes
    assert sent <= asked.keys() and number > 1


# ---- whole runs -----------------------------------------------------------------------------------------


ENGINE = {"engine": "vllm", "max_prompt": 64, "threads": 1, "policy.device": "cpu"}
SMALL = {"steps": 4, "prompts": 2, "samples": 2, "max_tokens": 4, "eval_prompts": 2, "lr": 1e-3, "checkpoint_every": 9}


@pytest.fixture
def trained(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    (
        monkeypatch.setattr(weight_probe, "MAX_PROMPT_TOKENS", 20),
        monkeypatch.setattr(weight_probe, "MAX_RESPONSE_TOKENS", 2),
    )
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

    def __call__(self, **more: Any) -> Run:
        settings = {"model": str(self.model), "engine.url": self.server.url} | SMALL | ENGINE | more
        return ascent.train(f"jsonl:{self.folder}/rows.jsonl", out=self.folder / "run", show=False, **settings)


def be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner is so slow that all that was asked for is written before the next version."""
    load = ServerPool.load_weights

    def late(served: ServerPool, version: int) -> None:
        assert not wait([future for server in served.servers for future in server.in_flight], 60).not_done
        load(served, version)

    monkeypatch.setattr(ServerPool, "load_weights", late)


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        {"ahead": 2},
        pytest.param(
            {"ahead": 9, "algorithm": "dapo", "shaping": "no-shaping", "policy.lora": 4, "stop": ("b",)},
            marks=pytest.mark.smoke,
        ),
        pytest.param({"ahead": 1, "advantage": "greedy", "eval_every": 1}, marks=pytest.mark.smoke),
    ],
    ids=["grpo", "redraws and adapters, more than there are steps", "greedy baselines and evaluations"],
)
def test_run_samples_ahead_within_the_staleness_limit(
    trained: Trained, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    be_slow(monkeypatch)
    run = trained(**more)
    assert run.status == "finished"
    lags = [line.get("sampling/lag") or 0.0 for line in run.metrics]
    oldest = [min(step, more["ahead"]) for step in range(4)]
    if "redraws" in request.node.name:
        assert all(lag <= most for lag, most in zip(lags, oldest, strict=True)) and max(lags) > 0
    else:
        assert lags == oldest
    assert all((line["sampling/sampling_logp_difference/mean"] or 0) < 1e-5 for line in run.metrics)


# ---- the journal -----------------------------------------------------------------------------------------


def numbers(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in run.metrics]


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "journal").glob("*"))


KILLS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "before its update": ("write", 3, {"checkpoint_every": 2, "eval_every": 1}),
    "while a step is drawn": ("read", 3, {"algorithm": "dapo", "shaping": "no-shaping", "policy.lora": 4, "epochs": 2}),
    "without sampling ahead": ("write", 2, {"ahead": 0, "advantage": "greedy", "minibatches": 2}),
}


@pytest.mark.long
@pytest.mark.smoke
@pytest.mark.parametrize("kill", KILLS)
def test_killed_run_replays_its_journal_bitwise(trained: Trained, kill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kill leaves is a copy of the folder from that moment. Resumed, nothing of the engine is as it was."""
    moment, at, more = KILLS[kill]
    left, act = trained.folder / "left", getattr(Journal, moment)

    def acts(journal: Journal, step: int, *rest: Any) -> Any:
        done = act(journal, step, *rest)
        if step == at and not left.exists():
            shutil.copytree(trained.folder / "run", left)
        return done

    with monkeypatch.context() as patch:
        be_slow(patch)
        patch.setattr(Journal, moment, acts)
        whole = trained(**{"ahead": 2, "steps": 5, "record_rollouts": "all", "checkpoint_every": 4, "keep": 9} | more)
    assert not (whole.folder / "journal").exists(), "the last checkpoint has all"
    kept = [name for name in entries(left) if name.startswith("step")]
    first = 2 if more.get("checkpoint_every") else 0
    until = at + (moment == "write")
    assert kept == [f"step_{step:06d}" for step in range(first, until)]
    asked, calls = len(trained.server.asked), len(trained.server.calls)
    again = ascent.resume(left)
    assert numbers(again)[:until] == numbers(whole)[:until] and again.status == "finished"
    assert [again.rollouts(step) for step in range(until)] == [whole.rollouts(step) for step in range(until)]
    if "eval_every" in more:
        assert [again.held_out(step) for step in range(until)] == [whole.held_out(step) for step in range(until)]
    if until == 4:
        states = [run.folder / "checkpoints" / "step_000004" / "optimizer.safetensors" for run in (whole, again)]
        assert states[0].read_bytes() == states[1].read_bytes()
    assert trained.server.calls[calls:].count("/update_weights") == 6 - until, "weights are sent when they are needed"
    bodies = [one["sampling_params"] for one in trained.server.asked]
    old, new = ([one for one in part if "stop_token_ids" in one] for part in (bodies[:asked], bodies[asked:]))
    if "algorithm" not in more:  # no redraws
        seeds = [[one["seed"] for one in part if "seed" in one] for part in (old, new)]
        assert len(seeds[1]) == 4 * (5 - until), "what is in the journal is not drawn again"
        assert set(seeds[1]) <= set(seeds[0] if more.get("ahead") != 0 else seeds[0][-8:]), "and the rest has its seeds"
    if "eval_every" in more:
        assert sum("seed" not in one for one in new) == 2 * (6 - until), "nor is an evaluation that was over"


def small_batch() -> Batch:
    shape = (2, 3)
    return Batch(
        prompt=torch.tensor([[1, 2], [3, -1]]),
        response=torch.randint(9, (*shape, 4)).transpose(0, 1).contiguous().transpose(0, 1),
        mask=torch.rand(*shape, 4) < 0.7,
        logp_sampler=torch.randn(*shape, 4),
        limit=4,
        truncated=torch.rand(shape) < 0.5,
        version=torch.randint(3, (*shape, 4)),
        reward=torch.randn(*shape, 1, dtype=torch.float64),
        valid=torch.ones(shape, dtype=torch.bool),
        errors=("one", "two"),
        measures=torch.randn(*shape, 1),
        measure_names=("length",),
        notes=np.array([["a", None, "ü\udc80"]] * 2, dtype=object),
    )


def test_journal_entry_round_trips(tmp_path: Path) -> None:
    journal, batch = Journal(tmp_path), small_batch()
    written, metrics = journal.write(7, batch, {"reward": 0.1, "n": 3, "odd": float("nan")}), {"reward": 0.1, "n": 3}
    read = journal.read(7)
    assert read is not None and {k: v for k, v in read[1].items() if k != "odd"} == metrics
    for name, value in vars(batch).items():
        for other in (getattr(written, name), getattr(read[0], name)):
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other) and value.dtype == other.dtype and other.is_contiguous()
            elif isinstance(value, np.ndarray):
                assert (value == other).all()
            else:
                assert value == other and type(value) is type(other)


def test_journal_entries_that_are_not_replayed_are_dropped(tmp_path: Path) -> None:
    journal, batch = Journal(tmp_path), small_batch()
    for step in (2, 3, 5):
        journal.write(step, batch, {})
    (journal.folder / ".writing-step_000004").mkdir()
    assert [journal.first_new_step(first) for first in (1, 2, 5)] == [1, 4, 6]
    journal.keep(2, 4)
    assert entries(tmp_path) == ["step_000002", "step_000003"]
    journal.keep(4)
    assert not journal.folder.exists()


def test_journal_entry_of_the_first_regenerated_step_is_dropped(tmp_path: Path) -> None:
    journal, batch = Journal(tmp_path), small_batch()
    for step in (2, 3, 4, 5):
        journal.write(step, batch, {})
    journal.keep(3, 4)
    assert entries(tmp_path) == ["step_000003"]


@pytest.mark.parametrize("damage", ["a byte", "a file", "no batch", "another field", "words for numbers"])
def test_damaged_journal_entry_is_rejected_by_name(tmp_path: Path, damage: str) -> None:
    journal = Journal(tmp_path)
    journal.write(3, small_batch(), {"reward": 0.5})
    path = journal.folder / "step_000003"
    if damage == "a byte":
        data = bytearray((path / "batch.safetensors").read_bytes())
        data[-1] ^= 1
        (path / "batch.safetensors").write_bytes(bytes(data))
    elif damage == "a file":
        (path / "state.json").unlink()
    else:
        groups, saved = checkpoint.read_verified(path)
        odd = {"no batch": {"batch": None}, "another field": {"batch": {"more": 1}}, "words for numbers": {}}[damage]
        checkpoint.write_atomically(path, groups, saved | {"metrics": {"reward": "much"}} | odd, {"step": 3})
    with pytest.raises(ConfigError, match=r"journal/step_000003 is damaged.*remove it"):
        journal.first_new_step(3)


@pytest.mark.long
@pytest.mark.smoke
def test_failed_step_is_regenerated_and_changed_ahead_is_rejected(trained: Trained) -> None:
    with pytest.raises(RunError, match="--max-mismatch"):
        trained(max_mismatch=1e-12, ahead=2, checkpoint_every=1)
    folder = trained.folder / "run"
    assert not entries(folder), "a resume would make the same trouble again"
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"max_mismatch": 1.0}))
    for step in ascent.steps(Run(folder)):
        if step.number == 1:
            break
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"ahead": 1}))
    with pytest.raises(ConfigError, match="Set it to 2 or more"):
        ascent.resume(folder)
    (folder / "config.json").write_text(json.dumps(settings | {"ahead": 3}))
    assert ascent.resume(folder).status == "finished"

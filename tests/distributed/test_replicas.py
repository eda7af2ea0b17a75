"""Replicas that draw for a learner, without Ray: who dies, hangs or comes back changes no token.

`make cluster-test` does the same with Ray and real processes (tests/cluster_ray.py).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from language import model_of, prompts_of, sampler_of
from torch import Tensor

import ascent
from ascent.cli.cluster import forward_output
from ascent.cli.main import main
from ascent.core.errors import RunError
from ascent.core.protocols import RolloutRequest
from ascent.core.types import Prompts, Rollouts, join
from ascent.distributed import replica_dispatch
from ascent.distributed.ranks import CLUSTER_VARIABLE
from ascent.distributed.replica import REPLICA_LOG, Replica
from ascent.distributed.replica_errors import ReplicaLostError
from ascent.rollout import ray_replicas as joining
from ascent.rollout.replica_engine import ReplicaEngine
from ascent.runs.display.terminal import Display
from ascent.runs.replica_log import replica_events, replicas_of
from ascent.workflows.ray_cluster import build_replica_engines
from tests.inference.remote.test_remote_engine import fake_environment

FIVE = Prompts.of(prompts_of((5, 2, 7, 3, 4)))
CLOSING: list[ReplicaEngine] = []


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replica_dispatch, "RETRY_DELAY", 0.001)
    monkeypatch.setattr(replica_dispatch, "REPLICA_STARTUP_TIMEOUT", 0.0)
    yield
    while CLOSING:
        CLOSING.pop().close()


class Calls:
    """Replicas of this process. `fates`: of each call by its number, what becomes of its replica."""

    def __init__(self, count: int, fates: dict[int, str] | None = None):
        self.there = [f"sampler-{i}" for i in range(count)]
        self.fates, self.calls, self.was_restarted = fates or {}, 0, list[str]()
        self.replicas: dict[str, Replica] = {}
        self.drawn: dict[str, list[int]] = {}
        self.hanging: dict[str, Future[Any]] = {}

    def names(self) -> list[str]:
        return list(self.there)

    def new(self) -> Replica:
        sampler = sampler_of(model_of("Llama", seed=9), limit=6)
        return Replica(lambda _: (sampler, sampler))

    def put(self, params: dict[str, Tensor]) -> Any:
        return {name: one.clone() for name, one in params.items()}

    def load(self, name: str, weights: Any, version: int, config: dict[str, Any]) -> Future[Any]:
        return self.call(name, "load", weights, version, config)

    def call(self, name: str, method: str, *args: Any) -> Future[Any]:
        self.calls += 1
        call: Future[Any] = Future()
        fate = self.fates.get(self.calls, "")
        if fate == "hangs":
            self.hanging[name] = call
            return call
        try:
            call.set_result(self.do(name, method, fate, *args))
        except Exception as error:
            call.set_exception(error)
        return call

    def do(self, name: str, method: str, fate: str, *args: Any) -> Any:
        if fate:
            self.replicas.pop(name, None)
        if fate == "dies":
            raise ReplicaLostError("killed")
        if fate == "is over":
            raise ReplicaLostError("killed for good", is_permanent=True)
        if fate == "answers with other weights":
            args = ({k: v + 0.5 for k, v in args[0].items()}, *args[1:])
        found = getattr(self.replicas.setdefault(name, self.new()), method)(*args)
        if method == "generate":
            self.drawn.setdefault(name, []).append(args[0])
        return found

    def result(self, call: Future[Any]) -> Any:
        return call.result()

    def restart(self, name: str) -> None:
        self.was_restarted.append(name)
        self.hanging.pop(name).set_exception(ReplicaLostError("killed"))


def begun(crew: Any, deadline: float = 600.0, folder: Path | None = None) -> ReplicaEngine:
    own = sampler_of(model_of("Llama"), limit=6)
    sampler = ReplicaEngine(own, own, crew, {}, deadline)
    CLOSING.append(sampler)
    sampler.folder = folder
    before = sampler.generate(FIVE[torch.arange(1)], 1, seed=3)  # before the first load rank 0 draws by itself
    assert crew.calls == 0 and before.response.shape[:2] == (1, 1)
    sampler.load(own.lm.trained(), 1)
    return sampler


def drawn(crew: Any, deadline: float = 600.0, greedy: bool = False) -> tuple[Rollouts, ReplicaEngine]:
    sampler = begun(crew, deadline)
    return sampler.generate(FIVE, 3, greedy, seed=7), sampler


def alone(greedy: bool = False) -> Rollouts:
    own = sampler_of(model_of("Llama"), limit=6)
    return own.generate(FIVE, 3, greedy, seed=7)


def equal(one: Rollouts, two: Rollouts) -> bool:
    return torch.equal(one.response, two.response) and torch.allclose(one.logp_sampler, two.logp_sampler, atol=1e-12)


@pytest.mark.long
def test_replicas_draw_what_one_sampler_draws() -> None:
    for count, greedy in ((1, False), (3, True)):
        found, _ = drawn(Calls(count), greedy=greedy)
        assert equal(found, alone(greedy)), count


@pytest.mark.long
def test_whoever_dies_at_whatever_call_no_token_changes(capsys: pytest.CaptureFixture[str]) -> None:
    for call in range(1, 5):  # two loads, two draws
        crew = Calls(2, {call: "dies"})
        found, sampler = drawn(crew)
        assert equal(found, alone()) and len(sampler.dispatcher.states) == 2, call
        assert "was lost; other replicas generate its responses" in capsys.readouterr().err
    found, _ = drawn(Calls(2, {3: "dies", 4: "dies", 5: "dies"}))
    assert equal(found, alone())


def test_a_replica_that_hangs_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_dispatch, "TIMEOUT_CHECK_INTERVAL", 0.0)
    crew = Calls(2, {3: "hangs"})
    found, _ = drawn(crew, deadline=0.01)
    assert equal(found, alone()) and crew.was_restarted
    monkeypatch.setattr(replica_dispatch, "REPLICA_STARTUP_TIMEOUT", 600.0)
    crew = Calls(2, {1: "hangs"})
    assert equal(drawn(crew, deadline=0.0)[0], alone()) and not crew.was_restarted, "a start takes its time"


class Stuck(Calls):
    """Replicas whose calls do not even end when they are started again."""

    def restart(self, name: str) -> None:
        self.was_restarted.append(name)


def test_a_replica_whose_call_does_not_end_by_a_restart_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replica_dispatch, "TIMEOUT_CHECK_INTERVAL", 0.0)
    crew = Stuck(2, {3: "hangs"})
    found, sampler = drawn(crew, deadline=0.05)
    assert equal(found, alone())
    (stuck,) = crew.was_restarted
    assert list(sampler.dispatcher.states) == [name for name in crew.there if name != stuck]
    assert "it did not end within 0.05 seconds" in capsys.readouterr().err


@pytest.mark.long
def test_a_replica_that_does_not_come_back_is_left_out_and_the_last_one_ends_the_run() -> None:
    for fates in ({2: "is over"}, {4: "is over"}):
        found, sampler = drawn(Calls(2, fates))
        assert equal(found, alone()) and len(sampler.dispatcher.states) == 1
        assert equal(sampler.generate(FIVE, 3, seed=7), alone()), "it is not asked again"
    with pytest.raises(RunError, match="no sampler of the cluster is left"):
        drawn(Calls(1, {1: "is over"}))
    with pytest.raises(RunError, match="no sampler of the cluster is left"):
        drawn(Calls(1, dict.fromkeys(range(1, 10_000), "dies")), deadline=0.05)
    many = Calls(1, dict.fromkeys(range(1, 9), "dies"))
    assert equal(drawn(many)[0], alone()) and many.calls > 9, "a long start is waited for"


def test_a_replica_with_other_weights_is_found_by_its_probe() -> None:
    with pytest.raises(RunError, match=r"log-probs .* from the learner's"):
        drawn(Calls(2, {1: "answers with other weights"}))


def test_a_replica_that_has_no_weights_draws_nothing() -> None:
    with pytest.raises(ReplicaLostError, match="version -1"):
        Replica(build_replica_engines).generate(1, FIVE[torch.arange(1)], 1, None, None)
    assert Replica(build_replica_engines).status()["version"] == -1


def test_what_a_cluster_cannot_do_is_refused_before_anything_starts(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "Say {i}.", "answer": "{i}"}}\n' for i in range(8)))
    train = ("train", "jsonl:rows.jsonl", "--model", tiny_folder)
    engine = ("--engine", "vllm", "--engine.url", "http://127.0.0.1:8000")
    nccl = ("--engine", "vllm", "--engine.python", tmp_path, "--engine.transport", "nccl")
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((), "takes train TASK"),
        (("plan", "run"), "takes train TASK"),
        (("train", "sort"), "is for language models"),
        (("--samplers", 0, *train), "samplers"),
        (("--learners", -1, *train), "learners"),
        (("--restarts", 2, *train), "needs --out"),
        (("--restarts", -1, *train), "restarts"),
        (("add",), "add COUNT"),
        (("add", "0"), "is 1 or more"),
        (("status", "nowhere"), "there is no such folder"),
        (("resume",), "takes only the run's folder"),
        (("resume", "nowhere"), "there is no such folder"),
        ((*train, "--tools", "calculator"), "played by the learner"),
        ((*train, *engine), "each replica starts its own server"),
        ((*train, *nccl), "share a GPU"),
        ((*train, "--stepz", 1), "no such flag"),
    ]
    for args, words in cases:
        assert main(["cluster", *map(str, args)]) == 2, args
        assert words in capsys.readouterr().err, args


def test_without_ray_the_extra_is_named(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "Say {i}.", "answer": "{i}"}}\n' for i in range(8)))
    for args in (["status"], ["train", "jsonl:rows.jsonl", "--model", str(tiny_folder)]):
        assert main(["cluster", *args]) == 2 and "ascent-rl[cluster]" in capsys.readouterr().err


# ---- ahead of a step


def two_steps(crew: Any, hold: bool = False) -> tuple[list[Rollouts], ReplicaEngine]:
    """The responses of two steps with --ahead 1: weights change after the first, and both are asked for before."""
    sampler = begun(crew)
    sampler.submit([RolloutRequest(0, FIVE, 2, seed=5), RolloutRequest(1, FIVE, 2, seed=6)])
    if hold:
        assert all(one.rollouts is not None for one in sampler.snapshot_pending())
    found = []
    for step in (0, 1):
        parts = sorted(sampler.iter_finished(step, 60), key=lambda one: int(one.prompt_indices[0]))
        indices = torch.cat([one.prompt_indices for one in parts])
        assert sorted(indices.tolist()) == [0, 1, 2, 3, 4], "each group once"
        found.append(join([one.rollouts for one in parts]).select(indices.argsort()))
        sampler.load({name: p + 0.1 for name, p in sampler.local_engine.lm.trained().items()}, step + 2)
        for name in list(crew.hanging):
            crew.restart(name)
    assert sampler.pending == ()
    return found, sampler


@pytest.mark.long
def test_ahead_a_step_has_the_tokens_of_the_policy_that_was_asked_whoever_dies_and_whenever() -> None:
    own = sampler_of(model_of("Llama"), limit=6)
    expected = [own.generate(FIVE, 2, seed=seed) for seed in (5, 6)]
    for fates in ({}, {4: "dies"}, {5: "dies", 6: "dies"}, {6: "is over"}, {6: "hangs"}):
        found, _ = two_steps(crew := Calls(2, dict(fates)))
        assert all(map(equal, found, expected)), fates
        assert {int(v) for one in found for v in one.version.flatten()} == {1}, "though version 2 was there for some"
    assert crew.was_restarted
    found, _ = two_steps(Calls(1), hold=True)
    assert all(map(equal, found, expected)), "a checkpoint in between waits for what is drawn, and changes nothing"


# ---- samplers that come and go


@pytest.mark.long
def test_a_sampler_that_joins_gets_weights_first_and_one_that_leaves_draws_nothing_more() -> None:
    crew = Calls(1)
    one, sampler = drawn(crew)
    crew.there.append("sampler-1")
    sampler.load(sampler.local_engine.lm.trained(), 2)
    until_drawn = sampler.generate(FIVE, 3, seed=7)  # greeted by now
    two = sampler.generate(FIVE, 3, seed=7)
    assert set(crew.drawn["sampler-1"]) == {2} and sampler.dispatcher.num_chunks == 2
    assert torch.equal(one.response, two.response) and torch.equal(until_drawn.response, two.response)
    crew.replicas["sampler-0"].drain()
    count = len(crew.drawn["sampler-0"])
    assert equal(sampler.generate(FIVE, 3, seed=7), two), "the cut stays, so the bits do"
    assert list(sampler.dispatcher.states) == ["sampler-1"] and len(crew.drawn["sampler-0"]) == count
    sampler.load(sampler.local_engine.lm.trained(), 3)
    assert equal(sampler.generate(FIVE, 3, seed=7), two) and "sampler-0" not in sampler.dispatcher.states


# ---- records


@pytest.mark.long
def test_records_say_who_drew_what_and_who_was_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampler = begun(Calls(2, {3: "dies"}), folder=tmp_path / "engine")
    for version in (2, 3):
        sampler.submit([RolloutRequest(version - 2, FIVE, 3, seed=7)])
        list(sampler.iter_finished(version - 2, 60))
        sampler.load(sampler.local_engine.lm.trained(), version)
    sampler.close()
    learners, *rows = replicas_of(tmp_path)
    assert learners["version"] == 3 and 0 <= learners["idle"] <= 1
    assert [row["name"] for row in rows] == ["sampler-0", "sampler-1"] and sum(row["lost"] for row in rows) == 1
    assert sum(row["tokens"] for row in rows) == 2 * int(alone().mask.sum()) and all(row["rate"] > 0 for row in rows)
    (event,) = replica_events(tmp_path)
    assert (event["event"], event["why"]) == ("lost", "killed")
    assert "sampler-" in capsys.readouterr().err

    with (tmp_path / "engine" / REPLICA_LOG).open("a") as file:
        odd = [{}, [], {"time": 1, "event": 3}, {"time": 1, "replicas": {"x": {}}}, {"time": "now", "event": "lost"}]
        odd.append({"time": 1, "seconds": 1, "waited": 0, "version": 9, "replicas": [1]})
        file.write("".join(f"{json.dumps(line)}\n" for line in odd) + "{\nnonsense\n\xff\n" + '{"time"')
    assert replicas_of(tmp_path)[1:] == rows and replica_events(tmp_path) == [event], "other lines are left out"
    assert replicas_of(tmp_path / "nowhere") == [] == replica_events(tmp_path / "nowhere")


def test_the_command_prints_what_the_samplers_of_a_run_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,500 tokens in 2 s of drawing; 2 of 4 s drawing and 1 s loading leave a quarter idle."""
    monkeypatch.chdir(tmp_path)
    ascent.train("sort", steps=1, prompts=2, eval_prompts=2, out="run", show=False)
    assert main(["cluster", "status", "run"]) == 0
    assert capsys.readouterr().out == "run was not trained on a cluster.\n"
    one = {"version": 7, "tokens": 1500, "drawing": 2.0, "loading": 1.0, "lost": 3, "away": True}
    line = {"time": 1.0, "seconds": 4.0, "waited": 1.0, "version": 8, "replicas": {"sampler-0": one}}
    Path("run/engine").mkdir()
    Path("run/engine", REPLICA_LOG).write_text(json.dumps(line) + "\n")
    assert main(["cluster", "status", "run"]) == 0
    head, *rows = [text.split() for text in capsys.readouterr().out.splitlines()]
    assert head == ["name", "state", "version", "tokens", "rate", "idle", "loading", "lost"]
    assert ["learners", "train", "8", "·", "·", "25%", "·", "·"] in rows
    assert ["sampler-0", "away", "7", "1,500", "750/s", "25%", "25%", "3"] in rows
    assert main(["cluster", "--json", "status", "run"]) == 0
    assert [actor["name"] for actor in json.loads(capsys.readouterr().out)["actors"]] == ["learners", "sampler-0"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_learners_output_is_passed_on_to_the_same_stream(stream: str, capsys: pytest.CaptureFixture[str]) -> None:
    forward_output(stream, b"step 1 \xff\n")
    out, err = capsys.readouterr()
    assert (out, err) == (("step 1 \ufffd\n", "") if stream == "stdout" else ("", "step 1 \ufffd\n"))


# ---- whole runs


class Local(Calls):
    """Replicas of this process, made as a sampler's actor makes them."""

    def __init__(self, count: int, fates: dict[int, str] | None = None):
        super().__init__(count, fates)
        self.made: list[Replica] = []

    def new(self) -> Replica:
        self.made.append(Replica(build_replica_engines))
        return self.made[-1]

    def close(self) -> None:
        """End the servers of all replicas: one that is lost here leaves its own running."""
        for replica in self.made:
            if replica.engine is not None:
                replica.engine.close()


def trained(folder: Path, crew: Calls | None, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    monkeypatch.setattr(joining, "cluster_replicas", lambda *_: crew)
    usual = {"prompts": 2, "samples": 3, "max_tokens": 5, "eval_prompts": 2, "lr": 1e-2, "steps": 3} | settings
    run = ascent.train(
        [{"prompt": f"Say {i}."} for i in range(8)],
        reward=ascent.Reward(noise, in_process=True),
        out=folder,
        show=False,
        preflight=False,
        **usual,
    )
    lines = [{k: v for k, v in line.items() if "time" not in k} for line in [*run.metrics, *run.updates]]
    return run, lines


def noise(response: str) -> float:
    return zlib.crc32(response.encode()) % 97 / 97


@pytest.mark.smoke
def test_a_run_with_one_replica_has_the_numbers_of_one_process_and_goes_on_after_an_interrupt(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = trained(tmp_path / "alone", None, monkeypatch, model=str(tiny_folder))
    run, found = trained(tmp_path / "one", crew := Local(1, {3: "dies"}), monkeypatch, model=str(tiny_folder))
    assert found == expected and set(crew.drawn["sampler-0"]) == {0, 1, 2, 3}
    assert replicas_of(run.folder)[1]["lost"] == 1

    ahead = {"model": str(tiny_folder), "ahead": 1, "checkpoint_every": 2, "keep": 9}
    run, whole = trained(tmp_path / "ahead", Local(2), monkeypatch, **ahead)
    monkeypatch.setattr(joining, "cluster_replicas", lambda *_: Local(2, {2: "dies"}))
    again = ascent.resume(run.folder, Display(), 2)
    lines = [{k: v for k, v in line.items() if "time" not in k} for line in [*again.metrics, *again.updates]]
    assert lines == whole, "what was drawn ahead is in the checkpoint"


# ---- replicas with a serving engine


@pytest.mark.smoke
def test_replicas_with_an_engine_draw_with_a_server_of_their_own_and_a_killed_one_changes_no_token(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, warm_python: Any
) -> None:
    monkeypatch.setenv(CLUSTER_VARIABLE, "nowhere run")  # rank 0 draws nothing with an engine
    venv = fake_environment(tmp_path, warm_python.executable)
    settings = {"model": str(tiny_folder), "engine": "vllm", "engine.python": str(venv), "temperature": 0.8}
    run, whole = trained(tmp_path / "whole", one := Local(1), monkeypatch, **settings)
    assert set(one.drawn["sampler-0"]) == {0, 1, 2, 3}
    assert run.config.old_logp == "learner"
    _, killed = trained(tmp_path / "killed", two := Local(1, {3: "dies", 6: "dies"}), monkeypatch, **settings)
    assert killed == whole and replicas_of(tmp_path / "killed")[1]["lost"] == 2
    for crew in (one, two):
        crew.close()


class Ends(Local):
    """Whose replicas end for good when they are to draw with version 2."""

    def do(self, name: str, method: str, fate: str, *args: Any) -> Any:
        return super().do(name, method, "is over" if method == "generate" and args[0] == 2 else fate, *args)


@pytest.mark.smoke
def test_a_run_with_an_engine_that_lost_its_samplers_replays_its_journal_and_draws_the_rest(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, warm_python: Any
) -> None:
    monkeypatch.setenv(CLUSTER_VARIABLE, "nowhere run")
    venv = fake_environment(tmp_path, warm_python.executable)
    settings: dict[str, Any] = {"model": str(tiny_folder), "engine": "vllm", "engine.python": str(venv)}
    settings |= {"steps": 4, "ahead": 1, "checkpoint_every": 2}
    _, whole = trained(tmp_path / "whole", first := Local(1), monkeypatch, **settings)
    with pytest.raises(RunError, match="no sampler of the cluster is left"):
        trained(tmp_path / "run", second := Ends(1), monkeypatch, **settings)
    third = Local(1)
    monkeypatch.setattr(joining, "cluster_replicas", lambda *_: third)
    again = ascent.resume(tmp_path / "run", Display())
    lines = [{k: v for k, v in line.items() if "time" not in k} for line in [*again.metrics, *again.updates]]
    assert lines == whole
    assert set(third.drawn["sampler-0"]) == {2, 4}, "the last step ahead and the evaluation: step 2 is in the journal"
    for crew in (first, second, third):
        crew.close()

"""Replicas that generate for a learner, without Ray. Failures, hangs and restarts change no token.

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

FIVE_PROMPTS = Prompts.of(prompts_of((5, 2, 7, 3, 4)))
OPEN_ENGINES: list[ReplicaEngine] = []


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replica_dispatch, "RETRY_DELAY", 0.001)
    monkeypatch.setattr(replica_dispatch, "REPLICA_STARTUP_TIMEOUT", 0.0)
    yield
    while OPEN_ENGINES:
        OPEN_ENGINES.pop().close()


class InProcessReplicas:
    """Replicas in this process. `failures`: by number of the call, how its replica fails."""

    def __init__(self, count: int, failures: dict[int, str] | None = None):
        self.replica_names = [f"sampler-{i}" for i in range(count)]
        self.failures, self.calls, self.was_restarted = failures or {}, 0, list[str]()
        self.replicas: dict[str, Replica] = {}
        self.generated_versions: dict[str, list[int]] = {}
        self.hanging: dict[str, Future[Any]] = {}

    def names(self) -> list[str]:
        return list(self.replica_names)

    def create(self) -> Replica:
        engine = sampler_of(model_of("Llama", seed=9), limit=6)
        return Replica(lambda _: (engine, engine))

    def put(self, params: dict[str, Tensor]) -> Any:
        return {name: one.clone() for name, one in params.items()}

    def load(self, name: str, weights: Any, version: int, config: dict[str, Any]) -> Future[Any]:
        return self.call(name, "load", weights, version, config)

    def call(self, name: str, method: str, *args: Any) -> Future[Any]:
        self.calls += 1
        call: Future[Any] = Future()
        failure = self.failures.get(self.calls, "")
        if failure == "hangs":
            self.hanging[name] = call
            return call
        try:
            call.set_result(self.do(name, method, failure, *args))
        except Exception as error:
            call.set_exception(error)
        return call

    def do(self, name: str, method: str, failure: str, *args: Any) -> Any:
        if failure:
            self.replicas.pop(name, None)
        if failure == "dies":
            raise ReplicaLostError("killed")
        if failure == "is over":
            raise ReplicaLostError("killed for good", is_permanent=True)
        if failure == "answers with other weights":
            args = ({k: v + 0.5 for k, v in args[0].items()}, *args[1:])
        result = getattr(self.replicas.setdefault(name, self.create()), method)(*args)
        if method == "generate":
            self.generated_versions.setdefault(name, []).append(args[0])
        return result

    def result(self, call: Future[Any]) -> Any:
        return call.result()

    def restart(self, name: str) -> None:
        self.was_restarted.append(name)
        self.hanging.pop(name).set_exception(ReplicaLostError("killed"))


def start_engine(replica_set: Any, deadline: float = 600.0, folder: Path | None = None) -> ReplicaEngine:
    local_engine = sampler_of(model_of("Llama"), limit=6)
    engine = ReplicaEngine(local_engine, local_engine, replica_set, {}, deadline)
    OPEN_ENGINES.append(engine)
    engine.folder = folder
    before = engine.generate(FIVE_PROMPTS[torch.arange(1)], 1, seed=3)  # before the first load, rank 0 generates
    assert replica_set.calls == 0 and before.response.shape[:2] == (1, 1)
    engine.load(local_engine.lm.trained(), 1)
    return engine


def generate_on_replicas(
    replica_set: Any, deadline: float = 600.0, greedy: bool = False
) -> tuple[Rollouts, ReplicaEngine]:
    engine = start_engine(replica_set, deadline)
    return engine.generate(FIVE_PROMPTS, 3, greedy, seed=7), engine


def local_rollouts(greedy: bool = False) -> Rollouts:
    local_engine = sampler_of(model_of("Llama"), limit=6)
    return local_engine.generate(FIVE_PROMPTS, 3, greedy, seed=7)


def same_rollouts(one: Rollouts, two: Rollouts) -> bool:
    return torch.equal(one.response, two.response) and torch.allclose(one.logp_sampler, two.logp_sampler, atol=1e-12)


@pytest.mark.long
def test_replicas_match_the_local_engine() -> None:
    for count, greedy in ((1, False), (3, True)):
        rollouts, _ = generate_on_replicas(InProcessReplicas(count), greedy=greedy)
        assert same_rollouts(rollouts, local_rollouts(greedy)), count


@pytest.mark.long
def test_replica_failure_at_any_call_changes_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    for call in range(1, 5):  # two loads, two draws
        replica_set = InProcessReplicas(2, {call: "dies"})
        rollouts, engine = generate_on_replicas(replica_set)
        assert same_rollouts(rollouts, local_rollouts()) and len(engine.dispatcher.states) == 2, call
        assert "was lost; other replicas generate its responses" in capsys.readouterr().err
    rollouts, _ = generate_on_replicas(InProcessReplicas(2, {3: "dies", 4: "dies", 5: "dies"}))
    assert same_rollouts(rollouts, local_rollouts())


def test_hanging_replica_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_dispatch, "TIMEOUT_CHECK_INTERVAL", 0.0)
    replica_set = InProcessReplicas(2, {3: "hangs"})
    rollouts, _ = generate_on_replicas(replica_set, deadline=0.01)
    assert same_rollouts(rollouts, local_rollouts()) and replica_set.was_restarted
    monkeypatch.setattr(replica_dispatch, "REPLICA_STARTUP_TIMEOUT", 600.0)
    replica_set = InProcessReplicas(2, {1: "hangs"})
    assert (
        same_rollouts(generate_on_replicas(replica_set, deadline=0.0)[0], local_rollouts())
        and not replica_set.was_restarted
    ), "a replica may start slowly"


class UnrestartableReplicas(InProcessReplicas):
    """Replicas whose calls do not end even when the replica is restarted."""

    def restart(self, name: str) -> None:
        self.was_restarted.append(name)


def test_replica_whose_call_survives_a_restart_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replica_dispatch, "TIMEOUT_CHECK_INTERVAL", 0.0)
    replica_set = UnrestartableReplicas(2, {3: "hangs"})
    rollouts, engine = generate_on_replicas(replica_set, deadline=0.05)
    assert same_rollouts(rollouts, local_rollouts())
    (stuck,) = replica_set.was_restarted
    assert list(engine.dispatcher.states) == [name for name in replica_set.replica_names if name != stuck]
    assert "it did not end within 0.05 seconds" in capsys.readouterr().err


@pytest.mark.long
def test_permanently_lost_replica_is_dropped_and_losing_the_last_ends_the_run() -> None:
    for failures in ({2: "is over"}, {4: "is over"}):
        rollouts, engine = generate_on_replicas(InProcessReplicas(2, failures))
        assert same_rollouts(rollouts, local_rollouts()) and len(engine.dispatcher.states) == 1
        assert same_rollouts(engine.generate(FIVE_PROMPTS, 3, seed=7), local_rollouts()), "it gets no more requests"
    with pytest.raises(RunError, match="no sampler of the cluster is left"):
        generate_on_replicas(InProcessReplicas(1, {1: "is over"}))
    with pytest.raises(RunError, match="no sampler of the cluster is left"):
        generate_on_replicas(InProcessReplicas(1, dict.fromkeys(range(1, 10_000), "dies")), deadline=0.05)
    many = InProcessReplicas(1, dict.fromkeys(range(1, 9), "dies"))
    assert same_rollouts(generate_on_replicas(many)[0], local_rollouts()) and many.calls > 9, (
        "rank 0 waits for a slow start"
    )


def test_probe_detects_a_replica_with_other_weights() -> None:
    with pytest.raises(RunError, match=r"log-probs .* from the learner's"):
        generate_on_replicas(InProcessReplicas(2, {1: "answers with other weights"}))


def test_replica_without_weights_refuses_requests() -> None:
    with pytest.raises(ReplicaLostError, match="version -1"):
        Replica(build_replica_engines).generate(1, FIVE_PROMPTS[torch.arange(1)], 1, None, None)
    assert Replica(build_replica_engines).status()["version"] == -1


def test_unsupported_cluster_settings_are_rejected_at_startup(
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


def test_missing_ray_error_names_the_extra(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "Say {i}.", "answer": "{i}"}}\n' for i in range(8)))
    for args in (["status"], ["train", "jsonl:rows.jsonl", "--model", str(tiny_folder)]):
        assert main(["cluster", *args]) == 2 and "ascent-rl[cluster]" in capsys.readouterr().err


# ---- ahead of a step


def generate_two_steps(replica_set: Any, hold: bool = False) -> tuple[list[Rollouts], ReplicaEngine]:
    """Generate two steps with --ahead 1: both are requested first, and weights change after the first step."""
    engine = start_engine(replica_set)
    engine.submit([RolloutRequest(0, FIVE_PROMPTS, 2, seed=5), RolloutRequest(1, FIVE_PROMPTS, 2, seed=6)])
    if hold:
        assert all(one.rollouts is not None for one in engine.snapshot_pending())
    rollouts = []
    for step in (0, 1):
        parts = sorted(engine.iter_finished(step, 60), key=lambda one: int(one.prompt_indices[0]))
        indices = torch.cat([one.prompt_indices for one in parts])
        assert sorted(indices.tolist()) == [0, 1, 2, 3, 4], "each group once"
        rollouts.append(join([one.rollouts for one in parts]).select(indices.argsort()))
        engine.load({name: p + 0.1 for name, p in engine.local_engine.lm.trained().items()}, step + 2)
        for name in list(replica_set.hanging):
            replica_set.restart(name)
    assert engine.pending == ()
    return rollouts, engine


@pytest.mark.long
def test_requests_ahead_keep_their_policy_version_despite_failures() -> None:
    local_engine = sampler_of(model_of("Llama"), limit=6)
    expected = [local_engine.generate(FIVE_PROMPTS, 2, seed=seed) for seed in (5, 6)]
    for failures in ({}, {4: "dies"}, {5: "dies", 6: "dies"}, {6: "is over"}, {6: "hangs"}):
        rollouts, _ = generate_two_steps(replica_set := InProcessReplicas(2, dict(failures)))
        assert all(map(same_rollouts, rollouts, expected)), failures
        assert {int(v) for one in rollouts for v in one.version.flatten()} == {1}, (
            "although some replicas had version 2"
        )
    assert replica_set.was_restarted
    rollouts, _ = generate_two_steps(InProcessReplicas(1), hold=True)
    assert all(map(same_rollouts, rollouts, expected)), "a checkpoint waits for running requests and changes nothing"


# ---- replicas that join and leave


@pytest.mark.long
def test_joining_replica_gets_weights_first_and_draining_replica_gets_no_requests() -> None:
    replica_set = InProcessReplicas(1)
    one, engine = generate_on_replicas(replica_set)
    replica_set.replica_names.append("sampler-1")
    engine.load(engine.local_engine.lm.trained(), 2)
    during_join = engine.generate(FIVE_PROMPTS, 3, seed=7)  # sampler-1 has joined by the end
    two = engine.generate(FIVE_PROMPTS, 3, seed=7)
    assert set(replica_set.generated_versions["sampler-1"]) == {2} and engine.dispatcher.num_chunks == 2
    assert torch.equal(one.response, two.response) and torch.equal(during_join.response, two.response)
    replica_set.replicas["sampler-0"].drain()
    count = len(replica_set.generated_versions["sampler-0"])
    assert same_rollouts(engine.generate(FIVE_PROMPTS, 3, seed=7), two), "chunks stay the same, and so do the bits"
    assert list(engine.dispatcher.states) == ["sampler-1"] and len(replica_set.generated_versions["sampler-0"]) == count
    engine.load(engine.local_engine.lm.trained(), 3)
    assert same_rollouts(engine.generate(FIVE_PROMPTS, 3, seed=7), two) and "sampler-0" not in engine.dispatcher.states


# ---- records


@pytest.mark.long
def test_replica_log_records_tokens_and_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = start_engine(InProcessReplicas(2, {3: "dies"}), folder=tmp_path / "engine")
    for version in (2, 3):
        engine.submit([RolloutRequest(version - 2, FIVE_PROMPTS, 3, seed=7)])
        list(engine.iter_finished(version - 2, 60))
        engine.load(engine.local_engine.lm.trained(), version)
    engine.close()
    learners, *rows = replicas_of(tmp_path)
    assert learners["version"] == 3 and 0 <= learners["idle"] <= 1
    assert [row["name"] for row in rows] == ["sampler-0", "sampler-1"] and sum(row["lost"] for row in rows) == 1
    assert sum(row["tokens"] for row in rows) == 2 * int(local_rollouts().mask.sum()) and all(
        row["rate"] > 0 for row in rows
    )
    (event,) = replica_events(tmp_path)
    assert (event["event"], event["why"]) == ("lost", "killed")
    assert "sampler-" in capsys.readouterr().err

    with (tmp_path / "engine" / REPLICA_LOG).open("a") as file:
        odd = [{}, [], {"time": 1, "event": 3}, {"time": 1, "replicas": {"x": {}}}, {"time": "now", "event": "lost"}]
        odd.append({"time": 1, "seconds": 1, "waited": 0, "version": 9, "replicas": [1]})
        file.write("".join(f"{json.dumps(line)}\n" for line in odd) + "{\nnonsense\n\xff\n" + '{"time"')
    assert replicas_of(tmp_path)[1:] == rows and replica_events(tmp_path) == [event], "other lines are left out"
    assert replicas_of(tmp_path / "nowhere") == [] == replica_events(tmp_path / "nowhere")


def test_cluster_status_prints_replica_statistics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,500 tokens in 2 s of generating; 2 of 4 s generating and 1 s loading leave a quarter idle."""
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
def test_learner_output_is_forwarded_to_the_same_stream(stream: str, capsys: pytest.CaptureFixture[str]) -> None:
    forward_output(stream, b"step 1 \xff\n")
    out, err = capsys.readouterr()
    assert (out, err) == (("step 1 \ufffd\n", "") if stream == "stdout" else ("", "step 1 \ufffd\n"))


# ---- whole runs


class ActorReplicas(InProcessReplicas):
    """Replicas in this process, created as a Ray actor creates them."""

    def __init__(self, count: int, failures: dict[int, str] | None = None):
        super().__init__(count, failures)
        self.created: list[Replica] = []

    def create(self) -> Replica:
        self.created.append(Replica(build_replica_engines))
        return self.created[-1]

    def close(self) -> None:
        """Stop the servers of all replicas; a replica that is lost here leaves its server running."""
        for replica in self.created:
            if replica.engine is not None:
                replica.engine.close()


def train_run(
    folder: Path, replica_set: InProcessReplicas | None, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Any:
    monkeypatch.setattr(joining, "cluster_replicas", lambda *_: replica_set)
    defaults = {"prompts": 2, "samples": 3, "max_tokens": 5, "eval_prompts": 2, "lr": 1e-2, "steps": 3} | settings
    run = ascent.train(
        [{"prompt": f"Say {i}."} for i in range(8)],
        reward=ascent.Reward(hash_reward, in_process=True),
        out=folder,
        show=False,
        preflight=False,
        **defaults,
    )
    lines = [{k: v for k, v in line.items() if "time" not in k} for line in [*run.metrics, *run.updates]]
    return run, lines


def hash_reward(response: str) -> float:
    return zlib.crc32(response.encode()) % 97 / 97


@pytest.mark.smoke
def test_run_with_one_replica_matches_one_process_and_resumes(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = train_run(tmp_path / "alone", None, monkeypatch, model=str(tiny_folder))
    run, rollouts = train_run(
        tmp_path / "one", replica_set := ActorReplicas(1, {3: "dies"}), monkeypatch, model=str(tiny_folder)
    )
    assert rollouts == expected and set(replica_set.generated_versions["sampler-0"]) == {0, 1, 2, 3}
    assert replicas_of(run.folder)[1]["lost"] == 1

    ahead = {"model": str(tiny_folder), "ahead": 1, "checkpoint_every": 2, "keep": 9}
    run, whole = train_run(tmp_path / "ahead", ActorReplicas(2), monkeypatch, **ahead)
    monkeypatch.setattr(joining, "cluster_replicas", lambda *_: ActorReplicas(2, {2: "dies"}))
    again = ascent.resume(run.folder, Display(), 2)
    lines = [{k: v for k, v in line.items() if "time" not in k} for line in [*again.metrics, *again.updates]]
    assert lines == whole, "rollouts ahead are in the checkpoint"


# ---- replicas with a serving engine


@pytest.mark.smoke
def test_replicas_with_an_engine_start_servers_and_a_killed_one_changes_no_token(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, warm_python: Any
) -> None:
    monkeypatch.setenv(CLUSTER_VARIABLE, "nowhere run")  # with an engine, rank 0 generates nothing
    venv = fake_environment(tmp_path, warm_python.executable)
    settings = {"model": str(tiny_folder), "engine": "vllm", "engine.python": str(venv), "temperature": 0.8}
    run, whole = train_run(tmp_path / "whole", one := ActorReplicas(1), monkeypatch, **settings)
    assert set(one.generated_versions["sampler-0"]) == {0, 1, 2, 3}
    assert run.config.old_logp == "learner"
    _, killed = train_run(tmp_path / "killed", two := ActorReplicas(1, {3: "dies", 6: "dies"}), monkeypatch, **settings)
    assert killed == whole and replicas_of(tmp_path / "killed")[1]["lost"] == 2
    for replica_set in (one, two):
        replica_set.close()


class ReplicasLostAtVersion2(ActorReplicas):
    """Replicas that are lost permanently when they are asked to generate with version 2."""

    def do(self, name: str, method: str, failure: str, *args: Any) -> Any:
        return super().do(name, method, "is over" if method == "generate" and args[0] == 2 else failure, *args)


@pytest.mark.smoke
def test_run_that_lost_its_replicas_replays_the_journal_and_generates_the_rest(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, warm_python: Any
) -> None:
    monkeypatch.setenv(CLUSTER_VARIABLE, "nowhere run")
    venv = fake_environment(tmp_path, warm_python.executable)
    settings: dict[str, Any] = {"model": str(tiny_folder), "engine": "vllm", "engine.python": str(venv)}
    settings |= {"steps": 4, "ahead": 1, "checkpoint_every": 2}
    _, whole = train_run(tmp_path / "whole", first := ActorReplicas(1), monkeypatch, **settings)
    with pytest.raises(RunError, match="no sampler of the cluster is left"):
        train_run(tmp_path / "run", second := ReplicasLostAtVersion2(1), monkeypatch, **settings)
    third = ActorReplicas(1)
    monkeypatch.setattr(joining, "cluster_replicas", lambda *_: third)
    again = ascent.resume(tmp_path / "run", Display())
    lines = [{k: v for k, v in line.items() if "time" not in k} for line in [*again.metrics, *again.updates]]
    assert lines == whole
    assert set(third.generated_versions["sampler-0"]) == {2, 4}, (
        "the last step and the evaluation; step 2 is in the journal"
    )
    for replica_set in (first, second, third):
        replica_set.close()

"""Replicas that draw for a learner, without Ray: who dies, hangs or comes back changes no token.

`make cluster-test` does the same with Ray and real processes (tests/cluster_ray.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from language import model_of, prompts_of, sampler_of

from ascent.cli.main import main
from ascent.core.types import Prompts, Rollouts, Trouble
from ascent.engines.cluster import sampler as cluster
from ascent.engines.cluster.sampler import ClusterSampler, Gone, Replica

FIVE = Prompts.of(prompts_of((5, 2, 7, 3, 4)))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PAUSE", 0.001)


class Calls:
    """Replicas of this process. `fates`: of each call by its number, what becomes of its replica."""

    def __init__(self, count: int, fates: dict[int, str] | None = None):
        self.names = tuple(f"sampler-{i}" for i in range(count))
        self.fates, self.calls, self.restarted = fates or {}, 0, list[str]()
        self.replicas = {name: self.new() for name in self.names}
        self.open: dict[int, list[Any]] = {}

    def new(self) -> Replica:
        return Replica(lambda _: sampler_of(model_of("Llama", seed=9), limit=6))

    def put(self, value: Any) -> Any:
        return value

    def begin(self, name: str, method: str, *args: Any) -> int:
        self.calls += 1
        self.open[self.calls] = [name, method, args, self.fates.get(self.calls, "")]
        return self.calls

    def wait(self, calls: Sequence[int], seconds: float) -> list[int]:
        return [call for call in calls if self.open[call][3] != "hangs"][:1]

    def result(self, call: int) -> Any:
        name, method, args, fate = self.open[call]
        if fate == "dies":
            self.replicas[name] = self.new()
            raise Gone("killed")
        if fate == "is over":
            error = Gone("killed for good")
            error.over = True
            raise error
        if fate == "answers with other weights":
            args = ({k: v + 0.5 for k, v in args[0].items()}, *args[1:])
        return getattr(self.replicas[name], method)(*args)

    def restart(self, name: str) -> None:
        self.restarted.append(name)
        for call in self.open.values():
            if call[0] == name and call[3] == "hangs":
                call[3] = "dies"


def drawn(crew: Any, deadline: float = 600.0, greedy: bool = False) -> tuple[Rollouts, ClusterSampler]:
    own = sampler_of(model_of("Llama"), limit=6)
    sampler = ClusterSampler(own, own, crew, {}, deadline)
    before = sampler.generate(FIVE[torch.arange(1)], 1, seed=3)  # before the first load rank 0 draws by itself
    assert crew.calls == 0 and before.response.shape[:2] == (1, 1)
    sampler.load(own.lm.trained(), 1)
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
        assert equal(found, alone()) and len(sampler.alive) == 2, call
        assert "was lost, and others draw its responses" in capsys.readouterr().err
        assert all(replica.version in (1, -1) for replica in crew.replicas.values())
    found, _ = drawn(Calls(2, {3: "dies", 4: "dies", 5: "dies"}))
    assert equal(found, alone())


def test_a_replica_that_hangs_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOOK", 0.0)
    crew = Calls(2, {3: "hangs"})
    found, _ = drawn(crew, deadline=0.01)
    assert equal(found, alone()) and crew.restarted


@pytest.mark.long
def test_a_replica_that_does_not_come_back_is_left_out_and_the_last_one_ends_the_run() -> None:
    for fates in ({2: "is over"}, {4: "is over"}):
        found, sampler = drawn(Calls(2, fates))
        assert equal(found, alone()) and len(sampler.alive) == 1
        assert equal(sampler.generate(FIVE, 3, seed=7), alone()), "it is not asked again"
    with pytest.raises(Trouble, match="no sampler of the cluster is left"):
        drawn(Calls(1, {1: "is over"}))
    with pytest.raises(Trouble, match="no sampler of the cluster is left"):
        drawn(Calls(1, dict.fromkeys(range(1, 10_000), "dies")), deadline=0.05)
    many = Calls(1, dict.fromkeys(range(1, 9), "dies"))
    assert equal(drawn(many)[0], alone()) and many.calls > 9, "a long start is waited for"


def test_a_replica_with_other_weights_is_found_by_its_probe() -> None:
    with pytest.raises(Trouble, match=r"log-probs .* from the learner's"):
        drawn(Calls(2, {1: "answers with other weights"}))


def test_a_replica_that_has_no_weights_draws_nothing() -> None:
    with pytest.raises(Gone, match="version -1"):
        Replica(None).draw(1, FIVE[torch.arange(1)], 1, None, None)
    assert Replica(None).about()["version"] == -1


def test_what_a_cluster_cannot_do_is_refused_before_anything_starts(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "Say {i}.", "answer": "{i}"}}\n' for i in range(8)))
    train = ("train", "jsonl:rows.jsonl", "--model", tiny_folder)
    engine = ("--engine", "vllm", "--engine.url", "http://127.0.0.1:8000")
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((), "takes train or status"),
        (("resume", "run"), "takes train or status"),
        (("train", "sort"), "is for language models"),
        (("--samplers", 0, *train), "samplers"),
        (("--learners", -1, *train), "learners"),
        ((*train, "--ahead", 1, "--correction", "truncated"), "--ahead 1"),
        ((*train, "--tools", "calculator"), "played by the learner"),
        ((*train, *engine), "Ascent's own samplers"),
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

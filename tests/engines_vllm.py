"""What the stand-in server is taken for, asked of a real vLLM: `make engines-test`. Not part of `make test`.

One server of a model with tied embeddings, one of a model without, and one that a run starts itself. Starting each
takes a minute or two.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, Popen, run
from threading import Thread
from typing import Any
from urllib.request import urlopen

import pytest
import torch

from ascent.core.errors import RunError
from ascent.core.protocols import RolloutRequest
from ascent.core.types import Prompts, Rollouts
from ascent.distributed.ranks import CLUSTER_VARIABLE
from ascent.inference.remote.remote_engine import RemoteEngine
from ascent.inference.remote.weight_files import checkpoint_tensors
from ascent.models import CausalLM
from ascent.workflows.loaded_policy import model_policy
from ascent.workflows.policy_server import ServeSettings, running_service
from tests.distributed.test_replicas import ActorReplicas, train_run
from tests.inference.remote.test_remote_engine import assert_same_tokens, max_logprob_error, wait_for_end
from tests.language import AtOnce, sampler_of, smollm2_folder, write_tiny
from tests.server.test_engine_relay import KEY, relaying
from tests.workflows.test_serve import HELLO, post, until
from tests.workflows.test_serve_engine import client_of, say, streamed, text_of, true_logp

ENVIRONMENT = Path(__file__).parents[1] / ".engines" / "vllm"
SYNCS = 20
assert ENVIRONMENT.exists(), "make engines-test sets it up first"


class Served:
    """A tiny model, a server of it, and a sampler on that."""

    def __init__(self, folder: Path, tied: bool, **more: Any):
        self.model = write_tiny(folder / "model", tie_word_embeddings=tied, hidden_size=128, head_dim=32)
        policy = CausalLM(str(self.model), device="cpu", engine="vllm", engine_python=str(ENVIRONMENT), **more)
        self.lm = policy.load()
        with torch.no_grad():
            for p in self.lm.model.parameters():  # log-probs of ordinary size, so that rounding is too
                p.mul_(0.4 if p.dim() > 1 else 1.0)
        self.log = folder / "engine" / "vllm.log"
        self.sampler = RemoteEngine(policy, self.lm, 40, 512, 0.7, torch.Generator().manual_seed(1))
        self.sampler.folder = folder / "engine"
        self.sampler.load({}, 0)

    @property
    def url(self) -> str:
        return self.sampler.server_pool.servers[0].client.url

    def move(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.lm.model.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * 0.01)

    def prompts(self, length: int = 200) -> Prompts:
        return Prompts.of(torch.randint(99, (2, length), generator=torch.Generator().manual_seed(length)))


@pytest.fixture(scope="module", params=["tied", "untied"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp(request.param), request.param == "tied")
    yield served
    served.sampler.close()


def test_log_probs_agree_after_each_of_twenty_loads(served: Served) -> None:
    for version in range(1, SYNCS + 1):
        served.move(version)
        served.sampler.load({}, version)
        rollouts = served.sampler.generate(served.prompts(), 2, seed=version, limit=16)
        assert max_logprob_error(served.lm, rollouts) <= 1e-4 and (rollouts.version == version).all()


def test_a_token_that_is_drawn_after_a_load_in_flight_is_of_the_new_weights(served: Served) -> None:
    """What sampling ahead needs: each token's log-prob is that of its own version's weights."""
    sampler, old = served.sampler, deepcopy(served.lm)
    version, limit = sampler.version, sampler.limit
    sampler.limit = 250
    sampler.submit([RolloutRequest(5, served.prompts(), 4, seed=1)])
    while running(served.url) < 1:
        pass
    served.move(99)
    sampler.load({}, version + 1)
    sampler.limit = limit
    done, crossed = list(sampler.iter_finished(5, 600.0)), 0
    for each in done:
        rollouts = each.rollouts
        versions = rollouts.version.expand(rollouts.mask.shape)
        crossed += int((versions != versions[..., :1])[rollouts.mask].any())
        for drawn, lm in ((version, old), (version + 1, served.lm)):
            assert max_logprob_error(lm, rollouts, (versions == drawn) & rollouts.mask) <= 1e-4
    assert len(done) == 2 and crossed, "some were under way"
    assert min(sampler.server_pool.probe.continued) > 0, "of the probe's own too"


def test_a_conversation_has_the_tokens_that_were_drawn_and_their_log_probs(served: Served) -> None:
    sampler, prompts = served.sampler, served.prompts(100)

    def played(sampler: Any, **more: Any) -> Rollouts:
        play = AtOnce(lambda response, tokens: [7, 8 + response % 5, 9] if len(tokens) < 24 else [])
        play.turn_tokens = 8
        return sampler.generate(replace(prompts, start_episodes=play), 2, **more)

    rollouts = played(sampler, seed=3)
    assert max_logprob_error(served.lm, rollouts) <= 1e-4 and int(rollouts.turn.max()) >= 2  # type: ignore[union-attr]
    assert_same_tokens(played(sampler, seed=3), rollouts)
    local = sampler_of(served.lm, limit=40, temperature=0.7)
    assert_same_tokens(played(sampler, greedy=True), played(local, greedy=True))


def test_seeds_ends_and_greedy_answers(served: Served) -> None:
    prompts = served.prompts(20)
    assert_same_tokens(served.sampler.generate(prompts, 4, seed=3), served.sampler.generate(prompts, 4, seed=3))
    rollouts = served.sampler.generate(prompts, 16, seed=4)
    last = rollouts.response.gather(-1, (rollouts.length - 1).unsqueeze(-1)).squeeze(-1)
    assert torch.equal(rollouts.truncated, ~torch.isin(last, torch.tensor(sorted(served.lm.stop_token_ids))))
    assert rollouts.truncated.any() and not rollouts.truncated.all()
    greedy = served.sampler.generate(prompts, 1, greedy=True)
    assert_same_tokens(greedy, sampler_of(served.lm, limit=40, temperature=0.7).generate(prompts, 1, greedy=True))
    assert max_logprob_error(served.lm, greedy) <= 1e-4, "at temperature 1, as it says"


@pytest.mark.parametrize("what", ["left out", "another head"])
def test_corrupted_load_is_detected(served: Served, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version = served.sampler.version + 1
    served.move(version)
    now = checkpoint_tensors(served.lm)
    head = "lm_head.weight" if "lm_head.weight" in now else "model.embed_tokens.weight"  # tied, that is its head
    sent: dict[str, Any] = {k: v for k, v in now.items() if k != "model.layers.1.mlp.up_proj.weight"}
    if what == "another head":
        sent = now | {head: now[head] + 0.05 * torch.randn(now[head].shape)}
    monkeypatch.setattr("ascent.inference.remote.server_pool.checkpoint_tensors", lambda _: sent)
    with pytest.raises(RunError, match=r"was not loaded|does not sample from this policy"):
        served.sampler.load({}, version)
    monkeypatch.undo()
    served.sampler.load({}, version)
    assert max_logprob_error(served.lm, served.sampler.generate(served.prompts(), 1, seed=0, limit=8)) <= 1e-4


def test_a_relay_beside_the_engine_takes_weights_and_hands_on_responses(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", KEY)
    version, lm = served.sampler.version + 1, served.lm
    served.move(version)
    with relaying(served.url) as relay:
        policy = CausalLM(
            str(served.model), device="cpu", engine="vllm", engine_url=(relay.url,), engine_key_env="A_KEY"
        )
        sampler = RemoteEngine(policy, lm, 40, 512, 0.7, torch.Generator().manual_seed(1))
        sampler.load({}, version)
        rollouts = sampler.generate(served.prompts(), 2, seed=version, limit=16)
        sampler.close()
    assert max_logprob_error(lm, rollouts) <= 1e-4 and (rollouts.version == version).all()
    served.sampler.load({}, version)
    assert_same_tokens(served.sampler.generate(served.prompts(), 2, seed=version, limit=16), rollouts)


def test_a_server_of_another_model_is_trouble_and_stays_usable(served: Served, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", hidden_size=64, head_dim=16)
    policy = CausalLM(str(other), device="cpu", engine="vllm", engine_url=(served.url,), engine_deadline=60.0)
    sampler = RemoteEngine(policy, policy.load(), 40, 512, 0.7, torch.Generator())
    with pytest.raises(RunError, match=r"lost 4 times in a row|Does the server serve this model"):
        sampler.load({}, 0)
    sampler.close()
    served.sampler.load({}, served.sampler.version + 1)
    assert max_logprob_error(served.lm, served.sampler.generate(served.prompts(), 1, seed=0, limit=8)) <= 1e-4


def test_it_answers_and_streams_behind_the_endpoint(served: Served) -> None:
    """`ascent serve --engine vllm`: streams, stop strings and sessions, with what was drawn and its log-probs."""
    loaded = model_policy(str(served.model), device="cpu")
    where = {"engine_url": (served.url,)}
    serving = ServeSettings(port=0, rows=8, context=400, engine="vllm", engine_settings=where)
    with running_service(loaded, serving) as service:
        thread = Thread(target=service.run)
        thread.start()
        try:
            with client_of(service) as client:
                asked = {"messages": HELLO, "max_tokens": 100, "seed": 5, "logprobs": True}
                whole = say(client, **asked)["choices"][0]
                chunks = streamed(client, **asked)
                parts = [chunk["choices"][0] for chunk in chunks]
                assert text_of(chunks) == whole["message"]["content"]
                assert len([part for part in parts if part["delta"].get("content")]) > 3, "as it is drawn"
                logp = [each["logprob"] for part in parts if part["logprobs"] for each in part["logprobs"]["content"]]
                assert logp == pytest.approx([each["logprob"] for each in whole["logprobs"]["content"]], abs=1e-4)
                stop = whole["message"]["content"][6:9]
                stopped = say(client, **asked, stop=stop)["choices"][0]["message"]["content"]
                assert stopped == whole["message"]["content"].split(stop)[0]
                assert text_of(streamed(client, **asked, stop=stop)) == stopped
                say(client, top_p=0.9, top_k=20, min_p=0.01)
            with client_of(service, **{"x-session-id": "a"}) as client:
                first = say(client, max_tokens=8, return_token_ids=True)
                messages = [*HELLO, first["choices"][0]["message"], {"role": "user", "content": "and?"}]
                second = say(client, messages, logprobs=True, return_token_ids=True)
            before, drawn = second["prompt_token_ids"], second["choices"][0]["token_ids"]
            recorded = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
            assert before[: len(recorded)] == recorded
            logp = [each["logprob"] for each in second["choices"][0]["logprobs"]["content"]]
            assert logp == pytest.approx(true_logp(loaded, before + drawn)[-len(drawn) :].tolist(), abs=1e-3)
            with socket.create_connection(("127.0.0.1", service.server.port)) as leaving:
                leaving.sendall(post(service, json.dumps({"messages": HELLO, "stream": True}).encode()))
                assert leaving.recv(64)
            until(lambda: not service.queue.active and running(served.url) == 0)
        finally:
            service.close()
            thread.join()
    served.sampler.load({}, served.sampler.version + 1)


def running(url: str) -> float:
    """Requests that the server decodes."""
    text = urlopen(f"{url}/metrics", timeout=60).read().decode()
    return max((float(x) for x in re.findall(r"vllm:num_requests_running\{.*\} (\S+)", text)), default=-1.0)


def test_two_steps_of_training_on_the_command_line(served: Served, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    size = ["--steps", "2", "--prompts", "2", "--samples", "2", "--max-tokens", "8", "--eval-prompts", "4"]
    engine = ["--engine", "vllm", "--engine.url", served.url, "--policy.device", "cpu", "--out", str(tmp_path / "run")]
    task = [f"jsonl:{tmp_path}/rows.jsonl", "--model", str(served.model), "--max-prompt", "64"]
    done = run(
        [sys.executable, "-m", "ascent", "train", *task, *size, *engine], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["sampling/sampling_logp_difference/mean"] < 1e-4 for line in lines)
    served.sampler.load({}, served.sampler.version + 1)


def test_a_run_that_samples_ahead_and_is_killed_equals_its_journal(served: Served, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder, size = tmp_path / "run", ["--steps", "12", "--prompts", "2", "--samples", "4", "--max-tokens", "24"]
    size += ["--ahead", "3", "--checkpoint-every", "100", "--no-keep-best", "--eval-prompts", "4", "--eval-every", "4"]
    engine = ["--engine", "vllm", "--engine.url", served.url, "--policy.device", "cpu", "--out", str(folder)]
    task = [
        f"jsonl:{tmp_path}/rows.jsonl",
        "--model",
        str(served.model),
        "--max-prompt",
        "64",
        "--no-preflight",
        "--lr",
        "0.01",
    ]
    training = Popen([sys.executable, "-m", "ascent", "train", *task, *size, *engine], stdout=DEVNULL, stderr=DEVNULL)
    while len(numbers(folder)) < 6:
        assert training.poll() is None
        time.sleep(0.01)
    training.kill()
    training.wait()
    before, journalled = numbers(folder), sorted((folder / "journal").glob("step_*"))
    assert 6 <= len(before) <= len(journalled) <= 12
    done = run([sys.executable, "-m", "ascent", "resume", str(folder)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    after = numbers(folder)
    assert after[: len(before)] == before and len(after) == 12
    assert 0 < max(line.get("sampling/lag") or 0 for line in after) <= 3
    assert all(line["sampling/sampling_logp_difference/mean"] < 1e-4 for line in after)
    served.sampler.load({}, served.sampler.version + 1)


def numbers(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in whole]


def test_a_server_that_is_killed_loses_nothing_and_none_is_left_at_the_end(served: Served) -> None:
    """The last test of each server, which it ends."""
    prompts, (server,) = served.prompts(20), served.sampler.server_pool.servers
    expected = served.sampler.generate(prompts, 4, seed=5)
    assert server.process is not None and server.process._process is not None
    first = server.process._process.pid
    served.sampler.submit([RolloutRequest(9, prompts, 4, seed=5)])
    os.killpg(first, signal.SIGKILL)
    done = {int(each.prompt_indices[0]): each.rollouts for each in served.sampler.iter_finished(9, 900.0)}
    assert sorted(done) == [0, 1]
    for place, rollouts in done.items():
        width = rollouts.mask.shape[-1]
        assert torch.equal(rollouts.response, expected.response[place : place + 1, :, :width] * rollouts.mask)
    second = server.process._process.pid
    served.sampler.close()
    assert second != first
    wait_for_end(first, second)


def test_weights_arrive_by_a_broadcast(tmp_path: Path) -> None:
    """As over NCCL, but over gloo: a server of its own, with tied embeddings, and adapters that are merged for it."""
    served = Served(tmp_path, tied=True, engine_transport="nccl", lora=4)
    try:
        for version in (1, 2, 3):
            served.move(version)
            served.sampler.load({}, version)
            rollouts = served.sampler.generate(served.prompts(), 2, seed=version, limit=16)
            assert max_logprob_error(served.lm, rollouts) <= 1e-4 and (rollouts.version == version).all()
    finally:
        served.sampler.close()


def test_smollm2_takes_two_steps_by_the_command_of_the_docs(tmp_path: Path) -> None:
    """`ascent train … --engine vllm --engine.python .engines/vllm` starts a server of a real model, and ends it."""
    command = [sys.executable, "-m", "ascent", "train", "reasoning-gym:chain_sum", "--model", smollm2_folder()]
    command += ["--engine", "vllm", "--engine.python", str(ENVIRONMENT), "--policy.device", "cpu"]
    command += ["--steps", "2", "--prompts", "2", "--samples", "4", "--max-tokens", "8", "--eval-prompts", "2"]
    done = run([*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = numbers(tmp_path / "run")
    assert len(lines) == 2 and all(line["sampling/sampling_logp_difference/mean"] < 1e-3 for line in lines)


def test_a_replica_of_a_cluster_draws_with_a_vllm_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny(tmp_path / "model", hidden_size=128, head_dim=32)
    monkeypatch.setenv(CLUSTER_VARIABLE, "nowhere run")
    settings = {"engine": "vllm", "engine.python": str(ENVIRONMENT), "steps": 2, "max_mismatch": 1e-3}
    try:
        run, _ = train_run(tmp_path / "run", replica_set := ActorReplicas(1), monkeypatch, model=str(model), **settings)
        assert run.status == "finished" and set(replica_set.generated_versions["sampler-0"]) == {0, 1, 2}
    finally:
        replica_set.close()

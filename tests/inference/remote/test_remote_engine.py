"""Rollouts from a serving engine: requests, weights, the probe, and failures of servers.

The server here is a stand-in (tests/stand_in.py); tests/engines_vllm.py repeats the checks with a real vLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import httpx
import pytest
import torch
from safetensors.torch import load_file

import ascent
from ascent.build.language_backend import LanguageBackend
from ascent.cli.run_flags import parse_train
from ascent.core.errors import ConfigError, RunError
from ascent.core.protocols import PendingRollout, RolloutRequest
from ascent.core.types import Prompts, Rollouts
from ascent.inference.remote import remote_engine, weight_files, weight_probe
from ascent.inference.remote.adapters import ENGINES
from ascent.inference.remote.engine_adapter import EngineRequest, ServerConfig
from ascent.inference.remote.remote_engine import RemoteEngine
from ascent.inference.remote.request_forwarder import RemoteConversationEngine
from ascent.inference.remote.server_client import PrioritySemaphore, ServerClient, ServerLostError
from ascent.inference.remote.server_process import ServerProcess, find_python
from ascent.inference.remote.vllm import VLLM, WORKER_EXTENSION_FOLDER
from ascent.inference.remote.weight_files import checkpoint_tensors
from ascent.models import CausalLM, LanguageModel
from ascent.models.lm_head import LMHead, token_stats
from ascent.settings import configure
from tests.cases import mostly_smokes
from tests.language import AtOnce, InAnyOrder, model_of, prompts_of, sampler_of, write_tiny
from tests.processes import Forked
from tests.stand_in import STAND_INS, StandIn, serving

SMALL = {"dtype": torch.float32, "max_position_embeddings": 32, "num_hidden_layers": 2}
"""The probe then has prompts of 24 tokens, and 8 behind each."""


every_engine = pytest.mark.parametrize("engine", mostly_smokes([adapter.name for adapter in ENGINES], "vllm"))


class EngineSetup:
    """A model, its stand-in servers and a remote engine on them."""

    def __init__(self, stack: ExitStack, servers: int = 1, temperature: float = 0.7, limit: int = 5, **more: Any):
        deadline, rows = more.pop("deadline", 20.0), more.pop("rows", 0)
        engine, through = more.pop("engine", "vllm"), more.pop("through", lambda server: server.url)
        settings = {"engine_deadline": deadline, "rows": rows} | more.pop("policy", {})
        self.lm = model_of(**SMALL | more)
        self.servers = [stack.enter_context(serving(deepcopy(self.lm.model), engine)) for _ in range(servers)]
        urls = tuple(through(server) for server in self.servers)
        self.policy = CausalLM("tiny", engine=engine, engine_url=urls, **settings)
        generator = torch.Generator().manual_seed(1)
        self.engine = RemoteEngine(self.policy, self.lm, limit, 32, temperature, generator)
        self.engine.health_check_interval = 0.05
        stack.callback(self.engine.close)

    @property
    def server(self) -> StandIn:
        return self.servers[0]

    def perturb_weights(self, scale: float = 0.05) -> None:
        """Change the weights, as a training step does."""
        generator = torch.Generator().manual_seed(self.engine.version)
        with torch.no_grad():
            for p in self.lm.model.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * scale)

    def load(self, version: int) -> None:
        self.engine.load({}, version)

    def generate(self, samples: int = 2, seed: int = 5, **more: Any) -> Rollouts:
        return self.engine.generate(Prompts.of(prompts_of()), samples, seed=seed, **more)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@torch.no_grad()
def max_logprob_error(lm: LanguageModel, rollouts: Rollouts, some: torch.Tensor | None = None) -> float:
    """Return the maximum difference of the rollouts' log-probs (or some of them) from the model's."""
    error, some = 0.0, rollouts.mask if some is None else some
    for i, row in enumerate(rollouts.prompt):
        ids = row[row >= 0]
        for mask, tokens, logp, which in zip(
            rollouts.mask[i], rollouts.response[i], rollouts.logp_sampler[i], some[i], strict=True
        ):
            end = 1 + int(mask.nonzero().max())
            hidden = lm.backbone(input_ids=torch.cat([ids, tokens[:end]])[None]).last_hidden_state[0, len(ids) - 1 : -1]
            expected = token_stats(LMHead.of(lm.model), hidden, tokens[:end], rollouts.temperature)[0]
            error = max([error, *(expected - logp[:end])[(which & mask)[:end]].abs().tolist()])
    return error


def assert_same_tokens(one: Rollouts, other: Rollouts) -> None:
    assert torch.equal(one.mask, other.mask) and torch.equal(one.response, other.response)


# ---- rollouts ---------------------------------------------------------------------------------------


@every_engine
@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_match_the_learner_after_every_load(stack: ExitStack, engine: str, tied: bool) -> None:
    setup = EngineSetup(stack, engine=engine, tie_word_embeddings=tied)
    for version in (3, 4):
        setup.load(version)
        rollouts = setup.generate()
        assert max_logprob_error(setup.lm, rollouts) < 1e-5
        assert (rollouts.version == version).all() and rollouts.version.shape == (3, 2, 1)
        setup.perturb_weights()
    assert ("lm_head.weight" in setup.server.received) is not tied
    assert max_logprob_error(setup.lm, rollouts) > 1e-3, "the rollouts are of the previous version"


@pytest.mark.long
def test_seed_determines_samples_and_is_drawn_like_the_local_engine(stack: ExitStack) -> None:
    setup = EngineSetup(stack)
    setup.load(0)
    assert_same_tokens(setup.generate(seed=5), setup.generate(seed=5))
    setup.server.asked.clear()
    setup.engine.generate(Prompts.of(prompts_of()), 2)
    drawn = torch.randint(2**62, (3, 2), generator=torch.Generator().manual_seed(1))
    assert sorted(body["sampling_params"]["seed"] for body in setup.server.asked) == sorted(drawn.flatten().tolist())
    assert all(body["sampling_params"]["ignore_eos"] for body in setup.server.asked), "no other end tokens"
    assert all(body["sampling_params"]["stop_token_ids"] == [3] for body in setup.server.asked)


@every_engine
@pytest.mark.long
def test_stops_truncation_and_limits_per_prompt(stack: ExitStack, engine: str) -> None:
    setup = EngineSetup(stack, engine=engine, temperature=1.0)
    setup.load(0)
    prompts = Prompts(prompts_of(), torch.arange(3), limits=torch.tensor([9, 1, 3]))
    rollouts = setup.engine.generate(prompts, 8, seed=0, limit=4)
    last = rollouts.response.gather(-1, (rollouts.length - 1).unsqueeze(-1)).squeeze(-1)
    assert torch.equal(rollouts.truncated, last != 3) and rollouts.truncated.any() and not rollouts.truncated.all()
    assert rollouts.length.amax(1).tolist() == [4, 1, 3] and rollouts.limit == 4
    assert torch.equal(rollouts.present, rollouts.mask)


@every_engine
@pytest.mark.long
def test_greedy_responses_match_the_local_engine(stack: ExitStack, engine: str) -> None:
    setup = EngineSetup(stack, engine=engine)
    setup.load(0)
    local = sampler_of(setup.lm, limit=5, temperature=0.7)
    assert_same_tokens(setup.generate(1, greedy=True), local.generate(Prompts.of(prompts_of()), 1, greedy=True))


@every_engine
@pytest.mark.long
def test_conversations_match_the_local_engine_in_any_order(stack: ExitStack, engine: str) -> None:
    setup = EngineSetup(stack, engine=engine, limit=24, rows=3, max_position_embeddings=64)
    setup.load(0)
    local = sampler_of(setup.lm, limit=24, temperature=0.7)

    def generate_conversations(engine: Any, order: int | None, **more: Any) -> Rollouts:
        turns: dict[int, int] = {}

        def observe(response: int, tokens: list[int]) -> list[int]:
            turns[response] = turns.get(response, 0) + 1
            return [7, 8 + response % 5, 9][: 1 + response % 3] if turns[response] <= 2 + response % 2 else []

        play = AtOnce(observe) if order is None else InAnyOrder(observe, order)
        play.turn_tokens = 4
        return engine.generate(replace(Prompts.of(prompts_of()), start_episodes=play), 2, **more)

    one, other = (
        generate_conversations(setup.engine, None, greedy=True),
        generate_conversations(local, None, greedy=True),
    )
    assert_same_tokens(one, other)
    for name in ("present", "turn", "truncated", "valid"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert not one.truncated.all() and int(one.turn.max()) == 3  # type: ignore[union-attr]
    drawn = [generate_conversations(setup.engine, order, seed=5) for order in (None, 3, 8)]
    assert_same_tokens(drawn[0], drawn[1]), assert_same_tokens(drawn[0], drawn[2])
    assert max_logprob_error(setup.lm, drawn[0]) < 1e-5
    seeds = {
        body["sampling_params"].get("seed", body["sampling_params"].get("sampling_seed")) for body in setup.server.asked
    }
    assert len(seeds) > 6, "each turn has another seed"


@pytest.mark.long
def test_server_failure_in_a_conversation_changes_nothing(stack: ExitStack) -> None:
    setup = EngineSetup(stack, servers=2, limit=24, max_position_embeddings=64)
    setup.load(0)

    def generate_conversations() -> Rollouts:
        play = AtOnce(lambda _, tokens: [7, 8] if len(tokens) < 12 else [])
        play.turn_tokens = 4
        return setup.engine.generate(replace(Prompts.of(prompts_of()), start_episodes=play), 2, seed=5)

    whole = generate_conversations()
    setup.server.die_after = len(setup.server.asked) + 4
    assert_same_tokens(generate_conversations(), whole)
    assert setup.server.dead


@pytest.mark.long
def test_each_group_is_yielded_once_and_requests_are_kept_apart(stack: ExitStack) -> None:
    setup = EngineSetup(stack, servers=2)
    setup.load(2)
    prompts = Prompts.of(prompts_of())
    requests = [
        RolloutRequest(2, prompts, 3, seed=7),
        RolloutRequest(2, prompts, 1, greedy=True),
        RolloutRequest(3, prompts, 2, seed=8),
    ]
    setup.engine.submit(requests)
    evaluated = setup.generate(1, greedy=True)
    done = list(setup.engine.iter_finished(2, 60.0))
    for request in requests[:2]:
        places = sorted(int(each.prompt_indices[0]) for each in done if each.request is request)
        assert places == [0, 1, 2]
    later = list(setup.engine.iter_finished(3, 60.0))
    assert sorted(int(each.prompt_indices[0]) for each in later) == [0, 1, 2] and len(done) == 6
    assert setup.engine.timeline.capacity == 18, "responses in flight, without those of the evaluation"
    whole = setup.generate(3, seed=7)
    for each in done:
        if each.request is requests[0]:
            picked = whole.select(each.prompt_indices)
            width = each.rollouts.mask.shape[-1]
            assert torch.equal(each.rollouts.response, picked.response[..., :width] * each.rollouts.mask)
    assert evaluated.mask.shape[:2] == (3, 1)


@every_engine
@pytest.mark.long
def test_aborted_request_is_sent_again(stack: ExitStack, engine: str) -> None:
    setup = EngineSetup(stack, engine=engine)
    setup.load(0)
    expected = setup.generate()
    setup.server.abort_once = True
    assert_same_tokens(setup.generate(), expected)


# ---- weights -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("kind", "lora"), [("Llama", 4), ("GPT2", 4), ("Mixtral", 4), ("Mixtral", 0), ("Gemma3", 0)])
def test_weights_are_sent_with_names_and_values_of_an_exported_checkpoint(kind: str, lora: int, tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", kind=kind)
    lm = CausalLM(str(tmp_path / "model"), lora=lora, device="cpu").load()
    with torch.no_grad():
        for p in lm.trained().values():
            p.add_(torch.randn(p.shape) * 0.05)
    lm.save(tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    sent = checkpoint_tensors(lm)
    assert sent.keys() == exported.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(sent[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.long
def test_weight_files_are_removed_also_after_a_kill(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "SHARED_MEMORY", tmp_path)
    Forked(lambda: weight_files.weights_folder(1) and 0, tmp_path / "out").wait(60)
    (left,) = tmp_path.glob("ascent-weights-*")
    ours = weight_files.weights_folder(1)
    assert not left.exists() and ours.exists()
    setup = EngineSetup(stack)
    setup.load(0)
    assert list(tmp_path.glob("*weights*")) == [ours]
    ours.rmdir()


def test_weight_files_in_use_survive_processes_in_another_pid_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As containers that share /dev/shm: none sees the other's processes, and the same pid may be in both."""
    monkeypatch.setattr(weight_files, "SHARED_MEMORY", tmp_path)
    folder = weight_files.weights_folder(1)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: not str(path).startswith("/proc/") and exists(path))

    def elsewhere() -> int:
        weight_files.LOCKED_FOLDERS.clear()
        shutil.rmtree(weight_files.weights_folder(1))
        return 0

    assert Forked(elsewhere, tmp_path / "out").wait(60) == 0
    assert folder.exists()
    folder.rmdir()


def test_weights_use_the_disk_if_shared_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = weight_files.weights_folder(1 << 60)
    assert folder.parent != weight_files.SHARED_MEMORY
    folder.rmdir()


# ---- a sabotaged load --------------------------------------------------------------------------------

SABOTAGE: dict[str, tuple[dict[str, Any], str]] = {
    "a tensor is forgotten": ({"forget": "model.layers.1.mlp.up_proj.weight"}, "does not sample from this policy"),
    "the old head is kept": ({"forget": "lm_head.weight"}, "does not sample from this policy"),
    "a tensor arrives wrong": ({"corrupt": "model.norm.weight"}, r"model\.norm\.weight differs from what was sent"),
    "the old cache is kept": ({"keep_cache": True, "ignore_salt": True}, "keeps its prefix cache"),
    "log-probs have no temperature": ({"raw_logprobs": True}, "include the temperature"),
    "the version is another": ({"old_version": True}, "to version \\d with version 0"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "what"),  # SGLang does not say what it has read
    [(each.name, what) for each in ENGINES for what in SABOTAGE if each.name == "vllm" or "arrives" not in what],
)
def test_corrupted_load_is_detected(stack: ExitStack, engine: str, what: str) -> None:
    faults, words = SABOTAGE[what]
    setup = EngineSetup(stack, engine=engine)
    setup.server.ignore_salt = faults.get("ignore_salt", False)
    setup.load(0)
    setup.perturb_weights()
    for name, value in faults.items():
        setattr(setup.server, name, value)
    with pytest.raises(RunError, match=words):
        setup.load(1)


@pytest.mark.long
def test_either_prefix_cache_safeguard_is_sufficient(stack: ExitStack) -> None:
    setup = EngineSetup(stack)
    setup.server.keep_cache = True
    for version in (0, 1):
        setup.load(version)
        setup.perturb_weights()
    setup.server.keep_cache, setup.server.ignore_salt = False, True
    setup.load(2)


def test_unused_parameter_is_named(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = EngineSetup(stack)
    every = weight_files.checkpoint_tensors
    some = lambda lm: {k: v for k, v in every(lm).items() if k != "model.norm.weight"}  # noqa: E731
    monkeypatch.setattr("ascent.inference.remote.server_pool.checkpoint_tensors", some)
    with pytest.raises(RunError, match=r"model\.norm\.weight was not loaded"):
        setup.load(0)


@pytest.mark.long
def test_failed_weight_load_is_retried(stack: ExitStack) -> None:
    setup = EngineSetup(stack)
    setup.server.refuse_weights = 2
    setup.load(0)
    assert max_logprob_error(setup.lm, setup.generate()) < 1e-5
    setup.server.refuse_weights = 9
    with pytest.raises(RunError, match="no such file"):
        setup.load(1)


@every_engine
def test_server_of_another_version_or_context_length_gets_no_weights(stack: ExitStack, engine: str) -> None:
    setup = EngineSetup(stack, engine=engine)
    release = setup.server.release
    setup.server.release = "0.31.2"
    with pytest.raises(RunError, match=r"0\.31\.2, but Ascent supports"):
        setup.load(0)
    setup.server.release, setup.server.context = release, 20
    with pytest.raises(RunError, match="context length of 20 tokens, but a prompt with its response may have"):
        setup.load(0)
    assert not setup.server.received


@every_engine
@pytest.mark.long
def test_server_of_another_engine_is_rejected(stack: ExitStack, engine: str) -> None:
    (other,) = STAND_INS.keys() - {engine}
    strange = stack.enter_context(serving(deepcopy(model_of(**SMALL).model), other))
    urls = iter([None, strange.url + "/"])
    setup = EngineSetup(stack, servers=2, engine=engine, through=lambda server: next(urls) or server.url)
    with pytest.raises(RunError, match=r"(Is it|not that of) (vLLM 0\.32|SGLang 0\.5\.23)"):
        setup.load(0)
    assert not strange.received


@every_engine
@pytest.mark.long
@pytest.mark.parametrize(("last", "words"), [(7, "at token 7, which is not an end token"), (3, "")])
def test_response_that_ends_too_early_is_an_error(stack: ExitStack, engine: str, last: int, words: str) -> None:
    """As one does that a server cuts for want of memory, or at an end token that is not the model's."""
    setup = EngineSetup(stack, engine=engine)
    setup.load(0)
    spans = [{"version": "0", "start": 0, "end": 2}]
    setup.server.draw = lambda *_: ([9, last], [-1.0, -1.0], spans)  # type: ignore[method-assign, misc, assignment]
    if not words:
        assert not setup.generate().truncated.any()
        return
    with pytest.raises(RunError, match=words):
        setup.generate()


# ---- a server that fails -----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("engine", "after"), [("vllm", 0), ("vllm", 4), ("sglang", 4)])
def test_requests_of_a_dead_server_move_to_others_with_the_same_seeds(
    stack: ExitStack, engine: str, after: int
) -> None:
    setup = EngineSetup(stack, servers=2, engine=engine)
    setup.load(0)
    expected = setup.generate(samples=4)
    setup.server.die_after = len(setup.server.asked) + after
    assert_same_tokens(setup.generate(samples=4), expected)
    assert setup.engine.server_pool.servers[0].is_down
    setup.server.dead, setup.server.die_after = False, -1
    setup.perturb_weights()
    setup.load(1)
    before = len(setup.server.asked)
    assert max_logprob_error(setup.lm, setup.generate()) < 1e-5
    assert len(setup.server.asked) > before, "it serves again after the next load"


@pytest.mark.long
def test_recovered_server_gets_weights_and_a_probe_before_requests(stack: ExitStack) -> None:
    setup = EngineSetup(stack)
    setup.load(0)
    expected = setup.generate(samples=4)
    setup.server.die_after = len(setup.server.asked) + 3
    revived, known = stack.enter_context(reviving(setup.server)), len(setup.server.calls)
    setup.engine.submit([RolloutRequest(0, Prompts.of(prompts_of()), 4, seed=5)])
    done = list(setup.engine.iter_finished(0, 60.0))
    assert revived and sorted(int(each.prompt_indices[0]) for each in done) == [0, 1, 2]
    for each in done:
        width = each.rollouts.mask.shape[-1]
        assert torch.equal(each.rollouts.response, expected.select(each.prompt_indices).response[..., :width])
    calls = setup.server.calls[known:]
    assert calls.count("/finish_weight_update") == 1 and calls.count("probe") == 2
    assert calls.index("/resume") < calls.index("probe")
    setup.server.forget, setup.server.die_after = "model.norm.weight", len(setup.server.asked)
    with reviving(setup.server), pytest.raises(RunError, match="does not sample from this policy"):
        setup.generate()


@contextmanager
def reviving(server: StandIn) -> Iterator[list[bool]]:
    """Inside, a stand-in that dies is started again, and has no weights then."""
    done: list[bool] = []

    def watch() -> None:
        while not done:
            if server.dead:
                server.kill()
                server.revive()
                done.append(True)
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield done
    finally:
        done.append(True)
        thread.join()


@pytest.mark.long
def test_server_that_stays_down_is_an_error_within_the_deadline(stack: ExitStack) -> None:
    setup = EngineSetup(stack, deadline=0.4)
    setup.engine.server_pool.deadline = 20.0
    setup.load(0)
    setup.engine.server_pool.deadline = 0.4
    setup.server.die_after = len(setup.server.asked) + 2
    with pytest.raises(RunError, match=r"the engine is gone.*has not come back within 0\.4 seconds"):
        setup.generate()


@pytest.mark.long
def test_hanging_server_is_dropped_and_others_take_over(stack: ExitStack) -> None:
    setup = EngineSetup(stack, servers=2)
    setup.load(0)
    expected = setup.generate(samples=4)
    setup.engine.server_pool.servers[0].client.deadline = 1.0
    setup.server.hang_after = len(setup.server.asked) + 1
    assert_same_tokens(setup.generate(samples=4), expected)


@pytest.mark.long
def test_late_responses_are_awaited(stack: ExitStack) -> None:
    setup = EngineSetup(stack)
    setup.load(0)
    expected = setup.generate()
    setup.server.late = 0.2
    assert_same_tokens(setup.generate(), expected)


@pytest.mark.long
def test_groups_after_the_deadline_are_missing(stack: ExitStack) -> None:
    setup = EngineSetup(stack)
    setup.load(0)
    setup.server.hang_after = len(setup.server.asked)
    setup.engine.health_check_interval = 60.0
    setup.engine.submit([RolloutRequest(0, Prompts.of(prompts_of()), 2, seed=5)])
    assert list(setup.engine.iter_finished(0, 0.1)) == []


@pytest.mark.long
def test_malformed_response_is_an_error(stack: ExitStack) -> None:
    setup = EngineSetup(stack)
    setup.load(0)
    real = setup.server.respond
    for odd in ({}, {"choices": []}, {"choices": [{"token_ids": [1], "logprobs": None, "weight_versions": None}]}):
        setup.server.respond = lambda _, odd=odd: (200, odd)  # type: ignore[method-assign, misc]
        with pytest.raises(RunError, match=r"vLLM 0\.32"):
            setup.generate(1)
    setup.server.respond = real  # type: ignore[method-assign]
    setup.server.answer = lambda *_: (404, {"detail": "Not Found"})  # type: ignore[method-assign]
    with pytest.raises(RunError, match="--enable-scale-out"):
        setup.generate(1)


@pytest.mark.long
def test_generate_from_seeds_or_greedily(stack: ExitStack) -> None:
    setup = EngineSetup(stack)
    setup.load(0)
    prompts, seeds = Prompts.of(prompts_of()), torch.arange(6).view(3, 2) + 40
    drawn = setup.engine.generate_from_seeds(prompts, 2, seeds)
    turned = setup.engine.generate_from_seeds(prompts, 2, seeds.flip(1))
    for i in range(3):
        for k in range(2):
            one, other = drawn.response[i, k][drawn.mask[i, k]], turned.response[i, 1 - k][turned.mask[i, 1 - k]]
            assert one.tolist() == other.tolist(), "the seed alone decides"
    assert_same_tokens(setup.engine.generate_from_seeds(prompts, 2, None), setup.generate(greedy=True))
    assert int(setup.engine.generate_from_seeds(prompts, 1, None, limit=1).mask.sum(-1).max()) == 1


@pytest.mark.long
def test_weights_after_a_journal_replay_are_sent_with_the_first_request(
    stack: ExitStack,
) -> None:
    setup = EngineSetup(stack)
    setup.engine.first_version = 3
    setup.load(0)
    assert not setup.server.calls and setup.engine.server_pool.version != 0
    rollouts = setup.generate()
    assert setup.engine.server_pool.version == 0 and max_logprob_error(setup.lm, rollouts) < 1e-4


@pytest.mark.long
def test_response_ends_with_the_token_that_completes_a_stop_string(stack: ExitStack) -> None:
    setup = EngineSetup(stack)
    setup.load(0)
    whole = setup.generate()
    setup.engine.stops = SimpleNamespace(end=lambda tokens: 2 if len(tokens) > 2 else 0)  # type: ignore[assignment]
    cut, length = setup.generate(), whole.mask.sum(-1)
    assert int(length.max()) > 2 and torch.equal(cut.mask.sum(-1), length.clamp(max=2))
    assert torch.equal(cut.response[..., :2][cut.mask], whole.response[..., :2][cut.mask])
    assert torch.equal(cut.logp_sampler[cut.mask], whole.logp_sampler[..., :2][cut.mask])
    assert not cut.truncated[length > 2].any() and torch.equal(cut.truncated[length <= 2], whole.truncated[length <= 2])


@pytest.mark.long
def test_response_of_another_version_is_an_error(stack: ExitStack) -> None:
    setup = EngineSetup(stack)
    setup.load(1)
    setup.server.old_version = True
    with pytest.raises(RunError, match=r"answered a request to version 1 with versions \[0\]$"):
        setup.generate()


@pytest.mark.long
def test_slow_call_is_an_error(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = EngineSetup(stack)
    setup.load(0)
    setup.server.hang_after, setup.engine.health_check_interval = len(setup.server.asked), 60.0
    monkeypatch.setattr(remote_engine, "GENERATE_DEADLINE", 0.05)
    with pytest.raises(RunError, match=r"^the engine has finished 0 of 3 groups within 0\.05 seconds$"):
        setup.generate()
    setup.server.hang_after = -1


@pytest.mark.long
def test_agent_servers_generate_plain_prompts(stack: ExitStack) -> None:
    setup = EngineSetup(stack)
    setup.load(0)
    want = setup.generate(seed=7)
    visited = RemoteConversationEngine(setup.policy, setup.lm, 5, 32, 0.7, torch.Generator())
    stack.callback(visited.close)
    visited.load({}, 0)
    prompts = Prompts.of(prompts_of())
    assert_same_tokens(visited.generate(prompts, 2, seed=7), want)
    request = RolloutRequest(0, prompts, 2, seed=7)
    assert visited._generate_all(PendingRollout(request, rollouts=want)) is want, (
        "what a checkpoint has brought is not drawn again"
    )


# ---- one server ---------------------------------------------------------------------------------------


def answering(status: int, text: str, key: str = "") -> ServerClient:
    """A client whose server answers everything with this."""
    client = ServerClient("http://engine/", VLLM(), 1, 5.0, key)
    reply = httpx.MockTransport(lambda _: httpx.Response(status, text=text))
    client._http = httpx.AsyncClient(transport=reply)
    return client


PATH = VLLM.generate_path
ANSWERS: list[tuple[bool, int, str, type[Exception], str]] = [
    (False, 200, "nonsense", RunError, "http://engine{path} did not answer in JSON: nonsense"),
    (False, 200, "my secret", RunError, "http://engine{path} did not answer in JSON: my …"),
    (True, 200, "data: nonsense", RunError, "http://engine{path} did not answer in JSON: nonsense"),
    (True, 400, "too long", RunError, "the engine rejected http://engine{path} with 400: too long"),
    (True, 503, "busy", ServerLostError, "http://engine{path} answered 503: busy"),
]


@pytest.mark.parametrize(("streams", "status", "text", "kind", "message"), ANSWERS)
def test_unreadable_response_is_shown_in_the_error(
    streams: bool, status: int, text: str, kind: type[Exception], message: str
) -> None:
    async def ask() -> None:
        await answering(status, text, "secret").generate(
            EngineRequest([1], 2, 1.0, 3, (4,)), "salt", (lambda _: None) if streams else None
        )

    with pytest.raises(kind) as error:
        asyncio.run(ask())
    assert str(error.value) == message.format(path=PATH)


def test_cancelled_waiter_passes_its_semaphore_slot_on() -> None:
    async def check() -> None:
        slots = PrioritySemaphore(1)

        async def work() -> None:
            async with slots(0):
                pass

        async def cancelled(task: "asyncio.Task[None]") -> None:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        async with slots(0):
            early, late = asyncio.create_task(work()), asyncio.create_task(work())
            await asyncio.sleep(0)
            await cancelled(early)
            assert slots.free == 0
        await cancelled(late)  # the lane is its own already, and it has not begun to work
        assert slots.free == 1
        await asyncio.wait_for(work(), 5)
        assert slots.free == 1

    asyncio.run(check())


def test_missing_httpx_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ConfigError, match=r"^--engine needs httpx: pip install 'ascent-rl\[judge\]'$"):
        ServerClient("http://engine", VLLM(), 1, 5.0)


# ---- a server that Ascent starts ---------------------------------------------------------------------


def fake_environment(folder: Path, warm: str) -> Path:
    """A virtual environment whose interpreter runs the stand-in wherever vLLM is meant: `warm` has torch loaded."""
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    stand_in = Path(__file__).parents[2] / "stand_in.py"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\nshift 2\nexec {warm} {stand_in} "$@"\n'
    )
    python.chmod(0o755)
    return folder / "venv"


def group_of(pid: int) -> list[int]:
    """The processes of a group that are there, zombies aside."""
    there = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == pid and fields[0] != "Z":
            there.append(int(stat.parent.name))
    return there


def wait_for_end(*groups: int) -> None:
    """Until none of their processes is left."""
    until = time.monotonic() + 60
    while left := [pid for group in groups for pid in group_of(group)]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


@pytest.mark.slow
def test_server_is_started_restarted_after_a_kill_and_stopped(tmp_path: Path, warm_python: Any) -> None:
    lm = model_of(**SMALL)
    venv = fake_environment(tmp_path, warm_python.executable)
    policy = CausalLM("tiny", engine="vllm", engine_python=str(venv), engine_deadline=120.0)
    engine = RemoteEngine(policy, lm, 5, 32, 0.7, torch.Generator())
    engine.folder = tmp_path / "engine"
    try:
        engine.load({}, 0)
        (server,) = engine.server_pool.servers
        assert server.process is not None and server.process._process is not None
        first = server.process._process.pid
        expected = engine.generate(Prompts.of(prompts_of()), 4, seed=5)
        engine.submit([RolloutRequest(0, Prompts.of(prompts_of()), 4, seed=5)])
        os.killpg(first, signal.SIGKILL)
        done = {int(each.prompt_indices[0]): each.rollouts for each in engine.iter_finished(0, 300.0)}
        assert sorted(done) == [0, 1, 2]
        for place, rollouts in done.items():
            width = rollouts.mask.shape[-1]
            assert torch.equal(rollouts.response, expected.response[place : place + 1, :, :width] * rollouts.mask)
        second = server.process._process.pid
        assert second != first and group_of(second)
        assert (tmp_path / "engine" / "vllm.log").read_text().count("the stand-in listens") == 2
    finally:
        engine.close()
    wait_for_end(first, second)


@pytest.mark.slow
def test_server_ends_when_ascent_is_killed(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exec {sys.executable} "$@"; fi\necho started\nexec sleep 600\n'
    )
    python.chmod(0o755)
    process = ServerProcess(str(python), VLLM(), ServerConfig({}, "float32", 64, 8, True), "", tmp_path)
    told, tells = os.pipe()
    trainer = os.fork()
    if not trainer:
        try:
            process.start()
            assert process._process is not None
            os.write(tells, str(process._process.pid).encode())
            signal.pause()
        finally:
            os._exit(1)
    server = int(os.read(told, 20))
    while "started" not in process.log.read_text():
        time.sleep(0.01)
    assert group_of(server)
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    wait_for_end(server)
    os.close(told), os.close(tells)


def test_server_start_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named vllm >&2\nexit 3\n")
    python.chmod(0o755)
    process = ServerProcess(str(python), VLLM(), ServerConfig({}, "float32", 64, 8, True), "", tmp_path)
    process.start()
    with pytest.raises(RunError, match=r"(?s)ended with exit code 3\..*no module named vllm"):
        process.wait_until_ready(lambda: False)


def test_server_killed_during_startup_is_lost(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o755)
    process = ServerProcess(str(python), VLLM(), ServerConfig({}, "float32", 64, 8, True), "", tmp_path)
    process.start()
    with pytest.raises(ServerLostError, match="--engine vllm was killed while it started"):
        process.wait_until_ready(lambda: False)
    assert not process.is_running


def test_server_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("")
    python.chmod(0o755)
    process = ServerProcess(
        str(tmp_path), VLLM(), ServerConfig({}, "bfloat16", 512, 64, False), "--tensor-parallel-size 2", tmp_path
    )
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: command)
    process.start()
    arguments: Any = process._process
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert arguments[-2:] == ["--tensor-parallel-size", "2"] and "--enforce-eager" not in arguments
    assert "processed_logprobs" in arguments and "ascent_worker.Worker" in arguments
    with pytest.raises(ConfigError, match="make engines"):
        find_python(str(tmp_path / "nothing"))


def test_vllm_worker_extension_does_not_import_ascent() -> None:
    assert [path.name for path in WORKER_EXTENSION_FOLDER.glob("*.py")] == ["ascent_worker.py"]
    assert (
        "import ascent" not in (source := (WORKER_EXTENSION_FOLDER / "ascent_worker.py").read_text())
        and "from ascent" not in source
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_max_model_len_includes_prompts(engine: str) -> None:
    given = {"engine": engine, "engine.url": "http://127.0.0.1:1", "model": "m", "temperature": 0.5}
    config = configure("gsm8k", given | {"max_tokens": 100, "max_prompt": 40})
    remote = LanguageBackend().remote_engine(config, model_of(**SMALL), torch.Generator())
    assert (remote.limit, remote.temperature, remote.max_sampled_tokens) == (100, 0.5, 0)
    assert remote.server_pool._config.max_model_len == 140


# ---- settings, and a whole run -----------------------------------------------------------------------


def test_every_engine_has_settings_and_a_stand_in() -> None:
    names = [adapter.name for adapter in ENGINES]
    assert ["local", *names] == list(get_args(get_type_hints(CausalLM)["engine"]))
    assert names == list(STAND_INS)


WRONG: dict[str, dict[str, Any]] = {
    "say where it is": {"engine": "vllm"},
    "either by --engine.url": {"engine": "vllm", "engine.url": "http://localhost:1", "engine.python": "x"},
    "are for --engine vllm": {"engine.url": "http://localhost:1"},
    "must not be reachable": {"engine": "vllm", "engine.url": "http://10.0.0.7:8000"},
    "seconds above 0": {"engine": "vllm", "engine.python": "x", "engine.deadline": 0.0},
    "for a server that Ascent starts": {"engine": "vllm", "engine.url": "http://[::1]:1", "engine.args": "--x"},
}


def test_engine_is_set_by_flags_keywords_and_files(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        'task = "countdown"\nmodel = "tiny"\n[engine]\nname = "vllm"\nurl = ["http://localhost:1"]\n'
    )
    both, file = (
        "--model tiny --engine vllm --engine.url http://localhost:1 http://[::1]:2",
        f"--config {tmp_path}/run.toml",
    )
    config, _ = parse_train(["countdown", *both.split(), "--engine.deadline", "9"], "ascent train")
    policy = config.policy
    assert policy.engine_url == ("http://localhost:1", "http://[::1]:2") and policy.engine_deadline == 9.0
    config, _ = parse_train(file.split(), "ascent train")
    assert (config.policy.engine, config.policy.engine_url) == ("vllm", ("http://localhost:1",))
    assert config.old_logp == "learner" and configure("countdown", {"model": "tiny"}).old_logp == "auto"
    with pytest.raises(ConfigError, match="has no such field"):
        parse_train(["sort", "--engine", "vllm"], "ascent train")


@pytest.mark.parametrize("words", WRONG)
def test_invalid_engine_settings_are_rejected(words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configure("countdown", {"model": "tiny"} | WRONG[words])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"top_p": 0.9}, "does not report the kept mass"),
        ({"top_k": 3}, "does not report the kept mass"),
        ({"min_tokens": 2}, "does not report the kept mass"),
        ({"temperature": 0.005}, "samples from another distribution below 0.01"),
        ({"engine": "sglang", "top_p": 0.9}, "does not request the kept mass"),
        ({"engine": "sglang", "temperature": 1e-7}, "samples from another distribution below 1e-06"),
    ],
)
def test_unsupported_engine_settings_are_rejected_early(more: dict[str, Any], words: str) -> None:
    from ascent.build.backends import backend_of

    config = configure("countdown", {"model": "tiny", "engine": "vllm", "engine.url": "http://localhost:1"} | more)
    with pytest.raises(ConfigError, match=words):
        backend_of(config).check(config)


HIGHER = """
from ascent import Environment, Step
class Higher(Environment):
    turns = 0
    def step(self, action):
        self.turns += 1
        return Step("higher", len(action) / 10, done=self.turns == 2)
"""


@pytest.mark.smoke
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"algorithm": "ppo", "policy.lora": 4},
        {"environment": "python:{}/higher.py:Higher", "turn_tokens": 3},
    ],
    ids=["grpo", "ppo with adapters", "conversations"],
)
def test_run_with_an_engine_resumes_to_the_same_numbers(
    stack: ExitStack, tmp_path: Path, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (
        monkeypatch.setattr(weight_probe, "MAX_PROMPT_TOKENS", 24),
        monkeypatch.setattr(weight_probe, "MAX_RESPONSE_TOKENS", 8),
    )
    model = write_tiny(tmp_path / "tiny", max_position_embeddings=128)
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "higher.py").write_text(HIGHER)
    more = {name: value.format(tmp_path) if name == "environment" else value for name, value in more.items()}
    import transformers

    quiet = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    server = stack.enter_context(serving(quiet))
    how = {
        "steps": 2,
        "prompts": 2,
        "samples": 2,
        "max_tokens": 4,
        "eval_prompts": 2,
        "checkpoint_every": 1,
        "lr": 1e-3,
    }
    engine = {"engine": "vllm", "engine.url": server.url, "max_prompt": 64, "threads": 1, "policy.device": "cpu"}
    settings = {"model": str(model), **how, **engine, **more}
    run = ascent.train(f"jsonl:{tmp_path}/rows.jsonl", out=tmp_path / "run", show=False, **settings)
    assert run.status == "finished" and run.config.policy.engine == "vllm" and run.config.old_logp == "learner"
    assert all(line["sampling/sampling_logp_difference/mean"] < 1e-5 for line in run.metrics)
    assert server.calls.count("/update_weights") == 3
    before = [line["reward"] for line in run.metrics]
    again = ascent.resume(run.folder, from_step=1)
    assert [line["reward"] for line in again.metrics] == before

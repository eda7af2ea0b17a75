"""Decisions of the backend of language models: what it refuses, where it shards, and what a run starts from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ascent.build import precision
from ascent.build.backend import InitialParams
from ascent.build.backends import backend_of
from ascent.build.language_backend import LanguageBackend, shards_state
from ascent.build.language_reward_model import HEAD
from ascent.core.algorithms import ALGORITHMS
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.types import Streams
from ascent.distributed.rank_group import RankGroup
from ascent.distributed.ranks import SINGLE_PROCESS, Ranks
from ascent.settings import configure
from ascent.training.fsdp import ShardedLearner
from ascent.training.language_learner import LanguageLearner
from ascent.training.micro_batches import ACTIVATION_FRACTION, STATE_BYTES_PER_PARAM, static_bytes
from tests.language import model_of, write_tiny

URL = "http://127.0.0.1:1"
GYM = "reasoning-gym:chain_sum"


def config_of(**settings: Any) -> Config:
    return configure(GYM, {"model": "any"} | settings)


class Two(Ranks):
    world_size = 2


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"algorithm": "trpo"},
            "--ranks.shard shard with --update trust-region: FSDP2 does not differentiate twice, as Fisher products "
            "do. Set replicate, or leave it out",
        ),
        (
            {"policy.dtype": "float16"},
            "--ranks.shard shard with --policy.dtype float16: float16 gradients are not supported with FSDP2. Set "
            "replicate, or leave it out",
        ),
    ],
)
def test_what_cannot_be_trained_in_shards_is_refused(settings: dict[str, Any], message: str) -> None:
    config = config_of(**settings, **{"ranks.shard": "shard"})
    with pytest.raises(ConfigError) as refusal:
        backend_of(config).check(config)
    assert str(refusal.value) == message
    replicated = config_of(**settings, **{"ranks.shard": "replicate"})
    backend_of(replicated).check(replicated)


def test_a_serving_engine_is_refused_under_torchrun() -> None:
    config = config_of(engine="vllm", **{"engine.url": (URL,)})
    with pytest.raises(ConfigError, match=r"^--engine vllm is not supported under torchrun: set --engine local$"):
        backend_of(config).check_ranks(config, 2)
    backend_of(config).check_ranks(config, 0)
    backend_of(config).check_ranks(config_of(), 2)


def test_a_serving_engine_is_refused_where_nothing_is_sampled(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1", "completion": "2"}) + "\n")
    settings = {"model": "any", "engine": "sglang", "engine.url": (URL,), "algorithm": "sft"}
    config = configure(f"demonstrations:{rows}", settings)
    with pytest.raises(ConfigError) as refusal:
        backend_of(config).check(config)
    assert str(refusal.value) == "--engine sglang samples, and this run learns from demonstrations: leave it out"


# ---- shards


def test_state_is_sharded_where_one_gpu_cannot_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, auto = model_of(), config_of()
    assert not shards_state(auto, lm, SINGLE_PROCESS)
    assert not shards_state(auto, lm, Two()), "a CPU is not asked"
    assert shards_state(config_of(**{"ranks.shard": "shard"}), lm, Two())
    assert not shards_state(config_of(**{"ranks.shard": "replicate"}), lm, Two())

    monkeypatch.setattr(type(lm), "device", torch.device("cuda"))
    state = STATE_BYTES_PER_PARAM * sum(p.numel() for p in lm.model.parameters())
    gpu = SimpleNamespace(total_memory=state / ACTIVATION_FRACTION - 100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    assert shards_state(auto, lm, Two())
    assert not shards_state(auto, lm, Ranks()), "one rank has nobody to share with"
    assert not shards_state(config_of(algorithm="trpo"), lm, Two())
    gpu.total_memory = state / ACTIVATION_FRACTION + 100
    assert not shards_state(auto, lm, Two())


@pytest.fixture
def one_rank() -> Iterator[RankGroup]:
    """A group of one, in this process."""
    group = RankGroup(60.0, "cpu", (dist.TCPStore("127.0.0.1", 0, 1, True), 0, 1))
    yield group
    group.heartbeat.close()
    dist.destroy_process_group()


@pytest.mark.parametrize(("gather", "large"), [(0.01, False), (1e-6, True)])
def test_ranks_that_shard_have_a_sharded_learner(gather: float, large: bool, one_rank: RankGroup) -> None:
    settings = {"ranks.gather": gather, "algorithm": "ppo", "policy.checkpointing": True, "micro_batch": 64}

    def made(shard: str) -> Any:
        config = config_of(**settings, **{"ranks.shard": shard})
        learner: Any = LanguageBackend().learner(config, model_of(dtype=torch.float32), Streams(0), one_rank)
        assert learner.ranks is one_rank and learner.critic is not None
        assert (learner.plan.tokens, learner.checkpointing) == (64, True)
        return learner

    assert type(made("replicate")) is LanguageLearner
    sharded = made("shard")
    assert type(sharded) is ShardedLearner
    assert sharded.writes_shards is large, "its parameters take less than a MiB, and 1e-6 GiB are about a KiB"


def test_float16_parameters_are_refused_in_shards(one_rank: RankGroup) -> None:
    grpo = ALGORITHMS["grpo"]
    settings = (grpo.update, False, grpo.outputs, 0, False, one_rank)
    with pytest.raises(ConfigError) as refusal:
        ShardedLearner(model_of(dtype=torch.float16), *settings)
    message = "--policy.dtype float16 with shards: its gradients are not scaled. Set float32 or bfloat16"
    assert str(refusal.value) == message


# ---- what a run starts from


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "1+1", "chosen": "2", "rejected": "3"}) + "\n")
    return file


def reward_model_config(pairs: Path, model: Path) -> Config:
    limits = {"max_prompt": 24, "max_tokens": 8}
    return configure(f"preferences:{pairs}", {"model": str(model), "preset": "reward-model", **limits})


@pytest.mark.long
def test_a_reward_model_starts_from_a_policy_or_from_a_reward_model(pairs: Path, tiny_folder: Path) -> None:
    config = reward_model_config(pairs, tiny_folder)

    def trained(start: dict[str, Any] | None) -> dict[str, torch.Tensor]:
        given = None if start is None else InitialParams(Path("RUN"), start)
        lm, _ = LanguageBackend().model(config, Streams(0), given)
        return {name: p.detach().clone() for name, p in lm.trained().items()}

    first = trained(None)
    weight = f"{HEAD}.weight"
    moved = {name: p + 0.25 for name, p in first.items()}
    of_rewards = trained(moved)
    assert set(of_rewards) == set(moved)
    assert all(torch.equal(of_rewards[name], moved[name]) for name in moved), "its head is the one it was trained with"
    policy = {name: p + 0.5 for name, p in config.policy.load().trained().items()}
    of_policy = trained(policy)
    assert set(of_policy) == set(first)
    assert torch.equal(of_policy[weight], first[weight]), "a policy has no head, and gets a new one"
    both = policy.keys() & first.keys()
    assert both and all(torch.equal(of_policy[name], policy[name]) for name in both)


def test_a_start_from_another_model_names_its_run(pairs: Path, tiny_folder: Path) -> None:
    config = reward_model_config(pairs, tiny_folder)
    with pytest.raises(ConfigError, match=r"^--init runs/other: these parameters are not this model's"):
        LanguageBackend().model(config, Streams(0), InitialParams(Path("runs/other"), {"other.weight": torch.ones(1)}))


def test_a_reward_model_is_trained_on_pairs_with_the_limits_of_the_policy(pairs: Path) -> None:
    config = config_of(max_prompt=48, max_tokens=12)
    task, settings = LanguageBackend().reward_model_task(config, pairs)
    assert (task, settings) == (
        f"preferences:{pairs.resolve()}",
        {"preset": "reward-model", "max_prompt": 48, "max_tokens": 12},
    )
    made = configure(task, {"model": "any", **settings})
    assert made.algorithm.loss.trains == "rewards" and (made.task.max_prompt, made.task.max_tokens) == (48, 12)


@pytest.mark.long
@pytest.mark.parametrize("share", [True, False])
def test_a_model_whose_prompts_cannot_be_shared_says_so_if_that_was_asked_for(share: bool, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "capped", kind="Gemma2", sliding_window=16, attn_logit_softcapping=5.0)
    config = config_of(model=str(folder), max_prompt=24, max_tokens=8, **{"policy.share-prompts": share})
    lm, notes = LanguageBackend().model(config, Streams(0), None)
    assert not lm.can_share_prompts
    assert len(notes) == share
    for note in notes:
        assert note.startswith(
            "prompts are encoded once per response and not once per group: the architecture does not allow it ("
        )


# ---- precision


def test_a_model_that_crowds_its_gpu_gets_bfloat16_state(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, config = model_of(dtype=torch.float16), config_of()
    monkeypatch.setattr(precision, "max_activation", lambda _: 1.0)
    assert precision.choose_precision(config, lm) == ("float16", None)
    monkeypatch.setattr(type(lm), "device", torch.device("cuda"))
    taken = static_bytes(lm, False, None)
    gpu = SimpleNamespace(total_memory=int(taken / precision.COMPACT_THRESHOLD) + 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    assert precision.choose_precision(config, lm) == ("float16", None)
    frozen = replace(config, algorithm=replace(config.algorithm, reference=ALGORITHMS["rloo"].reference))
    why = "bfloat16 state, which fits the GPU, is for parameters in bfloat16"
    assert precision.choose_precision(frozen, lm) == ("auto", why)
    gpu.total_memory -= 20
    assert precision.choose_precision(config, lm) == ("auto", why)

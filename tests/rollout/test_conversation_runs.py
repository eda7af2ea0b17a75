"""Whole runs with environments and agents: failed episodes, limits, rewards, killed and resumed runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ascent
from ascent.inference.remote import weight_probe
from tests.cases import mostly_smokes
from tests.language import write_tiny
from tests.stand_in import serving

pytestmark = pytest.mark.slow

AGENTS = """
import json, urllib.request

def ask(base_url, key, messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)) as answer:
        return json.loads(answer.read())["choices"][0]["message"]["content"]

def talk(base_url, key, messages):
    said = ask(base_url, key, messages)
    return ask(base_url, key, [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "go on"}])

def one_in_three_never_asks(base_url, key, messages, seed):
    return len(talk(base_url, key, messages)) / 20 if seed % 3 else 1.0

def some_groups_never_ask(base_url, key, problem, messages):
    return len(talk(base_url, key, messages)) / 20 if int(problem.answer) % 4 else None

def never_asks(base_url, key):
    return 1.0

def fails_at_once(base_url, key):
    raise RuntimeError("the database is away")

def asks_without_end(base_url, key, messages):
    while True:
        messages = [*messages, {"role": "assistant", "content": ask(base_url, key, messages)}]
        messages.append({"role": "user", "content": "go on"})

def asks_twice(base_url, key, messages):
    talk(base_url, key, messages)
    return 1.0

def begins_with_its_seed(base_url, key, messages, seed):
    ask(base_url, key, [{"role": "system", "content": f"session {seed:016x}, please answer"}, *messages], max_tokens=2)
    return 1.0

def some_pay(base_url, key, messages, seed):
    talk(base_url, key, messages)
    return 1.0 if seed % 2 else None

def tells_its_seed(base_url, key, messages, seed):
    return {"reward": len(ask(base_url, key, messages)) / 20, "metrics": {"seed": seed % 1_000_003}}
"""

ENVIRONMENTS = """
from ascent import Environment, Step

class Endless(Environment):
    def step(self, action):
        return Step("go on", 0.1)

class ThreeTurns(Environment):
    def begin(self, problem, rng):
        self.turns = 0

    def step(self, action):
        self.turns += 1
        return Step("more", 0.25 * (len(action) % 2), self.turns == 3)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=512)


@pytest.fixture
def base(model: Path, tmp_path: Path) -> dict[str, Any]:
    """Return settings of a small run with the rows, agents and environments of this folder."""
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "environments.py").write_text(ENVIRONMENTS)
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i), "own": 4 if i % 2 else None} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        **{"task": f"jsonl:{tmp_path}/rows.jsonl", "model": str(model), "threads": 1, "preflight": False},
        **{"steps": 2, "prompts": 2, "samples": 3, "lr": 1e-3, "check": "number", "reward_workers": 1},
        **{"max_prompt": 96, "max_tokens": 8, "turn_tokens": 4, "max_context": 300, "max_reward_errors": 1.0},
        **{"eval_prompts": 2, "eval_every": 1, "checkpoint_every": 1, "record_every": 1, "record_rollouts": "all"},
    }


@pytest.fixture
def engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Return the settings of a remote engine."""
    from transformers import AutoModelForCausalLM

    (
        monkeypatch.setattr(weight_probe, "MAX_PROMPT_TOKENS", 20),
        monkeypatch.setattr(weight_probe, "MAX_RESPONSE_TOKENS", 2),
    )
    with serving(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)) as server:
        yield {"engine": "vllm", "engine.url": server.url, "policy.device": "cpu", "max_mismatch": 99.0}


def killed_after(step: int, settings: dict[str, Any], out: Path) -> tuple[ascent.Run, Path]:
    """Return a whole run, and the folder that a kill right after the records of a step leaves."""
    left = out.with_name(f"{out.name}-killed")
    for each in ascent.steps(**settings, out=out):
        if each.number == step:
            shutil.copytree(out, left)
    return ascent.load(out), left


# ---- responses without a drawn token ------------------------------------------------------------------------------

CRITICS = [{"algorithm": "ppo", "advantage": name} for name in ("td", "k-step", "gae", "monte-carlo")]
ADVANTAGES: list[dict[str, Any]] = [
    *({"advantage": name} for name in ("raw", "centered", "leave-one-out", "normalized", "best-only", "running-mean")),
    *({"advantage": name} for name in ("greedy", "batch-normalized", "by-turn")),
    *({"advantage": "optimal-baseline", "advantage.norm": "length"}, *CRITICS),
    {"algorithm": "ppo", "advantage": "gae", "advantage.per": "turn", "advantage.bootstrap": True},
    {"algorithm": "grpo", "groups": "with-signal"},
    {"algorithm": "grpo", "old_logp": "learner", "correction": "truncated", "epochs": 2},
    {"algorithm": "grpo", "weights": "fixed-length", "shaping": "overlong", "minibatches": 2},
]


@pytest.mark.parametrize("agent", ["one_in_three_never_asks", "some_groups_never_ask", "never_asks", "fails_at_once"])
@pytest.mark.parametrize("more", mostly_smokes(ADVANTAGES, {"advantage": "by-turn"}), ids=str)
def test_response_without_a_sampled_token_is_invalid(
    base: dict[str, Any], tmp_path: Path, agent: str, more: dict[str, Any]
) -> None:
    settings = base | {"agent": f"python:{tmp_path}/agents.py:{agent}"} | more
    run = ascent.train(**settings, out=tmp_path / "run")
    assert run.status == "finished" and len(run.metrics) == 2
    rows = [row for step in range(2) for row in run.rollouts(step)]
    empty = [row for row in rows if not row["response"]]
    dropped = more.get("groups") == "with-signal" and sum(step["reward_errors"] for step in run.metrics)
    assert (empty or dropped) and all(row["status"] == "failed" and not row["valid"] for row in empty)
    if "advantage" in more and more["advantage"] != "greedy":  # whose baselines may fail too
        assert sum(step["reward_errors"] for step in run.metrics) == len(empty)
    drawn = [row for row in rows if row["response"]]
    assert all(len(row["turn_reward"]) == 2 for row in drawn)
    assert not drawn or agent in ("one_in_three_never_asks", "some_groups_never_ask")
    numbers = [value for step in run.metrics for value in step.values() if isinstance(value, float)]
    assert all(value == value for value in numbers)
    if agent in ("never_asks", "fails_at_once"):
        assert run.metrics[-1]["eval/reward_errors"] == 2 and "reward" not in {
            name for name, value in run.metrics[-1].items() if value is not None
        }


def test_run_with_responses_without_sampled_tokens_resumes_exactly(base: dict[str, Any], tmp_path: Path) -> None:
    settings = base | {"agent": f"python:{tmp_path}/agents.py:one_in_three_never_asks", "steps": 3}
    whole, left = killed_after(1, settings, tmp_path / "run")
    again = ascent.resume(left)
    assert again.status == "finished" and sum(step["reward_errors"] for step in whole.metrics) > 0
    for name in ("reward", "loss", "grad_norm", "reward_errors"):
        assert [step[name] for step in whole.metrics] == [step[name] for step in again.metrics], name


def test_journal_of_a_remote_engine_with_responses_without_sampled_tokens(
    base: dict[str, Any], engine: dict[str, Any], tmp_path: Path
) -> None:
    settings = base | engine | {"agent": f"python:{tmp_path}/agents.py:one_in_three_never_asks"}
    settings |= {"steps": 4, "checkpoint_every": 2, "eval_every": 9}
    whole, left = killed_after(2, settings, tmp_path / "run")
    again = ascent.resume(left)
    assert [step["reward_errors"] for step in whole.metrics] == [step["reward_errors"] for step in again.metrics]
    assert sum(step["reward_errors"] for step in whole.metrics) > 0
    assert [step["loss"] for step in whole.metrics] == [step["loss"] for step in again.metrics]


# ---- runs that are killed and resumed -----------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", mostly_smokes(["leave-one-out", "greedy"], "leave-one-out"))
def test_resumed_run_that_samples_ahead_remotely_keeps_its_environment(
    base: dict[str, Any], engine: dict[str, Any], tmp_path: Path, advantage: str
) -> None:
    settings = base | engine | {"environment": f"python:{tmp_path}/environments.py:ThreeTurns", "max_tokens": 24}
    settings |= {"steps": 4, "prompts": 1, "samples": 2, "ahead": 2, "checkpoint_every": 2, "eval_every": 9}
    settings |= {"turn_tokens": 3, "advantage": advantage}
    whole, left = killed_after(2, settings, tmp_path / "run")
    again = ascent.resume(left)
    assert [step["turns"] for step in again.metrics] == [3.0] * 4
    for name in ("turns", "reward", "completions/mean_length"):
        assert [step[name] for step in whole.metrics] == [step[name] for step in again.metrics], name


@pytest.mark.parametrize("step", mostly_smokes([2, 3], 2))
def test_steps_after_a_replayed_step_have_new_seeds(
    base: dict[str, Any], engine: dict[str, Any], tmp_path: Path, step: int
) -> None:
    settings = base | engine | {"agent": f"python:{tmp_path}/agents.py:tells_its_seed", "samples": 2}
    settings |= {"steps": 5, "checkpoint_every": 2 if step == 2 else 9, "max_tokens": 4, "eval_every": 9, "prompts": 1}
    whole, left = killed_after(step, settings, tmp_path / "run")
    again = ascent.resume(left)
    seeds = [each["agent/seed"] for each in whole.metrics]
    assert len(set(seeds)) == 5
    assert [each["agent/seed"] for each in again.metrics] == seeds
    assert [each["reward"] for each in again.metrics] == [each["reward"] for each in whole.metrics]


# ---- limits -------------------------------------------------------------------------------------------------------


def sampled_tokens(row: dict[str, Any]) -> int:
    return sum(row["mask"]) if row.get("mask") else len(row["response"])


def played(tmp_path: Path, how: str) -> dict[str, str]:
    """Conversations that end only by a limit, with an environment or an agent."""
    if how == "environment":
        return {"environment": f"python:{tmp_path}/environments.py:Endless"}
    return {"agent": f"python:{tmp_path}/agents.py:asks_without_end"}


@pytest.mark.parametrize("how", ["environment", "agent"])
@pytest.mark.parametrize("served", mostly_smokes([False, True], False))
@pytest.mark.parametrize("context", [300, 112])
def test_token_limits_of_conversations_count_sampled_tokens(
    base: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest, how: str, served: bool, context: int
) -> None:
    """A context of 112 tokens leaves 16 tokens after the prompt, fewer than --max-tokens."""
    settings = base | {"limit_column": "own", "max_tokens": 24, "max_context": context, "turn_tokens": 0, "steps": 1}
    settings |= played(tmp_path, how) | (request.getfixturevalue("engine") if served else {})
    run = ascent.train(**settings | {"prompts": 6, "samples": 2, "eval_every": 9}, out=tmp_path / "run")
    rows = list(run.rollouts(0))
    for row in rows:
        number = int(row["prompt_text"].split("+")[0].split()[-1])
        limit = 4 if number % 2 else 24
        assert 0 < sampled_tokens(row) <= limit and len(row["response"]) <= context - 96, row
        assert row["truncated"] and row["status"] == "ok"
        assert number % 2 == 0 or sampled_tokens(row) == 4 or context == 112
    assert max(map(sampled_tokens, rows)) > 4


@pytest.mark.parametrize("how", ["environment", "agent"])
@pytest.mark.parametrize("served", mostly_smokes([False, True], False))
def test_response_that_reaches_the_turn_limit_is_truncated(
    base: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest, how: str, served: bool
) -> None:
    settings = base | {"max_turns": 2, "steps": 1, "eval_every": 9, "stop": [*"abcdefghijklmnopqrstuvwxyz0123456789"]}
    settings |= {"max_tokens": 64, "turn_tokens": 0} | (request.getfixturevalue("engine") if served else {})
    run = ascent.train(**settings | played(tmp_path, how), out=tmp_path / "run")
    assert run.metrics[0]["completions/clipped_ratio"] == 1.0
    assert run.metrics[0]["turns"] == 2 and run.metrics[0]["turns/cut"] == 0
    assert all("the limit of 2 turns" in row["reason"] for row in run.rollouts(0))
    ends = {"environment": {"environment": f"python:{tmp_path}/environments.py:ThreeTurns", "max_turns": 3}}
    ends["agent"] = {"agent": f"python:{tmp_path}/agents.py:asks_twice"}
    run = ascent.train(**settings | ends[how], out=tmp_path / "ends")
    assert run.metrics[0]["completions/clipped_ratio"] == 0.0, "the last turn that is allowed ended by itself"


@pytest.mark.parametrize("how", ["none", "environment", "agent"])
def test_fixed_length_divides_by_the_limit_of_sampled_tokens(base: dict[str, Any], tmp_path: Path, how: str) -> None:
    settings = base | {"weights": "fixed-length", "max_tokens": 16, "steps": 1, "eval_every": 9}
    settings |= {} if how == "none" else played(tmp_path, how)
    for step in ascent.steps(**settings, out=tmp_path / "run"):
        weight = step._parts.config.algorithm.weights(step.batch)
        assert torch.allclose(weight[step.batch.mask], torch.tensor(1 / (6 * 16)))


def test_overlong_shaping_counts_sampled_tokens_with_different_prompts_in_a_group(
    base: dict[str, Any], tmp_path: Path
) -> None:
    settings = base | {"shaping": "overlong", "shaping.margin": 16, "max_tokens": 32, "steps": 1, "eval_every": 9}
    settings |= {"max_context": 140}
    settings |= {"agent": f"python:{tmp_path}/agents.py:begins_with_its_seed", "stop": [*"abcdefghijklmnopqrstuvwxyz"]}
    settings |= {"advantage": "raw"}
    run = ascent.train(**settings, out=tmp_path / "run")
    ended = [row for row in run.rollouts(0) if not row["truncated"]]
    assert ended and all(len(row["response"]) > 20 for row in ended), "the prompts of a group differ"
    assert all(set(row["advantage"]) == {1.0} for row in ended)


# ---- process rewards ----------------------------------------------------------------------------------------------


class Constant:
    """A process reward that gives every step the same score and records its inputs."""

    separator = "\n"

    def __init__(self, score: float):
        self.score, self.asked = score, list[Any]()

    def rate(self, responses: Any) -> list[list[float]]:
        self.asked += responses
        return [[self.score] * len(steps) for _, steps, _ in responses]


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Constant:
    """Replace the process reward of a run."""
    from ascent.build import reward_loading

    (tmp_path / "run-of-it" / "checkpoints" / "step_000001").mkdir(parents=True)
    (tmp_path / "run-of-it" / "config.json").write_text(json.dumps({"loss": {"name": "step-value"}}))
    model = Constant(0.0)
    monkeypatch.setattr(reward_loading, "_reward", lambda *_: model)
    return model


@pytest.mark.parametrize("kind", ["process", "process-score"])
def test_agent_reward_counts_once_with_process_rewards(
    base: dict[str, Any], process: Constant, tmp_path: Path, kind: str
) -> None:
    settings = base | {"reward": ["own", f"{kind}:{tmp_path}/run-of-it"], "steps": 1, "samples": 6, "eval_every": 9}
    run = ascent.train(**settings, agent=f"python:{tmp_path}/agents.py:some_pay", out=tmp_path / "run")
    rewards = [row["reward"] for row in run.rollouts(0)]
    assert {0.0, 1.0} == set(rewards)
    assert all(row["turn_reward"] in ([0.0, 1.0], [0.0, 0.0]) for row in run.rollouts(0))


@pytest.mark.parametrize("how", ["environment", "agent"])
def test_process_rewards_score_turns_after_their_history(
    base: dict[str, Any], process: Constant, tmp_path: Path, how: str
) -> None:
    """Each turn is scored separately, with the turns and observations before it as messages."""
    process.score = 0.5
    settings = base | {"reward": ["own", f"process-score:{tmp_path}/run-of-it"], "steps": 1, "eval_every": 9}
    settings |= {"environment": f"python:{tmp_path}/environments.py:ThreeTurns", "max_tokens": 32}
    if how == "agent":
        settings |= {"environment": "", "agent": f"python:{tmp_path}/agents.py:some_pay"}
    run = ascent.train(**settings, out=tmp_path / "run")
    asked = [chat for chat, _, _ in process.asked]
    observation = "more" if how == "environment" else "go on"
    for chat, steps, _ in process.asked:
        assert [message["role"] for message in chat] == ["user", *["assistant", "user"] * (len(chat) // 2)]
        assert all(message["content"] == observation for message in chat[2::2]) and steps
    assert {len(chat) for chat in asked} == ({1, 3, 5} if how == "environment" else {1, 3})
    first = {re.sub(r"<[^<>]+>", "", "\n".join(steps)) for chat, steps, _ in process.asked if len(chat) == 1}
    assert {chat[1]["content"] for chat in asked if len(chat) > 1} <= first
    if how == "environment":
        assert all(min(row["turn_reward"]) >= 0.5 and len(row["turn_reward"]) == 3 for row in run.rollouts(0))

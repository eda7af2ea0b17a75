"""Whole runs with environments and agents: failed episodes, limits, rewards, and runs that are killed and resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ascent
from ascent.engines.serving import probe
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

def tells_its_seed(base_url, key, messages, seed):
    return {"reward": len(ask(base_url, key, messages)) / 20, "metrics": {"seed": seed % 1_000_003}}
"""

ENVIRONMENTS = """
from ascent import Environment, Step

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
    """Settings of a small run on the rows, agents and environments of this folder."""
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
    """The settings that have a serving engine draw."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(probe, "PROMPT", 20), monkeypatch.setattr(probe, "TOKENS", 2)
    with serving(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)) as server:
        yield {"engine": "vllm", "engine.url": server.url, "policy.device": "cpu", "max_mismatch": 99.0}


def killed_after(step: int, settings: dict[str, Any], out: Path) -> tuple[ascent.Run, Path]:
    """A whole run, and what a kill right after the records of a step would have left of it."""
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
def test_a_response_without_a_drawn_token_is_failed_and_the_run_goes_on(
    base: dict[str, Any], tmp_path: Path, agent: str, more: dict[str, Any]
) -> None:
    settings = base | {"agent": f"python:{tmp_path}/agents.py:{agent}"} | more
    run = ascent.train(**settings, out=tmp_path / "run")
    assert run.status == "finished" and len(run.metrics) == 2
    rows = [row for step in range(2) for row in run.rollouts(step)]
    empty = [row for row in rows if not row["response"]]
    assert empty and all(row["status"] == "failed" and not row["valid"] for row in empty)
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


def test_a_run_with_responses_without_a_drawn_token_resumes_to_the_same_numbers(
    base: dict[str, Any], tmp_path: Path
) -> None:
    settings = base | {"agent": f"python:{tmp_path}/agents.py:one_in_three_never_asks", "steps": 3}
    whole, left = killed_after(1, settings, tmp_path / "run")
    again = ascent.resume(left)
    assert again.status == "finished" and sum(step["reward_errors"] for step in whole.metrics) > 0
    for name in ("reward", "loss", "grad_norm", "reward_errors"):
        assert [step[name] for step in whole.metrics] == [step[name] for step in again.metrics], name


def test_a_serving_engine_and_its_journal_have_responses_without_a_drawn_token(
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
def test_a_resumed_run_that_samples_ahead_from_an_engine_keeps_its_environment(
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
def test_steps_behind_a_replayed_one_have_their_own_seeds(
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

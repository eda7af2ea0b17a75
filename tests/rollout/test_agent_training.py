"""Training with agents that reach the policy through the run's own endpoint."""

from __future__ import annotations

import concurrent.futures
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ascent.api import resume, start
from ascent.build.assemble import RunParts, assemble
from ascent.core.errors import ConfigError, RunError
from ascent.core.loop import score_rollouts
from ascent.core.metric_names import MISMATCH
from ascent.environments.agents import AgentResult, Assignment
from ascent.inference.continuous_batching import LocalConversationEngine
from ascent.inference.remote import weight_probe
from ascent.rollout import agents as in_training
from ascent.runs.display.terminal import Display
from ascent.runs.recorded_conversation import conversation
from ascent.settings import configure
from tests.cases import mostly_smokes
from tests.stand_in import serving

pytestmark = pytest.mark.long
Talk = Callable[[httpx.Client, Assignment], Any]


class Threads:
    """An agent that is a function in this process, with a thread per episode."""

    def __init__(self, talk: Talk):
        self.talk, self.closed = talk, False

    def run(self, assignments: Sequence[Assignment]) -> Iterator[tuple[int, AgentResult]]:
        def one(assignment: Assignment) -> AgentResult:
            headers = {"authorization": f"Bearer {assignment.key}"}
            with httpx.Client(base_url=assignment.url, headers=headers, timeout=60) as client:
                try:
                    said = self.talk(client, assignment)
                except Exception as error:
                    return AgentResult(error=f"{type(error).__name__}: {error}")
            return said if isinstance(said, AgentResult) else AgentResult(reward=said)

        with concurrent.futures.ThreadPoolExecutor(len(assignments)) as pool:
            places = {pool.submit(one, assignment): i for i, assignment in enumerate(assignments)}
            for future in concurrent.futures.as_completed(places):
                yield places[future], future.result()

    def close(self) -> None:
        self.closed = True


def say(client: httpx.Client, messages: list[Any], **more: Any) -> Any:
    answer = client.post("/chat/completions", json={"model": "policy", "messages": messages, **more})
    answer.raise_for_status()
    return answer.json()["choices"][0]["message"]


def two_turns(client: httpx.Client, assignment: Assignment) -> float:
    """Talk for two turns; the reward is the fraction of letters in the policy's text."""
    messages = list(assignment.messages)
    messages += [say(client, messages), {"role": "user", "content": f"and {assignment.problem.answer}?"}]
    last = say(client, messages)["content"]
    return sum(letter.isalpha() for letter in last) / max(len(last), 1)


@pytest.fixture
def config(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A config whose agent is a function of this test."""
    problems = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"say {i}", "answer": str(i)} for i in range(12)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(talk: Talk = two_turns, **more: Any) -> Any:
        monkeypatch.setattr(in_training, "make_agent", lambda *_: Threads(talk))
        settings = {"policy": "causal-lm", "model": str(tiny_folder), "agent": "command:true", "max_tokens": 12}
        settings |= {"max_prompt": 120, "max_context": 220, "turn_tokens": 6, "prompts": 2, "samples": 3, "steps": 2}
        settings |= {"eval_prompts": 2, "max_reward_errors": 1.0, "record_every": 1, "agent_seconds": 60.0}
        return configure(f"jsonl:{problems}", settings | more)

    return make


def drawn(parts: RunParts, greedy: bool = False) -> Any:
    parts.engine.load(parts.learner.params(), 3)
    prompts = parts.task.draw(2, torch.Generator().manual_seed(0))
    return parts.engine.generate(prompts, 3, greedy, seed=5)


def test_episodes_are_rollouts_with_the_learners_log_probs(config: Any) -> None:
    with closing(assemble(config())) as parts:
        rollouts = drawn(parts)
        again = drawn(parts)
        batch, errors = score_rollouts(parts.task, rollouts)
        scores = parts.learner.score(batch.add(logp_old=batch.logp_sampler), frozenset({"logp_old"}))
        greedy = [drawn(parts, greedy=True).response for _ in range(2)]
    assert not errors and bool(batch.valid.all())
    assert torch.equal(rollouts.response, again.response) and torch.equal(rollouts.mask, again.mask)
    gap = (scores["logp_old"] - rollouts.logp_sampler)[rollouts.mask].abs().max()
    assert float(gap) < 1e-5
    assert rollouts.turn is not None and int(rollouts.turn[rollouts.mask].max()) == 1
    assert bool((rollouts.version == 3).all()) and (rollouts.present & ~rollouts.mask).any()
    words = [
        parts.task.text(row[present].tolist())
        for row, present in zip(rollouts.response[0], rollouts.present[0], strict=True)
    ]
    assert all("and " in text for text in words)
    assert batch.reward.shape[-1] == 1 and 0 < float(batch.reward.max()) <= 1
    assert dict(zip(batch.measure_names, batch.measures[0, 0].tolist(), strict=True))["turns"] == 2
    assert torch.equal(*greedy) and torch.equal(greedy[0][:, 0], greedy[0][:, 1])


@pytest.mark.smoke
def test_agents_with_a_remote_engine_that_fails_or_restarts(
    config: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    (
        monkeypatch.setattr(weight_probe, "MAX_PROMPT_TOKENS", 24),
        monkeypatch.setattr(weight_probe, "MAX_RESPONSE_TOKENS", 8),
    )
    with serving(AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)) as server:
        made = config(engine="vllm", steps=1, **{"engine.url": server.url, "policy.device": "cpu"})
        with closing(assemble(made)) as parts:
            parts.engine.health_check_interval = 0.05
            first = drawn(parts)
            server.abort_once = True
            aborted = drawn(parts)
            server.kills = [9]  # tokens until it dies, and comes back without weights
            lost = drawn(parts)
            assert not server.kills
            scores = parts.learner.score(
                score_rollouts(parts.task, lost)[0].add(logp_old=lost.logp_sampler), frozenset({"logp_old"})
            )
            greedy = drawn(parts, greedy=True)
        run = start(made, tmp_path / "run", Display(), preflight=False)
    for again in (aborted, lost):
        assert torch.equal(first.response, again.response) and torch.equal(first.mask, again.mask)
    assert float((scores["logp_old"] - lost.logp_sampler)[lost.mask].abs().max()) < 1e-5
    assert lost.turn is not None and int(lost.turn[lost.mask].max()) == 1 and bool((lost.version == 3).all())
    assert torch.equal(greedy.response[:, 0], greedy.response[:, 1])
    assert run.metrics[-1]["reward_errors"] == 0 and run.metrics[-1][MISMATCH] < 1e-5


@pytest.mark.parametrize("engine", mostly_smokes(["local", "vllm"], "local"))
def test_streaming_agents_have_the_same_record(
    config: Any, tiny_folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    (
        monkeypatch.setattr(weight_probe, "MAX_PROMPT_TOKENS", 24),
        monkeypatch.setattr(weight_probe, "MAX_RESPONSE_TOKENS", 8),
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

    def talk(stream: bool) -> Talk:
        def turns(client: httpx.Client, assignment: Assignment) -> float:
            messages, stop = list(assignment.messages), ["e", "never said"]
            for _ in range(2):
                more: Any = {"model": "policy", "messages": messages, "tools": [tool], "stop": stop}
                if not stream:
                    said = say(client, **{k: v for k, v in more.items() if k != "model"})
                else:
                    answer = client.post("/chat/completions", json=more | {"stream": True})
                    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
                    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
                    content = "".join(delta.get("content") or "" for delta in deltas)
                    said = {"role": "assistant", "content": content}
                messages += [said, {"role": "user", "content": "and?"}]
            return 1.0

        return turns

    with serving(AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)) as server:
        more: Any = {"max_prompt": 400, "max_context": 600}
        if engine == "vllm":
            more |= {"engine": "vllm", "engine.url": server.url, "policy.device": "cpu"}
        both = []
        for stream in (False, True):
            with closing(assemble(config(talk(stream), **more))) as parts:
                both.append(drawn(parts))
        assert (server.streamed > 0) is (engine == "vllm")
    whole, streamed = both
    assert bool(streamed.valid.all()) and int(streamed.turn[streamed.mask].max()) == 1
    assert torch.equal(whole.response, streamed.response) and torch.equal(whole.mask, streamed.mask)
    assert torch.allclose(whole.logp_sampler, streamed.logp_sampler, atol=1e-6)


def test_start_time_of_processes_does_not_count_for_the_deadline(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_training, "GRACE_SECONDS", 0.0)

    def talk(client: httpx.Client, assignment: Assignment) -> float:
        time.sleep(0.5)  # in place of a process that imports
        return two_turns(client, assignment)

    with closing(assemble(config(talk, agent_seconds=0.2))) as parts:
        assert bool(drawn(parts).valid.all())


def test_different_prompts_of_a_group_become_observations_after_their_common_prefix(config: Any) -> None:
    def talk(client: httpx.Client, assignment: Assignment) -> float:
        say(client, [{"role": "system", "content": f"lucky {assignment.seed % 97}"}, *assignment.messages])
        return 1.0

    with closing(assemble(config(talk))) as parts:
        rollouts = drawn(parts)
        batch, _ = score_rollouts(parts.task, rollouts)
        scores = parts.learner.score(batch.add(logp_old=batch.logp_sampler), frozenset({"logp_old"}))
    text = parts.task.text(rollouts.prompt[0].tolist())
    assert text.endswith("lucky ") or ("lucky" in text and "say" not in text)
    assert not bool(rollouts.mask[..., 0].any()) and bool(rollouts.present[..., 0].all())
    assert float((scores["logp_old"] - rollouts.logp_sampler)[rollouts.mask].abs().max()) < 1e-5


def failing(client: httpx.Client, assignment: Assignment) -> Any:
    """All episodes of a group but the first fail, each in another way."""
    number = PLACES.setdefault(assignment.seed, len(PLACES)) % 6
    if number == 1:
        return AgentResult(error="it died of something")
    messages = list(assignment.messages)
    messages += [say(client, messages), {"role": "user", "content": "and?"}]
    if number == 2:
        messages[-2] = {"role": "assistant", "content": "I never said that"}
    if number == 3:
        return float("nan")
    if number == 4:
        while True:  # until a limit says no
            messages += [say(client, messages), {"role": "user", "content": "and?"}]
    if number == 5:
        client.headers["authorization"] = "Bearer sk-of-another"
    say(client, messages)
    return 0.5


PLACES: dict[int, int] = {}


def test_an_agent_that_fails_makes_its_episode_invalid_with_a_reason(config: Any) -> None:
    PLACES.clear()
    with closing(assemble(config(failing, max_turns=3))) as parts:
        rollouts = drawn(parts)
        batch, errors = score_rollouts(parts.task, rollouts)
    seeds = list(PLACES)
    assert len(seeds) == 6
    notes = dict(enumerate(batch.notes.flat))
    valid = batch.valid.flatten().tolist()
    assert sorted(valid) == [False] * 4 + [True] * 2 and len(errors) == 4
    said = " | ".join(errors)
    for reason in ("died of something", "requested nothing", "rewritten", "its reward is nan", "401"):
        assert reason in said or (reason == "requested nothing"), (reason, said)
    cut = [place for place, note in notes.items() if "cut off: the limit of" in note]
    assert len(cut) == 1 and valid[cut[0]] and bool(batch.truncated.flatten()[cut[0]])
    assert batch.reward.flatten()[next(i for i, ok in enumerate(valid) if ok and i != cut[0])] == 0.5


def test_task_scores_the_last_turn_if_the_agent_returns_no_reward(config: Any, tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def reward(response, answer=None, **more):\n    return float(len(response))\n")

    def talk(client: httpx.Client, assignment: Assignment) -> Any:
        messages = list(assignment.messages)
        messages += [say(client, messages), {"role": "user", "content": "and?"}]
        words = say(client, messages)["content"]
        return AgentResult(metrics={"length": len(words)})

    with closing(assemble(config(talk, reward=(f"python:{file}:reward",)))) as parts:
        batch, errors = score_rollouts(parts.task, drawn(parts))
    assert not errors
    measured = batch.measures[..., batch.measure_names.index("agent/length")]
    assert torch.equal(batch.reward.squeeze(-1), measured)


class Killed(Exception):
    pass


@pytest.mark.smoke
def test_a_run_that_was_killed_in_a_step_resumes_to_the_same_numbers(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(steps=3, checkpoint_every=1, eval_every=3, max_reward_errors=0.1)
    whole = start(made, tmp_path / "whole", Display(), preflight=False)
    real, calls = LocalConversationEngine.generate, [0]

    def fatal(self: Any, *args: Any, **more: Any) -> Any:
        rollouts = real(self, *args, **more)
        calls[0] += 1
        if calls[0] == 2:
            raise Killed("in the middle of a step")
        return rollouts

    monkeypatch.setattr(LocalConversationEngine, "generate", fatal)
    with pytest.raises(RunError, match="Killed"):
        start(made, tmp_path / "cut", Display(), preflight=False)
    again = resume(tmp_path / "cut", Display())
    assert [row["reward"] for row in whole.metrics] == [row["reward"] for row in again.metrics]
    assert [row["loss"] for row in whole.metrics] == [row["loss"] for row in again.metrics]
    assert whole.metrics[-1]["eval/reward"] == again.metrics[-1]["eval/reward"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"algorithm": "ppo"},
        pytest.param({"algorithm": "dr-grpo", "policy.lora": 4, "epochs": 2}, marks=pytest.mark.smoke),
        pytest.param({"algorithm": "rloo", "top_p": 0.9, "temperature": 0.7}, marks=pytest.mark.smoke),
    ],
    ids=str,
)
def test_critics_adapters_and_top_k_sampling_train_with_agents(config: Any, tmp_path: Path, more: Any) -> None:
    run = start(config(max_reward_errors=0.0, **more), tmp_path / "run", Display(), preflight=True)
    assert len(run.metrics) == 2 and run.metrics[-1]["reward_errors"] == 0
    assert run.metrics[0][MISMATCH] < 1e-5
    rows = list(run.rollouts(1))
    assert rows and len(conversation(rows[0])) >= 3


def test_impossible_configs_of_agents_are_refused(config: Any) -> None:
    for more, why in (
        ({"ahead": 1, "loss": "clipped", "algorithm": "grpo", "correction": "truncated"}, "--agent"),
        ({"tools": ("calculator",)}, "--agent with --tools"),
        ({"agent": "nonsense"}, "--agent nonsense"),
        ({"agent_seconds": 0.0}, "--agent-seconds"),
    ):
        with pytest.raises(ConfigError, match=why):
            assemble(config(**more))
    with pytest.raises(ConfigError):
        configure("sort", {"agent": "command:true"})


def test_more_failures_than_are_allowed_stop_the_run(config: Any, tmp_path: Path) -> None:
    def talk(client: httpx.Client, assignment: Assignment) -> Any:
        return AgentResult(error="nobody is at home")

    with pytest.raises(RunError, match="nobody is at home"):
        start(config(talk, max_reward_errors=0.1), tmp_path / "run", Display(), preflight=False)

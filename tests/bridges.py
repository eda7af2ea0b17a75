"""Ask real verifiers and OpenEnv what the stand-ins of test_agents.py answer (`make bridges-test`).

verifiers 0.4 and OpenEnv 0.10 run the examples, offline, each from an environment of its own.
"""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from ascent.core.errors import ConfigError
from ascent.environments.agents import Agent, AgentResult, Assignment, make_agent
from ascent.environments.agents.openenv_agent import describe_action
from tests.environments.test_agents import EXAMPLES, given, guesses, keys_of, outcomes, trained
from tests.fake_judge import Reply, serving

ENGINES = Path(__file__).parents[1] / ".engines"
ROWS = [json.loads(line) for line in (EXAMPLES / "numbers.jsonl").read_text().splitlines()]
WON = [0, 0, 0.7, 0, 1, 0, 0.7, 0, 0]
"""What a policy earns that says 5, then 7 or 3, and 7 or 3 again."""
assert ENGINES.exists(), "make bridges-test sets it up first"

PLAIN = """
import verifiers.v1 as vf

class Plain(vf.Task[vf.TaskData]):
    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 3)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)

class Many(vf.Taskset[Plain, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield Plain(vf.TaskData(prompt=f"Say {number}.", system_prompt="Be brief."), self.config.task)
            number += 1

__all__ = ["Many"]
"""
BROKEN = """
import asyncio, os
import verifiers.v1 as vf

class Broken(vf.Task[vf.TaskData]):
    @vf.reward
    async def worth(self, trace: vf.Trace) -> float:
        print("a library that prints")
        if self.data.idx == 0:
            raise ValueError("it broke")
        if self.data.idx == 1:
            await asyncio.sleep(1000)
        if self.data.idx == 2:
            os._exit(5)
        return 1.0

class Four(vf.Taskset[Broken, vf.TasksetConfig]):
    def load(self):
        for _ in range(4):
            yield Broken(vf.TaskData(prompt="x"), self.config.task)

__all__ = ["Four"]
"""


def rows(url: str) -> list[Assignment]:
    return [given(row["prompt"], url, f"k{n}", **{k: row[k] for k in ("task", "seed")}) for n, row in enumerate(ROWS)]


# ---- verifiers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guess() -> Iterator[Agent]:
    with closing(make_agent(f"verifiers:{EXAMPLES}/guess_verifiers.py:{ENGINES}/verifiers")) as agent:
        yield agent


def test_the_example_of_verifiers_is_played_by_the_policy(guess: Agent) -> None:
    with serving(guesses) as endpoint:
        made = outcomes(guess, rows(endpoint.url))
    assert [outcome.error for outcome in made] == [""] * 9
    assert [outcome.metrics["won"] for outcome in made] == WON
    assert [outcome.reward for outcome in made] == pytest.approx([won + 0.1 for won in WON])
    sessions: dict[str, set[str]] = {}
    for key, headers in zip(keys_of(endpoint), endpoint.headers, strict=True):
        sessions.setdefault(key, set()).add({name.lower(): value for name, value in headers.items()}["x-session-id"])
    assert set(sessions) == {f"Bearer k{n}" for n in range(9)}
    assert all(len(traces) == 1 for traces in sessions.values()) and len(set.union(*sessions.values())) == 9


def test_histories_only_grow(guess: Agent) -> None:
    with serving(guesses) as endpoint:
        outcomes(guess, rows(endpoint.url)[:1])
    chats = [body["messages"] for body in endpoint.bodies]
    assert [len(chat) for chat in chats] == [1, 3, 5]
    said = [[(m["role"], m["content"]) for m in chat] for chat in chats]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(said))


def test_the_tasks_of_a_taskset_are_rows_to_train_on(guess: Agent) -> None:
    listed = guess.rows(100)  # type: ignore[attr-defined]
    assert listed == [{name: row[name] for name in ("prompt", "task", "answer")} for row in ROWS]


def test_a_row_without_its_task_and_an_endpoint_that_refuses_are_errors(guess: Agent) -> None:
    with serving(lambda *_: Reply(raw=b'{"error": "no"}', status=400)) as endpoint:
        refused, missing = outcomes(guess, [rows(endpoint.url)[0], given("x", endpoint.url, task=40)])
    assert "400" in refused.error and "has no task 40" in missing.error


def test_a_plain_and_endless_taskset_needs_no_harness(tmp_path: Path) -> None:
    (tmp_path / "plain_taskset.py").write_text(PLAIN)
    (tmp_path / "env.toml").write_text('[env.taskset]\nid = "plain-taskset"\n[env.agent]\nmax_turns = 2\n')
    agent = make_agent(f"verifiers:{tmp_path}/env.toml:{ENGINES}/verifiers")
    with serving(lambda *_: Reply(text="7")) as endpoint, closing(agent):
        made = outcomes(agent, [given("x", endpoint.url, task=12)])
    assert made == [AgentResult(1.0, "", {"short": 1.0, "length": 1.0, "turns": 1.0})]
    assert [(m["role"], m["content"]) for m in endpoint.bodies[0]["messages"]] == [
        ("system", "Be brief."),
        ("user", "Say 12."),
    ]


def test_an_environment_that_breaks_is_the_error_of_its_own_episode(tmp_path: Path) -> None:
    (tmp_path / "broken_taskset.py").write_text(BROKEN)
    agent = make_agent(f"verifiers:{tmp_path}/broken_taskset.py:{ENGINES}/verifiers")
    with serving(lambda *_: Reply(text="7")) as endpoint, closing(agent):
        asked = [given("x", endpoint.url, task=0), given("x", endpoint.url, task=3)]
        made = outcomes(agent, [*asked, given("x", endpoint.url, task=1, seconds=1.0)])
        died = outcomes(agent, [given("x", endpoint.url, task=2)])
        (again,) = outcomes(agent, [asked[1]])
    assert "it broke" in made[0].error and made[1].reward == 1.0 == again.reward
    assert made[2].error == "its agent took longer than 1 s"
    assert died == [AgentResult(error="the process of verifiers ended: exit status 5")]


def test_a_taskset_that_is_not_there_says_so() -> None:
    agent = make_agent(f"verifiers:no-such-taskset:{ENGINES}/verifiers")
    with closing(agent), pytest.raises(ConfigError, match="taskset 'no-such-taskset' not found"):
        agent.rows(1)  # type: ignore[attr-defined]


# ---- OpenEnv --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(ENGINES / "openenv" / "bin" / "python"), str(EXAMPLES / "guess_openenv.py"), str(port)]
    process, url = subprocess.Popen(command), f"http://127.0.0.1:{port}"
    until = time.monotonic() + 120
    while True:
        try:
            urlopen(f"{url}/schema", timeout=5).close()
            break
        except OSError:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.2)
    yield url
    process.kill()
    process.wait()


def test_the_example_of_openenv_is_played_by_the_policy(server: str) -> None:
    with serving(guesses) as endpoint, closing(make_agent(f"openenv:{server}")) as agent:
        made = outcomes(agent, rows(endpoint.url))
    assert [outcome.reward for outcome in made] == pytest.approx(WON)
    assert {outcome.error for outcome in made} == {""}
    assert endpoint.bodies[0]["messages"][0]["content"].endswith("\nYou have three tries.")
    with urlopen(f"{server}/schema") as answer:
        schema: dict[str, Any] = json.load(answer)
    assert describe_action(schema["action"]) == ""


def test_what_openenv_calls_invalid_is_answered_and_may_be_tried_again(server: str) -> None:
    def policy(prompt: str, _: int) -> Reply:
        return Reply(text="5" if "error" in prompt else "I do not know")

    with serving(policy) as endpoint, closing(make_agent(f"openenv:{server}")) as agent:
        (made,) = outcomes(agent, [given("Guess.", endpoint.url, seed=4)])
    assert made == AgentResult(1.0, "", {"actions": 1.0, "refused_actions": 1.0})


def test_the_policy_is_trained_through_both(tiny_folder: Path, tmp_path: Path, server: str) -> None:
    """The game of verifiers is that of the program, so that the policy says the same; OpenEnv's has one more line."""
    program = trained(tiny_folder, tmp_path / "program", f"command:{sys.executable} -IS {EXAMPLES}/guess_program.py")
    taskset = f"verifiers:{EXAMPLES}/guess_verifiers.py:{ENGINES}/verifiers"
    bridged = trained(tiny_folder, tmp_path / "verifiers", taskset)
    played = trained(tiny_folder, tmp_path / "openenv", f"openenv:{server}")
    assert bridged.metrics[0]["agent/won"] == pytest.approx(program.metrics[0]["reward"])
    assert [bridged.metrics[0][name] for name in ("turns", "num_tokens")] == [
        program.metrics[0][name] for name in ("turns", "num_tokens")
    ]
    for run in (bridged, played):
        assert {row["reward_errors"] for row in run.metrics} == {0}
        assert all(row["sampling/sampling_logp_difference/mean"] < 1e-5 for row in run.metrics)

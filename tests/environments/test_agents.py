"""Agents: whatever one does is its own episode's outcome, and nobody else's."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import websockets.sync.server
from websockets.datastructures import Headers
from websockets.http11 import Response

from ascent.build.trained_run import Run
from ascent.cli.main import main
from ascent.core.errors import ConfigError
from ascent.environments.agents import Agent, AgentResult, Assignment, make_agent, verifiers_agent
from ascent.environments.agents.agent_pool import CLOSED_ERROR, PooledAgent, parse_outcome
from ascent.environments.agents.openenv_agent import describe_action, read_action, show
from ascent.processes.reward_calls import RewardCallError
from ascent.processes.supervisor import Limits
from ascent.rollout.agents import EpisodeNote
from ascent.tasks.agent_sources import agent_source, read_agent_signature, verify_agent
from ascent.tasks.text.text_task import Problem
from tests.fake_judge import FakeJudge, Reply, serving

pytestmark = pytest.mark.long
EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
SECONDS = 60.0
FILE = """
import asyncio, json, os, random, signal, subprocess, sys, threading, time, urllib.request

def ask(url, key, words):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": words}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

async def agent(base_url, key, problem):
    what = problem.prompt
    if what == "ask":
        return float(ask(base_url, key, "what is it worth?"))
    if what == "columns":
        return {"reward": problem.columns["worth"], "metrics": {"length": len(problem.answer)}}
    if what == "raise":
        raise KeyError("lost")
    if what == "exit":
        sys.exit(3)
    if what == "die":
        os._exit(3)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        await asyncio.sleep(1000)
    if what == "block":
        time.sleep(1000)
    if what == "leave":
        left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        return {"metrics": {"pid": left.pid}}
    if what == "pid":
        return {"metrics": {"pid": os.getpid()}}
    if what == "task":
        asyncio.create_task(asyncio.sleep(1000))
        await asyncio.to_thread(time.sleep, 0)
        return {"metrics": {"pid": os.getpid()}}
    if what == "thread":
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        return {"metrics": {"pid": os.getpid()}}
    if what == "daemon":
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write, str(os.getpid()).encode())
                time.sleep(1000)
            os._exit(0)
        os.wait()
        return {"metrics": {"pid": os.getpid(), "left": int(os.read(read, 20))}}
    if what == "secret":
        return {"metrics": {"seen": "ASCENT_TEST_SECRET" in os.environ, "named": "ASCENT_TEST_NAMED" in os.environ}}
    if what == "random":
        return random.random()
    return {"nothing": None, "words": "much", "infinite": float("inf"), "odd": {"prize": 1}, "list": [1.0],
            "metric": {"metrics": {"a": "b"}}, "none": {"reward": None}, "bool": True}[what]

def plain(problem, *, key, seed=0):
    return len(key) + seed

class Holder:
    pass
holder = Holder()
number = 3
def two(problem, more): ...
def four(a, b, c, d): ...
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("agents")
    (made / "own.py").write_text(FILE)
    return made


@pytest.fixture(scope="module")
def agent(folder: Path) -> Iterator[Agent]:
    os.environ["ASCENT_TEST_SECRET"] = os.environ["ASCENT_TEST_NAMED"] = "x"
    with closing(make_agent(f"python:{folder}/own.py:agent", Limits(1.0, 4.0, ("ASCENT_TEST_NAMED",)))) as made:
        yield made
    del os.environ["ASCENT_TEST_SECRET"], os.environ["ASCENT_TEST_NAMED"]


def given(
    what: str, url: str = "http://127.0.0.1:9/v1", key: str = "k", seconds: float = SECONDS, **columns: Any
) -> Any:
    problem = Problem(what, columns.pop("answer", "five"), columns)
    return Assignment(url, key, problem, [{"role": "user", "content": what}], columns.get("seed", 0), seconds)


def outcomes(agent: Agent, assignments: Sequence[Assignment]) -> list[AgentResult]:
    ended = list(agent.run(assignments))
    assert sorted(place for place, _ in ended) == list(range(len(assignments)))
    return [outcome for _, outcome in sorted(ended, key=lambda pair: pair[0])]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(true: Any, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


# ---- functions ------------------------------------------------------------------------------------------


def test_what_an_agent_returns_is_its_reward_and_its_metrics(agent: Agent) -> None:
    asked = [given(what) for what in ("nothing", "none", "bool")] + [given("columns", worth=0.25)]
    assert outcomes(agent, asked) == [
        AgentResult(),
        AgentResult(),
        AgentResult(1.0),
        AgentResult(0.25, "", {"length": 4.0}),
    ]


def test_an_agent_talks_to_the_endpoint_with_its_own_key(agent: Agent) -> None:
    with serving(lambda *_: Reply(text="0.5")) as endpoint:
        made = outcomes(agent, [given("ask", endpoint.url, f"key-{place}") for place in range(8)])
    assert made == [AgentResult(0.5)] * 8
    assert sorted(keys_of(endpoint)) == [f"Bearer key-{place}" for place in range(8)]


def keys_of(endpoint: FakeJudge) -> list[str]:
    return [value for headers in endpoint.headers for name, value in headers.items() if name.lower() == "authorization"]


def test_an_agent_that_fails_is_invalid_and_takes_nobody_with_it(agent: Agent) -> None:
    whats = ["raise", "exit", "die", "kill", "words", "infinite", "odd", "list", "metric"]
    made = outcomes(agent, [given(what) for what in ["none", *whats, "bool"]])
    assert made[0] == AgentResult() and made[-1] == AgentResult(1.0)
    errors = dict(zip(whats, [outcome.error for outcome in made[1:-1]], strict=True))
    line = FILE.split("\n").index('        raise KeyError("lost")') + 1
    assert errors["raise"] == f"KeyError: 'lost' (own.py, line {line})"
    assert errors["exit"].startswith("SystemExit: 3 (own.py")
    assert errors["die"] == "its agent ended its process: exit status 3"
    assert errors["kill"] == "its agent ended its process: SIGKILL"
    assert errors["words"].startswith("returned str: an agent returns a reward")
    assert errors["infinite"] == "returned inf: a reward is a finite number"
    assert errors["odd"].startswith("returned a dict with 'prize' in it")
    assert errors["list"].startswith("returned list: an agent returns")
    assert errors["metric"] == "returned str: the metric a is one finite number"


def test_an_agent_that_hangs_has_its_own_deadline(agent: Agent) -> None:
    asked = [given("hang", seconds=0.5), given("block", seconds=0.5), given("bool"), given("nothing")]
    late = AgentResult(error="its agent took longer than 0.5 s")
    assert outcomes(agent, asked) == [late, late, AgentResult(1.0), AgentResult()]


def test_what_an_agent_leaves_running_ends_with_its_episode(agent: Agent) -> None:
    (outcome,) = outcomes(agent, [given("leave")])
    wait_until(lambda: not alive(int(outcome.metrics["pid"])))


def test_a_process_of_which_nothing_is_left_running_plays_another_episode(folder: Path) -> None:
    with closing(make_agent(f"python:{folder}/own.py:agent")) as agent:

        def play(what: str, **more: Any) -> dict[str, Any]:
            (outcome,) = outcomes(agent, [given(what, **more)])
            return {**outcome.metrics}

        first = play("pid")["pid"]
        assert [play(what)["pid"] for what in ("pid", "task", "pid")] == [first] * 3
        assert outcomes(agent, [given("hang", seconds=0.3)])[0].error == "its agent took longer than 0.3 s"
        second = play("thread")["pid"]
        third = play("daemon")
        wait_until(lambda: not alive(int(third["left"])))
        last = play("pid")["pid"]
        assert len({first, second, third["pid"], last}) == 4
        wait_until(lambda: not any(alive(int(pid)) for pid in (first, second, third["pid"])))
        os.kill(int(last), 9)  # while nobody listens to it
        channels = [agent.pool.episodes[number].channel for number in agent.idle]  # type: ignore[attr-defined]
        wait_until(lambda: not any(channel.is_silent for channel in channels))  # its supervisor has reported it
        again = play("pid")["pid"]
        assert again != last
    wait_until(lambda: not alive(int(again)))


def test_an_agent_sees_no_variable_that_was_not_named(agent: Agent) -> None:
    assert outcomes(agent, [given("secret")]) == [AgentResult(None, "", {"seen": 0.0, "named": 1.0})]


def test_the_random_numbers_of_an_agent_are_its_seeds(agent: Agent) -> None:
    first, same, other = outcomes(agent, [given("random", seed=seed) for seed in (1, 1, 2)])
    assert first == same and first.reward != other.reward


def test_a_function_is_given_what_it_names(folder: Path) -> None:
    with closing(make_agent(f"python:{folder}/own.py:plain")) as agent:
        assert outcomes(agent, [given("x", key="four", seed=3)]) == [AgentResult(7.0)]


def test_a_run_that_is_given_up_ends_what_is_still_running(agent: Agent) -> None:
    run = iter(agent.run([given("hang"), given("bool")]))
    assert next(run) == (1, AgentResult(1.0))
    run.close()  # type: ignore[attr-defined]
    assert outcomes(agent, [given("bool")]) == [AgentResult(1.0)]
    assert agent.pool.episodes.keys() == agent.idle.keys()  # type: ignore[attr-defined]


def test_an_agent_that_is_closed_under_way_says_so_and_can_be_used_again(agent: Agent) -> None:
    run = iter(agent.run([given("hang"), given("bool")]))
    assert next(run) == (1, AgentResult(1.0))
    agent.close()
    assert list(run) == [(0, AgentResult(error=CLOSED_ERROR))]
    assert outcomes(agent, [given("bool")]) == [AgentResult(1.0)]


def test_two_threads_share_an_agent(agent: Agent) -> None:
    made: dict[int, list[AgentResult]] = {}

    def run(worth: int) -> None:
        made[worth] = outcomes(agent, [given("columns", worth=worth, answer="") for _ in range(6)])

    threads = [threading.Thread(target=run, args=(worth,)) for worth in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == {worth: [AgentResult(float(worth), "", {"length": 0.0})] * 6 for worth in (1, 2)}


def test_an_outcome_goes_to_the_run_of_its_episode_though_another_has_heard_it(agent: Agent) -> None:
    assert isinstance(agent, PooledAgent)
    number = agent._begin(given("columns", worth=1, answer=""))  # of a run that has not looked yet
    wait_until(lambda: agent._wait_for_results({}) or number in agent.results)
    assert outcomes(agent, [given("columns", worth=2, answer="")]) == [AgentResult(2.0, "", {"length": 0.0})]
    assert agent._wait_for_results({number: 0}) == [(number, AgentResult(1.0, "", {"length": 0.0}))]


def test_a_file_that_does_not_load_in_the_process_is_every_episodes_error(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    only_there = f"import os\nif os.getpid() != {os.getpid()}:\n    import nowhere_to_be_found\n"
    file.write_text(f"{only_there}def agent(base_url, key, problem): ...")
    with closing(make_agent(f"python:{file}:agent")) as agent:
        made = outcomes(agent, [given("x"), given("y")])
    assert all(outcome.error.startswith("its agent cannot be loaded: ModuleNotFoundError") for outcome in made)


@pytest.mark.smoke
def test_the_example_with_a_stock_client_trains_to_the_numbers_of_the_same_agent_as_a_program(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Which process asks, with which client and when, changes no number."""
    kinds = (f"python:{EXAMPLES}/guess.py:guess", f"command:{sys.executable} -IS {EXAMPLES}/guess_program.py")
    runs = [trained(tiny_folder, tmp_path / str(n), agent) for n, agent in enumerate(kinds)]
    for name in ("reward", "loss", "grad_norm", "turns", "num_tokens", "eval/reward"):
        assert [row[name] for row in runs[0].metrics] == [row[name] for row in runs[1].metrics], name
    assert {row["reward_errors"] for run in runs for row in run.metrics} == {0}
    assert all(1 <= row["agent/tries"] <= 3 for row in runs[0].metrics) and runs[0].metrics[0]["reward"] > 0


def trained(model: Path, out: Path, agent: str) -> Run:
    """Two steps of the game with a tiny model, on the command line."""
    size = "--prompts 4 --samples 8 --max-tokens 24 --turn-tokens 6 --max-context 400 --max-prompt 200 --eval-prompts 1"
    words = ["train", f"jsonl:{EXAMPLES}/numbers.jsonl", "--model", str(model), "--agent", agent, "--steps", "2"]
    assert main([*words, *size.split(), "--out", str(out), "--no-preflight"]) == 0
    return Run(out)


def guesses(prompt: str, _: int) -> Reply:
    """A policy that says 5, then 7 or 3, and 7 or 3 again."""
    return Reply(text="5" if prompt.startswith("Guess") else "7" if "higher" in prompt else "3")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("nonsense", "not an outcome"),
        ("[1]", "not an outcome"),
        ('{"reward": NaN}', "not finite"),
        ('{"reward": true}', "not finite"),
        ('{"metrics": {"a": 1e999}}', "not finite"),
        ('{"metrics": 3}', "not finite"),
        ('{"error": 3}', "not an outcome"),
        (json.dumps({"metrics": dict.fromkeys(map(str, range(40)), 1)}), "not an outcome"),
    ],
)
def test_a_process_that_sends_anything_else_is_an_error(line: str, error: str) -> None:
    assert error in parse_outcome(line).error


# ---- programs -------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, subprocess, sys, time
problem = json.loads(os.environ.get("ASCENT_PROBLEM") or open(os.environ["ASCENT_PROBLEM_FILE"]).read())
what = problem["prompt"]
print("some words first")
if what == "long":
    print(json.dumps({"reward": len(problem["text"])}))
if what == "environ":
    same = os.environ["OPENAI_BASE_URL"] == os.environ["ASCENT_BASE_URL"] and os.environ["OPENAI_API_KEY"] == "k"
    print(json.dumps({"reward": int(same), "metrics": {"seed": int(os.environ["ASCENT_SEED"])}}))
if what == "fail":
    print("it went wrong", file=sys.stderr)
    sys.exit(3)
if what == "flood":
    for _ in range(300):
        print("x" * 10000)
    print('{"reward": 2}')
if what == "odd":
    print('{"reward": "much"}')
if what == "hang":
    left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(problem["file"], "w").write(f"{left.pid}.")
    time.sleep(1000)
if what == "leave":
    subprocess.Popen(["sleep", "1000"])
    print('{"reward": 4}')
"""


def test_a_program_says_its_reward_in_its_last_line(folder: Path) -> None:
    (folder / "program.py").write_text(PROGRAM)
    pid = folder / "pid"
    whats: list[Any] = ["nothing", "environ", "fail", "flood", "odd", "leave"]
    asked = [given(what, seed=2) for what in whats]
    asked += [given("long", text="x" * 200_000)]
    with closing(make_agent(f"command:{sys.executable} -IS {folder}/program.py", max_active=4)) as agent:
        made = outcomes(agent, asked)
        run = iter(agent.run([given("hang", file=str(pid)), given("nothing")]))
        assert next(run) == (1, AgentResult())
        wait_until(lambda: pid.exists() and pid.read_text().endswith("."))
        run.close()  # type: ignore[attr-defined]
        wait_until(lambda: not alive(int(pid.read_text()[:-1])))
    assert made[0] == AgentResult() and made[1] == AgentResult(1.0, "", {"seed": 2.0})
    assert made[2].error == "the program ended with exit status 3: it went wrong"
    assert made[3] == AgentResult(2.0) and made[5] == AgentResult(4.0)
    assert made[4].error.startswith("returned str: an agent returns a reward")
    assert made[6] == AgentResult(200_000.0)


def test_the_example_as_a_program() -> None:
    with (
        serving(guesses) as endpoint,
        closing(make_agent(f"command:{sys.executable} {EXAMPLES}/guess_program.py")) as agent,
    ):
        made = outcomes(agent, [given("Guess.", endpoint.url, answer=answer) for answer in ("5", "3", "4")])
    assert [outcome.reward for outcome in made] == [1.0, 0.7, 0.0]


# ---- OpenEnv --------------------------------------------------------------------------------------------

SCHEMA = {"required": ["number"], "properties": {"number": {"type": "integer"}, "metadata": {"type": "object"}}}


@contextmanager
def openenv(most: int = 64) -> Iterator[str]:
    """What a server of OpenEnv says: /schema, and sessions over a web socket. The number is one more than the seed."""
    places = threading.Semaphore(most)

    def schema(connection: Any, request: Any) -> Response | None:
        if request.path != "/schema":
            return None
        body = json.dumps({"action": SCHEMA, "observation": {}, "state": {}}).encode()
        return Response(200, "OK", Headers({"Content-Length": str(len(body))}), body)

    def session(socket: Any) -> None:
        if not places.acquire(blocking=False):
            socket.send(json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}))
            return
        try:
            secret = tries = 0
            for message in map(json.loads, socket):
                data = message["data"]
                if message["type"] == "reset":
                    secret, words, done, reward = data["seed"] + 1, "Three tries.", False, None
                elif data["number"] == 99:
                    socket.send(
                        json.dumps({"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}})
                    )
                    continue
                elif data["number"] > 9:
                    socket.send(
                        json.dumps({"type": "error", "data": {"message": "too large", "code": "VALIDATION_ERROR"}})
                    )
                    continue
                else:
                    tries, right = tries + 1, data["number"] == secret
                    words = "right" if right else "higher" if data["number"] < secret else "lower"
                    done, reward = right or tries == 3, 1.3 - 0.3 * tries if right else 0.0
                state = {"observation": {"text": words, "metadata": {}}, "reward": reward, "done": done}
                socket.send(json.dumps({"type": "observation", "data": state}))
        finally:
            places.release()

    with websockets.sync.server.serve(session, "127.0.0.1", 0, process_request=schema) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def world() -> Iterator[str]:
    with openenv(most=2) as url:
        yield url


def test_the_policy_plays_a_server_of_openenv(world: str) -> None:
    def policy(prompt: str, _: int) -> Reply:
        if "Bad" in prompt or "Broken" in prompt:
            return Reply(text="what?" if "Bad" in prompt else "99")
        if "no number" in prompt:
            return Reply(text="12")
        return guesses("higher" if "too large" in prompt else prompt, 0)

    with serving(policy) as endpoint, closing(make_agent(f"openenv:{world}")) as agent:
        games = [("Guess.", 4), ("Guess.", 2), ("Guess.", 0), ("Bad.", 6), ("Broken.", 4)]
        asked = [given(words, endpoint.url, f"k{n}", seed=seed) for n, (words, seed) in enumerate(games)]
        made = outcomes(agent, asked)
    assert [outcome.reward for outcome in made[:4]] == pytest.approx([1.0, 0.7, 0.0, 1.0])
    counts = [tuple(outcome.metrics.values()) for outcome in made[:4]]
    assert counts == [(1, 0), (2, 0), (3, 0), (1, 2)]
    assert made[4].error == "the OpenEnv server answered step with an error: it broke"
    lost = next(body for body, key in zip(endpoint.bodies, keys_of(endpoint), strict=True) if key == "Bearer k2")
    assert lost["messages"] == [{"role": "user", "content": "Guess.\nThree tries."}]
    whole = [
        body["messages"] for body, key in zip(endpoint.bodies, keys_of(endpoint), strict=True) if key == "Bearer k3"
    ]
    assert [message["content"] for message in whole[-1]] == [
        *("Bad.\nThree tries.", "what?", "error: there is no number in that answer", "12", "error: too large")
    ]


def test_an_endpoint_that_says_no_more_ends_the_game_and_another_error_is_the_reason(world: str) -> None:
    def full(prompt: str, number: int) -> Reply:
        return Reply(raw=json.dumps({"error": {"code": "context_length_exceeded"}}).encode(), status=400)

    with closing(make_agent(f"openenv:{world}")) as agent:
        with serving(full) as endpoint:
            assert outcomes(agent, [given("Guess.", endpoint.url)])[0].reward == 0.0
        with serving(lambda *_: Reply(raw=b"busy", status=503)) as endpoint:
            made = outcomes(agent, [given("Guess.", endpoint.url)])
    assert made == [AgentResult(error="the endpoint answered with HTTP 503: busy")]


def test_an_answer_becomes_an_action_by_the_servers_schema() -> None:
    several = {"properties": {"row": {"type": "integer"}, "word": {"type": "string"}}, "required": ["row", "word"]}
    assert read_action('I play {"row": 1, "word": "x"}.', several) == {"row": 1, "word": "x"}
    assert describe_action(several) == 'Answer with one JSON object: "row" (integer), "word" (string).'
    assert read_action("-3 or 14", SCHEMA) == {"number": 14} and describe_action(SCHEMA) == ""
    assert read_action(" go north ", {"properties": {"move": {"type": "string"}}}) == {"move": "go north"}
    assert read_action("2.5", {"properties": {"x": {"type": "number"}}}) == {"x": 2.5}
    assert read_action("[1, 2]", {"properties": {"x": {"type": "array"}}}) == {"x": [1, 2]}
    assert show({"observation": {"text": "hello", "metadata": {"a": 1}}}) == "hello"
    assert show({"observation": {"board": [1], "message": "your turn"}}) == 'your turn\n{"board": [1]}'
    assert show({}) == ""


# ---- verifiers ------------------------------------------------------------------------------------------

BRIDGE = """
import json, sys, time
say = lambda answer: print(json.dumps(answer), flush=True)
open(sys.argv[1]).close()  # the bridge that it stands in for
taskset = sys.argv[2]
if taskset == "missing":
    say({"error": "ModuleNotFoundError: no taskset"})
    sys.exit()
say({"ready": True})
for line in sys.stdin:
    job = json.loads(line)
    if "rows" in job:
        say({"rows": [{"prompt": "x", "task": n} for n in range(job["rows"])]})
    if "id" not in job:
        continue
    say({"began": job["id"]})
    if job["task"] == "die":
        sys.exit(4)
    if job["task"] == "hang":
        continue
    if job["task"] == "fail":
        say({"id": job["id"], "error": "TaskError: it broke"})
    else:
        say({"id": job["id"], "reward": job["task"], "metrics": {"turns": 2}, "traces": ["t"]})
"""


@pytest.fixture
def environment(folder: Path) -> Path:
    """A virtual environment whose Python runs a stand-in of the bridge."""
    python = folder / "environment" / "bin" / "python"
    if not python.exists():
        python.parent.mkdir(parents=True)
        (folder / "bridge.py").write_text(BRIDGE)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {folder}/bridge.py "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return folder / "environment"


def test_episodes_of_verifiers_come_back_with_reward_errors_and_metrics(environment: Path) -> None:
    with closing(make_agent(f"verifiers:guess:{environment}")) as agent:
        made = outcomes(agent, [given("x", task=1), given("x", task="fail"), given("x", task=0.5)])
        assert agent.rows(2) == [{"prompt": "x", "task": 0}, {"prompt": "x", "task": 1}]  # type: ignore[attr-defined]
    assert made == [
        AgentResult(1.0, "", {"turns": 2.0}),
        AgentResult(error="TaskError: it broke"),
        AgentResult(0.5, "", {"turns": 2.0}),
    ]


def test_the_tasks_of_a_taskset_become_a_file_of_rows(environment: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["rows", f"verifiers:guess:{environment}", str(tmp_path / "rows.jsonl"), "--count", "3"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == [{"prompt": "x", "task": n} for n in range(3)] and capsys.readouterr().out.startswith("3 rows in")
    assert main(["rows", f"verifiers:guess:{environment}", str(tmp_path / "none.jsonl"), "--count", "0"]) == 2
    assert "--count is 0: set 1 or more" in capsys.readouterr().err
    for wrong in (["command:ls", "x"], [f"verifiers:missing:{environment}", "x"], [f"verifiers:x:{tmp_path}", "x"]):
        assert main(["rows", *wrong]) == 2
    errors = capsys.readouterr().err
    for words in ("give a verifiers taskset", "ModuleNotFoundError: no taskset", "`make verifiers`"):
        assert words in errors


def test_a_process_of_verifiers_that_dies_or_hangs_is_replaced(environment: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(verifiers_agent, "GRACE_SECONDS", 0.1)
    with closing(make_agent(f"verifiers:guess:{environment}")) as agent:
        died = outcomes(agent, [given("x", task="hang"), given("x", task="die")])
        hung = outcomes(agent, [given("x", task="hang", seconds=0.2)])
        assert outcomes(agent, [given("x", task=2)]) == [AgentResult(2.0, "", {"turns": 2.0})]
        run = iter(agent.run([given("x", task="hang"), given("x", task=3)]))
        assert next(run)[0] == 1
        agent.close()
        assert list(run) == [(0, AgentResult(error=CLOSED_ERROR))]
    assert died == [AgentResult(error="the process of verifiers ended: exit status 4")] * 2
    assert hung == [AgentResult(error="the process of verifiers no longer answers")]


def test_the_deadline_of_an_episode_is_its_own_though_another_run_hears_that_it_began(environment: Path) -> None:
    with closing(make_agent(f"verifiers:guess:{environment}")) as agent:
        long, bridge = (
            3600.0,
            SimpleNamespace(receive=lambda _: [{"began": 7}], channel=SimpleNamespace(ended=""), is_ready=1),
        )
        assert isinstance(agent, verifiers_agent.VerifiersAgent)
        agent.deadlines[7] = long, float("inf")
        agent._read(bridge)  # type: ignore[arg-type]
        assert long < agent.deadlines[7][1] - time.monotonic() < float("inf")


def test_a_taskset_that_is_not_there_is_the_error_of_its_episodes(environment: Path) -> None:
    with closing(make_agent(f"verifiers:missing:{environment}")) as agent:
        (made,) = outcomes(agent, [given("x", task=1)])
        with pytest.raises(ConfigError, match="cannot be loaded: ModuleNotFoundError"):
            agent.rows(1)  # type: ignore[attr-defined]
    assert made.error == "its taskset cannot be loaded: ModuleNotFoundError: no taskset"


# ---- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pyton:a.py:f", "an agent is python:FILE:NAME, command:WORDS.* Did you mean python"),
        ("python:a.py", "expected python:FILE:NAME"),
        ("agent", "an agent is python:FILE:NAME"),
        ("command:", "nothing follows command:. An agent is python:FILE:NAME"),
        ("openenv:localhost:8000", "expected the address of its server"),
        ("python:FOLDER/nowhere.py:f", "there is no file"),
        ("python:FOLDER/own.py:agnet", "has no agnet.*agent"),
        ("python:FOLDER/own.py:number", "it is a int, but an agent must be a function"),
        ("python:FOLDER/own.py:Holder", "it is a type, but an agent must be a function"),
        ("python:FOLDER/own.py:holder", "it is a Holder, but an agent must be a function"),
        ("python:FOLDER/own.py:two", r"it takes \(problem, more\).*takes any of these by name: base_url, key"),
        ("python:FOLDER/own.py:four", r"it takes \(a, b, c, d\)"),
        ("command:no-such-program --x", "there is no program 'no-such-program'"),
        ('command:python "', "the command cannot be parsed"),
        ("verifiers:guess:FOLDER", "no virtual environment with verifiers.*`make verifiers`"),
        ("verifiers:FOLDER/none.py:FOLDER", "there is no file"),
        ("openenv:http://127.0.0.1:9", r"no OpenEnv server responds at http://127.0.0.1:9 \(.*Start it first"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_starts(folder: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_agent(text.replace("FOLDER", str(folder)))


def test_a_page_that_is_no_openenv_server_is_refused() -> None:
    with serving(lambda *_: Reply()) as other, pytest.raises(ConfigError, match=r"HTTP 501"):
        verify_agent(f"openenv:{other.url}")


def test_paths_are_whole_so_that_a_run_resumes_from_any_folder(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert agent_source("python:a.py:f") == f"python:{tmp_path}/a.py:f"
    assert agent_source("verifiers:owner/name@1.0") == f"verifiers:owner/name@1.0:{tmp_path}/.engines/verifiers"
    assert agent_source("verifiers:a.toml:env") == f"verifiers:{tmp_path}/a.toml:{tmp_path}/env"
    for whole in (agent_source("python:a.py:f"), agent_source("verifiers:a.py"), "command:x y", "openenv:http://h:1"):
        assert agent_source(whole) == whole


def test_an_agent_that_was_given_in_python_keeps_its_name() -> None:
    assert agent_source("object:talk@1f2e") == "object:talk@1f2e"


def test_a_server_of_openenv_needs_websockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(
        ConfigError, match=r"--agent openenv:http://h:1 needs websockets: pip install 'ascent-rl\[agents\]'"
    ):
        verify_agent("openenv:http://h:1")


def test_the_signature_of_an_agent_that_cannot_be_read() -> None:
    with pytest.raises(RewardCallError, match="its signature cannot be read: an agent must be a function"):
        read_agent_signature(max)


def test_a_note_of_an_episode_keeps_its_outcome_when_it_is_sent() -> None:
    note = pickle.loads(pickle.dumps(EpisodeNote("turn 1: cut off", AgentResult(reward=0.5))))
    assert note == "turn 1: cut off" and note.result.reward == 0.5 and type(note) is EpisodeNote


def nothing() -> None: ...
def two_places(url, key) -> None: ...
def a_name_too_many(a, b, c, *, d) -> None: ...


def with_a_default(url, token, row, tries=3):
    return url, tries


def test_the_form_of_an_agents_function() -> None:
    given = {name: name for name in ("base_url", "key", "problem", "messages", "seed", "seconds")}
    for function, asked in (
        (lambda url, token, row: (url, token, row), ("base_url", "key", "problem")),
        (lambda messages, base_url: (messages, base_url), ("messages", "base_url")),
        (lambda problem, **more: (problem, more["seed"]), ("problem", "seed")),
        (lambda *places: places, ("base_url", "key", "problem")),
        (with_a_default, ("base_url", 3)),
    ):
        assert read_agent_signature(function)(**given) == asked
    for odd in (nothing, two_places, a_name_too_many, int, None):
        with pytest.raises(RewardCallError, match="an agent must be a function"):
            read_agent_signature(odd)


def test_the_examples_name_themselves_rightly() -> None:
    assert shutil.which("python") is None or verify_agent(f"command:python {EXAMPLES}/guess_program.py") is None
    for file in EXAMPLES.glob("*.py"):
        assert f"examples/agents/{file.name}" in file.read_text()

"""The tool `python` and the task `code` in a run: variables during an episode, and records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ascent
from ascent.cli import sandbox as command
from ascent.cli.main import main
from ascent.environments import python_tool
from ascent.environments.episode_pool import EpisodePool, Reply
from ascent.environments.tools import Tools, load_tool, schemas_of
from ascent.processes.supervisor import Limits
from ascent.rollout.conversation_task import make_tools_source
from ascent.sandbox.escape_tests import ESCAPE_TESTS, EscapeTestResult
from ascent.sandbox.isolation import Isolation, IsolationError
from ascent.sandbox.sandbox import SandboxError
from ascent.sandbox.sandboxed_reward import SandboxSettings
from ascent.tasks.text.text_task import Problem

SETTINGS = SandboxSettings("auto", 60.0, 1.0)


def call(code: str) -> str:
    return f"<call>python {json.dumps({'code': code})}</call>"


def said(step: Any) -> str:
    return step.observation[0]["content"].removeprefix("python: ")


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    python_tool.shared_sandbox(SETTINGS).close()


@pytest.fixture
def tools() -> Iterator[Tools]:
    functions = [load_tool("python")]
    made = Tools(functions, schemas_of(functions), sandbox=SETTINGS)
    yield made
    made.close()


def test_variables_are_kept_during_an_episode(tools: Tools) -> None:
    assert said(tools.step(call("x = 6\nprint('set')"))) == "set\n"
    assert said(tools.step(call("x * 7"))) == "42\n"
    assert said(tools.step(call("y = 1"))) == "(nothing was printed)"
    assert "ZeroDivisionError" in said(tools.step(call("x / 0")))
    assert "Operation not permitted" in said(tools.step(call("import socket; socket.socket()")))


def test_episodes_do_not_share_names(tools: Tools) -> None:
    functions = [load_tool("python")]
    other = Tools(functions, schemas_of(functions), sandbox=SETTINGS)
    tools.step(call("x = 1"))
    assert "NameError" in said(other.step(call("x")))
    other.close()


def test_a_session_that_ends_says_so_and_the_next_call_begins_another(tools: Tools) -> None:
    tools.step(call("x = 1"))
    assert "exit status 3. The session is over" in said(tools.step(call("import os; os._exit(3)")))
    assert "NameError" in said(tools.step(call("x")))
    tools.session.settings = tools.session.settings._replace(seconds=0.0)
    assert "took longer" in said(tools.step(call("while True: pass")))


def test_a_sandbox_that_fails_is_no_message_to_the_model(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(settings: SandboxSettings) -> Any:
        raise SandboxError("no more")

    monkeypatch.setattr(python_tool, "shared_sandbox", broken)
    with pytest.raises(SandboxError):
        tools.step(call("1"))


@pytest.mark.slow
@pytest.mark.parametrize("sources", [["python"], ["python", "object:double@1"]])
def test_episodes_in_processes_share_one_warm_sandbox(sources: list[str]) -> None:
    """Also together with a function that is a Python object, which is pickled."""

    def double(x: int) -> int:
        return 2 * x

    functions = [load_tool("python"), double][: len(sources)]
    chat: Any = SimpleNamespace(schemas=schemas_of(functions), format=SimpleNamespace(name="plain"))
    pool = EpisodePool(make_tools_source(sources, functions, chat, SETTINGS), Limits(60.0, 4.0))

    def replies(count: int) -> dict[int, Reply]:
        found: dict[int, Reply] = {}
        while len(found) < count:
            found |= {reply.episode: reply for reply in pool.wait_for_replies(5.0)}
        return found

    for episode in range(6):
        pool.begin(episode, Problem("x"), 1, episode)
    assert all(reply.error is None for reply in replies(6).values())
    for episode in range(6):
        pool.step(episode, call(f"x = {episode}"))
    replies(6)
    for episode in range(6):
        pool.step(episode, call("x * 2"))
    assert {episode: said(reply.step) for episode, reply in replies(6).items()} == {n: f"{2 * n}\n" for n in range(6)}
    pool.close()


@pytest.mark.slow
def test_a_run_on_programs_records_why_each_failed(tiny_folder: Path, tmp_path: Path) -> None:
    rows = [
        {
            "prompt": f"Add {n}.",
            "entry_point": "add",
            "tests": f"assert add(1) == {n + 1}",
            "solution": "def add(x): ...",
        }
        for n in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = ascent.train(
        f"code:{tmp_path / 'rows.jsonl'}", model=str(tiny_folder), out=tmp_path / "run", steps=1, prompts=2, samples=2,
        max_tokens=4, max_prompt=400, reward_workers=1, eval_prompts=1, preflight=False, record_rollouts="all",
    )  # fmt: skip
    assert run.config.task.sandbox == "auto"
    reasons = [row["reason"] for row in run.rollouts(0)]
    assert len(reasons) == 4 and all("the program does not run" in reason for reason in reasons)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["task"]["sandbox"] == "auto"


# ---- the command ----------------------------------------------------------------------------------------------


def test_the_check_reports_escapes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run_escape_tests(kind: str) -> tuple[str, list[EscapeTestResult]]:
        if kind == "bubblewrap":
            raise IsolationError("bubblewrap: bwrap is not installed")
        return "Landlock 7 and seccomp", [EscapeTestResult(each, True, "refused") for each in ESCAPE_TESTS]

    monkeypatch.setattr(command, "run_escape_tests", run_escape_tests)
    monkeypatch.setattr(command, "choose_isolation", lambda _: Isolation("landlock", 7))
    monkeypatch.setattr(command, "_milliseconds", lambda _: 3.0)
    assert main(["sandbox", "check"]) == 0
    shown = capsys.readouterr().out
    assert "bwrap is not installed" in shown and "network 10 of 10" in shown and "no folder to write in" in shown
    monkeypatch.setattr(
        command, "run_escape_tests", lambda _: ("isolation", [EscapeTestResult(ESCAPE_TESTS[0], False, "opened")])
    )
    assert main(["sandbox", "check"]) == 1
    assert "ESCAPED: files, read a secret file: opened" in capsys.readouterr().out


def test_the_check_is_refused_without_isolation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def choose_isolation(kind: str) -> Isolation:
        raise IsolationError(f"{kind}: there is none")

    monkeypatch.setattr(command, "choose_isolation", choose_isolation)
    assert main(["sandbox", "check"]) == 2
    assert "there is no sandbox here" in capsys.readouterr().err

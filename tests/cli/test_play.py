"""`ascent play`: a person in the policy's part, and in the environment's, by what is typed."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import ascent
from ascent.cli.main import main
from ascent.cli.play import Terminal, _person_factory
from ascent.workflows.loaded_policy import model_policy
from tests.language import write_tiny

Play = Callable[..., tuple[int, str, str]]
WORLDS = """
import os
from ascent import Environment, Step


class Talk(Environment):
    def begin(self, problem, rng):
        self.turns = 0
        return "hint 5"

    def step(self, action):
        self.turns += 1
        if action == "fall":
            raise ValueError("fell over")
        if action == "die":
            os._exit(3)
        return Step(f"heard {action}", len(action) / 10, self.turns == 3, "three turns" if self.turns == 3 else "")


class NeverBegins(Environment):
    def begin(self, problem, rng):
        raise RuntimeError("no world today")
"""


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Play:
    """`ascent play` with these lines typed: the exit status, what was shown, and what went wrong."""

    def run(*args: Any, typed: str = "", status: int = 0) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        found = main(["play", *map(str, args)])
        shown = capsys.readouterr()
        assert found == status, shown
        return found, shown.out, shown.err

    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("person")
    (folder / "worlds.py").write_text(WORLDS)
    rows = [{"prompt": f"{a} + {b}?", "answer": str(a + b)} for a in range(6) for b in range(4)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def task(place: Path, *more: str) -> list[str]:
    patient = ["--turn-seconds", "120", "--reward-seconds", "120"]  # whatever else this machine does
    return [f"jsonl:{place / 'sums.jsonl'}", "--check", "number", "--seed", "1", *patient, *more]


# ---- the policy's part ------------------------------------------------------------------------------------------


def test_a_person_finds_the_number_and_sees_what_each_guess_earns(play: Play) -> None:
    """Seed 3 hides 3: 7 and 5 are too high."""
    _, shown, _ = play("guess", "--seed", 3, typed="7\n5\n3\n")
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[0] == "prompt       Which number?"
    assert lines[2:] == [
        *("you          7", "environment  lower", "· turn 1: reward -0.143"),
        *("you          5", "environment  lower", "· turn 2: reward -0.143"),
        *("you          3", "· turn 3: reward 1, found with question 3"),
        *("The episode is over.", "Total reward 0.7143: 3 turns (-0.143, -0.143, 1)."),
    ]


def test_a_line_that_is_no_turn_is_asked_for_again_and_costs_nothing(play: Play) -> None:
    _, shown, _ = play("guess", "--seed", 3, typed="seven\n\n3 4\n99\n-1\n \x1b[2J\n3\n")
    assert shown.count("Nothing was sent") == 6 and "Total reward 1: 1 turn (1)." in shown
    assert "'seven': write some of 0, 1" in shown and "'3 4': a turn is 1 of 0, 1" in shown
    assert "lower, higher, no number" in shown and "\x1b" not in shown


def test_the_end_of_the_input_leaves_the_episode_and_says_so(play: Play) -> None:
    assert "left after 1 turn (-0.143)" in play("guess", "--seed", 3, typed="7\n")[1]
    assert "left after 0 turns." in play("swaps", "--seed", 3)[1]


def test_what_is_not_text_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"7\n\xff\n"), encoding="utf-8"))
    assert main(["play", "guess", "--seed", "3"]) == 2 and "is not text" in capsys.readouterr().err


def test_an_interrupt_ends_it_with_what_was_earned(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["7"])

    def typed(_: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("builtins.input", typed)
    _, _, wrong = play("guess", "--seed", 3, status=130)
    assert wrong == "ascent: interrupted: the episode was left after 1 turn (-0.143)\n"


def test_the_luck_of_a_world_is_the_seeds(play: Play) -> None:
    games = {play("swaps", "--slip", 0.5, "--turns", 6, "--seed", 5, typed="0\n1\n" * 3)[1] for _ in range(2)}
    assert len(games) == 1 and "it slipped" in games.pop()


@pytest.mark.long
def test_an_environment_of_a_file_is_played_and_the_last_turn_is_graded(play: Play, place: Path) -> None:
    world = f"python:{place / 'worlds.py'}:Talk"
    _, shown, _ = play(*task(place, "--environment", world), typed="hello\n\nyou\nit is 3\n")
    assert "prompt       1 + 2?" in shown and "environment  hint 5" in shown and "heard hello" in shown
    assert "a turn must not be empty. Nothing was sent" in shown and "· turn 3: reward 0.7, three turns" in shown
    assert "Total reward 2.5: 3 turns (0.5, 0.3, 0.7), and 1 for the answer (answered 3)." in shown.replace("\n  ", " ")
    _, shown, _ = play(*task(place, "--environment", world, "--max-turns", "2"), typed="a\nb\nc\n")
    assert "The episode is over: the limit of 2 turns." in shown


@pytest.mark.long
def test_an_environment_that_crashes_stops_the_game_with_its_reason(play: Play, place: Path) -> None:
    world = f"python:{place / 'worlds.py'}:Talk"
    _, shown, wrong = play(*task(place, "--environment", world), typed="hello\nfall\n", status=1)
    assert "turn 1: reward 0.5" in shown
    assert "stopped: the environment failed in turn 2: ValueError: fell over (worlds.py, line 14)" in wrong
    wrong = play(*task(place, "--environment", world), typed="die\n", status=1)[2]
    assert "failed in turn 1: its environment ended its process" in wrong
    world = f"python:{place / 'worlds.py'}:NeverBegins"
    assert (
        "failed when it began: RuntimeError: no world today" in play(*task(place, "--environment", world), status=1)[2]
    )


@pytest.mark.long
def test_a_person_calls_tools_in_the_plain_format(play: Play, place: Path) -> None:
    typed = '<call>calculator {"expression": "1+2"}</call>\n<call>calculator {</call>\n3\n'
    _, shown, _ = play(*task(place, "--tools", "calculator"), typed=typed)
    assert "You can call these functions:" in shown and "tool         calculator: 3" in shown
    assert "1 call (1 unparsed)" in shown and "does not parse" in shown and "Total reward 1: 3 turns" in shown


@pytest.mark.long
def test_a_reward_that_fails_on_an_answer_is_told(play: Play, place: Path) -> None:
    (place / "mine.py").write_text("def fails(prompt, response, answer, **columns):\n    raise ValueError('no luck')\n")
    reward = f"python:{place / 'mine.py'}:fails"
    assert "no luck" in play(*task(place, "--reward", reward), typed="3\n", status=1)[2]


@pytest.mark.long
def test_a_problem_of_one_turn_is_answered_and_graded(play: Play, place: Path) -> None:
    assert "Total reward 1: 0 turns, and 1 for the answer" in play(*task(place), typed="3\n")[1]


# ---- the environment's part -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "guess"
    ascent.train("guess", out=out, steps=1, prompts=2, samples=2, show=False)
    return out


def test_a_person_answers_a_policy_and_pays_for_its_turns(play: Play, run: Path) -> None:
    typed = "higher\n/reward x\n/reward 0.5\n\nlower\n/what\n/end 1\n"
    _, shown, _ = play(run, "--as", "environment", "--seed", 3, typed=typed)
    assert "The right answer: 3" in shown and shown.count("\n  policy ") == 3
    assert (
        shown.count("Nothing was sent") == 3
        and "'x': a reward must be a number" in shown
        and "/what: use /reward X" in shown
    )
    assert shown.endswith("The episode is over: you ended it.\n  Total reward 1.5: 3 turns (0, 0.5, 1).\n")
    assert "The input has ended" in play(run, "--as", "environment", "--seed", 3, typed="higher\n")[1]


@pytest.mark.long
def test_a_person_answers_a_language_model_with_an_environment_with_tools_or_without(
    play: Play, place: Path, tmp_path: Path
) -> None:
    how = ["--model", str(write_tiny(tmp_path / "tiny")), "--as", "environment", "--turn-tokens", "9"]
    how += ["--max-tokens", "40", "--max-prompt", "700"]
    _, shown, _ = play(*task(place, *how), typed="welcome\nno\n//slash\n/end 2\n")
    assert shown.count("\n  policy ") == 3 and "Total reward 2: 3 turns (0, 0, 2)." in shown
    world = f"python:{place / 'worlds.py'}:Talk"
    _, shown, _ = play(*task(place, *how, "--environment", world), typed="\n/end\n")
    assert "hint 5" not in shown and "Total reward 0: 1 turn (0)." in shown
    _, shown, _ = play(*task(place, *how, "--tools", "calculator"), typed="")
    assert "The episode is over: a turn without a call." in shown and "Type what each call returns" in shown


@pytest.mark.long
def test_a_person_sends_no_empty_answer_and_sees_a_turn_that_was_cut_off(
    play: Play, place: Path, tmp_path: Path
) -> None:
    how = ["--model", str(write_tiny(tmp_path / "tiny")), "--as", "environment", "--turn-tokens", "9"]
    _, shown, _ = play(*task(place, *how, "--max-tokens", "40"), typed="welcome\n  \n/end 2\n")
    assert (
        "an observation must not be empty; /end ends the episode. Nothing was sent" in shown and "1 turn (2)." in shown
    )
    _, shown, _ = play(*task(place, *how, "--max-tokens", "9"), typed="welcome\n")
    assert shown.count("\n  policy ") == 1 and "1 turn (0)." in shown, "a limit of tokens ends it before an answer"
    _, shown, _ = play(*task(place, *how, "--max-tokens", "12"), typed="welcome\nyes\n")
    assert shown.count("\n  policy ") == 1 and "1 turn (0)." in shown, "an answer without room is no second turn"


@pytest.mark.long
def test_a_person_answers_the_calls_of_a_policy(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("seven\n"))
    settings = {"tools": ("calculator",), "max_prompt": 700}
    loaded = model_policy(str(write_tiny(tmp_path / "tiny")), f"jsonl:{place / 'sums.jsonl'}", settings)
    with closing(loaded.unscored_task()) as bound:
        environment = _person_factory(loaded.config.task, bound, True, Terminal(color=False))()
        step = environment.step('<call>calculator {"expression": "3+4"}</call>')
    assert "seven" in str(step.observation) and not step.done
    shown = capsys.readouterr().out
    assert (
        "  policy       <call>" in shown
        and "  tool         calculator(expression='3+4')\n  you          seven" in shown
    )


def test_a_policy_of_one_turn_takes_no_answer(play: Play, tmp_path: Path) -> None:
    ascent.train("sort", out=tmp_path / "sort", steps=1, prompts=2, eval_prompts=2, show=False)
    assert (
        "sort has one turn: the policy reads no observation"
        in play(tmp_path / "sort", "--as", "environment", status=2)[2]
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["sort"], "sort has no environment"),
        (["guess", "--as", "environment"], "name the policy to play with, its folder"),
        (["textarena:Nim", "--as", "environment"], "name the policy to play with, --model FOLDER"),
        (["guess", "--model", "x"], "you play the policy"),
        (["guess", "--as", "nobody"], "it has to be one of policy, environment"),
        (["guess", "--json"], "`ascent play` is interactive"),
        (["guess", "--steps", "3"], "ascent play has no such flag"),
        (["nothing"], "no such task"),
    ],
)
def test_what_cannot_be_played_is_refused(args: list[str], words: str, play: Play) -> None:
    assert words in play(*args, status=2)[2]


def test_a_run_is_played_with_its_own_settings(play: Play, run: Path) -> None:
    assert "found with question 1" in play(run, "--seed", 3, typed="3\n")[1]
    assert "a run already has a task" in play(run, "--numbers", 5, status=2)[2]


@pytest.mark.slow
def test_a_pipe_plays_through_the_command_line(warm_python: Any) -> None:
    command = [warm_python.executable, "-m", "ascent", "play", "guess", "--seed", "3"]
    done = subprocess.run(command, input="7\n3\n", capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "") and "Total reward 0.8571: 2 turns (-0.143, 1)." in done.stdout

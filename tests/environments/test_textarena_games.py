"""Games of textarena as environments, each in its own process, and the task that plays them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from ascent.core.errors import ConfigError
from ascent.environments.episode_pool import EpisodePool, Reply
from ascent.environments.episode_process import Source
from ascent.processes.supervisor import Limits
from ascent.rollout.conversation_task import make_environment_source
from ascent.settings import configure, flatten
from ascent.tasks.text.table_tasks import Jsonl
from ascent.tasks.text.text_task import Problem, TextTask
from ascent.tasks.text.textarena import Textarena

pytestmark = pytest.mark.slow  # the process that games are forked from imports textarena for seconds
ANY = """
from ascent.environments.textarena_games import TextarenaGame
from ascent.tasks.environment import Environment


class Any(Environment):
    def begin(self, problem, rng):
        self.game = TextarenaGame(problem.prompt)
        return self.game.begin(problem, rng)

    def step(self, action):
        return self.game.step(action)
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EpisodePool]:
    """One environment process for all games: the problem names the game."""
    file = tmp_path_factory.mktemp("games") / "any.py"
    file.write_text(ANY)
    with closing(EpisodePool(Source(f"python:{file}:Any"), Limits(60.0))) as pool:
        yield pool


class Play:
    """A game that the test plays move by move."""

    def __init__(self, pool: EpisodePool, game: str, shared: int = 1, own: int = 1):
        self.pool = pool
        self.number = max(pool.episodes, default=0) + 1
        pool.begin(self.number, Problem(game), shared, own)
        self.first = self._reply()

    def __call__(self, move: str) -> Any:
        self.pool.step(self.number, move)
        reply = self._reply()
        assert reply.step is not None, reply.error
        return reply.step

    def _reply(self) -> Reply:
        (reply,) = self.pool.wait_for_replies(120.0)
        return reply

    @property
    def rules(self) -> str:
        assert self.first.step is not None, self.first.error
        return str(self.first.step.observation)


def test_a_puzzle_says_its_rules_answers_moves_and_pays_when_it_is_solved(pool: EpisodePool) -> None:
    play = Play(pool, "TowerOfHanoi")
    assert play.rules.startswith("[GAME] You are playing Tower of Hanoi with 3 disks.")
    steps = [play(f"I move [{move}]") for move in ("A C", "A B", "C B", "A C", "B A", "B C", "A C")]
    assert steps[0].observation.startswith("[GAME] You moved disk 1 from A to C.\n[GAME] Current Board")
    assert not any("I move" in step.observation for step in steps), "its own words are there already"
    assert [step.done for step in steps] == [False] * 6 + [True]
    assert [step.reward for step in steps] == [0.0] * 6 + [1.0]
    assert steps[-1].reason.startswith("Congratulations")


def test_a_hidden_number_is_the_groups_and_is_found_by_halving(pool: EpisodePool) -> None:
    found = []
    for shared in (3, 3, 4):
        play, low, high, step = Play(pool, "GuessTheNumber", shared), 1, 20, None
        while step is None or not step.done:
            middle = (low + high) // 2
            step = play(f"[{middle}]")
            low, high = (middle + 1, high) if "higher" in step.observation else (low, middle - 1)
        assert step.reward == 1.0
        found.append(middle)
    assert found[0] == found[1] != found[2]


def test_the_other_player_moves_at_random_within_the_rules_by_the_episodes_seed(pool: EpisodePool) -> None:
    def game(own: int) -> list[Any]:
        play = Play(pool, "Nim", 7, own)
        assert "pile 2: 5" in play.rules and "Player 1" not in play.rules
        step = play("[2 1]")
        assert re.search(r"\[Player 1\] \[\d \d\]\n\[GAME\] Player 1 removes \d from pile \d", step.observation)
        return [step, play("nonsense"), play("nonsense")]

    games = [game(own) for own in (1, 1, 2, 3, 4)]
    assert games[0] == games[1]
    assert len({game[0] for game in games}) > 2
    _, warned, lost = games[0]
    assert "attempted an invalid move" in warned.observation and not warned.done
    assert (lost.done, lost.reward) == (True, -1.0)


def test_swapped_reason_and_reward_of_a_game_are_fixed(pool: EpisodePool) -> None:
    play = Play(pool, "Cryptarithm")
    assert "Reason: Bad action format." in play("nonsense").observation
    step = play("nonsense")
    assert (step.done, step.reward, step.reason) == (True, 0.0, "Invalid Move: Bad action format. Use `[A 5]`.")


MOVES = {
    "IteratedRockPaperScissors": "[rock]",
    "Secretary": "[continue]",
    "Blackjack": "[stand]",
    "Bandit-v0-hard": "[red]",
    "TicTacToe": "[4]",
    "ConnectFour": "[col 3]",
    "KuhnPoker": "[check]",
    "ThreePlayerIPD": "[1 cooperate] [2 defect]",
    "PublicGoodsGame": "[5]",
    "Breakthrough": "[a2a3]",
}


@pytest.mark.parametrize("game", MOVES)
def test_these_games_run_without_a_network(game: str, pool: EpisodePool) -> None:
    play = Play(pool, game)
    step = play(MOVES[game])
    assert "invalid" not in step.observation.lower() and "invalid" not in step.reason.lower(), step


def test_a_game_that_is_not_there_or_misses_its_data_says_so(pool: EpisodePool) -> None:
    assert "textarena has no game Nimm; it has Nim" in str(Play(pool, "Nimm").first.error)
    wordle = Play(pool, "Wordle").first
    assert wordle.step is not None or "python -m nltk.downloader words" in str(wordle.error)


def test_the_task_is_a_number_of_a_game_and_its_environment() -> None:
    config = configure("textarena:Nim", {"model": "m"})
    assert config.task == Textarena(source="Nim") and config.task.has_environment
    flat = flatten(config.to_dict())
    assert configure(flat.pop("task"), flat) == config
    config.task.verify()
    assert config.task.train(3) == config.task.train(3) != config.task.train(4)
    assert make_environment_source(config.task.environment) == Source(
        "ascent.environments.textarena_games:TextarenaGame", {"game": "Nim"}
    )
    with pytest.raises(ConfigError, match="the game answers the turns"):
        Textarena(source="Nim", environment="python:a.py:B")
    with pytest.raises(ConfigError, match="needs the name of a game"):
        Textarena().verify()
    for task in (Textarena(source="Nimm"), Jsonl(source="x.jsonl", environment="textarena:Nimm")):
        with pytest.raises(ConfigError, match=r"textarena has no game Nimm\. Did you mean Nim\?"):
            TextTask.verify(task)

"""Games of textarena as environments, by their names: Nim, TowerOfHanoi-v0-hard, IteratedRockPaperScissors.

The policy is player 0. It sees what the game tells it, new messages only, and its reward is the game's at the end:
1 for a win, −1 for a loss, 0 for a draw, or the game's own score. A move that the rules forbid is answered as the game
does: most let the player try once more, and then it has lost. Other players move at random.

The games use the global random numbers, so each episode needs a process of its own (processes.py); this file imports
textarena at its head, for the process that they are forked from. Some games need word lists from the network, or a
model to talk to: those fail when they begin, with the reason.

Guertler et al., TextArena, 2025.
"""

import copy
import difflib
import random
import re
from collections.abc import Iterator
from typing import Any

import textarena

from ascent.tasks.environment import Environment, Step
from ascent.tasks.text.text_task import Problem

PLAYERS = 8
"""The most players of a game that is tried."""
TRIES = 4000
"""Moves that are tried for a player who moves at random, until one is allowed."""
_WORDS = re.compile(r"\[([^\[\]\n]{1,40})\]")


def game_id(name: str) -> str:
    """The name under which textarena has a game without its own collection of messages: Nim becomes Nim-v0-raw."""
    registered = textarena.envs.registration.ENV_REGISTRY
    known = [game.removesuffix("-raw") for game in registered if game.endswith("-raw")]
    for spelled in (name, f"{name}-v0"):
        if spelled in known:
            return f"{spelled}-raw"
    close = difflib.get_close_matches(name, [game.replace("-v0", "", 1) for game in known], 3)
    raise ValueError(f"textarena has no game {name}" + (f"; it has {', '.join(close)}" if close else ""))


class TextarenaGame(Environment):
    """One game."""

    def __init__(self, game: str):
        self.name, self.id = game, game_id(game)

    def begin(self, problem: Problem, rng: random.Random) -> str:
        self.rng = rng
        self._reset(rng.getrandbits(32))
        self._others_move()
        return self._news()

    def _reset(self, seed: int) -> None:
        """With as few players as the game takes. Some take one, though they are for several."""
        why = "it is for several"
        for players in range(1, PLAYERS + 1):
            try:
                self.game = textarena.make(self.id)
                self.game.reset(num_players=players, seed=seed)
            except LookupError as error:
                missing = re.findall(r"nltk\.download\('(\w+)'\)", str(error)) or [f"({error!s:.80})"]
                raise ValueError(f"it needs data that is not here: python -m nltk.downloader {missing[0]}") from None
            except (AssertionError, ValueError) as error:
                why = str(error)
                continue
            if players > 1:
                return
            if isinstance(self.game.state, textarena.SinglePlayerState):
                return _mend(self.game.state)
        raise ValueError(f"textarena:{self.name} does not begin with up to {PLAYERS} players: {why}")

    def step(self, action: str) -> Step:
        done = self.game.step(action=action)[0] or self._others_move()
        if not done:
            return Step(self._news())
        rewards, info = self.game.close()
        reason = info.get(0, {}).get("reason") if isinstance(info, dict) else None
        return Step(self._news(), float((rewards or {}).get(0, 0.0)), True, str(reason or ""))

    def _news(self) -> str:
        """What player 0 has not been told yet."""
        state = self.game.state
        messages, state.observations[0] = state.observations[0], []
        own = {0, textarena.GAME_ID} if state.num_players == 1 else {0}  # games of one call its moves their own
        moved = textarena.ObservationType.PLAYER_ACTION
        roles = {**state.role_mapping, textarena.GAME_ID: "GAME"}
        told = [(who, words) for who, words, kind in messages if who not in own or (who != 0 and kind is not moved)]
        return "\n".join(f"[{roles.get(who, f'Player {who}')}] {words}" for who, words in told)

    # ---- players who move at random

    def _others_move(self) -> bool:
        """Let the others move until it is the policy's turn; whether the game has ended."""
        while (player := self.game.state.current_player_id) != 0:
            told = self.game.state.observations[player]
            rules = " ".join(words for who, words, _ in told if who == textarena.GAME_ID)
            if self.game.step(action=self._random_move(rules))[0]:
                return True
        return False

    def _random_move(self, rules: str) -> str:
        """A move that the rules allow: candidates are tried on copies of the game, in random order."""
        for tried, move in enumerate(self._candidates(rules)):
            if tried == TRIES:
                break
            if self._allowed(move):
                return move
        raise ValueError(f"textarena:{self.name}: no move was found for the other player, who moves at random")

    def _candidates(self, rules: str) -> Iterator[str]:
        """What stands in brackets in the rules, with other numbers too; numbers; moves from a square to another."""
        words = set(_WORDS.findall(rules))
        for word in list(words):
            words |= {
                word[: m.start()] + str(n) + word[m.end() :] for m in re.finditer(r"\d+", word) for n in range(10)
            }
        words |= {f"{a} {b}" for a in range(10) for b in range(10)} | {str(number) for number in range(65)}
        for group in (sorted(words), _moves("") + _moves(" ")):
            self.rng.shuffle(group)
            yield from (f"[{word}]" for word in group)

    def _allowed(self, move: str) -> bool:
        mover = self.game.state.current_player_id
        try:
            trial = copy.deepcopy(self.game)
            done = trial.step(action=move)[0]
            state, info = trial.state, trial.state.game_info
            forbidden = info.get(mover, {}).get("invalid_move") or (not done and state.error_count > 0)
            return not forbidden
        except Exception:
            return False


def _moves(between: str) -> list[str]:
    """Moves on a board of eight by eight, up to three squares far: a2a3."""
    ways = [(x * far, y * far) for x in (-1, 0, 1) for y in (-1, 0, 1) for far in (1, 2, 3) if x or y]
    squares = [(a, b, a + x, b + y) for a in range(8) for b in range(8) for x, y in ways]
    inside = [square for square in squares if 0 <= square[2] < 8 and 0 <= square[3] < 8]
    return [f"{'abcdefgh'[a]}{b + 1}{between}{'abcdefgh'[c]}{d + 1}" for a, b, c, d in inside]


def _mend(state: Any) -> None:
    """Some games of one player give the reason of an invalid move and its reward in the wrong order."""
    told = state.set_invalid_move

    def invalid(reason: Any, reward: Any = -1.0) -> None:
        told(*((reward, reason) if isinstance(reward, str) else (reason, reward)))

    state.set_invalid_move = invalid

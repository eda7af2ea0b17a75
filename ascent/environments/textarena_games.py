"""Games of textarena as environments, by their names: Nim, TowerOfHanoi-v0-hard, IteratedRockPaperScissors.

The policy is player 0. It observes the game's new messages, and its reward is the game's at the end: 1 for a win, −1
for a loss, 0 for a draw, or the game's score. Most games allow one retry after an invalid move, and then the player has
lost. Other players move at random.

The games use global random numbers, so each episode needs its own process (episode_pool.py); textarena is imported at
the top, for the process from which they are forked. Some games need word lists from the network or another model:
they fail when they begin, with the reason.

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

MAX_PLAYERS = 8
MAX_MOVE_TRIES = 4000
"""Candidate moves of a random player that are tried until one is allowed."""
_WORDS = re.compile(r"\[([^\[\]\n]{1,40})\]")


def game_id(name: str) -> str:
    """Return textarena's id of a game without its wrappers: Nim becomes Nim-v0-raw."""
    registered = textarena.envs.registration.ENV_REGISTRY
    known = [game.removesuffix("-raw") for game in registered if game.endswith("-raw")]
    for candidate in (name, f"{name}-v0"):
        if candidate in known:
            return f"{candidate}-raw"
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
        return self._new_messages()

    def _reset(self, seed: int) -> None:
        """Start with the fewest possible players. Some games accept one although they need several."""
        reason = "it needs several players"
        for players in range(1, MAX_PLAYERS + 1):
            try:
                self.game = textarena.make(self.id)
                self.game.reset(num_players=players, seed=seed)
            except LookupError as error:
                missing = re.findall(r"nltk\.download\('(\w+)'\)", str(error)) or [f"({error!s:.80})"]
                raise ValueError(
                    f"it needs data that is not installed: python -m nltk.downloader {missing[0]}"
                ) from None
            except (AssertionError, ValueError) as error:
                reason = str(error)
                continue
            if players > 1:
                return
            if isinstance(self.game.state, textarena.SinglePlayerState):
                return _fix_invalid_move(self.game.state)
        raise ValueError(f"textarena:{self.name} does not begin with up to {MAX_PLAYERS} players: {reason}")

    def step(self, action: str) -> Step:
        done = self.game.step(action=action)[0] or self._others_move()
        if not done:
            return Step(self._new_messages())
        rewards, info = self.game.close()
        reason = info.get(0, {}).get("reason") if isinstance(info, dict) else None
        return Step(self._new_messages(), float((rewards or {}).get(0, 0.0)), True, str(reason or ""))

    def _new_messages(self) -> str:
        """Return the new messages to player 0."""
        state = self.game.state
        messages, state.observations[0] = state.observations[0], []
        own_ids = {0, textarena.GAME_ID} if state.num_players == 1 else {0}  # solo games echo moves as their own
        player_action = textarena.ObservationType.PLAYER_ACTION
        roles = {**state.role_mapping, textarena.GAME_ID: "GAME"}
        shown = [
            (sender, text)
            for sender, text, kind in messages
            if sender not in own_ids or (sender != 0 and kind is not player_action)
        ]
        return "\n".join(f"[{roles.get(sender, f'Player {sender}')}] {text}" for sender, text in shown)

    # ---- players who move at random

    def _others_move(self) -> bool:
        """Let the others move until it is the policy's turn. Return whether the game has ended."""
        while (player := self.game.state.current_player_id) != 0:
            messages = self.game.state.observations[player]
            rules = " ".join(text for sender, text, _ in messages if sender == textarena.GAME_ID)
            if self.game.step(action=self._random_move(rules))[0]:
                return True
        return False

    def _random_move(self, rules: str) -> str:
        """Return an allowed move: candidates are tried on copies of the game, in random order."""
        for num_tried, move in enumerate(self._candidates(rules)):
            if num_tried == MAX_MOVE_TRIES:
                break
            if self._is_allowed(move):
                return move
        raise ValueError(f"textarena:{self.name}: found no move for the other player, who moves at random")

    def _candidates(self, rules: str) -> Iterator[str]:
        """Yield words in brackets in the rules, also with other numbers; numbers; and moves between squares."""
        words = set(_WORDS.findall(rules))
        for word in list(words):
            words |= {
                word[: m.start()] + str(n) + word[m.end() :] for m in re.finditer(r"\d+", word) for n in range(10)
            }
        words |= {f"{a} {b}" for a in range(10) for b in range(10)} | {str(number) for number in range(65)}
        for group in (sorted(words), _moves("") + _moves(" ")):
            self.rng.shuffle(group)
            yield from (f"[{word}]" for word in group)

    def _is_allowed(self, move: str) -> bool:
        mover = self.game.state.current_player_id
        try:
            trial = copy.deepcopy(self.game)
            done = trial.step(action=move)[0]
            state, info = trial.state, trial.state.game_info
            is_invalid = info.get(mover, {}).get("invalid_move") or (not done and state.error_count > 0)
            return not is_invalid
        except Exception:
            return False


def _moves(separator: str) -> list[str]:
    """Return moves on an 8 × 8 board by up to three squares: a2a3."""
    steps = [(x * n, y * n) for x in (-1, 0, 1) for y in (-1, 0, 1) for n in (1, 2, 3) if x or y]
    squares = [(a, b, a + x, b + y) for a in range(8) for b in range(8) for x, y in steps]
    inside = [square for square in squares if 0 <= square[2] < 8 and 0 <= square[3] < 8]
    return [f"{'abcdefgh'[a]}{b + 1}{separator}{'abcdefgh'[c]}{d + 1}" for a, b, c, d in inside]


def _fix_invalid_move(state: Any) -> None:
    """Accept both orders of reason and reward: some single-player games swap them."""
    set_invalid_move = state.set_invalid_move

    def invalid(reason: Any, reward: Any = -1.0) -> None:
        set_invalid_move(*((reward, reason) if isinstance(reward, str) else (reason, reward)))

    state.set_invalid_move = invalid

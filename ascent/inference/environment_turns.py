"""Turns: what a sampler asks when a turn of a response has ended, and what environments have said so far.

A sampler knows only responses that are asked about, answered with tokens, and over. Who answers, in which process and
how fast, is nothing to it: what it draws depends on seeds and positions alone.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class EnvironmentReply(Protocol):
    """What follows a turn."""

    @property
    def tokens(self) -> list[int]:
        """Those of the observation; none: the response is over."""

    @property
    def reward(self) -> float: ...

    @property
    def error(self) -> str | None:
        """Why the environment failed: then the response is not valid, whatever it has earned."""

    @property
    def cut(self) -> bool:
        """Did a limit of turns end the response, and not its environment?"""

    @property
    def note(self) -> str:
        """What is to be said of the turn, in words."""

    @property
    def seconds(self) -> float:
        """How long the environment took."""


class EpisodeBatch(Protocol):
    """The environments of one call, one per response, by its place in the call."""

    turn_tokens: int
    """The most tokens of a turn; 0: no limit of its own."""
    pays: bool
    """May an answer bring a reward? Without, a response has that of its outcome alone, as if it had one turn."""

    def ask(self, response: int, turn: list[int]) -> None:
        """A turn has ended, and these are its tokens."""

    def answers(self, wait: bool) -> list[tuple[int, EnvironmentReply]]:
        """What has been answered since, in any order. `wait`: at least one, if any was asked for.

        Every wait has a deadline of its own: an environment that misses it has failed, and that is the answer.
        """

    def close(self) -> None:
        """The call is over: end what is left."""


class EnvironmentTurns:
    """What was asked and answered in one call: how far each response may go, and the fields that rollouts get."""

    def __init__(self, episodes: EpisodeBatch, limits: Tensor, width: int):
        """`limits`: tokens of each response that are drawn. `width`: tokens of any, observations counted."""
        count = len(limits)
        self.episodes, self.limits, self.room = episodes, limits.tolist(), width
        self.observed = np.zeros((count, width), dtype=bool)
        """Tokens that nobody drew."""
        self.turn = np.zeros((count, width), dtype=np.int64)
        self.reward, self.waited = np.zeros((count, width), np.float32), np.zeros((count, width), np.float32)
        self.begin = [0] * count
        """Where the latest turn of each response begins."""
        self.given = [0] * count
        """Tokens of each response that nobody drew."""
        self.asked: dict[int, int] = {}
        """Responses that wait for an answer, and how many tokens they have."""
        self.over: set[int] = set()
        """Responses whose environment has ended them; others that are over were truncated by a limit."""
        self.errors: dict[int, str] = {}
        self.notes: dict[int, list[str]] = {}

    def end(self, response: int) -> int:
        """How many tokens a response may have for good, if nothing more is given to it."""
        return min(self.room, self.given[response] + self.limits[response])

    def limit(self, response: int) -> int:
        """Where its latest turn ends at the latest."""
        turn = self.episodes.turn_tokens
        return min(self.end(response), self.begin[response] + turn) if turn else self.end(response)

    def ask(self, response: int, turn: list[int]) -> None:
        """The latest turn of a response has ended, with these tokens."""
        self.asked[response] = self.begin[response] + len(turn)
        self.episodes.ask(response, turn)

    def answers(self, wait: bool = False) -> list[tuple[int, list[int]]]:
        """Observations that have arrived, by response; without one it is over, and so if none would leave room."""
        arrived = []
        for response, answer in self.episodes.answers(wait) if self.asked else []:
            end = self.asked.pop(response)
            self.reward[response, end - 1] += answer.reward
            self.waited[response, end - 1] += answer.seconds
            if answer.note:
                self.notes.setdefault(response, []).append(answer.note)
            tokens = answer.tokens
            if answer.error is not None:
                self.errors[response], tokens = answer.error, []
            if not tokens and not answer.cut:
                self.over.add(response)
            elif end + len(tokens) >= min(self.room, self.given[response] + len(tokens) + self.limits[response]):
                tokens = []
            self.given[response] += len(tokens)
            self.begin[response] = behind = end + len(tokens)
            self.observed[response, end:behind] = True
            self.turn[response, behind:] += 1
            arrived.append((response, tokens))
        return arrived

    def fields(self, shape: tuple[int, int], present: Tensor) -> dict[str, Any]:
        """What rollouts of these responses carry of it."""
        width, words = present.shape[-1], np.empty(shape[0] * shape[1], dtype=object)
        for i in range(len(words)):
            words[i] = "; ".join([*self.notes.get(i, []), *([self.errors[i]] if i in self.errors else [])])
        observed, turn, reward, waited = (
            torch.from_numpy(part[:, :width]).reshape(*shape, width)
            for part in (self.observed, self.turn, self.reward, self.waited)
        )
        return {
            "mask": present & ~observed,
            "present": present,
            "turn": torch.where(present, turn, 0),
            "reward": reward if self.episodes.pays else None,
            "waited": waited,
            "valid": torch.tensor([i not in self.errors for i in range(len(words))]).view(shape),
            "notes": words.reshape(shape),
        }

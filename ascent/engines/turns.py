"""Turns: what a sampler asks when a turn of a response has ended, and what environments have said so far.

A sampler knows only responses that are asked about, answered with tokens, and over. Who answers, in which process and
how fast, is nothing to it: what it draws depends on seeds and positions alone.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class Answer(Protocol):
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
    def note(self) -> str:
        """What is to be said of the turn, in words."""


class Episodes(Protocol):
    """The environments of one call, one per response, by its place in the call."""

    turn_tokens: int
    """The most tokens of a turn; 0: no limit of its own."""

    def ask(self, response: int, turn: list[int]) -> None:
        """A turn has ended, and these are its tokens."""

    def answers(self, wait: bool) -> list[tuple[int, Answer]]:
        """What has been answered since, in any order. `wait`: at least one, if any was asked for.

        Every wait has a deadline of its own: an environment that misses it has failed, and that is the answer.
        """

    def close(self) -> None:
        """The call is over: end what is left."""


class Turns:
    """What was asked and answered in one call: the fields that it adds to rollouts."""

    def __init__(self, episodes: Episodes, count: int, limit: int):
        self.episodes, self.limit = episodes, limit
        self.observed = torch.zeros(count, limit, dtype=torch.bool)
        """Tokens that nobody drew."""
        self.turn = torch.zeros(count, limit, dtype=torch.long)
        self.reward = torch.zeros(count, limit)
        self.begin = [0] * count
        """Where the latest turn of each response begins."""
        self.asked: dict[int, int] = {}
        """Responses that wait for an answer, and how many tokens they have."""
        self.over: set[int] = set()
        """Responses whose environment has ended them."""
        self.errors: dict[int, str] = {}
        self.notes: dict[int, list[str]] = {}

    def ask(self, response: int, turn: list[int]) -> None:
        """The latest turn of a response has ended, with these tokens."""
        self.asked[response] = self.begin[response] + len(turn)
        self.episodes.ask(response, turn)

    def answers(self, wait: bool = False) -> list[tuple[int, list[int]]]:
        """Observations that have arrived, by response; empty ones end it, and so does one that leaves no room."""
        arrived = []
        for response, answer in self.episodes.answers(wait and bool(self.asked)):
            end = self.asked.pop(response)
            self.reward[response, end - 1] += answer.reward
            if answer.note:
                self.notes.setdefault(response, []).append(answer.note)
            if answer.error is not None:
                self.errors[response] = answer.error
            tokens = [] if answer.error is not None else answer.tokens
            if not tokens:
                self.over.add(response)
            elif end + len(tokens) >= self.limit:
                tokens = []
            self.begin[response] = behind = end + len(tokens)
            self.observed[response, end:behind] = True
            self.turn[response, behind:] += 1
            arrived.append((response, tokens))
        return arrived

    def fields(self, shape: tuple[int, int], width: int, present: Tensor) -> dict[str, Any]:
        """What rollouts of this width carry of it."""
        words = np.empty(shape[0] * shape[1], dtype=object)
        words[:] = [
            "; ".join([*self.notes.get(i, []), *([self.errors[i]] if i in self.errors else [])])
            for i in range(len(words))
        ]
        turn, reward = (part[:, :width].reshape(*shape, width) for part in (self.turn, self.reward))
        valid = torch.tensor([i not in self.errors for i in range(len(words))]).view(shape)
        return {
            "turn": torch.where(present, turn, 0),
            "reward": reward,
            "valid": valid,
            "notes": words.reshape(shape),
        }

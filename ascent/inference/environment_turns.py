"""Multi-turn responses: the interface between an engine and the environments that answer its turns.

An engine submits the tokens of a finished turn and receives observation tokens, or the end of the response. It does not
depend on where an environment runs or how fast it is: sampled tokens depend on seeds and positions alone.
"""

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class EnvironmentReply(Protocol):
    """An environment's reply to a turn."""

    @property
    def tokens(self) -> list[int]:
        """Tokens of the observation; empty if the response is over."""

    @property
    def reward(self) -> float: ...

    @property
    def error(self) -> str | None:
        """Why the environment failed. The response is then invalid, whatever its reward."""

    @property
    def truncated(self) -> bool:
        """Whether the response ended because of a limit on turns, and not because the environment terminated."""

    @property
    def note(self) -> str:
        """A remark on the turn for people."""

    @property
    def seconds(self) -> float:
        """Time that the environment took."""


class EpisodeBatch(Protocol):
    """The episodes of one generation call, one per response, indexed by the position of the response in the call."""

    turn_tokens: int
    """Maximum number of tokens per turn; 0: no limit per turn."""
    has_step_rewards: bool
    """Whether replies carry rewards. If not, a response has only the reward of its outcome."""

    def submit_turn(self, response: int, turn: list[int]) -> None:
        """Submit the tokens of a finished turn."""

    def poll(self, wait: bool) -> list[tuple[int, EnvironmentReply]]:
        """Return the replies since the last call, in any order; with `wait`, block until there is at least one.

        Every environment has a deadline. If it misses the deadline, the reply is an error.
        """

    def close(self) -> None:
        """End the remaining episodes."""


class EnvironmentTurns:
    """Turns, observations and rewards of one generation call, and the token limits that follow from them."""

    def __init__(self, episodes: EpisodeBatch, limits: Tensor, width: int):
        """`limits`: maximum number of sampled tokens per response. `width`: maximum length, including observations."""
        count = len(limits)
        self.episodes, self.limits, self.width = episodes, limits.tolist(), width
        self.observed = np.zeros((count, width), dtype=bool)
        """True for observation tokens."""
        self.turn = np.zeros((count, width), dtype=np.int64)
        self.reward, self.waited = np.zeros((count, width), np.float32), np.zeros((count, width), np.float32)
        self.turn_start = [0] * count
        """Index of the first token of each response's latest turn."""
        self.num_observed = [0] * count
        """Number of observation tokens of each response."""
        self.pending: dict[int, int] = {}
        """Responses that wait for an observation, with their lengths."""
        self.terminated: set[int] = set()
        """Responses that their environments ended. All others are truncated by a limit."""
        self.errors: dict[int, str] = {}
        self.notes: dict[int, list[str]] = {}

    def max_length(self, response: int) -> int:
        """Return the maximum length of a response if it receives no further observation."""
        return min(self.width, self.num_observed[response] + self.limits[response])

    def turn_limit(self, response: int) -> int:
        """Return the maximum length of a response at the end of its latest turn."""
        turn = self.episodes.turn_tokens
        return min(self.max_length(response), self.turn_start[response] + turn) if turn else self.max_length(response)

    def submit_turn(self, response: int, turn: list[int]) -> None:
        """Submit the tokens of the latest turn to the environment."""
        self.pending[response] = self.turn_start[response] + len(turn)
        self.episodes.submit_turn(response, turn)

    def poll_observations(self, wait: bool = False) -> list[tuple[int, list[int]]]:
        """Return new observations by response. No tokens: the response is over, or has no room for another token."""
        observations = []
        for response, reply in self.episodes.poll(wait) if self.pending else []:
            end = self.pending.pop(response)
            self.reward[response, end - 1] += reply.reward
            self.waited[response, end - 1] += reply.seconds
            if reply.note:
                self.notes.setdefault(response, []).append(reply.note)
            tokens = reply.tokens
            if reply.error is not None:
                self.errors[response], tokens = reply.error, []
            if not tokens and not reply.truncated:
                self.terminated.add(response)
            elif end + len(tokens) >= min(self.width, self.max_length(response) + len(tokens)):
                tokens = []
            self.num_observed[response] += len(tokens)
            self.turn_start[response] = start = end + len(tokens)
            self.observed[response, end:start] = True
            self.turn[response, start:] += 1
            observations.append((response, tokens))
        return observations

    def fields(self, shape: tuple[int, int], present: Tensor) -> dict[str, Any]:
        """Return the fields of `Rollouts` that come from environments."""
        width, notes = present.shape[-1], np.empty(shape[0] * shape[1], dtype=object)
        for i in range(len(notes)):
            notes[i] = "; ".join([*self.notes.get(i, []), *([self.errors[i]] if i in self.errors else [])])
        observed, turn, reward, waited = (
            torch.from_numpy(values[:, :width]).reshape(*shape, width)
            for values in (self.observed, self.turn, self.reward, self.waited)
        )
        return {
            "mask": present & ~observed,
            "present": present,
            "turn": torch.where(present, turn, 0),
            "reward": reward if self.episodes.has_step_rewards else None,
            "environment_seconds": waited,
            "valid": torch.tensor([i not in self.errors for i in range(len(notes))]).view(shape),
            "notes": notes.reshape(shape),
        }

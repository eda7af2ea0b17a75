"""Episodes in this process, for environments of Ascent's own: they answer at once, and cannot hang or crash it."""

import random
import time
from collections.abc import Callable
from typing import NamedTuple

from ascent.tasks.calls import error_words
from ascent.tasks.environment import Environment, Step
from ascent.tasks.text.base import Problem


class Reply(NamedTuple):
    """What became of a call of `begin` or `step`."""

    episode: int
    step: Step | None
    """None: it failed. `begin` gives a step with the first observation."""
    error: str | None = None
    seconds: float = 0.0
    """That the environment took."""


class LocalEpisodes:
    """Environments made by a function, by the number of their episode."""

    def __init__(self, make: Callable[[], Environment]):
        self.make = make
        self.episodes: dict[int, Environment] = {}
        self.ready: list[Reply] = []

    def begin(self, episode: int, problem: Problem, shared: int, own: int) -> None:
        """`shared`: the seed of what all responses to a prompt have in common. `own`: that of everything after it."""

        def first() -> Step:
            environment, rng = self.make(), random.Random(shared)
            self.episodes[episode] = environment
            observation = environment.begin(problem, rng) or ""
            rng.seed(own)
            return Step(observation)

        self._reply(episode, first)

    def step(self, episode: int, action: str) -> None:
        self._reply(episode, lambda: self.episodes[episode].step(action))

    def _reply(self, episode: int, call: Callable[[], Step]) -> None:
        start = time.perf_counter()
        try:
            reply = Reply(episode, call())
        except Exception as error:
            reply = Reply(episode, None, error_words(error))
        self.ready.append(reply._replace(seconds=time.perf_counter() - start))

    def answers(self, wait: float = 0.0) -> list[Reply]:
        """What has been answered since; here, everything."""
        ready, self.ready = self.ready, []
        return ready

    def end(self, episode: int) -> None:
        if (environment := self.episodes.pop(episode, None)) is not None:
            environment.close()

    def close(self) -> None:
        for episode in list(self.episodes):
            self.end(episode)
        self.ready = []

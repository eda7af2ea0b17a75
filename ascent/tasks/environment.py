"""The interface of environments: they answer each turn of a response with an observation and a reward.

    class Guess(Environment):
        def begin(self, problem, rng):
            self.number = int(problem.answer)

        def step(self, action):
            guess = int(action)
            return Step("higher" if guess < self.number else "lower", done=guess == self.number, reward=...)

User-defined environments run in processes without torch, so this module must not import it.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from ascent.tasks.text.text_task import Message, Problem


class Step(NamedTuple):
    """An environment's reply to one turn."""

    observation: str | Sequence[Message] = ""
    """What the policy reads next: text (in a chat, the content of a user message), or chat messages."""
    reward: float = 0.0
    """Reward of the turn, assigned to its last token."""
    done: bool = False
    """Whether the episode is over. The policy does not read the last observation; it is only recorded."""
    reason: str = ""
    """Explanation for the records."""


class Environment:
    """One episode: each response has its own instance, which begins with the problem and answers the turns."""

    def begin(self, problem: Problem, rng: random.Random) -> str | None:
        """Set up the episode; a returned text is appended to the prompt as the first observation.

        Here `rng` is seeded equally for all responses to a prompt, so they share the first observation. Keep `rng`:
        from the first turn on, it is seeded differently for each response.
        """
        return None

    def step(self, action: str) -> Step:
        """Answer a turn. `action` is its text; for small policies, its tokens as numbers (`3 1 2`)."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the resources of the episode."""

    def outcomes(self, state: Any, action: str) -> Sequence[tuple[float, Any, Step]]:
        """Return every possible (probability, next state, step). Optional; the exact oracle enumerates them."""
        raise NotImplementedError

"""What an environment is: it answers the turns of a response, and pays for them.

    class Guess(Environment):
        def begin(self, problem, rng):
            self.number = int(problem.answer)

        def step(self, action):
            guess = int(action)
            return Step("higher" if guess < self.number else "lower", done=guess == self.number, reward=...)

Environments of your own run in processes, which need no torch: so nothing here imports it.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from ascent.tasks.text.text_task import Message, Problem


class Step(NamedTuple):
    """What an environment answers to a turn."""

    observation: str | Sequence[Message] = ""
    """What the policy sees next: words (in a chat, those of the user), or the messages of a chat."""
    reward: float = 0.0
    """What the turn earned; it lies on the turn's last token."""
    done: bool = False
    """The episode is over, and the observation is shown to nobody but the reader of the records."""
    reason: str = ""
    """Why, in words, for the records."""


class Environment:
    """One episode: an instance is made for each response, begins with its problem and answers its turns."""

    def begin(self, problem: Problem, rng: random.Random) -> str | None:
        """Set the episode up; words that are returned follow the prompt.

        All responses to a prompt share what `rng` gives here, and so the first observation. Keep it: from the first
        turn on its numbers are the episode's own.
        """
        return None

    def step(self, action: str) -> Step:
        """Answer a turn: its words, or for a small policy its tokens as numbers (`3 1 2`)."""
        raise NotImplementedError

    def close(self) -> None:
        """End what the episode has started."""

    # Only where everything can be enumerated, for the exact oracle.

    def outcomes(self, state: Any, action: str) -> Sequence[tuple[float, Any, Step]]:
        """Every way in which the environment may answer: its probability, the state after it, and the step."""
        raise NotImplementedError

"""Small worlds of several turns: their policies are small enough to be held to the exact gradient.

`guess` finds a number that is not in its prompt; `swaps` sorts a list by swapping neighbours, where a swap may slip.
An action is one token, and the environment answers with tokens of the same vocabulary.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ascent.core.errors import ConfigError
from ascent.core.types import Prompts, Rollouts, Scores, Space, check_counts
from ascent.tasks.base import SMALL_PRESET, SmallTask
from ascent.tasks.environment import Environment, Step
from ascent.tasks.text.text_task import Problem

_PRESET = {**SMALL_PRESET, "advantage": "by-turn"}


@dataclass(frozen=True)
class TurnsTask(SmallTask):
    """What the small worlds share: every action is one token, and the environment alone pays."""

    turn_tokens: ClassVar[int] = 1

    def draw(self, count: int, generator: torch.Generator) -> Prompts:
        every = self.held_out(2**31)
        return every[torch.randint(len(every), (count,), generator=generator)]

    def held_out(self, count: int) -> Prompts:
        """Every problem there is, or the first ones."""
        raise NotImplementedError

    def problem(self, prompts: Prompts | Rollouts, place: int) -> Problem:
        """The problem at this place, as its environment reads it."""
        raise NotImplementedError

    def score(self, rollouts: Rollouts) -> Scores:
        """The environment has paid already. Right is what ended with the last turn's success."""
        shape = rollouts.mask.shape[:2]
        valid = torch.ones(shape, dtype=torch.bool)
        return Scores(torch.zeros(*shape, 1), valid, self.solved(rollouts))

    def solved(self, rollouts: Rollouts) -> Any:
        raise NotImplementedError


# ---- guess -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guess(TurnsTask):
    """Find a number in as few questions as possible: each guess is answered by "lower" or "higher"."""

    numbers: int = 15
    """The number is one of 0 … numbers−1."""
    questions: int = 7
    """The most guesses of an episode."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"default": {**_PRESET, "steps": 600}}

    def __post_init__(self) -> None:
        check_counts(2, numbers=self.numbers)
        check_counts(1, questions=self.questions)

    @property
    def space(self) -> Space:
        """The numbers, then three observations: lower, higher, and not a number. The prompt is a 0."""
        return Space(prompt_length=1, vocab=self.numbers + 3, limit=2 * self.questions - 1)

    @property
    def max_reward(self) -> float:
        """A number found with the first question."""
        return 1.0

    def make_environment(self) -> "Guessing":
        return Guessing(self.numbers, self.questions)

    def held_out(self, count: int) -> Prompts:
        """Every number: the prompt does not tell them apart, so there is nothing to hold out."""
        numbers = torch.arange(min(count, self.numbers))
        return Prompts(torch.zeros(len(numbers), 1, dtype=torch.long), numbers)

    def problem(self, prompts: Prompts | Rollouts, place: int) -> Problem:
        assert prompts.problem is not None
        return Problem("Which number?", str(int(prompts.problem[place])))

    def solved(self, rollouts: Rollouts) -> Any:
        assert rollouts.reward is not None
        return (rollouts.reward > 0).any(-1)

    def text(self, ids: list[int]) -> str:
        words = {self.numbers: "lower", self.numbers + 1: "higher", self.numbers + 2: "no number"}
        return " ".join(words.get(i, str(i)) for i in ids)


class Guessing(Environment):
    """One number to find. What a guess costs lies on the guess; the number itself pays 1."""

    def __init__(self, numbers: int, questions: int):
        self.numbers, self.questions = numbers, questions

    def begin(self, problem: Problem, rng: random.Random) -> None:
        self.state = int(problem.answer or 0), 0

    def step(self, action: str) -> Step:
        ((_, self.state, step),) = self.outcomes(self.state, action)
        return step

    def outcomes(self, state: Any, action: str) -> Sequence[tuple[float, Any, Step]]:
        (number, asked), guess = state, int(action)
        if guess == number:
            return [(1.0, state, Step(reward=1.0, done=True, reason=f"found with question {asked + 1}"))]
        answer = self.numbers + (2 if guess >= self.numbers else int(guess < number))
        last = asked + 1 == self.questions
        reason = f"not found with {self.questions} questions: it was {number}" if last else ""
        return [(1.0, (number, asked + 1), Step(str(answer), -1 / self.questions, last, reason))]


# ---- swaps -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Swaps(TurnsTask):
    """Sort a list by swapping neighbours, one swap per turn; a swap may slip, and then nothing moves."""

    length: int = 3
    """How many numbers a list has; they are 0 … length−1, in any order but the right one."""
    turns: int = 3
    """The most swaps of an episode."""
    slip: float = 0.2
    """The probability that a swap does nothing."""
    outcome: bool = False
    """Pay 1 at the end for a sorted list, and nothing on the way; else every swap pays the order that it makes."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"default": {**_PRESET, "steps": 300}}

    def __post_init__(self) -> None:
        check_counts(2, length=self.length)
        check_counts(1, turns=self.turns)
        if self.length > 6:
            raise ConfigError(
                f"--length {self.length}: all {self.length}! lists are trained on and evaluated; at most 6 numbers"
            )
        if not 0 <= self.slip < 1:
            raise ConfigError(f"--slip is {self.slip:g}: a probability from 0 to below 1")

    @property
    def space(self) -> Space:
        """A swap is named by its left place; the list is shown after it."""
        return Space(self.length, self.length, limit=self.turns * (self.length + 1) - self.length)

    def make_environment(self) -> "Swapping":
        return Swapping(self.turns, self.slip, self.outcome)

    def held_out(self, count: int) -> Prompts:
        """Every list that is not sorted: there are few, so none is held out."""
        lists = [list(p) for p in itertools.permutations(range(self.length)) if list(p) != sorted(p)]
        return Prompts.of(torch.tensor(lists[:count]))

    def problem(self, prompts: Prompts | Rollouts, place: int) -> Problem:
        return Problem(" ".join(map(str, prompts.prompt[place].tolist())))

    def solved(self, rollouts: Rollouts) -> Any:
        """Sorted at the end: nothing else earns as much."""
        assert rollouts.reward is not None
        order = torch.ones(len(rollouts.prompt)) if self.outcome else _disorder(rollouts.prompt.tolist())
        return (rollouts.reward.sum(-1) - order.unsqueeze(-1)).abs() < 1e-4

    def text(self, ids: list[int]) -> str:
        return "[" + " ".join(map(str, ids)) + "]"


class Swapping(Environment):
    """One list. Whether a swap slips is the episode's own luck."""

    def __init__(self, turns: int, slip: float, outcome: bool):
        self.turns, self.slip, self.outcome = turns, slip, outcome

    def begin(self, problem: Problem, rng: random.Random) -> None:
        self.rng, self.state = rng, (tuple(map(int, str(problem.prompt).split())), 0)

    def step(self, action: str) -> Step:
        ways = self.outcomes(self.state, action)
        _, self.state, step = self.rng.choices(ways, [way[0] for way in ways])[0]
        return step

    def outcomes(self, state: Any, action: str) -> Sequence[tuple[float, Any, Step]]:
        (numbers, before), place = state, int(action)
        if place + 1 >= len(numbers):
            return [(1.0, *self._after(numbers, numbers, before, "there is nothing to the right"))]
        swapped = list(numbers)
        swapped[place], swapped[place + 1] = swapped[place + 1], swapped[place]
        ways = [(1 - self.slip, *self._after(numbers, tuple(swapped), before, ""))]
        return ways + ([(self.slip, *self._after(numbers, numbers, before, "it slipped"))] if self.slip else [])

    def _after(self, old: tuple[int, ...], new: tuple[int, ...], before: int, reason: str) -> tuple[Any, Step]:
        sorted_now, left = list(new) == sorted(new), _disorder([old, new])
        reward = float(sorted_now) if self.outcome else float(left[0] - left[1])
        done = sorted_now or before + 1 == self.turns
        return (new, before + 1), Step(" ".join(map(str, new)), reward, done, reason)


def _disorder(lists: Sequence[Sequence[int]]) -> torch.Tensor:
    """Pairs of each list that stand in the wrong order."""
    pairs = [sum(a > b for a, b in itertools.combinations(numbers, 2)) for numbers in lists]
    return torch.tensor(pairs, dtype=torch.float)

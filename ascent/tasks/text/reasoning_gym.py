"""Any task of reasoning-gym, by its name: made from an index without end, scored by the data set's own function.

    reasoning-gym:chain_sum      --options '{"max_terms": 2, "max_digits": 1}'

The prompt asks to end with the answer, which small models manage where they manage no mark and no tags. Strictly
right is a response that does, leniently its last number, word or line (see `answers`). The data sets' own scores
pay many a wrong answer a little: 0.5 to 17 in place of 7, for it contains it, 0.01 to an empty one. So a score
below 1 counts as 0 unless `--partial` is set.

Stojanovski et al., Reasoning Gym: Reasoning Environments for Reinforcement Learning with Verifiable Rewards, 2025.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

from ascent.tasks.text.answers import ending, loosely, tidy, whole_number
from ascent.tasks.text.base import Graded, Problem, refuse
from ascent.tasks.text.generated import INDICES, Generated
from ascent.tasks.text.rows import need

RIGHT = 1 - 1e-9


@dataclass(frozen=True)
class ReasoningGym(Generated):
    """reasoning-gym:NAME: any of its tasks, generated without end."""

    instruction: str = "End with the answer."
    """Stands below every prompt: how the answer has to be given."""
    source: str = ""
    """Name of the data set. Short form: reasoning-gym:NAME."""
    options: str = ""
    """Parameters of the data set, as JSON: {"max_terms": 2}."""
    partial: bool = False
    """Pay what the data set's own score pays for an answer that is not right; many pay for containing it."""

    @property
    def loophole(self) -> str | None:
        if not self.partial:
            return None
        return "the data set's own score pays for answers that are not right, many for merely containing the right one"

    def verify(self) -> None:
        gym = need("reasoning_gym.factory", f"reasoning-gym:{self.source}", "gym")
        if not self.source:
            refuse("reasoning-gym needs a name: ascent train reasoning-gym:chain_sum")
        if self.source not in gym.DATASETS:
            refuse(f"reasoning-gym:{self.source}: there is no such data set.", self.source, gym.DATASETS)
        self._options()
        try:
            self.make(0)
        except Exception as error:
            known = ", ".join(k for k in gym.DATASETS[self.source][1].__dataclass_fields__ if k not in ("seed", "size"))
            refuse(
                f"reasoning-gym:{self.source} cannot be made with --options {self.options or '{}'}: {_first(error)}. "
                f"Its options: {known}"
            )
        super().verify()

    def _options(self) -> dict[str, Any]:
        try:
            options = json.loads(self.options or "{}")
        except ValueError as error:
            refuse(f"--options {self.options}: no JSON: {error}")
        if not isinstance(options, dict) or {"seed", "size"} & options.keys():
            refuse(f"--options {self.options}: an object of the data set's parameters, without seed and size")
        return options

    def make(self, index: int) -> Problem:
        entry = _entry(self.source, self.options, index)
        answer = entry["answer"]
        columns = {"metadata": entry["metadata"], "question": entry["question"]}
        return Problem(entry["question"], answer if answer is None else str(answer), columns)

    def prepare(self) -> None:
        _maker(self.source, self.options)

    def grade(self, problem: Problem, response: str) -> Graded:
        found = ending(response, problem.answer)
        strict = self._score(problem, found)
        loosest = loosely(response, problem.answer)
        loose = max(strict, self._score(problem, loosest))
        said = f"answered {found or loosest}"[:80]
        if self.partial:
            return Graded(max(strict, self.lenient * loose), strict >= RIGHT, loose >= RIGHT, said)
        return self.graded(strict >= RIGHT, loose >= RIGHT, said)

    def _score(self, problem: Problem, found: str | None) -> float:
        """What the data set pays for an answer: as it stands, tidied, or as a number plainly spelled."""
        if not found:
            return 0.0
        entry = {"question": problem.prompt, "answer": problem.answer, "metadata": problem.columns["metadata"]}
        spelled = dict.fromkeys(s for s in (found, tidy(found), whole_number(found)) if s)
        return max(_scored(_maker(self.source, self.options).dataset, s, entry) for s in spelled)

    def gold(self, problem: Problem) -> str | None:
        return None if problem.answer is None else f"Answer: {problem.answer}"


def _scored(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    """The data set's own score; an answer that makes it fall over is wrong, for most parse before they compare."""
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:
        if entry["answer"] is not None:  # if the right answer passes, it was this answer's fault
            dataset.score_answer(entry["answer"], entry)
        return 0.0


class Maker:
    """A data set, and whether it makes problems of any index or only of a seed of its own."""

    def __init__(self, source: str, options: dict[str, Any]):
        from reasoning_gym.factory import create_dataset

        self.create = functools.partial(create_dataset, source, **options)
        with _quietly():
            self.dataset = self.create(seed=0)
            try:
                self.dataset[INDICES - 1]
                self.by_index = True
            except Exception:
                self.by_index = False

    def __getitem__(self, index: int) -> dict[str, Any]:
        with _quietly():
            return self.dataset[index] if self.by_index else self.create(seed=index, size=1)[0]


@functools.lru_cache(maxsize=8)
def _maker(source: str, options: str) -> Maker:
    return Maker(source, json.loads(options or "{}"))


@functools.lru_cache(maxsize=4096)
def _entry(source: str, options: str, index: int) -> dict[str, Any]:
    return _maker(source, options)[index]


@contextmanager
def _quietly() -> Iterator[None]:
    """Some generators print."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

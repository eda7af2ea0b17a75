"""A language world bound to an encoder: what the loop calls a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ascent.tasks.text.base import Message, Problem, Text
from ascent.tasks.text.grading import Grading, Rater
from ascent.types import Refused, Rollouts, Scores, Space, Trouble

PADDING = -1
"""Fills up short prompts; no token."""
REMEMBERED = 100_000
"""Drawn problems that are remembered at most, for endless tasks."""
ROUNDS = 64
"""Times that `draw` looks for prompts that are short enough before it gives up on an endless task."""


class Encoder(Protocol):
    """Words into tokens and back, as a policy understands them."""

    vocab: int
    end: int
    """The end token."""
    ends: frozenset[int]
    """Every token that ends a response, the end token among them."""

    def encode(self, messages: list[Message]) -> list[int]:
        """A chat as a prompt, up to where the response begins."""

    def decode(self, ids: list[int] | np.ndarray) -> str:
        """Tokens as words, special ones left out."""


class Tokenized:
    """A `Text` task whose prompts and responses are tokens. Prompts are padded on the right with −1.

    The problem of a prompt is found again by its tokens. What is drawn depends on the generator alone.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    """Those of the task count: they were laid under the settings before it was bound."""

    def __init__(self, task: Text, encoder: Encoder, raters: Mapping[str, Rater] | None = None):
        self.task, self.encoder = task, encoder
        self.raters = raters or {}
        """The reward models that its rewards name."""
        self.drawn: dict[bytes, Problem] = {}
        self.tested: dict[bytes, Problem] = {}
        self.encoded: dict[int, list[int] | None] = {}
        """Tokens of the rows of a finite task; None: too long."""
        self.too_long: set[str] = set()
        self.grading: Grading | None = None

    @property
    def space(self) -> Space:
        return Space(self.task.max_prompt, self.encoder.vocab, self.task.max_tokens, self.encoder.end)

    @property
    def max_reward(self) -> float | None:
        return self.task.max_reward

    @property
    def loophole(self) -> str | None:
        return self.task.loophole

    # ---- prompts

    def draw(self, count: int, generator: torch.Generator) -> Int[Tensor, "prompt position"]:
        """Prompts to train on, in an order shuffled anew each time; none twice if there are enough."""
        found: list[list[int]] = []
        for _ in range(ROUNDS if self.task.size is None else max(ROUNDS, count)):
            before = len(found)
            for index in self._indices(count, generator):
                ids = self._row(index)
                if ids is not None:
                    found.append(ids)
                if len(found) == count:
                    return padded(found)
            if len(found) == before and self.task.size is not None:
                break
        raise Refused(
            f"--max-prompt {self.task.max_prompt}: of the prompts that were drawn, {len(self.too_long)} are longer and "
            f"{len(found)} are not, and a step needs {count}. Raise --max-prompt"
        )

    def _indices(self, count: int, generator: torch.Generator) -> list[int]:
        size = self.task.size
        if size is None:
            return torch.randint(2**62, (count,), generator=generator).tolist()
        return torch.randperm(size, generator=generator).tolist()

    def _row(self, index: int) -> list[int] | None:
        """The tokens of a problem, or None if there are too many.

        The newest problem of a prompt counts, so that a resumed run, which has drawn fewer, grades the same.
        """
        problem = self.task.train(index)
        ids = self.encoded[index] if index in self.encoded else self._encode(problem)
        if self.task.size is not None:
            self.encoded[index] = ids
        if ids is not None:
            self.drawn.pop(key_of(ids), None)
            self.drawn[key_of(ids)] = problem
            if len(self.drawn) > REMEMBERED:
                del self.drawn[next(iter(self.drawn))]
        return ids

    def held_out(self, count: int) -> Int[Tensor, "prompt position"]:
        """The same prompts every time, which `draw` never gives."""
        found = []
        for problem in self.task.test(count):
            ids = self._encode(problem)
            if ids is not None:
                found.append(ids)
                self.tested[key_of(ids)] = problem
        if not found:
            raise Refused(f"--max-prompt {self.task.max_prompt}: every test prompt is longer. Raise --max-prompt")
        return padded(found)

    def _encode(self, problem: Problem) -> list[int] | None:
        ids = self.encoder.encode(self.task.messages(problem))
        if 0 < len(ids) <= self.task.max_prompt:
            return ids
        self.too_long.add(str(problem.prompt))
        return None

    # ---- responses

    def score(self, rollouts: Rollouts) -> Scores:
        shape = rollouts.mask.shape[:2]
        asked = self._asked(rollouts)
        self.grading = self.grading or Grading(self.task, self.raters)
        marks = self.grading(asked)

        def laid_out(values: Sequence[Any], kind: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=kind).view(shape)

        notes = np.empty(len(marks), dtype=object)
        notes[:] = [mark.error or mark.reason for mark in marks]
        measures = {"lenient": laid_out([float(mark.lenient) for mark in marks], torch.float32)}
        if len(self.task.rewards) > 1:
            for name in (reward.name for reward in self.task.rewards):
                parts = [mark.parts.get(name, 0.0) for mark in marks]
                measures[f"rewards/{name}"] = laid_out(parts, torch.float32)
        return Scores(
            reward=laid_out([mark.value for mark in marks], torch.float32).unsqueeze(-1),
            valid=laid_out([mark.error is None for mark in marks], torch.bool),
            correct=laid_out([mark.strict for mark in marks], torch.bool),
            errors=tuple(mark.error for mark in marks if mark.error is not None),
            measures=measures,
            notes=notes.reshape(tuple(shape)),
        )

    def _asked(self, rollouts: Rollouts) -> list[tuple[Problem, str]]:
        """Every response in words, with its problem."""
        asked = []
        for prompt, group, masks in zip(
            rollouts.prompt.tolist(), rollouts.response.numpy(), rollouts.mask.numpy(), strict=True
        ):
            problem = self.problem(prompt)
            if problem is None:
                raise Trouble(f"a prompt that this task did not draw cannot be graded: {self.text(prompt)!r:.200}")
            for tokens, mask in zip(group, masks, strict=True):
                asked.append((problem, self.words(tokens[mask])))
        return asked

    def words(self, ids: list[int] | np.ndarray) -> str:
        """A response in words, without the token that ended it."""
        return self.encoder.decode(ids[:-1] if len(ids) and int(ids[-1]) in self.encoder.ends else ids)

    def text(self, ids: list[int]) -> str:
        return self.encoder.decode([i for i in ids if i != PADDING])

    def problem(self, ids: list[int]) -> Problem | None:
        """The problem of a prompt that was drawn or held out."""
        key = key_of([i for i in ids if i != PADDING])
        return self.tested.get(key) or self.drawn.get(key)

    def report(self) -> list[str]:
        """What was left out of the data, in words."""
        long = len(self.too_long)
        note = [f"{long} prompts drawn so far have more than {self.task.max_prompt} tokens and are left out"]
        return [*self.task.report(), *(note if long else [])]

    def close(self) -> None:
        """End the grading processes."""
        if self.grading is not None:
            self.grading.close()
            self.grading = None


def padded(rows: list[list[int]]) -> Int[Tensor, "prompt position"]:
    width = max(map(len, rows))
    return torch.tensor([row + [PADDING] * (width - len(row)) for row in rows])


def key_of(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype=np.int64).tobytes()

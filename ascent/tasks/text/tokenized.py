"""A text task bound to an encoder: what the loop calls a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ascent.core.types import Prompts, Refused, Rollouts, Scores, Space, Trouble
from ascent.tasks.base import BaseTask, WrittenPrompt
from ascent.tasks.reward_sources import RewardSource
from ascent.tasks.text.answers import loose_answer, tidy, value_of, whole_number
from ascent.tasks.text.base import TextTask
from ascent.tasks.text.grading.grading import Grading, ResponseGrader
from ascent.tasks.text.problems import Message, Problem
from ascent.tasks.text.steps import split_steps

PADDING = -1
"""Fills up short prompts; no token."""
_REMEMBERED = 100_000
"""The most problems of an endless task that are remembered, so that they are not made again to be graded."""
_ROUNDS = 64
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

    def tokenize(self, words: str) -> list[int]:
        """Words as tokens, with none added."""

    def decode(self, ids: list[int] | np.ndarray) -> str:
        """Tokens as words, special ones left out."""

    def piece(self, token: int) -> str:
        """One token as a person reads it, special ones too."""


class TokenizedTask(BaseTask):
    """A `TextTask` whose prompts and responses are tokens. Prompts are padded on the right with −1.

    What is drawn depends on the generator alone. `graders` are the judges and reward models that the task's rewards
    name, by their source: the task is handed them, and does not load them.
    """

    kind = "text"

    def __init__(self, task: TextTask, encoder: Encoder, graders: Mapping[str, ResponseGrader] | None = None):
        self.task, self.encoder, self.graders = task, encoder, graders or {}
        self.recent: dict[int, Problem] = {}
        """The last problems that were drawn from an endless task."""
        self.tests: list[Problem] = []
        """Held-out problems, as many as were asked for so far."""
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

    @property
    def reward_parts(self) -> tuple[RewardSource, ...]:
        """The parts of the reward that are measured apart, with their weights."""
        return self.task.rewards

    # ---- prompts

    def draw(self, count: int, generator: torch.Generator) -> Prompts:
        """Prompts to train on, in an order shuffled anew each time; none twice if there are enough."""
        rows: list[tuple[int, list[int]]] = []
        for _ in range(_ROUNDS if self.task.size is None else max(_ROUNDS, count)):
            before = len(rows)
            for index in self._indices(count, generator):
                ids = self._training_prompt(index)
                if ids is not None:
                    rows.append((index, ids))
                if len(rows) == count:
                    return _prompts(rows)
            if len(rows) == before and self.task.size is not None:
                break
        raise Refused(
            f"--max-prompt {self.task.max_prompt}: of the prompts that were drawn, {len(self.too_long)} are longer and "
            f"{len(rows)} are not, and a step needs {count}. Raise --max-prompt"
        )

    def _indices(self, count: int, generator: torch.Generator) -> list[int]:
        size = self.task.size
        if size is None:
            return torch.randint(2**62, (count,), generator=generator).tolist()
        return torch.randperm(size, generator=generator).tolist()

    def _training_prompt(self, index: int) -> list[int] | None:
        """The tokens of a problem, or None if there are too many."""
        problem = self.task.train(index)
        if self.task.size is None:  # made anew each time: kept until it is graded
            self.recent[index] = problem
            if len(self.recent) > _REMEMBERED:
                del self.recent[next(iter(self.recent))]
            return self._encode(problem)
        if index not in self.encoded:
            self.encoded[index] = self._encode(problem)
        return self.encoded[index]

    def held_out(self, count: int) -> Prompts:
        """The same prompts every time, which `draw` never gives."""
        problems = list(self.task.test(count))
        if len(problems) > len(self.tests):
            self.tests = problems
        rows = [(-1 - i, ids) for i, problem in enumerate(problems) if (ids := self._encode(problem)) is not None]
        if not rows:
            raise Refused(f"--max-prompt {self.task.max_prompt}: every test prompt is longer. Raise --max-prompt")
        return _prompts(rows)

    def problem(self, identity: int) -> Problem:
        """The problem of a training prompt, by its index, or of the held-out prompt i, by −1 − i."""
        if identity >= 0:
            return self.recent.get(identity) or self.task.train(identity)
        if len(self.tests) < -identity:
            self.tests = self.task.test(-identity)
        return self.tests[-1 - identity]

    def _encode(self, problem: Problem) -> list[int] | None:
        ids = self.encoder.encode(self.task.messages(problem))
        if 0 < len(ids) <= self.task.max_prompt:
            return ids
        self.too_long.add(str(problem.prompt))
        return None

    # ---- responses

    def score(self, rollouts: Rollouts) -> Scores:
        shape = rollouts.mask.shape[:2]
        self.grading = self.grading or Grading(self.task, self.graders)
        marks = self.grading(self._responses(rollouts))

        def grid(values: Sequence[Any], kind: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=kind).view(shape)

        notes = np.empty(len(marks), dtype=object)
        notes[:] = [mark.error or mark.reason for mark in marks]
        measures = {"lenient": grid([float(mark.lenient) for mark in marks], torch.float32)}
        if len(self.task.rewards) > 1:
            for name in (reward.name for reward in self.task.rewards):
                parts = [mark.parts.get(name, 0.0) for mark in marks]
                measures[f"rewards/{name}"] = grid(parts, torch.float32)
        return Scores(
            reward=grid([mark.value for mark in marks], torch.float32).unsqueeze(-1),
            valid=grid([mark.error is None for mark in marks], torch.bool),
            correct=grid([mark.strict for mark in marks], torch.bool),
            errors=tuple(mark.error for mark in marks if mark.error is not None),
            measures=measures,
            notes=notes.reshape(tuple(shape)),
        )

    def _responses(self, rollouts: Rollouts) -> list[tuple[Problem, str]]:
        """Every response in words, with its problem."""
        if rollouts.problem is None:
            raise Trouble("these rollouts do not say which problems they answer, so they cannot be graded")
        pairs = []
        for identity, group, masks in zip(
            rollouts.problem.tolist(), rollouts.response.numpy(), rollouts.mask.numpy(), strict=True
        ):
            problem = self.problem(identity)
            pairs += [(problem, self.words(tokens[mask])) for tokens, mask in zip(group, masks, strict=True)]
        return pairs

    def words(self, ids: list[int] | np.ndarray) -> str:
        """A response in words, without the token that ended it."""
        return self.encoder.decode(ids[:-1] if len(ids) and int(ids[-1]) in self.encoder.ends else ids)

    def text(self, ids: list[int]) -> str:
        return self.encoder.decode([i for i in ids if i != PADDING])

    # ---- for people and for files

    @property
    def ends(self) -> frozenset[int]:
        return self.encoder.ends

    def record(self, ids: Sequence[int]) -> str:
        """A response as a JSONL file has it."""
        return self.words(list(ids))

    def piece(self, token: int) -> str:
        """One token as a person reads it, special ones too."""
        return self.encoder.piece(token)

    def pieces(self, ids: list[int]) -> list[str]:
        """The tokens of a response as words; the token that ends it is none."""
        ended = bool(ids) and ids[-1] in self.ends
        return [*(self.piece(token) for token in ids[: len(ids) - ended]), *[""] * ended]

    def question(self, prompts: Prompts | Rollouts, place: int) -> WrittenPrompt:
        """The prompt at this place of a batch, for people and for files."""
        assert prompts.problem is not None, "prompts of a text task carry the identity of their problems"
        problem = self.problem(int(prompts.problem[place]))
        chat = self.task.messages(problem)
        words = "\n\n".join(message["content"] for message in chat)
        return WrittenPrompt(words, chat if len(chat) > 1 else chat[0]["content"], chat, problem.answer)

    def vote(self, response: str, answer: str | None) -> str:
        """The answer that a response gives, in one spelling, so that equal answers are counted together.

        A task may have a method `answer(response)` that finds it. If not: what stands behind the last mark (Answer:,
        ####, \\boxed, <answer>) or behind "the answer is", else the last number, word or line, whichever kind the
        right answer is, as for the lenient score. Numbers are compared by value, words without case, quotation marks
        and spacing.
        """
        hook = getattr(self.task, "answer", None)
        given = loose_answer(response, answer) if hook is None else hook(response) or ""
        value = value_of(whole_number(given))
        return str(value) if value is not None else " ".join(tidy(given).casefold().split())

    def read_prompts(self, typed: Sequence[str], plain: bool) -> tuple[Prompts, list[str]]:
        """Prompts that a person typed, as in training; `plain`: without the task's instruction. None can be scored."""
        chats = []
        for text in typed:
            chat = [{"role": "user", "content": text}] if plain else self.task.messages(Problem(text))
            system = [{"role": "system", "content": self.task.system}] if plain and self.task.system is not None else []
            chats.append([*system, *chat])
        words = ["\n\n".join(message["content"] for message in chat) for chat in chats]
        return Prompts.of(pad_prompts([self.encoder.encode(chat) for chat in chats])), words

    def cut_steps(self, ids: list[int], separator: str) -> tuple[list[str], list[int]]:
        """The steps of a response, and the places of their last tokens."""
        steps = split_steps(self.pieces(ids), separator)
        return [step.words for step in steps], [step.last for step in steps]

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


def _prompts(rows: list[tuple[int, list[int]]]) -> Prompts:
    return Prompts(pad_prompts([ids for _, ids in rows]), torch.tensor([identity for identity, _ in rows]))


def pad_prompts(rows: list[list[int]]) -> Int[Tensor, "prompt position"]:
    """Prompts of different lengths as one tensor, filled up with −1."""
    width = max(map(len, rows))
    return torch.tensor([row + [PADDING] * (width - len(row)) for row in rows])

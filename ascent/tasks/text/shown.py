"""Responses that were written down, bound to an encoder: they earn what they are there for."""

from __future__ import annotations

from collections import defaultdict, deque

import torch
from jaxtyping import Int
from torch import Tensor

from ascent.tasks.text.base import Problem, Text
from ascent.tasks.text.tokenized import Encoder, Tokenized, key_of
from ascent.types import Refused, Rollouts, Scores


class Shown(Tokenized):
    """Prompts, and what is shown for each: a demonstration, or a pair. A prompt may be there more than once."""

    def __init__(self, task: Text, encoder: Encoder, pairs: bool = False):
        super().__init__(task, encoder)
        self.pairs = pairs
        self.waiting: dict[bytes, deque[Problem]] = defaultdict(deque)
        """Problems of the prompts that were drawn and not yet asked for, in their order."""

    def _row(self, index: int) -> list[int] | None:
        ids = super()._row(index)
        if ids is not None:
            self.waiting[key_of(ids)].append(self.drawn[key_of(ids)])
        return ids

    def held_out(self, count: int) -> Int[Tensor, "prompt position"]:
        found = super().held_out(count)
        for problem in self.task.test(count):
            ids = self._encode(problem)
            if ids is not None:
                self.waiting[key_of(ids)].append(problem)
        return found

    def next(self, ids: list[int]) -> Problem:
        """The problem of a prompt: of several that share it, the one that was drawn first and not asked for yet."""
        waiting = self.waiting.get(key_of(ids))
        if waiting:
            problem = waiting.popleft()
            if not waiting:
                del self.waiting[key_of(ids)]
            return problem
        known = self.problem(ids)
        assert known is not None, "a prompt that was neither drawn nor held out"
        return known

    def responses(self, ids: list[int]) -> list[str]:
        """What is shown for a prompt: its demonstration, or chosen and rejected."""
        problem = self.next(ids)
        if self.pairs:
            return [problem.answer or "", problem.columns["rejected"]]
        gold = self.task.gold(problem)
        if gold is None:
            raise Refused("--algorithm sft: the task knows no right response to learn from. Use ascent sft FILE")
        return [gold]

    def score(self, rollouts: Rollouts) -> Scores:
        shape = rollouts.mask.shape[:2]
        reward = torch.ones(*shape, 1)
        if self.pairs:
            reward[:, 1] = 0.0
        return Scores(reward, torch.ones(shape, dtype=torch.bool), None)

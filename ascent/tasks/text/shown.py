"""Demonstrations bound to an encoder: every response earns 1, for it is there to be learned."""

from __future__ import annotations

from collections import defaultdict, deque

import torch

from ascent.tasks.text.tokenized import Tokenized, key_of
from ascent.types import Rollouts, Scores


class Shown(Tokenized):
    """Prompts, and what was demonstrated for each. A prompt may be there more than once."""

    def _row(self, index: int) -> list[int] | None:
        ids = super()._row(index)
        if ids is not None:
            self._waiting[key_of(ids)].append(self.drawn[key_of(ids)].answer or "")
        return ids

    @property
    def _waiting(self) -> dict[bytes, deque[str]]:
        """Demonstrations of the prompts that were drawn and not yet asked for, in their order."""
        return self.__dict__.setdefault("waiting", defaultdict(deque))

    def demonstration(self, ids: list[int]) -> str:
        waiting = self._waiting.get(key_of(ids))
        if waiting:
            answer = waiting.popleft()
            if not waiting:
                del self._waiting[key_of(ids)]
            return answer
        problem = self.problem(ids)
        return (problem.answer if problem is not None else None) or ""

    def score(self, rollouts: Rollouts) -> Scores:
        shape = rollouts.mask.shape[:2]
        return Scores(torch.ones(*shape, 1), torch.ones(shape, dtype=torch.bool), None)

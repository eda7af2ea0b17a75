"""What was not sampled comes from a sampler too; and a learner whose model is a reward model. Small worlds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ascent.engines.local import LocalLearner
from ascent.policies.base import ValueFunction
from ascent.types import Batch, Outputs, Rollouts, Space
from ascent.update import Update


class Shows(Protocol):
    """Responses that are there to be learned from."""

    @property
    def response(self) -> Int[Tensor, "prompt sample token"]: ...

    @property
    def mask(self) -> Bool[Tensor, "prompt sample token"]: ...


class Given:
    """A sampler that draws nothing: it answers each prompt with what is shown for it, one response or a pair."""

    fills: frozenset[str] = frozenset()

    def __init__(self, space: Space, show: Callable[[Tensor], Shows]):
        self.space, self.show = space, show
        self.version = -1

    def load(self, params: dict[str, Tensor], version: int) -> None:
        self.version = version

    def generate(self, prompt: Tensor, samples: int, greedy: bool = False) -> Rollouts:
        shown = self.show(prompt)
        if shown.mask.shape[1] != samples:
            raise ValueError(f"{shown.mask.shape[1]} responses are shown for a prompt, and {samples} were asked for")
        return Rollouts(
            prompt=prompt,
            response=shown.response,
            mask=shown.mask,
            logp_sampler=torch.zeros(shown.mask.shape),
            limit=self.space.limit,
            truncated=torch.zeros(shown.mask.shape[:2], dtype=torch.bool),
            ends=self.space.end is not None,
            version=self.version,
            sampled=False,
        )


def rate(model: ValueFunction, batch: Rollouts) -> Float[Tensor, "prompt sample 1"]:
    """What a reward model gives each response: its head, read at the state after the last token."""
    values = model.values(batch.prompt, batch.response)
    return values.gather(-1, batch.mask.sum(-1, keepdim=True))


class LocalRater(LocalLearner):
    """Trains a reward model of a small world in this process."""

    fills: frozenset[str] = frozenset()

    def __init__(self, model: ValueFunction, update: Update, micro_batch: int = 0):
        super().__init__(model, update, False, frozenset(), micro_batch)
        self.model = model

    def evaluate(self, batch: Batch) -> Outputs:
        """A rating a response; the log-probs of a reward model are nobody's, and 0."""
        rating = rate(self.model, batch)
        nothing = rating.new_zeros(batch.mask.shape)
        return Outputs(nothing, nothing, rating=rating)

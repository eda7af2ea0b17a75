"""A sampler for offline data: it answers prompts with responses that were written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ascent.core.protocols import Sampler
from ascent.core.types import Prompts, Rollouts


class OfflineSampler(Sampler):
    """Draws nothing: each prompt has its demonstration, its preference pair or its response with labelled steps.

    So the loop, its records and its checkpoints are the same for offline data as for sampled responses.
    """

    limit = 0
    """It draws no token."""

    def __init__(self, rollouts: Callable[[Prompts], Rollouts]):
        self.rollouts = rollouts
        """Looks up the responses of these prompts, as a task with offline data does."""
        self.version = -1

    def load(self, params: dict[str, Tensor], version: int) -> None:
        self.version = version

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        rollouts = self.rollouts(prompts)
        if rollouts.mask.shape[1] != samples:
            raise ValueError(f"the data has {rollouts.mask.shape[1]} responses per prompt, not {samples}")
        return replace(rollouts, version=torch.full((*rollouts.mask.shape[:2], 1), self.version))

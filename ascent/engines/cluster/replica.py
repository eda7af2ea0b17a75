"""A copy of the policy that draws for somebody else, in a process of its own, with parameters that it is given."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor

from ascent.core.types import Prompts, Rollouts

PROBE = 4
"""Tokens that a replica draws greedily after each load, to be compared with the learner's own copy."""

RECORDS = "replicas.jsonl"
"""What every replica did, version by version, and who was lost, in the folder of the engine's logs."""


class Gone(Exception):
    """A replica has died, or has not the weights. `over`: it does not come back."""

    def __init__(self, why: str, over: bool = False):
        super().__init__(why, over)
        self.why, self.over = why, over

    def __str__(self) -> str:
        return self.why.partition("\n")[0]


class Replica:
    """`make`: a sampler from a config's dict. Calls come one at a time."""

    def __init__(self, make: Any):
        self.make, self.sampler, self.version, self.leaving = make, None, -1, False
        self.tokens, self.busy, self.began = 0, 0.0, time.monotonic()

    def load(self, weights: dict[str, Tensor], version: int, config: dict[str, Any]) -> Rollouts:
        """Take these parameters; what it then says to the probe."""
        self._stay()
        if self.sampler is None:
            self.sampler = self.make(config)
        sampler: Any = self.sampler
        sampler.load(weights, version)
        self.version = version
        return sampler.draw(probe_prompts(sampler.lm.vocab), 1, None, PROBE)

    def draw(self, version: int, prompts: Prompts, samples: int, seeds: Tensor | None, limit: int | None) -> Rollouts:
        self._stay()
        if self.sampler is None or version != self.version:
            raise Gone(f"it has version {self.version} of the weights, not {version}")
        begin = time.monotonic()
        drawn = self.sampler.draw(prompts, samples, seeds, limit)
        self.busy += time.monotonic() - begin
        self.tokens += int(drawn.mask.sum())
        return drawn

    def leave(self) -> None:
        """Draw nothing more. What it was drawing is done by now: calls come one at a time."""
        self.leaving = True

    def _stay(self) -> None:
        if self.leaving:
            raise Gone("it was asked to leave", over=True)

    def about(self) -> dict[str, Any]:
        """For `ascent cluster status`."""
        alive = time.monotonic() - self.began
        rate = self.tokens / self.busy if self.busy else 0.0
        return {"pid": os.getpid(), "version": self.version, "tokens": self.tokens, "rate": rate} | {
            "idle": max(0.0, 1 - self.busy / alive)
        }


def probe_prompts(vocab: int) -> Prompts:
    return Prompts.of(torch.arange(8)[None] % vocab)

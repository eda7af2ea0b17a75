"""A copy of the policy that draws for somebody else, in a process of its own, with parameters that it is given."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ascent.core.types import Prompts, Rollouts
from ascent.distributed.replica_errors import ReplicaLostError
from ascent.distributed.weight_transfer import receive_weights

PROBE = 4
"""Tokens that a replica draws greedily after each load, to be compared with the learner's own copy."""

REPLICA_LOG = "replicas.jsonl"
"""What every replica did, version by version, and who was lost, in the folder of the engine's logs."""


class Replica:
    """`make`: from a config's dict, what draws, and what answers the probe. `host`: the address of its machine.

    Calls come one at a time.
    """

    def __init__(self, make: Callable[[dict[str, Any]], tuple[Any, Any]], host: str = "127.0.0.1"):
        self.make, self.host, self.version, self.leaving = make, host, -1, False
        self.sampler: Any = None
        self.own: Any = None
        """Answers the probe: the sampler itself; beside a serving engine, one in this process with the same model."""
        self.tokens, self.busy, self.began = 0, 0.0, time.monotonic()

    def load(self, weights: dict[str, Tensor], version: int, config: dict[str, Any]) -> Rollouts:
        """Take these parameters; what it then says to the probe."""
        return self._take(lambda _: iter((weights,)), version, config)

    def receive(self, offer: Any, version: int, config: dict[str, Any]) -> Rollouts:
        """The same, with parameters that rank 0 sends."""
        return self._take(lambda device: receive_weights(offer, device, self.host), version, config)

    @torch.no_grad()
    def _take(
        self, parts: Callable[[torch.device], Iterator[dict[str, Tensor]]], version: int, config: dict[str, Any]
    ) -> Rollouts:
        self._stay()
        if self.sampler is None:
            self.sampler, self.own = self.make(config)
        self.version, lm = -1, self.own.lm  # neither the old parameters nor the new ones until all are there
        for part in parts(lm.device):
            lm.take(part)
        for sampler in {id(one): one for one in (self.own, self.sampler)}.values():
            sampler.load({}, version)
        self.version = version
        return self.own.draw(make_probe_prompts(lm.vocab), 1, None, PROBE)

    def draw(self, version: int, prompts: Prompts, samples: int, seeds: Tensor | None, limit: int | None) -> Rollouts:
        self._stay()
        if self.sampler is None or version != self.version:
            raise ReplicaLostError(f"it has version {self.version} of the weights, not {version}")
        begin = time.monotonic()
        drawn = self.sampler.generate_from_seeds(prompts, samples, seeds, limit)
        self.busy += time.monotonic() - begin
        self.tokens += int(drawn.mask.sum())
        return drawn

    def leave(self) -> None:
        """Draw nothing more. What it was drawing is done by now: calls come one at a time."""
        self.leaving = True

    def _stay(self) -> None:
        if self.leaving:
            raise ReplicaLostError("it was asked to leave", over=True)

    def about(self) -> dict[str, Any]:
        """For `ascent cluster status`."""
        alive = time.monotonic() - self.began
        rate = self.tokens / self.busy if self.busy else 0.0
        return {"pid": os.getpid(), "version": self.version, "tokens": self.tokens, "rate": rate} | {
            "idle": max(0.0, 1 - self.busy / alive)
        }


def make_probe_prompts(vocab: int) -> Prompts:
    return Prompts.of(torch.arange(8)[None] % vocab)

"""A copy of the policy in a separate process that generates responses with the weights that it receives."""

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

PROBE_TOKENS = 4
"""Tokens that a replica generates greedily after each load, to be compared with those of the learner's own copy."""

REPLICA_LOG = "replicas.jsonl"
"""The work of every replica, version by version, and lost replicas; in the folder of the engine's logs."""


class Replica:
    """A Ray actor, whose calls run one at a time.

    `make` builds the rollout engine and the engine of the probe from a config's dict. `host` is the address of the
    replica's machine.
    """

    def __init__(self, make: Callable[[dict[str, Any]], tuple[Any, Any]], host: str = "127.0.0.1"):
        self.make, self.host, self.version, self.is_draining = make, host, -1, False
        self.engine: Any = None
        self.probe_engine: Any = None
        """The same engine, or, beside a serving engine, a local one with the same model."""
        self.tokens, self.busy_seconds, self.started = 0, 0.0, time.monotonic()

    def load(self, weights: dict[str, Tensor], version: int, config: dict[str, Any]) -> Rollouts:
        """Load these weights and return the response to the probe."""
        return self._load_parts(lambda _: iter((weights,)), version, config)

    def receive(self, offer: Any, version: int, config: dict[str, Any]) -> Rollouts:
        """Load weights that rank 0 sends, and return the response to the probe."""
        return self._load_parts(lambda device: receive_weights(offer, device, self.host), version, config)

    @torch.no_grad()
    def _load_parts(
        self, parts: Callable[[torch.device], Iterator[dict[str, Tensor]]], version: int, config: dict[str, Any]
    ) -> Rollouts:
        self._check_draining()
        if self.engine is None:
            self.engine, self.probe_engine = self.make(config)
        self.version, lm = -1, self.probe_engine.lm  # no version until all parts are loaded
        for part in parts(lm.device):
            lm.load_params(part)
        for engine in {id(engine): engine for engine in (self.probe_engine, self.engine)}.values():
            engine.load({}, version)
        self.version = version
        return self.probe_engine.generate_from_seeds(make_probe_prompts(lm.vocab_size), 1, None, PROBE_TOKENS)

    def generate(
        self, version: int, prompts: Prompts, samples: int, seeds: Tensor | None, limit: int | None
    ) -> Rollouts:
        """Generate responses with this version of the weights."""
        self._check_draining()
        if self.engine is None or version != self.version:
            raise ReplicaLostError(f"it has version {self.version} of the weights, not {version}")
        begin = time.monotonic()
        rollouts = self.engine.generate_from_seeds(prompts, samples, seeds, limit)
        self.busy_seconds += time.monotonic() - begin
        self.tokens += int(rollouts.mask.sum())
        return rollouts

    def drain(self) -> None:
        """Reject further work. Earlier calls are complete by now, because calls run one at a time."""
        self.is_draining = True

    def _check_draining(self) -> None:
        if self.is_draining:
            raise ReplicaLostError("it was asked to leave", is_permanent=True)

    def status(self) -> dict[str, Any]:
        """Return what `ascent cluster status` shows."""
        seconds = time.monotonic() - self.started
        rate = self.tokens / self.busy_seconds if self.busy_seconds else 0.0
        idle = max(0.0, 1 - self.busy_seconds / seconds)
        return {"pid": os.getpid(), "version": self.version, "tokens": self.tokens, "rate": rate, "idle": idle}


def make_probe_prompts(vocab: int) -> Prompts:
    return Prompts.of(torch.arange(8)[None] % vocab)

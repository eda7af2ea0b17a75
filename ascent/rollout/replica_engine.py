"""A sampler whose responses are drawn by replicas elsewhere, on time or ahead of it.

With --ahead A the responses of a step are drawn by the policy of A steps before it, all of them: replicas draw while
learners train, and how fast either is changes no number.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascent.core.errors import ConfigError, RunError
from ascent.core.protocols import FinishedRollouts, PendingRollout, RolloutRequest
from ascent.core.types import Prompts, Rollouts, join
from ascent.distributed.replica import PROBE, REPLICA_LOG, make_probe_prompts
from ascent.distributed.replica_dispatch import ReplicaDispatcher, ReplicaSet
from ascent.ops.token_sampling import response_seeds
from ascent.rollout.delegating_engine import DelegatingEngine

GAP = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""How far the log-probs of a probe may be from the learner's."""
Asked = list[tuple[Tensor, Future[Rollouts]]]
"""Chunks of a call: which of its prompts, and their responses."""


class ReplicaEngine(DelegatingEngine):
    """Rank 0's sampler. `inner` is what would draw without replicas; `own` rank 0's own copy of the policy.

    `engine`: seconds that the server beside each replica may take to start, where a serving engine draws. A seed then
    gives the same tokens up to rounding only, so a journal keeps what was drawn.
    """

    def __init__(
        self,
        inner: Any,
        own: Any,
        crew: ReplicaSet,
        config: dict[str, Any],
        deadline: float,
        engine: float | None = None,
    ):
        super().__init__(inner)
        self.own, self.crew, self.deterministic, self.version = own, crew, engine is None, -1
        self.folder: Path | None = None
        """Where records are kept; None: nowhere."""
        self.dispatch = ReplicaDispatcher(crew, config, deadline, self._compare, self._record, engine or 0.0)
        self._asked: dict[RolloutRequest, Asked] = {}
        self._waited = 0.0
        """Seconds for which the learners had nothing to do, since the last load."""

    def load(self, params: dict[str, Tensor], version: int) -> None:
        self.inner.load(params, version)
        self.version = version
        probed = self.own.draw(make_probe_prompts(self.own.lm.vocab), 1, None, PROBE)
        self.dispatch.load(version, self.crew.put(self.own.lm.trained()), probed, self._waited)
        self._waited = 0.0

    # ---- tickets

    def submit(self, tickets: list[RolloutRequest]) -> None:
        self.pending += tuple(PendingRollout(ticket, seeds=self._seeds(ticket)) for ticket in tickets)
        self._begin_all()

    def iter_finished(self, step: int, deadline: float) -> Iterator[FinishedRollouts]:
        self._begin_all()
        until = time.monotonic() + deadline
        for one in [one for one in self.pending if one.request.step == step]:
            if one.rollouts is not None:
                yield FinishedRollouts(one.request, torch.arange(len(one.request.prompts)), one.rollouts)
            for place, drawn in self._asked.pop(one.request, []):
                begun = time.monotonic()
                try:
                    rollouts = drawn.result(max(until - begun, 0.0))
                except TimeoutError:
                    return
                self._waited += time.monotonic() - begun
                yield FinishedRollouts(one.request, place, rollouts)
        self.pending = tuple(one for one in self.pending if one.request.step != step)

    def snapshot_pending(self) -> tuple[PendingRollout, ...]:
        """With all that is drawn ahead: a resumed run has not the weights that drew it."""
        self.pending = tuple(
            one
            if one.request not in self._asked
            else replace(one, rollouts=whole(self._asked.pop(one.request)), unfinished=None)
            for one in self.pending
        )
        return self.pending

    def _begin_all(self) -> None:
        """Have everything drawn that is neither drawn nor in a journal.

        What another sampler has begun is drawn anew, from the same seeds.
        """
        for one in self.pending:
            wanted = one.request.step >= self.first_version and (one.rollouts is None or one.unfinished is not None)
            if wanted and one.request not in self._asked:
                self._asked[one.request] = self._ask(one.request, one.seeds, None)
        self.pending = tuple(replace(one, rollouts=None) if one.request in self._asked else one for one in self.pending)

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        if self.version < 0:  # before the first load there is nothing that replicas could draw with
            return self.inner.generate(prompts, samples, greedy, limit=limit, seed=seed)
        ticket = RolloutRequest(-1, prompts, samples, greedy, seed)
        return whole(self._ask(ticket, self._seeds(ticket), limit))

    def _seeds(self, ticket: RolloutRequest) -> Tensor | None:
        if ticket.greedy:
            return None
        return response_seeds(len(ticket.prompts), ticket.samples, self.own.generator, ticket.seed)

    def _ask(self, ticket: RolloutRequest, seeds: Tensor | None, limit: int | None) -> Asked:
        prompts, count, cut = ticket.prompts, len(ticket.prompts), self.dispatch.width
        if seeds is None:  # of a run that another sampler began
            seeds = self._seeds(ticket)
        chunks = [part for i in range(cut) if len(part := torch.arange(count)[i::cut])]
        each = [(prompts[c], ticket.samples, None if seeds is None else seeds[c], limit) for c in chunks]
        return list(zip(chunks, self.dispatch.ask(self.version, each), strict=True))

    # ---- replicas

    def _compare(self, name: str, version: int, expected: Rollouts, drawn: Rollouts) -> None:
        bound = GAP.get(self.own.lm.model.dtype, 1e-3)
        same = drawn.response.shape == expected.response.shape
        gap = float((drawn.logp_sampler - expected.logp_sampler).abs().max()) if same else float("inf")
        if not gap <= bound:
            raise RunError(
                f"{name} answers the probe after load {version} with log-probs {gap:.2g} from the learner's "
                f"(at most {bound:g}): it does not have the same model"
            )

    def _record(self, line: dict[str, Any]) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / REPLICA_LOG).open("a") as file:
                file.write(json.dumps({"time": round(time.time(), 3)} | line) + "\n")

    def close(self) -> None:
        self.dispatch.close()
        self.inner.close()


def whole(asked: Asked) -> Rollouts:
    """All responses of a call, in the order of its prompts."""
    order = torch.cat([place for place, _ in asked]).argsort()
    return join([drawn.result() for _, drawn in asked]).select(order)


def check_cluster(config: Any) -> None:
    """Refuse what replicas cannot draw, before anything is started."""
    policy = getattr(config.policy, "engine", None)
    if config.data != "samples" or policy is None:
        raise ConfigError("ascent cluster is for language models that sample: start other trainings by torchrun")
    if config.task.has_environment:
        raise ConfigError("--tools, --environment or --agent: episodes are played by the learner; start it by torchrun")
    if config.policy.engine_url:
        raise ConfigError(
            "--engine.url: each replica starts a server of its own, by --engine.python. Servers that run already "
            "need no `ascent cluster`: give them to `ascent train`"
        )
    if config.policy.engine_transport != "file":
        raise ConfigError("--engine.transport nccl: a replica and its server share a GPU here; leave it at file")

"""Rank 0 leads and the others follow: the loop runs on rank 0 alone, and knows nothing of ranks.

Its learner and its sampler are wrapped here. Whatever the loop asks of them, the wrapper first orders of every other
rank, and then does its own part. The others repeat what they are told until they are told to end: `run_follower`.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascent.core.protocols import Objective, PendingRollout, TakeStep, UpdateResult, ValueLoss
from ascent.core.types import Batch, Prompts, Rollouts, Terms, join
from ascent.distributed.rank_group import RankGroup
from ascent.distributed.ranks import SINGLE_PROCESS
from ascent.ops.token_sampling import response_seeds
from ascent.rollout.delegating_engine import DelegatingEngine
from ascent.training.compact_adamw import to_float32_state


class RankZeroLearner:
    """The learner of rank 0. Of the run's own objective, update and value loss every rank has its own copy."""

    def __init__(self, inner: Any, ranks: RankGroup):
        self.inner, self.ranks = inner, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _all(self, name: str, *args: Any, here: tuple[Any, ...] = ()) -> Any:
        """A method of the learner, on every rank; `here`: what only rank 0 has to be given."""
        with self.ranks.work():
            self.ranks.tell("learner", name, *args)
            return getattr(self.inner, name)(*args, *here)

    def score(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        return self._all("score", sent(batch), needs)

    def step(self, mini: Batch, objective: Objective, update: TakeStep) -> UpdateResult:
        return self._all("step", sent(mini), here=(objective, update))

    def fit_critic(self, mini: Batch, loss: ValueLoss) -> tuple[Tensor, Tensor]:
        return self._all("fit_critic", sent(mini), here=(loss,))

    def gradient(self, mini: Batch, objective: Objective) -> Terms:
        """For trials before a run: of an objective that is not the run's."""
        return self._alone("gradient", mini, objective)

    def evaluate_objective(self, mini: Batch, objective: Objective) -> Tensor:
        """For evaluations: an objective that is not the run's may keep what it is shown."""
        return self._alone("evaluate_objective", mini, objective)

    def _alone(self, name: str, mini: Batch, objective: Objective) -> Any:
        """Where rank 0 has all parameters, it computes the whole batch."""
        if not self.inner.alone:
            with self.ranks.work():
                self.ranks.tell("learner", "on_rank_zero", name, sent(mini.sub_batch(slice(0, 0))))
                return self.inner.on_rank_zero(name, mini, objective)
        self.inner.ranks = SINGLE_PROCESS
        try:
            return getattr(self.inner, name)(mini, objective)
        finally:
            self.inner.ranks = self.ranks

    def mix_reference(self, rate: float) -> None:
        self._all("mix_reference", rate)

    def state(self) -> dict[str, dict[str, Tensor]]:
        return self._all("state")

    def stage_parts(self, aside: Path) -> Any:
        """Every rank's own part of a checkpoint, to be written to this folder; None: rank 0 writes `state`."""
        return self._all("stage_parts", aside) if self.inner.large else None

    def restore(self, state: dict[str, dict[str, Tensor]]) -> None:
        with self.ranks.work():
            state = to_float32_state(state, list(self.inner.params()))  # packed bits cannot be cut into shards
            self.ranks.tell("learner", "restore")
            self.ranks.broadcast_groups(state)
            self.inner.restore(state)

    def close(self) -> None:
        self.inner.close()
        self.ranks.close()


class RankedEngine(DelegatingEngine):
    """Every rank draws the responses to its share of the prompts. Seeds belong to responses: who draws is no matter.

    A conversation is played on rank 0 alone, where its environment is; so is everything without such seeds drawn
    (small policies) or read (offline data) there.
    """

    def __init__(self, inner: Any, ranks: RankGroup, learner: Any, seeded: bool):
        super().__init__(inner)
        self.ranks, self.learner, self.seeded = ranks, learner, seeded

    def load(self, params: dict[str, Tensor], version: int) -> None:
        with self.ranks.work():
            self.ranks.tell("sampler", "take", version)
            self.take(version)

    def take(self, version: int) -> None:
        """The parameters of this rank's own learner."""
        self.ranks.watch.step = version
        self.learner.refresh()
        self.inner.load(self.learner.params(), version)

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        if prompts.start_episodes is not None or not self.seeded:
            return self.inner.generate(prompts, samples, greedy, limit=limit, seed=seed)
        seeds = None if greedy else response_seeds(len(prompts), samples, self.inner.generator, seed)
        with self.ranks.work():
            self.ranks.tell("sampler", "part", prompts, samples, seeds, limit)
            rollouts = self.part(prompts, samples, seeds, limit)
        assert rollouts is not None
        return rollouts

    def part(self, prompts: Prompts, samples: int, seeds: Tensor | None, limit: int | None) -> Rollouts | None:
        """Draw this rank's share; on rank 0, everybody's in the order of the prompts."""
        own = torch.arange(len(prompts))[self.ranks.rank :: self.ranks.size]
        drawn = None
        if len(own):
            drawn = self.inner.draw(prompts[own], samples, None if seeds is None else seeds[own], limit)
        parts = [(place, part) for place, part in self.ranks.gather((own, drawn)) if part is not None]
        if self.ranks.rank:
            return None
        if self.ranks.size == 1:
            return drawn
        order = torch.cat([place for place, _ in parts]).argsort()
        return join([part for _, part in parts]).select(order)

    def _generate_all(self, one: PendingRollout) -> Rollouts:
        rollouts = super()._generate_all(one)
        if rollouts is not one.rollouts and self.seeded:
            self.inner.timeline.merge(self.inner.latest)
        return rollouts


def sent(batch: Batch) -> Batch:
    """A batch without what no learner reads: words."""
    return replace(batch, notes=None, errors=(), measures=None, measure_names=())


def wrap_for_ranks(parts: Any, ranks: RankGroup) -> None:
    """The parts of a run on one of its ranks, before it leads or follows."""
    learner, drawn = parts.learner, parts.judged[1] if parts.judged else None
    ranked = RankedEngine(drawn or parts.engine, ranks, learner, drawn is not None and parts.backend.seeded)
    if parts.judged:
        parts.judged = parts.judged[0], ranked
    offline = drawn is not None and parts.engine is not drawn
    parts.engine = RankedEngine(parts.engine, ranks, learner, False) if offline else ranked
    if ranks.rank == 0:
        parts.learner = RankZeroLearner(learner, ranks)
        parts.notes += (f"{ranks.size} ranks: {learner.placement}",)


def run_follower(parts: Any, ranks: RankGroup) -> None:
    """Do what rank 0 orders until it ends the run. It alone hears of Ctrl-C, and decides what is saved."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    algorithm, learner = parts.config.algorithm, parts.learner
    own = {"step": (algorithm.objective, algorithm.update), "fit": (getattr(algorithm.critic, "loss", None),)}
    called = {"learner": learner, "sampler": parts.judged[1] if parts.judged else parts.engine}
    while True:
        part, name, args = ranks.hear()
        if name == "end":
            learner.settle()
            return
        with ranks.work():
            args = (ranks.broadcast_groups(keep=learner.part),) if name == "restore" else args
            getattr(called[part], name)(*args, *own.get(name, ()))

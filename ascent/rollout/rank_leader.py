"""Runs the training loop on rank 0 while the other ranks carry out its commands.

The loop knows nothing of ranks. Rank 0 wraps its learner and its rollout engine: each call is first sent to the other
ranks as a command and then carried out here. The other ranks carry out commands until the run ends: `run_follower`.
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
    """The learner of rank 0, which sends its calls to the other ranks.

    Every rank has its own copy of the run's objective, update and value loss, so these are not sent.
    """

    def __init__(self, inner: Any, ranks: RankGroup):
        self.inner, self.ranks = inner, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _on_all_ranks(self, name: str, *args: Any, here: tuple[Any, ...] = ()) -> Any:
        """Call a method of the learner on every rank. `here`: further arguments on rank 0."""
        with self.ranks.failing_together():
            self.ranks.send_command("learner", name, *args)
            return getattr(self.inner, name)(*args, *here)

    def score(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        return self._on_all_ranks("score", without_text(batch), needs)

    def step(self, mini: Batch, objective: Objective, update: TakeStep) -> UpdateResult:
        return self._on_all_ranks("step", without_text(mini), here=(objective, update))

    def fit_critic(self, mini: Batch, loss: ValueLoss) -> tuple[Tensor, Tensor]:
        return self._on_all_ranks("fit_critic", without_text(mini), here=(loss,))

    def gradient(self, mini: Batch, objective: Objective) -> Terms:
        """Compute the gradient of another objective than the run's, for trials before a run."""
        return self._on_rank_zero("gradient", mini, objective)

    def evaluate_objective(self, mini: Batch, objective: Objective) -> Tensor:
        """Compute the value of another objective than the run's, for evaluations."""
        return self._on_rank_zero("evaluate_objective", mini, objective)

    def _on_rank_zero(self, name: str, mini: Batch, objective: Objective) -> Any:
        """Compute the whole batch on rank 0. With shards, the other ranks take part with empty batches."""
        if not self.inner.computes_alone:
            with self.ranks.failing_together():
                self.ranks.send_command("learner", "on_rank_zero", name, without_text(mini.sub_batch(slice(0, 0))))
                return self.inner.on_rank_zero(name, mini, objective)
        self.inner.ranks = SINGLE_PROCESS
        try:
            return getattr(self.inner, name)(mini, objective)
        finally:
            self.inner.ranks = self.ranks

    def mix_reference(self, rate: float) -> None:
        self._on_all_ranks("mix_reference", rate)

    def state(self) -> dict[str, dict[str, Tensor]]:
        return self._on_all_ranks("state")

    def stage_shards(self, aside: Path) -> Any:
        """Stage each rank's part of a checkpoint in this folder; None: rank 0 writes `state`."""
        return self._on_all_ranks("stage_shards", aside) if self.inner.writes_shards else None

    def restore(self, state: dict[str, dict[str, Tensor]]) -> None:
        with self.ranks.failing_together():
            state = to_float32_state(state, list(self.inner.params()))  # the packed form cannot be sharded
            self.ranks.send_command("learner", "restore")
            self.ranks.broadcast_groups(state)
            self.inner.restore(state)

    def close(self) -> None:
        self.inner.close()
        self.ranks.close()


class RankedEngine(DelegatingEngine):
    """A rollout engine that generates each rank's share of the prompts on that rank.

    Seeds belong to responses, so results do not depend on the assignment. Conversations are played on rank 0, where
    their environments are. Engines without a seed per response (small policies, offline data) also run on rank 0 only.
    """

    def __init__(self, inner: Any, ranks: RankGroup, learner: Any, seeded: bool):
        super().__init__(inner)
        self.ranks, self.learner, self.seeded = ranks, learner, seeded

    def load(self, params: dict[str, Tensor], version: int) -> None:
        with self.ranks.failing_together():
            self.ranks.send_command("engine", "load_own", version)
            self.load_own(version)

    def load_own(self, version: int) -> None:
        """Load the parameters of this rank's learner."""
        self.ranks.heartbeat.step = version
        self.learner.refresh_params()
        self.inner.load(self.learner.params(), version)

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        if prompts.start_episodes is not None or not self.seeded:
            return self.inner.generate(prompts, samples, greedy, limit=limit, seed=seed)
        seeds = None if greedy else response_seeds(len(prompts), samples, self.inner.generator, seed)
        with self.ranks.failing_together():
            self.ranks.send_command("engine", "generate_share", prompts, samples, seeds, limit)
            rollouts = self.generate_share(prompts, samples, seeds, limit)
        assert rollouts is not None
        return rollouts

    def generate_share(
        self, prompts: Prompts, samples: int, seeds: Tensor | None, limit: int | None
    ) -> Rollouts | None:
        """Generate the responses to this rank's share of the prompts. Rank 0 returns all, in the prompts' order."""
        indices = torch.arange(len(prompts))[self.ranks.rank :: self.ranks.world_size]
        rollouts = None
        if len(indices):
            rollouts = self.inner.generate_from_seeds(
                prompts[indices], samples, None if seeds is None else seeds[indices], limit
            )
        gathered = [(index, part) for index, part in self.ranks.gather((indices, rollouts)) if part is not None]
        if self.ranks.rank:
            return None
        if self.ranks.world_size == 1:
            return rollouts
        order = torch.cat([index for index, _ in gathered]).argsort()
        return join([part for _, part in gathered]).select(order)

    def _generate_all(self, pending: PendingRollout) -> Rollouts:
        rollouts = super()._generate_all(pending)
        if rollouts is not pending.rollouts and self.seeded:
            self.inner.timeline.merge(self.inner.latest_timeline)
        return rollouts


def without_text(batch: Batch) -> Batch:
    """Return the batch without its texts and measures, which learners do not read."""
    return replace(batch, notes=None, errors=(), measures=None, measure_names=())


def wrap_for_ranks(parts: Any, ranks: RankGroup) -> None:
    """Wrap the engine, and on rank 0 the learner, of a run."""
    learner, evaluation_engine = parts.learner, parts.evaluation.engine if parts.evaluation else None
    is_seeded = evaluation_engine is not None and parts.backend.seeds_responses
    ranked = RankedEngine(evaluation_engine or parts.engine, ranks, learner, is_seeded)
    if parts.evaluation:
        parts.evaluation.engine = ranked
    is_offline = evaluation_engine is not None and parts.engine is not evaluation_engine
    parts.engine = RankedEngine(parts.engine, ranks, learner, False) if is_offline else ranked
    if ranks.rank == 0:
        parts.learner = RankZeroLearner(learner, ranks)
        parts.notes += (f"{ranks.world_size} ranks: {learner.placement}",)


def run_follower(parts: Any, ranks: RankGroup) -> None:
    """Carry out the commands of rank 0 until the run ends. Only rank 0 handles Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    algorithm, learner = parts.config.algorithm, parts.learner
    local_args = {
        "step": (algorithm.objective, algorithm.update),
        "fit_critic": (getattr(algorithm.critic, "loss", None),),
    }
    targets = {"learner": learner, "engine": parts.evaluation.engine if parts.evaluation else parts.engine}
    while True:
        target, name, args = ranks.receive_command()
        if name == "end":
            learner.wait_for_writes()
            return
        with ranks.failing_together():
            args = (ranks.broadcast_groups(keep=learner.local_shard),) if name == "restore" else args
            getattr(targets[target], name)(*args, *local_args.get(name, ()))

"""What the loop is handed: the task, the sampler and the learner of a config. The backend makes them."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ascent.build import old_logp
from ascent.build.backend import Backend, BoundTask, InitialParams, PreflightReport
from ascent.build.backends import backend_of
from ascent.build.reward_loading import bind_task, check_rewards
from ascent.core.config import Config
from ascent.core.protocols import Learner, RolloutEngine
from ascent.core.types import Streams
from ascent.distributed.ranks import SINGLE_PROCESS, Ranks
from ascent.runs import checkpoint
from ascent.runs.held_out_evaluation import Evaluate, KeepAnswers, offline_evaluator, sample_evaluator
from ascent.runs.run_reader import init_folder
from ascent.tasks.epochs import steps_for_epochs


@dataclass
class RunParts:
    """The parts of a run."""

    config: Config
    backend: Backend
    task: BoundTask
    """Where the loop's prompts and rewards come from: the config's task, or its offline data."""
    policy: Any
    """What is trained: a policy, or a reward model."""
    engine: RolloutEngine
    learner: Learner
    streams: Streams
    notes: tuple[str, ...] = ()
    """What a person should know of how these were made."""
    scored_evaluation: tuple[BoundTask, RolloutEngine] | None = None
    """What held-out answers are drawn with and scored by; None where no policy is trained on a task that scores."""

    def evaluator(self, keep: KeepAnswers | None = None) -> Evaluate:
        """What the loop calls to evaluate. A task that scores its own demonstrations needs no log-probs of them."""
        config, evaluators = self.config, []
        if config.data != "samples" and not (self.scored_evaluation and config.data == "demonstrations"):
            evaluators.append(offline_evaluator(config, self.learner, self.task, self.engine))
        if self.scored_evaluation is not None:
            policy = self.policy if self.backend.can_enumerate else None
            evaluators.append(sample_evaluator(config, *self.scored_evaluation, policy, keep))
        return lambda: {name: value for each in evaluators for name, value in each().items()}

    def preflight(self) -> PreflightReport | None:
        """What to know before the run begins; None: there is nothing to look at."""
        engine = None if self.scored_evaluation is None else self.scored_evaluation[1]
        return self.backend.preflight(self.config, self.policy, self.task, self.learner, engine, self.notes)

    def resolve_old_logp(self) -> None:
        """Decide whose log-probs logp_old is. From here on the config says it, and the notes why."""
        config = self.config
        if self.scored_evaluation is None or not old_logp.needs_measurement(config, self.backend.dtype(self.policy)):
            self.config = replace(config, old_logp="sampler" if config.old_logp == "auto" else config.old_logp)
            return
        draws, prompts = (torch.Generator().manual_seed(config.seed + own) for own in (5_000_011, 6_000_011))
        engine = self.backend.rollout_engine(config, self.policy, draws)
        drawn = self.task.draw(min(old_logp.MAX_PROMPTS, config.prompts), prompts)
        self.config, why = old_logp.resolve(config, old_logp.measure_gap(config, self.learner, engine, drawn))
        self.notes += why

    def close(self) -> None:
        """End what was started for the run: the processes that compute rewards."""
        parts = (self.task, self.engine, *(self.scored_evaluation or ()), self.learner)
        for part in {id(part): part for part in parts}.values():
            part.close()


def assemble(
    config: Config, groups: Collection[str] = (), kept: Path | None = None, ranks: Ranks = SINGLE_PROCESS
) -> RunParts:
    """The parts of a config.

    `groups`: what a checkpoint will fill in; of --init only the reference is then needed, and only if it is not among
    them. `kept`: where the run keeps the parameters that it started from.
    """
    torch.set_num_threads(config.threads or torch.get_num_threads())
    backend, streams = backend_of(config), Streams(config.seed)
    check_rewards(backend, config.task)
    backend.check(config)
    start, fresh = None, not groups
    if config.init is not None and (fresh or (config.algorithm.reference.enabled and "reference" not in groups)):
        source = kept or init_folder(config.init)
        start = InitialParams(source, checkpoint.params(source))
    model, notes = backend.model(config, streams, start, fresh)
    learner = backend.learner(config, model, streams, ranks)
    config = backend.resolve_config(config, model) if fresh else config
    scored_evaluation = None
    if config.algorithm.loss.trains == "policy" and config.task.data == "samples":
        bound = bind_task(backend, config.task, model, scores=ranks.rank == 0)
        scored_evaluation = bound, backend.rollout_engine(config, model, streams.sampling)
        notes += (scored_evaluation[1].note,) if scored_evaluation[1].note else ()
        if ranks.rank == 0:  # where rewards are computed
            backend.enable_early_scoring(*scored_evaluation)
            if config.data == "samples":
                backend.enable_early_training(config, scored_evaluation[1], learner)
    task, engine = (
        scored_evaluation
        if scored_evaluation and config.data == "samples"
        else backend.offline(config, model, streams.sampling)
    )
    if fresh and config.data_epochs is not None:
        config = replace(config, steps=steps_for_epochs(config.data_epochs, config.prompts, task))
    return RunParts(config, backend, task, model, engine, learner, streams, notes, scored_evaluation)

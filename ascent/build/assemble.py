"""Assemble the parts of a run from its config: task, rollout engine, learner. The backend makes them."""

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
class EvaluationParts:
    """The task and the engine with which a policy is evaluated on held-out prompts."""

    task: BoundTask
    engine: RolloutEngine


@dataclass
class RunParts:
    """The parts of a run."""

    config: Config
    backend: Backend
    task: BoundTask
    """Source of prompts and rewards: the config's task, or its offline data."""
    policy: Any
    """The model that is trained: a policy or a reward model."""
    engine: RolloutEngine
    learner: Learner
    streams: Streams
    notes: tuple[str, ...] = ()
    """Notes to the user about how the parts were chosen."""
    evaluation: EvaluationParts | None = None
    """Samples and scores held-out responses; None: no policy is trained, or the task has no reward."""

    def evaluator(self, keep: KeepAnswers | None = None) -> Evaluate:
        """Return the loop's evaluation function. Demonstrations of a task with a reward get no held-out log-probs."""
        config, evaluators = self.config, []
        if config.data != "samples" and not (self.evaluation and config.data == "demonstrations"):
            evaluators.append(offline_evaluator(config, self.learner, self.task, self.engine))
        if self.evaluation is not None:
            policy = self.policy if self.backend.can_enumerate else None
            evaluators.append(sample_evaluator(config, self.evaluation.task, self.evaluation.engine, policy, keep))
        return lambda: {name: value for evaluate in evaluators for name, value in evaluate().items()}

    def preflight(self) -> PreflightReport | None:
        """Check the run before it begins; None: the backend has no pre-flight checks."""
        engine = None if self.evaluation is None else self.evaluation.engine
        return self.backend.preflight(self.config, self.policy, self.task, self.learner, engine, self.notes)

    def resolve_old_logp(self) -> None:
        """Decide whether logp_old comes from the engine or the learner, and record it in the config and the notes."""
        config = self.config
        if self.evaluation is None or not old_logp.needs_measurement(config, self.backend.dtype(self.policy)):
            self.config = replace(config, old_logp="sampler" if config.old_logp == "auto" else config.old_logp)
            return
        draws, prompts = (torch.Generator().manual_seed(config.seed + offset) for offset in (5_000_011, 6_000_011))
        engine = self.backend.rollout_engine(config, self.policy, draws)
        prompt_batch = self.task.draw(min(old_logp.MAX_PROMPTS, config.prompts), prompts)
        batch = old_logp.measure_gap(config, self.learner, engine, prompt_batch)
        self.config, notes = old_logp.resolve(config, batch)
        self.notes += notes

    def close(self) -> None:
        """Close the parts, which stops their processes, such as reward workers."""
        evaluation = (self.evaluation.task, self.evaluation.engine) if self.evaluation else ()
        parts = (self.task, self.engine, *evaluation, self.learner)
        for part in {id(part): part for part in parts}.values():
            part.close()


def assemble(
    config: Config, groups: Collection[str] = (), start_folder: Path | None = None, ranks: Ranks = SINGLE_PROCESS
) -> RunParts:
    """Make the parts of a run.

    `groups` names the tensors that a checkpoint restores later; --init is then read only for a reference that is not
    among them. `start_folder` holds the run's copy of its initial parameters.
    """
    torch.set_num_threads(config.threads or torch.get_num_threads())
    backend, streams = backend_of(config), Streams(config.seed)
    check_rewards(backend, config.task)
    backend.check(config)
    start, is_new_run = None, not groups
    if config.init is not None and (is_new_run or (config.algorithm.reference.enabled and "reference" not in groups)):
        source = start_folder or init_folder(config.init)
        start = InitialParams(source, checkpoint.params(source))
    model, notes = backend.model(config, streams, start, is_new_run)
    learner = backend.learner(config, model, streams, ranks)
    config = backend.resolve_config(config, model) if is_new_run else config
    evaluation = None
    if config.algorithm.loss.trains == "policy" and config.task.data == "samples":
        bound = bind_task(backend, config.task, model, scores=ranks.rank == 0)
        evaluation = EvaluationParts(bound, backend.rollout_engine(config, model, streams.sampling))
        notes += (evaluation.engine.note,) if evaluation.engine.note else ()
        if ranks.rank == 0:  # where rewards are computed
            backend.enable_early_scoring(bound, evaluation.engine)
            if config.data == "samples":
                backend.enable_early_training(config, evaluation.engine, learner)
    if evaluation and config.data == "samples":
        task, engine = evaluation.task, evaluation.engine
    else:
        task, engine = backend.offline(config, model, streams.sampling)
    if is_new_run and config.data_epochs is not None:
        config = replace(config, steps=steps_for_epochs(config.data_epochs, config.prompts, task))
    return RunParts(config, backend, task, model, engine, learner, streams, notes, evaluation)

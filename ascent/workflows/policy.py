"""A policy that is asked and not trained: that of a run's checkpoint, or a bare model on a task; and its responses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ascent.core.algorithms import Algorithm
from ascent.core.config import Config
from ascent.core.loop import scored
from ascent.core.menu import name_of
from ascent.core.protocols import Sampler
from ascent.core.types import Prompts, Refused, Rollouts
from ascent.engines.backend import SAMPLING_SETTINGS, Backend, BoundTask
from ascent.engines.backends import backend_of, task_kind
from ascent.records import Run, checkpoint
from ascent.records.naming import task_name
from ascent.records.run import load_policy
from ascent.rewards.reward_models import bind_task, check_rewards
from ascent.settings import configure
from ascent.tasks.text import TextTask

Row = dict[str, Any]


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy, the task that it is asked about, and how it is sampled (all in `config`)."""

    config: Config
    policy: Any
    run: Path | None = None
    step: int | None = None
    """The checkpoint's, where it is a run's."""

    @property
    def backend(self) -> Backend:
        return backend_of(self.config)

    def about(self) -> dict[str, Any]:
        """Where it came from and how it is sampled, for records."""
        model = getattr(self.config.policy, "model", None)
        origin = {"run": None if self.run is None else str(self.run), "step": self.step, "model": model}
        settings = {name: getattr(self.config, name) for name in SAMPLING_SETTINGS}
        return origin | {"task": task_name(self.config)} | settings

    def task(self) -> BoundTask:
        """The task, bound to the policy's tokens and to its rewards. The caller closes it."""
        check_rewards(self.backend, self.config.task)
        return bind_task(self.backend, self.config.task, self.policy)

    def unscored_task(self) -> BoundTask:
        """The task without its learned rewards and judges, to read and write prompts and responses."""
        return self.backend.bind(self.config.task, self.policy, {})

    def sampler(self, prompts: Prompts, seed: int) -> Sampler:
        """A sampler for these prompts, whose draws the seed decides."""
        return self.backend.answering_sampler(self.config, self.policy, prompts, seed, self.step or 0)


def run_policy(
    run: str | Path, step: int | None = None, best: bool = False, task: Any = None, **changes: Any
) -> LoadedPolicy:
    """The newest checkpoint of a run (or that of a step, or the best), on its own task or on another."""
    existing = Run(run)
    path = existing.checkpoint(step, best)
    config = existing.config
    trains = config.algorithm.loss.trains
    if trains != "policy":
        raise Refused(
            f"{run} trained a reward model: it rates responses and writes none. Its figures: ascent show {run}; as a "
            f"reward: --reward {'process' if trains == 'steps' else 'model'}:{run}"
        )
    if task is not None:
        flag = f"--task {name_of(task)}"
        if task_kind(task) != task_kind(config.task):
            raise Refused(f"{flag}: it is a {task_kind(task)} task, and the run {run} is of {task_name(config)}")
        backend_of(config).check_task(config, task, flag)
        config = replace(config, algorithm=Algorithm(), task=task)
    config = for_asking(config, **changes)
    return LoadedPolicy(config, load_policy(config, path), existing.folder, checkpoint.step_of(path))


def model_policy(model: str, task: Any = None, settings: dict[str, Any] | None = None, **changes: Any) -> LoadedPolicy:
    """A bare model: a folder or a name on the hub. Without a task it is only asked, and nothing is scored."""
    if (Path(model) / "run.json").exists():
        raise Refused(f"--model {model}: that is a run. Name it first, without --model")
    config = configure(
        TextTask() if task is None else task, {"policy": "causal-lm"} | (settings or {}) | {"model": model}
    )
    return untrained_policy(config, **changes)


def untrained_policy(config: Config, **changes: Any) -> LoadedPolicy:
    """The policy of a config before any training."""
    config = for_asking(config, **changes)
    return LoadedPolicy(config, backend_of(config).policy(config, None))


def for_asking(config: Config, **changes: Any) -> Config:
    """The config with other ways to sample; what is None stays as it is. Nothing in it concerns training any more."""
    changes = {name: value for name, value in changes.items() if value is not None}
    config = replace(config, algorithm=Algorithm(), init=None)
    return backend_of(config).with_settings(config, changes)


# ---- responses, one dictionary each -----------------------------------------------------------------


def response_rows(task: BoundTask, prompt: str, rollouts: Rollouts, group: int) -> list[Row]:
    """The responses to one prompt, in words and tokens with their log-probs."""
    rows = []
    for sample, mask in enumerate(rollouts.mask[group]):
        ids = rollouts.response[group, sample][mask].tolist()
        rows.append(
            {
                "prompt": prompt,
                "sample": sample,
                "response": task.words(ids),
                "truncated": bool(rollouts.truncated[group, sample]),
                "length": len(ids),
                "ids": ids,
                "logp": rollouts.logp_sampler[group, sample][mask].tolist(),
            }
        )
    return rows


def scored_rows(task: BoundTask, rollouts: Rollouts) -> tuple[list[Row], list[str]]:
    """Every response with its score and the reason for it, and why rewards failed.

    strict      right, and in the form that was asked for
    lenient     right, in whatever form (None for small tasks)
    reward      None where it failed, and then `valid` is False
    answer      what it votes for in a majority
    """
    batch, errors = scored(task, rollouts)
    assert batch.correct is not None
    lenient = batch.measured.index("lenient") if "lenient" in batch.measured else None
    every: list[Row] = []
    for group in range(len(rollouts.prompt)):
        question = task.question(rollouts, group)
        rows = response_rows(task, question.words, rollouts, group)
        for sample, row in enumerate(rows):
            valid = bool(batch.valid[group, sample])
            row |= {
                "gold": question.answer,
                "answer": task.vote(row["response"], question.answer),
                "strict": bool(batch.correct[group, sample]) if valid else None,
                "lenient": None,
                "reward": float(batch.reward[group, sample].sum()) if valid else None,
                "valid": valid,
                "reason": "" if batch.notes is None else str(batch.notes[group, sample] or ""),
            }
            if lenient is not None and valid and batch.measures is not None:
                row["lenient"] = bool(batch.measures[group, sample, lenient])
        every += rows
    return every, errors

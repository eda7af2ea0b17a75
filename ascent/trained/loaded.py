"""A policy that is there to be asked and not to be trained: of a run's checkpoint, or a bare model on a task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascent.algorithms import Algorithm
from ascent.config import Config
from ascent.engines import LocalSampler, Sampler
from ascent.menu import name_of
from ascent.naming import task_name
from ascent.policies import CausalLM, LanguageModel, Policy
from ascent.records import Run, checkpoint
from ascent.records.run import policy_of
from ascent.settings import configure
from ascent.tasks import Task
from ascent.tasks.text import Text
from ascent.types import Refused

OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
OF_MODEL = ("device", "rows")
OF_WORDS = ("max_tokens", "system", "instruction")


@dataclass(frozen=True)
class Loaded:
    """A policy, the task that it is asked about, and how it is sampled (all in `config`)."""

    config: Config
    policy: Policy | LanguageModel
    run: Path | None = None
    step: int | None = None
    """The checkpoint's, where it is a run's."""

    def about(self) -> dict[str, Any]:
        """Where it came from and how it is sampled, for records."""
        model = self.config.policy.model if isinstance(self.config.policy, CausalLM) else None
        origin = {"run": None if self.run is None else str(self.run), "step": self.step, "model": model}
        return origin | {"task": task_name(self.config)} | {name: getattr(self.config, name) for name in OF_SAMPLING}

    def task(self) -> Task:
        """The task; a language world bound to the model's tokenizer. Who asks for it closes it."""
        from ascent.learned.rewards import bound

        lm = self.policy if isinstance(self.policy, LanguageModel) else None
        if lm is not None:
            self.config.task.verify()
        return bound(self.config.task, lm)

    def sampler(self, prompt: Tensor, seed: int) -> Sampler:
        """A sampler for these prompts, whose draws the seed decides."""
        config, generator = self.config, torch.Generator().manual_seed(seed)
        if isinstance(self.policy, Policy):
            return LocalSampler(self.policy, config.temperature, generator)
        from ascent.engines.language import LanguageSampler, Support, prove

        lm, limit = self.policy, config.task.max_tokens
        longest = prompt.shape[1] + limit
        room = getattr(lm.model.config, "max_position_embeddings", None) or longest
        if longest > room:
            raise Refused(
                f"--max-tokens {limit} with a prompt of {prompt.shape[1]} tokens: the model has {room} positions; "
                f"lower it to {room - prompt.shape[1]}"
                if prompt.shape[1] < room
                else f"the prompt has {prompt.shape[1]} tokens, and the model {room} positions: shorten it"
            )
        prove(lm, longest)
        lm.shares &= config.policy.share_prompts
        support = Support(config.top_k, config.top_p, config.min_p)
        sampler = LanguageSampler(lm, limit, config.temperature, generator, support, config.policy.rows)
        sampler.load({}, self.step or 0)
        return sampler


def of_run(run: str | Path, step: int | None = None, best: bool = False, task: Any = None, **changes: Any) -> Loaded:
    """The newest checkpoint of a run (or that of a step, or the best), on its own task or on another."""
    existing = Run(run)
    path = existing.checkpoint(step, best)
    config = existing.config
    if getattr(config.algorithm.loss, "trains", "policy") != "policy":
        raise Refused(
            f"{run} trained a reward model, which says nothing: it rates. Its figures: ascent show {run}; as a reward: "
            f"--reward {'process' if config.algorithm.loss.data == 'steps' else 'model'}:{run}"
        )
    if task is not None:
        if isinstance(config.policy, CausalLM) != isinstance(task, Text):
            raise Refused(f"--task {name_of(task)}: the run {run} is of another world, {task_name(config)}")
        if not isinstance(task, Text) and task.space != config.task.space:
            raise Refused(f"--task {name_of(task)}: its prompts or responses have other shapes than those of {run}")
        config = replace(config, algorithm=Algorithm(), task=task)
    config = changed(config, **changes)
    return Loaded(config, policy_of(config, path), existing.folder, checkpoint.step_of(path))


def of_model(model: str, task: Any = None, settings: dict[str, Any] | None = None, **changes: Any) -> Loaded:
    """A bare model: a folder or a name on the hub. Without a task it is only asked, and nothing is scored."""
    if (Path(model) / "run.json").exists():
        raise Refused(f"--model {model}: that is a run, and stands alone, without --model")
    config = configure(Text() if task is None else task, {"policy": "causal-lm"} | (settings or {}) | {"model": model})
    return of_config(config, **changes)


def of_config(config: Config, **changes: Any) -> Loaded:
    """The model of a config as it was before any training."""
    if not isinstance(config.task, Text):
        raise Refused(f"--model with the task {name_of(config.task)}: it has no words to read")
    config = changed(config, **changes)
    return Loaded(config, config.policy.load(config.seed))


def changed(config: Config, **changes: Any) -> Config:
    """The config with other ways to sample; what is None stays as it is. Nothing of it concerns training any more."""
    given = {name: value for name, value in changes.items() if value is not None}
    words = isinstance(config.task, Text)
    for name in given:
        if not words and name != "temperature":
            raise Refused(
                f"--{name.replace('_', '-')} is for language models: {name_of(config.task)} has no use for it"
            )
    task, policy = config.task, config.policy
    if new := {name: value for name, value in given.items() if name in OF_WORDS}:
        task = replace(task, **new)
    if new := {name: value for name, value in given.items() if name in OF_MODEL}:
        policy = replace(policy, **new)
    plain = {name: value for name, value in given.items() if name in OF_SAMPLING}
    return replace(config, task=task, policy=policy, algorithm=Algorithm(), init=None, **plain)

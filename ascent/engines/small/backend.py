"""Small policies on small tasks, in one process: the reference that every other backend has to reproduce."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascent.core.config import Config
from ascent.core.menu import hyperparameters, name_of
from ascent.core.protocols import Learner, Sampler
from ascent.core.types import Prompts, Refused, Streams
from ascent.engines.backend import Backend, LearnedReward, Params, Start
from ascent.engines.offline import OfflineSampler
from ascent.engines.small.learner import SmallLearner
from ascent.engines.small.reward_model import (
    SmallProcessReward,
    SmallProcessRewardLearner,
    SmallRewardModel,
    SmallRewardModelLearner,
)
from ascent.engines.small.sampler import SmallSampler
from ascent.policies.base import Policy, ValueFunction, draw_next
from ascent.tasks.small import sorting
from ascent.tasks.small.bound import BoundSmallTask
from ascent.tasks.small.offline import SmallOfflineTask

LEARNERS = {"rewards": SmallRewardModelLearner, "steps": SmallProcessRewardLearner}
LEARNED = {"rewards": SmallRewardModel, "steps": SmallProcessReward}


class SmallBackend(Backend):
    name = "small"
    task_kind = "small"
    enumerates = True

    def mismatch(self, config: Config) -> str:
        return "a text task needs a language model: set --policy causal-lm and --model NAME_OR_FOLDER"

    def check(self, config: Config) -> None:
        if config.top_k or config.top_p < 1 or config.min_p:
            raise Refused("--top-k, --top-p and --min-p are for language models: leave them out here")

    def check_task(self, config: Config, task: Any, flag: str) -> None:
        if task.space != config.task.space:
            raise Refused(
                f"{flag}: its prompts or responses have other shapes than those that the policy was trained on"
            )

    # ---- what a run is made of

    def model(self, config: Config, streams: Streams, start: Start | None) -> tuple[Any, tuple[str, ...]]:
        if config.algorithm.loss.trains != "policy":
            model = new_reward_model(config, streams.sampling)
            if start is not None:
                start_reward_model(model, start)
            return model, ()
        policy = config.policy(config.task.space, streams.sampling)
        if start is not None:
            try:
                policy.load_state_dict(start.params)
            except RuntimeError:
                raise Refused(
                    f"--init {start.source}: its parameters do not fit this policy and task; set the --policy, "
                    "--length and --numbers that it was trained with"
                ) from None
        return policy, ()

    def learner(self, config: Config, model: Any, streams: Streams) -> Learner:
        algorithm = config.algorithm
        if algorithm.loss.trains != "policy":
            return LEARNERS[algorithm.loss.trains](model, algorithm.update, config.micro_batch)
        choice = algorithm.critic
        critic = config.policy.critic(model, choice.shared, streams.critic) if choice.on else None
        return SmallLearner(
            model,
            algorithm.update,
            algorithm.reference.kept,
            algorithm.outputs,
            config.micro_batch,
            critic,
            choice.update,
        )

    def sampler(self, config: Config, model: Any, generator: torch.Generator) -> Sampler:
        return SmallSampler(model, config.temperature, generator)

    def bind(self, task: Any, model: Any, rewards: Mapping[str, Any]) -> Any:
        return BoundSmallTask(task, rewards)

    def offline(self, config: Config, model: Any, generator: torch.Generator) -> tuple[Any, Sampler]:
        task = SmallOfflineTask(config.task, config.data, generator)
        return BoundSmallTask(task), OfflineSampler(task.offline_rollouts)

    # ---- what is loaded from a run

    def policy(self, config: Config, params: Params | None) -> Policy:
        policy = config.policy(config.task.space, Streams(config.seed).sampling)
        if params is not None:
            policy.load_state_dict(params)
        return policy

    def learned_reward(self, config: Config, params: Params, device: str | None, batch: int) -> LearnedReward:
        model = new_reward_model(config, torch.Generator())
        model.load_state_dict(params)
        return LEARNED[config.algorithm.loss.trains](model, config)

    def reward_sources(self, task: Any) -> list[str]:
        reward = getattr(task, "reward", "")
        if not isinstance(reward, str):
            return []
        if reward.startswith("model:"):
            return [reward]
        entry = sorting.process_part(reward)[1]
        return [] if entry is None else [entry.source]

    # ---- asking a policy

    @torch.no_grad()
    def continue_responses(
        self, config: Config, policy: Any, prompts: Prompts, prefixes: list[list[int]], count: int, sampler: Any
    ) -> list[list[list[int]]]:
        """Every prefix is drawn to the limit `count` times. There is no cache: responses are short."""
        limit = policy.space.limit
        response = torch.zeros(len(prefixes), count, limit, dtype=torch.long)
        for row, tokens in enumerate(prefixes):
            response[row, :, : len(tokens)] = torch.tensor(tokens)
        length = torch.tensor([len(tokens) for tokens in prefixes])
        for t in range(int(length.min()), limit):
            logits: Tensor = policy.logits(prompts.prompt, response)[:, :, t].expand(-1, count, -1)
            token, _ = draw_next(logits.flatten(0, 1), config.temperature, sampler.generator)
            fresh = (length <= t)[:, None]
            response[:, :, t] = torch.where(fresh, token.view(len(prefixes), count), response[:, :, t])
        return response.tolist()

    # ---- other settings of the same kind

    def reward_model_task(self, config: Config, pairs: Path) -> tuple[Any, dict[str, Any]]:
        task = config.task
        if not hasattr(task, "pairs"):
            raise Refused(f"a reward model learns from pairs, and the task {name_of(task)} has none; sort has")
        fields = {name: getattr(task, name) for name in hyperparameters(type(task))}
        return type(task), fields | {"algorithm": "reward-model", "pairs": str(pairs)}


def new_reward_model(config: Config, generator: torch.Generator) -> ValueFunction:
    """The policy's shape with a value head."""
    return config.policy.critic(config.policy(config.task.space, generator), False, generator)


def start_reward_model(model: ValueFunction, start: Start) -> None:
    """Start from another reward model, or from the backbone of a policy."""
    own, params = model.state_dict(), start.params
    if own.keys() != params.keys():
        params = {f"own.{name}": value for name, value in params.items() if f"own.{name}" in own}
    fits = all(own[name].shape == value.shape for name, value in params.items())
    if not fits or not params or {name for name in own if name.startswith("own.")} - params.keys():
        raise Refused(
            f"--init {start.source}: its parameters do not fit this reward model; set the --policy that they were made "
            "with"
        )
    model.load_state_dict(params, strict=False)

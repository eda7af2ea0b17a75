"""Backend of small policies on small tasks: the reference implementation for other backends."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascent.build.backend import Backend, InitialParams, LearnedReward, OfflineEngine, Params
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.menu import hyperparameters, name_of
from ascent.core.protocols import Learner, RolloutEngine
from ascent.core.types import Prompts, Streams
from ascent.distributed.ranks import SINGLE_PROCESS, Ranks
from ascent.models.small_policies import Policy, ValueFunction, draw_next
from ascent.rewards.small_task import BoundSmallTask, SmallOfflineTask
from ascent.rollout.conversation_task import bind_small_environment
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.tasks.reward_sources import LEARNED
from ascent.training.small_learner import SmallLearner, score_small_responses, score_small_steps

SCORES = {"rewards": score_small_responses, "steps": score_small_steps}
"""Scoring functions of reward models, by training objective."""


class SmallBackend(Backend):
    name = "small"
    task_kind = "small"
    can_enumerate = True

    def mismatch(self, config: Config) -> str:
        return "a text task needs a language model: set --policy causal-lm and --model NAME_OR_FOLDER"

    def check(self, config: Config) -> None:
        if config.top_k or config.top_p < 1 or config.min_p:
            raise ConfigError("--top-k, --top-p and --min-p are for language models: leave them out here")
        if config.ranks.shard == "shard":
            raise ConfigError("--ranks.shard shard: a small policy fits everywhere. Set replicate, or leave it out")
        if config.task.make_environment() is not None and not getattr(config.policy, "reads", False):
            raise ConfigError(
                f"--policy {name_of(config.policy)} with {name_of(config.task)}, which answers its turns: every "
                "position is drawn by itself, whatever was answered before it. Use --policy transformer"
            )

    def check_task(self, config: Config, task: Any, flag: str) -> None:
        if task.space != config.task.space:
            raise ConfigError(
                f"{flag}: its prompts or responses have other shapes than those that the policy was trained on"
            )

    def model(
        self, config: Config, streams: Streams, start: InitialParams | None, fresh: bool = False
    ) -> tuple[Any, tuple[str, ...]]:
        if config.algorithm.loss.trains != "policy":
            return new_reward_model(config, streams.sampling, start), ()
        policy = config.policy(config.task.space, streams.sampling)
        if start is not None:
            try:
                policy.load_state_dict(start.params)
            except RuntimeError:
                raise ConfigError(
                    f"--init {start.source}: its parameters do not fit this policy and task; set the --policy, "
                    "--length and --numbers that it was trained with"
                ) from None
        return policy, ()

    def learner(self, config: Config, model: Any, streams: Streams, ranks: Ranks = SINGLE_PROCESS) -> Learner:
        algorithm = config.algorithm
        choice, kept, outputs = algorithm.critic, algorithm.reference.enabled, algorithm.outputs
        critic = config.policy.critic(model, choice.shared, streams.critic) if choice.enabled else None
        learner = SmallLearner(model, algorithm.update, kept, outputs, config.micro_batch, critic, choice.update)
        learner.ranks = ranks
        if algorithm.loss.trains != "policy":
            learner.train_reward(partial(SCORES[algorithm.loss.trains], model))
        return learner

    def rollout_engine(self, config: Config, model: Any, generator: torch.Generator) -> RolloutEngine:
        return SmallPolicyEngine(model, config.temperature, generator)

    def bind(self, task: Any, model: Any, rewards: Mapping[str, Any]) -> Any:
        return bind_small_environment(BoundSmallTask(task, rewards))

    def offline(self, config: Config, model: Any, generator: torch.Generator) -> tuple[Any, RolloutEngine]:
        task = SmallOfflineTask(config.task, config.data, generator)
        return task, OfflineEngine(task.offline_rollouts)

    def policy(self, config: Config, params: Params | None) -> Policy:
        policy = config.policy(config.task.space, Streams(config.seed).sampling)
        if params is not None:
            policy.load_state_dict(params)
        return policy

    def learned_reward(self, config: Config, params: Params, device: str | None, batch: int) -> LearnedReward:
        model = new_reward_model(config, torch.Generator())
        model.load_state_dict(params)
        return LearnedReward(model.eval().requires_grad_(False), SCORES[config.algorithm.loss.trains], config)

    def reward_sources(self, task: Any) -> list[str]:
        return list(dict.fromkeys(part.source for part in getattr(task, "rewards", ()) if part.kind in LEARNED))

    @torch.no_grad()
    def continue_responses(
        self, config: Config, policy: Any, prompts: Prompts, prefixes: list[list[int]], count: int, engine: Any
    ) -> list[list[list[int]]]:
        """Sample from every prefix `count` times up to the length limit, without a cache: responses are short."""
        limit = policy.space.limit
        response = torch.zeros(len(prefixes), count, limit, dtype=torch.long)
        for row, tokens in enumerate(prefixes):
            response[row, :, : len(tokens)] = torch.tensor(tokens)
        length = torch.tensor([len(tokens) for tokens in prefixes])
        for t in range(int(length.min()), limit):
            logits: Tensor = policy.logits(prompts.prompt, response)[:, :, t].expand(-1, count, -1)
            token, _ = draw_next(logits.flatten(0, 1), config.temperature, engine.generator)
            is_sampled = (length <= t)[:, None]
            response[:, :, t] = torch.where(is_sampled, token.view(len(prefixes), count), response[:, :, t])
        return response.tolist()

    def reward_model_task(self, config: Config, pairs: Path) -> tuple[Any, dict[str, Any]]:
        task = config.task
        if not hasattr(task, "pairs"):
            raise ConfigError(f"a reward model learns from pairs, and the task {name_of(task)} has none; sort has")
        fields = {name: getattr(task, name) for name in hyperparameters(type(task))}
        return type(task), fields | {"algorithm": "reward-model", "pairs": str(pairs)}


def new_reward_model(config: Config, generator: torch.Generator, start: InitialParams | None = None) -> ValueFunction:
    """Return a model of the policy's shape with a value head, initialized from a reward model or a policy backbone."""
    model = config.policy.critic(config.policy(config.task.space, generator), False, generator)
    if start is None:
        return model
    own, params = model.state_dict(), start.params
    if own.keys() != params.keys():
        params = {f"own.{name}": value for name, value in params.items() if f"own.{name}" in own}
    fits = all(own[name].shape == value.shape for name, value in params.items())
    if not fits or not params or {name for name in own if name.startswith("own.")} - params.keys():
        raise ConfigError(
            f"--init {start.source}: its parameters do not fit this reward model; set the --policy that they were made "
            "with"
        )
    model.load_state_dict(params, strict=False)
    return model

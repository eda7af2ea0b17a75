"""Reward models as rewards: a run of `ascent reward-model`, loaded, and bound to the task that names it.

--reward own 0.5*model:RUN     for tasks in words, with --reward-batch and --reward-device
--reward model:RUN             for sort; the true reward, positions right, is measured beside it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.config import Config
from ascent.engines.given import rate as rate_small
from ascent.policies import CausalLM, LanguageModel
from ascent.policies.base import ValueFunction
from ascent.records import Run, checkpoint
from ascent.tasks import Task, sorting
from ascent.tasks.text import Text
from ascent.tasks.text.base import Message
from ascent.tasks.text.grading import Rater
from ascent.types import Refused, Rollouts, Scores

BATCH = 16


class SmallRater:
    """A reward model of a small world: rollouts in, a number each."""

    def __init__(self, model: ValueFunction, config: Config):
        self.model, self.config = model.eval().requires_grad_(False), config

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "prompt sample 1"]:
        return rate_small(self.model, rollouts)


class WordRater:
    """A reward model of language: chats and responses in, a number each, so many at a time."""

    def __init__(self, lm: LanguageModel, config: Config, batch: int):
        self.lm, self.config, self.batch = lm, config, batch

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "prompt sample 1"]:
        """Of responses in the model's own tokens."""
        from contextlib import nullcontext

        from ascent.engines.language.attention import ours
        from ascent.engines.language.rater import rate

        with ours(self.lm.model) if self.lm.shares else nullcontext():
            return rate(self.lm, rollouts).cpu()

    def rate(self, asked: Sequence[tuple[list[Message] | str, str]]) -> list[float]:
        """Of words: each (chat or prompt, response), tokenised as in the reward model's own training."""
        from ascent.engines.language.demonstrator import shown, tokens_of
        from ascent.tasks.text.tokenized import padded

        found: list[float] = []
        for start in range(0, len(asked), self.batch):
            part = asked[start : start + self.batch]
            chats = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p, _ in part]
            prompt = padded([self.lm.encode(chat) for chat in chats])
            groups = [[tokens_of(self.lm, response, self.config.task.max_tokens)] for _, response in part]
            found += self(shown(prompt, groups, self.config.task.max_tokens)).flatten().tolist()
        return found


def load_reward_model(run: str | Path, device: str | None = None, batch: int = BATCH) -> Any:
    """The reward model of a run's best held-out evaluation, else its newest: call it with rollouts, or `rate` words.

    device: where it runs; None: as it was trained. batch: responses at once.
    """
    found = Run(run)
    config = found.config
    if getattr(config.algorithm.loss, "trains", "") != "rewards":
        raise Refused(f"{run} trained a policy; `ascent reward-model` trains a reward model")
    if isinstance(config.policy, CausalLM) and device is not None:
        config = replace(config, policy=replace(config.policy, device=device))
    return of_checkpoint(config, _best(found), batch)


def _best(run: Run) -> Path:
    """The best checkpoint where it was kept, else the newest."""
    from ascent.records.writer import best_of

    best = best_of(run.metrics) if run.config.keep_best else None
    kept = [path for path in run.checkpoints if best is not None and checkpoint.step_of(path) == best[0]]
    return kept[0] if kept else run.checkpoint()


def of_checkpoint(config: Config, path: Path, batch: int = BATCH) -> SmallRater | WordRater:
    given = checkpoint.params(path)
    if isinstance(config.policy, CausalLM):
        from ascent.engines.language import add_head, load_params, prove

        lm = add_head(config.policy.load(config.seed))
        load_params(lm.trained(), given)
        lm.model.requires_grad_(False)
        prove(lm, config.task.max_prompt + config.task.max_tokens)
        lm.shares &= config.policy.share_prompts
        return WordRater(lm, config, batch)
    model = reward_model(config, torch.Generator())
    model.load_state_dict(given)
    return SmallRater(model, config)


def reward_model(config: Config, generator: torch.Generator) -> ValueFunction:
    """A new reward model of a small world: the policy's shape with a value head."""
    return config.policy.critic(config.policy(config.task.space, generator), False, generator)


# ---- bound to a task ----------------------------------------------------------------------------------


class Rated:
    """A small world whose reward is a reward model's. How many positions are right is measured, and earns nothing."""

    def __init__(self, task: Any, rater: SmallRater):
        self.task, self.rater = task, rater
        theirs, ours = rater.config.task.space, task.space
        if theirs != ours:
            raise Refused(f"--reward {task.reward}: it rates other prompts and responses, {theirs} and not {ours}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def score(self, rollouts: Rollouts) -> Scores:
        true = sorting.score("positions", rollouts, self.task.space)
        value = self.rater(rollouts)
        return Scores(value, true.valid, true.correct, measures={"positions": true.reward.squeeze(-1)})


def bound(task: Any, lm: LanguageModel | None) -> Task:
    """The task as the loop calls it: one in words bound to the model's tokenizer, and either to its learned rewards."""
    from ascent.learned.process import stepped_numbers, stepped_words

    if isinstance(task, Text):
        assert lm is not None
        return stepped_words(task, lm, raters_of(task))
    reward = getattr(task, "reward", "")
    if isinstance(reward, str) and reward.startswith("model:"):
        return Rated(task, load_reward_model(reward.removeprefix("model:")))  # type: ignore[return-value]
    return stepped_numbers(task)


def raters_of(task: Text) -> dict[str, Rater]:
    """The reward models that a task's rewards name, loaded, by their source."""
    named = {reward.source for reward in task.rewards if reward.kind == "model"}
    loaded = {s: load_reward_model(s.removeprefix("model:"), task.reward_device, task.reward_batch) for s in named}
    for source, rater in loaded.items():
        if not isinstance(rater, WordRater):
            raise Refused(f"--reward {source}: that reward model is of the task sort, and reads no words")
    return {source: rater.rate for source, rater in loaded.items()}

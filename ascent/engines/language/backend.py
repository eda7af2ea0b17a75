"""Language models on text tasks, in one process, on a CPU or one GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ascent.core.config import Config
from ascent.core.losses import LogProb
from ascent.core.menu import name_of
from ascent.core.protocols import Learner, Sampler
from ascent.core.types import Prompts, Refused, Streams
from ascent.engines.backend import SAMPLING_SETTINGS, Backend, LearnedReward, Params, Report, Start
from ascent.engines.language.learning.critic import LanguageCritic
from ascent.engines.language.learning.learner import LanguageLearner
from ascent.engines.language.learning.parameters import load_params
from ascent.engines.language.learning.process_reward import LanguageProcessRewardLearner, add_step_head
from ascent.engines.language.learning.reward_model import HEAD, LanguageRewardModelLearner, add_head
from ascent.engines.language.preflight import preflight
from ascent.engines.language.proof import prove
from ascent.engines.language.reward_models import LanguageProcessReward, LanguageRewardModel
from ascent.engines.language.sampling.draw import Support
from ascent.engines.language.sampling.sampler import LanguageSampler
from ascent.engines.offline import OfflineSampler
from ascent.policies.causal_lm import LanguageModel, pick_device
from ascent.tasks.process_rewards import PROCESS_KINDS
from ascent.tasks.text.grading.self_test import self_test
from ascent.tasks.text.learned_rewards import ProcessRewardedTask, RewardModelGrader
from ascent.tasks.text.offline.tokenized import offline_text_task
from ascent.tasks.text.tokenized import TokenizedTask

HEADS = {"rewards": add_head, "steps": add_step_head}
LEARNERS = {"rewards": LanguageRewardModelLearner, "steps": LanguageProcessRewardLearner}
LEARNED = {"rewards": LanguageRewardModel, "steps": LanguageProcessReward}
MODEL_SETTINGS = ("device", "rows")
TASK_SETTINGS = ("max_tokens", "system", "instruction")
COMMANDS = {
    "demonstrations": "--algorithm sft, as in `ascent sft FILE`",
    "pairs": "--algorithm dpo or reward-model, as in `ascent dpo FILE`",
    "steps": "--algorithm process-reward, as in `ascent process-reward FILE`",
}
"""What learns from each kind of offline data."""


class LanguageBackend(Backend):
    name = "language"
    task_kind = "text"
    words = True
    packages = ("transformers", "peft")
    reloads_start = True
    one_prompt_length = False
    typed_prompts_score = False

    def mismatch(self, config: Config) -> str:
        return f"--policy causal-lm with the task {name_of(config.task)}: it has no words to read"

    def check(self, config: Config) -> None:
        """Does the loss learn from what the task has?"""
        offline, data = config.task.data, config.algorithm.loss.data
        if offline == "demonstrations" and data == "samples" and type(config.algorithm.loss) is LogProb:
            return
        if offline == "demonstrations" and data != "demonstrations":
            raise Refused(
                "demonstrations were not sampled by the policy: there is one response per prompt, and no ratio to an "
                "old policy. Set --algorithm sft, which is what `ascent sft` does"
            )
        if offline != data and (offline in ("pairs", "steps") or data in ("pairs", "steps")):
            needed = data if data in ("pairs", "steps") else offline
            raise Refused(
                f"--loss {name_of(config.algorithm.loss)} with the task {name_of(config.task)}: the loss learns from "
                f"{data}, and the task has {offline}. For {needed} there is {COMMANDS[needed]}"
            )

    # ---- what a run is made of

    def model(self, config: Config, streams: Streams, start: Start | None) -> tuple[LanguageModel, tuple[str, ...]]:
        """A reward head is added after the start from a policy, and before the start from another reward model."""
        lm = config.policy.load(config.seed, exact=True)
        notes = _check_sharing(lm, config)
        add = HEADS.get(config.algorithm.loss.trains)
        if add is not None and start is not None and f"{HEAD}.weight" in start.params:
            lm, add = add(lm), None
        if start is not None:
            try:
                load_params(lm.trained(), start.params)
            except Refused as error:
                raise Refused(f"--init {start.source}: {error}") from None
        return lm if add is None else add(lm), notes

    def learner(self, config: Config, model: LanguageModel, streams: Streams) -> Learner:
        algorithm, memory = config.algorithm, (config.micro_batch, config.policy.checkpointing)
        if algorithm.loss.trains != "policy":
            return LEARNERS[algorithm.loss.trains](model, algorithm.update, *memory)
        choice = algorithm.critic
        critic = LanguageCritic(model, choice.shared) if choice.on else None
        kept, outputs = algorithm.reference.kept, algorithm.outputs
        return LanguageLearner(model, algorithm.update, kept, outputs, *memory, critic, choice.update)

    def sampler(self, config: Config, model: LanguageModel, generator: torch.Generator) -> LanguageSampler:
        support = Support(config.top_k, config.top_p, config.min_p)
        return LanguageSampler(
            model, config.task.max_tokens, config.temperature, generator, support, config.policy.rows
        )

    def bind(self, task: Any, model: LanguageModel, rewards: Mapping[str, Any]) -> Any:
        """`rewards`: judges as graders, reward models and process rewards as they were loaded."""
        graders = {
            source: RewardModelGrader(task, reward.rate) if source.startswith("model:") else reward
            for source, reward in rewards.items()
        }
        process = {source: graders.pop(source) for source in rewards if source.startswith(PROCESS_KINDS)}
        return ProcessRewardedTask(task, model, graders, process) if process else TokenizedTask(task, model, graders)

    def offline(self, config: Config, model: LanguageModel, generator: torch.Generator) -> tuple[Any, Sampler]:
        task = offline_text_task(config.task, model, config.data)
        return task, OfflineSampler(task.offline_rollouts)

    def preflight(
        self, config: Config, model: Any, task: Any, learner: Any, sampler: Sampler | None, notes: Sequence[str]
    ) -> Report:
        probe = None
        if config.data == "samples":
            probe = self.sampler(config, model, torch.Generator().manual_seed(config.seed + 4_000_037))
        judges = {source: grader for source, grader in task.graders.items() if source.startswith("judge:")}
        reward = self_test(config.task, judges=judges) if config.data == "samples" else None
        return preflight(config, task, learner, 0 if sampler is None else sampler.rows, probe, reward, notes)

    # ---- what is loaded from a run

    def policy(self, config: Config, params: Params | None) -> LanguageModel:
        lm = config.policy.load(config.seed)
        if params is not None:
            load_params(lm.trained(), params)
        return lm

    def learned_reward(self, config: Config, params: Params, device: str | None, batch: int) -> LearnedReward:
        if device is not None:
            config = replace(config, policy=replace(config.policy, device=device))
        lm = HEADS[config.algorithm.loss.trains](config.policy.load(config.seed))
        load_params(lm.trained(), params)
        lm.model.requires_grad_(False)
        _check_sharing(lm, config)
        return LEARNED[config.algorithm.loss.trains](lm, config, batch)

    def reward_sources(self, task: Any) -> list[str]:
        return list(dict.fromkeys(entry.source for entry in task.rewards if entry.kind not in ("own", "python")))

    def reward_placement(self, task: Any) -> tuple[str | None, int]:
        return task.reward_device, task.reward_batch

    def export(self, config: Config, run: Path, params: Params, folder: Path) -> None:
        """An ordinary Hugging Face folder, in the precision in which the model was trained."""
        policy = config.policy
        if policy.dtype == "auto":
            trained = policy.dtype_on(pick_device("auto"))
            if not policy.lora:  # every parameter is in the checkpoint, as it was
                trained = next(iter(params.values())).dtype
            policy = replace(policy, dtype="bfloat16" if trained == torch.bfloat16 else "float32")
        self.policy(replace(config, policy=replace(policy, device="cpu")), params).save(folder)

    # ---- asking a policy

    def with_settings(self, config: Config, changes: dict[str, Any]) -> Config:
        def among(names: tuple[str, ...]) -> dict[str, Any]:
            return {name: value for name, value in changes.items() if name in names}

        task, policy = replace(config.task, **among(TASK_SETTINGS)), replace(config.policy, **among(MODEL_SETTINGS))
        return replace(config, task=task, policy=policy, **among(SAMPLING_SETTINGS))

    def answering_sampler(
        self, config: Config, policy: LanguageModel, prompts: Prompts, seed: int, version: int
    ) -> LanguageSampler:
        limit, width = config.task.max_tokens, prompts.prompt.shape[1]
        room = getattr(policy.model.config, "max_position_embeddings", None) or width + limit
        if width + limit > room:
            raise Refused(
                f"--max-tokens {limit} with a prompt of {width} tokens: the model has {room} positions; "
                f"lower it to {room - width}"
                if width < room
                else f"the prompt has {width} tokens, and the model {room} positions: shorten it"
            )
        prove(policy, width + limit)
        policy.shares &= config.policy.share_prompts
        sampler = self.sampler(config, policy, torch.Generator().manual_seed(seed))
        sampler.load({}, version)
        return sampler

    def continue_responses(
        self, config: Config, policy: Any, prompts: Prompts, prefixes: list[list[int]], count: int, sampler: Sampler
    ) -> list[list[list[int]]]:
        limit = config.task.max_tokens
        begun = [row[row >= 0].tolist() + tokens for row, tokens in zip(prompts.prompt, prefixes, strict=True)]
        width = max(map(len, begun))
        prompt = torch.tensor([ids + [-1] * (width - len(ids)) for ids in begun])
        left = limit - min(map(len, prefixes))
        drawn = sampler.generate(replace(prompts, prompt=prompt), count, limit=left)
        return [
            [(tokens + ids[mask].tolist())[:limit] for ids, mask in zip(group, masks, strict=True)]
            for tokens, group, masks in zip(prefixes, drawn.response, drawn.mask, strict=True)
        ]

    # ---- other settings of the same kind

    def reward_setting(self, reward: Sequence[str]) -> tuple[str, ...]:
        return tuple(reward)

    def reward_model_task(self, config: Config, pairs: Path) -> tuple[Any, dict[str, Any]]:
        limits = {name: getattr(config.task, name) for name in ("max_prompt", "max_tokens")}
        return f"preferences:{pairs.resolve()}", {"preset": "reward-model", **limits}


def _check_sharing(lm: LanguageModel, config: Config) -> tuple[str, ...]:
    """Prove the forward passes; say it where prompts cannot be shared though they were asked to be."""
    why = prove(lm, config.task.max_prompt + config.task.max_tokens)
    if not config.policy.share_prompts:
        lm.shares = False
        return ()
    if why is None:
        return ()
    return (
        f"prompts are encoded once per response and not once per group: the architecture does not allow it ({why})",
    )

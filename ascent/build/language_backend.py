"""Backend of language models on text tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ascent.build.backend import (
    SAMPLING_SETTINGS,
    Backend,
    InitialParams,
    LearnedReward,
    OfflineEngine,
    Params,
    PreflightReport,
)
from ascent.build.language_reward_model import HEAD, LanguageProcessReward, LanguageRewardModel, add_head
from ascent.build.model_verification import verify_model
from ascent.build.precision import choose_precision, float16_obstacle
from ascent.build.preflight import (
    describe_batch_sizes,
    report_memory,
    report_reward,
    report_sample,
    report_step_time,
    report_update,
)
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.groups import All
from ascent.core.losses import LogProb
from ascent.core.menu import name_of
from ascent.core.protocols import Learner, RolloutEngine
from ascent.core.sampling_params import SamplingParams
from ascent.core.types import Prompts, Streams
from ascent.core.update import Adam
from ascent.distributed.ranks import SINGLE_PROCESS, Ranks, in_ray_cluster, is_torchrun_process
from ascent.inference.continuous_batching import LocalConversationEngine
from ascent.inference.engine import LocalEngine
from ascent.inference.occupancy import OccupancyTimeline
from ascent.inference.remote.adapters import get_adapter
from ascent.inference.remote.relay_client import read_key
from ascent.inference.remote.remote_engine import RemoteEngine
from ascent.inference.remote.request_forwarder import RemoteConversationEngine
from ascent.inference.stop_strings import StopStrings
from ascent.models.causal_lm import PYTHON_MODELS, LanguageModel, is_mixed_precision, pick_device
from ascent.rewards.reward_manager import rate_responses, self_test
from ascent.rewards.tokenized_task import OfflineTextTask, TokenizedTask
from ascent.rollout.conversation_task import bind_text_environment
from ascent.sandbox.sandboxed_reward import check_isolation
from ascent.tasks.reward_sources import FUNCTION_KINDS
from ascent.training.fsdp import ShardedLearner
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from ascent.training.master_weights import load_params
from ascent.training.micro_batches import ACTIVATION_FRACTION, COMPACT_THRESHOLD, state_bytes, static_bytes

REWARD_MODELS = {"rewards": LanguageRewardModel, "steps": LanguageProcessReward}
"""Reward models by training objective (`loss.trains`)."""
OFFLINE_COMMANDS = {
    "pairs": "--algorithm dpo or reward-model, as in `ascent dpo FILE`",
    "steps": "--algorithm process-reward, as in `ascent process-reward FILE`",
}
"""The commands that train on each kind of offline data."""


class LanguageBackend(Backend):
    name = "language"
    task_kind = "text"
    uses_text = True
    packages = ("transformers", "peft")
    seeds_responses = True

    def mismatch(self, config: Config) -> str:
        return f"--policy causal-lm with the task {name_of(config.task)}: its prompts are not text"

    def check(self, config: Config) -> None:
        if "score_norm" in config.algorithm.needs:
            raise ConfigError(
                f"--advantage {name_of(config.algorithm.advantage)} with a language model: the exact ‖∇ log π‖² takes "
                "a gradient per response, which is for small policies. Set --advantage.norm length"
            )
        if config.policy.engine != "local":
            check_engine(config)
        if config.ranks.shard == "shard" and (why := sharding_obstacle(config)) is not None:
            raise ConfigError(f"--ranks.shard shard with {why}. Set replicate, or leave it out")
        if config.policy.optimizer_state == "bfloat16" and not isinstance(config.algorithm.update, Adam):
            raise ConfigError(
                f"--policy.optimizer-state bfloat16 with --update {name_of(config.algorithm.update)}: it is for Adam's "
                "moments. Leave it out"
            )
        offline, data = config.task.data, config.algorithm.loss.data
        if config.task.has_environment and config.data != "samples":
            raise ConfigError(
                "--tools, --environment and --agent answer what the policy samples, and this run learns from "
                f"{config.data}: leave them out"
            )
        if config.task.agent and config.ahead:
            raise ConfigError(
                f"--ahead {config.ahead} with --agent: an episode is drawn whole by one policy. Leave --ahead out"
            )
        if offline == "demonstrations" and data == "samples" and type(config.algorithm.loss) is LogProb:
            return
        if offline == "demonstrations" and data != "demonstrations":
            raise ConfigError(
                "demonstrations were not sampled by the policy: there is one response per prompt, and no ratio to an "
                "old policy. Set --algorithm sft, which is what `ascent sft` does"
            )
        if offline != data and (offline in OFFLINE_COMMANDS or data in OFFLINE_COMMANDS):
            needed = data if data in OFFLINE_COMMANDS else offline
            raise ConfigError(
                f"--loss {name_of(config.algorithm.loss)} with the task {name_of(config.task)}: the loss learns from "
                f"{data}, and the task has {offline}. For {needed} there is {OFFLINE_COMMANDS[needed]}"
            )

    def check_ranks(self, config: Config, size: int) -> None:
        if size and config.policy.engine != "local" and not in_ray_cluster():
            raise ConfigError(f"--engine {config.policy.engine} is not supported under torchrun: set --engine local")
        if size and ":" in config.policy.device:
            raise ConfigError(
                f"--policy.device {config.policy.device} under torchrun: each has a GPU of its own; set cuda"
            )
        if (size > 1 or config.ranks.shard == "shard") and config.policy.optimizer_state == "bfloat16":
            raise ConfigError(
                "--policy.optimizer-state bfloat16 on several ranks: they sum gradients in float32. Leave it out; "
                "--ranks.shard shard needs less memory on each"
            )
        if not size and config.ranks.shard == "shard":
            raise ConfigError(
                "--ranks.shard shard: one process has nothing to share. Start it by torchrun, or leave it out"
            )
        super().check_ranks(config, size)

    def model(
        self, config: Config, streams: Streams, start: InitialParams | None, fresh: bool = False
    ) -> tuple[LanguageModel, tuple[str, ...]]:
        """Load the model and --init. A reward head is added after a policy, or before a reward model, is loaded."""
        lm, why = _load_new_or_resumed(config, fresh)
        trained = lm.device.type == "cuda" or (lm.model.dtype == torch.float32 and not is_torchrun_process())
        notes = why + _verify_policy(lm, config, fused=trained and not config.algorithm.update.full_batch)
        trains, rated = config.algorithm.loss.trains, start is not None and f"{HEAD}.weight" in start.params
        if trains in REWARD_MODELS and rated:
            add_head(lm, trains == "steps")
        if start is not None:
            try:
                load_params(lm.trained(), start.params)
            except ConfigError as error:
                raise ConfigError(f"--init {start.source}: {error}") from None
        if trains in REWARD_MODELS and not rated:
            add_head(lm, trains == "steps")
        return lm, notes

    def resolve_config(self, config: Config, model: LanguageModel) -> Config:
        """Record the chosen precision in the config, so that a resumed run uses it on any device."""
        if config.policy.dtype != "auto" or config.policy.model in PYTHON_MODELS:
            return config
        chosen: Any = "mixed" if is_mixed_precision(model.model) else str(model.model.dtype).removeprefix("torch.")
        return replace(config, policy=replace(config.policy, dtype=chosen))

    def align_precision(self, configs: Mapping[str, Config]) -> Mapping[str, Config]:
        """If only some configs default to float16, use bfloat16 for all."""
        narrow = {name for name, config in configs.items() if float16_obstacle(config) is None}
        if len(narrow) in (0, len(configs)):
            return configs
        plain = {name: replace(configs[name].policy, dtype="bfloat16") for name in narrow}
        return {n: replace(config, policy=plain.get(n, config.policy)) for n, config in configs.items()}

    def learner(self, config: Config, model: LanguageModel, streams: Streams, ranks: Ranks = SINGLE_PROCESS) -> Learner:
        algorithm, memory = config.algorithm, (config.micro_batch, config.policy.checkpointing)
        choice, kept, outputs = algorithm.critic, algorithm.reference.enabled, algorithm.outputs
        learner: LanguageLearner
        if shards_state(config, model, ranks):
            learner = ShardedLearner(
                model, algorithm.update, kept, outputs, *memory, ranks, choice, config.ranks.gather * 2**30
            )
        else:
            critic = LanguageCritic(model, choice.shared) if choice.enabled else None
            rounding = config.seed if uses_bfloat16_state(config, model, critic, ranks) else None
            learner = LanguageLearner(model, algorithm.update, kept, outputs, *memory, critic, choice.update, rounding)
            learner.ranks = ranks
        if algorithm.loss.trains != "policy":
            learner.train_reward(
                partial(REWARD_MODELS[algorithm.loss.trains].read, learner.lm, forward=learner.forward_module)
            )
        return learner

    def rollout_engine(self, config: Config, model: LanguageModel, generator: torch.Generator) -> Any:
        """Return the local engine or, with --engine, a remote one, which starts at the first load of weights.

        In a Ray cluster each replica has the remote engine.
        """
        local = config.policy.engine == "local" or in_ray_cluster()
        return (self.local_engine if local else self.remote_engine)(config, model, generator)

    def remote_engine(self, config: Config, model: LanguageModel, generator: torch.Generator) -> RemoteEngine:
        task = config.task
        stops = StopStrings(task.stop, model.tokenizer, model.vocab_size) if task.stop else None
        longest, most = task.max_prompt + task.max_response_tokens, task.max_tokens if task.has_environment else 0
        kind = RemoteConversationEngine if task.agent else RemoteEngine
        return kind(config.policy, model, task.max_response_tokens, longest, config.temperature, generator, stops, most)

    def local_engine(self, config: Config, model: LanguageModel, generator: torch.Generator) -> LocalEngine:
        task, support = config.task, SamplingParams(config.top_k, config.top_p, config.min_p, config.task.min_tokens)
        stops = StopStrings(task.stop, model.tokenizer, model.vocab_size) if task.stop else None
        how = (config.temperature, generator, support, config.policy.rows, stops)
        kind = LocalConversationEngine if task.agent else LocalEngine
        return kind(
            model, task.max_response_tokens, *how, max_sampled_tokens=task.max_tokens if task.has_environment else 0
        )

    def timeline(self, engine: Any) -> OccupancyTimeline:
        return engine.timeline

    def enable_early_scoring(self, task: Any, engine: Any) -> None:
        if isinstance(engine, LocalEngine) and isinstance(task, TokenizedTask):
            engine.on_responses = task.score_early

    def enable_early_training(self, config: Config, engine: Any, learner: Any) -> None:
        """Enable it only if an update uses all responses: filtering and mini-batches depend on the rewards."""
        whole = config.minibatches == 1 and isinstance(config.algorithm.groups, All)
        if whole and isinstance(engine, LocalEngine) and isinstance(learner, LanguageLearner):
            engine.on_rollouts = learner.begin

    def set_log_folder(self, engine: Any, folder: Path) -> None:
        engine.folder = folder / "engine"

    def dtype(self, model: LanguageModel) -> torch.dtype:
        return model.model.dtype

    def bind(self, task: Any, model: LanguageModel, rewards: Mapping[str, Any]) -> Any:
        """Bind a task to the tokenizer. `rewards` has judges, reward models and process rewards."""
        graders = {
            source: partial(rate_responses, task, reward.rate) if source.startswith("model:") else reward
            for source, reward in rewards.items()
        }
        return bind_text_environment(task, model, lambda encoder: TokenizedTask(task, encoder, graders))

    def offline(self, config: Config, model: LanguageModel, generator: torch.Generator) -> tuple[Any, RolloutEngine]:
        task = OfflineTextTask(config.task, model, config.data)
        return task, OfflineEngine(task.offline_rollouts)

    def preflight(
        self, config: Config, model: Any, task: Any, learner: Any, engine: RolloutEngine | None, notes: Sequence[str]
    ) -> PreflightReport:
        """Report batch sizes, memory, a test of the reward and a first sample, without advancing random streams."""
        report, limits = PreflightReport(describe_batch_sizes(config)), config.task
        room, need = model.max_positions, limits.max_prompt + limits.max_response_tokens
        if room is not None and need > room:
            what = f"--max-prompt {limits.max_prompt} and --max-tokens {limits.max_tokens} make {need} positions"
            if limits.has_environment:
                what = f"a conversation may have {need} tokens (--max-context)"
            report.errors.append(f"{what}, and the model has {room}: lower one of them.")
        here = engine if config.policy.engine == "local" else None
        report_memory(config, learner, 0 if here is None else here.rows, report)
        report_update(config, learner, report)
        report.lines += [f"note       {note}" for note in notes]
        if config.data == "samples":
            judges = {source: grader for source, grader in task.graders.items() if source.startswith("judge:")}
            report_reward(self_test(config.task, judges=judges), report)
        if config.policy.engine != "local":
            where = " ".join(config.policy.engine_url) or f"started from {config.policy.engine_python}"
            report.lines.append(f"engine     {config.policy.engine}, {where}: probed after each load of weights")
        elif config.data == "samples" and not report.errors:
            probe = self.rollout_engine(config, model, torch.Generator().manual_seed(config.seed + 4_000_037))
            sample = report_sample(config, task, probe, report)
            if not config.task.agent:  # short trials of the model cannot predict how long agents take
                report_step_time(config, learner, task, probe, sample, report)
        if config.task.uses_sandbox:
            report.lines.append(f"sandbox    {check_isolation(config.task.sandbox_settings).describe()}")
        report.lines += [f"data       {line}" for line in task.data_notes()]
        return report

    def policy(self, config: Config, params: Params | None) -> LanguageModel:
        return _load_with_params(_in_float32_on_cpu(config.policy), config.seed, params)

    def learned_reward(self, config: Config, params: Params, device: str | None, batch: int) -> LearnedReward:
        if device is not None:
            config = replace(config, policy=replace(config.policy, device=device))
        trains = config.algorithm.loss.trains
        lm = add_head(_in_float32_on_cpu(config.policy).load(config.seed), trains == "steps")
        load_params(lm.trained(), params)
        lm.model.requires_grad_(False)
        _verify_policy(lm, config)
        return REWARD_MODELS[trains](lm, config, batch)

    def reward_sources(self, task: Any) -> list[str]:
        return list(dict.fromkeys(entry.source for entry in task.rewards if entry.kind not in ("own", *FUNCTION_KINDS)))

    def reward_placement(self, task: Any) -> tuple[str | None, int]:
        return task.reward_device, task.reward_batch

    def export(self, config: Config, run: Path, params: Params, folder: Path) -> None:
        """Write an ordinary Hugging Face folder in the precision of training."""
        _load_with_params(replace(config.policy, device="cpu"), config.seed, params).save(folder)

    def with_settings(self, config: Config, changes: dict[str, Any]) -> Config:
        def among(names: tuple[str, ...]) -> dict[str, Any]:
            return {name: value for name, value in changes.items() if name in names}

        task = replace(config.task, **among(("max_tokens", "min_tokens", "stop", "system", "instruction")))
        policy = replace(config.policy, **among(("device", "rows")))
        return replace(config, task=task, policy=policy, **among(SAMPLING_SETTINGS))

    def engine_for_prompts(
        self, config: Config, policy: LanguageModel, prompts: Prompts, seed: int, version: int
    ) -> LocalEngine:
        limit, width = config.task.max_response_tokens, prompts.prompt.shape[1]
        room = policy.max_positions or width + limit
        if width + limit > room:
            raise ConfigError(
                f"--max-tokens {limit} with a prompt of {width} tokens: the model has {room} positions; "
                f"lower it to {room - width}"
                if width < room
                else f"the prompt has {width} tokens, and the model {room} positions: shorten it"
            )
        verify_model(policy, width + limit, config.policy.share_prompts)
        engine = self.local_engine(config, policy, torch.Generator().manual_seed(seed))
        engine.load({}, version)
        return engine

    def serving_engine(self, config: Config, policy: LanguageModel, context: int, version: int) -> Any:
        room = policy.max_positions or context
        if not 2 <= context <= room:
            raise ConfigError(f"--max-context {context}: the model has {room} positions, and a turn takes two or more")
        if config.policy.engine != "local":
            check_temperature(config)
            served = RemoteEngine(config.policy, policy, context, context, config.temperature, torch.Generator())
            return served
        verify_model(policy, context, config.policy.share_prompts)
        support = SamplingParams(config.top_k, config.top_p, config.min_p)
        how = (config.temperature, torch.Generator(), support, config.policy.rows)
        engine = LocalEngine(policy, context, *how)
        engine.load({}, version)
        return engine

    def continue_responses(
        self, config: Config, policy: Any, prompts: Prompts, prefixes: list[list[int]], count: int, engine: Any
    ) -> list[list[list[int]]]:
        begun = [row[row >= 0].tolist() + tokens for row, tokens in zip(prompts.prompt, prefixes, strict=True)]
        width = max(map(len, begun))
        prompt = torch.tensor([ids + [-1] * (width - len(ids)) for ids in begun])
        lengths = torch.tensor([len(tokens) for tokens in prefixes])
        limits = (config.task.max_tokens if prompts.limits is None else prompts.limits) - lengths
        begun_prompts, support = replace(prompts, prompt=prompt, limits=limits), engine.sampling_params
        left, stops = (support.min_tokens - lengths).clamp(min=0), engine.stop_strings
        groups: list[list[list[int]]] = [[] for _ in prefixes]
        for least in left.unique().tolist():  # tokens of a prefix count towards min_tokens
            rows = (left == least).nonzero().flatten()
            engine.sampling_params = replace(support, min_tokens=least)
            drawn = engine.generate(begun_prompts[rows], count, limit=int(limits[rows].max()))
            for row, group, masks in zip(rows.tolist(), drawn.response, drawn.mask, strict=True):
                groups[row] = [prefixes[row] + ids[mask].tolist() for ids, mask in zip(group, masks, strict=True)]
        engine.sampling_params = support
        for tokens, group in zip(prefixes, groups, strict=True) if stops else ():  # a stop string may begin in a prefix
            start = max(len(tokens), support.min_tokens - 1)
            group[:] = [ids[: stops.end(ids, start) or len(ids)] for ids in group]
        return groups

    def reward_setting(self, reward: Sequence[str]) -> tuple[str, ...]:
        return tuple(reward)

    def reward_model_task(self, config: Config, pairs: Path) -> tuple[Any, dict[str, Any]]:
        limits = {name: getattr(config.task, name) for name in ("max_prompt", "max_tokens")}
        return f"preferences:{pairs.resolve()}", {"preset": "reward-model", **limits}


def _verify_policy(lm: LanguageModel, config: Config, fused: bool = False) -> tuple[str, ...]:
    """Verify the forward passes; return a note if the architecture does not support share_prompts."""
    longest, share = config.task.max_prompt + config.task.max_response_tokens, config.policy.share_prompts
    sampled = config.algorithm.loss.trains == "policy" and config.task.data == "samples"
    why = verify_model(lm, longest, share, sampled, fused)
    if why is None or not share:
        return ()
    return (
        f"prompts are encoded once per response and not once per group: the architecture does not allow it ({why})",
    )


def check_engine(config: Config) -> None:
    """Raise ConfigError for settings that a serving engine does not support or report."""
    engine, adapter = f"--engine {config.policy.engine}", get_adapter(config.policy.engine)
    if config.policy.engine_key_env or config.policy.engine_key_file:
        read_key(config.policy.engine_key_env, config.policy.engine_key_file, "--engine.")
    check_temperature(config)
    if (config.top_k, config.top_p, config.min_p, config.task.min_tokens) != (0, 1.0, 0.0, 0):
        raise ConfigError(
            f"--top-k, --top-p, --min-p or --min-tokens with {engine}: {adapter.truncation_note}. Leave them out, or "
            "set --engine local"
        )
    if config.data != "samples":
        raise ConfigError(f"{engine} samples, and this run learns from {config.data}: leave it out")


def check_temperature(config: Config) -> None:
    """Raise ConfigError if the temperature is below the minimum of the serving engine."""
    engine, min_temperature = config.policy.engine, get_adapter(config.policy.engine).min_temperature
    if config.temperature < min_temperature:
        raise ConfigError(
            f"--temperature {config.temperature:g} with --engine {engine}: it samples from another distribution below "
            f"{min_temperature:g}. Set {min_temperature:g} or more, or --engine local"
        )


def _in_float32_on_cpu(policy: Any) -> Any:
    """Return the policy in float32 if it runs on a CPU, where half precision is slow; the parameters are the same."""
    if policy.dtype == "auto" or policy.model in PYTHON_MODELS or pick_device(policy.device).type != "cpu":
        return policy
    return replace(policy, optimizer_state="auto", dtype="float32")


def _load_with_params(policy: Any, seed: int, params: Params | None) -> LanguageModel:
    """Load the model of a policy with these parameters, or with its initial ones."""
    lm = policy.load(seed)
    if params is not None:
        load_params(lm.trained(), params)
    return lm


def _load_new_or_resumed(config: Config, fresh: bool) -> tuple[LanguageModel, tuple[str, ...]]:
    """Load the model for training; return it with a note if a new run cannot use the default float16."""
    policy = config.policy
    if not fresh or float16_obstacle(config) is not None:
        return policy.load(config.seed, keep_full_precision=True), ()
    lm = replace(policy, dtype="float16").load(config.seed, keep_full_precision=True)
    dtype, why = choose_precision(config, lm)
    if why is None:
        return lm, ()
    del lm
    return replace(policy, dtype=dtype).load(config.seed, keep_full_precision=True), (
        f"parameters are not in float16: {why}",
    )


def sharding_obstacle(config: Config) -> str | None:
    """Return why a run cannot be sharded with FSDP2, or None if it can."""
    update = config.algorithm.update
    if update.full_batch:
        return f"--update {name_of(update)}: FSDP2 does not differentiate twice, as Fisher products do"
    if config.policy.dtype == "float16":
        return "--policy.dtype float16: float16 gradients are not supported with FSDP2"
    if config.policy.bits:
        return "--policy.bits 4: FSDP2 does not support packed 4-bit parameters"
    return None


def shards_state(config: Config, lm: LanguageModel, ranks: Ranks) -> bool:
    """Return whether the trained state is sharded over ranks; by default only if it does not fit one GPU."""
    if ranks is SINGLE_PROCESS or config.ranks.shard == "replicate":
        return False
    if config.ranks.shard == "shard":
        return True
    if ranks.world_size == 1 or lm.device.type != "cuda" or sharding_obstacle(config) is not None:
        return False
    return state_bytes(lm) > ACTIVATION_FRACTION * lm.gpu_memory


def uses_bfloat16_state(config: Config, lm: LanguageModel, critic: Any, ranks: Ranks) -> bool:
    """Return whether gradients and moments are in bfloat16; by default only if float32 leaves too little GPU memory."""
    requested, adam = config.policy.optimizer_state, isinstance(config.algorithm.update, Adam)
    supported = adam and ranks.world_size == 1 and any(p.dtype == torch.bfloat16 for p in lm.trained().values())
    if requested == "bfloat16" and not supported:
        raise ConfigError(
            f"--policy.optimizer-state bfloat16 is for parameters in bfloat16, and on {lm.device} they are in "
            f"{str(lm.model.dtype).removeprefix('torch.')}: set --policy.dtype bfloat16, or leave it out"
        )
    if requested != "auto" or not supported or lm.device.type != "cuda":
        return supported and requested == "bfloat16"
    taken = static_bytes(lm, config.algorithm.reference.enabled, critic)
    return taken > COMPACT_THRESHOLD * lm.gpu_memory

"""What the loop is handed: the task, the sampler and the learner of a config, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ascent.config import Config
from ascent.engines import Learner, LocalLearner, LocalSampler, Sampler
from ascent.evaluate import evaluator
from ascent.losses import LogProb
from ascent.policies import CausalLM, LanguageModel, Policy
from ascent.records import Run, checkpoint
from ascent.tasks import Task
from ascent.tasks.text import Demonstrations, Text
from ascent.train import Streams
from ascent.types import Metrics, Refused


@dataclass
class Parts:
    """A config come to life."""

    config: Config
    task: Task
    """The config's task; a language world bound to its model's tokenizer."""
    policy: Policy | LanguageModel
    sampler: Sampler
    learner: Learner
    streams: Streams
    notes: tuple[str, ...] = ()
    """What a person should know of how these were made."""

    def evaluator(self) -> Callable[[], Metrics]:
        if isinstance(self.config.task, Demonstrations):
            from ascent.engines.language import held_out_logp

            shown = self.sampler.generate(self.task.held_out(self.config.eval_prompts), 1)
            return held_out_logp(self.learner, shown)  # type: ignore[arg-type]
        small = self.policy if isinstance(self.policy, Policy) else None
        return evaluator(self.config, self.task, self.sampler, small)

    def close(self) -> None:
        """End what was started for the run: the processes that compute rewards."""
        close = getattr(self.task, "close", None)
        if close is not None:
            close()


def assemble(config: Config, fresh: bool = True) -> Parts:
    """The parts of a config; not `fresh`: a checkpoint will fill in the parameters."""
    torch.set_num_threads(config.threads or torch.get_num_threads())
    words, model = isinstance(config.task, Text), isinstance(config.policy, CausalLM)
    if words and not model:
        raise Refused("a task in words needs a language model: set --policy causal-lm and --model NAME_OR_FOLDER")
    if model and not words:
        raise Refused(f"--policy causal-lm with the task {type(config.task).__name__.lower()}: it has no words to read")
    return _language(config) if model else _small(config, fresh)


def _small(config: Config, fresh: bool) -> Parts:
    algorithm = config.algorithm
    if config.top_k or config.top_p < 1 or config.min_p:
        raise Refused("--top-k, --top-p and --min-p are for language models: leave them out here")
    streams = Streams(config.seed)
    policy = config.policy(config.task.space, streams.sampling)
    if config.init is not None and fresh:
        _load_params(policy, source_of(Path(config.init)))
    choice = algorithm.critic
    critic = config.policy.critic(policy, choice.shared, streams.critic) if choice.on else None
    learner = LocalLearner(
        policy,
        algorithm.update,
        algorithm.reference.kept,
        algorithm.outputs,
        config.micro_batch,
        critic,
        choice.update,
    )
    sampler = LocalSampler(policy, config.temperature, streams.sampling)
    return Parts(config, config.task, policy, sampler, learner, streams)


def _language(config: Config) -> Parts:
    """A language model's parts. The model is loaded and started from --init even before a checkpoint is.

    For the reference is not in a checkpoint unless it has moved: it is what training started from.
    """
    from ascent.engines.language import LanguageCritic, LanguageLearner, LanguageSampler, Support, prove
    from ascent.tasks.text.tokenized import Tokenized

    algorithm, streams = config.algorithm, Streams(config.seed)
    support = Support(config.top_k, config.top_p, config.min_p)
    config.task.verify()
    lm = config.policy.load(config.seed)
    notes = _prove(lm, config, prove)
    _start_from(lm, config)
    choice = algorithm.critic
    learner = LanguageLearner(
        lm,
        algorithm.update,
        algorithm.reference.kept,
        algorithm.outputs,
        config.micro_batch,
        config.policy.checkpointing,
        LanguageCritic(lm, choice.shared) if choice.on else None,
        choice.update,
    )
    limit = config.task.max_tokens
    if isinstance(config.task, Demonstrations):
        return _demonstrated(config, lm, learner, streams, notes)
    sampler = LanguageSampler(lm, limit, config.temperature, streams.sampling, support, config.policy.rows)
    notes += (sampler.note,) if sampler.note else ()
    return Parts(config, Tokenized(config.task, lm), lm, sampler, learner, streams, notes)


def _demonstrated(config: Config, lm: LanguageModel, learner: Any, streams: Streams, notes: tuple[str, ...]) -> Parts:
    """SFT: the same learner, and a sampler that reads the responses from the file."""
    from ascent.engines.language import Demonstrator
    from ascent.tasks.text.shown import Shown

    if config.samples != 1 or not isinstance(config.algorithm.loss, LogProb):
        raise Refused(
            "demonstrations were not sampled by the policy, so there is one a prompt and no ratio to an old policy: "
            "set --samples 1 --loss log-prob, which is what `ascent sft` does"
        )
    task = Shown(config.task, lm)
    sampler = Demonstrator(lm, config.task.max_tokens, task.demonstration)
    return Parts(config, task, lm, sampler, learner, streams, notes)


def _prove(lm: LanguageModel, config: Config, prove: Callable[..., str | None]) -> tuple[str, ...]:
    why = prove(lm, config.task.max_prompt + config.task.max_tokens)
    if not config.policy.share_prompts:
        lm.shares = False
        return ()
    if why is None:
        return ()
    return (f"prompts are encoded once a response, not once a group, for this architecture does not allow it ({why})",)


def _start_from(lm: LanguageModel, config: Config) -> None:
    from ascent.engines.language import load_params

    if config.init is None:
        return
    source = source_of(Path(config.init))
    try:
        load_params(lm.trained(), checkpoint.params(source))
    except Refused as error:
        raise Refused(f"--init {source}: {error}") from None


def source_of(given: Path) -> Path:
    """The folder with the params.safetensors that --init means: a run's newest checkpoint, or this very one."""
    source = given
    if (given / "run.json").exists():
        found = Run(given).checkpoints
        if not found:
            raise Refused(f"--init {given}: that run has no checkpoint yet")
        source = found[-1]
    if not (source / "params.safetensors").exists():
        raise Refused(f"--init {given}: neither a run nor a folder with params.safetensors")
    return source.resolve()


def _load_params(policy: Policy, source: Path) -> None:
    given: dict[str, Any] = checkpoint.params(source)
    try:
        policy.load_state_dict(given)
    except RuntimeError:
        raise Refused(
            f"--init {source}: its parameters do not fit this policy and task; set the --policy, --length and "
            "--numbers that it was trained with"
        ) from None

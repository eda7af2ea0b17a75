"""What the loop is handed: the task, the sampler and the learner of a config, in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ascent.config import Config
from ascent.engines import Learner, LocalLearner, LocalSampler, Sampler
from ascent.engines.given import Given, LocalRater
from ascent.engines.stepwise import LocalStepper
from ascent.evaluate import Keep, evaluator, pair_evaluator
from ascent.learned.process import steps_evaluator
from ascent.learned.rewards import bound, reward_model
from ascent.losses import LogProb
from ascent.menu import name_of
from ascent.policies import CausalLM, LanguageModel, Policy
from ascent.policies.base import ValueFunction
from ascent.preferences import PairLoss
from ascent.records import Run, checkpoint
from ascent.tasks import Task
from ascent.tasks.examples import Exhibited
from ascent.tasks.steps import Stepwise
from ascent.tasks.text import Demonstrations, Preferences, Steps, Text
from ascent.train import Streams
from ascent.types import Metrics, Refused


@dataclass
class Parts:
    """A config come to life."""

    config: Config
    task: Task
    """The config's task; a language world bound to its model's tokenizer."""
    policy: Policy | ValueFunction | LanguageModel
    """What is trained: a policy, or a reward model."""
    sampler: Sampler
    learner: Learner
    streams: Streams
    notes: tuple[str, ...] = ()
    """What a person should know of how these were made."""

    judged: tuple[Task, Sampler] | None = None
    """What held-out answers are drawn with and scored by, where the loop's own sampler and task only show some."""

    def evaluator(self, keep: Keep | None = None) -> Callable[[], Metrics]:
        loss, found = self.config.algorithm.loss, []
        if isinstance(loss, PairLoss):
            pairs = self.sampler.generate(self.task.held_out(self.config.eval_prompts), 2)
            found.append(pair_evaluator(self.learner, loss, pairs))
        elif loss.data == "steps":
            steps = self.sampler.generate(self.task.held_out(self.config.eval_prompts), 1)
            found.append(steps_evaluator(self.learner, steps, self.task.score(steps).reward))
        elif isinstance(self.config.task, Demonstrations):
            from ascent.engines.language import held_out_logp

            shown = self.sampler.generate(self.task.held_out(self.config.eval_prompts), 1)
            found.append(held_out_logp(self.learner, shown))  # type: ignore[arg-type]
        task, sampler = self.judged or (self.task, self.sampler)
        if self.judged is not None or not found:
            small = self.policy if isinstance(self.policy, Policy) else None
            found.append(evaluator(self.config, task, sampler, small, keep))
        return lambda: {name: value for evaluate in found for name, value in evaluate().items()}

    def close(self) -> None:
        """End what was started for the run: the processes that compute rewards."""
        for task in (self.task, *(self.judged or ())[:1]):
            getattr(task, "close", lambda: None)()


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
    if trains_rewards(config):
        return small_rater(config, streams, fresh)
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
    task, sampler = bound(config.task, None), LocalSampler(policy, config.temperature, streams.sampling)
    if algorithm.loss.data == "samples":
        return Parts(config, task, policy, sampler, learner, streams)
    shown = Exhibited(config.task, algorithm.loss.data, streams.sampling)
    return Parts(config, shown, policy, Given(shown.space, shown.show), learner, streams, judged=(task, sampler))


def _language(config: Config) -> Parts:
    """A language model's parts. The model is loaded and started from --init even before a checkpoint is.

    For the reference is not in a checkpoint unless it has moved: it is what training started from.
    """
    from ascent.engines.language import LanguageCritic, LanguageLearner, LanguageSampler, Support, prove

    algorithm, streams = config.algorithm, Streams(config.seed)
    support = Support(config.top_k, config.top_p, config.min_p)
    config.task.verify()
    refuse_unshown(config)
    lm = config.policy.load(config.seed, exact=True)
    notes = _prove(lm, config, prove)
    if trains_rewards(config):
        return language_rater(config, lm, streams, notes)
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
    if isinstance(config.task, Demonstrations | Preferences):
        task, shower = shown_to(config, lm)
        return Parts(config, task, lm, shower, learner, streams, notes)
    sampler = LanguageSampler(lm, limit, config.temperature, streams.sampling, support, config.policy.rows)
    notes += (sampler.note,) if sampler.note else ()
    if algorithm.loss.data == "demonstrations":  # the task's own right responses
        task, shower = shown_to(config, lm)
        return Parts(config, task, lm, shower, learner, streams, notes, judged=(bound(config.task, lm), sampler))
    return Parts(config, bound(config.task, lm), lm, sampler, learner, streams, notes)


# ---- what is shown, and reward models ---------------------------------------------------------------


def trains_rewards(config: Config) -> bool:
    """Is a reward model trained, or a process reward, and no policy?"""
    return getattr(config.algorithm.loss, "trains", "policy") != "policy"


def refuse_unshown(config: Config) -> None:
    """Refuse a loss that learns from something else than a task in words has."""
    data, task = config.algorithm.loss.data, config.task
    if isinstance(task, Demonstrations) and data != "demonstrations" and type(config.algorithm.loss) is not LogProb:
        raise Refused(
            "demonstrations were not sampled by the policy, so there is one a prompt and no ratio to an old policy: "
            "set --algorithm sft, which is what `ascent sft` does"
        )
    if isinstance(task, Preferences) != (data == "pairs"):
        raise Refused(
            f"--loss {name_of(config.algorithm.loss)} with the task {name_of(task)}: it learns from {data}. Pairs are "
            "for --algorithm dpo or reward-model, as in `ascent dpo FILE`, and these for pairs"
        )
    if isinstance(task, Steps) != (data == "steps"):
        raise Refused(
            f"--loss {name_of(config.algorithm.loss)} with the task {name_of(task)}: it learns from {data}. Labelled "
            "steps are for --algorithm process-reward, as in `ascent process-reward FILE`"
        )


def shown_to(config: Config, lm: LanguageModel) -> tuple[Task, Sampler]:
    """A task in words as what it shows, and the sampler that reads it out."""
    from ascent.engines.language import Demonstrator
    from ascent.engines.language.stepwise import StepDemonstrator
    from ascent.tasks.text.shown import Shown
    from ascent.tasks.text.stepped import Stepped

    if config.algorithm.loss.data == "steps":
        stepped = Stepped(config.task, lm)
        return stepped, StepDemonstrator(lm, config.task.max_tokens, stepped.show)
    task = Shown(config.task, lm, config.algorithm.loss.data == "pairs")
    return task, Demonstrator(lm, config.task.max_tokens, task.responses)


def small_rater(config: Config, streams: Streams, fresh: bool) -> Parts:
    model = reward_model(config, streams.sampling)
    if config.init is not None and fresh:
        start_rater(model, checkpoint.params(source_of(Path(config.init))), config.init)
    steps = config.algorithm.loss.data == "steps"
    shown: Any = (
        Stepwise(config.task, config.task.labels) if steps else Exhibited(config.task, "pairs", streams.sampling)
    )
    learner = (LocalStepper if steps else LocalRater)(model, config.algorithm.update, config.micro_batch)
    return Parts(config, shown, model, Given(shown.space, shown.show), learner, streams)


def language_rater(config: Config, lm: LanguageModel, streams: Streams, notes: tuple[str, ...]) -> Parts:
    """The head comes after the start from a policy, and before that from a reward model."""
    from ascent.engines.language.rater import LanguageRater, add_head
    from ascent.engines.language.stepwise import LanguageStepper, add_step_head

    steps = config.algorithm.loss.data == "steps"
    of_rewards = config.init is not None and "rating.weight" in checkpoint.params(source_of(Path(config.init)))
    for step in (lambda: _start_from(lm, config), lambda: (add_step_head if steps else add_head)(lm))[
        :: -1 if of_rewards else 1
    ]:
        step()
    kind = LanguageStepper if steps else LanguageRater
    learner = kind(lm, config.algorithm.update, config.micro_batch, config.policy.checkpointing)
    task, shower = shown_to(config, lm)
    return Parts(config, task, lm, shower, learner, streams, notes)


def start_rater(model: ValueFunction, given: dict[str, Any], source: str) -> None:
    """From another reward model, or from the backbone of a policy."""
    own = model.state_dict()
    found = given if own.keys() == given.keys() else {f"own.{k}": v for k, v in given.items() if f"own.{k}" in own}
    fits = all(own[k].shape == v.shape for k, v in found.items())
    if not fits or not found or {k for k in own if k.startswith("own.")} - found.keys():
        raise Refused(
            f"--init {source}: its parameters do not fit this reward model; set the --policy they were made with"
        )
    model.load_state_dict(found, strict=False)


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

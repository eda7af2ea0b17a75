"""A backend makes everything that belongs to one kind of policy.

The kind is decided once, from the config (`backends.backend_of`). Afterwards nobody asks what kind a policy or a task
is: callers hold a backend, a bound task, a sampler and a learner. A new engine is a folder with a backend, and one line
in `backends.BACKENDS`; tests/build/test_backends.py then holds it to the contract.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.menu import name_of
from ascent.core.protocols import Learner, RolloutEngine, Task
from ascent.core.types import Prompts, Rollouts, Streams
from ascent.distributed.ranks import SINGLE_PROCESS, Ranks, in_ray_cluster
from ascent.inference.occupancy import OccupancyTimeline

Params = dict[str, Tensor]
SAMPLING_SETTINGS = ("temperature", "top_k", "top_p", "min_p")


class BoundTask(Task, Protocol):
    """A task bound to its policy's tokenizer and its learned rewards: the interface that workflows use."""

    stop_token_ids: frozenset[int]
    """The tokens that end a response."""
    epoch_sampler: Any
    """Order of the rows (`tasks.epochs.EpochSampler`); None: the task has no rows."""
    conversations: Any
    """Starts the conversations of prompts (`Prompts.start_episodes`); None: responses have a single turn."""

    def response_text(self, ids: Sequence[int]) -> str:
        """Return a response as it is graded, without the token that ended it."""

    def response_record(self, ids: Sequence[int]) -> Any:
        """Return a response as JSONL files store it: text or a list of numbers, without the token that ended it."""

    def token_text(self, token: int) -> str:
        """Return the text of one token."""

    def readable_prompt(self, prompts: Prompts | Rollouts, index: int) -> Any:
        """Return a prompt for display and for files: a `tasks.base.ReadablePrompt`."""

    def normalize_answer(self, response: str, answer: Any) -> str:
        """Extract the answer of a response in a normal form, so that a majority vote can count equal answers."""

    def encode_prompts(self, texts: Sequence[str], plain: bool) -> tuple[Prompts, list[str]]:
        """Return prompts that a user typed, and their text; `plain`: without the task's instruction."""

    def split_steps(self, ids: list[int], separator: str) -> tuple[list[Any], list[int]]:
        """Return the steps of a response as JSONL files store them, and the indices of their last tokens."""

    def data_notes(self) -> list[str]:
        """Describe the rows that were left out of the data."""


class OfflineEngine(RolloutEngine):
    """Answers each prompt with what was written down: a demonstration, a preference pair, or labelled steps.

    So the loop, its records and its checkpoints are the same for offline data as for sampled responses.
    """

    limit = 0

    def __init__(self, rollouts: Callable[[Prompts], Rollouts]):
        self.rollouts, self.version = rollouts, -1

    def load(self, params: Params, version: int) -> None:
        self.version = version

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        rollouts = self.rollouts(prompts)
        if rollouts.mask.shape[1] != samples:
            raise ValueError(f"the data has {rollouts.mask.shape[1]} responses per prompt, not {samples}")
        return replace(rollouts, version=torch.full((*rollouts.mask.shape[:2], 1), self.version))


class LearnedReward:
    """A reward model or a process reward, loaded from a run: rollouts in, a number per response or per token."""

    batch: int = 1 << 30
    """Responses that it rates at once."""

    def __init__(self, model: Any, read: Callable[[Any, Rollouts], Tensor], config: Config):
        self.model, self.read, self.config = model, read, config

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> Tensor:
        return self.read(self.model, rollouts)


class InitialParams(NamedTuple):
    """Parameters to start training from, and the folder that holds them."""

    source: Path
    params: Params


@dataclass
class PreflightReport:
    """What a pre-flight says, line by line, and what stands in the way."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def text(self) -> str:
        return "\n".join([*self.lines, *(f"warning    {w}" for w in self.warnings)])

    def raise_on_errors(self) -> None:
        if self.errors:
            raise ConfigError(" ".join(self.errors) + " (--no-preflight continues all the same)")


class Backend(ABC):
    """Makes what a run of one kind of policy needs. It holds no state of its own."""

    name: ClassVar[str]
    """A policy choice names its backend by this (its class attribute `backend`; without one, `small`)."""
    task_kind: ClassVar[str]
    """The kind of task that its policies read (a task's class attribute `kind`)."""
    uses_text: ClassVar[bool] = False
    """Are prompts and responses words? Only then can a judge read them; but a prompt is then of any length, and a
    typed one has no answer to score a response by."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Packages whose versions run.json lists, beside those of every run."""
    seeds_responses: ClassVar[bool] = False
    """Has every response a seed of its own? Then any rank may draw it."""
    can_enumerate: ClassVar[bool] = False
    """Can its policies give the probability of every response, where there are few? Then E[R] is exact."""

    # ---- refusals

    @abstractmethod
    def mismatch(self, config: Config) -> str:
        """Why a policy of this backend cannot be trained on the config's task, which is of another kind."""

    @abstractmethod
    def check(self, config: Config) -> None:
        """Refuse, before any work, what this backend cannot do."""

    def check_ranks(self, config: Config, size: int) -> None:
        """Refuse what this backend cannot do on a group of this many ranks; 0: there is no group."""
        if config.ahead and size and not in_ray_cluster():
            raise ConfigError(
                f"--ahead {config.ahead} under torchrun: how far sampling gets ahead would depend on the number of "
                "ranks, and so would the numbers of the run. Leave --ahead out, or start it by `ascent cluster`"
            )

    def check_task(self, config: Config, task: Any, flag: str) -> None:  # noqa: B027 (most tasks of a kind will do)
        """Refuse another task that the policy of a config cannot read."""

    # ---- what a run is made of

    @abstractmethod
    def model(
        self, config: Config, streams: Streams, start: InitialParams | None, fresh: bool = False
    ) -> tuple[Any, tuple[str, ...]]:
        """What is trained: a policy, or a model with a reward head; and what a person should know of it.

        `fresh`: for a new run, which may choose what its config leaves open; others take what was always taken.
        """

    def resolve_config(self, config: Config, model: Any) -> Config:
        """The config of a new run with what its model was chosen to be."""
        return config

    def align_precision(self, configs: Mapping[str, Config]) -> Mapping[str, Config]:
        """Settings that are compared, without what they would choose differently though nobody asked for it."""
        return configs

    @abstractmethod
    def learner(self, config: Config, model: Any, streams: Streams, ranks: Ranks = SINGLE_PROCESS) -> Learner: ...

    @abstractmethod
    def rollout_engine(self, config: Config, model: Any, generator: torch.Generator) -> RolloutEngine: ...

    def timeline(self, engine: RolloutEngine) -> OccupancyTimeline | None:
        """Where its sampler notes how many responses it decodes at once; None: always all of them."""
        return None

    def set_log_folder(self, engine: RolloutEngine, folder: Path) -> None:  # noqa: B027 (most samplers start nothing)
        """Tell a sampler that starts processes where their logs go: into the run's folder."""

    def enable_early_scoring(self, task: Any, engine: Any) -> None:  # noqa: B027 (small policies are drawn whole)
        """Let a sampler hand responses over to the task's scoring while it draws others, where it can."""

    def enable_early_training(self, config: Config, engine: Any, learner: Any) -> None:  # noqa: B027 (most learners wait)
        """Let a learner begin with a step's rollouts before they are scored, where it can."""

    def dtype(self, model: Any) -> torch.dtype:
        """What log-probs are computed in: that of the sampler or of the learner, whichever is coarser."""
        return torch.float32

    @abstractmethod
    def bind(self, task: Any, model: Any, rewards: Mapping[str, Any]) -> BoundTask:
        """The task as the loop calls it. `rewards`: what `reward_sources` names, loaded, by source."""

    @abstractmethod
    def offline(self, config: Config, model: Any, generator: torch.Generator) -> tuple[BoundTask, RolloutEngine]:
        """The task as a source of offline data (config.data), and the sampler that reads it out."""

    def preflight(
        self,
        config: Config,
        model: Any,
        task: Task,
        learner: Learner,
        engine: RolloutEngine | None,
        notes: Sequence[str],
    ) -> PreflightReport | None:
        """What to know before a run begins; None: there is nothing to look at. No `sampler`: nothing is sampled."""
        return None

    # ---- what is loaded from a run

    @abstractmethod
    def policy(self, config: Config, params: Params | None) -> Any:
        """A policy to be asked and not to be trained: of a checkpoint's parameters, or untrained."""

    @abstractmethod
    def learned_reward(self, config: Config, params: Params, device: str | None, batch: int) -> LearnedReward:
        """The reward model or process reward of a run's checkpoint."""

    def reward_sources(self, task: Any) -> list[str]:
        """The learned rewards and judges that a task names: model:RUN, process:RUN, process-score:RUN, judge:FILE."""
        return []

    def reward_placement(self, task: Any) -> tuple[str | None, int]:
        """Where the task's learned rewards run (None: as they were trained), and responses that they rate at once."""
        return None, 16

    def export(self, config: Config, run: Path, params: Params, folder: Path) -> None:
        """Write the policy of a run's checkpoint as a folder that other libraries load."""
        raise ConfigError(
            f"{run} trained a small policy of Ascent's own, which no other library loads. In Python: "
            f'ascent.load("{run}").policy; its parameters are in {run}/checkpoints/*/params.safetensors'
        )

    # ---- asking a policy

    def with_settings(self, config: Config, changes: dict[str, Any]) -> Config:
        """The config with other ways to sample. ConfigError: what its policies do not know."""
        for name in changes:
            if name != "temperature":
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for language models: {name_of(config.task)} does not use it"
                )
        return replace(config, **changes)

    def engine_for_prompts(
        self, config: Config, policy: Any, prompts: Prompts, seed: int, version: int
    ) -> RolloutEngine:
        """A sampler for these prompts, whose draws the seed decides."""
        return self.rollout_engine(config, policy, torch.Generator().manual_seed(seed))

    def serving_engine(self, config: Config, policy: Any, context: int, version: int) -> Any:
        """A sampler for requests of up to so many tokens, prompts counted."""
        raise ConfigError("this policy reads and writes numbers: there is nothing to say to it over HTTP")

    @abstractmethod
    def continue_responses(
        self,
        config: Config,
        policy: Any,
        prompts: Prompts,
        prefixes: list[list[int]],
        count: int,
        engine: RolloutEngine,
    ) -> list[list[list[int]]]:
        """`count` whole responses per prefix, [prompt][sample], which may run past their end tokens."""

    # ---- other settings of the same kind

    def reward_setting(self, reward: Sequence[str]) -> Any:
        """Rewards as the task's field `reward` has them."""
        return reward[0] if len(reward) == 1 else tuple(reward)

    @abstractmethod
    def reward_model_task(self, config: Config, pairs: Path) -> tuple[Any, dict[str, Any]]:
        """The task, and settings of it, for a reward model that learns from a file of the policy's pairs."""

"""The backend of a kind of policy makes its model, learner, rollout engine and bound task.

The backend is chosen once, from the config (`backends.backend_of`). Other code uses a backend, a bound task, a rollout
engine and a learner without checking the kind of policy. To add a kind, add a subclass and list it in
`backends.BACKENDS`; tests/build/test_backends.py checks its contract.
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
    """An engine that returns stored responses: demonstrations, preference pairs or labelled steps.

    It lets the training loop, run files and checkpoints treat offline data like sampled responses.
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
    """A reward model or process reward loaded from a run: maps rollouts to a score per response or per token."""

    batch: int = 1 << 30
    """Number of responses rated per batch."""

    def __init__(self, model: Any, read: Callable[[Any, Rollouts], Tensor], config: Config):
        self.model, self.read, self.config = model, read, config

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> Tensor:
        return self.read(self.model, rollouts)


class InitialParams(NamedTuple):
    """Initial parameters of training, and the folder that they come from."""

    source: Path
    params: Params


@dataclass
class PreflightReport:
    """The lines, warnings and errors of a pre-flight check."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def text(self) -> str:
        return "\n".join([*self.lines, *(f"warning    {w}" for w in self.warnings)])

    def raise_on_errors(self) -> None:
        if self.errors:
            raise ConfigError(" ".join(self.errors) + " (--no-preflight continues all the same)")


class Backend(ABC):
    """Factory for the parts of a run, for one kind of policy. It is stateless."""

    name: ClassVar[str]
    """Name that a policy choice refers to by its class attribute `backend` (default: `small`)."""
    task_kind: ClassVar[str]
    """The kind of task that its policies are trained on (a task's class attribute `kind`)."""
    uses_text: ClassVar[bool] = False
    """Whether prompts and responses are text. Only text can be judged, but prompts then have any length, and prompts
    that a user types have no reference answer."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Further packages whose versions run.json records."""
    seeds_responses: ClassVar[bool] = False
    """Whether each response has its own seed, so that any rank can sample it."""
    can_enumerate: ClassVar[bool] = False
    """Whether policies can compute the probability of every response of a small space, so that E[R] is exact."""

    # ---- checks of a config

    @abstractmethod
    def mismatch(self, config: Config) -> str:
        """Return why a policy of this backend cannot be trained on the config's task, which is of another kind."""

    @abstractmethod
    def check(self, config: Config) -> None:
        """Raise ConfigError for settings that this backend does not support."""

    def check_ranks(self, config: Config, size: int) -> None:
        """Raise ConfigError for settings that are not supported on `size` ranks; 0: not started by torchrun."""
        if config.ahead and size and not in_ray_cluster():
            raise ConfigError(
                f"--ahead {config.ahead} under torchrun: how far sampling gets ahead would depend on the number of "
                "ranks, and so would the numbers of the run. Leave --ahead out, or start it by `ascent cluster`"
            )

    def check_task(self, config: Config, task: Any, flag: str) -> None:  # noqa: B027 (most backends accept every task of their kind)
        """Raise ConfigError if the policy of a config cannot be evaluated on another task."""

    # ---- parts of a run

    @abstractmethod
    def model(
        self, config: Config, streams: Streams, start: InitialParams | None, fresh: bool = False
    ) -> tuple[Any, tuple[str, ...]]:
        """Return the model to train, a policy or a reward model, and notes to the user.

        Only for a new run (`fresh`) may settings that the config leaves open be chosen by measurement.
        """

    def resolve_config(self, config: Config, model: Any) -> Config:
        """Return the config of a new run with the choices that `model` made, such as its precision."""
        return config

    def align_precision(self, configs: Mapping[str, Config]) -> Mapping[str, Config]:
        """Return the configs of a comparison with the same default precision."""
        return configs

    @abstractmethod
    def learner(self, config: Config, model: Any, streams: Streams, ranks: Ranks = SINGLE_PROCESS) -> Learner: ...

    @abstractmethod
    def rollout_engine(self, config: Config, model: Any, generator: torch.Generator) -> RolloutEngine: ...

    def timeline(self, engine: RolloutEngine) -> OccupancyTimeline | None:
        """Return the engine's record of how many sequences it decodes over time; None: always the whole batch."""
        return None

    def set_log_folder(self, engine: RolloutEngine, folder: Path) -> None:  # noqa: B027 (most engines start no process)
        """Set the folder for the logs of processes that the engine starts."""

    def enable_early_scoring(self, task: Any, engine: Any) -> None:  # noqa: B027 (small policies finish all responses at once)
        """Let the engine pass finished responses to the task's rewards while it generates others, if it can."""

    def enable_early_training(self, config: Config, engine: Any, learner: Any) -> None:  # noqa: B027 (most learners need complete batches)
        """Let the learner start on a step's rollouts before their rewards are known, if it can."""

    def dtype(self, model: Any) -> torch.dtype:
        """Return the dtype of log-probs: the lower precision of engine and learner."""
        return torch.float32

    @abstractmethod
    def bind(self, task: Any, model: Any, rewards: Mapping[str, Any]) -> BoundTask:
        """Bind a task to a model. `rewards` has the loaded rewards named by `reward_sources`."""

    @abstractmethod
    def offline(self, config: Config, model: Any, generator: torch.Generator) -> tuple[BoundTask, RolloutEngine]:
        """Return the task as a source of offline data (config.data), and the engine that returns these data."""

    def preflight(
        self,
        config: Config,
        model: Any,
        task: Task,
        learner: Learner,
        engine: RolloutEngine | None,
        notes: Sequence[str],
    ) -> PreflightReport | None:
        """Check a run before it begins; None: no checks. `engine` is None if nothing is sampled."""
        return None

    # ---- loading from a run

    @abstractmethod
    def policy(self, config: Config, params: Params | None) -> Any:
        """Return a policy for inference, with a checkpoint's parameters or, without them, untrained."""

    @abstractmethod
    def learned_reward(self, config: Config, params: Params, device: str | None, batch: int) -> LearnedReward:
        """Return the reward model or process reward of a run's checkpoint."""

    def reward_sources(self, task: Any) -> list[str]:
        """Return the learned rewards and judges of a task: model:RUN, process:RUN, process-score:RUN, judge:FILE."""
        return []

    def reward_placement(self, task: Any) -> tuple[str | None, int]:
        """Return the device of the task's learned rewards (None: the one of their training) and their batch size."""
        return None, 16

    def export(self, config: Config, run: Path, params: Params, folder: Path) -> None:
        """Write the policy of a run's checkpoint as a folder that other libraries load."""
        raise ConfigError(
            f"{run} trained a small policy of Ascent's own, which no other library loads. In Python: "
            f'ascent.load("{run}").policy; its parameters are in {run}/checkpoints/*/params.safetensors'
        )

    # ---- sampling from a policy

    def with_settings(self, config: Config, changes: dict[str, Any]) -> Config:
        """Return the config with other sampling settings; raise ConfigError for unsupported ones."""
        for name in changes:
            if name != "temperature":
                raise ConfigError(
                    f"--{name.replace('_', '-')} is for language models: {name_of(config.task)} does not use it"
                )
        return replace(config, **changes)

    def engine_for_prompts(
        self, config: Config, policy: Any, prompts: Prompts, seed: int, version: int
    ) -> RolloutEngine:
        """Return an engine for these prompts; the seed determines its samples."""
        return self.rollout_engine(config, policy, torch.Generator().manual_seed(seed))

    def serving_engine(self, config: Config, policy: Any, context: int, version: int) -> Any:
        """Return an engine for requests of up to `context` tokens, including their prompts."""
        raise ConfigError("this policy reads and writes numbers, not text: it cannot be served over HTTP")

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
        """Sample `count` complete responses per prefix, [prompt][sample]; tokens may follow the end token."""

    # ---- settings of related runs

    def reward_setting(self, reward: Sequence[str]) -> Any:
        """Convert rewards to the form of the task's field `reward`."""
        return reward[0] if len(reward) == 1 else tuple(reward)

    @abstractmethod
    def reward_model_task(self, config: Config, pairs: Path) -> tuple[Any, dict[str, Any]]:
        """Return the task and settings to train a reward model on a file of pairs of the policy's responses."""

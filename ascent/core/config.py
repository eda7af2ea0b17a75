"""Config: a whole run in one frozen object. `settings.py` makes one from flags, presets and files."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ascent.core.algorithms import MENU, Algorithm
from ascent.core.errors import ConfigError
from ascent.core.groups import Overlong, WithSignal
from ascent.core.menu import name_of, to_dict
from ascent.core.types import check_counts


@dataclass(frozen=True)
class RankSettings:
    """Processes that train one model together under torchrun. Their numbers are those of one process."""

    shard: Literal["auto", "replicate", "shard"] = "auto"
    """Where a language model is: replicate, all on every rank; shard, a part on each; auto: in shards if large."""
    deadline: float = 600.0
    """Seconds that ranks wait for each other; a rank that does not come ends the run."""
    gather: float = 32.0
    """GiB of state in shards up to which rank 0 writes a checkpoint; above it each rank writes its own part."""

    def __post_init__(self) -> None:
        if not self.deadline > 0:
            raise ConfigError(f"--ranks.deadline is {self.deadline:g}: set a number of seconds above 0")


@dataclass(frozen=True)
class Config:
    """All settings of a run: those that determine its results, and how it is recorded."""

    task: Any
    """Where prompts and rewards come from."""
    policy: Any
    """What is trained."""
    algorithm: Algorithm
    """One choice per axis of the menu."""
    steps: int = 100
    """Rollout batches in the run."""
    data_epochs: float | None = None
    """Epochs over the task's rows; sets --steps."""
    prompts: int = 64
    """Prompts per step."""
    samples: int = 8
    """Responses per prompt: G, the size of a group."""
    ahead: int = 0
    """Maximum staleness: steps by which rollouts may be generated ahead of training."""
    epochs: int = 1
    """Epochs over a rollout batch."""
    minibatches: int = 1
    """Optimizer steps per epoch over a rollout batch."""
    micro_batch: int = 0
    """Tokens per forward pass, prompts included; 0: what fits. It affects memory, never the gradient."""
    temperature: float = 1.0
    """Sampling temperature, also of the log-probs of engine and learner."""
    top_k: int = 0
    """Sample from the k most likely tokens only; 0: from all. Language models only, like --top-p and --min-p."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with this probability mass."""
    min_p: float = 0.0
    """Sample from tokens whose probability is at least this fraction of the highest one."""
    old_logp: Literal["auto", "sampler", "learner"] = "auto"
    """Source of logp_old: the engine or the learner. auto: the learner if rounding would change the ratio."""
    seed: int = 0
    """Seed of all random numbers of the run."""
    init: str | None = None
    """A run, or a folder with params.safetensors, to start from. None: random parameters."""
    eval_every: int = 10
    """Steps between evaluations on held-out prompts; the last step is always evaluated."""
    eval_prompts: int = 1000
    """Maximum number of held-out prompts."""
    checkpoint_every: int = 50
    """Steps between checkpoints; the last step always has one."""
    keep: int = 2
    """Checkpoints to keep."""
    keep_best: bool = False
    """Save and keep the best evaluation's checkpoint too."""
    record_every: int = 10
    """Steps between recorded rollouts."""
    record_rollouts: str = "4"
    """Groups to record in such a step; `all`: every group of every step; `none`: nothing, and no held-out answers."""
    max_reward_errors: float = 0.1
    """Fraction of a step's rewards that may fail before the run stops."""
    max_mismatch: float = 0.3
    """The run stops when the log-probs of sampler and learner differ by more than this on average."""
    track: tuple[str, ...] = ()
    """Trackers that get every metric too: tensorboard, wandb, trackio, mlflow."""
    ranks: RankSettings = RankSettings()
    """How several processes share the work, if there are several."""
    threads: int = 0
    """Threads of torch; 0: all cores, or a share where others compute. Another number gives other last bits."""

    def __post_init__(self) -> None:
        check_counts(1, **{name: getattr(self, name) for name in _ONE_OR_MORE})
        check_counts(0, **{name: getattr(self, name) for name in _NOT_NEGATIVE})
        if not self.temperature > 0:
            raise ConfigError(f"--temperature is {self.temperature:g}: it divides the logits, so set it above 0")
        if self.samples < 2 and self.algorithm.advantage.group_relative:
            raise ConfigError(
                f"--samples 1 with --advantage {name_of(self.algorithm.advantage)}: it compares the responses to a "
                "prompt, and is 0 for a single response. Set --samples 2 or more, or --advantage raw, "
                "running-mean or greedy"
            )
        if self.samples < 2 and isinstance(self.algorithm.groups, WithSignal):
            why = "it trains on groups whose rewards differ, and those of a group of one never do"
            raise ConfigError(f"--samples 1 with --groups with-signal: {why}. Set --samples 2 or more, or --groups all")
        if self.minibatches > self.prompts:
            why = "mini-batches are cut between prompts, so there cannot be more of them than prompts"
            raise ConfigError(f"--minibatches {self.minibatches} with --prompts {self.prompts}: {why}")
        if self.algorithm.update.full_batch and self.epochs * self.minibatches > 1:
            raise ConfigError(
                f"--update {name_of(self.algorithm.update)} with --epochs {self.epochs} --minibatches "
                f"{self.minibatches}: its region is around the policy that sampled, so set both to 1"
            )
        if self.old_logp == "auto" and ("logp_old" in self.algorithm.needs or self.task.has_environment):
            # A correction measures the gap between the two. With environments, the rounding depends on arrival times.
            object.__setattr__(self, "old_logp", "learner")
        if self.old_logp == "sampler" and "logp_old" in self.algorithm.needs:
            axis = "correction" if self.algorithm.correction.enabled else "advantage"
            raise ConfigError(
                f"--{axis} {name_of(getattr(self.algorithm, axis))} with --old-logp sampler: it weighs the gap between "
                "the two, which is then 0 by definition. Set --old-logp learner"
            )
        if self.ahead:
            self._check_ahead()
        if not (self.record_rollouts in ("all", "none") or self.record_rollouts.isdigit()):
            raise ConfigError(f"--record-rollouts {self.record_rollouts}: a number of groups, `all` or `none`")
        self.task.check_prompts(self.prompts)
        shaping, limit = self.algorithm.shaping, self.task.space.limit
        if isinstance(shaping, Overlong) and self.task.space.end is not None and shaping.margin >= limit:
            raise ConfigError(
                f"--shaping.margin {shaping.margin} with a limit of {limit} tokens: every response would be punished. "
                f"Set it below {limit}, or --shaping no-shaping"
            )

    def _check_ahead(self) -> None:
        """Raise a ConfigError for --ahead if nothing corrects or bounds the staleness of the tokens."""
        algorithm, set_it = self.algorithm, "Set --correction truncated (with --old-logp learner)"
        if self.data != "samples":
            raise ConfigError(
                f"--ahead {self.ahead}: this run learns from {self.data}, and samples nothing. Leave it out"
            )
        if algorithm.correction.enabled:
            return
        if algorithm.loss.high is None:
            why = "nothing bounds or weighs how far older policies are from the one that is trained"
            raise ConfigError(f"--ahead {self.ahead} with --loss {name_of(algorithm.loss)}: {why}. {set_it}")
        if self.old_logp == "learner":
            why = "its ratio begins at 1 whoever drew the tokens"
            raise ConfigError(f"--ahead {self.ahead} with --old-logp learner and no correction: {why}. {set_it}")
        object.__setattr__(self, "old_logp", "sampler")

    @property
    def data(self) -> str:
        """Return the kind of training data: that of the task, or for a task that scores, that of the loss."""
        return self.task.data if self.task.data != "samples" else self.algorithm.loss.data

    def to_dict(self) -> dict[str, Any]:
        """Return every setting, resolved; `settings.flatten` reads it back."""
        axes = {axis: to_dict(getattr(self.algorithm, axis)) for axis in MENU}
        choices = {name: to_dict(getattr(self, name)) for name in ("task", "policy")} | axes
        skip = (*choices, "ranks", "algorithm")
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skip}
        return {**choices, "ranks": asdict(self.ranks), **plain}


_COUNTS = ("steps", "prompts", "samples", "epochs", "minibatches")
_ONE_OR_MORE = (*_COUNTS, "eval_every", "eval_prompts", "checkpoint_every", "keep", "record_every")
_NOT_NEGATIVE = ("ahead", "micro_batch", "seed", "max_reward_errors", "threads")

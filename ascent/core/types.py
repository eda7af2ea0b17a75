"""Prompts, rollouts and batches, and the axes of their tensors.

A batch holds `prompt` prompts with `sample` responses each, and every response has up to `token` tokens. Index t of a
per-token tensor is the t-th response token: its log-prob, or the value of the state before it. A tensor of token
length 1 belongs to the whole response and broadcasts.

There are four log-probs, each with its own name:

    logp          of the current policy; the only one with a gradient
    logp_old      of the policy at the start of the step, computed by the learner (or taken from the engine)
    logp_ref      of the reference policy
    logp_sampler  of the sampling policy, as the rollout engine computed it

All are over the full vocabulary, at the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ascent.core.errors import ConfigError

RolloutsT = TypeVar("RolloutsT", bound="Rollouts")
PerToken = Float[Tensor, "prompt sample token"]
Metrics = dict[str, int | float]
State = dict[str, float]
"""State of the algorithm between steps (running baseline, KL coefficient), which checkpoints save."""


def check_counts(minimum: int = 1, **counts: Any) -> None:
    """Raise a ConfigError, with the name of the flag, for a count below the minimum."""
    for name, count in counts.items():
        if count is not None and not count >= minimum:
            raise ConfigError(f"--{name.replace('_', '-')} is {count}: it has to be at least {minimum}")


class Streams:
    """The random generators of a run, one per purpose, all seeded from the run's seed.

    `sampling` initializes the parameters and then samples every response; nothing else may use it.
    """

    def __init__(self, seed: int):
        self.sampling = torch.Generator().manual_seed(seed)
        self.prompts = torch.Generator().manual_seed(seed + 1_000_003)
        self.order = torch.Generator().manual_seed(seed + 2_000_003)
        self.critic = torch.Generator().manual_seed(seed + 3_000_003)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in vars(self).items()}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        for name, generator in vars(self).items():
            generator.set_state(state[name])


@dataclass(frozen=True)
class Space:
    """Vocabulary and lengths of a task's prompts and responses."""

    prompt_length: int
    vocab: int
    """Number of response tokens, 0 … vocab−1, including the end token."""
    limit: int
    """Maximum number of tokens of a response."""
    end: int | None = None
    """The token that ends a response; None: every response has exactly `limit` tokens."""


@dataclass(frozen=True)
class Scores:
    """A task's scores of rollouts."""

    reward: Float[Tensor, "prompt sample #token"]
    valid: Bool[Tensor, "prompt sample"]
    """False where the reward could not be computed."""
    correct: Bool[Tensor, "prompt sample"] | None
    """Whether the response is exactly right; None: unknown."""
    errors: tuple[str, ...] = ()
    """One error message for each response that could not be scored."""
    measures: dict[str, Float[Tensor, "prompt sample"]] = field(default_factory=dict)
    """Other measures of each response, by name: a lenient score, the parts of a reward."""
    notes: np.ndarray | None = None
    """An explanation of each response's reward, [prompt sample]."""


@dataclass(frozen=True)
class Prompts:
    """Prompts and the task's problems that they belong to."""

    prompt: Int[Tensor, "prompt position"]
    """Shorter prompts are padded with −1, which is not a token."""
    problem: Int[Tensor, "prompt"]
    """The task's identifier of each problem, by which it scores the responses."""
    epoch: float | None = None
    """Epochs over the task's rows, these prompts included; None: there are no rows, or these are drawn at random."""
    limits: Int[Tensor, "prompt"] | None = None
    """Maximum number of generated tokens of a response to each prompt, if it differs between prompts."""
    start_episodes: Callable[[Prompts, int, list[int]], Any] | None = None
    """Starts the environments of the responses, given prompts, samples and one seed each; None: single-turn."""

    @classmethod
    def of(cls, prompt: Int[Tensor, "prompt position"]) -> Prompts:
        """Return prompts that are the whole problem, as in small tasks; they are numbered in order."""
        return cls(prompt, torch.arange(len(prompt)))

    def __len__(self) -> int:
        return len(self.prompt)

    def __getitem__(self, which: slice | Tensor) -> Prompts:
        limits = None if self.limits is None else self.limits[which]
        return Prompts(self.prompt[which], self.problem[which], None, limits, self.start_episodes)


@dataclass(frozen=True)
class Rollouts:
    """Generated responses. A response is everything after its prompt: actions and observations.

    `mask` marks the tokens that the policy generated; only they have advantage, weight and loss. `present` marks all
    tokens, observations included; the rest is padding, which need not be at the end. The end token is an action, so it
    is in the mask. Masks come from the engine, never from comparing ids with a pad id.
    """

    prompt: Int[Tensor, "prompt position"]
    """Shorter prompts are padded with −1, which is not a token."""
    response: Int[Tensor, "prompt sample token"]
    mask: Bool[Tensor, "prompt sample token"]
    logp_sampler: PerToken
    limit: int
    """Maximum number of generated tokens of a response (small tasks count observations too)."""
    truncated: Bool[Tensor, "prompt sample"]
    """True where a limit of tokens or turns ended a response; not an end token, a stop string or the environment."""
    limits: Int[Tensor, "prompt"] | None = None
    """The limit of each prompt, if it differs between prompts."""
    can_end: bool = True
    """Whether there is an end token. If not, all responses have exactly `limit` tokens, and none is too long."""
    temperature: float = 1.0
    version: Int[Tensor, "prompt sample #token"] = field(default=None)  # type: ignore[assignment]
    """Policy version (step) that generated each token, or each response; −1 if the engine does not report it."""
    sampled: bool = True
    """False for offline data: it has no log-probs, and `logp_sampler` is 0."""
    kept_mass: PerToken | None = None
    """Probability mass kept by top-k, top-p and min-p at each token; None: they are off."""
    problem: Int[Tensor, "prompt"] | None = None
    """The task's identifier of each prompt's problem; None: the prompt is the whole problem."""
    present: Bool[Tensor, "prompt sample token"] = field(default=None)  # type: ignore[assignment]
    """True at tokens, observations included; by default everything up to the last action."""
    turn: Int[Tensor, "prompt sample token"] | None = None
    """The turn of a conversation that each token belongs to, counted from 0."""
    reward: Float[Tensor, "prompt sample #token"] | None = None
    """Rewards from the environment, to which the task's score is added."""
    environment_seconds: PerToken | None = None
    """Seconds that the environment took to answer the turn that ends with each token."""
    valid: Bool[Tensor, "prompt sample"] | None = None
    """False where the rollout itself failed."""
    notes: np.ndarray | None = None
    """A note for people on each response, [prompt sample]."""

    def __post_init__(self) -> None:
        if self.present is None:
            object.__setattr__(self, "present", self.mask.flip(-1).cumsum(-1).flip(-1) > 0)
        if self.version is None:
            object.__setattr__(self, "version", torch.full((*self.mask.shape[:2], 1), -1))

    @cached_property
    def all_actions(self) -> bool:
        """Return whether every token is an action, without observations and padding."""
        return bool(self.mask.all())

    @cached_property
    def has_gaps(self) -> bool:
        """Return whether there is padding before a token."""
        return not self.all_actions and bool((self.present[..., 1:] & ~self.present[..., :-1]).any())

    @property
    def length(self) -> Int[Tensor, "prompt sample"]:
        """Return the number of generated tokens of each response."""
        return self.mask.sum(-1)

    @property
    def extent(self) -> Int[Tensor, "prompt sample"]:
        """Return the index after the last token of each response, that of its final state."""
        next_index = torch.arange(1, self.present.shape[-1] + 1, device=self.present.device)
        return torch.where(self.present, next_index, 0).amax(-1)

    def select(self: RolloutsT, prompts: Tensor | slice, samples: slice = slice(None)) -> RolloutsT:
        """Return a copy with these prompts, and these samples of them."""
        selected: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor | np.ndarray):
                of_numpy = isinstance(value, np.ndarray) and not isinstance(prompts, slice)
                value = value[np.asarray(prompts) if of_numpy else prompts]
                if value.ndim > 1 and f.name not in ("prompt", "reward_greedy"):
                    value = value[:, samples]
                selected[f.name] = value
        return replace(self, **selected)


@dataclass(frozen=True)
class Batch(Rollouts):
    """Rollouts with rewards, and the fields that the loop adds: log-probs, values, advantages, weights."""

    reward: Float[Tensor, "prompt sample #token"] = field(default=None)  # type: ignore[assignment]
    valid: Bool[Tensor, "prompt sample"] = field(default=None)  # type: ignore[assignment]
    """False where the rollout or its reward failed: such responses are in no statistic and no denominator."""
    correct: Bool[Tensor, "prompt sample"] | None = None
    """The strict score: whether the response is exactly right."""

    errors: tuple[str, ...] = ()
    """Error messages of the rewards that failed in this step."""
    measures: Float[Tensor, "prompt sample measure"] | None = None
    measure_names: tuple[str, ...] = ()
    prompt_index: Int[Tensor, "prompt"] | None = None
    """The prompt's place in the step's batch, by which records find it in a mini-batch."""

    logp_old: PerToken | None = None
    logp_ref: PerToken | None = None
    kl_full: PerToken | None = None
    """KL(π_old ‖ π_ref) over the whole vocabulary, at each state."""
    score_norm: Float[Tensor, "prompt sample 1"] | None = None
    """‖∇ log π(response)‖², exact."""
    reward_greedy: Float[Tensor, "prompt 1 1"] | None = None
    """Reward of one greedy response per prompt, which is not trained on."""
    value: Float[Tensor, "prompt sample state"] | None = None
    """V of the state before each token, and of the one after the last; `returns` are its targets."""

    advantage: Float[Tensor, "prompt sample #token"] | None = None
    returns: PerToken | None = None
    correction: Float[Tensor, "prompt sample #token"] | None = None
    excluded: Bool[Tensor, "prompt sample"] | None = None
    """True where a response is not trained on, although its reward counts in its group; None: none is."""
    weight: PerToken | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    progress: float = 0.0
    """The fraction of the run before this step, which schedules use."""
    minibatch_tokens: int | None = None
    """In a part of a mini-batch, `tokens` of the whole mini-batch."""

    @cached_property
    def loss_mask(self) -> Bool[Tensor, "prompt sample token"]:
        """Return the tokens that are trained on: actions of responses that are valid and not excluded."""
        return self.mask & (self.valid if self.excluded is None else self.valid & ~self.excluded).unsqueeze(-1)

    @cached_property
    def tokens(self) -> int:
        """Return the number of trained tokens, in the whole mini-batch if this is a part of one."""
        return int(self.loss_mask.sum()) if self.minibatch_tokens is None else self.minibatch_tokens

    def add(self, **new: Any) -> Batch:
        """Return a copy with new values of some fields (`replace` without `__post_init__`, at a tenth of its cost)."""
        names, added = self.__dataclass_fields__, object.__new__(type(self))
        assert new.keys() <= names.keys()
        vars(added).update({name: value for name, value in vars(self).items() if name in names}, **new)
        return added

    def sub_batch(self, prompts: Tensor | slice, samples: slice = slice(None)) -> Batch:
        """Return a part of this mini-batch, for one forward pass or one rank, which keeps `tokens` of the whole.

        Weights and advantages were computed over the whole, so losses of the parts add up to that of the whole.
        """
        return self.select(prompts, samples).add(minibatch_tokens=self.tokens)

    def minibatches(self, epochs: int, count: int, rng: torch.Generator) -> Iterator[Batch]:
        """Yield the mini-batches of `epochs` epochs, each a random split of the prompts into `count` parts.

        With count 1 every epoch yields the same object, so that its cached properties and weights are computed once.
        """
        for _ in range(epochs):
            if count == 1:
                yield self
                continue
            order = torch.randperm(len(self.prompt), generator=rng)
            for part in order.tensor_split(min(count, len(order))):
                yield self.select(part.sort().values)

    def microbatches(self, responses: int) -> Iterator[Batch]:
        """Yield parts of at most `responses` whole responses (0: all at once); this affects memory, not results."""
        prompts, samples = self.mask.shape[:2]
        if responses <= 0 or responses >= prompts * samples:
            yield self
        elif responses >= samples:
            step = responses // samples
            for start in range(0, prompts, step):
                yield self.sub_batch(slice(start, start + step))
        else:
            for prompt in range(prompts):
                for start in range(0, samples, responses):
                    yield self.sub_batch(slice(prompt, prompt + 1), slice(start, start + responses))


def to_batch(rollouts: Rollouts, **added: Any) -> Batch:
    """Return the rollouts with added fields, as a batch."""
    return Batch(**{f.name: getattr(rollouts, f.name) for f in fields(rollouts)} | added)


def join(batches: list[RolloutsT]) -> RolloutsT:
    """Concatenate batches, or rollouts, along the prompt axis; responses are padded to the longest."""
    if len(batches) == 1:
        return batches[0]
    width = max(b.mask.shape[2] for b in batches)
    position = max(b.prompt.shape[1] for b in batches)
    joined: dict[str, Any] = {}
    for f in fields(batches[0]):
        values = [getattr(b, f.name) for b in batches]
        if isinstance(values[0], np.ndarray):
            joined[f.name] = np.concatenate(values)
        elif isinstance(values[0], Tensor):
            if f.name == "prompt":
                values = [torch.nn.functional.pad(v, (0, position - v.shape[1]), value=-1) for v in values]
            elif f.name in PER_TOKEN_FIELDS or (f.name != "measures" and any(v.shape[2:] > (1,) for v in values)):
                values = [_pad_tokens(v, f.name, b, width) for v, b in zip(values, batches, strict=True)]
            joined[f.name] = torch.cat(values)
    return replace(batches[0], **joined)


PER_TOKEN_FIELDS = ("response", "mask", "present", "logp_sampler", "kept_mass", "turn", "environment_seconds")
"""Fields whose last axis is always the token axis."""


def _pad_tokens(value: Tensor, name: str, batch: Rollouts, width: int) -> Tensor:
    """Return a field of one batch, padded to the token length of the joined batch."""
    if name not in PER_TOKEN_FIELDS and value.shape[-1] == 1:  # per response here, but per token in another batch
        value = per_token_reward(batch, value) if name == "reward" else value.expand(batch.mask.shape)
    return torch.nn.functional.pad(value, (0, width - value.shape[-1]))


@dataclass(frozen=True)
class Outputs:
    """Outputs of the learner's training forward pass, with gradients."""

    logp: PerToken
    entropy: PerToken
    kl_full: PerToken | None = None
    """KL(π ‖ π_ref) over the whole vocabulary at each state, if the loss needs it."""
    rating: Float[Tensor, "prompt sample #token"] | None = None
    """A reward model's score of each response, or a process reward's of each token; log-probs are then 0."""
    value: Float[Tensor, "prompt sample state"] | None = None
    """V at each state before an action, of a critic that shares the policy's update."""


@dataclass(frozen=True)
class Terms:
    """The value of an objective, to be maximized, and metrics that add up over micro-batches."""

    objective: Float[Tensor, ""]
    sums: dict[str, Tensor]
    """Sums over tokens, without gradient, which are reported divided by the mini-batch's token count."""
    means: dict[str, Tensor] = field(default_factory=dict)
    """Weighted sums, without gradient, reported as they are."""


def reward_to_go(reward: Float[Tensor, "prompt sample #token"]) -> Float[Tensor, "prompt sample #token"]:
    """Return R_t = Σ_{u ≥ t} r_u. An outcome reward (token length 1) is its own reward-to-go."""
    return reward if reward.shape[-1] == 1 else reward.flip(-1).cumsum(-1).flip(-1)


def per_token_reward(batch: Rollouts, reward: Float[Tensor, "prompt sample #token"]) -> PerToken:
    """Return a reward per token: an outcome reward is put on the last action of each response."""
    if reward.shape[-1] > 1:
        return reward
    last = (batch.mask.cumsum(-1) == batch.length.unsqueeze(-1)) & batch.mask
    return torch.where(last, reward, 0.0)


def rewards_on_actions(batch: Rollouts, reward: PerToken) -> PerToken:
    """Move each reward that came with an observation to the last action before it, or else to the first action."""
    if batch.all_actions:
        return reward
    order = (~batch.mask).to(torch.uint8).argsort(dim=-1, stable=True)  # actions first
    place = order.gather(-1, (batch.mask.cumsum(-1) - 1).clamp(min=0))
    reward = torch.where(batch.present & batch.mask.any(-1, keepdim=True), reward, 0.0)
    return torch.zeros_like(reward).scatter_add(-1, place, reward)


def add_outcome(batch: Batch, outcome: Float[Tensor, "prompt sample 1"]) -> Float[Tensor, "prompt sample #token"]:
    """Add a reward of the whole response to the batch's reward; if that is per token, to the last action."""
    return batch.reward + (outcome if batch.reward.shape[-1] == 1 else per_token_reward(batch, outcome))

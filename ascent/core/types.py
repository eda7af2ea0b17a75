"""The vocabulary of Ascent: axes, rollouts, batches and the two kinds of error.

Axes are words. A batch holds `prompt` prompts with `sample` responses each, and every response has up to `token`
tokens. Index t of a per-token tensor is the t-th response token: its log-probability, or the value of the state
before it. A tensor of token length 1 belongs to the whole response and broadcasts.

Four log-probabilities have four names, and never stand in for one another:

    logp          the policy that is being trained, now; the only one with a gradient
    logp_old      the policy when this batch was sampled; a constant
    logp_ref      the reference policy; a constant
    logp_sampler  what the sampler said when it drew the token; a constant

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

Some = TypeVar("Some", bound="Rollouts")
PerToken = Float[Tensor, "prompt sample token"]
Metrics = dict[str, int | float]
State = dict[str, float]
"""What choices remember from step to step: small, named numbers that the checkpoint saves."""


def check_counts(least: int = 1, **counts: Any) -> None:
    """Refuse a count below the least that makes sense, by the name of its flag."""
    for name, count in counts.items():
        if count is not None and not count >= least:
            raise ConfigError(f"--{name.replace('_', '-')} is {count}: it has to be at least {least}")


class Streams:
    """Every source of randomness in a run, each with its own generator, all from one seed.

    `sampling` draws the first parameters and then every response: nothing else may draw from it.
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
    """What a policy must know of a task: the shapes of its prompts and responses."""

    prompt_length: int
    vocab: int
    """Response tokens are 0 … vocab−1, the end token among them."""
    limit: int
    """The most tokens that a response may have."""
    end: int | None = None
    """The token that ends a response; None: every response has exactly `limit` tokens."""


@dataclass(frozen=True)
class Scores:
    """What a task says of rollouts: a value, whether it could be computed, and why not."""

    reward: Float[Tensor, "prompt sample #token"]
    valid: Bool[Tensor, "prompt sample"]
    correct: Bool[Tensor, "prompt sample"] | None
    """Exactly right? None: nobody can say."""
    errors: tuple[str, ...] = ()
    """One reason for each response that could not be scored."""
    measures: dict[str, Float[Tensor, "prompt sample"]] = field(default_factory=dict)
    """More that was measured of each response, by name: a lenient score, the parts of a reward."""
    notes: np.ndarray | None = None
    """Why each response has the reward that it has, [prompt sample], in words."""


@dataclass(frozen=True)
class Prompts:
    """Prompts, and which problem of its task each of them is: what a task draws and a sampler answers."""

    prompt: Int[Tensor, "prompt position"]
    """Shorter prompts are padded with −1, which is not a token."""
    problem: Int[Tensor, "prompt"]
    """The identity by which the task finds the problem again: it never looks one up by its tokens."""
    epoch: float | None = None
    """Passes over the task's rows once these are drawn; None: it has no rows, or they were drawn anew."""
    limits: Int[Tensor, "prompt"] | None = None
    """The most tokens of a response to each of them that are drawn, where the task has limits of several sizes."""
    play: Callable[[Prompts, int, list[int]], Any] | None = None
    """Makes what answers the turns of their responses, from prompts, samples and a seed for each; None: one turn."""

    @classmethod
    def of(cls, prompt: Int[Tensor, "prompt position"]) -> Prompts:
        """Prompts that are the whole problem, as in small tasks; their identity is their place."""
        return cls(prompt, torch.arange(len(prompt)))

    def __len__(self) -> int:
        return len(self.prompt)

    def __getitem__(self, which: slice | Tensor) -> Prompts:
        limits = None if self.limits is None else self.limits[which]
        return Prompts(self.prompt[which], self.problem[which], None, limits, self.play)


@dataclass(frozen=True)
class Rollouts:
    """What a sampler returns: a response is everything after its prompt, actions and observations.

    `mask` says which tokens the policy drew: they alone have credit, weight and loss. `present` says which
    tokens are there at all, observations too: they are the context of those behind them. Neither needs to be a
    prefix. The end token is an action like any other, so it is in the mask. Masks come from what was sampled,
    never from comparing ids with a pad id.
    """

    prompt: Int[Tensor, "prompt position"]
    """Shorter prompts are padded with −1, which is not a token."""
    response: Int[Tensor, "prompt sample token"]
    mask: Bool[Tensor, "prompt sample token"]
    logp_sampler: PerToken
    limit: int
    """The generation limit: the most tokens of a response that are drawn (small tasks count observations too)."""
    truncated: Bool[Tensor, "prompt sample"]
    """True where a limit of tokens or turns ended a response: no end token, no stop string, no environment."""
    limits: Int[Tensor, "prompt"] | None = None
    """Each prompt's own limit, where they differ."""
    ends: bool = True
    """Can a response end by itself? If not, all have exactly `limit` tokens, and none is too long."""
    temperature: float = 1.0
    version: Int[Tensor, "prompt sample #token"] = field(default=None)  # type: ignore[assignment]
    """The step whose parameters drew each token, or each response; −1 where the sampler does not say."""
    sampled: bool = True
    """False for demonstrations: who wrote them gave no log-probs, and `logp_sampler` is 0."""
    mass: PerToken | None = None
    """Probability that top-p, top-k or min-p kept at each token; None where nothing was cut."""
    problem: Int[Tensor, "prompt"] | None = None
    """Which problem of the task each prompt is, as the task drew it; None: the prompt is the whole problem."""
    present: Bool[Tensor, "prompt sample token"] = field(default=None)  # type: ignore[assignment]
    """Where tokens are, observations too; by default everything up to the last action."""
    turn: Int[Tensor, "prompt sample token"] | None = None
    """Which turn of a conversation each token belongs to, counted from 0."""
    reward: Float[Tensor, "prompt sample #token"] | None = None
    """What an environment paid already; the task's score is added to it."""
    waited: PerToken | None = None
    """Seconds that an environment took to answer the turn which ends with each token."""
    valid: Bool[Tensor, "prompt sample"] | None = None
    """False where the rollout itself failed."""
    notes: np.ndarray | None = None
    """What is to be said of each response, [prompt sample], in words."""

    def __post_init__(self) -> None:
        if self.present is None:
            object.__setattr__(self, "present", self.mask.flip(-1).cumsum(-1).flip(-1) > 0)
        if self.version is None:
            object.__setattr__(self, "version", torch.full((*self.mask.shape[:2], 1), -1))

    @cached_property
    def full(self) -> bool:
        """Is every token an action, and is there no padding?"""
        return bool(self.mask.all())

    @cached_property
    def gaps(self) -> bool:
        """Is a token missing before one that is present?"""
        return not self.full and bool((self.present[..., 1:] & ~self.present[..., :-1]).any())

    @property
    def length(self) -> Int[Tensor, "prompt sample"]:
        """How many tokens the policy drew."""
        return self.mask.sum(-1)

    @property
    def extent(self) -> Int[Tensor, "prompt sample"]:
        """The index behind the last token that is present: the state there is the response's last."""
        behind = torch.arange(1, self.present.shape[-1] + 1, device=self.present.device)
        return torch.where(self.present, behind, 0).amax(-1)

    def select(self: Some, prompts: Tensor | slice, samples: slice = slice(None)) -> Some:
        """These prompts (and these samples of them), as rollouts or as a batch of their own."""
        picked: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor | np.ndarray):
                words = isinstance(value, np.ndarray) and not isinstance(prompts, slice)
                value = value[np.asarray(prompts) if words else prompts]
                if value.ndim > 1 and f.name not in ("prompt", "reward_greedy"):
                    value = value[:, samples]
                picked[f.name] = value
        return replace(self, **picked)


@dataclass(frozen=True)
class Batch(Rollouts):
    """Rollouts with their rewards, and whatever the loop has added to them since."""

    reward: Float[Tensor, "prompt sample #token"] = field(default=None)  # type: ignore[assignment]
    valid: Bool[Tensor, "prompt sample"] = field(default=None)  # type: ignore[assignment]
    """False where the reward failed: then it is in no statistic and no denominator."""
    correct: Bool[Tensor, "prompt sample"] | None = None
    """The strict score: is the response exactly right?"""

    errors: tuple[str, ...] = ()
    """Why rewards failed in this step."""
    measures: Float[Tensor, "prompt sample measure"] | None = None
    measured: tuple[str, ...] = ()
    index: Int[Tensor, "prompt"] | None = None
    """Which prompt of the step's batch this is, so that records can find it in a mini-batch."""

    logp_old: PerToken | None = None
    logp_ref: PerToken | None = None
    kl_full: PerToken | None = None
    """KL(π_old ‖ π_ref) over the whole vocabulary, at each state."""
    score_norm: Float[Tensor, "prompt sample 1"] | None = None
    """‖∇ log π(response)‖², exact."""
    reward_greedy: Float[Tensor, "prompt 1 1"] | None = None
    """Reward of one greedy response a prompt: scored, never trained on."""
    value: Float[Tensor, "prompt sample state"] | None = None
    """V of the state before each token, and of the one after the last; `returns` is what it should have been."""

    advantage: Float[Tensor, "prompt sample #token"] | None = None
    returns: PerToken | None = None
    correction: Float[Tensor, "prompt sample #token"] | None = None
    masked: Bool[Tensor, "prompt sample"] | None = None
    """True where a response is not trained on, although its reward counts in its group; None: nowhere."""
    weight: PerToken | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    progress: float = 0.0
    """The share of the run that lies behind this step."""
    whole_tokens: int | None = None
    """In a share of a mini-batch, the token count of the whole."""

    @cached_property
    def counted(self) -> Bool[Tensor, "prompt sample token"]:
        """The tokens that count: unmasked, in a response that is trained on and whose reward did not fail."""
        return self.mask & (self.valid if self.masked is None else self.valid & ~self.masked).unsqueeze(-1)

    @cached_property
    def tokens(self) -> int:
        """How many tokens count, in the whole mini-batch of which this may be a share."""
        return int(self.counted.sum()) if self.whole_tokens is None else self.whole_tokens

    def add(self, **new: Any) -> Batch:
        """`replace` at a tenth of its cost, for fields that need no `__post_init__`."""
        names, added = self.__dataclass_fields__, object.__new__(type(self))
        assert new.keys() <= names.keys()
        vars(added).update({name: value for name, value in vars(self).items() if name in names}, **new)
        return added

    def share(self, prompts: Tensor | slice, samples: slice = slice(None)) -> Batch:
        """A part of this mini-batch for one forward pass or one rank: it keeps the whole's token count.

        Weights and credit were computed over the whole: so what a learner computes of all shares adds up to its own.
        """
        return self.select(prompts, samples).add(whole_tokens=self.tokens)

    def minibatches(self, epochs: int, count: int, rng: torch.Generator) -> Iterator[Batch]:
        """`epochs` passes over the batch, each cut at random into `count` parts of whole prompts.

        An uncut batch is the same object in every pass, so that what is known of it is computed once.
        """
        for _ in range(epochs):
            if count == 1:
                yield self
                continue
            order = torch.randperm(len(self.prompt), generator=rng)
            for part in order.tensor_split(min(count, len(order))):
                yield self.select(part.sort().values)

    def microbatches(self, responses: int) -> Iterator[Batch]:
        """Parts of at most `responses` whole responses (0: all at once). Memory only, never numbers."""
        prompts, samples = self.mask.shape[:2]
        if responses <= 0 or responses >= prompts * samples:
            yield self
        elif responses >= samples:
            step = responses // samples
            for start in range(0, prompts, step):
                yield self.share(slice(start, start + step))
        else:
            for prompt in range(prompts):
                for start in range(0, samples, responses):
                    yield self.share(slice(prompt, prompt + 1), slice(start, start + responses))


def to_batch(rollouts: Rollouts, **more: Any) -> Batch:
    """Rollouts with more fields, as a batch."""
    return Batch(**{f.name: getattr(rollouts, f.name) for f in fields(rollouts)} | more)


def join(batches: list[Some]) -> Some:
    """One batch with the prompts of all of them, in order; responses padded to the longest. Or of rollouts."""
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
            elif f.name in TOKENWISE or (f.name != "measures" and any(v.shape[2:] > (1,) for v in values)):
                values = [_widen(v, f.name, b, width) for v, b in zip(values, batches, strict=True)]
            joined[f.name] = torch.cat(values)
    return replace(batches[0], **joined)


TOKENWISE = ("response", "mask", "present", "logp_sampler", "mass", "turn", "waited")
"""Fields that always have one number per token."""


def _widen(value: Tensor, name: str, batch: Rollouts, width: int) -> Tensor:
    """A field of one batch with the token length of the joined one."""
    if name not in TOKENWISE and value.shape[-1] == 1:  # of whole responses, but per token in another batch
        value = at_last(batch, value) if name == "reward" else value.expand(batch.mask.shape)
    return torch.nn.functional.pad(value, (0, width - value.shape[-1]))


@dataclass(frozen=True)
class Outputs:
    """What a learner computes for a mini-batch in its training forward, with gradients."""

    logp: PerToken
    entropy: PerToken
    kl_full: PerToken | None = None
    """KL(π ‖ π_ref) over the whole vocabulary at each state, where the loss asks for it."""
    rating: Float[Tensor, "prompt sample #token"] | None = None
    """What a reward model gives each response, or a process reward each token; its log-probs are 0."""
    value: Float[Tensor, "prompt sample state"] | None = None
    """V at each state before an action, of a critic that is trained in the policy's own update."""


@dataclass(frozen=True)
class Terms:
    """What a loss returns: the objective to maximise, and sums that add up over micro-batches."""

    objective: Float[Tensor, ""]
    sums: dict[str, Tensor]
    """Sums over tokens, without gradient; divided by the mini-batch's token count when reported."""
    means: dict[str, Tensor] = field(default_factory=dict)
    """Weighted sums, without gradient, reported as they are."""


def reward_to_go(reward: Float[Tensor, "prompt sample #token"]) -> Float[Tensor, "prompt sample #token"]:
    """R_t = Σ_{u ≥ t} r_u. An outcome reward (token length 1) is its own reward-to-go."""
    return reward if reward.shape[-1] == 1 else reward.flip(-1).cumsum(-1).flip(-1)


def at_last(batch: Rollouts, reward: Float[Tensor, "prompt sample #token"]) -> PerToken:
    """A reward per token: an outcome lies on the last action of each response; any other stays as it is."""
    if reward.shape[-1] > 1:
        return reward
    last = (batch.mask.cumsum(-1) == batch.length.unsqueeze(-1)) & batch.mask
    return torch.where(last, reward, 0.0)


def at_actions(batch: Rollouts, reward: PerToken) -> PerToken:
    """Rewards on actions alone: one that came with an observation moves to the last action before it.

    What was paid before the first action moves to that one; the total stays.
    """
    if batch.full:
        return reward
    order = (~batch.mask).to(torch.uint8).argsort(dim=-1, stable=True)  # actions first
    place = order.gather(-1, (batch.mask.cumsum(-1) - 1).clamp(min=0))
    reward = torch.where(batch.present & batch.mask.any(-1, keepdim=True), reward, 0.0)
    return torch.zeros_like(reward).scatter_add(-1, place, reward)


def add_outcome(batch: Batch, outcome: Float[Tensor, "prompt sample 1"]) -> Float[Tensor, "prompt sample #token"]:
    """The batch's reward plus one more for the whole response, on its last token if rewards are per token."""
    return batch.reward + (outcome if batch.reward.shape[-1] == 1 else at_last(batch, outcome))

"""The vocabulary of Ascent: axes, rollouts, batches and the two kinds of error.

Axes are words. A batch holds `prompt` prompts with `sample` responses each, and every response
has up to `token` tokens. Index t of a per-token tensor is the t-th response token: its
log-probability, or the value of the state before it. A tensor of token length 1 belongs to the
whole response and broadcasts.

Four log-probabilities have four names, and never stand in for one another:

    logp          the policy that is being trained, now; the only one with a gradient
    logp_old      the policy when this batch was sampled; a constant
    logp_ref      the reference policy; a constant
    logp_sampler  what the sampler said when it drew the token; a constant

All are over the full vocabulary, at the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Metrics = dict[str, int | float]
State = dict[str, float]
"""What choices remember from step to step: small, named numbers that the checkpoint saves."""


class Refused(ValueError):
    """Bad input, found before any work was done: what was given, why it cannot be, what to set."""


class Trouble(RuntimeError):
    """A run that had to stop: what happened, where its last good state is, what to change."""


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
class Rollouts:
    """What a sampler returns. Tokens after the end of a response are padding: `mask` is False there.

    The end token is an action like any other, so it is in the mask. Masks come from sampled
    lengths, never from comparing ids with a pad id.
    """

    prompt: Int[Tensor, "prompt position"]
    """−1, which is no token, stands after the end of a shorter prompt."""
    response: Int[Tensor, "prompt sample token"]
    mask: Bool[Tensor, "prompt sample token"]
    logp_sampler: Float[Tensor, "prompt sample token"]
    limit: int
    """The generation limit: the most tokens that a response may have."""
    truncated: Bool[Tensor, "prompt sample"]
    """True where the limit cut a response off before its end token."""
    ends: bool = True
    """Can a response end by itself? If not, all have exactly `limit` tokens, and none is too long."""
    temperature: float = 1.0
    version: int = 0
    """The step whose parameters drew these."""
    sampled: bool = True
    """False for demonstrations: who wrote them gave no log-probs, and `logp_sampler` is 0."""
    mass: Float[Tensor, "prompt sample token"] | None = None
    """Probability that top-p, top-k or min-p kept at each token; None where nothing was cut."""

    @cached_property
    def full(self) -> bool:
        """Is there no padding at all?"""
        return bool(self.mask.all())


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
    notes: np.ndarray | None = None
    index: Int[Tensor, "prompt"] | None = None
    """Which prompt of the step's batch this is, so that records can find it in a mini-batch."""

    logp_old: Float[Tensor, "prompt sample token"] | None = None
    logp_ref: Float[Tensor, "prompt sample token"] | None = None
    kl_full: Float[Tensor, "prompt sample token"] | None = None
    """KL(π_old ‖ π_ref) over the whole vocabulary, at each state."""
    score_norm: Float[Tensor, "prompt sample 1"] | None = None
    """‖∇ log π(response)‖², exact."""
    reward_greedy: Float[Tensor, "prompt 1 1"] | None = None
    """Reward of one greedy response a prompt: scored, never trained on."""
    value: Float[Tensor, "prompt sample state"] | None = None
    """V of the state before each token, and of the one after the last; `returns` is what it should have been."""

    advantage: Float[Tensor, "prompt sample #token"] | None = None
    returns: Float[Tensor, "prompt sample token"] | None = None
    correction: Float[Tensor, "prompt sample #token"] | None = None
    weight: Float[Tensor, "prompt sample token"] | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    progress: float = 0.0
    """The share of the run that lies behind this step."""

    @cached_property
    def counted(self) -> Bool[Tensor, "prompt sample token"]:
        """The tokens that count: unmasked, in a response whose reward did not fail."""
        return self.mask & self.valid.unsqueeze(-1)

    @cached_property
    def tokens(self) -> int:
        """How many tokens count."""
        return int(self.counted.sum())

    @property
    def length(self) -> Int[Tensor, "prompt sample"]:
        return self.mask.sum(-1)

    def add(self, **new: Any) -> Batch:
        return replace(self, **new)

    def select(self, prompts: Tensor | slice, samples: slice = slice(None)) -> Batch:
        """The batch of these prompts (and, for micro-batches, of these samples)."""
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

    def minibatches(self, epochs: int, count: int, rng: torch.Generator) -> Iterator[Batch]:
        """`epochs` passes over the batch, each cut at random into `count` parts of whole prompts.

        An uncut batch is the same object in every pass, so that what is known of it is computed once.
        """
        prompts = self.prompt.shape[0]
        for _ in range(epochs):
            if count == 1:
                yield self
                continue
            order = torch.randperm(prompts, generator=rng)
            for part in order.tensor_split(min(count, prompts)):
                yield self.select(part.sort().values)

    def microbatches(self, responses: int) -> Iterator[Batch]:
        """Parts of at most `responses` whole responses (0: all at once). Memory only, never numbers."""
        prompts, samples = self.mask.shape[:2]
        if responses <= 0 or responses >= prompts * samples:
            yield self
        elif responses >= samples:
            step = responses // samples
            for start in range(0, prompts, step):
                yield self.select(slice(start, start + step))
        else:
            for prompt in range(prompts):
                for start in range(0, samples, responses):
                    yield self.select(slice(prompt, prompt + 1), slice(start, start + responses))


def to_batch(rollouts: Rollouts, **more: Any) -> Batch:
    """Rollouts with more fields, as a batch."""
    return Batch(**{f.name: getattr(rollouts, f.name) for f in fields(rollouts)} | more)


def join(batches: list[Batch]) -> Batch:
    """One batch with the prompts of all of them, in order; responses padded to the longest."""
    if len(batches) == 1:
        return batches[0]
    width = max(b.mask.shape[2] for b in batches)
    position = max(b.prompt.shape[1] for b in batches)
    joined: dict[str, Any] = {}
    for f in fields(Batch):
        values = [getattr(b, f.name) for b in batches]
        if isinstance(values[0], np.ndarray):
            joined[f.name] = np.concatenate(values)
        elif isinstance(values[0], Tensor):
            if f.name == "prompt":
                values = [torch.nn.functional.pad(v, (0, position - v.shape[1]), value=-1) for v in values]
            elif f.name in ("response", "mask", "logp_sampler", "mass") or (
                f.name != "measures" and any(v.shape[2:] > (1,) for v in values)
            ):
                values = [torch.nn.functional.pad(v, (0, width - v.shape[-1])) for v in values]
            joined[f.name] = torch.cat(values)
    return replace(batches[0], **joined)


@dataclass(frozen=True)
class Outputs:
    """What a learner computes for a mini-batch in its training forward, with gradients."""

    logp: Float[Tensor, "prompt sample token"]
    entropy: Float[Tensor, "prompt sample token"]
    kl_full: Float[Tensor, "prompt sample token"] | None = None
    """KL(π ‖ π_ref) over the whole vocabulary at each state, where the loss asks for it."""
    rating: Float[Tensor, "prompt sample #token"] | None = None
    """What a reward model gives each response, or a process reward each token; its log-probs are 0."""


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


def at_last(batch: Batch, outcome: Float[Tensor, "prompt sample 1"]) -> Float[Tensor, "prompt sample token"]:
    """An outcome laid on the last unmasked token of each response."""
    last = (batch.mask.cumsum(-1) == batch.length.unsqueeze(-1)) & batch.mask
    return torch.where(last, outcome, 0.0)


def add_outcome(batch: Batch, outcome: Float[Tensor, "prompt sample 1"]) -> Float[Tensor, "prompt sample #token"]:
    """The batch's reward plus one more for the whole response, on its last token if rewards are per token."""
    return batch.reward + (outcome if batch.reward.shape[-1] == 1 else at_last(batch, outcome))

"""Aggregation as a weight per token, computed once per optimizer step over its whole mini-batch.

N is the number of responses in the mini-batch and L_i the number of actions of response i. Surrogate, KL and entropy
are each Σ weight · per-token value, so the gradient does not depend on micro-batches, accumulation or world size.
Responses without signal count; failed or excluded ones are in neither N nor ΣL.
"""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from ascent.core.types import Batch

Weight = Float[Tensor, "prompt sample token"]


def _counts(batch: Batch) -> tuple[Tensor, Int[Tensor, "prompt sample 1"], Int[Tensor, ""]]:
    """Return the loss mask as 0/1, the number of trained tokens per response, and of responses that have any."""
    mask = batch.loss_mask
    length = mask.sum(-1, keepdim=True)
    return mask.to(batch.logp_sampler.dtype), length, (length > 0).sum().clamp(min=1)


class Weights:
    """An aggregation: called with a mini-batch, it returns the weight of each token."""

    def __call__(self, batch: Batch) -> Weight:
        raise NotImplementedError


@dataclass(frozen=True)
class TokenMean(Weights):
    """Every token counts the same.

    weight = 1 / ΣL
    DAPO's choice, and TRL's `dapo`. Long responses weigh more than short ones. Bias: in direction
    where lengths differ, because ΣL depends on what was sampled (cosine with ∇E[R] 0.99 on a
    three-token policy with an end token).
    """

    def __call__(self, batch: Batch) -> Weight:
        mask, length, _ = _counts(batch)
        return mask / length.sum().clamp(min=1)


@dataclass(frozen=True)
class SequenceMean(Weights):
    """Every response counts the same, spread over its tokens.

    weight = 1 / (N · L_i)
    The GRPO paper's choice. Bias: in direction where lengths differ, because a token of a long
    response weighs less: long wrong answers are punished less per token (cosine with ∇E[R] 0.97 on
    a three-token policy with an end token).
    """

    def __call__(self, batch: Batch) -> Weight:
        mask, length, responses = _counts(batch)
        return mask / (length.clamp(min=1) * responses)


@dataclass(frozen=True)
class SequenceSum(Weights):
    """Tokens are summed, responses averaged: ∇E[R] itself.

    weight = 1 / N
    The plain policy gradient. Bias: none, because the log-probability of a response is a sum.
    """

    def __call__(self, batch: Batch) -> Weight:
        mask, _, responses = _counts(batch)
        return mask / responses


@dataclass(frozen=True)
class FixedLength(Weights):
    """The sum over a constant: ∇E[R]'s direction, at a size that does not grow with the limit.

    weight = 1 / (N · L_max), L_max the generation limit of drawn tokens, never the padded width
    Liu et al. 2025 (Dr. GRPO). Bias: in length only. It is ∇E[R] over the constant L_max.
    """

    def __call__(self, batch: Batch) -> Weight:
        mask, _, responses = _counts(batch)
        return mask / (responses * batch.limit)


WEIGHTS = (TokenMean, SequenceMean, SequenceSum, FixedLength)

"""Importance weights between the sampling policy and the policy that is trained.

    w_t = exp(logp_old_t − logp_sampler_t) · m_t

m_t is the probability mass kept by top-k, top-p and min-p: the token was sampled with log-prob logp_sampler − log m.
The weight is a constant factor on the surrogate. The policies differ for two reasons, which are measured separately:
mismatch is the gap between engine and trainer at one policy version (kernels, precision), and lag the gap between
two versions.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.metric_names import LAG, MISMATCH
from ascent.core.types import Batch, PerToken, check_counts

Factor = Float[Tensor, "prompt sample #token"]
Level = Literal["token", "sequence"]


def log_weight(logp: PerToken, batch: Batch) -> PerToken:
    """Return log w at each token, 0 outside the loss mask."""
    log_w = logp - batch.logp_sampler
    if batch.kept_mass is not None:
        log_w = log_w + batch.kept_mass.log()
    return torch.where(batch.loss_mask, log_w, 0.0)


def _weight(batch: Batch, level: Level) -> Factor:
    assert batch.logp_old is not None
    log_w = log_weight(batch.logp_old, batch)
    return torch.exp(log_w if level == "token" else log_w.sum(-1, keepdim=True))


def mismatch(logp: PerToken, batch: Batch, version: int | None = None) -> dict[str, Tensor]:
    """Measure the gap between the log-probs of trainer and sampler, before any update.

    The mean and largest |logp − logp_sampler| of the tokens that this version drew (None: of all), the effective
    sample size (Σw)²/Σw² as a share of all tokens, and KL(sampler ‖ trainer) as the mean of k3 over them. Where
    other versions drew tokens too, `lag` is how many steps ago the tokens were drawn on average, and
    `lag/logp_difference` the mean |logp − logp_sampler| of those that other versions drew, and of each age apart.
    """
    mask, log_w = batch.loss_mask, log_weight(logp, batch)
    behind = torch.where(batch.version >= 0, (0 if version is None else version) - batch.version, 0)
    older = mask & (behind != 0) if version is not None else torch.zeros_like(mask)
    tokens, stale = max(batch.tokens, 1), int(older.sum())
    gap = log_w if batch.kept_mass is None else torch.where(mask, logp - batch.logp_sampler, 0.0)
    w = torch.where(mask, torch.exp(log_w), 0.0)
    size = gap.abs() if not stale else torch.where(older, 0.0, gap.abs())
    measured = {
        MISMATCH: size.sum() / max(batch.tokens - stale, 1),
        "sampling/sampling_logp_difference/max": size.max(),
        "sampling/effective_sample_size": w.sum() ** 2 / (w**2).sum().clamp(min=1e-30) / tokens,
        "sampling/kl": (torch.expm1(gap) - gap).sum() / tokens,
    }
    if stale:
        measured[LAG] = torch.where(mask, behind, 0).sum().to(gap.dtype) / tokens
        measured[f"{LAG}/logp_difference"] = torch.where(older, gap.abs(), 0.0).sum() / stale
        for age in behind.expand(older.shape)[older].unique().tolist():
            measured[f"{LAG}/logp_difference/{age}"] = gap[older & (behind == age)].abs().mean()
    return measured


class Correction:
    """A factor on the surrogate: called with a batch, it returns one per token or per response, or None."""

    enabled: ClassVar[bool] = False
    level: Level = "token"
    normalized: bool = False
    geometric: float | None = None

    def __call__(self, batch: Batch) -> Factor | None:
        return None

    def rejected(self, batch: Batch) -> Bool[Tensor, "prompt sample"]:
        """Return the responses that are not trained on: |mean log w_t| > log g."""
        assert batch.logp_old is not None and self.geometric is not None
        mean = log_weight(batch.logp_old, batch).sum(-1) / batch.loss_mask.sum(-1).clamp(min=1)
        return mean.abs() > math.log(self.geometric)


@dataclass(frozen=True)
class NoCorrection(Correction):
    """No importance weights: the mismatch is measured but not corrected."""


@dataclass(frozen=True)
class Weighted(Correction):
    """Base class of corrections: normalization of the weights and rejection of whole responses."""

    level: Level = "token"
    """One weight per token, or their product over the response."""
    normalized: bool = field(default=False, kw_only=True)
    """Divide the weights by their mean over the tokens, or the responses, of the rollout batch."""
    geometric: float | None = field(default=None, kw_only=True)
    """g: do not train on responses whose token weights have a geometric mean outside 1/g to g. None: on all."""
    enabled = True

    def scaled(self, w: Factor, batch: Batch) -> Factor:
        """Return the weights, divided by their mean if they are normalized."""
        mask = batch.loss_mask if self.level == "token" else batch.loss_mask.any(-1, keepdim=True)
        mean = torch.where(mask, w, 0.0).sum() / mask.sum()
        return w / mean if self.normalized and mean > 0 else w


@dataclass(frozen=True)
class Truncated(Weighted):
    """The weight, cut off at c.

    clip(w, floor, c), w per token or its product over the response
    Ionides 2008; for language models, Yao et al. 2025. Bias: where w is cut; per token also because
    the sampler chose the earlier tokens. The product is exact up to c. Normalized weights add a bias
    that falls as the batch grows, `geometric` (Liu et al. 2025) that of leaving responses out.
    Degenerate case: floor = c = 1 is no weight, and leaves only the rejection.
    """

    cap: float = 2.0
    """c: the largest weight."""
    floor: float = 0.0
    """The smallest weight."""

    def __post_init__(self) -> None:
        check_counts(1, **{"correction.geometric": self.geometric})
        if not (self.cap > 0 and 0 <= self.floor <= self.cap):
            raise ConfigError(
                f"--correction.cap is {self.cap:g}, the floor {self.floor:g}: set 0 ≤ floor ≤ cap, cap above 0"
            )

    def __call__(self, batch: Batch) -> Factor:
        return self.scaled(_weight(batch, self.level).clamp(self.floor, self.cap), batch)


@dataclass(frozen=True)
class Masked(Weighted):
    """The weight inside a band; 0 outside, so that tokens that are too far off are not trained on.

    w if low ≤ w ≤ high else 0, w per token or its product over the response
    Bias: what is outside is dropped; per token also because the sampler chose the earlier tokens.
    """

    low: float = 0.5
    """Below it, 0."""
    high: float = 2.0
    """Above it, 0."""

    def __post_init__(self) -> None:
        check_counts(1, **{"correction.geometric": self.geometric})
        if not 0 <= self.low <= self.high:
            raise ConfigError(f"--correction band {self.low:g} to {self.high:g} is empty: set 0 ≤ low ≤ high")

    def __call__(self, batch: Batch) -> Factor:
        w = _weight(batch, self.level)
        return self.scaled(torch.where((w >= self.low) & (w <= self.high), w, 0.0), batch)


CORRECTIONS = (NoCorrection, Truncated, Masked)

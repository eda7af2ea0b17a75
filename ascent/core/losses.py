"""Surrogates: what is maximized per token, given the advantage A. One frozen dataclass per choice.

ρ = exp(logp − logp_old) compares the policy with itself before the updates of this step. `logp_old` and
A are constants: gradient flows through `logp` alone. At ρ = 1 every surrogate here has the
gradient of the first one, so the first update on a fresh batch is always that of REINFORCE.

A surrogate returns one term per token or, with token length 1, one per response.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.types import Batch, Outputs, PerToken, Terms

Broadcast = Float[Tensor, "prompt sample #token"]
Clips = tuple[Bool[Tensor, "prompt sample token"], Bool[Tensor, "prompt sample token"]]


class Loss:
    """A surrogate: called with log-probs and advantages, it returns the terms to maximize."""

    sequence: ClassVar[bool] = False
    """Whether it returns one term per response, given one advantage per response."""
    data: ClassVar[Literal["samples", "demonstrations", "pairs", "steps"]] = "samples"
    """The training data: the policy's own samples, or offline data (preferences.py)."""
    trains: ClassVar[Literal["policy", "rewards", "steps"]] = "policy"
    """The trained model: a policy, a reward model, or a process reward."""
    low: float | None = None
    high: float | None = None
    """The ratio is clipped below 1 − low and above 1 + high. None: it is not."""

    def __post_init__(self) -> None:
        for bound, flag in ((self.low, "--loss.low"), (self.high, "--loss.high")):
            if bound is not None and not bound > 0:
                raise ConfigError(f"{flag} is {bound:g}, but a clipping bound is a distance from 1: set it above 0")

    def check(self, row: Any) -> None:
        """Raise a ConfigError for an algorithm that this loss does not fit."""

    def terms(self, mini: Batch, out: Outputs) -> Terms | None:
        """Return the whole objective, if it is not a sum over single responses; otherwise None."""

    def __call__(self, logp: PerToken, logp_old: PerToken, advantage: Broadcast, mask: Tensor) -> Broadcast:
        raise NotImplementedError

    def clipped(self, logp: PerToken, logp_old: PerToken, advantage: Broadcast, mask: Tensor) -> Clips | None:
        """Return where clipping is active: ρ < 1−ε_low with A < 0, and ρ > 1+ε_high with A > 0. None: nowhere."""
        if self.low is None or self.high is None:
            return None
        ρ = torch.exp(self.log_ratio(logp - logp_old, mask)).expand_as(logp)
        return (ρ < 1 - self.low) & (advantage < 0), (ρ > 1 + self.high) & (advantage > 0)

    def log_ratio(self, log_ratio: PerToken, mask: Tensor) -> Broadcast:
        """Return log ρ, given the log-ratio of each token."""
        return log_ratio


@dataclass(frozen=True)
class LogProb(Loss):
    """Log-prob times advantage, the plain policy gradient.

    A · log π
    Williams 1992. Bias: none on fresh samples. Further updates on the same batch do not correct for
    the policy having moved: at a KL of 0.03 about 27 % of the gradient is bias.
    """

    def __call__(self, logp: PerToken, logp_old: PerToken, advantage: Broadcast, mask: Tensor) -> PerToken:
        return advantage * logp


@dataclass(frozen=True)
class Ratio(Loss):
    """Importance-weighted advantage, one ratio per token, never clipped.

    token:         ρ_t · A_t,  ρ_t = exp(logp_t − logp_old_t)
    per-decision:  (ρ_t − ρ_{t−1}) · A_t,  ρ_t = exp(Σ_{u≤t} (logp_u − logp_old_u)), ρ_0 = 1
    Kakade and Langford 2002, and TRPO's objective; Precup et al. 2000, whose Σ_t ρ_t r_t it is up to
    a constant, with r_t = A_t − A_{t+1}. Bias: none at ρ = 1. After that a token ratio ignores that
    earlier tokens came from the old policy: at a KL of 0.03 27 % of the gradient is bias, as much as
    with no ratio. Per-decision stays exact, as the product over the response does, but varies less
    where rewards come per token. Degenerate case: with an outcome reward the two are the same.
    """

    form: Literal["token", "per-decision"] = "token"
    """One ratio for each token, or the product of the ratios up to it."""

    def log_ratio(self, log_ratio: PerToken, mask: Tensor) -> PerToken:
        return log_ratio if self.form == "token" else torch.where(mask, log_ratio, 0.0).cumsum(-1)

    def __call__(self, logp: PerToken, logp_old: PerToken, advantage: Broadcast, mask: Tensor) -> PerToken:
        ρ = torch.exp(self.log_ratio(logp - logp_old, mask))
        before = torch.nn.functional.pad(ρ[..., :-1], (1, 0), value=1.0) if self.form == "per-decision" else 0.0
        return (ρ - before) * advantage


@dataclass(frozen=True)
class Clipped(Loss):
    """The ratio, clipped once it has moved far enough (PPO, GRPO).

    min(ρ A, clip(ρ, 1−ε_low, 1+ε_high) A);  with dual clip c, where A < 0: at least c·A
    Schulman et al. 2017; asymmetric bounds, Yu et al. 2025 (DAPO); dual clip, Ye et al. 2020. Bias:
    none at ρ = 1, where nothing is clipped. After that the same as the token ratio (27 % at a KL of
    0.03); where ρ has passed the bound in A's direction the gradient is 0.
    """

    low: float = 0.2
    """ε_low: how far below 1 the ratio of a bad token still earns."""
    high: float = 0.2
    """ε_high: how far above 1 the ratio of a good token still earns."""
    dual: float | None = None
    """c > 1: bounds the loss of a bad token whose ratio has exploded. None: off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual is not None and not self.dual > 1:
            raise ConfigError(f"--loss.dual is {self.dual:g}: at 1 or less it would clip fresh samples; set it above 1")

    def __call__(self, logp: PerToken, logp_old: PerToken, advantage: Broadcast, mask: Tensor) -> PerToken:
        ρ = torch.exp(logp - logp_old)
        surrogate = torch.minimum(ρ * advantage, ρ.clamp(1 - self.low, 1 + self.high) * advantage)
        if self.dual is not None:
            surrogate = torch.where(advantage < 0, torch.maximum(surrogate, self.dual * advantage), surrogate)
        return surrogate


@dataclass(frozen=True)
class SequenceRatio(Loss):
    """One ratio for the whole response, with gradient through all its tokens.

    product:  ρ = exp(Σ_t (logp_t − logp_old_t)), the exact importance weight (TRL's RLOO)
    mean:     ρ = exp(mean_t (logp_t − logp_old_t)), length-normalized (GSPO, Zheng et al. 2025)
    min(ρ A, clip(ρ, 1−ε_low, 1+ε_high) A), or ρ A with no bounds set; the product's over L
    with an A_t per token (GSPO-token): the same of ρ_t = sg[ρ] · exp(logp_t − sg[logp_t]), not over L
    A response's term takes the sum of its tokens' weights. The product's gradient is a sum over its
    L tokens already, hence its 1/L: at ρ = 1 all forms have the log-prob surrogate's gradient. Bias:
    none at ρ = 1 with sequence-sum. After that 17 % of the gradient of `mean` is bias at a KL of
    0.03; `product` stays exact while unclipped, but its variance grows with length.
    """

    form: Literal["product", "mean"] = "mean"
    """Sum the log-ratios of the tokens, or take their mean."""
    low: float | None = 3e-4
    """ε_low; None with ε_high None: never clipped."""
    high: float | None = 4e-4
    """ε_high; None with ε_low None: never clipped."""
    sequence = True

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ConfigError("--loss.low and --loss.high: set both, or both to None for no clipping")
        super().__post_init__()

    def log_ratio(self, log_ratio: PerToken, mask: Tensor) -> Float[Tensor, "prompt sample 1"]:
        total = torch.where(mask, log_ratio, 0.0).sum(-1, keepdim=True)
        return total if self.form == "product" else total / mask.sum(-1, keepdim=True).clamp(min=1)

    def __call__(self, logp: PerToken, logp_old: PerToken, advantage: Broadcast, mask: Tensor) -> Broadcast:
        ρ = torch.exp(self.log_ratio(logp - logp_old, mask))
        if advantage.shape[-1] != 1:
            ρ = ρ.detach() * torch.exp(logp - logp.detach())
        surrogate = ρ * advantage
        if self.low is not None and self.high is not None:
            surrogate = torch.minimum(surrogate, ρ.clamp(1 - self.low, 1 + self.high) * advantage)
        product = self.form == "product" and advantage.shape[-1] == 1
        return surrogate / mask.sum(-1, keepdim=True).clamp(min=1) if product else surrogate


@dataclass(frozen=True)
class Cispo(Loss):
    """Log-prob times advantage, weighted by a clipped ratio that carries no gradient (CISPO).

    sg[clip(ρ, 1−ε_low, 1+ε_high)] · A · log π
    MiniMax 2025. ε_low = 1 means no lower bound. Bias: none at ρ = 1, where it is the log-prob
    surrogate. After that as the token ratio, with weights clipped; unlike with the clipped ratio,
    every token keeps its gradient.
    """

    low: float = 1.0
    """ε_low; 1: no lower bound."""
    high: float = 4.0
    """ε_high; the weight of a token is at most 1 + ε_high."""

    def __call__(self, logp: PerToken, logp_old: PerToken, advantage: Broadcast, mask: Tensor) -> PerToken:
        ρ = torch.exp(logp.detach() - logp_old)
        return ρ.clamp(1 - self.low, 1 + self.high) * advantage * logp

    def clipped(self, logp: PerToken, logp_old: PerToken, advantage: Broadcast, mask: Tensor) -> Clips:
        """Return the tokens whose weight is clipped; each bound applies to either sign of A."""
        ρ = torch.exp(logp - logp_old)
        return (ρ < 1 - self.low) & (advantage != 0), (ρ > 1 + self.high) & (advantage != 0)


LOSSES = (LogProb, Ratio, Clipped, SequenceRatio, Cispo)

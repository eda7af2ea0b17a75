"""KL(π ‖ π_ref): how it is estimated, and where the penalty goes.

With ℓ = log π − log π_ref of a token drawn from π:

    k1 = ℓ                  unbiased as a value, high variance
    abs = |ℓ|               biased as a value, never negative
    k2 = ½ ℓ²               biased as a value, low variance
    k3 = e^−ℓ + ℓ − 1       unbiased as a value, never negative      (Schulman 2020)
    exact                   Σ_v π(v) (log π(v) − log π_ref(v)) over the whole vocabulary

A good *value* does not imply a good *gradient*: each place of the penalty has a "Bias:" below.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.types import Batch, PerToken, add_outcome, per_token_reward

Estimator = Literal["k1", "abs", "k2", "k3", "exact"]


def k1(log_ratio: Tensor) -> Tensor:
    """ℓ, with ℓ = log π − log π_ref."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """½ ℓ²."""
    return 0.5 * log_ratio**2


def k3(log_ratio: Tensor) -> Tensor:
    """e^−ℓ + ℓ − 1: the ratio is π_ref/π, so that it is an estimate of KL(π ‖ π_ref)."""
    return torch.expm1(-log_ratio) + log_ratio


ESTIMATORS = {"k1": k1, "abs": Tensor.abs, "k2": k2, "k3": k3}


def estimate_kl(name: Estimator, logp: PerToken, logp_ref: PerToken | None, kl_full: PerToken | None) -> PerToken:
    """The KL at each token; exact takes the full-vocabulary value that the learner computed."""
    if name == "exact":
        assert kl_full is not None
        return kl_full
    assert logp_ref is not None
    return ESTIMATORS[name](logp - logp_ref)


def adapt(coef: float, kl: float, target: float) -> float:
    """β ← β · (1 + 0.1 · clip(KL/target − 1, ±0.2))      (Ziegler et al. 2019)."""
    return coef * (1 + 0.1 * min(max(kl / target - 1, -0.2), 0.2))


class KL:
    """A penalty for leaving the reference, and where it goes."""

    where: ClassVar[Literal["nowhere", "loss", "reward"]] = "nowhere"
    estimator: Estimator = "k3"
    coef: float = 0.0
    target: float | None = None
    per: Literal["response", "token"] = "response"
    importance: bool = False

    def __post_init__(self) -> None:
        if not self.coef >= 0:
            raise ConfigError(f"--kl.coef is {self.coef:g}: a penalty is 0 or more")
        if self.target is not None and not (self.coef > 0 and self.target > 0):
            why = "an adaptive coefficient is multiplied, so 0 stays 0. Set both above 0, or leave --kl.target out"
            raise ConfigError(f"--kl.coef {self.coef:g} with --kl.target {self.target:g}: {why}")

    def shaped(self, batch: Batch, kl: PerToken, coef: float) -> Float[Tensor, "prompt sample #token"]:
        """The reward minus the penalty, for a penalty that goes into the reward."""
        raise NotImplementedError


@dataclass(frozen=True)
class NoKL(KL):
    """No penalty. If there is a reference, the KL to it is only measured."""


@dataclass(frozen=True)
class InLoss(KL):
    """The KL of each token, differentiated, with the surrogate's own weights.

    objective = Σ weight · (surrogate − β · KL_t); with `importance` ρ_t · KL_t, ρ_t the surrogate's
    GRPO's place for it (Shao et al. 2024); with ρ, DeepSeek-V3.2 2025. Bias: it moves the optimum
    from E[R] to E[R] − β·KL. In expectation k1 pushes nowhere, k2 and exact almost along
    ∇KL(π ‖ π_ref), k3 along ∇KL(π_ref ‖ π), abs along ∇Σ|π − π_ref|: they hold the visited states
    fixed and miss what a token does to the KL of later ones. With ρ, k1 and k3 push as k2 does, and a
    per-decision or product ratio makes that ∇KL(π ‖ π_ref) itself, even once the policy has moved.
    """

    estimator: Estimator = "k3"
    """k1 | abs | k2 | k3 | exact"""
    coef: float = 0.04
    """β, or where an adaptive β starts."""
    target: float | None = None
    """KL per token that β is steered to. None: β stays fixed."""
    importance: bool = False
    """Multiply by the ratio ρ of the surrogate, with its gradient (TRL's use_bias_correction_kl)."""
    where = "loss"


@dataclass(frozen=True)
class InReward(KL):
    """A constant, taken from logp_old and subtracted from the reward before any group statistic.

    per response: R ← R − β Σ_t KL_t;   per token: r_t ← r_t − β KL_t, then rewards-to-go
    RLHF's classical place for it (Ziegler et al. 2019). Bias: with k1 only the intended one, because
    its gradient is exactly −β ∇KL(π ‖ π_ref); that of the others is not, and they may raise the KL.
    """

    estimator: Estimator = "k1"
    """k1 | abs | k2 | k3 | exact"""
    coef: float = 0.05
    """β, or where an adaptive β starts."""
    per: Literal["response", "token"] = "response"
    """Subtract the sum from the outcome, or each token's KL at that token."""
    target: float | None = None
    """KL per token that β is steered to. None: β stays fixed."""
    where = "reward"

    def shaped(self, batch: Batch, kl: PerToken, coef: float) -> Float[Tensor, "prompt sample #token"]:
        """The reward minus the penalty; with one penalty per token an outcome reward moves to the last token."""
        penalty = torch.where(batch.loss_mask, coef * kl, 0.0)
        if self.per == "response":
            return add_outcome(batch, -penalty.sum(-1, keepdim=True))
        return per_token_reward(batch, batch.reward) - penalty


KLS = (NoKL, InLoss, InReward)

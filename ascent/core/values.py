"""Advantages from a critic: how a value function V distributes a reward over tokens.

V(s_t) is the value of the state before token t, and δ_t = r_t + γ V(s_{t+1}) − V(s_t) the TD error of that token;
every advantage here is a sum of TD errors from token t on. An outcome reward is on the last action. V is 0 after an
end token; after a truncated response it is 0 too, or V(s_L) with `bootstrap`. Observations are skipped: the state after
an action is the one before the next action.

With the exact V every advantage is unbiased at γ = 1; with any other V only Monte Carlo is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from ascent.core.advantages import Advantage, whiten
from ascent.core.correction import log_weight
from ascent.core.errors import ConfigError
from ascent.core.types import Batch, PerToken, State, per_token_reward


def td_errors(
    batch: Batch, gamma: float | PerToken, bootstrap: bool
) -> tuple[PerToken, Int[Tensor, "prompt sample token"]]:
    """Return δ_t with the actions moved to the front, followed by zeros, and the order that moved them."""
    assert batch.value is not None
    reward = per_token_reward(batch, batch.reward)
    order = (~batch.mask).to(torch.uint8).argsort(dim=-1, stable=True)
    is_action = batch.mask.gather(-1, order)
    V = torch.where(is_action, batch.value.gather(-1, order), 0.0)
    after = torch.nn.functional.pad(V[..., 1:], (0, 1))
    if bootstrap:  # V(s_L), the value after the last token of a truncated response
        last = batch.length.unsqueeze(-1) - 1
        final = batch.value.gather(-1, batch.extent.unsqueeze(-1))
        after = torch.where((torch.arange(V.shape[-1]) == last) & batch.truncated.unsqueeze(-1), final, after)
    return torch.where(is_action, reward.gather(-1, order) + gamma * after - V, 0.0), order


def discounted_sum(δ: PerToken, factor: float | PerToken) -> PerToken:
    """Return S_t = δ_t + factor_t · S_{t+1}; with a single factor, Σ_j factor^j δ_{t+j}."""
    total, sums = torch.zeros_like(δ[..., 0]), []
    factors: Iterable[Any] = factor.flip(-1).unbind(-1) if isinstance(factor, Tensor) else repeat(factor)
    for error, after in zip(δ.flip(-1).unbind(-1), factors, strict=False):
        total = error + after * total
        sums.append(total)
    return torch.stack(sums[::-1], -1)


def turn_ends(batch: Batch) -> PerToken:
    """Return 1 at the last action of each turn and 0 elsewhere, with the actions moved to the front."""
    turn = torch.zeros_like(batch.response) if batch.turn is None else batch.turn
    order = (~batch.mask).to(torch.uint8).argsort(dim=-1, stable=True)
    turn = torch.where(batch.mask, turn, -1).gather(-1, order)
    return torch.nn.functional.pad(turn[..., 1:] != turn[..., :-1], (0, 1), value=True).to(batch.reward.dtype)


@dataclass(frozen=True)
class Valued(Advantage):
    """Base class of advantages from a critic: A_t = Σ_j (γλ)^j δ_{t+j}, unless `accumulate` is overridden."""

    gamma: float = 1.0
    """γ: discount per token. Below 1 the objective changes: a reward counts less for tokens long before it."""
    per: Literal["token", "turn"] = field(default="token", kw_only=True)
    """The unit of γ and λ: action tokens, or turns of a conversation."""
    bootstrap: bool = field(default=False, kw_only=True)
    """Continue with V(s_L) after a truncated response (it is never trained and may drift); off: with 0."""
    whitened: bool = field(default=False, kw_only=True)
    """Shift and scale to mean 0 and standard deviation 1 over the tokens of the rollout batch; this is biased."""
    lam: ClassVar[float]
    group_relative = False
    needs = frozenset({"value"})

    def __post_init__(self) -> None:
        counts = getattr(self, "k", 1) >= 1 and min(getattr(self, "rho", 1), getattr(self, "c", 1)) > 0
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1 and counts):
            raise ConfigError(
                f"--advantage {self}: γ, λ must be between 0 and 1, k must be 1 or more, rho and c above 0"
            )

    def accumulate(
        self, δ: PerToken, factor: float | PerToken, batch: Batch, order: Tensor
    ) -> tuple[PerToken, PerToken]:
        """Return A_t and the return minus V(s_t), with the actions moved to the front."""
        return (discounted_sum(δ, factor),) * 2

    def traces(self, batch: Batch) -> list[PerToken]:
        """Return A_t of every action before whitening, and its return minus V(s_t); 0 elsewhere."""
        gamma: float | PerToken = self.gamma
        factor: float | PerToken = self.gamma * self.lam
        if self.per == "turn":
            gamma, factor = gamma ** turn_ends(batch), factor ** turn_ends(batch)
        δ, order = td_errors(batch, gamma, self.bootstrap)
        return [torch.zeros_like(δ).scatter(-1, order, x) for x in self.accumulate(δ, factor, batch, order)]

    def advantage(self, batch: Batch) -> PerToken:
        return self.traces(batch)[0]

    def returns(self, batch: Batch) -> PerToken:
        """Return the targets of the critic: V(s_t) plus the second result of `accumulate`."""
        assert batch.value is not None
        return self.traces(batch)[1] + batch.value[..., :-1]

    def __call__(self, batch: Batch, state: State) -> PerToken:
        A = self.advantage(batch)
        return torch.where(batch.loss_mask, whiten(A, batch, 1e-8) if self.whitened else A, 0.0)


@dataclass(frozen=True)
class TD(Valued):
    """The TD error itself: the reward of a token, and how much better the next state looks.

    A_t = δ_t
    Sutton and Barto 2018, chapter 13; GAE at λ = 0. Lowest variance. Bias: none with the exact V
    and γ = 1, unless whitened; else all of V's error: only one token's reward does not come from V.
    Degenerate case: with an outcome reward and V = 0 only the last token has an advantage.
    """

    lam = 0.0


@dataclass(frozen=True)
class KStep(Valued):
    """k tokens of reward, then the critic.

    A_t = Σ_{j<k} γ^j δ_{t+j}
    Mnih et al. 2016 (A3C). Bias: none with the exact V and γ = 1, unless whitened; else V's error
    k tokens later. Degenerate cases: k = 1 is TD; from the response's length on, Monte Carlo.
    """

    k: int = 4
    """Tokens of reward before the critic takes over."""
    lam = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per == "turn":
            raise ConfigError("--advantage.per turn with --advantage k-step: its k counts tokens. Set --advantage gae")

    def accumulate(
        self, δ: PerToken, factor: float | PerToken, batch: Batch, order: Tensor
    ) -> tuple[PerToken, PerToken]:
        later = torch.nn.functional.pad(δ, (0, self.k))[..., self.k :]
        return super().accumulate(δ - self.gamma**self.k * later, factor, batch, order)


@dataclass(frozen=True)
class GAE(Valued):
    """A geometric mixture of all k-step advantages.

    A_t = Σ_j (γλ)^j δ_{t+j}
    Schulman et al. 2016. Bias: none with the exact V and γ = 1, unless whitened; else λ trades V's
    error for the reward's variance: 0 is TD, 1 Monte Carlo. Degenerate case: an outcome reward,
    γ = λ = 1 and V = the group's mean is the centered advantage.
    """

    lam: float = 0.95  # type: ignore[misc]
    """λ: 0 trusts the critic, 1 the reward."""


@dataclass(frozen=True)
class MonteCarlo(Valued):
    """The whole return minus the value: a learned baseline.

    A_t = Σ_j γ^j δ_{t+j} = Σ_j γ^j r_{t+j} − V(s_t)
    Williams 1992 with a baseline for each state; GAE at λ = 1. Bias: none at γ = 1, for any V, unless
    whitened: the baseline does not depend on the token. With `bootstrap`, V's error at the cut.
    """

    lam = 1.0


@dataclass(frozen=True)
class VTrace(GAE):
    """GAE on samples of another policy: later TD errors are weighted by the tokens that led to them.

    A_t = δ_t + γλ e_{t+1},  e_t = min(w_t, ρ̄) δ_t + γλ min(w_t, c̄) e_{t+1},  return V(s_t) + e_t
    Espeholt et al. 2018 (IMPALA). w is that of --correction; `truncated` with cap ρ̄ has the weight
    of the gradient. Bias: gae's, what the bounds cut off, and that the sampler chose the earlier
    tokens. Degenerate case: where sampler and trainer agree, w = 1 and it is gae.
    """

    rho: float = 1.0
    """ρ̄: the largest weight of a TD error; it determines the policy whose value V estimates."""
    c: float = 1.0
    """c̄: the largest weight of the TD errors that follow; it decides how far they reaches back."""
    needs = frozenset({"value", "logp_old"})

    def accumulate(
        self, δ: PerToken, factor: float | PerToken, batch: Batch, order: Tensor
    ) -> tuple[PerToken, PerToken]:
        assert batch.logp_old is not None
        w = log_weight(batch.logp_old, batch).exp().gather(-1, order)
        e = discounted_sum(w.clamp(max=self.rho) * δ, factor * w.clamp(max=self.c))
        return δ + factor * torch.nn.functional.pad(e[..., 1:], (0, 1)), e


VALUES = (TD, KStep, GAE, MonteCarlo, VTrace)

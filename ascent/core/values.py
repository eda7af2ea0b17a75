"""Credit from a critic: how a value function V distributes a reward over tokens.

V(s_t) is the value of the state before token t, and d_t = r_t + γ V(s_{t+1}) − V(s_t) the TD error
of that token; every credit here is a sum of those to come. An outcome reward lies on the last action.
V is 0 after an end token; after a truncated response it is 0 too, or V(s_L) with `bootstrap`. Observations
are stepped over: the state after an action is the one before the next action.

With the exact V every credit is unbiased at γ = 1; with a wrong one only Monte Carlo is.
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
    """d_t with the actions moved to the front and 0 behind them, and the order that moved them."""
    assert batch.value is not None
    reward = per_token_reward(batch, batch.reward)
    order = (~batch.mask).to(torch.uint8).argsort(dim=-1, stable=True)
    is_action = batch.mask.gather(-1, order)
    V = torch.where(is_action, batch.value.gather(-1, order), 0.0)
    after = torch.nn.functional.pad(V[..., 1:], (0, 1))
    if bootstrap:  # V(s_L), the state behind the last token, where a response was cut off
        last = batch.length.unsqueeze(-1) - 1
        final = batch.value.gather(-1, batch.extent.unsqueeze(-1))
        after = torch.where((torch.arange(V.shape[-1]) == last) & batch.truncated.unsqueeze(-1), final, after)
    return torch.where(is_action, reward.gather(-1, order) + gamma * after - V, 0.0), order


def discounted_sum(d: PerToken, factor: float | PerToken) -> PerToken:
    """S_t = d_t + factor_t · S_{t+1}, to the end: with one factor, Σ_j factor^j d_{t+j}."""
    total, sums = torch.zeros_like(d[..., 0]), []
    factors: Iterable[Any] = factor.flip(-1).unbind(-1) if isinstance(factor, Tensor) else repeat(factor)
    for error, after in zip(d.flip(-1).unbind(-1), factors, strict=False):
        total = error + after * total
        sums.append(total)
    return torch.stack(sums[::-1], -1)


def turn_ends(batch: Batch) -> PerToken:
    """1 at the last action of each turn and 0 at the others, with the actions moved to the front."""
    turn = torch.zeros_like(batch.response) if batch.turn is None else batch.turn
    order = (~batch.mask).to(torch.uint8).argsort(dim=-1, stable=True)
    turn = torch.where(batch.mask, turn, -1).gather(-1, order)
    return torch.nn.functional.pad(turn[..., 1:] != turn[..., :-1], (0, 1), value=True).to(batch.reward.dtype)


@dataclass(frozen=True)
class Valued(Advantage):
    """What the credits from a critic share: A_t = Σ_j (γλ)^j d_{t+j}, unless `spread` says otherwise."""

    gamma: float = 1.0
    """γ: discount per token. Below 1 the objective is another: a reward counts less for tokens far before it."""
    per: Literal["token", "turn"] = field(default="token", kw_only=True)
    """What γ and λ count: every action token, or only the turns of a conversation."""
    bootstrap: bool = field(default=False, kw_only=True)
    """Continue with V(s_L) after a truncated response (no return ever teaches it: it may drift); off: with 0."""
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

    def spread(self, d: PerToken, factor: float | PerToken, batch: Batch, order: Tensor) -> tuple[PerToken, PerToken]:
        """A_t, and the return minus V(s_t), with the actions moved to the front."""
        return (discounted_sum(d, factor),) * 2

    def traces(self, batch: Batch) -> list[PerToken]:
        """A_t of every action, before any whitening, and its return minus V(s_t); 0 elsewhere."""
        gamma: float | PerToken = self.gamma
        factor: float | PerToken = self.gamma * self.lam
        if self.per == "turn":
            gamma, factor = gamma ** turn_ends(batch), factor ** turn_ends(batch)
        d, order = td_errors(batch, gamma, self.bootstrap)
        return [torch.zeros_like(d).scatter(-1, order, x) for x in self.spread(d, factor, batch, order)]

    def advantage(self, batch: Batch) -> PerToken:
        return self.traces(batch)[0]

    def returns(self, batch: Batch) -> PerToken:
        """What the critic is trained on: A_t + V(s_t), or what `spread` has in place of A_t."""
        assert batch.value is not None
        return self.traces(batch)[1] + batch.value[..., :-1]

    def __call__(self, batch: Batch, state: State) -> PerToken:
        δ = self.advantage(batch)
        return torch.where(batch.loss_mask, whiten(δ, batch, 1e-8) if self.whitened else δ, 0.0)


@dataclass(frozen=True)
class TD(Valued):
    """The TD error itself: the reward of a token, and how much better the next state looks.

    A_t = d_t
    Sutton and Barto 2018, chapter 13; GAE at λ = 0. Lowest variance. Bias: none with the exact V
    and γ = 1, unless whitened; else all of V's error: only one token's reward does not come from V.
    Degenerate case: with an outcome reward and V = 0 only the last token gets credit.
    """

    lam = 0.0


@dataclass(frozen=True)
class KStep(Valued):
    """k tokens of reward, then the critic.

    A_t = Σ_{j<k} γ^j d_{t+j}
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

    def spread(self, d: PerToken, factor: float | PerToken, batch: Batch, order: Tensor) -> tuple[PerToken, PerToken]:
        later = torch.nn.functional.pad(d, (0, self.k))[..., self.k :]
        return super().spread(d - self.gamma**self.k * later, factor, batch, order)


@dataclass(frozen=True)
class GAE(Valued):
    """A geometric mixture of all k-step credits.

    A_t = Σ_j (γλ)^j d_{t+j}
    Schulman et al. 2016. Bias: none with the exact V and γ = 1, unless whitened; else λ trades V's
    error for the reward's variance: 0 is TD, 1 Monte Carlo. Degenerate case: an outcome reward,
    γ = λ = 1 and V = the group's mean is the centered credit.
    """

    lam: float = 0.95  # type: ignore[misc]
    """λ: 0 trusts the critic, 1 the reward."""


@dataclass(frozen=True)
class MonteCarlo(Valued):
    """The whole return minus the value: a learned baseline.

    A_t = Σ_j γ^j d_{t+j} = Σ_j γ^j r_{t+j} − V(s_t)
    Williams 1992 with a baseline for each state; GAE at λ = 1. Bias: none at γ = 1, for any V, unless
    whitened: the baseline does not depend on the token. With `bootstrap`, V's error at the cut.
    """

    lam = 1.0


@dataclass(frozen=True)
class VTrace(GAE):
    """GAE on samples of another policy: later TD errors are weighted by the tokens that led to them.

    A_t = d_t + γλ e_{t+1},  e_t = min(w_t, ρ̄) d_t + γλ min(w_t, c̄) e_{t+1},  return V(s_t) + e_t
    Espeholt et al. 2018 (IMPALA). w is that of --correction; `truncated` with cap ρ̄ has the weight
    of the gradient. Bias: gae's, what the bounds cut off, and that the sampler chose the earlier
    tokens. Degenerate case: where sampler and trainer agree, w = 1 and it is gae.
    """

    rho: float = 1.0
    """ρ̄: the largest weight of a TD error; it decides between which policies' values V lies."""
    c: float = 1.0
    """c̄: the largest weight of what comes after a TD error; it decides how far that reaches back."""
    needs = frozenset({"value", "logp_old"})

    def spread(self, d: PerToken, factor: float | PerToken, batch: Batch, order: Tensor) -> tuple[PerToken, PerToken]:
        assert batch.logp_old is not None
        w = log_weight(batch.logp_old, batch).exp().gather(-1, order)
        e = discounted_sum(w.clamp(max=self.rho) * d, factor * w.clamp(max=self.c))
        return d + factor * torch.nn.functional.pad(e[..., 1:], (0, 1)), e


VALUES = (TD, KStep, GAE, MonteCarlo, VTrace)

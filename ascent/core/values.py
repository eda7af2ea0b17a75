"""Credit from a critic: how a value function V distributes a reward over tokens.

V(s_t) is the value of the state before token t, and d_t = r_t + γ V(s_{t+1}) − V(s_t) the TD error
of that token; every credit here is a sum of those to come. An outcome reward lies on the last action.
V is 0 after an end token; after a truncated response it is 0 too, or V(s_L) with `bootstrap`. Observations
are stepped over: the state after an action is the one before the next action.

With the exact V every credit is unbiased at γ = 1; with a wrong one only Monte Carlo is.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from ascent.core.advantages import Advantage, whiten
from ascent.core.types import Batch, PerToken, Refused, State, at_last


def td_errors(batch: Batch, gamma: float, bootstrap: bool) -> tuple[PerToken, Int[Tensor, "prompt sample token"]]:
    """d_t with the actions moved to the front and 0 behind them, and the order that moved them."""
    assert batch.value is not None
    reward = at_last(batch, batch.reward)
    order = (~batch.mask).to(torch.uint8).argsort(dim=-1, stable=True)
    is_action = batch.mask.gather(-1, order)
    V = torch.where(is_action, batch.value.gather(-1, order), 0.0)
    after = torch.nn.functional.pad(V[..., 1:], (0, 1))
    if bootstrap:  # V(s_L), the state behind the last token, where a response was cut off
        last = batch.length.unsqueeze(-1) - 1
        final = batch.value.gather(-1, batch.extent.unsqueeze(-1))
        after = torch.where((torch.arange(V.shape[-1]) == last) & batch.truncated.unsqueeze(-1), final, after)
    return torch.where(is_action, reward.gather(-1, order) + gamma * after - V, 0.0), order


def discounted_sum(d: PerToken, factor: float) -> PerToken:
    """Σ_j factor^j d_{t+j}, to the end."""
    total, sums = torch.zeros_like(d[..., 0]), []
    for error in d.flip(-1).unbind(-1):
        total = error + factor * total
        sums.append(total)
    return torch.stack(sums[::-1], -1)


@dataclass(frozen=True)
class Valued(Advantage):
    """What the credits from a critic share: A_t = Σ_j (γλ)^j d_{t+j}, unless `spread` says otherwise."""

    gamma: float = 1.0
    """γ: discount per token. Below 1 the objective is another: a reward counts less for tokens far before it."""
    bootstrap: bool = field(default=False, kw_only=True)
    """Continue with V(s_L) after a truncated response (no return ever teaches it: it may drift); off: with 0."""
    whitened: bool = field(default=False, kw_only=True)
    """Shift and scale to mean 0 and standard deviation 1 over the tokens of the rollout batch; this is biased."""
    lam: ClassVar[float]
    group = False
    needs = frozenset({"value"})

    def __post_init__(self) -> None:
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1 and getattr(self, "k", 1) >= 1):
            raise Refused(f"--advantage {self}: γ and λ must be between 0 and 1, and k must be 1 or more")

    def spread(self, d: PerToken) -> PerToken:
        return discounted_sum(d, self.gamma * self.lam)

    def advantage(self, batch: Batch) -> PerToken:
        """A_t of every action, before any whitening; 0 elsewhere."""
        d, order = td_errors(batch, self.gamma, self.bootstrap)
        return torch.zeros_like(d).scatter(-1, order, self.spread(d))

    def returns(self, batch: Batch) -> PerToken:
        """What the critic is trained on: A_t + V(s_t)."""
        assert batch.value is not None
        return self.advantage(batch) + batch.value[..., :-1]

    def __call__(self, batch: Batch, state: State) -> PerToken:
        δ = self.advantage(batch)
        return torch.where(batch.counted, whiten(δ, batch, 1e-8) if self.whitened else δ, 0.0)


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

    def spread(self, d: PerToken) -> PerToken:
        later = torch.nn.functional.pad(d, (0, self.k))[..., self.k :]
        return discounted_sum(d - self.gamma**self.k * later, self.gamma)


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


VALUES = (TD, KStep, GAE, MonteCarlo)

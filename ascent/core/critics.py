"""The critic: a value function that is trained with the policy, on its own backbone or on the policy's."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.protocols import Learner
from ascent.core.types import Batch
from ascent.core.update import Adam, Schedule

VALUE_SUMS = ("value/loss", "value/clip_ratio")
"""The metrics that `Critic.loss` returns."""


class Critic:
    """A value function, or none: called with the learner after each policy update, it trains its value function."""

    enabled: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    """Whether it shares the policy's backbone; it is then trained in the policy's update."""
    coef: float = 0.0  # of its loss in the policy's objective
    clip: float | None = None
    update: Adam | None = None  # how its own steps are taken

    def __call__(self, learner: Learner, mini: Batch) -> dict[str, Tensor]:
        """Train on a mini-batch; return sums over its tokens to report."""
        return {}

    def loss(self, mini: Batch, value: Float[Tensor, "prompt sample state"]) -> Float[Tensor, "2"]:
        """Return the loss and the number of clipped tokens, both summed over the loss mask."""
        assert mini.returns is not None and mini.value is not None
        V, old, clip = value[..., :-1], mini.value[..., :-1], torch.inf if self.clip is None else self.clip
        unclipped, clipped = (V - mini.returns) ** 2, (V.clamp(old - clip, old + clip) - mini.returns) ** 2
        parts = 0.5 * torch.maximum(unclipped, clipped), (clipped > unclipped).to(V.dtype)
        return torch.stack([torch.where(mini.loss_mask, part, 0.0).sum() for part in parts])

    def measure(self, batch: Batch) -> dict[str, Tensor]:
        """Return the explained variance of the returns before any update; 0 if all returns are equal."""
        if batch.returns is None or batch.value is None:
            return {}
        returns, V = batch.returns[batch.loss_mask], batch.value[..., :-1][batch.loss_mask]
        if len(returns) < 2:
            return {"value/explained_variance": torch.zeros(())}
        share = (returns - V).var() / returns.var()
        return {"value/explained_variance": torch.where(returns.var() > 0, 1 - share, 0.0)}


@dataclass(frozen=True)
class NoCritic(Critic):
    """No value function: advantages come from groups or from the reward alone."""


@dataclass(frozen=True)
class OwnCritic(Critic):
    """A value head on a backbone of its own, of the policy's shape.

    loss = ½ (V − return)²; with ε_v the larger of that and ½ (clip(V, V_old ± ε_v) − return)²
    Schulman et al. 2017. Always a token mean, for any choice of weights; at first V = 0
    everywhere. Bias: none of its own, see the advantage.
    """

    lr: float = 1e-3
    """Learning rate of the critic's own Adam."""
    clip: float | None = None
    """ε_v: how far V may move from the batch's old one and still lower the loss. None: off."""
    steps: int = 1
    """Steps of the critic for each update of the policy."""
    max_norm: float | None = None
    """Largest norm of its gradient; larger gradients are scaled down. None: no limit."""
    schedule: Schedule = "constant"
    """Learning rate after the warm-up: constant, or decaying to 0 over the run."""
    warmup: float = 0.0
    """Fraction of the run over which its rate rises from 0."""
    enabled = True

    def __post_init__(self) -> None:
        bounds = all(bound is None or bound > 0 for bound in (self.clip, self.max_norm))
        if not (self.lr > 0 and self.steps >= 1 and bounds and 0 <= self.warmup < 1):
            raise ConfigError(f"--critic {self}: lr > 0, steps ≥ 1, clip and max-norm > 0 or None, and 0 ≤ warmup < 1")

    @property
    def update(self) -> Adam:  # type: ignore[override]
        return Adam(self.lr, self.schedule, self.warmup, max_norm=self.max_norm)

    def __call__(self, learner: Learner, mini: Batch) -> dict[str, Tensor]:
        sums, norms = zip(*(learner.fit_critic(mini, self.loss) for _ in range(self.steps)), strict=True)
        metrics = dict(zip(VALUE_SUMS, sums[0].flatten(), strict=False))
        return metrics | {"value/grad_norm": torch.stack(norms).max() * mini.tokens}


@dataclass(frozen=True)
class SharedCritic(Critic):
    """A value head on the policy's backbone: one backward pass and one optimizer for both.

    objective − c_v · loss, the token mean of own-critic's; its head moves at the policy's rate
    Schulman et al. 2017. Bias: what V learns moves the policy too, not along ∇E[R].
    """

    coef: float = 0.5
    """c_v: weight of the value loss in the objective."""
    clip: float | None = None
    """ε_v: how far V may move from the batch's old one and still lower the loss. None: off."""
    enabled = shared = True

    def __post_init__(self) -> None:
        if not (self.coef > 0 and (self.clip is None or self.clip > 0)):
            raise ConfigError(f"--critic {self}: coef > 0, and clip > 0 or None")


CRITICS = (NoCritic, OwnCritic, SharedCritic)

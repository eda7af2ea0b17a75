"""How a step is taken. An update uses a few operations of the learner and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ascent.core.protocols import Learner, Objective
from ascent.core.types import Batch, Refused, Terms


def global_norm(gradients: list[Tensor]) -> Tensor:
    """‖g‖ over all of them together."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


class Update:
    """A way to step: called with the learner, a mini-batch and an objective, it moves the parameters."""

    whole: ClassVar[bool] = False
    """Does it take the whole rollout batch, in one update?"""

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer | None:
        """What the learner keeps between steps for it."""
        return None

    def __call__(self, learner: Learner, mini: Batch, objective: Objective) -> tuple[Terms, dict[str, Tensor]]:
        """Take the step; return the objective's terms before it, and what to report: `grad_norm` and more."""
        raise NotImplementedError


@dataclass(frozen=True)
class Adam(Update):
    """One step of Adam (AdamW where there is weight decay) along the objective's gradient.

    Kingma and Ba 2015; Loshchilov and Hutter 2019. The rate follows a schedule over the run;
    the gradient is scaled down where its norm exceeds a bound.
    """

    lr: float = 1e-3
    """Highest learning rate of the schedule. Short form: --lr."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the rate does after the warm-up: stay, or fall to 0 over the run."""
    warmup: float = 0.0
    """Share of the run over which the rate rises from 0."""
    beta1: float = 0.9
    """Decay of the gradient's mean."""
    beta2: float = 0.999
    """Decay of the gradient's square."""
    eps: float = 1e-8
    """Added to the root of the mean square."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_norm: float | None = None
    """Largest gradient norm; larger gradients are scaled down. None: no limit."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise Refused(f"--lr is {self.lr:g}: it must be above 0")
        if not 0 <= self.warmup < 1:
            raise Refused(f"--update.warmup is {self.warmup:g}: set a share of the run, at least 0 and below 1")
        if self.max_norm is not None and not self.max_norm > 0:
            raise Refused(f"--update.max-norm is {self.max_norm:g}: set it above 0, or to None for no limit")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.eps >= 0 and self.weight_decay >= 0):
            raise Refused("--update: beta1 and beta2 must be at least 0 and below 1, eps and weight-decay 0 or more")

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        betas, decay = (self.beta1, self.beta2), self.weight_decay
        return torch.optim.AdamW(parameters, lr=self.lr, betas=betas, eps=self.eps, weight_decay=decay, fused=True)

    def rate(self, progress: float) -> float:
        """The learning rate after this share of the run."""
        if progress < self.warmup:
            return self.lr * progress / self.warmup
        left = 1 - (progress - self.warmup) / (1 - self.warmup)
        if self.schedule == "linear":
            return self.lr * left
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 - math.cos(math.pi * left))
        return self.lr

    def __call__(self, learner: Learner, mini: Batch, objective: Objective) -> tuple[Terms, dict[str, Tensor]]:
        assert learner.optimizer is not None
        terms = learner.gradient(mini, objective)
        gradients = [p.grad for p in learner.trainable() if p.grad is not None]
        norm = global_norm(gradients)
        if self.max_norm is not None:
            torch._foreach_mul_(gradients, (self.max_norm / (norm + 1e-6)).clamp(max=1.0))
        for group in learner.optimizer.param_groups:
            group["lr"] = self.rate(mini.progress)
        learner.optimizer.step()
        return terms, {"grad_norm": norm}

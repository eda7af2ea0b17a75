"""How a step is taken: by Adam, or as far as a trust region allows. It uses a few operations of the learner alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.protocols import Learner, Objective
from ascent.core.types import Batch, Terms

Vector = list[Tensor]  # one for each trainable parameter
Schedule = Literal["constant", "linear", "cosine"]


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of all gradients together."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


class Update:
    """An update rule: called with the learner, a mini-batch and an objective, it updates the parameters."""

    full_batch: ClassVar[bool] = False
    """Whether it needs the whole rollout batch, in one update."""

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer | None:
        """Return the optimizer that the learner holds for it."""
        return None

    def __call__(self, learner: Learner, mini: Batch, objective: Objective) -> tuple[Terms, dict[str, Tensor]]:
        """Take the step; return the objective's terms before it, and metrics such as `grad_norm`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Adam(Update):
    """One step of Adam (AdamW where there is weight decay) along the objective's gradient.

    Kingma and Ba 2015; Loshchilov and Hutter 2019. The rate follows a schedule over the run; the
    gradient is scaled down where its norm exceeds a bound. Bias: the step is not along the
    gradient, because each coordinate is scaled by its own history.
    """

    lr: float = 1e-3
    """Highest learning rate of the schedule."""
    schedule: Schedule = "constant"
    """Learning rate after the warm-up: constant, or decaying to 0 over the run."""
    warmup: float = 0.0
    """Fraction of the run over which the rate rises from 0."""
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
            raise ConfigError(f"--lr is {self.lr:g}: it must be above 0")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"--update.warmup is {self.warmup:g}: set a share of the run, at least 0 and below 1")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ConfigError(f"--update.max-norm is {self.max_norm:g}: set it above 0, or to None for no limit")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.eps >= 0 and self.weight_decay >= 0):
            raise ConfigError(
                "--update: beta1 and beta2 must be at least 0 and below 1, eps and weight-decay 0 or more"
            )

    def optimizer(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        betas, decay = (self.beta1, self.beta2), self.weight_decay
        return torch.optim.AdamW(parameters, lr=self.lr, betas=betas, eps=self.eps, weight_decay=decay, fused=True)

    def rate(self, progress: float) -> float:
        """Return the learning rate at this fraction of the run."""
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
        return terms, {"grad_norm": self.step(learner.optimizer, mini.progress)}

    def step(self, optimizer: torch.optim.Optimizer, progress: float) -> Tensor:
        """Step the optimizer at this fraction of the run; return the gradient's norm before clipping."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = getattr(optimizer, "norm", global_norm)(gradients)  # a sharded optimizer sums over ranks
        if self.max_norm is not None:
            getattr(optimizer, "scale", torch._foreach_mul_)(gradients, (self.max_norm / (norm + 1e-6)).clamp(max=1.0))
        for group in optimizer.param_groups:
            group["lr"] = self.rate(progress)
        optimizer.step()
        return norm


# ---- the trust region: the longest step along the natural gradient whose measured KL stays within a bound -----


def dot(x: Vector, y: Vector) -> float:
    return float(torch.stack([(a.double() * b.double()).sum() for a, b in zip(x, y, strict=True)]).sum())


def plus(x: Vector, scale: float, y: Vector) -> Vector:
    return list(torch._foreach_add(x, y, alpha=scale))


def conjugate_gradients(product: Callable[[Vector], Vector], g: Vector, iterations: int) -> Vector:
    """Solve A s = g for a positive definite A, given v ↦ A·v (Hestenes and Stiefel 1952)."""
    s: Vector = [torch.zeros_like(x) for x in g]
    residual = direction = g
    size = start = dot(g, g)
    for _ in range(iterations):
        along = product(direction)
        curvature = dot(direction, along)
        if size <= 1e-10 * start or not curvature > 0:  # converged; or a rounding error, because A is positive definite
            break
        s = plus(s, size / curvature, direction)
        residual = plus(residual, -size / curvature, along)
        size, before = dot(residual, residual), size
        direction = plus(residual, size / before, direction)
    return s


@dataclass(frozen=True)
class TrustRegion(Update):
    """The longest natural-gradient step whose KL stays within a bound (TRPO).

    s ≈ (F + damping·I)⁻¹ g by conjugate gradients, step √(2Δ / sᵀFs) · s, shortened until mean
    KL(π_old ‖ π) ≤ Δ over the batch's unmasked tokens, and the objective itself has risen
    Schulman et al. 2015, on the ratio surrogate. F, the Hessian of that KL, is singular: hence the
    damping. Bias: the step is along F⁻¹g, not along the gradient, and the trust region alone sets
    its length. Degenerate cases: a gradient of 0, or no trial that passes, takes no step.
    """

    delta: float = 0.01
    """Δ: the largest mean KL, in nats per token."""
    damping: float = 0.01
    """Added to the diagonal of F."""
    iterations: int = 5
    """Maximum number of conjugate-gradient iterations."""
    fisher_tokens: int = 500
    """Number of tokens, spread over the batch, from which F is computed; KL and gain use all. 0: all."""
    backtracks: int = 20
    """Maximum number of times that a step is shortened."""
    shrink: float = 0.7
    """Factor on a step that does not improve the objective. One whose KL exceeds Δ is shortened according to its KL."""
    full_batch = True

    def __post_init__(self) -> None:
        counts = self.iterations >= 1 and min(self.damping, self.fisher_tokens, self.backtracks) >= 0
        if not (counts and self.delta > 0 and 0 < self.shrink < 1):
            raise ConfigError(f"--update {self}: delta > 0, 0 < shrink < 1, iterations ≥ 1, and the rest 0 or more")

    def __call__(self, learner: Learner, mini: Batch, objective: Objective) -> tuple[Terms, dict[str, Tensor]]:
        terms = learner.gradient(mini, objective)
        g = [torch.zeros_like(p) if p.grad is None else -p.grad for p in learner.trainable()]
        norm = global_norm(g)
        report = dict.fromkeys(("accepted", "scale", "kl", "gain", "expected_gain", "too_far", "no_gain"), 0.0)
        if math.isfinite(norm) and norm > 0:
            stride = max(1, round(mini.tokens / (self.fisher_tokens or mini.tokens)))
            fisher = learner.fisher_product(mini.select(slice(None, None, stride)))
            s = conjugate_gradients(lambda v: plus(fisher(v), self.damping, v), g, self.iterations)
            curvature = dot(s, fisher(s))
            if curvature > 0:
                step = [math.sqrt(2 * self.delta / curvature) * x for x in s]
                report |= self.search(learner, mini, objective, terms.objective, step)
                report["expected_gain"] = report["scale"] * dot(g, step)
        return terms, {"grad_norm": norm} | {f"trust_region/{k}": torch.tensor(v) for k, v in report.items()}

    def search(self, learner: Learner, mini: Batch, objective: Objective, before: Tensor, step: Vector) -> dict:
        """Shorten the step until KL ≤ Δ and the objective rises; count the trials that failed either test."""
        old, scale = [p.detach().clone() for p in learner.trainable()], 1.0
        failures = {"too_far": 0.0, "no_gain": 0.0}
        for _ in range(self.backtracks + 1):
            learner.set_trainable(plus(old, scale, step))
            kl = float(learner.kl_from(mini, old))
            gain = float(learner.evaluate_objective(mini, objective) - before) if kl <= self.delta else math.nan
            if gain > 0:
                return {"accepted": 1.0, "scale": scale, "kl": kl, "gain": gain, **failures}
            failures["no_gain" if kl <= self.delta else "too_far"] += 1
            # The KL grows as the square of the scale, which gives the scale at which it would be Δ.
            scale *= max(0.1, 0.95 * math.sqrt(self.delta / kl)) if self.delta < kl < math.inf else self.shrink
        learner.set_trainable(old)
        return failures


UPDATES = (Adam, TrustRegion)

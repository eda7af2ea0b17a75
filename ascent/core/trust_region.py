"""The trust region: the longest step along the natural gradient whose measured KL stays within a bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ascent.core.protocols import Learner, Objective
from ascent.core.types import Batch, Refused, Terms
from ascent.core.update import Adam, Update, global_norm

Vector = list[Tensor]  # one for each trainable parameter


def dot(x: Vector, y: Vector) -> float:
    return float(torch.stack([(a.double() * b.double()).sum() for a, b in zip(x, y, strict=True)]).sum())


def plus(x: Vector, scale: float, y: Vector) -> Vector:
    return list(torch._foreach_add(x, y, alpha=scale))


def conjugate_gradients(product: Callable[[Vector], Vector], g: Vector, iterations: int) -> Vector:
    """s with A s ≈ g for a positive definite A, known by its products (Hestenes and Stiefel 1952)."""
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
    damping. Degenerate cases: a gradient of 0 takes no step; if no trial passes, the parameters stay.
    """

    delta: float = 0.01
    """Δ: the largest mean KL, in nats per token."""
    damping: float = 0.01
    """Added to the diagonal of F."""
    iterations: int = 5
    """Maximum number of conjugate-gradient iterations."""
    fisher_tokens: int = 500
    """F is computed from about this many tokens, spread over the batch; KL and gain from all. 0: all."""
    backtracks: int = 20
    """How often a failed step is shortened before it is given up."""
    shrink: float = 0.7
    """Factor on a step that gained nothing. A step whose KL is above Δ is shortened according to its KL."""
    whole = True

    def __post_init__(self) -> None:
        counts = self.iterations >= 1 and min(self.damping, self.fisher_tokens, self.backtracks) >= 0
        if not (counts and self.delta > 0 and 0 < self.shrink < 1):
            raise Refused(f"--update {self}: delta > 0, 0 < shrink < 1, iterations ≥ 1, and the rest 0 or more")

    def __call__(self, learner: Learner, mini: Batch, objective: Objective) -> tuple[Terms, dict[str, Tensor]]:
        terms = learner.gradient(mini, objective)
        g = [torch.zeros_like(p) if p.grad is None else -p.grad for p in learner.trainable()]
        norm = global_norm(g)
        found = dict.fromkeys(("accepted", "scale", "kl", "gain", "expected_gain", "too_far", "no_gain"), 0.0)
        if math.isfinite(norm) and norm > 0:
            every = max(1, round(mini.tokens / (self.fisher_tokens or mini.tokens)))
            product = learner.fisher(mini.select(slice(None, None, every)))
            s = conjugate_gradients(lambda v: plus(product(v), self.damping, v), g, self.iterations)
            curvature = dot(s, product(s))
            if curvature > 0:
                step = [math.sqrt(2 * self.delta / curvature) * x for x in s]
                found |= self.search(learner, mini, objective, terms.objective, step)
                found["expected_gain"] = found["scale"] * dot(g, step)
        return terms, {"grad_norm": norm} | {f"trust_region/{k}": torch.tensor(v) for k, v in found.items()}

    def search(self, learner: Learner, mini: Batch, objective: Objective, before: Tensor, step: Vector) -> dict:
        """Shorten the step until KL ≤ Δ and the objective rises; count the trials that failed either test."""
        old, scale = [p.detach().clone() for p in learner.trainable()], 1.0
        why = {"too_far": 0.0, "no_gain": 0.0}
        for _ in range(self.backtracks + 1):
            learner.assign(plus(old, scale, step))
            kl = float(learner.kl_from(mini, old))
            gain = float(learner.total(mini, objective) - before) if kl <= self.delta else math.nan
            if gain > 0:
                return {"accepted": 1.0, "scale": scale, "kl": kl, "gain": gain, **why}
            why["no_gain" if kl <= self.delta else "too_far"] += 1
            # The KL grows as the square of the scale, so one above Δ says how much too far the step went.
            scale *= max(0.1, 0.95 * math.sqrt(self.delta / kl)) if self.delta < kl < math.inf else self.shrink
        learner.assign(old)
        return why


UPDATES = (Adam, TrustRegion)

"""What every learner in one process shares: gradients, steps and Fisher products as plain sums over micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.core.protocols import Learner, Objective, Stepped, TakeStep, ValueLoss
from ascent.core.types import Batch, Outputs, Terms

Linearized = tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor]
"""log π; a probe u and Jᵀu, which is linear in u (its derivative along v is J·v); π where tokens count."""


class InProcessLearner(Learner):
    """A learner whose parameters are in this process. An engine adds how a batch is cut, and its forward passes.

    Every token count that a sum is divided by is the whole mini-batch's, so that shares of it add up.
    """

    optimizer: torch.optim.Optimizer | None
    critic: Any = None
    critic_optimizer: torch.optim.Optimizer | None = None
    _params: dict[str, Tensor]
    _trainable: list[Tensor]
    _uphill: Tensor
    """−1: objectives are maximised."""

    def split(self, batch: Batch) -> Iterator[Batch]:
        """What goes through at once: whole responses and whole pairs. It never changes numbers."""
        raise NotImplementedError

    def evaluate(self, batch: Batch) -> Outputs:
        """The training forward."""
        raise NotImplementedError

    def values(self, batch: Batch) -> Float[Tensor, "prompt sample state"]:
        """V at every state, the critic's forward."""
        raise NotImplementedError

    def linearized(self, micro: Batch) -> Linearized:
        """The policy's distributions, ready for products with their Jacobian."""
        raise NotImplementedError

    def params(self) -> dict[str, Tensor]:
        return self._params

    def trainable(self) -> list[Tensor]:
        return self._trainable

    def gradient(self, mini: Batch, objective: Objective) -> Terms:
        """−∇objective into `.grad`: a plain sum over micro-batches, whatever their number."""
        for parameter in self.trainable():
            parameter.grad = None
        parts: list[Terms] = []
        self._logp: list[Tensor] = []
        self._entropy: list[Tensor] = []
        for micro in self.split(mini):
            out = self.evaluate(micro)
            terms = objective(micro, out)
            terms.objective.backward(self._uphill)
            self._logp.append(out.logp.detach())
            if out.rating is None:
                self._entropy.append(out.entropy.detach())
            parts.append(Terms(terms.objective.detach(), terms.sums, terms.means))
        return added(parts)

    def step(self, mini: Batch, objective: Objective, update: TakeStep) -> Stepped:
        """One update on a mini-batch, and what to report of it."""
        terms, report = update(self, mini, objective)
        _mark_changed(self.trainable())
        one = len(self._logp) == 1
        logp = self._logp[0] if one else joined(self._logp, mini)
        entropy = None if not self._entropy else self._entropy[0] if one else joined(self._entropy, mini)
        return Stepped({"loss": -terms.objective, **terms.means, **report}, terms.sums, logp, entropy)

    @torch.no_grad()
    def total(self, mini: Batch, objective: Objective) -> Tensor:
        """The objective at the present parameters."""
        parts = [objective(micro, self.evaluate(micro)).objective for micro in self.split(mini)]
        return torch.stack(parts).sum()

    def fisher(self, mini: Batch) -> Callable[[list[Tensor]], list[Tensor]]:
        """v ↦ F·v = Jᵀ (π ∘ J·v) / tokens, with J = ∂ log π / ∂θ at every state and for every token of the vocabulary.

        A batch in one piece keeps its graph from product to product; one in parts is worked through anew.
        """
        micros = list(self.split(mini))
        kept = [self.linearized(micros[0])] if len(micros) == 1 else None

        def product(vector: list[Tensor]) -> list[Tensor]:
            total = [torch.zeros_like(p) for p in self.trainable()]
            for logp_all, probe, slope, weight in kept or map(self.linearized, micros):
                along = torch.stack([(s * v).sum() for s, v in zip(slope, vector, strict=True) if s.requires_grad])
                (Jv,) = torch.autograd.grad(along.sum(), probe, retain_graph=True)
                part = torch.autograd.grad(
                    logp_all, self.trainable(), weight * Jv, retain_graph=kept is not None, materialize_grads=True
                )
                torch._foreach_add_(total, part)
            return list(torch._foreach_div(total, max(mini.tokens, 1)))

        return product

    @torch.no_grad()
    def assign(self, params: list[Tensor]) -> None:
        torch._foreach_copy_(self.trainable(), params)

    def fit(self, mini: Batch, loss: ValueLoss) -> Tensor:
        """One step of the critic's optimizer on the loss's token mean; the loss's sum before it."""
        assert self.critic_optimizer is not None
        self.critic_optimizer.zero_grad()
        parts = []
        for micro in self.split(mini):
            part = loss(micro, self.values(micro))
            (part / max(mini.tokens, 1)).backward()
            parts.append(part.detach())
        self.critic_optimizer.step()
        _mark_changed(self.critic_optimizer.param_groups[0]["params"])
        return torch.stack(parts).sum()


def _mark_changed(parameters: list[Tensor]) -> None:
    """Count a change of these tensors: fused optimizers do not, and a sampler renews its copies by that count."""
    torch.autograd.graph.increment_version(parameters)


def counted_sum(kl: Float[Tensor, "prompt #sample token"], batch: Batch) -> Float[Tensor, ""]:
    """The sum over the tokens that count."""
    return torch.where(batch.counted, kl, 0.0).sum()


def joined(parts: list[Tensor], batch: Batch) -> Tensor:
    """Numbers of all micro-batches, as `[prompt sample …]` of the batch."""
    return torch.cat([part.flatten(0, 1) for part in parts]).unflatten(0, batch.mask.shape[:2])


def added(parts: list[Terms]) -> Terms:
    """The terms of all micro-batches together: plain sums."""
    first, *rest = parts
    sums = {name: sum((part.sums[name] for part in rest), value) for name, value in first.sums.items()}
    means = {name: sum((part.means[name] for part in rest), value) for name, value in first.means.items()}
    return Terms(sum((part.objective for part in rest), first.objective), sums, means)


def remembered(optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """What an optimizer keeps of each parameter, by the parameter's place in its list."""
    parameters = [] if optimizer is None else optimizer.param_groups[0]["params"]
    state = {} if optimizer is None else optimizer.state
    return {f"{i}.{key}": v for i, p in enumerate(parameters) for key, v in state.get(p, {}).items()}


def remind(optimizer: torch.optim.Optimizer | None, kept: dict[str, Tensor]) -> None:
    """Give an optimizer back what it kept."""
    for name, value in kept.items():
        assert optimizer is not None
        index, key = name.split(".", 1)
        parameter = optimizer.param_groups[0]["params"][int(index)]
        optimizer.state[parameter][key] = value.to(parameter.device, copy=True)

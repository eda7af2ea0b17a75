"""The base of all learners: gradients, steps and Fisher products as plain sums over micro-batches and ranks."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ascent.core.errors import ConfigError
from ascent.core.protocols import Learner, Objective, TakeStep, UpdateResult, ValueLoss
from ascent.core.types import Batch, Outputs, Terms
from ascent.core.update import Adam
from ascent.distributed.ranks import SINGLE_PROCESS, Ranks


class InProcessLearner(Learner, Protocol):
    """A learner whose parameters are in this process. Subclasses split batches and implement the forward passes.

    Sums are divided by token counts of the whole mini-batch, so that shares of it add up. Every rank is called with the
    same batch and computes its share; gathered results are complete on rank 0 only.
    """

    ranks: Ranks = SINGLE_PROCESS
    placement: str = "each has every parameter, and gradients are summed"
    computes_alone: bool = True
    """Can one rank compute a batch without the others?"""
    num_shards: int = 1
    """Number of ranks over which the trained state is sharded."""
    writes_shards: bool = False
    """Does each rank write its shard of a checkpoint, because the state is too large for one rank?"""

    provides: frozenset[str] = frozenset({"logp_old", "logp_ref", "kl_full"})
    optimizer: torch.optim.Optimizer | None
    rate: Callable[[Batch], Tensor] | None = None
    """The ratings of a reward model or a process reward; None: a policy is trained."""
    critic: Any = None
    critic_optimizer: torch.optim.Optimizer | None = None
    critic_update: Adam | None = None
    _params: dict[str, Tensor]
    _trainable: list[Tensor]
    _value_head: tuple[Tensor, ...] = ()
    """The value head of a critic on the policy's backbone, which is stepped with the policy."""
    _loss_grad: Tensor
    """The gradient of the loss with respect to the objective: −1, because objectives are maximized."""
    _logp: list[Tensor]
    _entropy: list[Tensor]

    def split(self, batch: Batch) -> Iterator[Batch]:
        """Split a batch into micro-batches of whole responses and whole pairs. The split does not change results."""

    def evaluate(self, batch: Batch) -> Outputs:
        """Run the training forward pass of a policy."""

    def values(self, batch: Batch) -> Float[Tensor, "prompt sample state"]:
        """Return V at every state."""

    def scored(self, micro: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        """Return the needed batch fields of one micro-batch."""

    def distributions(self, micro: Batch) -> tuple[Tensor, Tensor]:
        """Return log π over the whole vocabulary at every state, and the weight of each state."""

    def kl(self, micro: Batch, params: list[Tensor]) -> Float[Tensor, "prompt #sample token"]:
        """Return KL(π_old ‖ π) over the vocabulary at every state, where π_old has these parameters."""

    def forward(self, micro: Batch) -> Outputs:
        """Run the training forward pass. The log-probs of a reward model are 0."""
        if self.rate is None:
            return self.evaluate(micro)
        rating = self.rate(micro)
        zeros = rating.new_zeros(micro.mask.shape)
        return Outputs(zeros, zeros, rating=rating)

    def backward(self, objective: Tensor) -> None:
        """Add −∇objective to `.grad`."""
        objective.backward(self._loss_grad)

    def train_reward(self, rate: Callable[[Batch], Tensor]) -> None:
        """Train a reward model or a process reward, which provides no fields of a batch."""
        self.rate, self.provides = rate, frozenset()

    def train_critic(self, critic: Any, update: Adam | None) -> None:
        """Train this critic, if it is not None. Without an `update` it is stepped with the policy."""
        self.critic, self.critic_update = critic, update
        if critic is None:
            return
        self.provides = self.provides | {"value"}
        if update is None:
            self._value_head = tuple(critic.trained())
        else:
            self.critic_optimizer = update.optimizer(critic.trained())

    def local_microbatches(self, batch: Batch) -> Iterable[Batch]:
        """Return the micro-batches of this rank's share."""
        return self.split(self.ranks.shard(batch))

    def gather_shards(self, parts: list[Tensor], batch: Batch) -> Tensor:
        """Gather values of all micro-batches of all ranks as `[prompt sample …]` of the batch."""
        return self.ranks.gather_shards(concat_micro_batches(parts, self.ranks.shard(batch)), batch)

    def all_reduce_gradients(self, parameters: list[Tensor]) -> None:
        """Sum the gradients over all ranks."""
        self.ranks.all_reduce_gradients(parameters)

    def refresh_params(self) -> None:
        """Update the parameters that the rollout engine reads. Here they are the trained ones."""
        return None

    def _summed(self, value: Tensor) -> Tensor:
        self.ranks.all_reduce([value])
        return value

    def params(self) -> dict[str, Tensor]:
        return self._params

    def trainable(self) -> list[Tensor]:
        return [*self._trainable, *self._value_head]

    @torch.no_grad()
    def score(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        needs = needs & self.provides
        parts = [self.scored(micro, needs) for micro in self.local_microbatches(batch)] if needs else []
        return {name: self.gather_shards([part[name] for part in parts], batch).cpu() for name in sorted(needs)}

    def gradient(self, mini: Batch, objective: Objective) -> Terms:
        """Compute −∇objective into `.grad`, as a plain sum over micro-batches and ranks."""
        for parameter in self.trainable():
            parameter.grad = None
        parts: list[Terms] = []
        self._logp, self._entropy = [], []
        for micro in self.local_microbatches(mini):
            out = self.forward(micro)
            terms = objective(micro, out)
            self.backward(terms.objective)
            self._logp.append(out.logp.detach())
            if out.rating is None:
                self._entropy.append(out.entropy.detach())
            parts.append(Terms(terms.objective.detach(), terms.sums, terms.means))
        self.all_reduce_gradients(self.trainable())
        return self.ranks.all_reduce_terms(sum_terms(parts))

    def step(self, mini: Batch, objective: Objective, update: TakeStep) -> UpdateResult:
        terms, report = update(self, mini, objective)
        torch.autograd.graph.increment_version(
            self.trainable()
        )  # fused optimizers do not, and rollout engines check it
        entropy = self.gather_shards(self._entropy, mini) if self._entropy else None
        metrics = {"loss": -terms.objective, **terms.means, **report}
        return UpdateResult(metrics, terms.sums, self.gather_shards(self._logp, mini), entropy)

    @torch.no_grad()
    def evaluate_objective(self, mini: Batch, objective: Objective) -> Tensor:
        parts = [objective(micro, self.forward(micro)).objective for micro in self.local_microbatches(mini)]
        return self._summed(torch.stack(parts).sum())

    def fisher_product(self, mini: Batch) -> Callable[[list[Tensor]], list[Tensor]]:
        """Return v ↦ F·v = Jᵀ (π ∘ J·v) / tokens, with J = ∂ log π / ∂θ at every state and vocabulary token.

        A single micro-batch keeps its graph between products; several are recomputed for each product.
        """
        micros = [micro for micro in self.local_microbatches(mini) if len(micro.prompt)]
        linearized = [self._linearized(micros[0])] if len(micros) == 1 else None

        def product(vector: list[Tensor]) -> list[Tensor]:
            total = [torch.zeros_like(p) for p in self.trainable()]
            for logp_all, probe, grads, weight in linearized or map(self._linearized, micros):
                directional = torch.stack(
                    [(s * v).sum() for s, v in zip(grads, vector, strict=True) if s.requires_grad]
                )
                (Jv,) = torch.autograd.grad(directional.sum(), probe, retain_graph=True)
                part = torch.autograd.grad(
                    logp_all, self.trainable(), weight * Jv, retain_graph=linearized is not None, materialize_grads=True
                )
                torch._foreach_add_(total, part)
            self.ranks.all_reduce(total)
            return list(torch._foreach_div(total, max(mini.tokens, 1)))

        return product

    def _linearized(self, micro: Batch) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor]:
        """Return log π; a probe u; Jᵀu, which is linear in u (its derivative along v is J·v); and weighted π."""
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be differentiated twice
            logp_all, count = self.distributions(micro)
        probe = torch.zeros_like(logp_all, requires_grad=True)
        grads = torch.autograd.grad(logp_all, self.trainable(), probe, create_graph=True, materialize_grads=True)
        return logp_all, probe, grads, logp_all.detach().exp() * count

    @torch.no_grad()
    def kl_from(self, mini: Batch, params: list[Tensor]) -> Tensor:
        """Return the mean KL(π_old ‖ π). Both forward passes run per micro-batch, so distributions are not kept."""
        parts = [
            torch.where(micro.loss_mask, self.kl(micro, params), 0.0).sum() for micro in self.local_microbatches(mini)
        ]
        return self._summed(torch.stack(parts).sum()) / max(mini.tokens, 1)

    @torch.no_grad()
    def set_trainable(self, params: list[Tensor]) -> None:
        torch._foreach_copy_(self.trainable(), params)

    def fit_critic(self, mini: Batch, loss: ValueLoss) -> tuple[Tensor, Tensor]:
        assert self.critic_optimizer is not None and self.critic_update is not None
        total = self.value_gradient(mini, loss)
        norm = self.critic_update.step(self.critic_optimizer, mini.progress)
        torch.autograd.graph.increment_version(self.critic_optimizer.param_groups[0]["params"])
        return self._summed(total), norm

    def value_gradient(self, mini: Batch, loss: ValueLoss, scale: float = 1.0) -> Tensor:
        """Compute ∇(scale · token mean of the loss) into `.grad` of the critic. Return the sum over this share."""
        assert self.critic_optimizer is not None
        self.critic_optimizer.zero_grad()
        parts = []
        for micro in self.local_microbatches(mini):
            part = loss(micro, self.values(micro))
            (part.flatten()[0] * scale / max(mini.tokens, 1)).backward()
            parts.append(part.detach())
        self.all_reduce_gradients(self.critic_optimizer.param_groups[0]["params"])
        return torch.stack(parts).sum(0)

    def state(self) -> dict[str, dict[str, Tensor]]:
        groups = {"params": {name: p.detach() for name, p in self._params.items()}}
        groups["optimizer"] = _optimizer_state(self.optimizer)
        if self.critic is not None:
            groups["critic"] = dict(self.critic.state_dict())
            groups["critic_optimizer"] = _optimizer_state(self.critic_optimizer)
        return groups

    def stage_shards(self, aside: Any) -> Any:
        """Stage the shards of a checkpoint in this folder; None: rank 0 writes `state`."""
        return None

    def wait_for_writes(self) -> None:
        """Wait until this rank has written its shard."""
        return None

    def local_shard(self, group: str, name: str, value: Tensor) -> Tensor:
        """Return this rank's shard of a tensor of a checkpoint."""
        return value

    def restore(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Restore the optimizers and the critic. Subclasses restore the parameters."""
        _restore_optimizer(self.optimizer, state["optimizer"])
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
            _restore_optimizer(self.critic_optimizer, state["critic_optimizer"])
            check_restored(self.critic.state_dict(), state["critic"])
        check_restored(self.params(), state["params"])


def concat_micro_batches(parts: list[Tensor], batch: Batch) -> Tensor:
    """Concatenate values of all micro-batches as `[prompt sample …]` of the batch."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.flatten(0, 1) for part in parts]).unflatten(0, batch.mask.shape[:2])


def sum_terms(parts: list[Terms]) -> Terms:
    """Sum the terms of all micro-batches."""
    first, *rest = parts
    if not rest:
        return first
    sums = {name: sum((part.sums[name] for part in rest), value) for name, value in first.sums.items()}
    means = {name: sum((part.means[name] for part in rest), value) for name, value in first.means.items()}
    return Terms(sum((part.objective for part in rest), first.objective), sums, means)


def check_restored(own: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Raise ConfigError if parameters differ from their checkpoint by more than half-precision rounding."""
    for name, p in own.items():
        value = saved[name].to(p.device)
        half = [kind for kind in (torch.finfo(p.dtype), torch.finfo(value.dtype)) if kind.bits == 16]
        rtol, atol = sum(kind.eps for kind in half), sum(kind.eps * kind.tiny for kind in half)
        wide = torch.promote_types(p.dtype, value.dtype)
        if not torch.allclose(p.to(wide), value.to(wide), rtol=rtol, atol=atol):
            raise ConfigError(
                f"{name} differs from the checkpoint after it was loaded, so the run would continue from other "
                "parameters. Resume it from another checkpoint (--from), or start a new run with --init"
            )


def _optimizer_state(optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return the optimizer state by the index of the parameter and the name of the entry."""
    if optimizer is None:
        return {}
    parameters = enumerate(optimizer.param_groups[0]["params"])
    return {f"{i}.{key}": v for i, p in parameters for key, v in optimizer.state.get(p, {}).items()}


def _restore_optimizer(optimizer: torch.optim.Optimizer | None, state: dict[str, Tensor]) -> None:
    """Restore the state of an optimizer."""
    for name, value in state.items():
        assert optimizer is not None
        index, key = name.split(".", 1)
        parameter = optimizer.param_groups[0]["params"][int(index)]
        optimizer.state[parameter][key] = value.to(parameter.device, copy=True)

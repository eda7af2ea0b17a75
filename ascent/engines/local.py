"""One process, one small policy: the reference that every other engine has to reproduce."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.engines.base import Stepped
from ascent.engines.kept import remembered, remind
from ascent.policies.base import Policy, ValueFunction
from ascent.policies.critics import ValueLoss
from ascent.types import Batch, Outputs, Rollouts, Terms
from ascent.update import Objective, Update


class LocalSampler:
    """Draws from a policy in this process. With the learner's own module, loading copies nothing."""

    fills = frozenset({"reward_greedy"})

    def __init__(self, policy: Policy, temperature: float, generator: torch.Generator):
        self.policy, self.temperature, self.generator = policy, temperature, generator
        self.version = -1
        self._own = dict(policy.named_parameters())

    def load(self, params: dict[str, Tensor], version: int) -> None:
        if any(self._own[name].data_ptr() != tensor.data_ptr() for name, tensor in params.items()):
            self.policy.load_state_dict(params)
        self.version = version

    def generate(self, prompt: Tensor, samples: int, greedy: bool = False) -> Rollouts:
        drawn = self.policy.sample(prompt, samples, self.temperature, None if greedy else self.generator)
        mask = torch.arange(drawn.response.shape[2]) < drawn.length.unsqueeze(-1)
        space = self.policy.space
        truncated = torch.zeros_like(drawn.length, dtype=torch.bool)
        if space.end is not None:
            last = drawn.response.gather(-1, drawn.length.unsqueeze(-1) - 1).squeeze(-1)
            truncated = last != space.end
        return Rollouts(
            prompt=prompt,
            response=drawn.response,
            mask=mask,
            logp_sampler=torch.where(mask, drawn.logp, 0.0),
            limit=space.limit,
            truncated=truncated,
            ends=space.end is not None,
            temperature=self.temperature,
            version=self.version,
        )


def log_probs(policy: Policy, batch: Rollouts) -> Float[Tensor, "prompt #sample token vocab"]:
    """log π over the whole vocabulary at every state of the batch, at its sampling temperature."""
    logits = policy.logits(batch.prompt, batch.response)
    return torch.log_softmax(logits if batch.temperature == 1.0 else logits / batch.temperature, -1)


def chosen(logp_all: Tensor, batch: Rollouts) -> Float[Tensor, "prompt sample token"]:
    """The log-prob of each sampled token; 0 at padding, so that a ratio is 1 there."""
    if logp_all.shape[1] == 1:  # the same distributions for every sample
        logp = logp_all.squeeze(1).gather(-1, batch.response.transpose(1, 2)).transpose(1, 2)
    else:
        logp = logp_all.gather(-1, batch.response.unsqueeze(-1)).squeeze(-1)
    return logp if batch.full else torch.where(batch.mask, logp, 0.0)


def full_kl(logp_all: Tensor, logp_ref_all: Tensor) -> Float[Tensor, "prompt #sample token"]:
    """KL(π ‖ π_ref) over the vocabulary."""
    return (logp_all.exp() * (logp_all - logp_ref_all)).sum(-1)


class LocalLearner:
    """Trains a policy in this process."""

    fills = frozenset({"logp_old", "logp_ref", "kl_full", "score_norm"})

    def __init__(
        self,
        policy: Policy | ValueFunction,
        update: Update,
        reference: bool,
        outputs: frozenset[str],
        micro_batch: int = 0,
        critic: ValueFunction | None = None,
        critic_update: Update | None = None,
    ):
        self.policy: Any = policy
        self.outputs, self.micro_batch = outputs, micro_batch
        self.reference: Any = copy.deepcopy(policy).requires_grad_(False) if reference else None
        self._params: dict[str, Tensor] = dict(policy.named_parameters())
        self._trainable: list[Tensor] = [p for p in policy.parameters() if p.requires_grad]
        self._uphill = -torch.ones((), dtype=self._trainable[0].dtype)  # objectives are maximised
        self.optimizer = update.optimizer(self._trainable)
        self.critic, self.critic_optimizer = critic, None
        if critic is not None and critic_update is not None:
            self.critic_optimizer = critic_update.optimizer(critic.trained())
            self.fills = self.fills | {"value"}

    def params(self) -> dict[str, Tensor]:
        return self._params

    def trainable(self) -> list[Tensor]:
        return self._trainable

    def split(self, batch: Batch) -> Iterator[Batch]:
        """What goes through at once: at most `micro_batch` tokens, whole responses and whole pairs. Never numbers."""
        least, width = 1 if batch.sampled else batch.mask.shape[1], batch.prompt.shape[1] + batch.mask.shape[2]
        return batch.microbatches(max(least, self.micro_batch // width) if self.micro_batch else 0)

    def log_probs(self, batch: Batch) -> Float[Tensor, "prompt #sample token vocab"]:
        """log π over the whole vocabulary at every state."""
        return log_probs(self.policy, batch)

    def values(self, batch: Batch) -> Float[Tensor, "prompt sample state"]:
        """V at every state, the critic's forward."""
        assert self.critic is not None
        return self.critic.values(batch.prompt, batch.response)

    def evaluate(self, batch: Batch) -> Outputs:
        """The training forward."""
        logp_all = self.log_probs(batch)
        if "entropy" in self.outputs:
            entropy = -(logp_all.exp() * logp_all).sum(-1)
        else:  # only measured; this form has no finite gradient at a probability of 0
            entropy = torch.special.entr(logp_all.detach().exp()).sum(-1)
        kl = None
        if "kl_full" in self.outputs:
            assert self.reference is not None
            kl = full_kl(logp_all, log_probs(self.reference, batch)).expand(batch.mask.shape)
        return Outputs(chosen(logp_all, batch), entropy.expand(batch.mask.shape), kl)

    @torch.no_grad()
    def score(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        """The batch fields that were asked for and that come from a model."""
        needs = needs & self.fills
        found: dict[str, list[Tensor]] = {name: [] for name in needs}
        for micro in self.split(batch) if needs else ():
            logp_all = self.log_probs(micro) if needs & {"logp_old", "kl_full"} else None
            ref_all = log_probs(self.reference, micro) if self.reference is not None else None
            if "logp_old" in needs and logp_all is not None:
                found["logp_old"].append(chosen(logp_all, micro))
            if "logp_ref" in needs and ref_all is not None:
                found["logp_ref"].append(chosen(ref_all, micro))
            if "kl_full" in needs and logp_all is not None and ref_all is not None:
                found["kl_full"].append(full_kl(logp_all, ref_all).expand(micro.mask.shape))
            if "score_norm" in needs:
                found["score_norm"].append(self.score_norm(micro))
            if "value" in needs:
                found["value"].append(self.values(micro))
        return {name: joined(parts, batch) for name, parts in found.items()}

    @torch.enable_grad()
    def score_norm(self, batch: Batch) -> Float[Tensor, "prompt sample 1"]:
        """‖∇ log π(response)‖², one backward pass a response."""
        total = chosen(log_probs(self.policy, batch), batch).sum(-1)
        norms = []
        for logp in total.flatten():
            gradients = torch.autograd.grad(logp, self.trainable(), retain_graph=True, allow_unused=True)
            norms.append(sum((g**2).sum() for g in gradients if g is not None))
        return torch.stack(norms).view(*total.shape, 1)  # type: ignore[arg-type]

    def gradient(self, mini: Batch, objective: Objective) -> Terms:
        """−∇objective into `.grad`: a plain sum over micro-batches, whatever their number."""
        for parameter in self.trainable():
            parameter.grad = None
        found: list[Terms] = []
        self._logp: list[Tensor] = []
        self._entropy: list[Tensor] = []
        for micro in self.split(mini):
            out = self.evaluate(micro)
            terms = objective(micro, out)
            terms.objective.backward(self._uphill)
            self._logp.append(out.logp.detach())
            if out.rating is None:
                self._entropy.append(out.entropy.detach())
            found.append(Terms(terms.objective.detach(), terms.sums, terms.means))
        return added(found)

    def step(self, mini: Batch, objective: Objective, update: Update) -> Stepped:
        """One update on a mini-batch, and what to report of it."""
        terms, report = update(self, mini, objective)
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
        kept = [self._linearized(micros[0])] if len(micros) == 1 else None

        def product(vector: list[Tensor]) -> list[Tensor]:
            total = [torch.zeros_like(p) for p in self.trainable()]
            for logp_all, probe, slope, weight in kept or map(self._linearized, micros):
                along = torch.stack([(s * v).sum() for s, v in zip(slope, vector, strict=True) if s.requires_grad])
                (Jv,) = torch.autograd.grad(along.sum(), probe, retain_graph=True)
                part = torch.autograd.grad(
                    logp_all, self.trainable(), weight * Jv, retain_graph=kept is not None, materialize_grads=True
                )
                torch._foreach_add_(total, part)
            return list(torch._foreach_div(total, max(mini.tokens, 1)))

        return product

    def _linearized(self, micro: Batch) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor]:
        """log π; a probe u and Jᵀu, which is linear in u (its derivative along v is J·v); π where tokens count."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be differentiated twice
            logp_all = self.log_probs(micro)
        probe = torch.zeros_like(logp_all, requires_grad=True)
        slope = torch.autograd.grad(logp_all, self.trainable(), probe, create_graph=True, materialize_grads=True)
        counted = micro.counted.unsqueeze(-1)
        count = counted.sum(1, keepdim=True) if logp_all.shape[1] == 1 else counted
        return logp_all, probe, slope, logp_all.detach().exp() * count

    @torch.no_grad()
    def kl_from(self, mini: Batch, params: list[Tensor]) -> Tensor:
        """The mean KL(π_old ‖ π): a forward of each, so that no distribution is kept."""
        now, parts = [p.clone() for p in self.trainable()], []
        for micro in self.split(mini):
            self.assign(params)
            old = self.log_probs(micro)
            self.assign(now)
            parts.append(self._counted(full_kl(old, self.log_probs(micro)), micro))
        return torch.stack(parts).sum() / max(mini.tokens, 1)

    @staticmethod
    def _counted(kl: Float[Tensor, "prompt #sample token"], batch: Batch) -> Float[Tensor, ""]:
        return torch.where(batch.counted, kl, 0.0).sum()

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
        return torch.stack(parts).sum()

    @torch.no_grad()
    def mix_reference(self, rate: float) -> None:
        assert self.reference is not None
        for kept, now in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
            kept.lerp_(now, rate)

    def state(self) -> dict[str, dict[str, Tensor]]:
        groups = {"params": {k: v.detach() for k, v in self.policy.state_dict().items()}}
        groups["optimizer"] = remembered(self.optimizer)
        if self.critic is not None:
            groups["critic"] = {k: v.detach() for k, v in self.critic.state_dict().items()}
            groups["critic_optimizer"] = remembered(self.critic_optimizer)
        if self.reference is not None:
            groups["reference"] = dict(self.reference.state_dict())
        return groups

    def restore(self, state: dict[str, dict[str, Tensor]]) -> None:
        self.policy.load_state_dict(state["params"])
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        remind(self.optimizer, state["optimizer"])
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
            remind(self.critic_optimizer, state["critic_optimizer"])


def joined(parts: list[Tensor], batch: Batch) -> Tensor:
    """Numbers of all micro-batches, as `[prompt sample …]` of the batch."""
    return torch.cat([part.flatten(0, 1) for part in parts]).unflatten(0, batch.mask.shape[:2])


def added(parts: list[Terms]) -> Terms:
    """The terms of all micro-batches together: plain sums."""
    first, *rest = parts
    sums = {name: sum((part.sums[name] for part in rest), value) for name, value in first.sums.items()}
    means = {name: sum((part.means[name] for part in rest), value) for name, value in first.means.items()}
    return Terms(sum((part.objective for part in rest), first.objective), sums, means)

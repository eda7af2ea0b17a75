"""One process, one small policy: the reference that every other engine has to reproduce."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ascent.core.types import Batch, Outputs, Rollouts
from ascent.core.update import Update
from ascent.engines.learner import InProcessLearner, Linearized, counted_sum, joined, remembered, remind
from ascent.policies.base import Policy, ValueFunction


def log_probs(policy: Policy, batch: Rollouts) -> Float[Tensor, "prompt #sample token vocab"]:
    """log π over the whole vocabulary at every state of the batch, at its sampling temperature."""
    if batch.gaps:
        response, states = without_gaps(batch)
        logits = policy.logits(batch.prompt, response)
        every = logits.expand(-1, response.shape[1], -1, -1)
        logits = every.gather(2, states[..., :-1, None].expand(-1, -1, -1, logits.shape[-1]))
    else:
        logits = policy.logits(batch.prompt, batch.response)
    return torch.log_softmax(logits if batch.temperature == 1.0 else logits / batch.temperature, -1)


def values_of(model: ValueFunction, batch: Rollouts) -> Float[Tensor, "prompt sample state"]:
    """V of the state before each token, and of the one behind the last."""
    if not batch.gaps:
        return model.values(batch.prompt, batch.response)
    response, states = without_gaps(batch)
    return model.values(batch.prompt, response).gather(-1, states)


def without_gaps(batch: Rollouts) -> tuple[Int[Tensor, "prompt sample token"], Int[Tensor, "prompt sample state"]]:
    """Responses with the tokens that are present moved to the front, and which state of theirs each state is."""
    order = (~batch.present).to(torch.uint8).argsort(dim=-1, stable=True)
    return batch.response.gather(-1, order), torch.nn.functional.pad(batch.present.cumsum(-1), (1, 0))


def chosen(logp_all: Tensor, batch: Rollouts) -> Float[Tensor, "prompt sample token"]:
    """The log-prob of each action; 0 at every other token, so that a ratio is 1 there."""
    if logp_all.shape[1] == 1:  # the same distributions for every sample
        logp = logp_all.squeeze(1).gather(-1, batch.response.transpose(1, 2)).transpose(1, 2)
    else:
        logp = logp_all.gather(-1, batch.response.unsqueeze(-1)).squeeze(-1)
    return logp if batch.full else torch.where(batch.mask, logp, 0.0)


def full_kl(logp_all: Tensor, logp_ref_all: Tensor) -> Float[Tensor, "prompt #sample token"]:
    """KL(π ‖ π_ref) over the vocabulary."""
    return (logp_all.exp() * (logp_all - logp_ref_all)).sum(-1)


class SmallLearner(InProcessLearner):
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
        self._params = dict(policy.named_parameters())
        self._trainable = [p for p in policy.parameters() if p.requires_grad]
        self._uphill = -torch.ones((), dtype=self._trainable[0].dtype)
        self.optimizer = update.optimizer(self._trainable)
        self.critic = critic
        if critic is not None and critic_update is not None:
            self.critic_optimizer = critic_update.optimizer(critic.trained())
            self.fills = self.fills | {"value"}

    def split(self, batch: Batch) -> Iterator[Batch]:
        """What goes through at once: at most `micro_batch` tokens, whole responses and whole pairs."""
        least, width = 1 if batch.sampled else batch.mask.shape[1], batch.prompt.shape[1] + batch.mask.shape[2]
        return batch.microbatches(max(least, self.micro_batch // width) if self.micro_batch else 0)

    def log_probs(self, batch: Batch) -> Float[Tensor, "prompt #sample token vocab"]:
        """log π over the whole vocabulary at every state."""
        return log_probs(self.policy, batch)

    def values(self, batch: Batch) -> Float[Tensor, "prompt sample state"]:
        return values_of(self.critic, batch)

    def evaluate(self, batch: Batch) -> Outputs:
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
        needs = needs & self.fills
        parts: dict[str, list[Tensor]] = {name: [] for name in needs}
        for micro in self.split(batch) if needs else ():
            logp_all = self.log_probs(micro) if needs & {"logp_old", "kl_full"} else None
            ref_all = log_probs(self.reference, micro) if self.reference is not None else None
            if "logp_old" in needs and logp_all is not None:
                parts["logp_old"].append(chosen(logp_all, micro))
            if "logp_ref" in needs and ref_all is not None:
                parts["logp_ref"].append(chosen(ref_all, micro))
            if "kl_full" in needs and logp_all is not None and ref_all is not None:
                parts["kl_full"].append(full_kl(logp_all, ref_all).expand(micro.mask.shape))
            if "score_norm" in needs:
                parts["score_norm"].append(self.score_norm(micro))
            if "value" in needs:
                parts["value"].append(self.values(micro))
        return {name: joined(values, batch) for name, values in parts.items()}

    @torch.enable_grad()
    def score_norm(self, batch: Batch) -> Float[Tensor, "prompt sample 1"]:
        """‖∇ log π(response)‖², one backward pass per response."""
        total = chosen(log_probs(self.policy, batch), batch).sum(-1)
        norms = []
        for logp in total.flatten():
            gradients = torch.autograd.grad(logp, self.trainable(), retain_graph=True, allow_unused=True)
            norms.append(sum((g**2).sum() for g in gradients if g is not None))
        return torch.stack(norms).view(*total.shape, 1)  # type: ignore[arg-type]

    def linearized(self, micro: Batch) -> Linearized:
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
            parts.append(counted_sum(full_kl(old, self.log_probs(micro)), micro))
        return torch.stack(parts).sum() / max(mini.tokens, 1)

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

"""The learner of small policies and small reward models, in one process."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ascent.core.types import Batch, Outputs, Rollouts
from ascent.core.update import Adam, Update
from ascent.models.small_policies import Policy, ValueFunction
from ascent.training.lean_autograd import run_backward, use_fused_adamw
from ascent.training.learner import InProcessLearner


def log_probs(policy: Policy, batch: Rollouts) -> Float[Tensor, "prompt #sample token vocab"]:
    """Return log π over the whole vocabulary at every state of the batch, at its sampling temperature."""
    response, states = without_gaps(batch) if batch.has_gaps else (batch.response, None)
    logits = policy.logits(batch.prompt, response)
    if states is not None:
        every = logits.expand(-1, response.shape[1], -1, -1)
        logits = every.gather(2, states[..., :-1, None].expand(-1, -1, -1, logits.shape[-1]))
    return torch.log_softmax(logits if batch.temperature == 1.0 else logits / batch.temperature, -1)


def values_of(model: ValueFunction, batch: Rollouts) -> Float[Tensor, "prompt sample state"]:
    """Return V of the state before each token and of the state after the last one."""
    if not batch.has_gaps:
        return model.values(batch.prompt, batch.response)
    response, states = without_gaps(batch)
    return model.values(batch.prompt, response).gather(-1, states)


def without_gaps(batch: Rollouts) -> tuple[Int[Tensor, "prompt sample token"], Int[Tensor, "prompt sample state"]]:
    """Move the present tokens of responses to the front. Return them and the index of each state among theirs."""
    order = (~batch.present).to(torch.uint8).argsort(dim=-1, stable=True)
    return batch.response.gather(-1, order), torch.nn.functional.pad(batch.present.cumsum(-1), (1, 0))


def action_logprobs(logp_all: Tensor, batch: Rollouts) -> Float[Tensor, "prompt sample token"]:
    """Return the log-prob of each action; 0 at every other token, so that a ratio is 1 there."""
    if logp_all.shape[1] == 1:  # the same distributions for every sample
        logp = logp_all.squeeze(1).gather(-1, batch.response.transpose(1, 2)).transpose(1, 2)
    else:
        logp = logp_all.gather(-1, batch.response.unsqueeze(-1)).squeeze(-1)
    return logp if batch.all_actions else torch.where(batch.mask, logp, 0.0)


def full_kl(logp_all: Tensor, logp_ref_all: Tensor) -> Float[Tensor, "prompt #sample token"]:
    """Return KL(π ‖ π_ref) over the vocabulary."""
    return (logp_all.exp() * (logp_all - logp_ref_all)).sum(-1)


class SmallLearner(InProcessLearner):
    """Trains a policy, or a reward model on a policy's backbone, in this process."""

    provides = InProcessLearner.provides | {"score_norm"}

    def __init__(
        self,
        policy: Policy | ValueFunction,
        update: Update,
        reference: bool,
        outputs: frozenset[str],
        micro_batch: int = 0,
        critic: ValueFunction | None = None,
        critic_update: Adam | None = None,
    ):
        self.policy: Any = policy
        self.outputs, self.micro_batch = outputs, micro_batch
        self.reference: Any = copy.deepcopy(policy).requires_grad_(False) if reference else None
        self._params = dict(policy.named_parameters())
        self._trainable = [p for p in policy.parameters() if p.requires_grad]
        self._loss_grad = -torch.ones((), dtype=self._trainable[0].dtype)
        self.train_critic(critic, critic_update)
        self.optimizer = use_fused_adamw(update.optimizer(self.trainable()))
        self.critic_optimizer = use_fused_adamw(self.critic_optimizer)

    def backward(self, objective: Tensor) -> None:
        run_backward(objective, self._loss_grad)

    def split(self, batch: Batch) -> Iterator[Batch]:
        """Split a batch into micro-batches of at most `micro_batch` tokens, whole responses and whole pairs."""
        least, width = 1 if batch.sampled else batch.mask.shape[1], batch.prompt.shape[1] + batch.mask.shape[2]
        return batch.microbatches(max(least, self.micro_batch // width) if self.micro_batch else 0)

    def values(self, batch: Batch) -> Float[Tensor, "prompt sample state"]:
        return values_of(self.critic, batch)

    def evaluate(self, batch: Batch) -> Outputs:
        logp_all = log_probs(self.policy, batch)
        if "entropy" in self.outputs:
            entropy = -(logp_all.exp() * logp_all).sum(-1)
        else:  # a metric only; this form has no finite gradient at a probability of 0
            entropy = torch.special.entr(logp_all.detach().exp()).sum(-1)
        kl = None
        if "kl_full" in self.outputs:
            assert self.reference is not None
            kl = full_kl(logp_all, log_probs(self.reference, batch)).expand(batch.mask.shape)
        value = self.values(batch) if "value" in self.outputs else None
        return Outputs(action_logprobs(logp_all, batch), entropy.expand(batch.mask.shape), kl, value=value)

    def scored(self, micro: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        scores = {}
        if needs & {"logp_old", "kl_full"}:
            logp_all = log_probs(self.policy, micro)
            scores["logp_old"] = action_logprobs(logp_all, micro)
        if needs & {"logp_ref", "kl_full"}:
            ref_all = log_probs(self.reference, micro)
            scores["logp_ref"] = action_logprobs(ref_all, micro)
        if "kl_full" in needs:
            scores["kl_full"] = full_kl(logp_all, ref_all).expand(micro.mask.shape)
        if "score_norm" in needs:
            scores["score_norm"] = self.score_norm(micro)
        if "value" in needs:
            scores["value"] = self.values(micro)
        return scores

    @torch.enable_grad()
    def score_norm(self, batch: Batch) -> Float[Tensor, "prompt sample 1"]:
        """Return ‖∇ log π(response)‖², by one backward pass per response."""
        total = action_logprobs(log_probs(self.policy, batch), batch).sum(-1)
        norms = []
        for logp in total.flatten():
            gradients = torch.autograd.grad(logp, self.trainable(), retain_graph=True, allow_unused=True)
            norms.append(sum((g**2).sum() for g in gradients if g is not None))
        return torch.stack(norms).view(*total.shape, 1)  # type: ignore[arg-type]

    def distributions(self, micro: Batch) -> tuple[Tensor, Tensor]:
        logp_all, counted = log_probs(self.policy, micro), micro.loss_mask.unsqueeze(-1)
        return logp_all, counted.sum(1, keepdim=True) if logp_all.shape[1] == 1 else counted

    def kl(self, micro: Batch, params: list[Tensor]) -> Float[Tensor, "prompt #sample token"]:
        now = [p.clone() for p in self.trainable()]
        self.set_trainable(params)
        old = log_probs(self.policy, micro)
        self.set_trainable(now)
        return full_kl(old, log_probs(self.policy, micro))

    @torch.no_grad()
    def mix_reference(self, rate: float) -> None:
        assert self.reference is not None
        for kept, now in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
            kept.lerp_(now, rate)

    def state(self) -> dict[str, dict[str, Tensor]]:
        groups = super().state() | {"params": dict(self.policy.state_dict())}
        return groups if self.reference is None else groups | {"reference": dict(self.reference.state_dict())}

    def restore(self, state: dict[str, dict[str, Tensor]]) -> None:
        self.policy.load_state_dict(state["params"])
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        super().restore(state)


# ---- reward models and process rewards ----------------------------------------------------------


def score_small_responses(model: ValueFunction, batch: Rollouts) -> Float[Tensor, "prompt sample 1"]:
    """Return the rating of each response: the head's output at the state after the last token."""
    return values_of(model, batch).gather(-1, batch.extent.unsqueeze(-1))


def score_small_steps(model: ValueFunction, batch: Rollouts) -> Float[Tensor, "prompt sample token"]:
    """Return the rating of each action by a process reward: the head's output at the state after it."""
    return torch.where(batch.mask, values_of(model, batch)[..., 1:], 0.0)

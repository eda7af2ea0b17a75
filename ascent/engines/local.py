"""One process, one small policy: the reference that every other engine has to reproduce."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.engines.base import Stepped
from ascent.policies.base import Policy
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

    def __init__(self, policy: Policy, update: Update, reference: bool, outputs: frozenset[str], micro_batch: int = 0):
        self.policy, self.outputs, self.micro_batch = policy, outputs, micro_batch
        self.reference = copy.deepcopy(policy).requires_grad_(False) if reference else None
        self._params: dict[str, Tensor] = dict(policy.named_parameters())
        self._trainable: list[Tensor] = [p for p in policy.parameters() if p.requires_grad]
        self._uphill = -torch.ones((), dtype=self._trainable[0].dtype)  # objectives are maximised
        self.optimizer = update.optimizer(self._trainable)

    def params(self) -> dict[str, Tensor]:
        return self._params

    def trainable(self) -> list[Tensor]:
        return self._trainable

    def split(self, batch: Batch) -> Iterator[Batch]:
        """What goes through the policy at once: at most `micro_batch` tokens, whole responses. Never numbers."""
        width = batch.prompt.shape[1] + batch.mask.shape[2]
        return batch.microbatches(max(1, self.micro_batch // width) if self.micro_batch else 0)

    def evaluate(self, batch: Batch) -> Outputs:
        """The training forward."""
        logp_all = log_probs(self.policy, batch)
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
            logp_all = log_probs(self.policy, micro) if needs & {"logp_old", "kl_full"} else None
            ref_all = log_probs(self.reference, micro) if self.reference is not None else None
            if "logp_old" in needs and logp_all is not None:
                found["logp_old"].append(chosen(logp_all, micro))
            if "logp_ref" in needs and ref_all is not None:
                found["logp_ref"].append(chosen(ref_all, micro))
            if "kl_full" in needs and logp_all is not None and ref_all is not None:
                found["kl_full"].append(full_kl(logp_all, ref_all).expand(micro.mask.shape))
            if "score_norm" in needs:
                found["score_norm"].append(self.score_norm(micro))
        shape = batch.mask.shape[:2]
        return {name: torch.cat([p.flatten(0, 1) for p in parts]).unflatten(0, shape) for name, parts in found.items()}

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
        total: Tensor | None = None
        sums: dict[str, Tensor] = {}
        self._logp: list[Tensor] = []
        for micro in self.split(mini):
            out = self.evaluate(micro)
            terms = objective(micro, out)
            terms.objective.backward(self._uphill)
            self._logp.append(out.logp.detach())
            value = terms.objective.detach()
            total = value if total is None else total + value
            sums = {name: sums[name] + s if name in sums else s for name, s in terms.sums.items()}
        assert total is not None
        return Terms(total, sums)

    def step(self, mini: Batch, objective: Objective, update: Update) -> Stepped:
        """One update on a mini-batch, and what to report of it."""
        terms, norm = update(self, mini, objective)
        logp = self._logp[0]
        if len(self._logp) > 1:
            logp = torch.cat([part.flatten(0, 1) for part in self._logp]).unflatten(0, mini.mask.shape[:2])
        return Stepped({"loss": -terms.objective, "grad_norm": norm, **terms.sums}, logp)

    @torch.no_grad()
    def mix_reference(self, rate: float) -> None:
        assert self.reference is not None
        for kept, now in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
            kept.lerp_(now, rate)

    def state(self) -> dict[str, dict[str, Tensor]]:
        groups = {"params": {k: v.detach() for k, v in self.policy.state_dict().items()}}
        groups["optimizer"] = self._optimizer_state()
        if self.reference is not None:
            groups["reference"] = dict(self.reference.state_dict())
        return groups

    def restore(self, state: dict[str, dict[str, Tensor]]) -> None:
        self.policy.load_state_dict(state["params"])
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        self._restore_optimizer(state["optimizer"])

    def _optimizer_state(self) -> dict[str, Tensor]:
        states = (self.optimizer.state.get(p, {}) for p in self.trainable())
        return {f"{i}.{key}": value for i, state in enumerate(states) for key, value in state.items()}

    def _restore_optimizer(self, state: dict[str, Tensor]) -> None:
        parameters = self.trainable()
        for name, value in state.items():
            index, key = name.split(".", 1)
            parameter = parameters[int(index)]
            device = parameter.device if key != "step" or parameter.is_cuda else value.device
            self.optimizer.state[parameter][key] = value.to(device, copy=True)

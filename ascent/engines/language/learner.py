"""A learner for language models that wastes nothing: no padding, no prompt encoded twice, no logits kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ascent.engines.base import Stepped
from ascent.engines.kept import remembered, remind
from ascent.engines.language.attention import ours
from ascent.engines.language.critic import LanguageCritic
from ascent.engines.language.head import Head, token_stats
from ascent.engines.language.states import packed_states, padded_states, parts_of, spread
from ascent.engines.local import LocalLearner
from ascent.policies.causal_lm import LanguageModel
from ascent.policies.critics import ValueLoss
from ascent.types import Batch, Outputs, Refused, Rollouts, Terms
from ascent.update import Objective, Update


class LanguageLearner(LocalLearner):
    """Trains a language model in this process.

    Parameters in bfloat16 are stepped through float32 copies of their own: a step of 1e-6 would be lost in them.
    The reference is a copy of the trained parameters alone, put in their place for as long as it is asked.
    """

    def __init__(
        self,
        lm: LanguageModel,
        update: Update,
        reference: bool,
        outputs: frozenset[str],
        micro_batch: int = 0,
        checkpointing: bool = False,
        critic: LanguageCritic | None = None,
        critic_update: Update | None = None,
    ):
        self.lm, self.outputs, self.micro_batch, self.checkpointing = lm, outputs, micro_batch, checkpointing
        self._params = lm.trained()
        self._working = list(self._params.values())
        narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in self._working)
        self._trainable = [p.detach().float().clone() for p in self._working] if narrow else self._working
        self.optimizer = update.optimizer(self._trainable)
        self.kept = [p.detach().clone() for p in self._working] if reference else None
        self.moved = False
        exact = self._working[0].dtype == torch.float64
        self._uphill = -torch.ones((), dtype=torch.float64 if exact else torch.float32)
        self.critic, self.critic_optimizer = critic, None  # type: ignore[assignment]
        if critic is not None and critic_update is not None:
            self.critic_optimizer = critic_update.optimizer(critic.trained())
            self.fills = self.fills | {"value"}
        if update.whole and narrow:
            raise Refused(
                "--update trust-region with parameters in bfloat16: their rounding is larger than its steps. Set "
                "--policy.dtype float32"
            )
        _no_dropout(lm)

    # ---- forward passes -------------------------------------------------------------------------

    def split(self, batch: Batch) -> Iterator[Batch]:
        return parts_of(batch, self.micro_batch or 2**62)

    def states(self, batch: Rollouts) -> Float[Tensor, "state width"]:
        """The hidden state before every unmasked token, in the order of the mask."""
        return packed_states(self.lm, batch) if self.lm.shares else padded_states(self.lm, batch)

    def evaluate(self, batch: Batch) -> Outputs:
        """The training forward."""
        head, target = Head.of(self.lm.model), batch.response[batch.mask].to(self.lm.device)
        hidden_ref, head_ref = None, None
        if "kl_full" in self.outputs:
            with torch.no_grad(), self._as_reference():
                hidden_ref, head_ref = self.states(batch), _frozen(Head.of(self.lm.model))
        hidden = self.states(batch)
        logp, entropy, kl = token_stats(
            head, hidden, target, batch.temperature, hidden_ref, head_ref, "entropy" in self.outputs
        )
        return Outputs(
            spread(logp, batch.mask), spread(entropy, batch.mask), None if kl is None else spread(kl, batch.mask)
        )

    @torch.no_grad()
    def score(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        needs = needs & self.fills
        found: dict[str, list[Tensor]] = {name: [] for name in needs}
        with self._attention():
            for micro in self.split(batch) if needs else ():
                for name, value in self._scored(micro, needs).items():
                    found[name].append(value.flatten(0, 1))
        return {name: torch.cat(parts).unflatten(0, batch.mask.shape[:2]) for name, parts in found.items()}

    def _scored(self, micro: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        target, temperature = micro.response[micro.mask].to(self.lm.device), micro.temperature
        hidden_ref, head_ref = None, None
        if needs & {"logp_ref", "kl_full"}:
            with self._as_reference():
                head_ref = _frozen(Head.of(self.lm.model))
                hidden_ref = self.states(micro)
                if "logp_ref" in needs:
                    found["logp_ref"] = spread(token_stats(head_ref, hidden_ref, target, temperature)[0], micro.mask)
        if needs & {"logp_old", "kl_full"}:
            head = Head.of(self.lm.model)
            far = (hidden_ref, head_ref) if "kl_full" in needs else (None, None)
            logp, _, kl = token_stats(head, self.states(micro), target, temperature, *far)
            found["logp_old"] = spread(logp, micro.mask)
            if kl is not None:
                found["kl_full"] = spread(kl, micro.mask)
        if "score_norm" in needs:  # too dear to compute here: the response's length stands for it (OPO)
            found["score_norm"] = micro.length.unsqueeze(-1).float()
        if "value" in needs:
            found["value"] = self.values(micro)
        return {name: value for name, value in found.items() if name in needs}

    def values(self, batch: Batch) -> Float[Tensor, "prompt sample state"]:
        critic: Any = self.critic
        with critic.attention():
            return critic.values(batch)

    # ---- steps ----------------------------------------------------------------------------------

    def gradient(self, mini: Batch, objective: Objective) -> Terms:
        self.lm.model.train(self.checkpointing)
        for p in self._working:
            p.grad = None
        with self._attention():
            terms = super().gradient(mini, objective)
        self.lm.model.eval()
        if self._trainable is not self._working:
            for wide, p in zip(self._trainable, self._working, strict=True):
                wide.grad, p.grad = None if p.grad is None else p.grad.float(), None
        return terms

    def step(self, mini: Batch, objective: Objective, update: Update) -> Stepped:
        stepped = super().step(mini, objective, update)
        self._narrow()
        return stepped

    @torch.no_grad()
    def _narrow(self) -> None:
        """The working parameters follow their float32 copies."""
        if self._trainable is not self._working:
            for p, wide in zip(self._working, self._trainable, strict=True):
                p.copy_(wide)

    def total(self, mini: Batch, objective: Objective) -> Tensor:
        with self._attention():
            return super().total(mini, objective)

    def assign(self, params: list[Tensor]) -> None:
        super().assign(params)
        self._narrow()

    @torch.no_grad()
    def kl_from(self, mini: Batch, params: list[Tensor]) -> Tensor:
        """The mean KL(π_old ‖ π) over the whole vocabulary, a chunk of tokens at a time."""
        now, parts = [p.clone() for p in self.trainable()], []
        with self._attention():
            for micro in self.split(mini):
                hidden, head = self.states(micro), _kept(Head.of(self.lm.model))
                self.assign(params)
                old, target = self.states(micro), micro.response[micro.mask].to(self.lm.device)
                _, _, kl = token_stats(Head.of(self.lm.model), old, target, micro.temperature, hidden, head)
                self.assign(now)
                assert kl is not None
                parts.append(self._counted(spread(kl, micro.mask), micro))
        return torch.stack(parts).sum() / max(mini.tokens, 1)

    def fisher(self, mini: Batch) -> Callable[[list[Tensor]], list[Tensor]]:
        with self._attention():
            product = super().fisher(mini)

        def under_ours(vector: list[Tensor]) -> list[Tensor]:
            with self._attention():
                return product(vector)

        return under_ours

    def _linearized(self, micro: Batch) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor]:
        """As the base has it, on the states of unmasked tokens: whole distributions, so over few tokens only."""
        with sdpa_kernel(SDPBackend.MATH):
            logits = Head.of(self.lm.model).logits(self.states(micro))
        logp_all = torch.log_softmax(logits / micro.temperature, -1)
        probe = torch.zeros_like(logp_all, requires_grad=True)
        slope = torch.autograd.grad(logp_all, self.trainable(), probe, create_graph=True, materialize_grads=True)
        counted = micro.counted[micro.mask].to(logp_all.device).unsqueeze(-1)
        return logp_all, probe, slope, logp_all.detach().exp() * counted

    def fit(self, mini: Batch, loss: ValueLoss) -> Tensor:
        critic: Any = self.critic
        critic.backbone.train(self.checkpointing)
        with critic.attention():
            summed = super().fit(mini, loss)
        critic.backbone.eval()
        return summed

    def _attention(self) -> AbstractContextManager[None]:
        return ours(self.lm.model) if self.lm.shares else nullcontext()

    # ---- the reference, and what a checkpoint holds ---------------------------------------------

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """Inside, the model has the reference's parameters."""
        assert self.kept is not None
        own = [p.data for p in self._working]
        for p, kept in zip(self._working, self.kept, strict=True):
            p.data = kept
        try:
            yield
        finally:
            for p, data in zip(self._working, own, strict=True):
                p.data = data

    @torch.no_grad()
    def mix_reference(self, rate: float) -> None:
        assert self.kept is not None
        self.moved = True
        for kept, now in zip(self.kept, self._trainable, strict=True):
            kept.lerp_(now.to(kept.dtype), rate)

    def state(self) -> dict[str, dict[str, Tensor]]:
        names = list(self._params)
        groups = {"params": {name: p.detach() for name, p in self._params.items()}}
        groups["optimizer"] = remembered(self.optimizer)
        if self.critic is not None:
            groups["critic"] = self.critic.state_dict()
            groups["critic_optimizer"] = remembered(self.critic_optimizer)
        if self._trainable is not self._working:
            groups["wide"] = dict(zip(names, self._trainable, strict=True))
        if self.kept is not None and self.moved:
            groups["reference"] = dict(zip(names, self.kept, strict=True))
        return groups

    @torch.no_grad()
    def restore(self, state: dict[str, dict[str, Tensor]]) -> None:
        load_params(self._params, state["params"])
        for name, wide in zip(self._params, self._trainable, strict=True):
            if "wide" in state:
                wide.copy_(state["wide"][name])
        if "reference" in state and self.kept is not None:
            self.moved = True
            for name, kept in zip(self._params, self.kept, strict=True):
                kept.copy_(state["reference"][name])
        remind(self.optimizer, state["optimizer"])
        if self.critic is not None:
            load_params(dict(self.critic.named_parameters()), state["critic"], partly=True)
            remind(self.critic_optimizer, state["critic_optimizer"])


@torch.no_grad()
def load_params(own: dict[str, Tensor], given: dict[str, Tensor], partly: bool = False) -> None:
    """Trained parameters from a checkpoint; refused where they are another model's."""
    same = own.keys() >= given.keys() if partly else own.keys() == given.keys()
    if not same or any(own[k].shape != given[k].shape for k in given):
        raise Refused(
            "these parameters are not this model's: set the --model and --policy.lora that they were made with"
        )
    for name, value in given.items():
        own[name].copy_(value)


def _kept(head: Head) -> Head:
    """A head with copies of its parameters, for these are about to be written over."""
    return Head(head.weight.clone(), None if head.bias is None else head.bias.clone(), head.scale, head.cap)


def _frozen(head: Head) -> Head:
    """The head with the parameters that it has now, whatever is put in their place later."""
    return Head(head.weight.data, None if head.bias is None else head.bias.data, head.scale, head.cap)


def _no_dropout(lm: LanguageModel) -> None:
    """Log-probs are the policy's own only without dropout; then training mode is nothing but checkpointing."""
    for module in lm.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]

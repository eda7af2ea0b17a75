"""A learner for language models that wastes nothing: no padding, no prompt encoded twice, no logits kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ascent.core.protocols import Objective, Stepped, TakeStep, ValueLoss
from ascent.core.types import Batch, Outputs, Refused, Terms
from ascent.core.update import Update
from ascent.engines.language.attention import ours
from ascent.engines.language.learning.critic import LanguageCritic
from ascent.engines.language.learning.elementwise import fuse
from ascent.engines.language.learning.head import Head, token_stats
from ascent.engines.language.learning.parameters import begin_with, gradients_into, load_params, room, without_dropout
from ascent.engines.language.learning.states import Forward, parts_of, place, spread, targets
from ascent.engines.learner import InProcessLearner, Linearized, counted_sum, remembered, remind
from ascent.policies.causal_lm import LanguageModel


class LanguageLearner(InProcessLearner):
    """Trains a language model in this process.

    Parameters in bfloat16 are stepped through float32 copies of their own: a step of 1e-6 would be lost in them. Their
    gradients are summed over micro-batches in float32 too. On a GPU a batch is computed with there, and the host waits
    for it once, at the end of an update. The reference is a copy of the trained parameters alone: the same module is
    called with them in place of its own.
    """

    fills = frozenset({"logp_old", "logp_ref", "kl_full", "score_norm"})

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
        self._params, self._forward = lm.trained(), Forward(lm)
        self._working = list(self._params.values())
        narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in self._working)
        self._trainable = begin_with(lm, self._params) if narrow else self._working
        self.optimizer = update.optimizer(self._trainable)
        self.kept = [p.detach().clone() for p in self._working] if reference else None
        self.moved = False
        self._average: list[Tensor] | None = None
        """A reference that moves, in float32 where parameters are narrower: its steps would be lost in them."""
        exact = self._working[0].dtype == torch.float64
        self._uphill = -torch.ones((), dtype=torch.float64 if exact else torch.float32, device=lm.device)
        self.critic = critic
        if critic is not None and critic_update is not None:
            self.critic_optimizer = critic_update.optimizer(critic.trained())
            self.fills = self.fills | {"value"}
        if update.whole and narrow:
            raise Refused(
                "--update trust-region with parameters in bfloat16: their rounding is larger than its steps. Set "
                "--policy.dtype float32"
            )
        without_dropout(lm)
        if lm.device.type == "cuda":
            fuse(lm.model)

    # ---- forward passes -------------------------------------------------------------------------

    @property
    def micro_tokens(self) -> int:
        """The most tokens that go through at once."""
        return self.micro_batch or room(self.lm, self.checkpointing, self.kept is not None, self.critic)

    def split(self, batch: Batch) -> Iterator[Batch]:
        return (place(part, self.lm.device) for part in parts_of(batch, self.micro_tokens))

    def evaluate(self, batch: Batch) -> Outputs:
        reference: tuple[Head | None, Tensor | None] = (None, None)
        if "kl_full" in self.outputs:
            assert self.kept is not None
            with torch.no_grad():
                reference = self._forward.instead(self.kept, batch, _both)
        logp, entropy, kl = self._forward(batch, self._stats(batch, *reference, "entropy" in self.outputs))
        return Outputs(
            spread(logp, batch.mask), spread(entropy, batch.mask), None if kl is None else spread(kl, batch.mask)
        )

    def _stats(
        self, batch: Batch, head_ref: Head | None = None, hidden_ref: Tensor | None = None, entropy: bool = False
    ) -> Callable[[Head, Tensor], tuple[Tensor, Tensor, Tensor | None]]:
        """How log-probs, entropies and the KL to another policy are read off hidden states."""
        target = targets(batch, self.lm.device)

        def read(head: Head, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            return token_stats(head, hidden, target, batch.temperature, hidden_ref, head_ref, entropy)

        return read

    @torch.no_grad()
    def score(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        needs = needs & self.fills
        parts: dict[str, list[Tensor]] = {name: [] for name in needs}
        with self._attention():
            for micro in self.split(batch) if needs else ():
                for name, value in self._scored(micro, needs).items():
                    parts[name].append(value.flatten(0, 1))
        return {name: _on_host(torch.cat(values), batch) for name, values in parts.items()}

    def _scored(self, micro: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        scores: dict[str, Tensor] = {}
        reference: tuple[Head | None, Tensor | None] = (None, None)
        if needs & {"logp_ref", "kl_full"}:
            assert self.kept is not None
            reference = self._forward.instead(self.kept, micro, _both)
            scores["logp_ref"] = spread(self._stats(micro)(*reference)[0], micro.mask)
        if needs & {"logp_old", "kl_full"}:
            other = reference if "kl_full" in needs else (None, None)
            logp, _, kl = self._forward(micro, self._stats(micro, *other))
            scores["logp_old"] = spread(logp, micro.mask)
            if kl is not None:
                scores["kl_full"] = spread(kl, micro.mask)
        if "score_norm" in needs:  # too expensive to compute here: the response's length stands for it (OPO)
            scores["score_norm"] = micro.length.unsqueeze(-1).float()
        if "value" in needs:
            scores["value"] = self.values(micro)
        return {name: value for name, value in scores.items() if name in needs}

    def values(self, batch: Batch) -> Float[Tensor, "prompt sample state"]:
        with self.critic.attention():
            return self.critic(batch)

    # ---- steps ----------------------------------------------------------------------------------

    def gradient(self, mini: Batch, objective: Objective) -> Terms:
        self.lm.model.train(self.checkpointing)
        with self._attention(), gradients_into(self._trainable, self._working):
            terms = super().gradient(mini, objective)
        self.lm.model.eval()
        return terms

    def step(self, mini: Batch, objective: Objective, update: TakeStep) -> Stepped:
        stepped = super().step(mini, objective, update)
        self._narrow()
        return stepped if self.lm.device.type == "cpu" else fetched(stepped, self.lm.device)

    @torch.no_grad()
    def _narrow(self) -> None:
        """The working parameters follow their float32 copies."""
        if self._trainable is not self._working:
            torch._foreach_copy_(self._working, self._trainable)

    def total(self, mini: Batch, objective: Objective) -> Tensor:
        with self._attention():
            return super().total(mini, objective)

    def assign(self, params: list[Tensor]) -> None:
        super().assign(params)
        self._narrow()

    @torch.no_grad()
    def kl_from(self, mini: Batch, params: list[Tensor]) -> Tensor:
        """The mean KL(π_old ‖ π) over the whole vocabulary, a chunk of tokens at a time."""
        parts = []
        with self._attention():
            for micro in self.split(mini):
                now = self._forward(micro, _both)
                _, _, kl = self._forward.instead(params, micro, self._stats(micro, *now))
                assert kl is not None
                parts.append(counted_sum(spread(kl, micro.mask), micro))
        return torch.stack(parts).sum() / max(mini.tokens, 1)

    def fisher(self, mini: Batch) -> Callable[[list[Tensor]], list[Tensor]]:
        with self._attention():
            product = super().fisher(mini)

        def under_ours(vector: list[Tensor]) -> list[Tensor]:
            with self._attention():
                return product(vector)

        return under_ours

    def linearized(self, micro: Batch) -> Linearized:
        """At the states before actions: whole distributions, so over few tokens only."""
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be differentiated twice
            logits = self._forward(micro, Head.logits)
        logp_all = torch.log_softmax(logits / micro.temperature, -1)
        probe = torch.zeros_like(logp_all, requires_grad=True)
        slope = torch.autograd.grad(logp_all, self.trainable(), probe, create_graph=True, materialize_grads=True)
        counted = micro.counted[micro.mask].unsqueeze(-1)
        return logp_all, probe, slope, logp_all.detach().exp() * counted

    def fit(self, mini: Batch, loss: ValueLoss) -> Tensor:
        self.critic.backbone.train(self.checkpointing)
        with self.critic.attention():
            summed = super().fit(mini, loss)
        self.critic.backbone.eval()
        return summed.cpu()

    def _attention(self) -> AbstractContextManager[None]:
        return ours(self.lm.model) if self.lm.shares else nullcontext()

    # ---- the reference, and what a checkpoint holds ---------------------------------------------

    @torch.no_grad()
    def mix_reference(self, rate: float) -> None:
        assert self.kept is not None
        self.moved = True
        if self._trainable is not self._working and self._average is None:
            self._average = [kept.float() for kept in self.kept]
        average = self._average or self.kept
        for old, now in zip(average, self._trainable, strict=True):
            old.lerp_(now, rate)
        if average is not self.kept:
            torch._foreach_copy_(self.kept, average)

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
            groups["reference"] = dict(zip(names, self._average or self.kept, strict=True))
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
            if self._trainable is not self._working:
                self._average = [state["reference"][name].to(self.lm.device, torch.float32) for name in self._params]
        remind(self.optimizer, state["optimizer"])
        if self.critic is not None:
            load_params(dict(self.critic.named_parameters()), state["critic"], partly=True)
            remind(self.critic_optimizer, state["critic_optimizer"])


def fetched(stepped: Stepped, device: torch.device) -> Stepped:
    """What a step reports, on the host: all numbers in one copy, and all tokens in another."""
    named = [*stepped.metrics.items(), *stepped.sums.items()]
    numbers = torch.stack([value.to(device) for _, value in named]).cpu()  # here the host waits
    by_name = dict(zip((name for name, _ in named), numbers, strict=True))
    tokens = [stepped.logp] if stepped.entropy is None else [stepped.logp, stepped.entropy]
    logp, *entropy = torch.stack(tokens).cpu()
    metrics, sums = ({name: by_name[name] for name in names} for names in (stepped.metrics, stepped.sums))
    return Stepped(metrics, sums, logp, *entropy)


def _both(head: Head, hidden: Tensor) -> tuple[Head, Tensor]:
    return head, hidden


def _on_host(values: Tensor, like: Batch) -> Tensor:
    """Numbers of all responses, part after part, on the host as `[prompt sample …]`."""
    return values.cpu().unflatten(0, like.mask.shape[:2])

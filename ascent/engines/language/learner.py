"""A learner for language models that wastes nothing: no padding, no prompt encoded twice, no logits kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.engines.base import Stepped
from ascent.engines.language.attention import Group, Packed, ours
from ascent.engines.language.head import Head, token_stats
from ascent.engines.local import LocalLearner
from ascent.policies.causal_lm import LanguageModel
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
        _no_dropout(lm)

    # ---- forward passes -------------------------------------------------------------------------

    def split(self, batch: Batch) -> Iterator[Batch]:
        """Parts of about `micro_batch` tokens, prompts counted once: whole groups where they fit, else parts of one."""
        budget = self.micro_batch or 2**62
        lengths, prompts = _lengths(batch.mask), (batch.prompt >= 0).sum(-1).tolist()
        start, used = 0, 0
        for i, (prompt, responses) in enumerate(zip(prompts, lengths, strict=True)):
            cost = prompt + sum(responses)
            if i > start and used + cost > budget:
                yield batch.select(slice(start, i))
                start, used = i, 0
            if cost > budget and len(responses) > 1:
                yield from self._split_group(batch, i, prompt, responses, budget)
                start, used = i + 1, 0
            else:
                used += cost
        if start < len(prompts):
            yield batch if start == 0 else batch.select(slice(start, len(prompts)))

    def _split_group(self, batch: Batch, i: int, prompt: int, responses: list[int], budget: int) -> Iterator[Batch]:
        start, used = 0, prompt
        for s, length in enumerate(responses):
            if s > start and used + length > budget:
                yield batch.select(slice(i, i + 1), slice(start, s))
                start, used = s, prompt
            used += length
        yield batch.select(slice(i, i + 1), slice(start, len(responses)))

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
        return Outputs(_spread(logp, batch), _spread(entropy, batch), None if kl is None else _spread(kl, batch))

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
                    found["logp_ref"] = _spread(token_stats(head_ref, hidden_ref, target, temperature)[0], micro)
        if needs & {"logp_old", "kl_full"}:
            head = Head.of(self.lm.model)
            far = (hidden_ref, head_ref) if "kl_full" in needs else (None, None)
            logp, _, kl = token_stats(head, self.states(micro), target, temperature, *far)
            found["logp_old"] = _spread(logp, micro)
            if kl is not None:
                found["kl_full"] = _spread(kl, micro)
        if "score_norm" in needs:  # too dear to compute here: the response's length stands for it (OPO)
            found["score_norm"] = micro.length.unsqueeze(-1).float()
        return {name: value for name, value in found.items() if name in needs}

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
        groups = {
            "params": {name: p.detach() for name, p in self._params.items()},
            "optimizer": self._optimizer_state(),
        }
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
        self._restore_optimizer(state["optimizer"])


@torch.no_grad()
def load_params(own: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    """Trained parameters from a checkpoint; refused where they are another model's."""
    if own.keys() != given.keys() or any(own[k].shape != given[k].shape for k in own):
        raise Refused(
            "these parameters are not this model's: set the --model and --policy.lora that they were made with"
        )
    for name, p in own.items():
        p.copy_(given[name])


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


def _lengths(mask: Tensor) -> list[list[int]]:
    """Tokens of each response up to its last unmasked one; masked ones between are context."""
    width = mask.shape[-1]
    last = width - mask.flip(-1).int().argmax(-1)
    return torch.where(mask.any(-1), last, 0).tolist()


def _spread(values: Tensor, batch: Rollouts) -> Float[Tensor, "prompt sample token"]:
    """Numbers of the unmasked tokens, back in their places; 0 elsewhere."""
    values = values.to(batch.mask.device)
    return values.new_zeros(batch.mask.shape).masked_scatter(batch.mask, values)


def packed_states(lm: LanguageModel, batch: Rollouts) -> Float[Tensor, "state width"]:
    """Hidden states from one packed row, [prompt, response 1, …, response G] a group, with no padding.

    The state before token 0 is the prompt's last; the last token of a response is nobody's context.
    """
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    places: list[Tensor] = []
    groups: list[Group] = []
    start = 0
    for row, responses, masks, lengths in zip(
        batch.prompt, batch.response, batch.mask, _lengths(batch.mask), strict=True
    ):
        prompt = row[row >= 0]
        size = len(prompt)
        ids.append(prompt)
        positions.append(torch.arange(size))
        end = start + size
        for response, mask, length in zip(responses, masks, lengths, strict=True):
            inner = max(length - 1, 0)
            ids.append(response[:inner])
            positions.append(torch.arange(size, size + inner))
            place = torch.arange(end - 1, end - 1 + length)
            place[:1] = start + size - 1
            places.append(place[mask[:length]])
            end += inner
        groups.append(Group(start, size, tuple(n - 1 for n in lengths if n > 1)))
        start = end
    device = lm.device
    row_ids, row_positions = torch.cat(ids)[None].to(device), torch.cat(positions)[None].to(device)
    hidden = lm.hidden(row_ids, row_positions, Packed(groups))[0]
    return hidden[torch.cat(places).to(device)]


def padded_states(lm: LanguageModel, batch: Rollouts) -> Float[Tensor, "state width"]:
    """The plain form, for any architecture: one row a response, its prompt repeated, padded on the right."""
    prompts = [row[row >= 0] for row in batch.prompt]
    rows: list[Tensor] = []
    places: list[tuple[int, Tensor]] = []
    for prompt, responses, masks, lengths in zip(
        prompts, batch.response, batch.mask, _lengths(batch.mask), strict=True
    ):
        for response, mask, length in zip(responses, masks, lengths, strict=True):
            places.append((len(prompt), mask[:length].nonzero().flatten()))
            rows.append(torch.cat([prompt, response[: max(length - 1, 0)]]))
    width = max(map(len, rows))
    device = lm.device
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    inside = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)], inside[i, : len(row)] = row, 1
    out = lm.backbone(input_ids=ids.to(device), attention_mask=inside.to(device), use_cache=False).last_hidden_state
    index = torch.cat([i * width + prompt - 1 + tokens for i, (prompt, tokens) in enumerate(places)])
    return out.flatten(0, 1)[index.to(device)]

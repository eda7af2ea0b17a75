"""A value head on a language model's hidden states, on a backbone of its own or on the policy's."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ascent.core.types import Refused, Rollouts
from ascent.engines.language.attention import ours
from ascent.engines.language.learning.flash import send
from ascent.engines.language.learning.states import before_actions, last_states, packed_states, padded_states, spread
from ascent.policies.causal_lm import LanguageModel


class LanguageCritic(nn.Module):
    """V(prompt, tokens so far) = head · hidden, 0 everywhere at first.

    A backbone of its own is a copy of the policy's first one, in float32, and trains what that one trains
    (every parameter, adapters, or the last layers). On the policy's backbone only the head is new.
    """

    def __init__(self, lm: LanguageModel, shared: bool):
        super().__init__()
        weight = lm.model.get_output_embeddings().weight
        if shared and weight.dtype not in (torch.float32, torch.float64):
            raise Refused(
                "--critic shared-critic with parameters in bfloat16: its steps would be lost in them. Set "
                "--policy.dtype float32, or --critic own-critic"
            )
        exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self._lm = [lm]  # in a list, so that a checkpoint of the critic does not hold the policy
        self.own = None if shared else copy.deepcopy(lm.backbone).to(exact)
        self.head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=exact)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def backbone(self) -> nn.Module:
        return self._lm[0].backbone if self.own is None else self.own

    def trained(self) -> list[Tensor]:
        """What its optimizer moves."""
        return [*self.head.parameters(), *(p for p in self.backbone.parameters() if p.requires_grad)]

    def state_dict(self, *args: object, **more: object) -> dict[str, Tensor]:  # type: ignore[override]
        """Its own trained parameters alone: the rest is the model's, and loaded with it."""
        names = {name for name, p in self.named_parameters() if p.requires_grad}
        return {name: p.detach() for name, p in self.named_parameters() if name in names}

    def attention(self) -> AbstractContextManager[None]:
        """Inside, its layers call our attention function."""
        lm = self._lm[0]
        if not lm.shares:
            return nullcontext()
        return ours(lm.model if self.own is None else self.own)

    def forward(self, batch: Rollouts) -> Float[Tensor, "prompt sample state"]:
        """V at the states before every action and behind the last token of each response; 0 at the others."""
        lm, states = self._lm[0], before_actions(batch) | last_states(batch)
        hidden = (packed_states if lm.shares else padded_states)(lm, batch, states, self.backbone)
        values = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)
        return spread(values, send(states, batch.mask.device))

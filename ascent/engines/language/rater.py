"""A reward model on a language model's backbone: a head, read after the last token of a response."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ascent.engines.language.flash import send
from ascent.engines.language.learner import LanguageLearner
from ascent.engines.language.states import host_of, lengths_of, packed_states, padded_states, spread, state_mask
from ascent.policies.causal_lm import LanguageModel
from ascent.types import Batch, Outputs, Refused, Rollouts
from ascent.update import Update

HEAD = "rating"
"""The head's name in the model, and so in checkpoints."""


def add_head(lm: LanguageModel) -> LanguageModel:
    """The model with a rating head, 0 at first, in place of its head for words, which is no longer trained.

    There is no bias: a constant in every reward cancels in a pair.
    """
    words = lm.model.get_output_embeddings().weight
    if words is not lm.model.get_input_embeddings().weight:
        words.requires_grad_(False)
    head = nn.Linear(words.shape[1], 1, bias=False, device=words.device, dtype=words.dtype)
    nn.init.zeros_(head.weight)
    setattr(lm.model, HEAD, head)
    return lm


def rate(lm: LanguageModel, batch: Rollouts) -> Float[Tensor, "prompt sample 1"]:
    """What the head gives the state after the last token of each response, in float32 or better."""
    states = packed_states if lm.shares else padded_states
    hidden = states(lm, batch, final=True)
    exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    values = F.linear(hidden.to(exact), getattr(lm.model, HEAD).weight.to(exact)).squeeze(-1)
    every = spread(values, state_mask(batch))
    last = torch.tensor(lengths_of(host_of(batch).mask)).unsqueeze(-1)
    return every.gather(-1, send(last, every.device))


class LanguageRater(LanguageLearner):
    """Trains a reward model in this process."""

    fills: frozenset[str] = frozenset()

    def __init__(self, lm: LanguageModel, update: Update, micro_batch: int = 0, checkpointing: bool = False):
        if not hasattr(lm.model, HEAD):
            raise Refused("a reward model needs a head: add_head(lm) comes first")
        super().__init__(lm, update, False, frozenset(), micro_batch, checkpointing)

    def evaluate(self, batch: Batch) -> Outputs:
        """A rating a response; the log-probs of a reward model are nobody's, and 0."""
        rating = rate(self.lm, batch)
        nothing = rating.new_zeros(batch.mask.shape)
        return Outputs(nothing, nothing, rating=rating)

    @torch.no_grad()
    def rate(self, batch: Rollouts) -> Float[Tensor, "prompt sample 1"]:
        with self._attention():
            return rate(self.lm, batch)

"""A reward model on a language model's backbone: a head, read after the last token of a response."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ascent.core.types import Batch, Outputs, Refused, Rollouts
from ascent.core.update import Update
from ascent.engines.language.learning.learner import LanguageLearner
from ascent.engines.language.learning.states import Forward, last_states
from ascent.policies.causal_lm import LanguageModel

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
    """What the head gives the state behind the last token of each response, in float32 or better."""
    values = Forward(lm)(batch, lambda _, hidden: read_rating(lm, hidden), last_states(batch))
    return values.view(*batch.mask.shape[:2], 1)


def read_rating(lm: LanguageModel, hidden: Float[Tensor, "state width"]) -> Float[Tensor, "state"]:
    """The rating head's number at each hidden state."""
    exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    head = getattr(lm.model, HEAD)
    bias = None if head.bias is None else head.bias.to(exact)
    return F.linear(hidden.to(exact), head.weight.to(exact), bias).squeeze(-1)


class LanguageRewardModelLearner(LanguageLearner):
    """Trains a reward model in this process."""

    fills: frozenset[str] = frozenset()

    def __init__(self, lm: LanguageModel, update: Update, micro_batch: int = 0, checkpointing: bool = False):
        if not hasattr(lm.model, HEAD):
            raise Refused("a reward model needs a head: add_head(lm) comes first")
        super().__init__(lm, update, False, frozenset(), micro_batch, checkpointing)

    def evaluate(self, batch: Batch) -> Outputs:
        """A rating per response; a reward model has no log-probs, and 0 stands for them."""
        rating = rate(self.lm, batch)
        nothing = rating.new_zeros(batch.mask.shape)
        return Outputs(nothing, nothing, rating=rating)

    @torch.no_grad()
    def rate(self, batch: Rollouts) -> Float[Tensor, "prompt sample 1"]:
        with self._attention():
            return rate(self.lm, batch)

"""A process reward on a language model's backbone: a head, read after each token of a response."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ascent.core.types import Batch, Outputs, Rollouts
from ascent.engines.language.learning.flash import send
from ascent.engines.language.learning.reward_model import HEAD, LanguageRewardModelLearner, add_head, read_rating
from ascent.engines.language.learning.states import Forward, after_actions, spread
from ascent.policies.causal_lm import LanguageModel


def add_step_head(lm: LanguageModel) -> LanguageModel:
    """A rating head with a bias: unlike in a pair, a constant counts."""
    head = getattr(add_head(lm).model, HEAD)
    head.bias = nn.Parameter(torch.zeros_like(head.weight[:, 0]))
    return lm


def score_steps(lm: LanguageModel, batch: Rollouts) -> Float[Tensor, "prompt sample token"]:
    """What the head gives the state that each action leads to, in float32 or better; 0 at other tokens."""
    states = after_actions(batch)
    values = Forward(lm)(batch, lambda _, hidden: read_rating(lm, hidden), states)
    return spread(values, send(states, batch.mask.device))[..., 1:]


class LanguageProcessRewardLearner(LanguageRewardModelLearner):
    """Trains a process reward in this process."""

    def evaluate(self, batch: Batch) -> Outputs:
        score = score_steps(self.lm, batch)
        nothing = score.new_zeros(batch.mask.shape)
        return Outputs(nothing, nothing, rating=score)

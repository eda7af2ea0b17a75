"""A learner whose model scores every step of a response: a value head, read after each token. Small worlds."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ascent.engines.given import LocalRater
from ascent.policies.base import ValueFunction
from ascent.types import Batch, Outputs, Rollouts


def score_steps(model: ValueFunction, batch: Rollouts) -> Float[Tensor, "prompt sample token"]:
    """The score of the state after each token."""
    return model.values(batch.prompt, batch.response)[..., 1:]


class LocalStepper(LocalRater):
    """Trains a process reward of a small world in this process."""

    def evaluate(self, batch: Batch) -> Outputs:
        score = score_steps(self.model, batch)
        nothing = score.new_zeros(batch.mask.shape)
        return Outputs(nothing, nothing, rating=score)

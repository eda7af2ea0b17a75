"""What the loop asks of a sampler and of a learner. Every engine passes the same contract tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor

from ascent.policies.critics import ValueLoss
from ascent.types import Batch, Metrics, Rollouts
from ascent.update import Objective, Update


@dataclass(frozen=True)
class Stepped:
    """What an optimizer step reports, as tensors that are read once the whole step is over."""

    metrics: dict[str, Tensor]
    """loss, grad_norm and what else the update reports."""
    sums: dict[str, Tensor]
    """Sums over the tokens, to be divided by their number."""
    logp: Float[Tensor, "prompt sample token"]
    """The trainer's log-probs of the mini-batch, before the step."""
    entropy: Float[Tensor, "prompt sample token"] | None = None
    """Its entropy at each token, in nats, before the step; None: the model is no policy."""
    report: Metrics = field(default_factory=dict)
    """Both as plain numbers, filled in by the loop."""


class Sampler(Protocol):
    """Draws responses with the parameters that it was last handed."""

    fills: frozenset[str]
    """Which batch fields it can bring beyond the rollouts: `reward_greedy`, if it can be greedy."""

    def load(self, params: dict[str, Tensor], version: int) -> None:
        """Use these parameters from now on; rollouts carry `version`."""

    def generate(self, prompt: Int[Tensor, "prompt position"], samples: int, greedy: bool = False) -> Rollouts: ...


class Learner(Protocol):
    """Holds the parameters, scores batches and takes steps. It is handed a loss and knows no algorithm."""

    fills: frozenset[str]
    """Which batch fields `score` can bring."""

    def params(self) -> dict[str, Tensor]: ...

    def score(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]: ...

    def step(self, mini: Batch, objective: Objective, update: Update) -> Stepped: ...

    def fit(self, mini: Batch, loss: ValueLoss) -> Tensor: ...

    def mix_reference(self, rate: float) -> None: ...

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything that a checkpoint must hold, as named groups of tensors."""

    def restore(self, state: dict[str, dict[str, Tensor]]) -> None: ...

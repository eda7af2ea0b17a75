"""What the loop asks for: a task, a sampler, a learner and records. Every engine passes the same contract tests.

Derive from them: what a protocol can do by itself, it does.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ascent.core.types import Batch, Metrics, Outputs, Prompts, Rollouts, Scores, Space, State, Streams, Terms

Objective = Callable[[Batch, Outputs], Terms]
ValueLoss = Callable[[Batch, Tensor], Tensor]
"""From a batch and V at its states, a sum over the counted tokens."""
TakeStep = Callable[["Learner", Batch, Objective], tuple[Terms, dict[str, Tensor]]]
"""An update: it moves the learner's parameters, and returns the terms before the step and what to report."""


class Task(Protocol):
    """Prompts, and a verifiable reward for the responses to them. A frozen dataclass: its fields are its settings."""

    presets: ClassVar[dict[str, dict[str, Any]]]
    """Named settings of a whole run; `default` is what `ascent train TASK` does.

    Keys are those of the command line (`loss.high`); a choice's name in place of its axis
    (`clipped.high`) sets what that choice starts from if it is chosen.
    """

    kind: ClassVar[str]
    """small: prompts and responses are short lists of numbers. text: they are words."""

    @property
    def space(self) -> Space: ...

    @property
    def max_reward(self) -> float | None:
        """The largest reward there is, where that is known."""
        return None

    @property
    def loophole(self) -> str | None:
        """How a wrong response can earn the whole reward, where that is known."""
        return None

    @property
    def plays(self) -> bool:
        """Are turns of its responses answered by processes, each at its own speed?"""
        return False

    def check_prompts(self, prompts: int) -> None:
        """Refuse a number of prompts per step that the task cannot draw."""
        return None

    def draw(self, count: int, generator: torch.Generator) -> Prompts:
        """Prompts to train on."""

    def step_prompts(self, step: int, count: int, seed: int, generator: torch.Generator) -> Prompts:
        """The prompts of a step: those of a pass over the task's rows, or where it has none, what `draw` gives."""

    def held_out(self, count: int) -> Prompts:
        """The same prompts every time, which `draw` never gives."""

    def score(self, rollouts: Rollouts) -> Scores: ...

    def text(self, ids: list[int]) -> str:
        """A prompt or a response as a person reads it."""

    def close(self) -> None:
        """End what it started: graders, processes, connections."""
        return None


@dataclass(frozen=True)
class UpdateResult:
    """What an optimizer step reports, as tensors that are read once the whole step is over."""

    metrics: dict[str, Tensor]
    """loss, grad_norm and what else the update reports."""
    sums: dict[str, Tensor]
    """Sums over the tokens, to be divided by their number."""
    logp: Float[Tensor, "prompt sample token"]
    """The trainer's log-probs of the mini-batch, before the step."""
    entropy: Float[Tensor, "prompt sample token"] | None = None
    """Its entropy at each token, in nats, before the step; None: the model is not a policy."""
    report: Metrics = field(default_factory=dict)
    """Both as plain numbers, filled in by the loop."""


@dataclass(frozen=True, eq=False)
class RolloutRequest:
    """Groups that a step asks of a sampler: which prompts, in which order, and how many responses to each.

    The step owns them from the start: whenever they finish, they are trained in their place.
    """

    step: int
    prompts: Prompts
    samples: int
    greedy: bool = False
    seed: int | None = None
    """Of all responses to this ticket; None: the sampler's own stream continues."""


@dataclass(frozen=True, eq=False)
class PendingRollout:
    """A ticket that is not trained on yet, and what was drawn for it so far."""

    ticket: RolloutRequest
    drawn: Rollouts | None = None
    """Its responses, each as far as it has come; None: not begun."""
    going: Bool[Tensor, "prompt sample"] | None = None
    """Which of them go on; None: none does."""
    seeds: Int[Tensor, "prompt sample"] | None = None
    """That of each response, where the sampler has one for each."""


@dataclass(frozen=True)
class FinishedRollouts:
    """Groups of a ticket that are done."""

    ticket: RolloutRequest
    place: Int[Tensor, "prompt"]
    """Which prompts of the ticket they answer."""
    rollouts: Rollouts


class Sampler(Protocol):
    """Draws responses with the parameters that it was last handed.

    A sampler in this process brings `generate`, and everything of a ticket comes back in one piece. One that
    works elsewhere brings `submit` and `finished`.
    """

    fills: frozenset[str] = frozenset()
    """Which batch fields it can bring beyond the rollouts: `reward_greedy`, if it can be greedy."""
    limit: int
    """The most tokens that a response may have."""
    rows: int = 4096
    """Responses that it draws at once."""
    note: str | None = None
    """What its user should know of how it works here."""
    pending: tuple[PendingRollout, ...] = ()
    """Tickets that were submitted and not yet handed over, in the order of their steps."""
    exact: bool = True
    """Does a seed give the same tokens again? If not, a journal keeps what was drawn."""
    first: int = 0
    """The first version that it draws with: a journal has the steps before."""

    def load(self, params: dict[str, Tensor], version: int) -> None:
        """Use these parameters from now on; tokens carry `version`. A response that is under way goes on with them,
        and so with keys and values that are computed anew."""

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        """Responses to these prompts, now: of at most `limit` tokens, from the stream of this seed or from its own."""
        raise NotImplementedError

    def submit(self, tickets: list[RolloutRequest]) -> None:
        """Take these tickets. Any of them may be begun at once, also one of a later step."""
        self.pending += tuple(map(PendingRollout, tickets))

    def held(self) -> tuple[PendingRollout, ...]:
        """`pending` with all that a checkpoint has to hold of it."""
        return self.pending

    def finished(self, step: int, deadline: float) -> Iterator[FinishedRollouts]:
        """The groups of this step as they finish, in any order; it ends when all have, or after `deadline` seconds.

        Here every ticket is drawn whole. Those of later steps, if there are any, come behind, in their order.
        """
        later = tuple(one for one in self.pending if one.ticket.step != step)
        for one in [one for one in self.pending if one.ticket.step == step]:
            yield FinishedRollouts(one.ticket, torch.arange(len(one.ticket.prompts)), self._whole(one))
        self.pending = tuple(replace(one, drawn=self._whole(one)) for one in later)

    def _whole(self, one: PendingRollout) -> Rollouts:
        ticket = one.ticket
        return one.drawn or self.generate(ticket.prompts, ticket.samples, ticket.greedy, seed=ticket.seed)

    def close(self) -> None:
        """End what it started."""
        return None


class Learner(Protocol):
    """Holds the parameters, scores batches and takes steps. It is handed a loss and knows no algorithm.

    Each operation is a plain sum over micro-batches and ranks. What is divided by a number of tokens is
    divided by the mini-batch's `tokens`, never by those of a share.
    """

    fills: frozenset[str] = frozenset()
    """Which batch fields `score` can bring."""
    optimizer: torch.optim.Optimizer | None = None

    def params(self) -> dict[str, Tensor]:
        """The parameters that a sampler needs, by name."""

    def trainable(self) -> list[Tensor]:
        """The parameters that training moves."""

    def score(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        """The batch fields that were asked for and that come from a model."""

    def step(self, mini: Batch, objective: Objective, update: TakeStep) -> UpdateResult:
        """One update on a mini-batch, and what to report of it."""

    def gradient(self, mini: Batch, objective: Objective) -> Terms:
        """The objective and its sums; every trainable parameter's `.grad` becomes −∇objective."""

    def total(self, mini: Batch, objective: Objective) -> Tensor:
        """The objective at the present parameters."""

    def fisher(self, mini: Batch) -> Callable[[list[Tensor]], list[Tensor]]:
        """v ↦ F·v, F the Hessian at π = π_old of the mean KL(π_old ‖ π)."""

    def kl_from(self, mini: Batch, params: list[Tensor]) -> Tensor:
        """The mean KL(π_old ‖ π), π_old having these parameters."""

    def assign(self, params: list[Tensor]) -> None:
        """Set the trainable parameters."""

    def fit(self, mini: Batch, loss: ValueLoss) -> tuple[Tensor, Tensor]:
        """One step of the critic's optimizer on the loss's token mean: the loss's sums before it, and ‖gradient‖."""

    def mix_reference(self, rate: float) -> None:
        """π_ref ← (1 − rate) · π_ref + rate · π, parameter by parameter; rate 1 copies."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything that a checkpoint must hold, as named groups of tensors."""

    def restore(self, state: dict[str, dict[str, Tensor]]) -> None: ...
    def stage_parts(self, aside: Any) -> Any: ...  # what ranks write of a checkpoint by themselves; None: nothing

    def close(self) -> None:
        """End what it started."""
        return None


class Records(Protocol):
    """Where a run is written down, and who may ask it to stop."""

    def step(
        self, step: int, metrics: Metrics, batch: Batch, minis: list[Batch], updates: list[UpdateResult]
    ) -> None: ...

    def checkpoint(
        self, step: int, learner: Learner, streams: Streams, state: State, ahead: tuple[PendingRollout, ...]
    ) -> None:
        """Save all that a resume needs to continue with `step`: `ahead` is what was drawn for later steps."""

    def dump(self, step: int, batch: Batch) -> str:
        """Keep the batch that made trouble; say where."""

    def stopping(self) -> bool: ...

    def best(self) -> bool:
        """Was the last evaluation the best one, and is it to be kept?"""


class RolloutJournal(Protocol):
    """The batches of steps with their rewards, each kept before its update: a resumed run replays them."""

    def read(self, step: int) -> tuple[Batch, Metrics] | None:
        """The batch of a step, and what was measured of all that was sampled for it; None: it was not drawn yet."""

    def write(self, step: int, batch: Batch, metrics: Metrics) -> Batch:
        """Keep them; returned is the batch as `read` will give it."""

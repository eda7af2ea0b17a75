"""Protocols of the training loop: task, rollout engine, learner, records, journal.

Implementations derive from them and inherit the default methods. tests/build/test_backends.py is their contract.
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
"""Maps a batch and V at its states to a sum over the loss mask."""
TakeStep = Callable[["Learner", Batch, Objective], tuple[Terms, dict[str, Tensor]]]
"""Takes an optimizer step; returns the objective's terms before the step, and metrics to report."""


class Task(Protocol):
    """Prompts and a reward function for their responses. A task is a frozen dataclass: its fields are its settings."""

    presets: ClassVar[dict[str, dict[str, Any]]]
    """Named settings of a whole run; `ascent train TASK` uses `default`.

    Keys are those of the command line (`loss.high`). A choice's name in place of its axis (`clipped.high`) sets that
    choice's default, which applies only if it is chosen.
    """

    kind: ClassVar[str]
    """small: prompts and responses are short lists of numbers. text: they are text."""

    @property
    def space(self) -> Space: ...

    @property
    def max_reward(self) -> float | None:
        """Return the largest possible reward, if it is known."""
        return None

    @property
    def loophole(self) -> str | None:
        """Return how a wrong response can earn the maximum reward, if such a way is known."""
        return None

    @property
    def has_environment(self) -> bool:
        """Return whether responses are conversations with environments, which run in processes of varying speed."""
        return False

    def check_prompts(self, prompts: int) -> None:
        """Raise a ConfigError if the task cannot draw this number of prompts per step."""
        return None

    def draw(self, count: int, generator: torch.Generator) -> Prompts:
        """Draw prompts to train on."""

    def step_prompts(self, step: int, count: int, seed: int, generator: torch.Generator) -> Prompts:
        """Return the prompts of a step: the next rows of the epoch or, for a task without rows, those of `draw`."""

    def held_out(self, count: int) -> Prompts:
        """Return evaluation prompts: the same ones every time, and none that `draw` returns."""

    def score(self, rollouts: Rollouts) -> Scores: ...

    def text(self, ids: list[int]) -> str:
        """Return a prompt or a response as text."""

    def close(self) -> None:
        """Stop reward workers and environment processes, and close connections."""
        return None


@dataclass(frozen=True)
class UpdateResult:
    """Results of one optimizer step, as tensors: the loop copies them to the host once per training step."""

    metrics: dict[str, Tensor]
    """Loss, grad_norm and other metrics of the update."""
    sums: dict[str, Tensor]
    """Sums over tokens, which the loop divides by the number of tokens."""
    logp: Float[Tensor, "prompt sample token"]
    """The trainer's log-probs of the mini-batch, before the step."""
    entropy: Float[Tensor, "prompt sample token"] | None = None
    """The policy's entropy at each token, in nats, before the step; None: the model is not a policy."""
    report: Metrics = field(default_factory=dict)
    """`metrics` and `sums` as plain numbers, filled in by the loop."""


@dataclass(frozen=True, eq=False)
class RolloutRequest:
    """A step's request for groups of responses.

    The prompts, their order and the seeds belong to the step, however early or late the groups finish.
    """

    step: int
    prompts: Prompts
    samples: int
    greedy: bool = False
    seed: int | None = None
    """Seed of all responses to this request; None: the engine's random stream continues."""


@dataclass(frozen=True, eq=False)
class PendingRollout:
    """A submitted request that is not trained on yet, with its responses so far."""

    request: RolloutRequest
    rollouts: Rollouts | None = None
    """Its responses, which may be incomplete; None: not started."""
    unfinished: Bool[Tensor, "prompt sample"] | None = None
    """True where a response is to be continued; None: all are complete."""
    seeds: Int[Tensor, "prompt sample"] | None = None
    """The seed of each response, if the engine seeds responses separately."""


@dataclass(frozen=True)
class FinishedRollouts:
    """Finished groups of a request."""

    request: RolloutRequest
    prompt_indices: Int[Tensor, "prompt"]
    """The groups' places among the request's prompts."""
    rollouts: Rollouts


class RolloutEngine(Protocol):
    """Generates responses with the parameters that were loaded last.

    An engine in this process implements `generate`; each request then comes back in one piece. An engine that
    generates asynchronously also overrides `submit` and `iter_finished`.
    """

    provides: frozenset[str] = frozenset()
    """Batch fields that it can fill beyond those of Rollouts: `reward_greedy`, if it can decode greedily."""
    limit: int
    """Maximum number of tokens of a response."""
    rows: int = 4096
    """Maximum number of responses that it decodes at once."""
    note: str | None = None
    """A note to the user about how it runs on this machine."""
    pending: tuple[PendingRollout, ...] = ()
    """Submitted requests whose groups were not returned yet, in the order of their steps."""
    deterministic: bool = True
    """Whether a seed reproduces the tokens. If not, the run keeps a journal of its batches."""
    first_version: int = 0
    """The first policy version that it generates with; earlier steps are replayed from the journal."""

    def load(self, params: dict[str, Tensor], version: int) -> None:
        """Load these parameters; tokens generated from now on carry `version`.

        Unfinished responses continue with the new parameters, and their KV cache is recomputed.
        """

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        """Generate responses of at most `limit` tokens, from this seed or from the engine's random stream."""
        raise NotImplementedError

    def submit(self, requests: list[RolloutRequest]) -> None:
        """Queue requests. The engine may start any of them at once, including those of later steps."""
        self.pending += tuple(map(PendingRollout, requests))

    def snapshot_pending(self) -> tuple[PendingRollout, ...]:
        """Return `pending` with the partial responses that a checkpoint must save."""
        return self.pending

    def iter_finished(self, step: int, deadline: float) -> Iterator[FinishedRollouts]:
        """Yield the groups of this step as they finish, in any order.

        Ends when all have finished, or after `deadline` seconds. By default each request is generated whole, and
        those of later steps follow in order.
        """
        later = tuple(pending for pending in self.pending if pending.request.step != step)
        for pending in [pending for pending in self.pending if pending.request.step == step]:
            indices = torch.arange(len(pending.request.prompts))
            yield FinishedRollouts(pending.request, indices, self._generate_all(pending))
        self.pending = tuple(replace(pending, rollouts=self._generate_all(pending)) for pending in later)

    def _generate_all(self, pending: PendingRollout) -> Rollouts:
        request = pending.request
        return pending.rollouts or self.generate(request.prompts, request.samples, request.greedy, seed=request.seed)

    def close(self) -> None:
        """Stop the processes that the engine started."""
        return None


class Learner(Protocol):
    """Holds the trainable parameters, scores batches and takes optimizer steps. It knows no algorithm.

    Each operation is a plain sum over micro-batches and ranks. Token means divide by the mini-batch's `tokens`, never
    by the token count of a micro-batch or of one rank.
    """

    provides: frozenset[str] = frozenset()
    """Batch fields that `score` can compute."""
    optimizer: torch.optim.Optimizer | None = None

    def params(self) -> dict[str, Tensor]:
        """Return the parameters that the engine needs, by name."""

    def trainable(self) -> list[Tensor]:
        """Return the trainable parameters."""

    def score(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        """Compute the requested batch fields that come from a model."""

    def step(self, mini: Batch, objective: Objective, update: TakeStep) -> UpdateResult:
        """Take one optimizer step on a mini-batch."""

    def gradient(self, mini: Batch, objective: Objective) -> Terms:
        """Compute the objective; every trainable parameter's `.grad` becomes −∇objective."""

    def evaluate_objective(self, mini: Batch, objective: Objective) -> Tensor:
        """Return the objective at the current parameters."""

    def fisher_product(self, mini: Batch) -> Callable[[list[Tensor]], list[Tensor]]:
        """Return v ↦ F·v, where F is the Hessian of the mean KL(π_old ‖ π) at π = π_old."""

    def kl_from(self, mini: Batch, params: list[Tensor]) -> Tensor:
        """Return the mean KL(π_old ‖ π), where π_old has these parameters."""

    def set_trainable(self, params: list[Tensor]) -> None:
        """Set the trainable parameters."""

    def fit_critic(self, mini: Batch, loss: ValueLoss) -> tuple[Tensor, Tensor]:
        """Take one critic step on the token mean of the loss; return the loss's sums before it, and ‖gradient‖."""

    def mix_reference(self, rate: float) -> None:
        """Set π_ref ← (1 − rate) · π_ref + rate · π, parameter by parameter; rate 1 copies."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return everything that a checkpoint must save, as named groups of tensors."""

    def restore(self, state: dict[str, dict[str, Tensor]]) -> None: ...
    def stage_shards(self, aside: Any) -> Any: ...  # the pending write of a sharded checkpoint; None: it is not sharded

    def close(self) -> None:
        """Stop the processes that the learner started."""
        return None


class Records(Protocol):
    """Writes the run folder, and says when the run is to stop."""

    def step(
        self, step: int, metrics: Metrics, batch: Batch, minis: list[Batch], updates: list[UpdateResult]
    ) -> None: ...

    def checkpoint(
        self, step: int, learner: Learner, streams: Streams, state: State, ahead: tuple[PendingRollout, ...]
    ) -> None:
        """Save all that is needed to resume with `step`; `ahead`: rollouts of later steps, which may be unfinished."""

    def dump(self, step: int, batch: Batch) -> str:
        """Save a batch that diverged, and return its path."""

    def should_stop(self) -> bool:
        """Return whether the run is to stop after this step."""

    def is_best(self) -> bool:
        """Return whether the last evaluation was the best one and its checkpoint is to be kept."""


class RolloutJournal(Protocol):
    """Batches with their rewards, each written before its update, so that a resumed run replays the same tokens."""

    def read(self, step: int) -> tuple[Batch, Metrics] | None:
        """Return the batch of a step and the metrics of everything that was sampled for it; None: not written yet."""

    def write(self, step: int, batch: Batch, metrics: Metrics) -> Batch:
        """Write a step's batch and metrics; return the batch as `read` will return it."""

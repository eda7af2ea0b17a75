"""The reference policy of the KL, and when it is updated. The learner holds its parameters."""

from dataclasses import dataclass
from typing import ClassVar

from ascent.core.errors import ConfigError
from ascent.core.protocols import Learner


class Reference:
    """A reference policy: called with the learner after each step, it may update the reference."""

    enabled: ClassVar[bool] = True
    """Whether there is a reference policy."""
    averages: ClassVar[bool] = False
    """Whether it averages the policy's updates, so that a step without an update does not change it."""

    def __call__(self, learner: Learner, step: int) -> None:
        return None


@dataclass(frozen=True)
class NoReference(Reference):
    """No reference: nothing is kept and no KL is measured."""

    enabled = False


@dataclass(frozen=True)
class Frozen(Reference):
    """The policy as it was at the start of the run."""


@dataclass(frozen=True)
class Every(Reference):
    """The policy as it was at the last multiple of n steps (iterative GRPO's outer loop).

    Bias: the reference moves, so the penalty limits the speed, not the distance from the start.
    """

    n: int = 10
    """Steps between two updates of the reference."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"--reference.n is {self.n}: set a number of steps of 1 or more")

    def __call__(self, learner: Learner, step: int) -> None:
        if (step + 1) % self.n == 0:
            learner.mix_reference(1.0)


@dataclass(frozen=True)
class MovingAverage(Reference):
    """An average that follows the policy: after each step with an update π_ref ← (1−r)·π_ref + r·π.

    Bias: as with `every`, the penalty limits the speed, not the distance from the start. Degenerate
    cases: r = 0 is frozen, r = 1 is the policy of the step before.
    """

    rate: float = 0.05
    """r: the share of the current policy in the new reference."""
    averages = True

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ConfigError(f"--reference.rate is {self.rate:g}: a share lies between 0 and 1")

    def __call__(self, learner: Learner, step: int) -> None:
        learner.mix_reference(self.rate)


REFERENCES = (NoReference, Frozen, Every, MovingAverage)

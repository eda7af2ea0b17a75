"""The entropy bonus, and its schedule over a run. The sampling temperature is a field of Config.

objective = Σ weight · (surrogate + c · H(π(· | state)))
"""

from dataclasses import dataclass

from ascent.core.errors import ConfigError


class Exploration:
    """An entropy bonus: called with the finished fraction of the run, it returns the entropy coefficient."""

    def __call__(self, progress: float) -> float:
        return 0.0


@dataclass(frozen=True)
class NoBonus(Exploration):
    """Exploration by sampling alone."""


@dataclass(frozen=True)
class Constant(Exploration):
    """The same bonus throughout.

    Bias: it moves the optimum, so that the best policy is never deterministic; and the entropy is
    that of visited states, which are held fixed.
    """

    coef: float = 0.01
    """c, in units of reward per nat."""

    def __call__(self, progress: float) -> float:
        return self.coef


@dataclass(frozen=True)
class Annealed(Exploration):
    """A bonus that falls linearly, so that at the end the optimum is that of the reward alone.

    c(p) = start + (end − start) · min(1, p / until), p from 0 to 1 over the run
    Bias: it moves the optimum until it has fallen to 0. The task `lecture` needs it: without it
    even the exact gradient stops at E[R] ≈ 3.9 of 5.
    """

    start: float = 0.5
    """c at the first step."""
    end: float = 0.0
    """c from `until` on."""
    until: float = 0.9
    """The fraction of the run after which c stays at `end`."""

    def __post_init__(self) -> None:
        if not 0 < self.until <= 1:
            raise ConfigError(f"--exploration.until is {self.until:g}: it is a share of the run, above 0 and at most 1")

    def __call__(self, progress: float) -> float:
        return self.start + (self.end - self.start) * min(1.0, progress / self.until)


EXPLORATIONS = (NoBonus, Constant, Annealed)

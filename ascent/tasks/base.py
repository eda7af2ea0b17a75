"""What the loop asks of a task."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from ascent.types import Rollouts, Scores, Space


class Task(Protocol):
    """Prompts, and a verifiable reward for the responses to them. A frozen dataclass: its fields are its settings."""

    presets: ClassVar[dict[str, dict[str, Any]]]
    """Named settings of a whole run; `default` is what `ascent train TASK` does.

    Keys are those of the command line (`loss.high`); a choice's name in place of its axis
    (`clipped.high`) sets what that choice starts from if it is chosen.
    """

    @property
    def space(self) -> Space: ...

    @property
    def max_reward(self) -> float | None:
        """The largest reward there is, where that is known."""

    @property
    def loophole(self) -> str | None:
        """How a wrong response can earn the whole reward, where that is known."""

    def draw(self, count: int, generator: torch.Generator) -> Int[Tensor, "prompt position"]:
        """Prompts to train on."""

    def held_out(self, count: int) -> Int[Tensor, "prompt position"]:
        """The same prompts every time, which `draw` never gives."""

    def score(self, rollouts: Rollouts) -> Scores: ...

    def text(self, ids: list[int]) -> str:
        """A prompt or a response as a person reads it."""

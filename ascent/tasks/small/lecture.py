"""The lecture's sort: three fixed prompts of three numbers, as in Stanford's CS336, lecture 17.

There are 125 responses to a prompt, so E[R] and its exact gradient can be enumerated.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ascent.core.errors import ConfigError
from ascent.core.types import Prompts, Space
from ascent.tasks.small.sorting import SortingTask

LECTURE_PROMPTS = ((1, 0, 2), (3, 2, 4), (1, 2, 3))

_COURSE: dict[str, Any] = {
    "policy": "per-position",
    "algorithm": "reinforce",
    "normalized.eps": 1e-5,
    "clipped.low": 0.01,
    "clipped.high": 0.01,
    "every.n": 10,
    "lr": 1e-3,
    "steps": 100,
    "prompts": 3,
    "samples": 10,
    "epochs": 10,
    "seed": 5,
    "eval_every": 5,
    "record_every": 20,
}


@dataclass(frozen=True)
class Lecture(SortingTask):
    """Sort [1 0 2], [3 2 4] and [1 2 3]: the course's task, small enough to enumerate."""

    reward: str | tuple[str, ...] = "inclusion-ordering"
    """A list of exact, positions, process, inclusion-ordering, python:FILE:NAME; weights as in 0.5*exact."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "course": {**_COURSE, "weights": "token-mean"},
        "default": {
            **_COURSE,
            "algorithm": "dr-grpo",
            "clipped.low": 0.2,
            "clipped.high": 0.2,
            "exploration": "annealed",
            "exploration.start": 0.5,
            "exploration.until": 0.9,
            "lr": 1e-2,
        },
    }

    @property
    def space(self) -> Space:
        return Space(prompt_length=3, vocab=5, limit=3)

    @property
    def loophole(self) -> str | None:
        if {part.source for part in self.rewards} != {"inclusion-ordering"}:
            return None
        return "the one answer [1 2 3] earns 4, 4 and 5 of 5 on the three prompts, a local optimum"

    def draw(self, count: int, generator: torch.Generator) -> Prompts:
        """All three, in this order, every time."""
        return Prompts.of(torch.tensor(LECTURE_PROMPTS))

    def check_prompts(self, prompts: int) -> None:
        if prompts != len(LECTURE_PROMPTS):
            raise ConfigError(
                f"--prompts {prompts}: the lecture has three prompts and draws all of them; set --prompts 3"
            )

    def held_out(self, count: int) -> Prompts:
        """The same three: the lecture holds nothing out."""
        return Prompts.of(torch.tensor(LECTURE_PROMPTS))

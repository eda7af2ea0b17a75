"""Process rewards on top of a task's own reward. A step's reward lies on its last token.

    process:RUN         what each step adds: its score less that of the step before it. The sum is the last score,
                        so that a response earns nothing by having more steps
    process-score:RUN   the score of each step itself

What else a task rewards lies on the last token of the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ascent.core.types import Rollouts, Scores

PerToken = Float[Tensor, "prompt sample token"]
PROCESS_KINDS = ("process", "process-score")


class ProcessPart(NamedTuple):
    """One process reward among a task's rewards."""

    name: str
    kind: str
    weight: float
    model: Any


def gains(score: PerToken, ends: Bool[Tensor, "prompt sample token"]) -> PerToken:
    """What each step adds to the score before it; the first adds all of its own. `ends`: the last tokens of steps."""
    total, added = torch.zeros_like(score[..., 0]), []
    for value, here in zip(score.unbind(-1), ends.unbind(-1), strict=True):
        added.append(torch.where(here, value - total, 0.0))
        total = torch.where(here, value, total)
    return torch.stack(added, -1)


def add_process_rewards(
    base: Scores, rollouts: Rollouts, parts: Sequence[tuple[ProcessPart, PerToken, Tensor]]
) -> Scores:
    """Scores with process rewards added, each given by its scores and by where steps end."""
    reward = base.reward
    if reward.shape[-1] == 1:
        last = (rollouts.mask.cumsum(-1) == rollouts.mask.sum(-1, keepdim=True)) & rollouts.mask
        reward = torch.where(last, reward, 0.0)
    measures = dict(base.measures)
    for part, score, ends in parts:
        earned = gains(score, ends) if part.kind == "process" else torch.where(ends, score, 0.0)
        reward = reward + part.weight * earned
        measures[f"rewards/{part.name}"] = earned.sum(-1)
    return replace(base, reward=reward, measures=measures)

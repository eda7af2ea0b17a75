"""Learned rewards of a text task: reward models, which grade responses, and process rewards, which grade steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ascent.core.types import Rollouts, Scores
from ascent.tasks.process_rewards import PROCESS_KINDS, PerToken, ProcessPart, add_process_rewards
from ascent.tasks.text.base import TextTask
from ascent.tasks.text.grading.workers import Outcome
from ascent.tasks.text.problems import Message, Problem
from ascent.tasks.text.steps import split_steps
from ascent.tasks.text.tokenized import Encoder, TokenizedTask


class RewardModelGrader:
    """A reward model as a grader of a text task: it reads the chat that the policy reads."""

    def __init__(self, task: TextTask, rate: Callable[[list[tuple[list[Message], str]]], list[float]]):
        self.task, self.rate = task, rate

    def __call__(self, responses: Sequence[tuple[Problem, str]]) -> list[Outcome]:
        values = self.rate([(self.task.messages(problem), response) for problem, response in responses])
        return [
            Outcome(v, reason=f"{v:.3f}") if math.isfinite(v) else Outcome(error=f"it returned {v}") for v in values
        ]


class ProcessRewardedTask(TokenizedTask):
    """A text task some of whose rewards come step by step. What else it rewards lies on the last token."""

    def __init__(self, task: TextTask, encoder: Encoder, graders: Mapping[str, Any], models: Mapping[str, Any]):
        super().__init__(task, encoder, graders)
        entries = [entry for entry in task.rewards if entry.kind in PROCESS_KINDS]
        self.parts = [ProcessPart(entry.name, entry.kind, entry.weight, models[entry.source]) for entry in entries]

    def score(self, rollouts: Rollouts) -> Scores:
        parts = [(part, *self._step_scores(part.model, rollouts)) for part in self.parts]
        return add_process_rewards(super().score(rollouts), rollouts, parts)

    def _step_scores(self, model: Any, rollouts: Rollouts) -> tuple[PerToken, Tensor]:
        """The scores at the last tokens of steps, and where those are."""
        score, ends = torch.zeros(rollouts.mask.shape), torch.zeros_like(rollouts.mask)
        responses: list[tuple[list[dict[str, str]], list[str], bool]] = []
        places: list[tuple[int, int, list[int]]] = []
        for p, (group, masks) in enumerate(zip(rollouts.response, rollouts.mask, strict=True)):
            chat = self.question(rollouts, p).chat
            for s, (response, mask) in enumerate(zip(group, masks, strict=True)):
                ids = response[mask].tolist()
                steps = split_steps(self.pieces(ids), model.separator)
                responses.append((chat, [step.words for step in steps], bool(ids) and ids[-1] in self.ends))
                tokens = mask.nonzero().flatten()
                places.append((p, s, [int(tokens[step.last]) for step in steps]))
        for (p, s, last), values in zip(places, model.rate(responses), strict=True):
            score[p, s, last], ends[p, s, last] = torch.tensor(values), True
        return score, ends

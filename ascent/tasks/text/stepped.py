"""Labelled steps bound to an encoder: every token has the label of its step as its reward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ascent.tasks.text.base import Problem
from ascent.tasks.text.shown import Shown
from ascent.tasks.text.steps import Steps
from ascent.tasks.text.tokenized import key_of
from ascent.types import Rollouts, Scores

Pieces = list[list[int]]
"""The tokens of each step."""


def pieces_of(tokens: Callable[[str], list[int]], steps: list[str], separator: str, end: int | None) -> Pieces:
    """Each step with the separator behind it, tokenised by itself; the last one with the end token, if it has ended."""
    pieces = [tokens(step + separator) for step in steps[:-1]]
    return [*pieces, [*tokens(steps[-1]), *([] if end is None else [end])]]


class Stepped(Shown):
    """Prompts, and for each a response in steps. A prompt may be there more than once."""

    task: Steps

    def pieces(self, problem: Problem, tokens: Callable[[str], list[int]]) -> Pieces:
        end = None if problem.columns["cut"] else self.encoder.end
        return pieces_of(tokens, problem.columns["steps"], self.task.separator, end)

    def show(self, ids: list[int], tokens: Callable[[str], list[int]]) -> list[int]:
        """The tokens of the response to a prompt; their labels are remembered for `score`."""
        problem = self.next(ids)
        pieces, labels = self.pieces(problem, tokens), problem.columns["labels"]
        response = [token for piece in pieces for token in piece][: self.task.max_tokens]
        spread = [label for piece, label in zip(pieces, labels, strict=True) for _ in piece]
        self.labels[key_of(ids), key_of(response)] = spread[: len(response)]
        return response

    @property
    def labels(self) -> dict[tuple[bytes, bytes], list[float]]:
        return self.__dict__.setdefault("_labels", {})

    def score(self, rollouts: Rollouts) -> Scores:
        shape, width = rollouts.mask.shape[:2], rollouts.mask.shape[2]
        rows = []
        for prompt, group, masks in zip(rollouts.prompt, rollouts.response, rollouts.mask, strict=True):
            key = key_of(prompt[prompt >= 0].tolist())
            for response, mask in zip(group, masks, strict=True):
                labels = self.labels[key, key_of(response[mask].tolist())]
                rows.append(labels + [0.0] * (width - len(labels)))
        reward = torch.tensor(rows).view(*shape, width)
        return Scores(reward, torch.ones(shape, dtype=torch.bool), None)

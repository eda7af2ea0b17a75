"""Offline data of a text task, bound to an encoder: responses as tokens, and what they earn."""

from __future__ import annotations

import torch

from ascent.core.types import Prompts, Refused, Rollouts, Scores
from ascent.tasks.offline import offline_rollouts, offline_scores, pad_responses
from ascent.tasks.text.base import TextTask
from ascent.tasks.text.offline.files import Steps
from ascent.tasks.text.problems import Problem
from ascent.tasks.text.tokenized import Encoder, TokenizedTask


def offline_text_task(task: TextTask, encoder: Encoder, data: str) -> OfflineTextTask:
    """The task bound to an encoder for this kind of data: demonstrations, pairs or steps."""
    return LabelledStepsTask(task, encoder) if data == "steps" else OfflineTextTask(task, encoder, data == "pairs")


class OfflineTextTask(TokenizedTask):
    """Prompts, each with its demonstration or with the two responses of a preference pair."""

    def __init__(self, task: TextTask, encoder: Encoder, pairs: bool = False):
        super().__init__(task, encoder)
        self.pairs = pairs

    def responses(self, problem: Problem) -> list[str]:
        """The demonstration, or the chosen and the rejected response."""
        if self.pairs:
            return [problem.answer or "", problem.columns["rejected"]]
        gold = self.task.gold(problem)
        if gold is None:
            raise Refused("--algorithm sft: the task knows no right response to learn from. Use ascent sft FILE")
        return [gold]

    def offline_rollouts(self, prompts: Prompts) -> Rollouts:
        """The responses to these prompts, tokenized: for nobody has sampled them."""
        groups = [
            [encode_response(self.encoder, words, self.space.limit) for words in self.responses(self.problem(identity))]
            for identity in prompts.problem.tolist()
        ]
        response, mask = pad_responses([[ids for ids, _ in group] for group in groups])
        truncated = torch.tensor([[cut for _, cut in group] for group in groups])
        return offline_rollouts(prompts, response, mask, self.space, truncated)

    def score(self, rollouts: Rollouts) -> Scores:
        return offline_scores(rollouts, self.pairs)


class LabelledStepsTask(OfflineTextTask):
    """Prompts, each with a response in steps. Every token has the label of its step as its reward."""

    task: Steps

    def _pieces(self, identity: int) -> tuple[list[list[int]], list[float]]:
        """The tokens of each step of a response, and the labels."""
        columns = self.problem(identity).columns
        pieces = encode_steps(self.encoder, columns["steps"], self.task.separator, ended=not columns["cut"])
        return pieces, columns["labels"]

    def offline_rollouts(self, prompts: Prompts) -> Rollouts:
        steps = [self._pieces(identity)[0] for identity in prompts.problem.tolist()]
        tokens = [[[token for piece in pieces for token in piece][: self.space.limit]] for pieces in steps]
        return offline_rollouts(prompts, *pad_responses(tokens), self.space)

    def score(self, rollouts: Rollouts) -> Scores:
        assert rollouts.problem is not None
        reward = torch.zeros(rollouts.mask.shape)
        for row, identity in enumerate(rollouts.problem.tolist()):
            labels = torch.tensor([label for piece, label in zip(*self._pieces(identity), strict=True) for _ in piece])
            tokens = rollouts.mask[row, 0]
            reward[row, 0, tokens] = labels[: int(tokens.sum())]
        return Scores(reward, torch.ones(rollouts.mask.shape[:2], dtype=torch.bool), None)


def encode_response(encoder: Encoder, words: str, limit: int) -> tuple[list[int], bool]:
    """The tokens of a response and the end token; and whether the limit has cut it."""
    ids = [*encoder.tokenize(words), encoder.end]
    return ids[:limit], len(ids) > limit


def encode_steps(encoder: Encoder, steps: list[str], separator: str, ended: bool) -> list[list[int]]:
    """The tokens of each step with the separator after it, so that each token knows its step; the end token last."""
    pieces = [encoder.tokenize(step + separator) for step in steps[:-1]]
    return [*pieces, [*encoder.tokenize(steps[-1]), *([encoder.end] if ended else [])]]

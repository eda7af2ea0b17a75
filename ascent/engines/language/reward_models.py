"""Reward models and process rewards of language models, loaded from a run and ready to rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.core.config import Config
from ascent.core.types import Rollouts
from ascent.engines.language.attention import ours
from ascent.engines.language.learning.process_reward import score_steps
from ascent.engines.language.learning.reward_model import rate
from ascent.policies.causal_lm import LanguageModel

Chat = list[dict[str, str]]
StepsOf = tuple[Chat, list[str], bool]
"""A chat, the steps of a response to it, and whether the response has ended."""


class LanguageReward:
    """What a reward model and a process reward share: call it with rollouts in its own tokens."""

    def __init__(self, lm: LanguageModel, config: Config, batch: int):
        self.lm, self.config, self.batch = lm, config, batch
        self.limit: int = config.task.max_tokens

    @property
    def model(self) -> LanguageModel:
        return self.lm

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "prompt sample #token"]:
        with ours(self.lm.model) if self.lm.shares else nullcontext():
            return self._read(rollouts).cpu()

    def _read(self, rollouts: Rollouts) -> Tensor:
        raise NotImplementedError

    def _rollouts(self, chats: Sequence[Chat], responses: list[list[int]]) -> Rollouts:
        """One response per chat. Nobody sampled them, so there are no log-probs."""
        prompts = [self.lm.encode(chat) for chat in chats]
        longest, width = max(map(len, prompts)), max(map(len, responses))
        mask = torch.arange(width) < torch.tensor([[len(ids)] for ids in responses]).unsqueeze(-1)
        return Rollouts(
            prompt=torch.tensor([ids + [-1] * (longest - len(ids)) for ids in prompts]),
            response=torch.tensor([[ids + [0] * (width - len(ids))] for ids in responses]),
            mask=mask,
            logp_sampler=torch.zeros(mask.shape),
            limit=self.limit,
            truncated=torch.zeros(mask.shape[:2], dtype=torch.bool),
            sampled=False,
        )


class LanguageRewardModel(LanguageReward):
    """Rates whole responses, `batch` of them at once."""

    def _read(self, rollouts: Rollouts) -> Tensor:
        return rate(self.lm, rollouts)

    def rate(self, responses: Sequence[tuple[Chat | str, str]]) -> list[float]:
        """A number per (chat or prompt, response), tokenized as in the reward model's own training."""
        ratings: list[float] = []
        for start in range(0, len(responses), self.batch):
            part = responses[start : start + self.batch]
            chats = [[{"role": "user", "content": chat}] if isinstance(chat, str) else chat for chat, _ in part]
            tokens = [[*self.lm.tokenize(words), self.lm.end][: self.limit] for _, words in part]
            ratings += self(self._rollouts(chats, tokens)).flatten().tolist()
        return ratings


class LanguageProcessReward(LanguageReward):
    """Scores every step of a response, `batch` responses at once."""

    def __init__(self, lm: LanguageModel, config: Config, batch: int):
        super().__init__(lm, config, batch)
        self.separator: str = config.task.separator

    def _read(self, rollouts: Rollouts) -> Tensor:
        return score_steps(self.lm, rollouts)

    def rate(self, responses: Sequence[StepsOf]) -> list[list[float]]:
        """A number per step. It tokenizes as in its own training: it need not share the policy's tokens."""
        return [scores for start in range(0, len(responses), self.batch) for scores in self._part(responses, start)]

    def _part(self, responses: Sequence[StepsOf], start: int) -> Iterator[list[float]]:
        part = responses[start : start + self.batch]
        pieces = [tokenize_steps(self.lm, steps, self.separator, ended) for _, steps, ended in part]
        tokens = [[token for step in steps for token in step] for steps in pieces]
        scores = self(self._rollouts([chat for chat, _, _ in part], tokens))
        for row, steps in zip(scores[:, 0], pieces, strict=True):
            ends = torch.tensor([len(step) for step in steps]).cumsum(0)
            yield torch.where(ends > 0, row[(ends - 1).clamp(min=0)], 0.0).tolist()


def tokenize_steps(lm: LanguageModel, steps: list[str], separator: str, ended: bool) -> list[list[int]]:
    """Each step with the separator behind it, tokenized by itself; the last one with the end token, if it has ended."""
    pieces = [lm.tokenize(step + separator) for step in steps[:-1]]
    return [*pieces, [*lm.tokenize(steps[-1]), *([lm.end] if ended else [])]]

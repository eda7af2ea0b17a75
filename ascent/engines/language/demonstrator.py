"""Demonstrations as rollouts: SFT is the log-prob surrogate with δ = 1 on a demonstrator's samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ascent.engines.language.learner import LanguageLearner
from ascent.policies.causal_lm import LanguageModel
from ascent.types import Metrics, Rollouts, to_batch


class Demonstrator:
    """A sampler that draws nothing: it answers each prompt as the demonstration does.

    The one place where responses are tokenised, for nobody has sampled them. Their log-probs under whoever
    wrote them are unknown.
    """

    fills: frozenset[str] = frozenset()

    def __init__(self, lm: LanguageModel, limit: int, demonstration: Callable[[list[int]], str]):
        self.lm, self.limit, self.demonstration = lm, limit, demonstration
        self.version = -1

    def load(self, params: dict[str, Tensor], version: int) -> None:
        self.version = version

    def generate(self, prompt: Tensor, samples: int, greedy: bool = False) -> Rollouts:
        if samples != 1:
            raise ValueError("a demonstration answers a prompt once")
        ids = [self._tokens(self.demonstration(row[row >= 0].tolist())) for row in prompt]
        width = max(len(tokens) for tokens, _ in ids)
        length = torch.tensor([[len(tokens)] for tokens, _ in ids])
        mask = torch.arange(width) < length.unsqueeze(-1)
        return Rollouts(
            prompt=prompt,
            response=torch.tensor([[tokens + [0] * (width - len(tokens))] for tokens, _ in ids]),
            mask=mask,
            logp_sampler=torch.zeros(mask.shape),
            limit=self.limit,
            truncated=torch.tensor([[cut] for _, cut in ids]),
            version=self.version,
            sampled=False,
        )

    def _tokens(self, words: str) -> tuple[list[int], bool]:
        """The response and its end token; and whether the limit cut it."""
        ids = [*self.lm.tokenizer(words, add_special_tokens=False)["input_ids"], self.lm.end]
        return ids[: self.limit], len(ids) > self.limit


def held_out_logp(learner: LanguageLearner, rollouts: Rollouts) -> Callable[[], Metrics]:
    """The mean log-prob of a token of held-out demonstrations: what SFT maximises, where it was not trained."""
    shape = rollouts.mask.shape[:2]
    batch = to_batch(rollouts, reward=torch.ones(*shape, 1), valid=torch.ones(shape, dtype=torch.bool))

    def evaluate() -> Metrics:
        logp = learner.score(batch, frozenset({"logp_old"}))["logp_old"]
        return {"eval/logp": (logp[batch.mask]).double().mean().item()}

    return evaluate

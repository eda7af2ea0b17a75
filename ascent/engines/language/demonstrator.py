"""Responses that were written down, as rollouts: demonstrations, and the two responses of a pair."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ascent.engines.language.learner import LanguageLearner
from ascent.policies.causal_lm import LanguageModel
from ascent.types import Metrics, Rollouts, to_batch


class Demonstrator:
    """A sampler that draws nothing: it answers each prompt with what is shown for it.

    The one place where responses are tokenised, for nobody has sampled them. Their log-probs under whoever
    wrote them are unknown.
    """

    fills: frozenset[str] = frozenset()

    def __init__(self, lm: LanguageModel, limit: int, responses: Callable[[list[int]], list[str]]):
        self.lm, self.limit, self.responses = lm, limit, responses
        self.version = -1

    def load(self, params: dict[str, Tensor], version: int) -> None:
        self.version = version

    def generate(self, prompt: Tensor, samples: int, greedy: bool = False) -> Rollouts:
        groups = [[self.tokens(words) for words in self.responses(row[row >= 0].tolist())] for row in prompt]
        if any(len(group) != samples for group in groups):
            raise ValueError(f"{len(groups[0])} responses are shown for a prompt, and {samples} were asked for")
        return shown(prompt, groups, self.limit, self.version)

    def tokens(self, words: str) -> tuple[list[int], bool]:
        return tokens_of(self.lm, words, self.limit)


def tokens_of(lm: LanguageModel, words: str, limit: int) -> tuple[list[int], bool]:
    """A response and its end token; and whether the limit cut it."""
    ids = [*lm.tokenizer(words, add_special_tokens=False)["input_ids"], lm.end]
    return ids[:limit], len(ids) > limit


def shown(prompt: Tensor, groups: list[list[tuple[list[int], bool]]], limit: int, version: int = 0) -> Rollouts:
    """Written responses `[prompt][sample]`, each with whether it was cut, as rollouts that nobody sampled."""
    length = torch.tensor([[len(ids) for ids, _ in group] for group in groups])
    width = int(length.max())
    mask = torch.arange(width) < length.unsqueeze(-1)
    return Rollouts(
        prompt=prompt,
        response=torch.tensor([[ids + [0] * (width - len(ids)) for ids, _ in group] for group in groups]),
        mask=mask,
        logp_sampler=torch.zeros(mask.shape),
        limit=limit,
        truncated=torch.tensor([[cut for _, cut in group] for group in groups]),
        version=version,
        sampled=False,
    )


def held_out_logp(learner: LanguageLearner, rollouts: Rollouts) -> Callable[[], Metrics]:
    """The mean log-prob of a token of held-out demonstrations: what SFT maximises, where it was not trained."""
    shape = rollouts.mask.shape[:2]
    batch = to_batch(rollouts, reward=torch.ones(*shape, 1), valid=torch.ones(shape, dtype=torch.bool))

    def evaluate() -> Metrics:
        logp = learner.score(batch, frozenset({"logp_old"}))["logp_old"]
        return {"eval/logp": (logp[batch.mask]).double().mean().item()}

    return evaluate

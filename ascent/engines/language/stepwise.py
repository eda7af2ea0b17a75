"""A process reward on a language model's backbone: a head, read after each token of a response."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ascent.engines.language.demonstrator import Demonstrator, shown
from ascent.engines.language.rater import HEAD, LanguageRater, add_head
from ascent.engines.language.states import packed_states, padded_states, spread, state_mask
from ascent.policies.causal_lm import LanguageModel
from ascent.types import Batch, Outputs, Rollouts


def add_step_head(lm: LanguageModel) -> LanguageModel:
    """A rating head with a bias: unlike in a pair, a constant counts."""
    head = getattr(add_head(lm).model, HEAD)
    head.bias = nn.Parameter(torch.zeros_like(head.weight[:, 0]))
    return lm


def score_steps(lm: LanguageModel, batch: Rollouts) -> Float[Tensor, "prompt sample token"]:
    """What the head gives the state after each token, in float32 or better; 0 behind a response's last one."""
    states = packed_states if lm.shares else padded_states
    hidden = states(lm, batch, final=True)
    exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    head = getattr(lm.model, HEAD)
    values = F.linear(hidden.to(exact), head.weight.to(exact), head.bias.to(exact)).squeeze(-1)
    return spread(values, state_mask(batch))[..., 1:]


class LanguageStepper(LanguageRater):
    """Trains a process reward in this process."""

    def evaluate(self, batch: Batch) -> Outputs:
        score = score_steps(self.lm, batch)
        nothing = score.new_zeros(batch.mask.shape)
        return Outputs(nothing, nothing, rating=score)


class StepDemonstrator(Demonstrator):
    """Reads out responses whose steps were tokenised one by one, so that each token knows its step."""

    def __init__(self, lm: LanguageModel, limit: int, show: Callable[[list[int], Callable], list[int]]):
        super().__init__(lm, limit, lambda _: [])
        self.show = show

    def generate(self, prompt: Tensor, samples: int, greedy: bool = False) -> Rollouts:
        if samples != 1:
            raise ValueError(f"1 response is shown for a prompt, and {samples} were asked for")
        groups = [[(self.show(row[row >= 0].tolist(), lambda w: words_to_ids(self.lm, w)), False)] for row in prompt]
        return shown(prompt, groups, self.limit, self.version)


def words_to_ids(lm: LanguageModel, words: str) -> list[int]:
    return list(lm.tokenizer(words, add_special_tokens=False)["input_ids"])

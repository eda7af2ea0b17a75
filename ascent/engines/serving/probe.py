"""The probe after each load: does the engine draw from the learner's policy?

Two seeded prompts, each longer than a block of the engine's prefix cache, and a few tokens behind each. The engine's
log-probs of these tokens are compared with the learner's own. Two engines round differently, in half precision by about
0.01 nats. So the bound is a multiple of the gap of the first load.
"""

from collections.abc import Sequence

import torch

from ascent.core.types import Trouble
from ascent.engines.language.learning.head import Head, token_stats
from ascent.engines.serving.dialect import Answer
from ascent.policies.causal_lm import LanguageModel

PROMPT, TOKENS = 300, 64
"""Tokens of a prompt, where the model has room (a block has up to 128), and of a response to it."""
FACTOR, FLOOR, FIRST = 3.0, 1e-3, 0.1
"""The bound: `FACTOR` times the first load's gap, but not below `FLOOR`; and the first load's own bound, in nats."""


class Probe:
    """Compares one server with the model in this process; remembers the gap of the first load."""

    def __init__(self, lm: LanguageModel, temperature: float):
        self.lm, self.temperature, self.first = lm, temperature, None
        room = getattr(lm.config, "max_position_embeddings", None) or PROMPT + TOKENS
        self.tokens = min(TOKENS, room // 4)
        width = min(PROMPT, room - self.tokens)
        drawn = torch.randint(lm.vocab, (2, width), generator=torch.Generator().manual_seed(0))
        self.prompts: list[list[int]] = drawn.tolist()
        self.gap = 0.0
        """The mean distance of the log-probs, in nats, after the latest load."""

    first: float | None

    @property
    def length(self) -> int:
        """Tokens of a prompt with its response."""
        return len(self.prompts[0]) + self.tokens

    @property
    def bound(self) -> float:
        return FIRST if self.first is None else max(FLOOR, FACTOR * self.first)

    @torch.no_grad()
    def check(self, answers: Sequence[Answer], url: str, version: int) -> None:
        """Trouble where the engine's log-probs are too far from the learner's, or an answer is of another version."""
        gaps = []
        for prompt, answer in zip(self.prompts, answers, strict=True):
            ids = torch.tensor([prompt + answer.tokens], device=self.lm.device)
            hidden = self.lm.backbone(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
            own = token_stats(Head.of(self.lm.model), hidden, ids[0, len(prompt) :], self.temperature)[0]
            gaps.append((own.float().cpu() - torch.tensor(answer.logp)).abs())
        self.gap = float(torch.cat(gaps).mean())
        if not self.gap <= self.bound:
            known = "of the first load" if self.first is None else f"{FACTOR:g} times that of the first load"
            raise Trouble(
                f"{url} does not draw from this policy: after version {version} was loaded, its log-probs are "
                f"{self.gap:.3g} nats from the learner's on average, and the bound, {known}, is {self.bound:.3g}. Look "
                "at its log for tensors that it did not load; whether it serves this model, in this precision; whether "
                "it keeps its prefix cache over new weights; whether its log-probs are after temperature. "
                "docs/serving.md has the command that starts it"
            )
        others = sorted({v for answer in answers for v in answer.versions} - {version})
        if others:
            raise Trouble(f"{url} says that version {others[0]} drew what was asked of version {version}")
        self.first = self.gap if self.first is None else self.first

"""The probe after each load: does the engine draw from the learner's policy?

Two seeded prompts, each longer than a block of the engine's prefix cache, and a few tokens behind each. The engine's
log-probs of these tokens are compared with the learner's own. Two engines round differently, in half precision by about
0.01 nats. So the bound is a multiple of the gap of the first load.

Where responses are under way during a load, one more is begun just before it. The tokens that it gets after the load
have to be the new policy's too: an engine that goes on with old keys and values draws them from no policy at all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ascent.core.errors import RunError
from ascent.inference.remote.engine_adapter import EngineRequest, EngineResponse
from ascent.models.causal_lm import LanguageModel
from ascent.models.lm_head import Head, token_stats

PROMPT, TOKENS = 300, 64
"""Tokens of a prompt, where the model has room (a block has up to 128), and of a response to it."""
FACTOR, FLOOR, FIRST = 3.0, 1e-3, 0.1
"""The bound: `FACTOR` times the first load's gap, but not below `FLOOR`; and the first load's own bound, in nats."""


class WeightProbe:
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
        self.continued = (0, 0)
        """Of the latest response that was under way during a load, the tokens before it and after it."""

    first: float | None

    @property
    def length(self) -> int:
        """Tokens of a prompt with its response."""
        return len(self.prompts[0]) + self.tokens

    @property
    def bound(self) -> float:
        return FIRST if self.first is None else max(FLOOR, FACTOR * self.first)

    def requests(self) -> list[EngineRequest]:
        """They end at no token."""
        return [EngineRequest(ids, self.tokens, self.temperature, i, ()) for i, ids in enumerate(self.prompts)]

    def check(self, answers: Sequence[EngineResponse], url: str, version: int) -> None:
        """RunError where the engine's log-probs are too far from the learner's, or an answer is of another version."""
        gaps = [self._distance(prompt, answer) for prompt, answer in zip(self.prompts, answers, strict=True)]
        self.gap = float(torch.cat(gaps).mean())
        if not self.gap <= self.bound:
            raise RunError(
                f"{url} does not draw from this policy: after version {version} was loaded, its log-probs are "
                f"{self.gap:.3g} nats from the learner's on average, and the bound, {self._known}, is {self.bound:.3g}"
                ". Look at its log for tensors that it did not load; whether it serves this model, in this precision; "
                "whether it keeps its prefix cache over new weights; whether its log-probs are after temperature. "
                "docs/serving.md has the command that starts it"
            )
        others = sorted({v for answer in answers for v in answer.versions} - {version})
        if others:
            raise RunError(f"{url} says that version {others[0]} drew what was asked of version {version}")
        self.first = self.gap if self.first is None else self.first

    def check_continued(self, answer: EngineResponse, url: str, version: int) -> None:
        """RunError where what was drawn after the load, of a response begun before it, is not the new policy's."""
        new = torch.tensor(answer.versions, dtype=torch.long) == version
        self.continued = (int((~new).sum()), int(new.sum()))
        if answer.aborted or not new.any():  # it was over before the load
            return
        gap = float(self._distance(self.prompts[0], answer)[new].mean())
        if not gap <= self.bound:
            raise RunError(
                f"{url} goes on with old keys and values: of a response that was being written when version {version} "
                f"was loaded, the log-probs of the tokens after it are {gap:.3g} nats from the learner's on average, "
                f"and the bound, {self._known}, is {self.bound:.3g}. It has to compute its caches anew under new "
                "weights; --ahead 0 loads them between responses only"
            )

    @property
    def _known(self) -> str:
        return "of the first load" if self.first is None else f"{FACTOR:g} times that of the first load"

    @torch.no_grad()
    def _distance(self, prompt: list[int], answer: EngineResponse) -> Tensor:
        """|log-prob − the learner's| of each token."""
        ids = torch.tensor([prompt + answer.tokens], device=self.lm.device)
        hidden = self.lm.backbone(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
        own = token_stats(Head.of(self.lm.model), hidden, ids[0, len(prompt) :], self.temperature)[0]
        return (own.float().cpu() - torch.tensor(answer.logp)).abs()

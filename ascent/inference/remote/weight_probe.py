"""A probe after each weight load that checks whether the engine samples from the learner's policy.

The engine generates a few tokens for two seeded prompts, each longer than a block of its prefix cache. The log-probs of
these tokens are compared with the learner's. Two engines round differently, by about 0.01 nats in half precision, so
the bound is a multiple of the gap of the first load.

If responses are in progress during a load, one more is started just before it. Its tokens after the load have to follow
the new policy as well: an engine that continues with an old KV cache samples them from neither policy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ascent.core.errors import RunError
from ascent.inference.remote.engine_adapter import EngineRequest, EngineResponse
from ascent.models.causal_lm import LanguageModel
from ascent.models.lm_head import LMHead, token_stats

MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 300, 64
"""Lengths of a probe, if the context of the model is long enough. A block of a prefix cache has up to 128 tokens."""
GAP_FACTOR, MIN_GAP_BOUND, FIRST_GAP_BOUND = 3.0, 1e-3, 0.1
"""The bound is `GAP_FACTOR` times the gap of the first load, at least `MIN_GAP_BOUND`; for the first load it is
`FIRST_GAP_BOUND`. In nats."""


class WeightProbe:
    """Compares the log-probs of a server with those of the model in this process."""

    def __init__(self, lm: LanguageModel, temperature: float):
        self.lm, self.temperature = lm, temperature
        self.first_gap: float | None = None
        """The gap of the first load, in nats."""
        context = getattr(lm.config, "max_position_embeddings", None) or MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS
        self.response_tokens = min(MAX_RESPONSE_TOKENS, context // 4)
        prompt_tokens = min(MAX_PROMPT_TOKENS, context - self.response_tokens)
        prompts = torch.randint(lm.vocab_size, (2, prompt_tokens), generator=torch.Generator().manual_seed(0))
        self.prompts: list[list[int]] = prompts.tolist()
        self.gap = 0.0
        """Mean absolute difference of the log-probs after the latest load, in nats."""
        self.continued = (0, 0)
        """Numbers of tokens, before and after the latest load, of the response that was in progress."""

    @property
    def length(self) -> int:
        """Tokens of a prompt with its response."""
        return len(self.prompts[0]) + self.response_tokens

    @property
    def bound(self) -> float:
        return FIRST_GAP_BOUND if self.first_gap is None else max(MIN_GAP_BOUND, GAP_FACTOR * self.first_gap)

    def requests(self) -> list[EngineRequest]:
        """Return the requests of a probe. No token ends their responses."""
        num_tokens = self.response_tokens
        return [EngineRequest(ids, num_tokens, self.temperature, i, ()) for i, ids in enumerate(self.prompts)]

    def check(self, responses: Sequence[EngineResponse], url: str, version: int) -> None:
        """Raise RunError if the gap exceeds the bound or a response has another version."""
        gaps = [self._gaps(prompt, response) for prompt, response in zip(self.prompts, responses, strict=True)]
        self.gap = float(torch.cat(gaps).mean())
        if not self.gap <= self.bound:
            raise RunError(
                f"{url} does not sample from this policy: after version {version} was loaded, its log-probs differ "
                f"from the learner's by {self.gap:.3g} nats on average, and the bound, {self._bound_source}, is "
                f"{self.bound:.3g}. Check its log for tensors that were not loaded; whether it serves this model, in "
                "this precision; whether it keeps its prefix cache after a load; whether its log-probs include the "
                "temperature. docs/serving.md has the command that starts it"
            )
        others = sorted({v for response in responses for v in response.versions} - {version})
        if others:
            raise RunError(f"{url} answered a request to version {version} with version {others[0]}")
        self.first_gap = self.gap if self.first_gap is None else self.first_gap

    def check_continued(self, response: EngineResponse, url: str, version: int) -> None:
        """Raise RunError if the tokens after the load, of a response started before it, follow another policy."""
        is_new = torch.tensor(response.versions, dtype=torch.long) == version
        self.continued = (int((~is_new).sum()), int(is_new.sum()))
        if response.aborted or not is_new.any():  # it was complete before the load
            return
        gap = float(self._gaps(self.prompts[0], response)[is_new].mean())
        if not gap <= self.bound:
            raise RunError(
                f"{url} continues with an old KV cache: of a response that was in progress when version {version} was "
                f"loaded, the log-probs of later tokens differ from the learner's by {gap:.3g} nats on average, and "
                f"the bound, {self._bound_source}, is {self.bound:.3g}. The server has to recompute its KV cache after "
                "a load; --ahead 0 loads weights between responses only"
            )

    @property
    def _bound_source(self) -> str:
        return "of the first load" if self.first_gap is None else f"{GAP_FACTOR:g} times that of the first load"

    @torch.no_grad()
    def _gaps(self, prompt: list[int], response: EngineResponse) -> Tensor:
        """Return |log-prob − the learner's| of each token."""
        ids = torch.tensor([prompt + response.tokens], device=self.lm.device)
        hidden = self.lm.backbone(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
        logp = token_stats(LMHead.of(self.lm.model), hidden, ids[0, len(prompt) :], self.temperature)[0]
        return (logp.float().cpu() - torch.tensor(response.logp)).abs()

"""Decode with the cache of transformers, for architectures that the other runners do not support."""

import torch
from torch import Tensor

from ascent.inference.generation_state import GenerationState
from ascent.models.causal_lm import LanguageModel


class EagerRunner:
    """The fallback for architectures whose attention cannot be replaced: the KV cache of transformers.

    Prompts are repeated for their samples and padded on the left. Finished responses leave the batch; the next
    `max_num_seqs` responses start when it is empty.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompts: list[list[int]],
        samples: int,
        max_num_seqs: int,
        generation: GenerationState,
        cache_tokens: int = 0,
    ):
        self.lm, self.prompts, self.samples, self.generation = lm, prompts, samples, generation
        self.max_num_seqs = max_num_seqs
        if cache_tokens:
            max_length = max(map(len, prompts)) + generation.max_tokens
            self.max_num_seqs = max(1, min(max_num_seqs, cache_tokens // max_length))

    def __call__(self) -> None:
        responses = list(range(len(self.prompts) * self.samples))
        self.generation.timeline.capacity = min(self.max_num_seqs, len(responses))
        for start in range(0, len(responses), self.max_num_seqs):
            self._generate_batch(responses[start : start + self.max_num_seqs])
        self.generation.timeline.stop()

    def _generate_batch(self, responses: list[int]) -> None:
        from transformers import DynamicCache

        device = self.lm.device
        ids = [self.prompts[i // self.samples] for i in responses]
        width = max(map(len, ids))
        tokens = torch.tensor([[0] * (width - len(p)) + p for p in ids], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in ids], device=device)
        cache = DynamicCache(config=self.lm.model.config)
        observations: dict[int, list[int]] = {}
        while responses:
            self.generation.timeline.record(len(responses))
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            out = self.lm.backbone(
                input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            token, continues = self._next(out.last_hidden_state[:, -1], responses, observations)
            if not all(continues):
                keep = torch.tensor([i for i, flag in enumerate(continues) if flag], dtype=torch.long, device=device)
                responses, token, mask = [responses[i] for i in keep], token[keep], mask[keep]
                if responses:
                    cache.reorder_cache(keep)  # type: ignore[arg-type]
            tokens = token[:, None]
            mask = torch.cat([mask, mask.new_ones(len(responses), 1)], -1)

    def _next(
        self, hidden: Tensor, responses: list[int], observations: dict[int, list[int]]
    ) -> tuple[Tensor, list[bool]]:
        """Return the next token of these responses, sampled or from an observation, and which responses continue."""
        token = torch.tensor([observations[i].pop(0) if observations.get(i) else -1 for i in responses])
        sampled_rows = (token < 0).nonzero().flatten().tolist()
        finished: set[int] = set()
        if sampled_rows:
            sampled = [responses[i] for i in sampled_rows]
            token[sampled_rows] = self.generation.sample(hidden[sampled_rows], sampled).cpu()
            finished.update(self.generation.finish_turns(sampled))
        while self.generation.waits_for_input:  # this cache cannot suspend a sequence
            for response, tokens in self.generation.poll_observations(wait=True):
                observations[response] = list(tokens)
                finished.update([] if tokens else [response])
        return token.to(hidden.device), [response not in finished for response in responses]

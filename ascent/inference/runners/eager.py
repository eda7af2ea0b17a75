"""Decode with the cache of transformers, for architectures that the other runners do not support."""

import torch
from torch import Tensor

from ascent.inference.generation_state import GenerationState
from ascent.models.causal_lm import LanguageModel


class EagerRunner:
    """The fallback for architectures whose attention cannot be replaced: the KV cache of transformers.

    Prompts are repeated for their samples and padded on the left. Finished responses leave the batch; the next `rows`
    responses start when it is empty.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompts: list[list[int]],
        samples: int,
        rows: int,
        drawn: GenerationState,
        room: int = 0,
    ):
        self.lm, self.prompts, self.samples, self.generation = lm, prompts, samples, drawn
        self.max_num_seqs = max(1, min(rows, room // (max(map(len, prompts)) + drawn.max_tokens))) if room else rows

    def __call__(self) -> None:
        everything = list(range(len(self.prompts) * self.samples))
        self.generation.timeline.capacity = min(self.max_num_seqs, len(everything))
        for start in range(0, len(everything), self.max_num_seqs):
            self._generate_batch(everything[start : start + self.max_num_seqs])
        self.generation.timeline.stop()

    def _generate_batch(self, row: list[int]) -> None:
        from transformers import DynamicCache

        device = self.lm.device
        ids = [self.prompts[i // self.samples] for i in row]
        width = max(map(len, ids))
        tokens = torch.tensor([[0] * (width - len(p)) + p for p in ids], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in ids], device=device)
        cache = DynamicCache(config=self.lm.model.config)
        observed: dict[int, list[int]] = {}
        while row:
            self.generation.timeline.record(len(row))
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            out = self.lm.backbone(
                input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            token, going = self._next(out.last_hidden_state[:, -1], row, observed)
            if not all(going):
                keep = torch.tensor([i for i, on in enumerate(going) if on], dtype=torch.long, device=device)
                row, token, mask = [row[i] for i in keep], token[keep], mask[keep]
                if row:
                    cache.reorder_cache(keep)  # type: ignore[arg-type]
            tokens = token[:, None]
            mask = torch.cat([mask, mask.new_ones(len(row), 1)], -1)

    def _next(self, hidden: Tensor, row: list[int], observed: dict[int, list[int]]) -> tuple[Tensor, list[bool]]:
        """Return the next token of these responses, sampled or from an observation, and which responses continue."""
        token = torch.tensor([observed[response].pop(0) if observed.get(response) else -1 for response in row])
        drawing = (token < 0).nonzero().flatten().tolist()
        over: set[int] = set()
        if drawing:
            responses = [row[i] for i in drawing]
            token[drawing] = self.generation.sample(hidden[drawing], responses).cpu()
            over.update(self.generation.finish_turns(responses))
        while self.generation.waits_for_input:  # this cache cannot suspend a sequence
            for response, tokens in self.generation.poll_observations(wait=True):
                observed[response] = list(tokens)
                over.update([] if tokens else [response])
        return token.to(hidden.device), [response not in over for response in row]

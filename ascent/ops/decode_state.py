"""State of the sequences being decoded, in tensors at fixed addresses, as CUDA graphs need them."""

from __future__ import annotations

from dataclasses import dataclass
from operator import ge

import torch
from torch import Tensor

from ascent.ops.paged_kv_cache import PagedKVCache

PROMPT_LENGTH, RESPONSE_LENGTH, LAST_TOKEN, SEED, FINISHED_LENGTH, FORCED_LENGTH = range(6)
"""Rows of `DecodeState.state`, with one column per sequence of the batch.

PROMPT_LENGTH     prompt tokens in the KV cache: all but the last, which is fed as the first token of each response
RESPONSE_LENGTH   tokens in the blocks of the sequence itself, and the index of the next response token
LAST_TOKEN        the token that the next step feeds to the model
SEED              the seed of the response (`uniform_from_seed`)
FINISHED_LENGTH   0 while the response is being decoded, then its number of tokens
FORCED_LENGTH     response tokens before this index are not sampled: they are read from `tokens` (observations)
"""

MAX_STOP_TOKENS = 16
"""Capacity of `DecodeState.stop_tokens`."""

BLOCK_SIZE = 64
"""Tokens per KV-cache block."""


@dataclass(frozen=True)
class DecodeState:
    """Tensors at fixed addresses. The last batch index and the last block are padding, for unused rows of a step."""

    state: Tensor
    """Int64 `[6 batch_index]`: the rows named above."""
    batch_indices: Tensor
    """The batch index of each row of a step."""
    block_tables: Tensor
    """Int32 `[batch_index block]`: the KV-cache blocks of each sequence; those of its prompt come first."""
    cache: PagedKVCache
    tokens: Tensor
    """Response tokens `[batch_index token]`; `logp` and `kept_mass` have the same shape."""
    logp: Tensor
    kept_mass: Tensor
    """Probability mass of the tokens that top-k, top-p, min-p and forbidden tokens leave."""
    stop_tokens: Tensor
    """`[MAX_STOP_TOKENS]`, padded with −1."""
    max_tokens: Tensor
    temperature: Tensor
    finished_splits: Tensor
    """`[row·head]`: programs of split-KV attention that have finished with a row; zeros between steps."""

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_num_seqs: int,
        num_blocks: int,
        max_blocks_per_seq: int,
        max_tokens: int,
        like: Tensor,
    ) -> DecodeState:
        """Allocate the state; the KV cache has the dtype of `like`, and all tensors are on its device."""
        columns, device = max_num_seqs + 1, like.device
        state = torch.zeros(6, columns, dtype=torch.long, device=device)
        state[FINISHED_LENGTH, max_num_seqs] = 1
        cache, kv = PagedKVCache(num_blocks + 1, BLOCK_SIZE), like.new_empty(1, num_kv_heads, 1, head_dim)
        for layer in range(num_layers):
            cache.layer_blocks(layer, kv, kv)
        return cls(
            state=state,
            batch_indices=torch.full((max_num_seqs,), max_num_seqs, device=device),
            block_tables=torch.full((columns, max_blocks_per_seq), num_blocks, dtype=torch.int32, device=device),
            cache=cache,
            tokens=torch.zeros(columns, max_tokens, dtype=torch.long, device=device),
            logp=torch.zeros(columns, max_tokens, device=device),
            kept_mass=torch.ones(columns, max_tokens, device=device),
            stop_tokens=torch.full((MAX_STOP_TOKENS,), -1, device=device),
            max_tokens=torch.full((), max_tokens, device=device),
            temperature=torch.ones((), dtype=torch.float64, device=device),
            finished_splits=torch.zeros(max_num_seqs * num_kv_heads, dtype=torch.int32, device=device),
        )

    @property
    def max_num_seqs(self) -> int:
        """Sequences that can be decoded at once."""
        return len(self.batch_indices)

    @property
    def capacity(self) -> tuple[int, int, int, int]:
        """Return max_num_seqs, num_blocks, max_blocks_per_seq and max_tokens."""
        return self.max_num_seqs, self.cache.num_blocks - 1, self.block_tables.shape[1], self.tokens.shape[1]

    def fits(self, max_num_seqs: int, num_blocks: int, max_blocks_per_seq: int, max_tokens: int) -> bool:
        """Return whether the capacity is at least this."""
        return all(map(ge, self.capacity, (max_num_seqs, num_blocks, max_blocks_per_seq, max_tokens)))

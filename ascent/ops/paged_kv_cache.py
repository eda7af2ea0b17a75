"""KV cache in blocks of a fixed number of tokens (paged KV cache)."""

from __future__ import annotations

import torch
from torch import Tensor

TensorPair = tuple[Tensor, Tensor]


class PagedKVCache:
    """Keys and values of each layer, `[block head token head_dim]`. A layer's blocks are allocated at its first use."""

    def __init__(self, num_blocks: int, block_size: int, uninitialized: bool = False):
        """`uninitialized`: skip zeroing the blocks, for attention that reads only the tokens that were written."""
        self.num_blocks, self.block_size, self.uninitialized = num_blocks, block_size, uninitialized
        self.layers: dict[int, TensorPair] = {}

    def layer_blocks(self, layer: int, k: Tensor, v: Tensor) -> TensorPair:
        """Return the key and value blocks of this layer; allocate them with the heads, dtype and device of k and v."""
        if layer not in self.layers:
            new = torch.empty if self.uninitialized else torch.zeros
            self.layers[layer] = tuple(  # type: ignore[assignment]
                new(self.num_blocks, x.shape[1], self.block_size, x.shape[3], dtype=x.dtype, device=x.device)
                for x in (k, v)
            )
        return self.layers[layer]

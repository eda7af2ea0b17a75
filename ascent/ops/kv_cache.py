"""Keys and values in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


class Cache:
    """By layer, keys and values `[page head token channel]`. Memory is taken as pages are first written to."""

    def __init__(self, pages: int, size: int, empty: bool = False):
        """`empty`: attention reads what was written and no more, so that the pages need not be zeros at first."""
        self.pages, self.size, self.empty = pages, size, empty
        self.layers: dict[int, Pair] = {}

    def at(self, layer: int, k: Tensor, v: Tensor) -> Pair:
        """The pages of this layer, whose keys and values are like these."""
        if layer not in self.layers:
            new = torch.empty if self.empty else torch.zeros
            self.layers[layer] = tuple(  # type: ignore[assignment]
                new(self.pages, x.shape[1], self.size, x.shape[3], dtype=x.dtype, device=x.device) for x in (k, v)
            )
        return self.layers[layer]

"""State of the sequences being decoded, in tensors at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass
from operator import ge

import torch
from torch import Tensor

from ascent.ops.kv_cache import Cache

KNOWN, LENGTH, LAST, SEED, DONE, GIVEN = range(6)
"""The rows of a board's `state`. DONE is 0 while a response runs, and then its number of tokens.

Before place GIVEN tokens are not drawn: those that stand there already are fed, one per step.
"""


ENDS = 16
"""End tokens that a board has room for."""


PAGE = 64
"""Tokens on a page."""


@dataclass(frozen=True)
class DecodeState:
    """Tensors at fixed addresses. The last lane and the last page are nobody's, for rows that have nothing to do."""

    state: Tensor
    """Int `[6 lane]`: keys of the prompt, tokens in its own pages, the token to feed next, the seed, done, given."""
    lanes: Tensor
    """The lane of each row of a step."""
    table: Tensor
    """Int32 `[lane page]`: the pages of a lane, its prompt's first."""
    cache: Cache
    token: Tensor
    """Drawn tokens `[lane token]`; so too their log-probs and the mass of what could be drawn."""
    logp: Tensor
    mass: Tensor
    ends: Tensor
    limit: Tensor
    temperature: Tensor
    arrived: Tensor
    """`[row·head]`: programs that are done with a row in parts; zeros between steps."""

    @classmethod
    def empty(
        cls, layers: int, heads: int, channel: int, rows: int, pages: int, width: int, limit: int, like: Tensor
    ) -> DecodeState:
        """Room for rows of `limit` tokens, on pages of which each row has at most `width`."""
        lanes, device = rows + 1, like.device
        state = torch.zeros(6, lanes, dtype=torch.long, device=device)
        state[DONE, rows] = 1
        cache, one = Cache(pages + 1, PAGE), like.new_empty(1, heads, 1, channel)
        for layer in range(layers):
            cache.at(layer, one, one)
        return cls(
            state=state,
            lanes=torch.full((rows,), rows, device=device),
            table=torch.full((lanes, width), pages, dtype=torch.int32, device=device),
            cache=cache,
            token=torch.zeros(lanes, limit, dtype=torch.long, device=device),
            logp=torch.zeros(lanes, limit, device=device),
            mass=torch.ones(lanes, limit, device=device),
            ends=torch.full((ENDS,), -1, device=device),
            limit=torch.full((), limit, device=device),
            temperature=torch.ones((), dtype=torch.float64, device=device),
            arrived=torch.zeros(rows * heads, dtype=torch.int32, device=device),
        )

    @property
    def rows(self) -> int:
        return len(self.lanes)

    @property
    def room(self) -> tuple[int, int, int, int]:
        """Rows, pages, pages of a row, and tokens of a row."""
        return self.rows, self.cache.pages - 1, self.table.shape[1], self.token.shape[1]

    def holds(self, rows: int, pages: int, width: int, limit: int) -> bool:
        return all(map(ge, self.room, (rows, pages, width, limit)))

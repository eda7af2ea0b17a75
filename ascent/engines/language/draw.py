"""Drawing tokens: one uniform number a token from a stream of the response's own, and the inverse of the CDF.

The number that decides token t of a response is a hash of (the response's seed, t). So what is drawn does not
depend on which responses were decoded together. Floating point limits that in one place: matrix products over
batches of other sizes round differently, and where the uniform number falls within that rounding (about 1e-6)
of a boundary between two tokens, the other one is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ascent.types import Refused


@dataclass(frozen=True)
class Support:
    """Which tokens may be drawn: the likeliest k, those that make up a mass p, those near the likeliest."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise Refused(
                f"--top-k {self.top_k} --top-p {self.top_p:g} --min-p {self.min_p:g}: top-k is 0 (off) or more, top-p "
                "above 0 and at most 1, min-p from 0 to below 1"
            )

    @property
    def whole(self) -> bool:
        return self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0

    def allowed(self, p: Tensor) -> Tensor:
        """Which tokens of each row `[row vocab]` may be drawn; the likeliest always may."""
        ordered, index = p.sort(-1, descending=True)
        keep = torch.ones_like(ordered, dtype=torch.bool)
        if self.top_k:
            keep[:, self.top_k :] = False
        if self.top_p < 1.0:
            keep &= ordered.cumsum(-1) - ordered < self.top_p
        if self.min_p > 0.0:
            keep &= ordered >= self.min_p * ordered[:, :1]
        keep[:, 0] = True
        return torch.zeros_like(keep).scatter_(-1, index, keep)


def uniform(seed: Tensor, t: Tensor) -> Tensor:
    """A number in [0, 1) from a response's seed and a token's index: splitmix64, in float64."""
    x = seed + (t + 1) * -7046029254386353131  # the golden ratio's 64 bits, as a signed number
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0**-53


def _shift(x: Tensor, by: int) -> Tensor:
    """The unsigned right shift of 64-bit numbers."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def draw_tokens(
    logits: Tensor, temperature: float, support: Support, u: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A token a row, its log-prob over the full vocabulary, and the mass of what could be drawn (None: all).

    Without `u` the likeliest token is taken.
    """
    z = logits if temperature == 1.0 else logits / temperature
    p = torch.softmax(z, -1)
    mass = None
    if u is None:
        token = z.argmax(-1, keepdim=True)
    else:
        allowed = p
        if not support.whole:
            allowed = torch.where(support.allowed(p), p, 0.0)
            mass = allowed.sum(-1)
        token = _invert(allowed, u)
    return token.squeeze(-1), torch.log(p.gather(-1, token)).squeeze(-1), mass


def _invert(p: Tensor, u: Tensor) -> Tensor:
    """The first token at which the running sum of p exceeds u times its total: first the block, then the token."""
    rows, vocab = p.shape
    block = 256
    cells = (torch.nn.functional.pad(p, (0, -vocab % block)) if vocab % block else p).view(rows, -1, block)
    sums = cells.sum(-1).double().cumsum(-1)
    point = u[:, None] * sums[:, -1:] * (1 - 1e-12)  # below the total, whatever the rounding
    which = (sums <= point).sum(-1, keepdim=True)
    before = torch.where(which > 0, sums.gather(-1, (which - 1).clamp(min=0)), 0.0)
    inside = cells.gather(1, which.unsqueeze(-1).expand(-1, -1, block)).squeeze(1)
    place = (before + inside.double().cumsum(-1) <= point).sum(-1, keepdim=True)
    possible = inside > 0  # rounding must not pass what may be drawn
    first = possible.float().argmax(-1, keepdim=True)
    last = block - 1 - possible.flip(-1).float().argmax(-1, keepdim=True)
    return which * block + torch.minimum(torch.maximum(place, first), last)

"""What a decoder asks for the next tokens: the head, and how they are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ascent.engines.language.draw import Support, draw_tokens, uniform
from ascent.engines.language.head import Head

if TYPE_CHECKING:
    from ascent.engines.language.sampler import Drawn


@dataclass(frozen=True)
class Picker:
    """The next token of responses, from their last hidden states; it is noted in `drawn`."""

    head: Head
    seeds: Tensor | None
    """One a response; None: the likeliest token is taken."""
    temperature: float
    support: Support
    drawn: Drawn

    def __call__(self, hidden: Tensor, row: list[int]) -> Tensor:
        u = None
        if self.seeds is not None:
            u = uniform(self.seeds[row], self.drawn.length[row]).to(hidden.device)
        token, logp, mass = draw_tokens(self.head.logits(hidden), self.temperature, self.support, u)
        self.drawn.add(row, token, logp, mass)
        return token

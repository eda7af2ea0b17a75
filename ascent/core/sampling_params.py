"""Sampling parameters: which tokens may be sampled."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ascent.core.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """Top-k, top-p and min-p truncation, and a minimum length.

    Before `min_tokens` tokens no end token is sampled, and the probabilities of the others are renormalized.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise ConfigError(
                f"--top-k {self.top_k} --top-p {self.top_p:g} --min-p {self.min_p:g}: top-k is 0 (off) or more, top-p "
                "above 0 and at most 1, min-p from 0 to below 1"
            )

    @property
    def unrestricted(self) -> bool:
        return self == SamplingParams()

    def allowed_tokens(self, p: Tensor) -> Tensor:
        """Return the mask of tokens that may be sampled, `[row vocab]`; the most likely token always may."""
        if self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0:
            return p > 0
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

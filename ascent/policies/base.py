"""The interface of a small policy. Its parameters are its only state."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ascent.core.types import Space


class Sampled(NamedTuple):
    """Sampled responses. Tokens beyond a response's length are meaningless padding."""

    response: Int[Tensor, "prompt sample token"]
    logp: Float[Tensor, "prompt sample token"]
    length: Int[Tensor, "prompt sample"]


class Policy(nn.Module):
    """π(token | prompt, tokens so far), as a module with two methods."""

    space: Space

    def logits(
        self, prompt: Int[Tensor, "prompt position"], response: Int[Tensor, "prompt sample token"]
    ) -> Float[Tensor, "prompt #sample token vocab"]:
        """Logits at every state of these responses (sample length 1 if they do not depend on the response)."""
        raise NotImplementedError

    def sample(
        self,
        prompt: Int[Tensor, "prompt position"],
        samples: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> Sampled:
        """`samples` responses per prompt, drawn with this generator, or greedy without one."""
        raise NotImplementedError


class ValueFunction(nn.Module):
    """V(prompt, tokens so far), as a head on a backbone: its own, or the policy's."""

    def __init__(self, backbone: Policy, shared: bool):
        super().__init__()
        self._backbone = (
            backbone,
        )  # in a tuple, so that a shared backbone is not a submodule and is saved with the policy only
        if not shared:
            self.own = backbone

    @property
    def backbone(self) -> Any:
        return self._backbone[0]

    def trained(self) -> list[Tensor]:
        """The parameters that its optimizer moves: the head and the backbone."""
        every = {id(p): p for p in [*self.parameters(), *self.backbone.parameters()] if p.requires_grad}
        return list(every.values())

    def values(
        self, prompt: Int[Tensor, "prompt position"], response: Int[Tensor, "prompt sample token"]
    ) -> Float[Tensor, "prompt sample state"]:
        """The value of the state before each token, and of the state after the last token."""
        raise NotImplementedError


def draw_next(
    logits: Float[Tensor, "row vocab"], temperature: float, generator: torch.Generator | None
) -> tuple[Int[Tensor, "row"], Float[Tensor, "row"]]:
    """One token per row and its log-probability at this temperature; without a generator, the most likely token."""
    logp = torch.log_softmax(logits / temperature, -1)
    if generator is None:
        token = logits.argmax(-1)
    else:
        token = torch.multinomial(logp.exp(), 1, replacement=True, generator=generator)[:, 0]
    return token, logp.gather(-1, token[:, None])[:, 0]

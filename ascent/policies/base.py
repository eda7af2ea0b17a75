"""What the engines ask of a small policy. Parameters are the module's; nothing else is remembered."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ascent.types import Space


class Sampled(NamedTuple):
    """Drawn responses. Tokens past a response's length are padding and mean nothing."""

    response: Int[Tensor, "prompt sample token"]
    logp: Float[Tensor, "prompt sample token"]
    length: Int[Tensor, "prompt sample"]


class Policy(nn.Module):
    """π(token | prompt, tokens so far), as a module with two methods."""

    space: Space

    def logits(
        self, prompt: Int[Tensor, "prompt position"], response: Int[Tensor, "prompt sample token"]
    ) -> Float[Tensor, "prompt #sample token vocab"]:
        """Logits at every state along given responses (sample length 1 where they do not depend on it)."""
        raise NotImplementedError

    def sample(
        self,
        prompt: Int[Tensor, "prompt position"],
        samples: int,
        temperature: float,
        generator: torch.Generator | None,
    ) -> Sampled:
        """`samples` responses a prompt, drawn with this generator; with none, the greedy ones."""
        raise NotImplementedError


class ValueFunction(nn.Module):
    """V(prompt, tokens so far), as a head on a backbone: its own, or the policy's."""

    def __init__(self, backbone: Policy, shared: bool):
        super().__init__()
        self._backbone = (backbone,)  # in a tuple it is no submodule: a shared one is saved with the policy alone
        if not shared:
            self.own = backbone

    @property
    def backbone(self) -> Any:
        return self._backbone[0]

    def trained(self) -> list[Tensor]:
        """What its optimizer moves: the head and the backbone."""
        every = {id(p): p for p in [*self.parameters(), *self.backbone.parameters()] if p.requires_grad}
        return list(every.values())

    def values(
        self, prompt: Int[Tensor, "prompt position"], response: Int[Tensor, "prompt sample token"]
    ) -> Float[Tensor, "prompt sample state"]:
        """The value of the state before each token, and of the one after the last."""
        raise NotImplementedError


def draw(
    logits: Float[Tensor, "row vocab"], temperature: float, generator: torch.Generator | None
) -> tuple[Int[Tensor, "row"], Float[Tensor, "row"]]:
    """One token a row and its log-probability at this temperature; the likeliest without a generator."""
    logp = torch.log_softmax(logits / temperature, -1)
    if generator is None:
        token = logits.argmax(-1)
    else:
        token = torch.multinomial(logp.exp(), 1, replacement=True, generator=generator)[:, 0]
    return token, logp.gather(-1, token[:, None])[:, 0]

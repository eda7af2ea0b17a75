"""Attention that encodes a prompt once for its whole group.

transformers lets every model call an attention function of our own. Ours is handed a layout, which
says what the tokens of a forward pass are to one another:

    Packed   one row of groups, each [prompt, response 1, …, response G] with no padding between them;
             a response attends to its prompt and causally to itself, never to its siblings
    Cached   one new token a running response, against its group's prompt cache and its own

No architecture is named here: rotary positions, norms, biases and grouped heads are the model's own.
Both layouts are exact: the same sums as in the plain form, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascent.engines.language.learning import flash
from ascent.engines.language.learning.elementwise import rotating

NAME = "ascent_groups"


class Layout(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Outputs `[row position head channel]` for queries `[row head position channel]`."""


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """What transformers calls in every layer."""
    if more.get("softcap") or more.get("s_aux") is not None:
        raise NotImplementedError("this attention has a cap or sinks")
    layout: Layout = more["layout"]
    scale = more.get("scaling") or query.shape[-1] ** -0.5
    return layout.attend(module.layer_idx, query, key, value, scale), None  # type: ignore[arg-type]


@contextmanager
def ours(model: Any) -> Iterator[None]:
    """Inside, the model's layers call our attention function, and on a GPU turn queries and keys in one kernel."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        with rotating(model):
            yield
    finally:
        model.config._attn_implementation = before


@dataclass
class Packed:
    """One row of groups. `keep(layer, k, v)`, if given, is shown the keys and values of the row."""

    groups: list[flash.Group]
    keep: Callable[[int, Tensor, Tensor], None] | None = None
    fused: Any = None
    """How segments are attended to at once; None: flash attention where it fits, else a group at a time."""
    _grids: dict[flash.Group, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _spans: flash.Spans | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if self.keep is not None:
            self.keep(layer, k, v)
        if self.fused is not None or flash.fits(q):
            self._spans = self._spans or flash.Spans.of(self.groups, q.device)
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            return flash.attend(q, k, v, self._spans, scale, self.fused).unsqueeze(0)
        repeat = q.shape[1] // k.shape[1]
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        q, k, v = q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)  # [position head channel]
        parts: list[Tensor] = []
        for group in self.groups:
            own = slice(group.start, group.start + group.length)
            parts += self._one(group, q[own], k[own], v[own], scale)
        return torch.cat(parts).unsqueeze(0)

    def _one(self, group: flash.Group, q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[Tensor]:
        prompt = group.prompt
        pq, pk, pv = (x[:prompt].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        own = F.scaled_dot_product_attention(pq, pk, pv, is_causal=True, scale=scale)[0].transpose(0, 1)
        if not group.responses:
            return [own]
        count, width = len(group.responses), max(group.responses)
        even = min(group.responses) == width
        if even:
            rq, rk, rv = (x[prompt:].unflatten(0, (count, width)).transpose(1, 2) for x in (q, k, v))
        else:  # [response head token channel]
            grid, inside = self._grid(group, q.device)
            rq, rk, rv = (x[prompt:][grid].transpose(1, 2) for x in (q, k, v))
        k_all = torch.cat([pk.expand(count, -1, -1, -1), rk], 2)
        v_all = torch.cat([pv.expand(count, -1, -1, -1), rv], 2)
        seen = torch.ones(width, prompt + width, dtype=torch.bool, device=q.device).tril(prompt)
        out = F.scaled_dot_product_attention(rq, k_all, v_all, attn_mask=seen, scale=scale).transpose(1, 2)
        return [own, out.flatten(0, 1) if even else out[inside]]

    def _grid(self, group: flash.Group, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each response the indices of its tokens, padded with its last; and where they are its own."""
        if group not in self._grids:
            lengths = torch.tensor(group.responses, device=device)
            starts = lengths.cumsum(0) - lengths
            column = torch.arange(max(group.responses), device=device)
            inside = column < lengths[:, None]
            self._grids[group] = (starts[:, None] + torch.minimum(column, lengths[:, None] - 1), inside)
        return self._grids[group]

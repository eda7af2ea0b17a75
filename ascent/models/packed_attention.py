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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascent.models.fused_layers import fused_rope, needs_double_backward

ATTENTION_NAME = "ascent_groups"


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: the layout makes `[row position head channel]` of what it is given."""
    if more.get("softcap") or more.get("s_aux") is not None:
        raise NotImplementedError("its attention has a cap or sinks")
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotations of a mixed model are in float32
    scale = more.get("scaling") or query.shape[-1] ** -0.5
    return more["layout"].attend(module.layer_idx, query, key, value, scale), None


@contextmanager
def packed_attention_enabled(model: Any, on: bool = True) -> Iterator[None]:
    """Inside, if `on`, its layers call our attention function, and turn queries and keys in one pass (rotating)."""
    if not on:
        yield
        return
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention)
    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        with fused_rope(model):
            yield
    finally:
        config._attn_implementation = before


def to_device_async(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on its way to the device; nobody waits for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class PackedGroup:
    """Where a group stands in the packed row: its prompt, then its responses one after the other."""

    start: int
    prompt: int
    responses: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses)


@dataclass
class PackedLayout:
    """One row of groups."""

    groups: list[PackedGroup]
    fused: Any = None
    """How segments are attended to at once; None: by a kernel where one fits, else a group at a time."""
    _grids: dict[PackedGroup, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _biases: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _spans: VarlenSegments | None = None
    _neighbors: list[list[PackedGroup]] | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        fused = self.fused or varlen_kernel(q)
        if fused is not None:
            self._spans = self._spans or VarlenSegments.of(self.groups, q.device)
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            return VarlenAttention.apply(q, k, v, self._spans, scale, fused).unsqueeze(0)
        runs = self._runs()
        sizes = [sum(group.tokens for group in groups) for groups in runs]
        tokens = (x[0].transpose(0, 1).split(sizes) for x in (q, k, v))  # [position head channel]
        parts: list[Tensor] = []
        for groups, *row in zip(runs, *tokens, strict=True):
            own_q, own_k, own_v = (x.unflatten(0, (len(groups), -1)) for x in row)
            outs = self._alike(groups[0], own_q, own_k, own_v, scale)
            parts += [out[0] for out in outs] if len(groups) == 1 else [torch.cat(outs, 1).flatten(0, 1)]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).unsqueeze(0)

    def _runs(self) -> list[list[PackedGroup]]:
        """Neighbors of the same lengths, which are attended to at once."""
        if self._neighbors is None:
            shapes = groupby(self.groups, lambda group: (group.prompt, group.responses))
            self._neighbors = [list(groups) for _, groups in shapes]
        return self._neighbors

    def _alike(self, group: PackedGroup, q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[Tensor]:
        """Outputs `[group token head channel]` of groups that have the lengths of this one: prompts, then responses."""
        prompt, repeat = group.prompt, q.shape[2] // k.shape[2]
        (pq, rq), (pk, rk), (pv, rv) = (x.split([prompt, x.shape[1] - prompt], 1) for x in (q, k, v))
        wide_k, wide_v = ((x.repeat_interleave(repeat, 2) if repeat > 1 else x).transpose(1, 2) for x in (pk, pv))
        own = F.scaled_dot_product_attention(pq.transpose(1, 2), wide_k, wide_v, is_causal=True, scale=scale)
        if not group.responses:
            return [own.transpose(1, 2)]
        count, width = len(group.responses), max(group.responses)
        even = min(group.responses) == width
        if even:
            rq, rk, rv = (x.unflatten(1, (count, width)) for x in (rq, rk, rv))
        else:  # [group response token head channel]
            grid, inside = self._grid(group, q.device)
            rq, rk, rv = (x.index_select(1, grid).unflatten(1, (count, width)) for x in (rq, rk, rv))
        seen_k, seen_v = _prompt_then_response(pk, rk, repeat), _prompt_then_response(pv, rv, repeat)
        rq = rq.flatten(0, 1).transpose(1, 2)
        out = F.scaled_dot_product_attention(rq, seen_k, seen_v, attn_mask=self._bias(prompt, rq), scale=scale)
        out = out.transpose(1, 2).unflatten(0, (-1, count))
        out = out.flatten(1, 2) if even else out.flatten(1, 2).index_select(1, inside)
        return [own.transpose(1, 2), out]

    def _bias(self, prompt: int, q: Tensor) -> Tensor:
        """0 for what each token of a response sees, −∞ for the rest. Layers share it, so that autograd keeps one."""
        key = (prompt, q.shape[2])
        if key not in self._biases:
            seen = torch.ones(q.shape[2], prompt + q.shape[2], dtype=torch.bool, device=q.device).tril(prompt)
            self._biases[key] = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
        return self._biases[key]

    def _grid(self, group: PackedGroup, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each response the indices of its tokens, padded with its last; and the places that are not padding."""
        if group not in self._grids:
            lengths = torch.tensor(group.responses, device=device)
            starts = lengths.cumsum(0) - lengths
            column = torch.arange(max(group.responses), device=device)
            grid = starts[:, None] + torch.minimum(column, lengths[:, None] - 1)
            inside = (column < lengths[:, None]).flatten().nonzero().flatten()
            self._grids[group] = (grid.flatten(), inside)
        return self._grids[group]


def _prompt_then_response(prompt: Tensor, own: Tensor, repeat: int) -> Tensor:
    """What each response sees, `[response head token channel]`: its prompt's keys or values and then its own.

    Of a prompt `[group token head channel]` and responses `[group response token head channel]`; every head stands
    there for as many query heads as share it.
    """
    groups, count, _, heads, channel = own.shape
    both = (prompt.unsqueeze(1).expand(-1, count, -1, -1, -1), own)
    wide = [x.transpose(2, 3).unsqueeze(3).expand(groups, count, heads, repeat, -1, channel) for x in both]
    return torch.cat(wide, 4).flatten(2, 3).flatten(0, 1)


# ---- a packed row in one fused call, on a GPU ------------------------------------------------------
#
# Flash attention (in float32: memory-efficient attention) knows segments of queries, each with a segment of keys, and
# lets the last query see the last key. So a prompt is a segment that sees itself, and a response one whose keys are its
# prompt's and then its own:
#
#     queries   p p p | a a a a | b b            one group: a prompt of 3 tokens, responses of 4 and 2
#     keys      p p p | p p p a a a a | p p p b b
#
# Only keys and values are laid out again, and with few key-value heads they are small. Their gradients come back
# summed in float32 over all the places where a prompt was seen.


def varlen_kernel(q: Tensor) -> type[FlashVarlen] | type[EfficientVarlen] | None:
    """The fused kernel for these queries, if there is one."""
    if not q.is_cuda or q.shape[-1] % 8 or not _is_ampere(q.device):
        return None
    if q.dtype in (torch.bfloat16, torch.float16):
        return FlashVarlen if q.shape[-1] <= 256 and torch.backends.cuda.is_flash_attention_available() else None
    return EfficientVarlen if q.dtype == torch.float32 and q.shape[-1] <= 128 and not needs_double_backward() else None


@cache
def _is_ampere(device: torch.device) -> bool:
    """Is the card of that generation or a later one?"""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True)
class VarlenSegments:
    """Where the segments of a packed row begin and end, on the device."""

    queries: Tensor
    """Where each segment's queries begin, and where the last ones end."""
    keys: Tensor
    longest_query: int
    longest_key: int
    seen: Tensor
    """Which token of the row each key is."""
    own: Tensor
    """For every token of the row, the key that it is to itself."""
    again: Tensor
    """The keys that stand for a prompt's token once more."""

    @classmethod
    def of(cls, groups: Sequence[PackedGroup], device: torch.device) -> VarlenSegments:
        segments: list[tuple[int, int, int]] = []  # keys of the prompt before its own, where that begins, its queries
        for group in groups:
            segments.append((0, group.start, group.prompt))
            segments += [(group.prompt, group.start, length) for length in group.responses]
        prompt, begin, queries = torch.tensor(segments).t().contiguous()
        keys = prompt + queries
        segment = torch.repeat_interleave(torch.arange(len(segments)), keys)
        offset = torch.arange(int(keys.sum())) - (keys.cumsum(0) - keys)[segment]
        is_again = offset < prompt[segment]
        own_begin = (queries.cumsum(0) - queries)[segment] - prompt[segment]
        seen = torch.where(is_again, begin[segment], own_begin) + offset
        query_ends, key_ends = (torch.tensor([0, *accumulate(n.tolist())], dtype=torch.int32) for n in (queries, keys))
        return cls(
            queries=to_device_async(query_ends, device),
            keys=to_device_async(key_ends, device),
            longest_query=int(queries.max()),
            longest_key=int(keys.max()),
            seen=to_device_async(seen, device),
            own=to_device_async((~is_again).nonzero().flatten(), device),
            again=to_device_async(is_again.nonzero().flatten(), device),
        )


class VarlenAttention(torch.autograd.Function):
    """Outputs `[position head channel]` for queries, keys and values `[position head channel]` of one row.

    `ops`: `Flash` or `Efficient`.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: VarlenSegments, scale: float, ops: Any) -> Tensor:
        k_seen, v_seen = k[spans.seen], v[spans.seen]
        out, more = ops.forward(q, k_seen, v_seen, spans, scale)
        ctx.save_for_backward(q, k, v, out, *more)
        ctx.spans, ctx.scale, ctx.ops = spans, scale, ops
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, *more = ctx.saved_tensors
        spans = ctx.spans
        k_seen, v_seen = k[spans.seen], v[spans.seen]
        dq, dk, dv = ctx.ops.backward(grads[0], q, k_seen, v_seen, out, more, spans, ctx.scale)
        return dq, _sum_repeated_grads(dk, spans), _sum_repeated_grads(dv, spans), None, None, None


def _sum_repeated_grads(grad: Tensor, spans: VarlenSegments) -> Tensor:
    """Gradients of keys back at the tokens that they are, in float32 where a prompt's token is seen many times."""
    total = grad[spans.own].to(torch.promote_types(grad.dtype, torch.float32))
    total.index_add_(0, spans.seen[spans.again], grad[spans.again].to(total.dtype))
    return total.to(grad.dtype)


class FlashVarlen:
    """torch's own flash attention, in the form for segments of various lengths."""

    captured = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, spans: VarlenSegments, scale: float) -> tuple[Tensor, list[Tensor]]:
        ends = (spans.queries, spans.keys, spans.longest_query, spans.longest_key)
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *ends, 0.0, True, False, scale=scale
        )
        return out, [lse, state, unused]

    @staticmethod
    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        more: list[Tensor],
        spans: VarlenSegments,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse, state, unused = more
        ends = (spans.queries, spans.keys, spans.longest_query, spans.longest_key)
        return torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, lse, *ends, 0.0, True, state, unused, scale=scale
        )


class EfficientVarlen:
    """torch's memory-efficient attention, which knows float32 too. Each query head has keys of its own here."""

    captured = False
    """Was it tried in a captured graph, with empty segments?"""
    aten: Any = torch.ops.aten
    BOTTOM_RIGHT = 2
    """torch's number for a causal mask in which the last query sees the last key."""

    @classmethod
    def forward(
        cls, q: Tensor, k: Tensor, v: Tensor, spans: VarlenSegments, scale: float
    ) -> tuple[Tensor, list[Tensor]]:
        rows = [x.unsqueeze(0) for x in (q, _repeat_kv(k, q), _repeat_kv(v, q))]
        ends = (spans.queries, spans.keys, spans.longest_query, spans.longest_key)
        out, lse, *state, _, _ = cls.aten._efficient_attention_forward(
            *rows, None, *ends, 0.0, cls.BOTTOM_RIGHT, True, scale=scale
        )
        return out[0], [lse, *state]

    @classmethod
    def backward(
        cls,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        more: list[Tensor],
        spans: VarlenSegments,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse, *state = more
        ends = (spans.queries, spans.keys, spans.longest_query, spans.longest_key)
        grad, q, wide_k, wide_v, out = (
            x.unsqueeze(0) for x in (grad.contiguous(), q, _repeat_kv(k, q), _repeat_kv(v, q), out)
        )
        dq, dk, dv, _ = cls.aten._efficient_attention_backward(
            *(grad, q, wide_k, wide_v, None, out, *ends, lse, 0.0, *state, cls.BOTTOM_RIGHT, False),
            scale=scale,
            num_splits_key=1,
        )
        return dq[0], *(x[0].unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))


def _repeat_kv(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values `[key head channel]`, repeated for the query heads that share them."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)

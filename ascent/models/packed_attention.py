"""Attention over packed groups that share the encoding of their prompt (prefix sharing in training).

transformers lets a model call a registered attention function. This one delegates to the `layout` argument of the
forward pass, which defines what each token attends to:

    PackedLayout   one row of groups without padding, each [prompt, response 1, …, response G]; a response attends to
                   its prompt and causally to itself, never to the other responses of its group
    attention_layouts.py    the layouts of prefill and decoding

The code is independent of the architecture: RoPE, norms, biases and grouped-query attention are computed by the model.
Results equal those of separate sequences up to rounding.
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
    """Let the layout compute attention, `[row position head head_dim]`; transformers calls this in every layer."""
    if more.get("softcap") or more.get("s_aux") is not None:
        raise NotImplementedError("attention with softcap or sinks is not supported")
    query, key = query.to(value.dtype), key.to(value.dtype)  # in mixed precision RoPE returns float32
    scale = more.get("scaling") or query.shape[-1] ** -0.5
    return more["layout"].attend(module.layer_idx, query, key, value, scale), None


@contextmanager
def packed_attention_enabled(model: Any, enabled: bool = True) -> Iterator[None]:
    """Make the model call `attention` and the fused RoPE inside this context."""
    if not enabled:
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
    """Copy a tensor from the host to the device without synchronizing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True)
class PackedGroup:
    """Position of a group in the packed row: its start, its prompt length, and the lengths of its responses."""

    start: int
    prompt: int
    responses: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses)


@dataclass
class PackedLayout:
    """Attention of one packed row of groups."""

    groups: list[PackedGroup]
    fused: Any = None
    """Variable-length attention for the whole row. None: a fused kernel where available, else one group at a time."""
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
        tokens = (x[0].transpose(0, 1).split(sizes) for x in (q, k, v))  # [position head head_dim]
        parts: list[Tensor] = []
        for groups, *row in zip(runs, *tokens, strict=True):
            own_q, own_k, own_v = (x.unflatten(0, (len(groups), -1)) for x in row)
            outs = self._attend_equal_groups(groups[0], own_q, own_k, own_v, scale)
            parts += [out[0] for out in outs] if len(groups) == 1 else [torch.cat(outs, 1).flatten(0, 1)]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).unsqueeze(0)

    def _runs(self) -> list[list[PackedGroup]]:
        """Return runs of neighboring groups of equal lengths, which are computed in one call."""
        if self._neighbors is None:
            shapes = groupby(self.groups, lambda group: (group.prompt, group.responses))
            self._neighbors = [list(groups) for _, groups in shapes]
        return self._neighbors

    def _attend_equal_groups(self, group: PackedGroup, q: Tensor, k: Tensor, v: Tensor, scale: float) -> list[Tensor]:
        """Return outputs `[group token head head_dim]` of groups with these lengths: of prompts, then of responses."""
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
        else:  # [group response token head head_dim]
            grid, inside = self._grid(group, q.device)
            rq, rk, rv = (x.index_select(1, grid).unflatten(1, (count, width)) for x in (rq, rk, rv))
        seen_k, seen_v = _prompt_then_response(pk, rk, repeat), _prompt_then_response(pv, rv, repeat)
        rq = rq.flatten(0, 1).transpose(1, 2)
        out = F.scaled_dot_product_attention(rq, seen_k, seen_v, attn_mask=self._bias(prompt, rq), scale=scale)
        out = out.transpose(1, 2).unflatten(0, (-1, count))
        out = out.flatten(1, 2) if even else out.flatten(1, 2).index_select(1, inside)
        return [own.transpose(1, 2), out]

    def _bias(self, prompt: int, q: Tensor) -> Tensor:
        """Return the attention bias of responses: 0 or −∞. All layers share it, so that autograd saves only one."""
        key = (prompt, q.shape[2])
        if key not in self._biases:
            seen = torch.ones(q.shape[2], prompt + q.shape[2], dtype=torch.bool, device=q.device).tril(prompt)
            self._biases[key] = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
        return self._biases[key]

    def _grid(self, group: PackedGroup, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the token indices of each response, padded with its last token, and the positions without padding."""
        if group not in self._grids:
            lengths = torch.tensor(group.responses, device=device)
            starts = lengths.cumsum(0) - lengths
            column = torch.arange(max(group.responses), device=device)
            grid = starts[:, None] + torch.minimum(column, lengths[:, None] - 1)
            inside = (column < lengths[:, None]).flatten().nonzero().flatten()
            self._grids[group] = (grid.flatten(), inside)
        return self._grids[group]


def _prompt_then_response(prompt: Tensor, own: Tensor, repeat: int) -> Tensor:
    """Return the keys or values that each response attends to, `[response head token head_dim]`.

    They are those of the prompt `[group token head head_dim]` followed by those of the response `[group response token
    head head_dim]`, repeated for the query heads that share a KV head.
    """
    groups, count, _, heads, channel = own.shape
    both = (prompt.unsqueeze(1).expand(-1, count, -1, -1, -1), own)
    wide = [x.transpose(2, 3).unsqueeze(3).expand(groups, count, heads, repeat, -1, channel) for x in both]
    return torch.cat(wide, 4).flatten(2, 3).flatten(0, 1)


# ---- a packed row in one call of variable-length attention, on a GPU --------------------------------
#
# Variable-length flash attention (in float32: memory-efficient attention) takes segments of queries, each with a
# segment of keys, and aligns the causal mask to the last query and key. So a prompt is a segment that attends to
# itself, and the keys of a response segment are those of its prompt followed by its own:
#
#     queries   p p p | a a a a | b b            one group: a prompt of 3 tokens, responses of 4 and 2
#     keys      p p p | p p p a a a a | p p p b b
#
# Only keys and values are copied, and with few KV heads they are small. Their gradients are summed in float32 over all
# copies of a prompt.


def varlen_kernel(q: Tensor) -> type[FlashVarlen] | type[EfficientVarlen] | None:
    """Return the fused kernel for these queries, or None."""
    if not q.is_cuda or q.shape[-1] % 8 or not _is_ampere(q.device):
        return None
    if q.dtype in (torch.bfloat16, torch.float16):
        return FlashVarlen if q.shape[-1] <= 256 and torch.backends.cuda.is_flash_attention_available() else None
    return EfficientVarlen if q.dtype == torch.float32 and q.shape[-1] <= 128 and not needs_double_backward() else None


@cache
def _is_ampere(device: torch.device) -> bool:
    """Return whether the GPU is of the Ampere generation or later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True)
class VarlenSegments:
    """Segments of a packed row, as variable-length attention takes them, on the device."""

    cu_seqlens_q: Tensor
    """Cumulative lengths of the query segments, from 0."""
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    key_tokens: Tensor
    """The token of the row that each key belongs to."""
    own_keys: Tensor
    """For each token of the row, its key in its own segment."""
    repeated_keys: Tensor
    """The keys that are further copies of a prompt token."""

    @classmethod
    def of(cls, groups: Sequence[PackedGroup], device: torch.device) -> VarlenSegments:
        segments: list[tuple[int, int, int]] = []  # prompt keys before its own keys, start of its group, queries
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
            cu_seqlens_q=to_device_async(query_ends, device),
            cu_seqlens_k=to_device_async(key_ends, device),
            max_seqlen_q=int(queries.max()),
            max_seqlen_k=int(keys.max()),
            key_tokens=to_device_async(seen, device),
            own_keys=to_device_async((~is_again).nonzero().flatten(), device),
            repeated_keys=to_device_async(is_again.nonzero().flatten(), device),
        )


class VarlenAttention(torch.autograd.Function):
    """Attention of one packed row; queries, keys, values and outputs are `[position head head_dim]`.

    `ops`: `FlashVarlen` or `EfficientVarlen`.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: VarlenSegments, scale: float, ops: Any) -> Tensor:
        k_copies, v_copies = k[spans.key_tokens], v[spans.key_tokens]
        out, more = ops.forward(q, k_copies, v_copies, spans, scale)
        ctx.save_for_backward(q, k, v, out, *more)
        ctx.spans, ctx.scale, ctx.ops = spans, scale, ops
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, *more = ctx.saved_tensors
        spans = ctx.spans
        k_copies, v_copies = k[spans.key_tokens], v[spans.key_tokens]
        dq, dk, dv = ctx.ops.backward(grads[0], q, k_copies, v_copies, out, more, spans, ctx.scale)
        return dq, _sum_repeated_grads(dk, spans), _sum_repeated_grads(dv, spans), None, None, None


def _sum_repeated_grads(grad: Tensor, spans: VarlenSegments) -> Tensor:
    """Sum the gradients of all copies of each token; copies of prompt tokens are summed in float32."""
    total = grad[spans.own_keys].to(torch.promote_types(grad.dtype, torch.float32))
    total.index_add_(0, spans.key_tokens[spans.repeated_keys], grad[spans.repeated_keys].to(total.dtype))
    return total.to(grad.dtype)


class FlashVarlen:
    """Variable-length flash attention of PyTorch."""

    supports_cuda_graphs = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, spans: VarlenSegments, scale: float) -> tuple[Tensor, list[Tensor]]:
        lengths = (spans.cu_seqlens_q, spans.cu_seqlens_k, spans.max_seqlen_q, spans.max_seqlen_k)
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *lengths, 0.0, True, False, scale=scale
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
        lengths = (spans.cu_seqlens_q, spans.cu_seqlens_k, spans.max_seqlen_q, spans.max_seqlen_k)
        return torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, lse, *lengths, 0.0, True, state, unused, scale=scale
        )


class EfficientVarlen:
    """Variable-length memory-efficient attention of PyTorch, which supports float32; KV heads are repeated."""

    supports_cuda_graphs = False
    """Not tested in a CUDA graph with empty segments."""
    aten: Any = torch.ops.aten
    BOTTOM_RIGHT = 2
    """Mask type: causal, aligned to the last query and the last key."""

    @classmethod
    def forward(
        cls, q: Tensor, k: Tensor, v: Tensor, spans: VarlenSegments, scale: float
    ) -> tuple[Tensor, list[Tensor]]:
        rows = [x.unsqueeze(0) for x in (q, _repeat_kv(k, q), _repeat_kv(v, q))]
        lengths = (spans.cu_seqlens_q, spans.cu_seqlens_k, spans.max_seqlen_q, spans.max_seqlen_k)
        out, lse, *state, _, _ = cls.aten._efficient_attention_forward(
            *rows, None, *lengths, 0.0, cls.BOTTOM_RIGHT, True, scale=scale
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
        lengths = (spans.cu_seqlens_q, spans.cu_seqlens_k, spans.max_seqlen_q, spans.max_seqlen_k)
        grad, q, wide_k, wide_v, out = (
            x.unsqueeze(0) for x in (grad.contiguous(), q, _repeat_kv(k, q), _repeat_kv(v, q), out)
        )
        dq, dk, dv, _ = cls.aten._efficient_attention_backward(
            *(grad, q, wide_k, wide_v, None, out, *lengths, lse, 0.0, *state, cls.BOTTOM_RIGHT, False),
            scale=scale,
            num_splits_key=1,
        )
        return dq[0], *(x[0].unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))


def _repeat_kv(x: Tensor, q: Tensor) -> Tensor:
    """Repeat the heads of keys or values `[key head head_dim]` for the query heads that share them."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)

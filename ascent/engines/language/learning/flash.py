"""Attention over a packed row in one fused call, for half-precision tensors on a GPU.

Flash attention knows segments of queries, each with a segment of keys, and lets the last query see the last key.
So a prompt is a segment that sees itself, and a response one whose keys are its prompt's and then its own:

    queries   p p p | a a a a | b b            one group: a prompt of 3 tokens, responses of 4 and 2
    keys      p p p | p p p a a a a | p p p b b

Only keys and values are laid out again, and with few key-value heads they are small. Their gradients come back
summed in float32 over all the places where a prompt was seen. `formulas` is the same in plain torch, for the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on its way to the device; nobody waits for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def fits(q: Tensor) -> bool:
    """Is there a fused kernel for these queries?"""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] % 8 or q.shape[-1] > 256:
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(q.device) >= (8, 0)


@dataclass(frozen=True)
class Group:
    """Where a group stands in the packed row: its prompt, then its responses one after the other."""

    start: int
    prompt: int
    responses: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.prompt + sum(self.responses)


@dataclass(frozen=True)
class Spans:
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
    def of(cls, groups: Sequence[Group], device: torch.device) -> Spans:
        shared: list[int] = []  # keys of the prompt before a segment's own
        first: list[int] = []  # where that prompt begins
        length: list[int] = []
        for group in groups:
            count = len(group.responses)
            shared += [0] + [group.prompt] * count
            first += [group.start] * (1 + count)
            length += [group.prompt, *group.responses]
        prompt, begin, queries = torch.tensor(shared), torch.tensor(first), torch.tensor(length)
        keys = prompt + queries
        segment = torch.repeat_interleave(torch.arange(len(length)), keys)
        offset = torch.arange(int(keys.sum())) - (keys.cumsum(0) - keys)[segment]
        is_again = offset < prompt[segment]
        own_begin = (queries.cumsum(0) - queries)[segment] - prompt[segment]
        seen = torch.where(is_again, begin[segment], own_begin) + offset
        query_ends, key_ends = (torch.tensor([0, *accumulate(n.tolist())], dtype=torch.int32) for n in (queries, keys))
        return cls(
            queries=send(query_ends, device),
            keys=send(key_ends, device),
            longest_query=max(length),
            longest_key=int(keys.max()),
            seen=send(seen, device),
            own=send((~is_again).nonzero().flatten(), device),
            again=send(is_again.nonzero().flatten(), device),
        )


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, ops: Any = None) -> Tensor:
    """Outputs `[position head channel]` for queries, keys and values `[position head channel]` of one row."""
    return _Attend.apply(q, k, v, spans, scale, ops or Flash)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, ops: Any) -> Tensor:
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
        return dq, _gathered(dk, spans), _gathered(dv, spans), None, None, None


def _gathered(grad: Tensor, spans: Spans) -> Tensor:
    """Gradients of keys back at the tokens that they are, in float32 where a prompt's token is seen many times."""
    total = grad[spans.own].to(torch.promote_types(grad.dtype, torch.float32))
    total.index_add_(0, spans.seen[spans.again], grad[spans.again].to(total.dtype))
    return total.to(grad.dtype)


class Flash:
    """torch's own flash attention, in the form for segments of various lengths."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, list[Tensor]]:
        ends = (spans.queries, spans.keys, spans.longest_query, spans.longest_key)
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *ends, 0.0, True, False, scale=scale
        )
        return out, [lse, state, unused]

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, more: list[Tensor], spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse, state, unused = more
        ends = (spans.queries, spans.keys, spans.longest_query, spans.longest_key)
        return torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, lse, *ends, 0.0, True, state, unused, scale=scale
        )


class Formulas:
    """What `Flash` computes, a segment at a time and in any precision."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, list[Tensor]]:
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        parts = []
        ends = zip(spans.queries[:-1], spans.queries[1:], spans.keys[:-1], spans.keys[1:], strict=True)
        for q_from, q_to, k_from, k_to in ends:
            queries, keys = int(q_to - q_from), int(k_to - k_from)
            seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            own_q, own_k, own_v = (x.transpose(0, 1) for x in (q[q_from:q_to], k[k_from:k_to], v[k_from:k_to]))
            own = F.scaled_dot_product_attention(own_q, own_k, own_v, attn_mask=seen, scale=scale)
            parts.append(own.transpose(0, 1))
        return torch.cat(parts), []

    @classmethod
    def backward(
        cls, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, _more: Any, spans: Spans, scale: float
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            return torch.autograd.grad(cls.forward(q, k, v, spans, scale)[0], (q, k, v), grad)

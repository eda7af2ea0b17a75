"""Keys and values in pages, and the two layouts that read and write them.

    Extending   tokens that are given (a prompt, an observation, a row that comes back), packed into one row
    Decoding    one new token per running row

Where a page lies changes no number: sums run along a row's tokens, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.engines.language.attention import Spans, segment_kernel, send
from ascent.engines.language.sampling.pages import Row, Schedule

DENSE = 0.75
"""Share of a stretch of pages that has to be prompts' for it to be read where it lies; else it is copied."""
ENCODED = 16_384
"""Given tokens in one forward pass, about."""
Pair = tuple[Tensor, Tensor]


class Cache:
    """By layer, keys and values `[page head token channel]`. Memory is taken as pages are first written to."""

    def __init__(self, pages: int, size: int):
        self.pages, self.size = pages, size
        self.layers: dict[int, Pair] = {}

    def at(self, layer: int, k: Tensor, v: Tensor) -> Pair:
        """The pages of this layer, whose keys and values are like these."""
        if layer not in self.layers:
            self.layers[layer] = tuple(  # type: ignore[assignment]
                x.new_zeros(self.pages, x.shape[1], self.size, x.shape[3]) for x in (k, v)
            )
        return self.layers[layer]


@dataclass(frozen=True)
class Segment:
    """`count` tokens that join a row behind the `start` that it has; they see `keys` keys of a prompt before those."""

    pages: Sequence[int]
    count: int
    start: int = 0
    prompt: Sequence[int] = ()
    """The prompt's pages."""
    keys: int = 0


class Extending:
    """The layout of a forward pass over segments, packed into one row, that fills their pages."""

    fused: Any = None
    """What attends to all segments at once; False if nothing does. None: not found out yet."""

    def __init__(self, cache: Cache, segments: Sequence[Segment], device: torch.device):
        self.cache = cache
        self.queries = [part.count for part in segments]
        self.keys = [part.keys + part.start + part.count for part in segments]
        pages = [[*part.prompt, *part.pages] for part in segments]
        width = max(map(len, pages))
        rows = [
            [part.count, seen, part.keys, len(part.prompt), *own, *[0] * (width - len(own))]
            for part, seen, own in zip(segments, self.keys, pages, strict=True)
        ]
        about = send(torch.tensor(rows), device)
        self.page, self.offset, self.positions = self._places(about, about[:, 0], sum(self.queries))
        """Where the tokens' keys and values are written, and where each token stands in its text."""
        self.alone = self.keys == self.queries
        """There is nothing to see but the segments themselves."""
        self.seen = (self.page, self.offset)
        if not self.alone:
            self.seen = self._places(about, about[:, 1], sum(self.keys))[:2]
        ends = [F.pad(n.cumsum(0), (1, 0)).int() for n in (about[:, 0], about[:, 1])]
        nothing = ends[0][:0]
        self.spans = Spans(ends[0], ends[1], max(self.queries), max(self.keys), nothing, nothing, nothing)

    def _places(self, about: Tensor, last: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
        """The last keys that each segment sees, so many and `total` of all: their pages, places there, and positions.

        It is worked out on the device, so that the host, which others wait for, has little to do.
        """
        segment = torch.repeat_interleave(last, output_size=total)
        _, seen, keys, before = about[:, :4].t()
        position = torch.arange(total, device=about.device) - (last.cumsum(0) - seen)[segment]
        own = position - keys[segment]
        is_own, size = own >= 0, self.cache.size
        column = torch.where(is_own, before[segment] + own // size, position // size)
        return about[segment, 4 + column], torch.where(is_own, own, position) % size, position

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values = self.cache.at(layer, k, v)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [token head channel]
        keys[self.page, :, self.offset], values[self.page, :, self.offset] = k, v
        if not self.alone:
            page, offset = self.seen
            k, v = keys[page, :, offset], values[page, :, offset]
        return self.mix(q, k, v, scale).unsqueeze(0)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of the tokens to all that their segments see, `[token head channel]`."""
        if self.fuses(q):
            return self.fused.forward(q, k, v, self.spans, scale)[0]
        parts = zip(q.split(self.queries), k.split(self.keys), v.split(self.keys), strict=True)
        return torch.cat([_causal(*part, scale) for part in parts])

    def fuses(self, q: Tensor) -> bool:
        """Is there one kernel for the attention of all segments?"""
        if self.fused is None:
            self.fused = segment_kernel(q) or False
        return bool(self.fused)


class Encodes(Protocol):
    """A model, or what computes the same."""

    @property
    def device(self) -> torch.device: ...

    def hidden(self, ids: Tensor, positions: Tensor, layout: Any) -> Tensor:
        """Hidden states after each of these tokens, which the layout brings together with what they see."""


def extend(lm: Encodes, cache: Cache, tokens: Sequence[Sequence[int]], segments: Sequence[Segment]) -> Tensor:
    """Tokens join their rows' pages; returned is the hidden state after the last of each."""
    hidden: list[Tensor] = []
    first = 0
    while first < len(segments):
        last, total = first + 1, len(tokens[first])
        while last < len(segments) and total + len(tokens[last]) <= ENCODED:
            total += len(tokens[last])
            last += 1
        layout = Extending(cache, segments[first:last], lm.device)
        ids = send(torch.tensor([t for part in tokens[first:last] for t in part]), lm.device)
        hidden.append(lm.hidden(ids[None], layout.positions[None], layout)[0][layout.spans.queries[1:].long() - 1])
        first = last
    return torch.cat(hidden)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The last query sees every key, the one before all but the last, and so on. `[token head channel]`"""
    count, total = len(q), len(k)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    seen = None if count == total else torch.ones(count, total, dtype=torch.bool, device=q.device).tril(total - count)
    out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


class Decoding:
    """The layout of a step: every running row brings one token, and sees its prompt's pages and its own.

    Attention is worked out per page, for all rows that read it, and a row's pages are then weighed by their sums. So
    nothing is copied or padded to the longest row. Pages that are nobody's are read for nothing; there are few.
    """

    def __init__(self, cache: Cache, device: torch.device):
        self.cache, self.device = cache, device

    def arrange(self, rows: Sequence[Row], schedule: Schedule) -> None:
        """Work out who reads what. It holds until rows enter, leave, or get pages."""
        order = {row.response: i for i, row in enumerate(rows)}
        members: dict[int, list[int]] = {}
        for row in rows:
            members.setdefault(row.prompt, []).append(order[row.response])
        self.most = max(map(len, members.values()))
        pages = [page for prompt in members for page in schedule.prompts[prompt]]
        low = min(pages, default=0)
        span = max(pages, default=-1) + 1 - low
        whole = len(pages) >= DENSE * span
        self.prompt_pages: slice | Tensor = slice(low, low + span) if whole else self._send(pages)
        at = {page: page - low for page in pages} if whole else {page: i for i, page in enumerate(pages)}
        count = span if whole else len(pages)
        reader, keys = torch.zeros(count, self.most, dtype=torch.long), torch.ones(count, dtype=torch.long)
        self.high = max(page for row in rows for page in row.pages) + 1
        owner, base = torch.zeros(self.high, dtype=torch.long), torch.full((self.high,), -1)
        pieces: list[list[int]] = [[] for _ in rows]
        for prompt, those in members.items():
            for j, page in enumerate(schedule.prompts[prompt]):
                reader[at[page], : len(those)] = torch.tensor(those)
                keys[at[page]] = min(schedule.keys[prompt] - j * self.cache.size, self.cache.size)
                for rank, i in enumerate(those):
                    pieces[i].append(self.high + at[page] * self.most + rank)
        for i, row in enumerate(rows):
            pieces[i] += row.pages
            owner[row.pages] = i
            base[row.pages] = torch.arange(len(row.pages)) * self.cache.size
        width = max(map(len, pieces))
        self.pieces = self._send([p + p[-1:] * (width - len(p)) for p in pieces])
        beyond = torch.arange(width) >= torch.tensor([len(p) for p in pieces])[:, None]
        self.beyond = beyond.to(self.device)[:, :, None, None]
        self.reader, self.owner, self.base = (x.to(self.device) for x in (reader.flatten(), owner, base))
        self.prompt_bias, self.prompt_seen = _bias(keys.to(self.device)) if count else (None, 0)
        self.last = self._send([row.pages[-1] for row in rows])
        self.prompt_keys = self._send([schedule.keys[row.prompt] for row in rows])

    def _send(self, numbers: list[int] | list[list[int]]) -> Tensor:
        return send(torch.tensor(numbers, dtype=torch.long), self.device)

    def begin(self, rows: Sequence[Row]) -> Tensor:
        """What every layer of this step needs; the new tokens' positions. Row.length does not count them yet."""
        length = self._send([row.length for row in rows])
        self.offset = length % self.cache.size
        own = torch.where(self.base < 0, 1, length[self.owner] + 1 - self.base).clamp(max=self.cache.size)
        self.own_bias, self.own_seen = _bias(own)
        return self.prompt_keys + length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        rows, heads, _, channel = q.shape
        shared = k.shape[1]
        keys, values = self.cache.at(layer, k, v)
        keys[self.last, :, self.offset], values[self.last, :, self.offset] = k[:, :, 0], v[:, :, 0]
        q = q.reshape(rows, shared, heads // shared, channel)
        own_k, own_v = (x[: self.high, :, : self.own_seen] for x in (keys, values))
        out, log = _attend(q[self.owner], own_k, own_v, self.own_bias, scale)
        if len(self.reader):
            past, past_log = self._from_prompts(q, keys, values, scale)
            out, log = torch.cat([out, past]), torch.cat([log, past_log])
        share = torch.softmax(log[self.pieces].masked_fill(self.beyond, float("-inf")), 1).unsqueeze(-1)
        return (out[self.pieces] * share.to(out.dtype)).sum(1).reshape(rows, 1, heads, channel)

    def _from_prompts(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Pair:
        """Every reader's attention to each page of a prompt, `[page·reader head repeat channel]`, with log-sum-exps."""
        _, shared, repeat, channel = q.shape
        k, v = (x[self.prompt_pages][:, :, : self.prompt_seen] for x in (keys, values))
        table = q[self.reader].view(-1, self.most, shared, repeat, channel).transpose(1, 2).flatten(2, 3)
        out, log = _attend(table, k, v, self.prompt_bias, scale)
        out = out.unflatten(2, (self.most, repeat)).transpose(1, 2).flatten(0, 1)
        return out, log.unflatten(2, (self.most, repeat)).transpose(1, 2).flatten(0, 1)


def _bias(length: Tensor) -> tuple[Tensor | None, int]:
    """0 for the first `length` keys of a page and −∞ beyond, `[page 1 1 key]`, and its width; None: no beyond."""
    width = int(length.max())
    if bool((length == width).all()):
        return None, width
    beyond = torch.arange(width, device=length.device) >= length[:, None]
    return torch.zeros_like(beyond, dtype=torch.float32).masked_fill(beyond, float("-inf"))[:, None, None], width


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Pair:
    """softmax(q·kᵀ + bias)·v, and the log-sum-exp of its scores in float32 or better."""
    if q.device.type == "cpu" and q.dtype == torch.float32:
        bias = None if bias is None else bias.expand(*q.shape[:3], k.shape[2])
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if bias is not None:
        scores = scores + bias
    log = torch.logsumexp(scores, -1)
    return torch.exp(scores - log.unsqueeze(-1)).to(v.dtype) @ v, log

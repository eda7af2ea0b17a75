"""Keys and values in pages, and the two layouts that read and write them.

    Extending   tokens that are given (a prompt, an observation, a row that comes back), packed into one row
    Decoding    one new token per running row

Where a page lies changes no number: sums run over a row's tokens in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.inference.scheduler import Scheduler
from ascent.inference.sequence import Sequence
from ascent.models.packed_attention import VarlenSegments, to_device_async, varlen_kernel
from ascent.ops.paged_kv_cache import PagedKVCache, TensorPair

DENSE = 0.75
"""Share of a stretch of pages that has to be wanted for it to be read where it lies; else what is wanted is copied."""
MANY, FEW = 16, 4
"""Rows, or prompts, whose pages are read level by level; and parts that are joined one after the other."""
ENCODED = 16_384
"""Given tokens in one forward pass, about."""


@dataclass(frozen=True)
class PrefillSegment:
    """`count` tokens that join a row behind the `start` that it has; they see `keys` keys of a prompt before those."""

    pages: GenericSequence[int]
    count: int
    start: int = 0
    prompt: GenericSequence[int] = ()
    """The prompt's pages."""
    keys: int = 0


class PrefillLayout:
    """The layout of a forward pass over segments, packed into one row, that fills their pages."""

    fused: Any = None
    """What attends to all segments at once; False if nothing does. None: not found out yet."""

    def __init__(self, cache: PagedKVCache, segments: GenericSequence[PrefillSegment], device: torch.device):
        self.cache = cache
        self.queries = [part.count for part in segments]
        self.keys = [part.keys + part.start + part.count for part in segments]
        pages = [[*part.prompt, *part.pages] for part in segments]
        width = max(map(len, pages))
        rows = [
            [part.count, seen, part.keys, len(part.prompt), *own, *[0] * (width - len(own))]
            for part, seen, own in zip(segments, self.keys, pages, strict=True)
        ]
        about = to_device_async(torch.tensor(rows), device)
        self.page, self.offset, self.positions = self._places(about, about[:, 0], sum(self.queries))
        """Where the tokens' keys and values are written, and where each token stands in its text."""
        self.alone = self.keys == self.queries
        """There is nothing to see but the segments themselves."""
        self.seen = (self.page, self.offset)
        if not self.alone:
            self.seen = self._places(about, about[:, 1], sum(self.keys))[:2]
        ends = [F.pad(n.cumsum(0), (1, 0)).int() for n in (about[:, 0], about[:, 1])]
        nothing = ends[0][:0]
        self.spans = VarlenSegments(ends[0], ends[1], max(self.queries), max(self.keys), nothing, nothing, nothing)

    def _places(self, about: Tensor, last: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
        """The last keys that each segment sees, so many and `total` of all: their pages, places there, and positions.

        It is worked out on the device, so that the host, which others wait for, has little to do.
        """
        segment = torch.repeat_interleave(last, output_size=total)
        _, seen, keys, before = about[:, :4].t()
        position = torch.arange(total, device=about.device) - (last.cumsum(0) - seen)[segment]
        own = position - keys[segment]
        is_own, size = own >= 0, self.cache.block_size
        column = torch.where(is_own, before[segment] + own // size, position // size)
        return about[segment, 4 + column], torch.where(is_own, own, position) % size, position

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values = self.cache.layer_blocks(layer, k, v)
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
        outputs, start, first = [], 0, 0
        for (count, seen), alike in groupby(zip(self.queries, self.keys, strict=True)):  # neighbors in one call
            segments = len(list(alike))
            end, last = start + segments * count, first + segments * seen
            outputs.append(_causal((q[start:end], k[first:last], v[first:last]), segments, scale))
            start, first = end, last
        return torch.cat(outputs)

    def fuses(self, q: Tensor) -> bool:
        """Is there one kernel for the attention of all segments?"""
        if self.fused is None:
            self.fused = varlen_kernel(q) or False
        return bool(self.fused)


class HiddenStateModel(Protocol):
    """A model, or what computes the same."""

    @property
    def device(self) -> torch.device: ...

    def hidden(self, ids: Tensor, positions: Tensor, layout: Any) -> Tensor:
        """Hidden states after each of these tokens, which the layout brings together with what they see."""


def extend(
    lm: HiddenStateModel,
    cache: PagedKVCache,
    tokens: GenericSequence[GenericSequence[int]],
    segments: GenericSequence[PrefillSegment],
) -> Tensor:
    """Tokens join their rows' pages; returned is the hidden state after the last of each."""
    hidden: list[Tensor] = []
    first = 0
    while first < len(segments):
        last, total = first + 1, len(tokens[first])
        while last < len(segments) and total + len(tokens[last]) <= ENCODED:
            total += len(tokens[last])
            last += 1
        layout = PrefillLayout(cache, segments[first:last], lm.device)
        ids = to_device_async(torch.tensor([t for part in tokens[first:last] for t in part]), lm.device)
        hidden.append(lm.hidden(ids[None], layout.positions[None], layout)[0][layout.spans.cu_seqlens_q[1:].long() - 1])
        first = last
    return torch.cat(hidden)


def _causal(parts: GenericSequence[Tensor], segments: int, scale: float) -> Tensor:
    """Of queries, keys and values of segments of the same lengths, `[token head channel]`: attention inside each.

    The last query sees every key, the one before all but the last, and so on.
    """
    q, k, v = (x.unflatten(0, (segments, len(x) // segments)).transpose(1, 2) for x in parts)
    count, total = q.shape[2], k.shape[2]
    seen = None if count == total else torch.ones(count, total, dtype=torch.bool, device=q.device).tril(total - count)
    out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


@dataclass
class BlockReaders:
    """Pages of a prompt, or of a row itself, with the rows that read them."""

    pages: GenericSequence[int]
    readers: list[int]


class BlockGroup:
    """Pages that attention reads in one go, each for as many rows."""

    def __init__(self, held: GenericSequence[BlockReaders], levels: range, rows: int, size: int, device: torch.device):
        """The pages at these levels: the first of each prompt (or row) are level 0, the second level 1, and so on."""
        pages = [one.pages[j] for j in levels for one in held if j < len(one.pages)]
        low, count, step = _span(pages)
        whole = len(pages) >= DENSE * count
        self.pages = slice(low, low + count * step, step) if whole else to_device_async(torch.tensor(pages), device)
        """A tensor: they lie too far apart, and are copied."""
        at = {page: (page - low) // step for page in pages} if whole else {page: i for i, page in enumerate(pages)}
        self.most = most = max(len(one.readers) for one in held)
        """Readers of a page."""
        count = count if whole else len(pages)
        readers, base = [0] * (count * most), [-1] * count
        places = [[-1] * rows for _ in levels]
        for place, j in zip(places, levels, strict=True):
            for one in (one for one in held if j < len(one.pages)):
                first = at[one.pages[j]] * most
                base[first // most] = j * size
                readers[first : first + len(one.readers)] = one.readers
                for rank, row in enumerate(one.readers):
                    place[row] = first + rank
        every, where = list(range(rows)), [one for place in places for one in place]
        self.base = to_device_async(torch.tensor(base), device)
        """What a row has before each page; −1: it is nobody's, and read for nothing."""
        table = to_device_async(torch.tensor(readers), device)
        self.owner = table[::most]
        self.readers = None if readers == every else table
        """`[page·reader]` rows; None: all, in their order."""
        self.places = (
            None
            if where == every and len(readers) == rows
            else to_device_async(torch.tensor(where).clamp(min=0), device)
        )
        """`[level·row]`: where among `[page·reader]` a row has its part of a level; None: in order."""
        self.absent = to_device_async(torch.tensor(places) < 0, device)[..., None, None] if -1 in where else None
        """`[level row 1 1]`: rows that have no such page; None: all have it."""
        self.views: dict[int, TensorPair] = {}
        """By layer, keys and values that are read where they lie."""

    def look(self, tokens: Tensor, size: int) -> None:
        """See as much of the pages as rows with so many tokens have written."""
        seen = torch.where(self.base < 0, 1, tokens[self.owner] - self.base).clamp(max=size)
        self.bias, self.seen = _bias(seen)

    def attend(self, layer: int, q: Tensor, cache: TensorPair, scale: float) -> TensorPair:
        """Of queries `[row head repeat channel]`: attention `[level row head repeat channel]`, and log-sum-exps.

        A row without a page gets nothing of it, to the bit, whatever is there.
        """
        rows, shared, repeat, channel = q.shape
        k, v = (x.narrow(2, 0, self.seen) for x in self._paged(layer, cache))
        q = q if self.readers is None else q.index_select(0, self.readers)
        if self.most > 1:
            q = q.reshape(-1, self.most, shared, repeat, channel).transpose(1, 2).flatten(2, 3)
        out, log = _attend(q, k, v, self.bias, scale)
        if self.most > 1:
            out, log = (x.unflatten(2, (self.most, repeat)).transpose(1, 2).flatten(0, 1) for x in (out, log))
        if self.places is not None:
            out, log = out.index_select(0, self.places), log.index_select(0, self.places)
        out, log = (x.unflatten(0, (-1, rows)) for x in (out, log))
        if self.absent is not None:
            out, log = out.masked_fill(self.absent.unsqueeze(-1), 0.0), log.masked_fill(self.absent, -math.inf)
        return out, log

    def _paged(self, layer: int, cache: TensorPair) -> TensorPair:
        """Keys and values of these pages."""
        if not isinstance(self.pages, slice):
            return cache[0][self.pages], cache[1][self.pages]
        if layer not in self.views:
            self.views[layer] = cache[0][self.pages], cache[1][self.pages]
        return self.views[layer]


def _span(pages: GenericSequence[int]) -> tuple[int, int, int]:
    """The lowest, how many pages there are from it to the highest, and in which steps: the largest that meet all."""
    low = min(pages)
    step = math.gcd(*(page - low for page in pages)) or 1
    return low, (max(pages) - low) // step + 1, step


def _blocks(held: GenericSequence[BlockReaders], rows: int, size: int, device: torch.device) -> list[BlockGroup]:
    """A block for each level, on a CPU, if there are many rows and it reads no more pages so; else one for all levels.

    On a GPU the host would have to launch every block.
    """
    held = [one for one in held if one.pages]
    if not held:
        return []
    levels = range(max(len(one.pages) for one in held))
    spans = [_span([one.pages[j] for one in held if j < len(one.pages)])[1] for j in levels]
    whole = _span([page for one in held for page in one.pages])[1]
    apart = device.type == "cpu" and len(held) >= MANY and sum(spans) <= whole
    parts = [range(j, j + 1) for j in levels] if apart else [levels]
    return [BlockGroup(held, part, rows, size, device) for part in parts]


class DecodeLayout:
    """The layout of a step: every running row brings one token, and sees its prompt's pages and its own.

    Attention is worked out per page, for all rows that read it, and a row's pages are then weighed by their sums. So
    nothing is padded to the longest row. Pages that are nobody's are read for nothing, as long as there are few.
    """

    def __init__(self, cache: PagedKVCache, device: torch.device):
        self.cache, self.device = cache, device

    def arrange(self, rows: GenericSequence[Sequence], schedule: Scheduler) -> None:
        """Work out who reads what. It holds until rows enter, leave, or get pages."""
        members: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            members.setdefault(row.prompt_id, []).append(i)
        how = (len(rows), self.cache.block_size, self.device)
        prompts = _blocks(
            [BlockReaders(schedule.prompt_blocks[prompt], those) for prompt, those in members.items()], *how
        )
        self.own = _blocks([BlockReaders(row.block_table, [i]) for i, row in enumerate(rows)], *how)
        self.blocks = [*self.own, *prompts]
        self.prompt_keys = self._send([schedule.prompt_lengths[row.prompt_id] for row in rows])
        for block in prompts:
            block.look(self.prompt_keys, self.cache.block_size)
        last = [row.block_table[-1] for row in rows]
        self.last = self._send(last)
        self.in_order = last == list(range(last[0], last[0] + len(last)))

    def _send(self, numbers: list[int]) -> Tensor:
        return to_device_async(torch.tensor(numbers, dtype=torch.long), self.device)

    def begin(self, rows: GenericSequence[Sequence]) -> Tensor:
        """What every layer of this step needs; the new tokens' positions. Row.length does not count them yet."""
        length = self._send([row.num_tokens for row in rows])
        for block in self.own:
            block.look(length + 1, self.cache.block_size)
        first, offset = rows[0].block_table[-1], rows[0].num_tokens % self.cache.block_size
        self.new: tuple[Any, ...] = (self.last, slice(None), length % self.cache.block_size)
        """Where keys and values of the new tokens are written."""
        if self.in_order and all(row.num_tokens % self.cache.block_size == offset for row in rows):
            self.new = (slice(first, first + len(rows)), slice(None), offset)
        return self.prompt_keys + length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        rows, heads, _, channel = q.shape
        shared = k.shape[1]
        keys, values = cache = self.cache.layer_blocks(layer, k, v)
        keys[self.new], values[self.new] = k[:, :, 0], v[:, :, 0]
        q = q.reshape(rows, shared, heads // shared, channel)
        found = [block.attend(layer, q, cache, scale) for block in self.blocks]
        return _weighed(found).to(q.dtype).reshape(rows, 1, heads, channel)


def _weighed(blocks: list[TensorPair]) -> Tensor:
    """Attention to the levels of blocks, by the sums of their scores. The first, of own tokens, every row has."""
    if sum(len(out) for out, _ in blocks) > FEW:
        out, log = (torch.cat(some) for some in zip(*blocks, strict=True))
        return out.to(log.dtype).mul_(torch.softmax(log, 0).unsqueeze(-1)).sum(0)
    (total, log), *others = [(out[j], log[j]) for out, log in blocks for j in range(len(out))]
    total = total.to(log.dtype)
    for j, (part, own) in enumerate(others, 1):
        total = total.lerp_(part.to(log.dtype), torch.sigmoid(own - log).unsqueeze(-1))
        log = torch.logaddexp(log, own) if j < len(others) else log
    return total


def _bias(length: Tensor) -> tuple[Tensor | None, int]:
    """0 for the first `length` keys of a page and −∞ beyond, `[page 1 1 key]`, and its width; None: no beyond."""
    width = int(length.max())
    if bool((length == width).all()):
        return None, width
    beyond = torch.arange(width, device=length.device) >= length[:, None]
    return torch.zeros_like(beyond, dtype=torch.float32).masked_fill(beyond, float("-inf"))[:, None, None], width


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> TensorPair:
    """softmax(q·kᵀ + bias)·v, and the log-sum-exp of its scores in float32 or better."""
    if q.device.type == "cpu" and q.dtype == torch.float32:
        bias = None if bias is None else bias.expand(*q.shape[:3], k.shape[2])
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if bias is not None:
        scores = scores + bias
    log = torch.logsumexp(scores, -1)
    return torch.exp(scores - log.unsqueeze(-1)).to(v.dtype) @ v, log

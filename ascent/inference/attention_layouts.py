"""Attention layouts that read and write the paged KV cache in plain PyTorch.

    PrefillLayout   tokens of prompts, observations and preempted sequences, packed into one row
    DecodeLayout    one new token per running sequence

The result does not depend on which blocks a sequence has: sums run over its tokens in a fixed order.
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

MIN_BLOCK_DENSITY = 0.75
"""Minimum share of needed blocks in a range of the cache for attention to read it as a view instead of a copy."""
MIN_READERS_PER_LEVEL, MAX_SEQUENTIAL_MERGES = 16, 4
"""Minimum number of readers to read block by block; maximum number of partial results merged one by one."""
MAX_PREFILL_TOKENS = 16_384
"""Approximate maximum number of tokens in one prefill."""


@dataclass(frozen=True)
class PrefillSegment:
    """`num_tokens` new tokens of a sequence after `num_cached` tokens, behind `prompt_length` tokens of a prompt."""

    block_table: GenericSequence[int]
    num_tokens: int
    num_cached: int = 0
    prompt_blocks: GenericSequence[int] = ()
    """Blocks of the prompt."""
    prompt_length: int = 0


class PrefillLayout:
    """The layout of a prefill: segments packed into one row, whose keys and values are written to the cache."""

    fused: Any = None
    """The fused attention kernel over all segments; False: there is none; None: not determined yet."""

    def __init__(self, cache: PagedKVCache, segments: GenericSequence[PrefillSegment], device: torch.device):
        self.cache = cache
        self.queries = [part.num_tokens for part in segments]
        self.keys = [part.prompt_length + part.num_cached + part.num_tokens for part in segments]
        pages = [[*part.prompt_blocks, *part.block_table] for part in segments]
        width = max(map(len, pages))
        rows = [
            [part.num_tokens, seen, part.prompt_length, len(part.prompt_blocks), *own, *[0] * (width - len(own))]
            for part, seen, own in zip(segments, self.keys, pages, strict=True)
        ]
        about = to_device_async(torch.tensor(rows), device)
        self.page, self.offset, self.positions = self._places(about, about[:, 0], sum(self.queries))
        """Blocks and offsets that the keys and values are written to, and the position of each token in its text."""
        self.alone = self.keys == self.queries
        """Whether no segment attends to cached tokens."""
        self.seen = (self.page, self.offset)
        if not self.alone:
            self.seen = self._places(about, about[:, 1], sum(self.keys))[:2]
        ends = [F.pad(n.cumsum(0), (1, 0)).int() for n in (about[:, 0], about[:, 1])]
        nothing = ends[0][:0]
        self.spans = VarlenSegments(ends[0], ends[1], max(self.queries), max(self.keys), nothing, nothing, nothing)

    def _places(self, about: Tensor, last: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return blocks, offsets and positions of the last `last` keys of each segment; `total` is their sum.

        This is computed on the device because the host is the bottleneck.
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
        """Return the attention of the tokens over the keys of their segments, `[token head head_dim]`."""
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
        """Return whether one kernel computes the attention of all segments."""
        if self.fused is None:
            self.fused = varlen_kernel(q) or False
        return bool(self.fused)


class HiddenStateModel(Protocol):
    """A model, or a faster implementation of it."""

    @property
    def device(self) -> torch.device: ...

    def hidden(self, ids: Tensor, positions: Tensor, layout: Any) -> Tensor:
        """Return the hidden states of these tokens; `layout` computes attention."""


def prefill_segments(
    lm: HiddenStateModel,
    cache: PagedKVCache,
    tokens: GenericSequence[GenericSequence[int]],
    segments: GenericSequence[PrefillSegment],
) -> Tensor:
    """Prefill segments in chunks of about `MAX_PREFILL_TOKENS`. Return the hidden state of the last token of each."""
    hidden: list[Tensor] = []
    first = 0
    while first < len(segments):
        last, total = first + 1, len(tokens[first])
        while last < len(segments) and total + len(tokens[last]) <= MAX_PREFILL_TOKENS:
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
    """Blocks of a prompt or of a sequence, with the rows of the batch that read them."""

    pages: GenericSequence[int]
    readers: list[int]


class BlockGroup:
    """Blocks that attention reads in one call."""

    def __init__(self, held: GenericSequence[BlockReaders], levels: range, rows: int, size: int, device: torch.device):
        """Level j holds the j-th block of each prompt or sequence."""
        pages = [one.pages[j] for j in levels for one in held if j < len(one.pages)]
        low, count, step = _span(pages)
        whole = len(pages) >= MIN_BLOCK_DENSITY * count
        self.pages = slice(low, low + count * step, step) if whole else to_device_async(torch.tensor(pages), device)
        """A slice is read as a view; a tensor of indices is copied."""
        at = {page: (page - low) // step for page in pages} if whole else {page: i for i, page in enumerate(pages)}
        self.most = most = max(len(one.readers) for one in held)
        """Maximum number of readers of a block."""
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
        """Number of tokens before each block; −1: the block is not needed but inside the range."""
        table = to_device_async(torch.tensor(readers), device)
        self.owner = table[::most]
        self.readers = None if readers == every else table
        """`[block·reader]` rows; None: all rows in order."""
        self.places = (
            None
            if where == every and len(readers) == rows
            else to_device_async(torch.tensor(where).clamp(min=0), device)
        )
        """`[level·row]` indices into `[block·reader]`; None: in order."""
        self.absent = to_device_async(torch.tensor(places) < 0, device)[..., None, None] if -1 in where else None
        """`[level row 1 1]`: rows that have no block at a level; None: all have one."""
        self.views: dict[int, TensorPair] = {}
        """Views of keys and values by layer."""

    def look(self, tokens: Tensor, size: int) -> None:
        """Mask the blocks for rows with these numbers of tokens."""
        seen = torch.where(self.base < 0, 1, tokens[self.owner] - self.base).clamp(max=size)
        self.bias, self.seen = _bias(seen)

    def attend(self, layer: int, q: Tensor, cache: TensorPair, scale: float) -> TensorPair:
        """Attention `[level row head repeat head_dim]` of queries `[row head repeat head_dim]` and log-sum-exps.

        For a row without a block the result is exactly 0 and −∞, whatever the memory contains.
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
        """Return the keys and values of these blocks."""
        if not isinstance(self.pages, slice):
            return cache[0][self.pages], cache[1][self.pages]
        if layer not in self.views:
            self.views[layer] = cache[0][self.pages], cache[1][self.pages]
        return self.views[layer]


def _span(pages: GenericSequence[int]) -> tuple[int, int, int]:
    """Return the start, length and step of the smallest range that contains all blocks."""
    low = min(pages)
    step = math.gcd(*(page - low for page in pages)) or 1
    return low, (max(pages) - low) // step + 1, step


def _blocks(held: GenericSequence[BlockReaders], rows: int, size: int, device: torch.device) -> list[BlockGroup]:
    """Return one group per level, on a CPU with many rows if it reads no more blocks; else one group for all levels.

    On a GPU the host would have to launch every group.
    """
    held = [one for one in held if one.pages]
    if not held:
        return []
    levels = range(max(len(one.pages) for one in held))
    spans = [_span([one.pages[j] for one in held if j < len(one.pages)])[1] for j in levels]
    whole = _span([page for one in held for page in one.pages])[1]
    apart = device.type == "cpu" and len(held) >= MIN_READERS_PER_LEVEL and sum(spans) <= whole
    parts = [range(j, j + 1) for j in levels] if apart else [levels]
    return [BlockGroup(held, part, rows, size, device) for part in parts]


class DecodeLayout:
    """The layout of a decode step: one token per running sequence attends to its prompt and its own tokens.

    Attention is computed per block for all its readers, and the partial results of a sequence are merged by their
    log-sum-exps. So nothing is padded to the longest sequence.
    """

    def __init__(self, cache: PagedKVCache, device: torch.device):
        self.cache, self.device = cache, device

    def set_sequences(self, rows: GenericSequence[Sequence], schedule: Scheduler) -> None:
        """Set the sequences of the batch. Call it again when sequences enter, leave or get blocks."""
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

    def begin_step(self, rows: GenericSequence[Sequence]) -> Tensor:
        """Prepare a step. Return the positions of the new tokens, which `Sequence.num_tokens` does not count yet."""
        length = self._send([row.num_tokens for row in rows])
        for block in self.own:
            block.look(length + 1, self.cache.block_size)
        first, offset = rows[0].block_table[-1], rows[0].num_tokens % self.cache.block_size
        self.new: tuple[Any, ...] = (self.last, slice(None), length % self.cache.block_size)
        """Index of the keys and values of the new tokens."""
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
    """Merge partial attention by log-sum-exps. All rows have the first part, of the sequence itself."""
    if sum(len(out) for out, _ in blocks) > MAX_SEQUENTIAL_MERGES:
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

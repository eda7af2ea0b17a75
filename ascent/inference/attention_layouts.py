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
"""Minimum number of block tables to read level by level; maximum number of partial results merged one by one."""
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

    fused_kernel: Any = None
    """The variable-length attention kernel over all segments; False: there is none; None: not determined yet."""

    def __init__(self, cache: PagedKVCache, segments: GenericSequence[PrefillSegment], device: torch.device):
        self.cache = cache
        self.query_lengths = [segment.num_tokens for segment in segments]
        self.key_lengths = [segment.prompt_length + segment.num_cached + segment.num_tokens for segment in segments]
        block_tables = [[*segment.prompt_blocks, *segment.block_table] for segment in segments]
        width = max(map(len, block_tables))
        rows = [
            [part.num_tokens, key_length, part.prompt_length, len(part.prompt_blocks), *blocks]
            for part, key_length, blocks in zip(segments, self.key_lengths, block_tables, strict=True)
        ]
        rows = [row + [0] * (4 + width - len(row)) for row in rows]
        table = to_device_async(torch.tensor(rows), device)
        query_lengths, key_lengths = table[:, 0], table[:, 1]
        *slots, self.positions = self._slots(table, query_lengths, sum(self.query_lengths))
        """Position of each token in its text."""
        self.slot_mapping: TensorPair = (slots[0], slots[1])
        """Block and offset in it that the key and value of each token are written to."""
        self.uses_cached_tokens = self.key_lengths != self.query_lengths
        """Whether any segment attends to cached tokens."""
        self.key_slots = self.slot_mapping
        """Block and offset of each key that the segments attend to."""
        if self.uses_cached_tokens:
            self.key_slots = self._slots(table, key_lengths, sum(self.key_lengths))[:2]
        cu_seqlens_q, cu_seqlens_k = (F.pad(n.cumsum(0), (1, 0)).int() for n in (query_lengths, key_lengths))
        max_seqlens, unused = (max(self.query_lengths), max(self.key_lengths)), cu_seqlens_q[:0]
        self.varlen_segments = VarlenSegments(cu_seqlens_q, cu_seqlens_k, *max_seqlens, unused, unused, unused)

    def _slots(self, table: Tensor, counts: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return blocks, offsets and positions of the last `counts` keys of each segment; `total` is their sum.

        This is computed on the device because the host is the bottleneck.
        """
        segment = torch.repeat_interleave(counts, output_size=total)
        _, key_lengths, prompt_lengths, num_prompt_blocks = table[:, :4].t()
        position = torch.arange(total, device=table.device) - (counts.cumsum(0) - key_lengths)[segment]
        response_position = position - prompt_lengths[segment]
        in_response, size = response_position >= 0, self.cache.block_size
        column = torch.where(in_response, num_prompt_blocks[segment] + response_position // size, position // size)
        return table[segment, 4 + column], torch.where(in_response, response_position, position) % size, position

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values = self.cache.layer_blocks(layer, k, v)
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [token head head_dim]
        block, offset = self.slot_mapping
        keys[block, :, offset], values[block, :, offset] = k, v
        if self.uses_cached_tokens:
            block, offset = self.key_slots
            k, v = keys[block, :, offset], values[block, :, offset]
        return self.attention(q, k, v, scale).unsqueeze(0)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return the attention of the tokens over the keys of their segments, `[token head head_dim]`."""
        if self.has_fused_kernel(q):
            return self.fused_kernel.forward(q, k, v, self.varlen_segments, scale)[0]
        outputs, q_start, k_start = [], 0, 0
        lengths = zip(self.query_lengths, self.key_lengths, strict=True)
        for (query_length, key_length), equal in groupby(lengths):  # neighbors of equal lengths in one call
            num_segments = len(list(equal))
            q_end, k_end = q_start + num_segments * query_length, k_start + num_segments * key_length
            outputs.append(_causal_attention(q[q_start:q_end], k[k_start:k_end], v[k_start:k_end], num_segments, scale))
            q_start, k_start = q_end, k_end
        return torch.cat(outputs)

    def has_fused_kernel(self, q: Tensor) -> bool:
        """Return whether one kernel computes the attention of all segments."""
        if self.fused_kernel is None:
            self.fused_kernel = varlen_kernel(q) or False
        return bool(self.fused_kernel)


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
        ids = to_device_async(torch.tensor([token for segment in tokens[first:last] for token in segment]), lm.device)
        last_tokens = layout.varlen_segments.cu_seqlens_q[1:].long() - 1
        hidden.append(lm.hidden(ids[None], layout.positions[None], layout)[0][last_tokens])
        first = last
    return torch.cat(hidden)


def _causal_attention(q: Tensor, k: Tensor, v: Tensor, num_segments: int, scale: float) -> Tensor:
    """Return the causal attention inside segments of equal lengths, `[token head head_dim]`.

    The last query attends to every key, the one before to all but the last, and so on.
    """
    q, k, v = (x.unflatten(0, (num_segments, len(x) // num_segments)).transpose(1, 2) for x in (q, k, v))
    queries, keys = q.shape[2], k.shape[2]
    mask = None
    if queries != keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


@dataclass
class BlockReaders:
    """Blocks of a prompt or of a sequence, and the rows of the batch that read them."""

    block_table: GenericSequence[int]
    rows: list[int]


class BlockGroup:
    """Blocks that attention reads in one call."""

    def __init__(
        self, tables: GenericSequence[BlockReaders], levels: range, num_rows: int, block_size: int, device: torch.device
    ):
        """Level j is the j-th block of each prompt or sequence."""
        blocks = [table.block_table[j] for j in levels for table in tables if j < len(table.block_table)]
        first, count, step = _block_range(blocks)
        if len(blocks) >= MIN_BLOCK_DENSITY * count:
            index_of = {block: (block - first) // step for block in blocks}
            self.blocks: slice | Tensor = slice(first, first + count * step, step)
            """A slice is read as a view; a tensor of indices is copied."""
        else:
            index_of, count = {block: i for i, block in enumerate(blocks)}, len(blocks)
            self.blocks = to_device_async(torch.tensor(blocks), device)
        self.max_readers = width = max(len(table.rows) for table in tables)
        """Maximum number of rows that read a block."""
        reader_rows, start = [0] * (count * width), [-1] * count
        results = [[-1] * num_rows for _ in levels]
        for result, j in zip(results, levels, strict=True):
            for table in (table for table in tables if j < len(table.block_table)):
                index = index_of[table.block_table[j]]
                start[index] = j * block_size
                reader_rows[index * width : index * width + len(table.rows)] = table.rows
                for i, row in enumerate(table.rows):
                    result[row] = index * width + i
        all_rows, flat_results = list(range(num_rows)), [index for result in results for index in result]
        self.start = to_device_async(torch.tensor(start), device)
        """Number of tokens before each block; −1: the block is not needed but inside the range."""
        readers = to_device_async(torch.tensor(reader_rows), device)
        self.first_reader = readers[::width]
        self.reader_rows = None if reader_rows == all_rows else readers
        """`[block·reader]` rows; None: all rows in order."""
        in_order = flat_results == all_rows and len(reader_rows) == num_rows
        self.results = None if in_order else to_device_async(torch.tensor(flat_results).clamp(min=0), device)
        """`[level·row]` indices into `[block·reader]`; None: in order."""
        missing = (torch.tensor(results) < 0)[..., None, None]
        self.missing = to_device_async(missing, device) if -1 in flat_results else None
        """`[level row 1 1]`: rows that have no block at a level; None: all have one."""
        self.views: dict[int, TensorPair] = {}
        """Views of keys and values by layer."""

    def set_lengths(self, lengths: Tensor, block_size: int) -> None:
        """Mask the unused ends of the blocks, for rows with these numbers of tokens."""
        used = torch.where(self.start < 0, 1, lengths[self.first_reader] - self.start).clamp(max=block_size)
        self.bias, self.max_used = _padding_bias(used)

    def attend(self, layer: int, q: Tensor, cache: TensorPair, scale: float) -> TensorPair:
        """Return partial attention `[level row kv_head repeat head_dim]` and its log-sum-exps.

        The queries are `[row kv_head repeat head_dim]`. For a row without a block the result is exactly 0 and −∞,
        whatever the memory contains.
        """
        rows, kv_heads, repeat, head_dim = q.shape
        k, v = (x.narrow(2, 0, self.max_used) for x in self._keys_and_values(layer, cache))
        q = q if self.reader_rows is None else q.index_select(0, self.reader_rows)
        if self.max_readers > 1:
            q = q.reshape(-1, self.max_readers, kv_heads, repeat, head_dim).transpose(1, 2).flatten(2, 3)
        out, lse = _attention_with_lse(q, k, v, self.bias, scale)
        if self.max_readers > 1:
            out, lse = (x.unflatten(2, (self.max_readers, repeat)).transpose(1, 2).flatten(0, 1) for x in (out, lse))
        if self.results is not None:
            out, lse = out.index_select(0, self.results), lse.index_select(0, self.results)
        out, lse = (x.unflatten(0, (-1, rows)) for x in (out, lse))
        if self.missing is not None:
            out, lse = out.masked_fill(self.missing.unsqueeze(-1), 0.0), lse.masked_fill(self.missing, -math.inf)
        return out, lse

    def _keys_and_values(self, layer: int, cache: TensorPair) -> TensorPair:
        if not isinstance(self.blocks, slice):
            return cache[0][self.blocks], cache[1][self.blocks]
        if layer not in self.views:
            self.views[layer] = cache[0][self.blocks], cache[1][self.blocks]
        return self.views[layer]


def _block_range(blocks: GenericSequence[int]) -> tuple[int, int, int]:
    """Return the start, length and step of the smallest range that contains all blocks."""
    first = min(blocks)
    step = math.gcd(*(block - first for block in blocks)) or 1
    return first, (max(blocks) - first) // step + 1, step


def _group_blocks(
    tables: GenericSequence[BlockReaders], num_rows: int, block_size: int, device: torch.device
) -> list[BlockGroup]:
    """Return one group per level, on a CPU with many rows if it reads no more blocks; else one group for all levels.

    On a GPU the host would have to launch every group.
    """
    tables = [table for table in tables if table.block_table]
    if not tables:
        return []
    levels = range(max(len(table.block_table) for table in tables))
    by_level = [[table.block_table[j] for table in tables if j < len(table.block_table)] for j in levels]
    blocks_read = sum(_block_range(blocks)[1] for blocks in by_level)
    fewer_blocks = blocks_read <= _block_range([block for blocks in by_level for block in blocks])[1]
    per_level = device.type == "cpu" and len(tables) >= MIN_READERS_PER_LEVEL and fewer_blocks
    parts = [range(j, j + 1) for j in levels] if per_level else [levels]
    return [BlockGroup(tables, part, num_rows, block_size, device) for part in parts]


class DecodeLayout:
    """The layout of a decode step: one token per running sequence attends to its prompt and its own tokens.

    Attention is computed per block for all its readers, and the partial results of a sequence are merged by their
    log-sum-exps. So nothing is padded to the longest sequence.
    """

    def __init__(self, cache: PagedKVCache, device: torch.device):
        self.cache, self.device = cache, device

    def set_sequences(self, seqs: GenericSequence[Sequence], scheduler: Scheduler) -> None:
        """Set the sequences of the batch. Call it again when sequences enter, leave or get blocks."""
        readers: dict[int, list[int]] = {}
        for row, seq in enumerate(seqs):
            readers.setdefault(seq.prompt_id, []).append(row)
        prompt_tables = [BlockReaders(scheduler.prompt_blocks[prompt_id], rows) for prompt_id, rows in readers.items()]
        seq_tables = [BlockReaders(seq.block_table, [row]) for row, seq in enumerate(seqs)]
        sizes = (len(seqs), self.cache.block_size, self.device)
        prompt_groups, self.seq_groups = _group_blocks(prompt_tables, *sizes), _group_blocks(seq_tables, *sizes)
        self.groups = [*self.seq_groups, *prompt_groups]
        self.prompt_lengths = self._to_device([scheduler.prompt_lengths[seq.prompt_id] for seq in seqs])
        for group in prompt_groups:
            group.set_lengths(self.prompt_lengths, self.cache.block_size)
        last_blocks = [seq.block_table[-1] for seq in seqs]
        self.last_blocks = self._to_device(last_blocks)
        self.has_consecutive_blocks = last_blocks == list(range(last_blocks[0], last_blocks[0] + len(seqs)))
        """Whether the last blocks of the sequences are a range, which is indexed faster."""

    def _to_device(self, numbers: list[int]) -> Tensor:
        return to_device_async(torch.tensor(numbers, dtype=torch.long), self.device)

    def begin_step(self, seqs: GenericSequence[Sequence]) -> Tensor:
        """Prepare a step. Return the positions of the new tokens, which `Sequence.num_tokens` does not count yet."""
        lengths, size = self._to_device([seq.num_tokens for seq in seqs]), self.cache.block_size
        for group in self.seq_groups:
            group.set_lengths(lengths + 1, size)
        first, offset = seqs[0].block_table[-1], seqs[0].num_tokens % size
        self.slot_mapping: tuple[Any, ...] = (self.last_blocks, slice(None), lengths % size)
        """Index of the keys and values of the new tokens in the cache."""
        if self.has_consecutive_blocks and all(seq.num_tokens % size == offset for seq in seqs):
            self.slot_mapping = (slice(first, first + len(seqs)), slice(None), offset)
        return self.prompt_lengths + lengths

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        rows, heads, _, head_dim = q.shape
        kv_heads = k.shape[1]
        keys, values = cache = self.cache.layer_blocks(layer, k, v)
        keys[self.slot_mapping], values[self.slot_mapping] = k[:, :, 0], v[:, :, 0]
        q = q.reshape(rows, kv_heads, heads // kv_heads, head_dim)
        partials = [group.attend(layer, q, cache, scale) for group in self.groups]
        return _merge_partials(partials).to(q.dtype).reshape(rows, 1, heads, head_dim)


def _merge_partials(partials: list[TensorPair]) -> Tensor:
    """Merge partial attention by log-sum-exps. Every row has the first part, which is from the sequence itself."""
    if sum(len(out) for out, _ in partials) > MAX_SEQUENTIAL_MERGES:
        out, lse = (torch.cat(parts) for parts in zip(*partials, strict=True))
        return out.to(lse.dtype).mul_(torch.softmax(lse, 0).unsqueeze(-1)).sum(0)
    (merged, merged_lse), *others = [(out[j], lse[j]) for out, lse in partials for j in range(len(out))]
    merged = merged.to(merged_lse.dtype)
    for j, (out, lse) in enumerate(others, 1):
        merged = merged.lerp_(out.to(lse.dtype), torch.sigmoid(lse - merged_lse).unsqueeze(-1))
        merged_lse = torch.logaddexp(merged_lse, lse) if j < len(others) else merged_lse
    return merged


def _padding_bias(used: Tensor) -> tuple[Tensor | None, int]:
    """Return an attention bias `[block 1 1 key]` and its width, the largest number of used keys of a block.

    The bias is 0 for the first `used` keys of each block and −∞ for the others; None if all blocks have equally many.
    """
    width = int(used.max())
    if bool((used == width).all()):
        return None, width
    padding = torch.arange(width, device=used.device) >= used[:, None]
    return torch.zeros_like(padding, dtype=torch.float32).masked_fill(padding, float("-inf"))[:, None, None], width


def _attention_with_lse(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> TensorPair:
    """Return softmax(scale·q·kᵀ + bias)·v, and the log-sum-exp of its scores in float32 or better."""
    if q.device.type == "cpu" and q.dtype == torch.float32:
        bias = None if bias is None else bias.expand(*q.shape[:3], k.shape[2])
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if bias is not None:
        scores = scores + bias
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse.unsqueeze(-1)).to(v.dtype) @ v, lse

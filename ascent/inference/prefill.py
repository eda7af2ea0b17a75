"""Prefill with CUDA graphs, for prompts, observations and preempted sequences.

A prefill is a few kernels per layer, and the host takes longer to launch them than the GPU to compute them. So a
prefill is padded to one of a few sizes and captured at the second use of its size. Padding is written to a spare block.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.inference.attention_layouts import PrefillLayout
from ascent.models.decoder_model import DecoderModel, Layer, norm_heads
from ascent.models.packed_attention import VarlenSegments
from ascent.ops.cuda_graphs import GraphBackend, next_power_of_2, round_up_to_bucket
from ascent.ops.paged_kv_cache import PagedKVCache, TensorPair

MAX_PREFILL_GRAPHS = 24
"""Maximum number of captured sizes; other sizes are launched kernel by kernel."""
MAX_GRAPH_WORK = 5e12
"""Tokens times parameters from which a prefill takes the GPU longer than its launches take the host."""


class PrefillGraphSize(NamedTuple):
    """Capacity of a captured prefill. Unused tokens form one more segment of padding."""

    tokens: int
    keys: int
    segments: int
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, layout: PrefillLayout) -> PrefillGraphSize:
        tokens = round_up_to_bucket(len(layout.page) + 1)
        keys = round_up_to_bucket(len(layout.seen[0]) + tokens - len(layout.page))
        longest = next_power_of_2(layout.spans.max_seqlen_q), next_power_of_2(layout.spans.max_seqlen_k)
        return cls(tokens, keys, next_power_of_2(len(layout.spans.cu_seqlens_q)), *longest)


@dataclass
class StaticPrefillLayout:
    """What `Prefill` asks a layout for, in a captured pass: tensors that stay where they are."""

    cache: PagedKVCache
    page: Tensor
    offset: Tensor
    seen: TensorPair
    spans: VarlenSegments
    fused: Any

    def mix(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self.fused.forward(q, k, v, self.spans, scale)[0]


@dataclass
class PrefillGraphs:
    """Captured prefills by size, and how often each size was used."""

    graphs: GraphBackend
    most: int
    """Maximum number of tokens of a captured prefill."""
    by_size: dict[PrefillGraphSize, PrefillGraph] = field(default_factory=dict)
    used: Counter[PrefillGraphSize] = field(default_factory=Counter)


@dataclass(frozen=True)
class PrefillModel:
    """The model for prefills of packed segments, in place of the model of transformers (`HiddenStateModel`)."""

    net: DecoderModel
    ops: ModuleType
    tables: list[TensorPair]
    passes: PrefillGraphs

    @property
    def device(self) -> torch.device:
        return self.net.embedding.device

    def hidden(self, ids: Tensor, positions: Tensor, layout: PrefillLayout) -> Tensor:
        """Hidden states `[1 token hidden]`. The layout writes keys and values to their pages, and attends to those."""
        size, there = PrefillGraphSize.of(layout), self.passes.by_size
        if size not in there and self._captures(size, layout):
            there[size] = PrefillGraph(self, size, ids[0], layout)
        if size in there:
            return there[size](ids[0], layout)
        return self.through(ids[0], positions[0], layout).unsqueeze(0)

    def _captures(self, size: PrefillGraphSize, layout: PrefillLayout) -> bool:
        """Return whether to capture this size now: at its second use."""
        passes = self.passes
        passes.used[size] += 1
        if size.tokens > passes.most or passes.used[size] < 2 or len(passes.by_size) >= MAX_PREFILL_GRAPHS:
            return False
        return layout.fuses(self.net.embedding.new_empty(0, 1, self.net.head_dim)) and layout.fused.supports_cuda_graphs

    def through(self, ids: Tensor, positions: Tensor, layout: PrefillLayout | StaticPrefillLayout) -> Tensor:
        net, ops = self.net, self.ops
        turns = {id(pair): [table[positions] for table in pair] for pair in self.tables}

        def attend(i: int, layer: Layer, qkv: Tensor) -> Tensor:
            pages = layout.cache.layers[i]
            if layer.qk_norms is not None and not layer.norms_across_heads(net.head_dim):
                qkv = norm_heads(qkv, layer.qk_norms, net.num_kv_heads)
            q = ops.rotate_and_write_kv(qkv, *turns[id(self.tables[i])], layout.page, layout.offset, pages)
            k, v = ops.gather_kv(pages, *layout.seen)
            return layout.mix(q, k, v, layer.scale).flatten(1)

        return net.forward(ops, ids, attend)


class PrefillGraph:
    """A captured prefill of up to `size.tokens` tokens."""

    def __init__(self, prefill: PrefillModel, size: PrefillGraphSize, ids: Tensor, layout: PrefillLayout):
        self.size, self.nobodys = size, layout.cache.num_blocks - 1
        self.parts = self._padded(ids, layout)
        self.out = ids  # until the first pass
        ids, positions, page, offset, seen_page, seen_offset, queries, keys = self.parts
        nothing = queries[:0]
        spans = VarlenSegments(queries, keys, size.longest_query, size.longest_key, nothing, nothing, nothing)
        placed = StaticPrefillLayout(layout.cache, page, offset, (seen_page, seen_offset), spans, layout.fused)

        def work() -> None:
            self.out = prefill.through(ids, positions, placed)

        prefill.passes.graphs.warm_up(work)
        self.replay = prefill.passes.graphs.capture(work)

    def _padded(self, ids: Tensor, layout: PrefillLayout) -> list[Tensor]:
        size, tokens, keys = self.size, len(ids), len(layout.seen[0])
        given = ((ids, 0), (layout.positions, 0), (layout.page, self.nobodys), (layout.offset, 0))
        seen = ((layout.seen[0], self.nobodys), (layout.seen[1], 0))
        ends = ((layout.spans.cu_seqlens_q, size.tokens), (layout.spans.cu_seqlens_k, keys + size.tokens - tokens))
        return [
            F.pad(part, (0, room - len(part)), value=value)
            for parts, room in ((given, size.tokens), (seen, size.keys), (ends, size.segments + 1))
            for part, value in parts
        ]

    def __call__(self, ids: Tensor, layout: PrefillLayout) -> Tensor:
        """Return the hidden states, with padding. The next call overwrites them."""
        torch._foreach_copy_(self.parts, self._padded(ids, layout))
        self.replay()
        return self.out.unsqueeze(0)

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
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(cls, layout: PrefillLayout) -> PrefillGraphSize:
        segments, num_tokens = layout.varlen_segments, len(layout.positions)
        tokens = round_up_to_bucket(num_tokens + 1)
        keys = round_up_to_bucket(len(layout.key_slots[0]) + tokens - num_tokens)
        max_seqlens = next_power_of_2(segments.max_seqlen_q), next_power_of_2(segments.max_seqlen_k)
        return cls(tokens, keys, next_power_of_2(len(segments.cu_seqlens_q)), *max_seqlens)


@dataclass
class StaticPrefillLayout:
    """The part of `PrefillLayout` that `PrefillModel` reads, as tensors at fixed addresses for a CUDA graph."""

    cache: PagedKVCache
    slot_mapping: TensorPair
    key_slots: TensorPair
    varlen_segments: VarlenSegments
    fused_kernel: Any

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self.fused_kernel.forward(q, k, v, self.varlen_segments, scale)[0]


@dataclass
class PrefillGraphs:
    """Captured prefills by size, and how often each size was used."""

    graphs: GraphBackend
    max_tokens: int
    """Maximum number of tokens of a captured prefill."""
    by_size: dict[PrefillGraphSize, PrefillGraph] = field(default_factory=dict)
    num_uses: Counter[PrefillGraphSize] = field(default_factory=Counter)


@dataclass(frozen=True)
class PrefillModel:
    """A `HiddenStateModel` for prefills: fused kernels, and CUDA graphs for recurring sizes."""

    model: DecoderModel
    ops: ModuleType
    rotary_tables: list[TensorPair]
    prefill_graphs: PrefillGraphs

    @property
    def device(self) -> torch.device:
        return self.model.embedding.device

    def hidden(self, ids: Tensor, positions: Tensor, layout: PrefillLayout) -> Tensor:
        """Return the hidden states `[1 token hidden]`, after writing the keys and values to the cache."""
        size, captured = PrefillGraphSize.of(layout), self.prefill_graphs.by_size
        if size not in captured and self._should_capture(size, layout):
            captured[size] = PrefillGraph(self, size, ids[0], layout)
        if size in captured:
            return captured[size](ids[0], layout)
        return self.forward(ids[0], positions[0], layout).unsqueeze(0)

    def _should_capture(self, size: PrefillGraphSize, layout: PrefillLayout) -> bool:
        """Return whether to capture this size now: at its second use."""
        graphs = self.prefill_graphs
        graphs.num_uses[size] += 1
        is_first_use, is_full = graphs.num_uses[size] < 2, len(graphs.by_size) >= MAX_PREFILL_GRAPHS
        if size.tokens > graphs.max_tokens or is_first_use or is_full:
            return False
        q = self.model.embedding.new_empty(0, 1, self.model.head_dim)
        return layout.has_fused_kernel(q) and layout.fused_kernel.supports_cuda_graphs

    def forward(self, ids: Tensor, positions: Tensor, layout: PrefillLayout | StaticPrefillLayout) -> Tensor:
        """Return the hidden states of packed tokens, launched kernel by kernel."""
        model, ops = self.model, self.ops
        rotary = {id(pair): [table[positions] for table in pair] for pair in self.rotary_tables}

        def attend(i: int, layer: Layer, qkv: Tensor) -> Tensor:
            cache = layout.cache.layers[i]
            if layer.qk_norms is not None and not layer.norms_across_heads(model.head_dim):
                qkv = norm_heads(qkv, layer.qk_norms, model.num_kv_heads)
            q = ops.rotate_and_write_kv(qkv, *rotary[id(self.rotary_tables[i])], *layout.slot_mapping, cache)
            k, v = ops.gather_kv(cache, *layout.key_slots)
            return layout.attention(q, k, v, layer.scale).flatten(1)

        return model.forward(ops, ids, attend)


class PrefillGraph:
    """A captured prefill of up to `size.tokens` tokens."""

    def __init__(self, prefill: PrefillModel, size: PrefillGraphSize, ids: Tensor, layout: PrefillLayout):
        self.size, self.padding_block = size, layout.cache.num_blocks - 1
        self.inputs = self._pad(ids, layout)
        ids, positions, block, offset, key_block, key_offset, cu_seqlens_q, cu_seqlens_k = self.inputs
        self.hidden = ids
        """Output of the graph, set when it is captured."""
        unused, max_seqlens = cu_seqlens_q[:0], (size.max_seqlen_q, size.max_seqlen_k)
        segments = VarlenSegments(cu_seqlens_q, cu_seqlens_k, *max_seqlens, unused, unused, unused)
        slots = (block, offset), (key_block, key_offset)
        static = StaticPrefillLayout(layout.cache, *slots, segments, layout.fused_kernel)

        def forward() -> None:
            self.hidden = prefill.forward(ids, positions, static)

        prefill.prefill_graphs.graphs.warm_up(forward)
        self.replay = prefill.prefill_graphs.graphs.capture(forward)

    def _pad(self, ids: Tensor, layout: PrefillLayout) -> list[Tensor]:
        """Return the inputs of the graph: by token, by key and by segment, each padded to its capacity."""
        size, segments = self.size, layout.varlen_segments
        (block, offset), (key_block, key_offset) = layout.slot_mapping, layout.key_slots
        num_keys = len(key_block) + size.tokens - len(ids)
        by_token = ((ids, 0), (layout.positions, 0), (block, self.padding_block), (offset, 0))
        by_key = ((key_block, self.padding_block), (key_offset, 0))
        by_segment = ((segments.cu_seqlens_q, size.tokens), (segments.cu_seqlens_k, num_keys))
        return [
            F.pad(tensor, (0, capacity - len(tensor)), value=value)
            for tensors, capacity in ((by_token, size.tokens), (by_key, size.keys), (by_segment, size.segments + 1))
            for tensor, value in tensors
        ]

    def __call__(self, ids: Tensor, layout: PrefillLayout) -> Tensor:
        """Return the hidden states, with padding. The next call overwrites them."""
        torch._foreach_copy_(self.inputs, self._pad(ids, layout))
        self.replay()
        return self.hidden.unsqueeze(0)

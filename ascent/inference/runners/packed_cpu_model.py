"""Llama-like models for decoding on a CPU: copies of the weights, packed for matmuls with few rows.

Matrices with the same input are merged into one. A copy has one of three forms:

    panels       `cpu_kernels.PackedWeight`, for the C kernels: float32 on x86, and small matrices on Arm
    oneDNN       packed by oneDNN: large float32 matrices on Arm, or without the C kernels
    transposed   `[in out]`, for all others

On Arm a matmul of 8 to 24 rows with a packed matrix takes a quarter less time than x·Wᵀ, and one of fewer rows less
than half. A copy is refreshed when its matrix has changed; with LoRA only the adapters change. The learner never uses
the copies.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.inference.attention_layouts import DecodeLayout
from ascent.inference.scheduler import Scheduler
from ascent.inference.sequence import Sequence
from ascent.models.causal_lm import LanguageModel
from ascent.models.decoder_model import MAX_HIDDEN_ERROR, DecoderModel, Layer, UnsupportedArchitectureError, norm_heads
from ascent.models.lm_head import LMHead
from ascent.models.lora import AdapterCopies, randomized_adapters, register_adapter_copies, unwrap_lora
from ascent.models.packed_attention import PackedGroup, PackedLayout, packed_attention_enabled
from ascent.models.quantization import is_quantized
from ascent.ops import cpu_kernels, decode_ops
from ascent.ops.paged_kv_cache import PagedKVCache, TensorPair

ONEDNN_PACKED_ROWS = 64
"""Number of rows that oneDNN packs a matrix for; any other number works too."""
MIN_UNPACKED_ROWS = 256
"""Number of rows from which MKL is faster with the original weights than the C kernel with panels."""
MIN_ONEDNN_ELEMENTS = {"aarch64": 2**18, "x86_64": 2**19, "AMD64": 2**19}
"""By machine, the size of a matrix from which oneDNN packs it. Packing makes smaller ones slower."""
ONEDNN_MACHINES = ("aarch64",)
"""Machines that prefer oneDNN for large matrices: there it reaches 95 % of the peak (measured on a Neoverse N1)."""


def uses_onednn(weights: GenericSequence[Tensor]) -> bool:
    """Return whether oneDNN packs these merged matrices here. Its packed form suits any number of rows."""
    size, is_float32 = sum(w.numel() for w in weights), all(w.dtype == torch.float32 for w in weights)
    is_large = is_float32 and size >= MIN_ONEDNN_ELEMENTS.get(platform.machine(), math.inf)
    return is_large and hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()


class InPlaceOps:
    """Operators of a decode step (see decode_ops.py) in place: with few rows, launching them dominates."""

    @staticmethod
    def add_rms_norm(
        x: Tensor, y: Tensor | None, weight: Tensor, eps: float, weight_offset: float | None = None
    ) -> TensorPair:
        """Add y to x in place and return x with its norm. Half precision and offset norms: as decode_ops.py."""
        tensors = [x, weight] if y is None else [x, y, weight]
        if cpu_kernels.is_supported(*tensors) and all(tensor.is_contiguous() for tensor in tensors):
            return cpu_kernels.add_rms_norm(x, y, weight, eps, weight_offset or 0.0)
        if weight_offset is not None or x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float64):
            return decode_ops.add_rms_norm(x, y, weight, eps, weight_offset)
        x = x if y is None else x.add_(y)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x, torch.mul(x, (norm * norm).div_(x.shape[-1]).add_(eps).rsqrt_()).mul_(weight)

    @staticmethod
    def gated_activation(gate_up: Tensor, gelu: bool = False) -> Tensor:
        """Return act(gate)·up."""
        gate, up = gate_up.chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)).mul_(up)


@dataclass
class PackedMatmul:
    """x·Wᵀ + bias for merged matrices W, from a packed copy of them; plus x·Aᵀ·Bᵀ of their LoRA adapters (lora.py)."""

    weights: list[Tensor]
    biases: list[Tensor]
    a: Tensor | None = None
    b: Tensor | None = None
    gates: bool = False
    """Whether the weights are the gate and up projections."""
    copy: Tensor | cpu_kernels.PackedWeight = None  # type: ignore[assignment]
    """Panels, packed by oneDNN, or `[in out]`; set by `refresh`."""
    bias: Tensor | None = None
    state: tuple[Any, ...] = ()
    """Versions and addresses of the matrices when they were copied."""

    def refresh(self, version: int) -> None:
        """Copy the weights if they have changed. `version`: version of the trained parameters."""
        tensors = [*self.weights, *self.biases]
        state = tuple((version if w.requires_grad else -1, w._version, w.data_ptr()) for w in tensors)
        if state == self.state:
            return
        self.state, weights = (), [w.detach() for w in self.weights]
        if isinstance(self.copy, cpu_kernels.PackedWeight):
            self.copy.pack(weights)
        elif cpu_kernels.is_supported(*weights) and not (
            platform.machine() in ONEDNN_MACHINES and uses_onednn(weights)
        ):
            self.copy = cpu_kernels.PackedWeight(weights, self.gates and self.a is None)
        else:
            self.copy = None  # type: ignore[assignment]  # frees its memory before the new one is allocated
            self.copy = _pack_or_transpose(weights)
        self.bias = torch.cat(self.biases) if self.biases else None
        self.state = state

    def __call__(self, x: Tensor, ops: Any, split_k: bool = False) -> Tensor:
        if isinstance(self.copy, cpu_kernels.PackedWeight):
            is_slower = self.copy.gated or len(x) >= MIN_UNPACKED_ROWS
            y = self._multiply_unpacked(x) if is_slower else self.copy(x, self.bias)
        elif self.copy.is_mkldnn and len(x) == 1:
            y = self._multiply_unpacked(x)
        elif self.copy.is_mkldnn:
            y = torch.ops.mkldnn._linear_pointwise(x, self.copy, self.bias, "none", [], "")
        else:
            y = F.linear(x.to(self.copy.dtype), self.copy.t(), self.bias)
        return y if self.a is None or self.b is None else y.addmm_(x.to(y.dtype) @ self.a.t(), self.b.t())

    def _multiply_unpacked(self, x: Tensor) -> Tensor:
        """Multiply with the original weights, which is faster for one row and for many rows."""
        y = torch.cat([F.linear(x, weight) for weight in self.weights], 1)
        return y if self.bias is None else y.add_(self.bias)

    def gated(self, x: Tensor, ops: Any, gelu: bool) -> Tensor:
        if isinstance(self.copy, cpu_kernels.PackedWeight) and self.copy.gated and len(x) < MIN_UNPACKED_ROWS:
            return self.copy(x, self.bias, gelu)
        return ops.gated_activation(self(x, ops), gelu=gelu)


def _pack_or_transpose(weights: list[Tensor]) -> Tensor:
    merged = weights[0] if len(weights) == 1 else torch.cat(weights)
    if uses_onednn(weights):
        return torch.ops.mkldnn._reorder_linear_weight(merged, ONEDNN_PACKED_ROWS)
    return merged.t().contiguous()


@dataclass(frozen=True)
class PackedHead(LMHead):
    """An LM head whose matmul uses packed weights."""

    matmul: PackedMatmul = None  # type: ignore[assignment]

    def multiply(self, hidden: Tensor) -> Tensor:
        return self.matmul(hidden, InPlaceOps)


class PackedCpuModel:
    """A `HiddenStateModel` with packed weights, for decoding on a CPU."""

    def __init__(self, lm: LanguageModel):
        """Raise UnsupportedArchitectureError for an unsupported model."""
        self.lm = lm
        self._build()

    @torch.no_grad()
    def _build(self) -> None:
        if unwrap_lora(self.lm.model.get_input_embeddings())[1] is not None:
            raise UnsupportedArchitectureError("its embedding has an adapter")
        self.matmuls: list[PackedMatmul] = []
        self.model = DecoderModel.of(self.lm.model, self._merge_linears)
        for layer in self.model.layers:
            layer.gate_up.gates = True  # type: ignore[attr-defined]
        head = self.model.head
        matmul = self._add_matmul([head.weight], [] if head.bias is None else [head.bias])
        self.head = PackedHead(head.weight, head.bias, head.scale, head.cap, matmul)
        self.parameters = list(self.lm.model.parameters())
        self.addresses = self._current_addresses()
        """Addresses of the parameters, and of the RoPE frequencies with their versions, that `model` was built from."""
        self.rotary_tables: dict[str | None, TensorPair] = {}
        """By RoPE type, cosines and signed sines (`_signed_rotary`) of the first positions."""

    def _current_addresses(self) -> list[Any]:
        frequencies = [(buffer.data_ptr(), buffer._version) for buffer in self.model.rotary.buffers()]
        return [*[p.data_ptr() for p in self.parameters], *frequencies]

    def _add_matmul(self, *args: Any) -> PackedMatmul:
        self.matmuls.append(PackedMatmul(*args))
        return self.matmuls[-1]

    def _merge_linears(self, modules: GenericSequence[Any], copies: AdapterCopies) -> PackedMatmul:
        linears, adapters = zip(*map(unwrap_lora, modules), strict=True)
        if any(map(is_quantized, linears)):
            raise UnsupportedArchitectureError("its matrices are in 4 bits")
        weights, biases = [m.weight for m in linears], [m.bias for m in linears if m.bias is not None]
        rank, out = sum(len(adapter.a) for adapter in adapters if adapter is not None), [len(w) for w in weights]
        if not rank:
            return self._add_matmul(weights, biases)
        a, b = (weights[0].new_zeros(shape) for shape in ((rank, weights[0].shape[1]), (sum(out), rank)))
        register_adapter_copies(copies, adapters, out, a, b)
        return self._add_matmul(weights, biases, a, b)

    def decode_layout(self, num_blocks: int, block_size: int) -> RowwiseDecodeLayout | DecodeLayout:
        """Return the layout of decode steps with a new KV cache of this size."""
        has_kernel = cpu_kernels.is_supported(self.model.embedding) and cpu_kernels.supports_attention(
            self.model.head_dim, block_size
        )
        cache = PagedKVCache(num_blocks, block_size, uninitialized=has_kernel)
        return RowwiseDecodeLayout(cache) if has_kernel else DecodeLayout(cache, self.device)

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @torch.no_grad()
    def refresh(self, version: int) -> LMHead:
        """Copy changed weights and return the LM head. `version`: version of the trained parameters."""
        if self.addresses != self._current_addresses():
            self._build()
        self.model.copies.refresh()
        for matmul in self.matmuls:
            matmul.refresh(version)
        return self.head

    def _rotary(self, positions: Tensor) -> dict[str | None, TensorPair]:
        """Return cosines and signed sines at these positions by RoPE type. The tables grow with the positions."""
        length = int(positions.max()) + 1
        cached = max((len(cos) for cos, _ in self.rotary_tables.values()), default=0)
        if length > cached:
            tables = self.model.rotary_cache(max(length, 2 * cached))
            by_type = dict(zip(self.model.layer_types, tables, strict=True))
            self.rotary_tables = {rope_type: _signed_rotary(*table) for rope_type, table in by_type.items()}
        return {rope_type: (cos[positions], sin[positions]) for rope_type, (cos, sin) in self.rotary_tables.items()}

    @torch.no_grad()
    def hidden(self, ids: Tensor, positions: Tensor, layout: Any) -> Tensor:
        """Return the last hidden states `[row position hidden]` of these tokens; `layout` computes attention."""
        model, head_dim, kv_heads = self.model, self.model.head_dim, self.model.num_kv_heads
        rotary = self._rotary(positions.flatten())

        def attend(i: int, layer: Layer, qkv: Tensor) -> Tensor:
            if layer.qk_norms is not None and not layer.norms_across_heads(head_dim):
                qkv = norm_heads(qkv, layer.qk_norms, kv_heads)
            cos_sin = rotary[model.layer_types[i]]
            if isinstance(layout, RowwiseDecodeLayout):
                return layout.attention(i, qkv, cos_sin, kv_heads, layer.scale)
            heads = qkv.view(*ids.shape, -1, head_dim)
            qk, v = _apply_rotary(heads[:, :, :-kv_heads], *cos_sin), heads[:, :, -kv_heads:]
            q, k = qk[:, :, :-kv_heads], qk[:, :, -kv_heads:]
            out = layout.attend(i, *(x.transpose(1, 2) for x in (q, k, v)), layer.scale)
            return out.reshape(len(qkv), -1)

        return model.forward(InPlaceOps, ids.flatten(), attend).view(*ids.shape, -1)


class RowwiseDecodeLayout:
    """The layout of a decode step, like `DecodeLayout`, whose attention is one call of a C kernel."""

    def __init__(self, cache: PagedKVCache):
        self.cache = cache

    def set_sequences(self, seqs: GenericSequence[Sequence], scheduler: Scheduler) -> None:
        """Set the sequences of the batch. Call it again when sequences enter, leave or get blocks."""
        block_tables = [[*scheduler.prompt_blocks[seq.prompt_id], *seq.block_table] for seq in seqs]
        width = max(map(len, block_tables))
        self.block_tables = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in block_tables])
        self.num_prompt_blocks = torch.tensor([len(scheduler.prompt_blocks[seq.prompt_id]) for seq in seqs])
        self.prompt_lengths = torch.tensor([scheduler.prompt_lengths[seq.prompt_id] for seq in seqs])

    def begin_step(self, seqs: GenericSequence[Sequence]) -> Tensor:
        """Return the positions of the new tokens, which `Sequence.num_tokens` does not count yet."""
        self.lengths = torch.tensor([seq.num_tokens for seq in seqs])
        return self.prompt_lengths + self.lengths

    def attention(self, layer: int, qkv: Tensor, rotary: TensorPair, kv_heads: int, scale: float) -> Tensor:
        """Apply RoPE, write the new keys and values to the cache, and return the attention `[row head·head_dim]`."""
        head_dim = rotary[0].shape[-1]
        like = qkv[:1, : kv_heads * head_dim].view(1, kv_heads, 1, head_dim)
        lengths = (self.num_prompt_blocks, self.prompt_lengths, self.lengths)
        cache = self.cache.layer_blocks(layer, like, like)
        return cpu_kernels.paged_attention(qkv, rotary, scale, cache, self.block_tables, lengths)


def _signed_rotary(cos: Tensor, sin: Tensor) -> TensorPair:
    """Return `[token 1 head_dim]` factors for `_apply_rotary`: cosines, and sines with the first half negated."""
    first, second = sin.chunk(2, -1)
    return cos.unsqueeze(1), torch.cat([-first, second], -1).unsqueeze(1)


def _apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to `[row position head head_dim]`: halves (a, b) become (a·cos − b·sin, b·cos + a·sin)."""
    tokens, half = x.flatten(0, 1), x.shape[-1] // 2
    if x.dtype != cos.dtype or x.dtype in (torch.float16, torch.bfloat16):  # rounds each product, as the model does
        return (tokens * cos).add_(tokens.roll(half, -1) * sin).to(x.dtype).view(x.shape)
    rotated = tokens * cos
    rotated[..., :half].addcmul_(tokens[..., half:], sin[..., :half])
    rotated[..., half:].addcmul_(tokens[..., :half], sin[..., half:])
    return rotated.view(x.shape)


def build_packed_cpu_model(lm: LanguageModel) -> PackedCpuModel | None:
    """Return the packed model, or None for an unsupported architecture."""
    try:
        packed = PackedCpuModel(lm)
        error = hidden_error(packed)
    except UnsupportedArchitectureError:
        return None
    return packed if error < MAX_HIDDEN_ERROR.get(lm.model.dtype, 1e-3) else None


@torch.no_grad()
def hidden_error(packed: PackedCpuModel) -> float:
    """Return the maximum relative error of the hidden states on a few random tokens, against the model itself."""
    lm = packed.lm
    ids = torch.randint(lm.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12).repeat(2)[None]
    layout = PackedLayout([PackedGroup(0, 12, ()), PackedGroup(12, 12, ())])
    with randomized_adapters(lm.model), packed_attention_enabled(lm.model):
        packed.refresh(-1)
        expected, hidden = (model.hidden(ids, positions, layout)[0].double() for model in (lm, packed))
    return float(((hidden - expected).norm(dim=-1) / expected.norm(dim=-1)).max())

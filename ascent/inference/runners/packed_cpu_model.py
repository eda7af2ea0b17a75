"""Models of the Llama family for decoding on a CPU: copies of the weights, packed for matmuls with few rows.

Matrices that read the same states are one product. Their copies are panels for kernels in C (kernels/cpu.py); on Arm,
and where there are no such kernels, large ones are packed by oneDNN, which then reads them in the order of its kernels.
On Arm a product of 8 to 24 rows takes a quarter less time so than with x·Wᵀ as the model has W, and one of fewer less
than half. Without kernels small matrices, and always other types than float32, have transposed copies. A copy is made
again when its matrix has changed, so with adapters beside frozen matrices only these are. The learner never sees them.
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

ROWS, MANY = 64, 256
"""Rows of a product that oneDNN packs a matrix for; others work too. And rows that MKL multiplies faster than C."""

LARGE = {"aarch64": 2**18, "x86_64": 2**19, "AMD64": 2**19}
"""By processor, numbers in a matrix from which on it is packed: a product with a small one takes longer so."""
ONEDNN_FIRST = ("aarch64",)
"""Processors on which oneDNN packs what is large, and panels take the rest: there its products run at 95 % of the
processor's speed (measured on a Neoverse N1), and nobody has timed panels."""


def packs(weights: GenericSequence[Tensor]) -> bool:
    """Are these matrices, as one, packed by oneDNN here? Its packed form is good for any number of rows."""
    count, float32 = sum(w.numel() for w in weights), all(w.dtype == torch.float32 for w in weights)
    large = float32 and count >= LARGE.get(platform.machine(), math.inf)
    return large and hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()


class InPlaceOps:
    """Parts of a step (see step.py) in place: with few rows a pass costs as much to start as to compute."""

    @staticmethod
    def add_rms_norm(
        x: Tensor, y: Tensor | None, weight: Tensor, eps: float, weight_offset: float | None = None
    ) -> TensorPair:
        """X ← x + y, in place, and its norm. Half precision and other forms of norms: as step.py has it."""
        given = [x, weight] if y is None else [x, y, weight]
        if cpu_kernels.is_supported(*given) and all(one.is_contiguous() for one in given):
            return cpu_kernels.add_rms_norm(x, y, weight, eps, weight_offset or 0.0)
        if weight_offset is not None or x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float64):
            return decode_ops.add_rms_norm(x, y, weight, eps, weight_offset)
        x = x if y is None else x.add_(y)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x, torch.mul(x, (size * size).div_(x.shape[-1]).add_(eps).rsqrt_()).mul_(weight)

    @staticmethod
    def gated_activation(both: Tensor, gelu: bool = False) -> Tensor:
        """act(gate)·up, the two side by side."""
        gate, up = both.chunk(2, -1)
        return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)).mul_(up)


@dataclass
class PackedMatmul:
    """x·Wᵀ + bias of matrices that read the same x, from a copy of them; then adapters as they are: h·Bᵀ with h = x·Aᵀ.

    See adapters.py.
    """

    weights: list[Tensor]
    biases: list[Tensor]
    a: Tensor | None = None
    b: Tensor | None = None
    gates: bool = False
    """Whether the weights are the gate and up projections."""
    copy: Tensor | cpu_kernels.PackedWeight = None  # type: ignore[assignment]
    """Panels, packed by oneDNN, or `[in out]`; there from the first `renew` on."""
    bias: Tensor | None = None
    state: tuple[Any, ...] = ()
    """Of the matrices, when they were copied."""

    def renew(self, version: int) -> None:
        """Copy the weights if they have changed. `version`: version of the trained parameters."""
        every = [*self.weights, *self.biases]
        now = tuple((version if w.requires_grad else -1, w._version, w.data_ptr()) for w in every)
        if now == self.state:
            return
        self.state, weights = (), [w.detach() for w in self.weights]
        if isinstance(self.copy, cpu_kernels.PackedWeight):
            self.copy.pack(weights)
        elif cpu_kernels.is_supported(*weights) and not (platform.machine() in ONEDNN_FIRST and packs(weights)):
            self.copy = cpu_kernels.PackedWeight(weights, self.gates and self.a is None)
        else:
            self.copy = None  # type: ignore[assignment]  # its memory is free for the new one
            self.copy = _copied(weights)
        self.bias = torch.cat(self.biases) if self.biases else None
        self.state = now

    def __call__(self, x: Tensor, ops: Any, split_k: bool = False) -> Tensor:
        if isinstance(self.copy, cpu_kernels.PackedWeight):
            y = self._plain(x) if self.copy.gated or len(x) >= MANY else self.copy(x, self.bias)
        elif self.copy.is_mkldnn and len(x) == 1:
            y = self._plain(x)
        elif self.copy.is_mkldnn:
            y = torch.ops.mkldnn._linear_pointwise(x, self.copy, self.bias, "none", [], "")
        else:
            y = F.linear(x.to(self.copy.dtype), self.copy.t(), self.bias)
        return y if self.a is None or self.b is None else y.addmm_(x.to(y.dtype) @ self.a.t(), self.b.t())

    def _plain(self, x: Tensor) -> Tensor:
        """Multiply with the original weights, which is faster for one row and for many rows."""
        y = torch.cat([F.linear(x, weight) for weight in self.weights], 1)
        return y if self.bias is None else y.add_(self.bias)

    def gated(self, x: Tensor, ops: Any, gelu: bool) -> Tensor:
        if isinstance(self.copy, cpu_kernels.PackedWeight) and self.copy.gated and len(x) < MANY:
            return self.copy(x, self.bias, gelu)
        return ops.gated_activation(self(x, ops), gelu=gelu)


def _copied(weights: list[Tensor]) -> Tensor:
    whole = weights[0] if len(weights) == 1 else torch.cat(weights)
    if packs(weights):
        return torch.ops.mkldnn._reorder_linear_weight(whole, ROWS)
    return whole.t().contiguous()


@dataclass(frozen=True)
class PackedHead(LMHead):
    """An LM head whose matmul uses packed weights."""

    product: PackedMatmul = None  # type: ignore[assignment]

    def multiply(self, hidden: Tensor) -> Tensor:
        return self.product(hidden, InPlaceOps)


class PackedCpuModel:
    """What computes hidden states in place of a model, for decoding on a CPU (`Encodes` in cache.py)."""

    def __init__(self, lm: LanguageModel):
        """Raises UnsupportedArchitectureError for a model that is built otherwise."""
        self.lm = lm
        self._build()

    @torch.no_grad()
    def _build(self) -> None:
        if unwrap_lora(self.lm.model.get_input_embeddings())[1] is not None:
            raise UnsupportedArchitectureError("its embedding has an adapter")
        self.matmuls: list[PackedMatmul] = []
        self.net = DecoderModel.of(self.lm.model, self._join)
        for layer in self.net.layers:
            layer.gate_up.gates = True  # type: ignore[attr-defined]
        own = self.net.head
        product = self._matmul([own.weight], [] if own.bias is None else [own.bias])
        self.head = PackedHead(own.weight, own.bias, own.scale, own.cap, product)
        self.parameters = list(self.lm.model.parameters())
        self.addresses = self._addresses()
        """Of the parameters and the frequencies of turns, when the model was looked through."""
        self.tables: dict[str | None, TensorPair] = {}
        """By kind of rotation, cosines and sines (`_signed`) of the first positions."""

    def _addresses(self) -> list[Any]:
        frequencies = [(b.data_ptr(), b._version) for b in self.net.rotary.buffers()]
        return [*[p.data_ptr() for p in self.parameters], *frequencies]

    def _matmul(self, *parts: Any) -> PackedMatmul:
        self.matmuls.append(PackedMatmul(*parts))
        return self.matmuls[-1]

    def _join(self, modules: GenericSequence[Any], copies: AdapterCopies) -> PackedMatmul:
        plain, adapters = zip(*map(unwrap_lora, modules), strict=True)
        if any(map(is_quantized, plain)):
            raise UnsupportedArchitectureError("its matrices are in 4 bits")
        weights, biases = [m.weight for m in plain], [m.bias for m in plain if m.bias is not None]
        rank, out = sum(len(one.a) for one in adapters if one is not None), [len(weight) for weight in weights]
        if not rank:
            return self._matmul(weights, biases)
        a, b = (weights[0].new_zeros(shape) for shape in ((rank, weights[0].shape[1]), (sum(out), rank)))
        register_adapter_copies(copies, adapters, out, a, b)
        return self._matmul(weights, biases, a, b)

    def decoding(self, pages: int, size: int) -> RowwiseDecodeLayout | DecodeLayout:
        """The layout of a step, with so many pages of this size."""
        by_row = cpu_kernels.is_supported(self.net.embedding) and cpu_kernels.supports_attention(
            self.net.head_dim, size
        )
        cache = PagedKVCache(pages, size, by_row)
        return RowwiseDecodeLayout(cache) if by_row else DecodeLayout(cache, self.device)

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @torch.no_grad()
    def refresh(self, version: int) -> LMHead:
        """Copy changed weights and return the LM head. `version`: version of the trained parameters."""
        if self.addresses != self._addresses():
            self._build()
        self.net.copies.refresh()
        for product in self.matmuls:
            product.renew(version)
        return self.head

    def _rotary(self, positions: Tensor) -> dict[str | None, TensorPair]:
        """By kind of rotation, cosines and sines at these positions, from tables that grow with them."""
        most, there = int(positions.max()) + 1, max((len(cos) for cos, _ in self.tables.values()), default=0)
        if most > there:
            pairs = dict(zip(self.net.layer_types, self.net.rotary_cache(max(most, 2 * there)), strict=True))
            self.tables = {kind: _signed(*pair) for kind, pair in pairs.items()}
        return {kind: (cos[positions], sin[positions]) for kind, (cos, sin) in self.tables.items()}

    @torch.no_grad()
    def hidden(self, ids: Tensor, positions: Tensor, layout: Any) -> Tensor:
        """Last hidden states `[row position width]` of tokens that the layout brings together with what they see."""
        net, channel = self.net, self.net.head_dim
        turns = self._rotary(positions.flatten())

        def attend(i: int, layer: Layer, qkv: Tensor) -> Tensor:
            if layer.qk_norms is not None and not layer.norms_across_heads(channel):
                qkv = norm_heads(qkv, layer.qk_norms, net.num_kv_heads)
            if isinstance(layout, RowwiseDecodeLayout):
                return layout.mix(i, qkv, turns[net.layer_types[i]], net.num_kv_heads, layer.scale)
            parts = qkv.view(*ids.shape, -1, channel)
            both, v = parts[:, :, : -net.num_kv_heads], parts[:, :, -net.num_kv_heads :]
            both = _turned(both, *turns[net.layer_types[i]])
            q, k = both[:, :, : -net.num_kv_heads], both[:, :, -net.num_kv_heads :]
            out = layout.attend(i, *(part.transpose(1, 2) for part in (q, k, v)), layer.scale)
            return out.reshape(len(qkv), -1)

        return net.forward(InPlaceOps, ids.flatten(), attend).view(*ids.shape, -1)


class RowwiseDecodeLayout:
    """The layout of a decode step, like `DecodeLayout`, whose attention is one call of a C kernel."""

    def __init__(self, cache: PagedKVCache):
        self.cache = cache

    def set_sequences(self, rows: GenericSequence[Sequence], schedule: Scheduler) -> None:
        """Set the sequences of the batch. Call it again when sequences enter, leave or get blocks."""
        pages = [[*schedule.prompt_blocks[row.prompt_id], *row.block_table] for row in rows]
        width = max(map(len, pages))
        self.table = torch.tensor([own + [0] * (width - len(own)) for own in pages])
        self.before = torch.tensor([len(schedule.prompt_blocks[row.prompt_id]) for row in rows])
        self.known = torch.tensor([schedule.prompt_lengths[row.prompt_id] for row in rows])

    def begin_step(self, rows: GenericSequence[Sequence]) -> Tensor:
        """Return the positions of the new tokens, which `Sequence.num_tokens` does not count yet."""
        self.length = torch.tensor([row.num_tokens for row in rows])
        return self.known + self.length

    def mix(self, layer: int, qkv: Tensor, turn: TensorPair, heads: int, scale: float) -> Tensor:
        """Of queries, keys and values as one product brings them: what attention makes of them."""
        channel = turn[0].shape[-1]
        like = qkv[:1, : heads * channel].view(1, heads, 1, channel)
        rows = (self.before, self.known, self.length)
        return cpu_kernels.paged_attention(
            qkv, turn, scale, self.cache.layer_blocks(layer, like, like), self.table, rows
        )


def _signed(cos: Tensor, sin: Tensor) -> TensorPair:
    """Cosines and sines `[token 1 channel]` for `_turned`: one multiplies (a, b), and one (b, a)."""
    first, second = sin.chunk(2, -1)
    return cos.unsqueeze(1), torch.cat([-first, second], -1).unsqueeze(1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads `[row position head channel]`, turned by the angles of their tokens: (a·cos − b·sin, b·cos + a·sin)."""
    tokens, half = x.flatten(0, 1), x.shape[-1] // 2
    if x.dtype != cos.dtype or x.dtype in (torch.float16, torch.bfloat16):  # every product is rounded
        return (tokens * cos).add_(tokens.roll(half, -1) * sin).to(x.dtype).view(x.shape)
    turned = tokens * cos
    turned[..., :half].addcmul_(tokens[..., half:], sin[..., :half])
    turned[..., half:].addcmul_(tokens[..., :half], sin[..., half:])
    return turned.view(x.shape)


def build_packed_cpu_model(lm: LanguageModel) -> PackedCpuModel | None:
    """Return the packed model, or None for an unsupported architecture."""
    try:
        packed = PackedCpuModel(lm)
        off = gap(packed)
    except UnsupportedArchitectureError:
        return None
    return packed if off < MAX_HIDDEN_ERROR.get(lm.model.dtype, 1e-3) else None


@torch.no_grad()
def gap(packed: PackedCpuModel) -> float:
    """Return the maximum relative error of the hidden states on a few random tokens, against the model itself."""
    lm = packed.lm
    ids = torch.randint(lm.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
    positions, row = torch.arange(12).repeat(2)[None], PackedLayout([PackedGroup(0, 12, ()), PackedGroup(12, 12, ())])
    with randomized_adapters(lm.model), packed_attention_enabled(lm.model):
        packed.refresh(-1)
        want, got = (one.hidden(ids, positions, row)[0].double() for one in (lm, packed))
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())

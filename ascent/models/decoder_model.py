"""Llama-like models for decoding: the parameters of a transformers model, with qkv and gate/up merged.

A layer is   x ← x + o(attend(qkv(norm(x))))   x ← x + down(act(gate(norm(x)))·up(norm(x)))

    Llama, Qwen2, SmolLM, Mistral   as above; any linear layer may have a bias, a LoRA adapter, or 4-bit weights
    Qwen3                           QK-norm: an RMSNorm for each head of queries and keys
    Phi-3                           qkv and gate/up are merged already
    OLMo 2                          norms after attention and MLP instead of before; QK-norm across all heads
    Gemma                           embedding times √hidden_size, norms with 1 + weight, GELU instead of SiLU
    Gemma 3                         as Gemma, with QK-norm, norms before and after, and two kinds of RoPE

Modules are found by their names in transformers. Unknown modules raise UnsupportedArchitectureError here; a model with
the same modules but other arithmetic is detected by comparing hidden states (`hidden_error` of the runners).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ascent.models.causal_lm import backbone_of, is_mixed_precision
from ascent.models.lm_head import LMHead
from ascent.models.lora import (
    AdapterCopies,
    MergedEmbedding,
    is_adapter_name,
    merge_embedding,
    merge_linears,
    unwrap_lora,
)
from ascent.models.quantization import Linear4bit, unquantized_parameters
from ascent.ops.decode_ops import AttentionParams, NormParams, add_rms_norm
from ascent.ops.decode_state import LAST_TOKEN, DecodeState
from ascent.ops.paged_kv_cache import TensorPair

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies do not depend on the sequence length."""
LINEAR_NAMES = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
NORM_NAMES = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
KNOWN_MODULES = {"self_attn", "mlp", "act_fn", "activation_fn", "q_norm", "k_norm", *LINEAR_NAMES, *NORM_NAMES}
MAX_HIDDEN_ERROR = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Largest relative difference of hidden states that rounding explains."""


class UnsupportedArchitectureError(Exception):
    """The architecture is not supported by the fast decoder; the message says why."""


class LinearLike(Protocol):
    """Linear layers with the same input, merged into one."""

    def __call__(self, x: Tensor, ops: Any, split_k: bool = False) -> Tensor: ...

    def gated(self, x: Tensor, ops: Any, gelu: bool) -> Tensor:
        """Return act(gate)·up of x, if the merged layers are gate and up."""


MergeLinears = Callable[[Sequence[Any], AdapterCopies], LinearLike]
"""Merges several linear layers into one."""


@dataclass(frozen=True)
class Layer:
    qkv: LinearLike
    o: LinearLike
    gate_up: LinearLike
    down: LinearLike
    pre_norms: tuple[NormParams | None, NormParams | None]
    """Norms before attention and before the MLP; `post_norms` are those of their outputs."""
    post_norms: tuple[NormParams | None, NormParams | None]
    qk_norms: tuple[NormParams, NormParams] | None
    scale: float

    def norms_across_heads(self, head_dim: int) -> bool:
        """Return whether QK-norm is computed across all heads rather than per head."""
        return self.qk_norms is not None and len(self.qk_norms[0].weight) != head_dim


@dataclass(frozen=True)
class DecoderModel:
    """A Llama-like model: merged weights, and how its layers differ from Llama's."""

    embed_tokens: MergedEmbedding
    embedding_scale: float
    layers: list[Layer]
    norm: NormParams
    head: LMHead
    num_kv_heads: int
    head_dim: int
    rotary: Any
    layer_types: list[str | None]
    """The RoPE type of each layer, if the model has several."""
    gelu: bool
    float32_residual: bool
    """Whether the residual stream is float32, whatever the dtype of the parameters."""
    copies: AdapterCopies
    """Copies of the LoRA adapters, to be refreshed when the adapters change."""

    @classmethod
    def of(cls, model: Any, join: MergeLinears = merge_linears) -> DecoderModel:
        """Build from a transformers model, merging its linear layers; raises UnsupportedArchitectureError.

        Later updates of the parameters are visible here, except for LoRA adapters, which are copied. `join` merges
        linear layers in another way.
        """
        check_supported(model)
        backbone, copies = backbone_of(model), AdapterCopies()
        first, rotary = backbone.layers[0], backbone.rotary_emb
        layers = [_layer_of(layer, copies, join) for layer in backbone.layers]
        embed_tokens = merge_embedding(model.get_input_embeddings(), copies)
        copies.refresh()
        qkv_width = sum(unwrap_lora(matrix)[0].out_features for matrix in _linears_of(first.self_attn, "qkv_proj"))
        head_dim = first.self_attn.head_dim
        return cls(
            embed_tokens=embed_tokens,
            embedding_scale=_embedding_scale(model.get_input_embeddings()),
            layers=layers,
            norm=_norm_params(backbone.norm),
            head=LMHead.of(model),
            num_kv_heads=(qkv_width - unwrap_lora(first.self_attn.o_proj)[0].in_features) // head_dim // 2,
            head_dim=head_dim,
            rotary=rotary,
            layer_types=list(backbone.config.layer_types) if _has_several_rope_types(rotary) else [None] * len(layers),
            gelu=_uses_gelu(first.mlp),
            float32_residual=is_mixed_precision(model),
            copies=copies,
        )

    @property
    def embedding(self) -> Tensor:
        return self.embed_tokens.weight

    def rotary_cache(self, max_length: int) -> list[TensorPair]:
        """Return cosines and sines `[position head_dim]` for each layer, rounded as the model rounds them."""
        return self.rotary_tables(torch.arange(max_length, device=self.embedding.device))

    def rotary_tables(self, positions: Tensor) -> list[TensorPair]:
        """Return the cosines and sines of each layer at these positions."""
        like, tables = self.embedding.new_empty(1, dtype=torch.float32 if self.float32_residual else None), {}
        for kind in dict.fromkeys(self.layer_types):
            cos, sin = self.rotary(like, positions[None], *([] if kind is None else [kind]))
            if cos.shape[-1] != self.head_dim:
                raise UnsupportedArchitectureError("partial rotary embedding is not supported")
            tables[kind] = cos[0].contiguous(), sin[0].contiguous()
        return [tables[kind] for kind in self.layer_types]

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of the parameters, for which a captured CUDA graph is valid."""
        norms: list[NormParams | None] = [self.norm]
        parts: list[Any] = [*self.embed_tokens, self.head.weight, self.head.bias]
        for layer in self.layers:
            matrices: list[Any] = [layer.qkv, layer.o, layer.gate_up, layer.down]
            parts += [part for matrix in matrices for part in matrix]
            norms += [*layer.pre_norms, *layer.post_norms, *(layer.qk_norms or ())]
        parts += [norm.weight for norm in norms if norm is not None]
        return tuple(part.data_ptr() for part in parts if isinstance(part, Tensor))

    def hidden(
        self, ops: ModuleType, state: DecodeState, tables: list[TensorPair], rows: int, uneven: bool = False
    ) -> Tensor:
        """Decode step: return the last hidden states of the first `rows` rows, without synchronization.

        `uneven`: split the keys of long rows, so that the longest row does not delay the others.
        """
        splits = ops.split_long_rows(state, rows) if uneven else None

        def attend(i: int, layer: Layer, qkv: Tensor) -> Tensor:
            norms = None if layer.norms_across_heads(self.head_dim) else layer.qk_norms
            return ops.paged_attention(qkv, AttentionParams(*tables[i], norms, layer.scale), state, i, splits)

        return self.forward(ops, state.state[LAST_TOKEN][state.batch_indices[:rows]], attend)

    def forward(self, ops: Any, ids: Tensor, attend: Callable[[int, Layer, Tensor], Tensor]) -> Tensor:
        """Return the last hidden states of these tokens; `attend(i, layer, qkv)` computes the attention of a layer."""
        x, y = self.embed_tokens(ids), None
        x = x if self.embedding_scale == 1 else x * self.embedding_scale
        x = x.float() if self.float32_residual else x
        for i, layer in enumerate(self.layers):
            x, h = _add_and_norm(ops, x, y, layer.pre_norms[0])
            qkv = layer.qkv(h, ops)
            if layer.qk_norms is not None and layer.norms_across_heads(self.head_dim):
                q, k, v = qkv.split(
                    [*(len(norm.weight) for norm in layer.qk_norms), self.num_kv_heads * self.head_dim], -1
                )
                pairs = zip((q, k), layer.qk_norms, strict=True)
                q, k = (ops.add_rms_norm(part.contiguous(), None, *norm)[1] for part, norm in pairs)
                qkv = torch.cat([q, k, v], -1)
            y = _project_out(ops, layer.o, attend(i, layer, qkv), layer.post_norms[0])
            x, h = _add_and_norm(ops, x, y, layer.pre_norms[1])
            y = _project_out(ops, layer.down, layer.gate_up.gated(h, ops, self.gelu), layer.post_norms[1])
        return _add_and_norm(ops, x, y, self.norm)[1]


def _add_and_norm(ops: Any, x: Tensor, y: Tensor | None, norm: NormParams | None) -> TensorPair:
    """Return x + y and its norm, or x + y twice without a norm."""
    if norm is not None:
        return ops.add_rms_norm(x, y, *norm)
    x = x if y is None else x + y
    return x, x


def _project_out(ops: Any, matrix: LinearLike, h: Tensor, norm: NormParams | None) -> Tensor:
    """Apply an output projection. Without a post-norm it may return split-K partial sums, which the next norm adds."""
    if norm is None:
        return matrix(h, ops, split_k=True)
    return ops.add_rms_norm(matrix(h, ops).contiguous(), None, *norm)[1]


def norm_heads(qkv: Tensor, norms: tuple[NormParams, NormParams], shared: int) -> Tensor:
    """Apply QK-norm to each head of queries and keys."""
    parts = qkv.view(len(qkv), -1, len(norms[0].weight))
    *both, v = parts.split([parts.shape[1] - 2 * shared, shared, shared], 1)
    normed = [add_rms_norm(part, None, *norm)[1] for part, norm in zip(both, norms, strict=True)]
    return torch.cat([*normed, v], 1).flatten(1)


# ---- inspecting a transformers model ------------------------------------------------------------------


def check_supported(model: Any) -> None:
    """Raise UnsupportedArchitectureError if the decoder does not support the model, which may be on the meta device."""
    backbone, head = backbone_of(model), LMHead.of(model)
    if head.scale != 1.0 or head.cap is not None:
        raise UnsupportedArchitectureError("its logits are scaled or capped")
    try:
        rotary = backbone.rotary_emb
        kinds = rotary.rope_type.values() if _has_several_rope_types(rotary) else [rotary.rope_type]
        for layer in backbone.layers:
            _check_layer(layer, backbone.layers[0].self_attn.head_dim)
        _norm_params(backbone.norm)
        _uses_gelu(backbone.layers[0].mlp)
    except AttributeError as error:
        raise UnsupportedArchitectureError(
            f"its layers are built differently from Llama's: {error.name} is missing"
        ) from None
    for kind in kinds:
        if kind not in STATIC_ROPE_TYPES:
            raise UnsupportedArchitectureError(f"its rotary positions are {kind}")
    _embedding_scale(model.get_input_embeddings())
    own = {id(p) for name, p in model.named_parameters() if not is_adapter_name(name)}
    frozen = [p for p in unquantized_parameters(model) if id(p) in own]
    if len({p.dtype for p in frozen}) > 1 or len({p.device for p in model.parameters()}) > 1:
        raise UnsupportedArchitectureError("its parameters are of several types or on several devices")


def _has_several_rope_types(rotary: Any) -> bool:
    """Return whether layers have different RoPE types."""
    return isinstance(rotary.rope_type, dict)


def _linears_of(parent: Any, joined: str) -> list[Any]:
    """Return the linear layers with the same input: a merged one, or those that are to be merged."""
    if hasattr(parent, joined):
        return [getattr(parent, joined)]
    names = ("q_proj", "k_proj", "v_proj") if joined == "qkv_proj" else ("gate_proj", "up_proj")
    return [getattr(parent, name) for name in names]


def _norm_params(module: Any) -> NormParams:
    if getattr(module, "bias", None) is not None or getattr(module, "weight", None) is None:
        raise UnsupportedArchitectureError("its norms have a bias, or no weight")
    eps = float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)
    kind: Any = type(module)
    return NormParams(module.weight, eps, _find_weight_offset(kind))


@cache
@torch.no_grad()
def _find_weight_offset(kind: Any) -> float | None:
    """Return the `weight_offset` of a class of norms (`NormParams`), by comparing the forms in bfloat16."""
    try:
        with torch.device("cpu"):  # also when models are built on the meta device
            module: Any = kind(32, 1e-6).to(torch.bfloat16)
            x, weight = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
        module.weight.copy_(weight[0])
        own = kind.forward(module, x)
    except Exception:  # a class with another constructor
        return None
    return min(
        (None, 0.0, 1.0), key=lambda add: float((add_rms_norm(x, None, weight[0], 1e-6, add)[1] - own).abs().sum())
    )


def _uses_gelu(mlp: Any) -> bool:
    act = mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn
    if isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation":
        return False
    if type(act).__name__ in ("GELUTanh", "PytorchGELUTanh"):
        return True
    raise UnsupportedArchitectureError("the activation of its MLPs is neither SiLU nor GELU by its tanh")


def _embedding_scale(embedding: Any) -> float:
    """Return the factor that the embedding is multiplied by."""
    plain = unwrap_lora(embedding)[0]
    if type(plain) is nn.Embedding:
        return 1.0
    if not isinstance(plain, nn.Embedding) or not hasattr(plain, "scalar_embed_scale") or plain is not embedding:
        raise UnsupportedArchitectureError("its embedding of words does more than look them up")
    return float(torch.tensor(plain.scalar_embed_scale).to(plain.weight.dtype))


def _check_layer(layer: Any, head_dim: int) -> None:
    """Raise UnsupportedArchitectureError, or AttributeError for a missing module."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv, gate_up = _linears_of(attention, "qkv_proj"), _linears_of(mlp, "gate_up_proj")
    for module in (*qkv, attention.o_proj, *gate_up, mlp.down_proj):
        if type(unwrap_lora(module)[0]) not in (nn.Linear, Linear4bit):
            raise UnsupportedArchitectureError(
                "its matrices are quantized in another way than by --policy.bits, or have adapters that are not LoRA's"
            )
    for some in (qkv, gate_up):
        if len({module.bias is None for module in some}) > 1:
            raise UnsupportedArchitectureError(
                "some of the matrices that read the same states have a bias and some have none"
            )
    for parent in (layer, attention, mlp):
        for name, module in parent.named_children():
            if name not in KNOWN_MODULES and any(True for _ in module.parameters()):
                raise UnsupportedArchitectureError(f"it has a part that Llama has not, {name}")
    _layer_norms(layer)
    if hasattr(attention, "q_norm"):
        all_heads = unwrap_lora(attention.o_proj)[0].in_features
        if len(attention.q_norm.weight) not in (head_dim, all_heads):
            raise UnsupportedArchitectureError("its norms of queries and keys are neither a head's nor of all heads")


def _layer_norms(
    layer: Any,
) -> tuple[tuple[NormParams | None, NormParams | None], tuple[NormParams | None, NormParams | None]]:
    """Return the norms before, and the norms after, attention and MLP.

    The position of `post_attention_layernorm` depends on which other norms exist.
    """
    post_attention = _norm_params(layer.post_attention_layernorm)
    if not hasattr(layer, "post_feedforward_layernorm"):
        return (_norm_params(layer.input_layernorm), post_attention), (None, None)
    after = (post_attention, _norm_params(layer.post_feedforward_layernorm))
    if not hasattr(layer, "pre_feedforward_layernorm"):
        return (None, None), after
    return (_norm_params(layer.input_layernorm), _norm_params(layer.pre_feedforward_layernorm)), after


def _layer_of(layer: Any, copies: AdapterCopies, join: MergeLinears) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    before, after = _layer_norms(layer)
    return Layer(
        qkv=join(_linears_of(attention, "qkv_proj"), copies),
        o=join([attention.o_proj], copies),
        gate_up=join(_linears_of(mlp, "gate_up_proj"), copies),
        down=join([mlp.down_proj], copies),
        pre_norms=before,
        post_norms=after,
        qk_norms=(_norm_params(attention.q_norm), _norm_params(attention.k_norm))
        if hasattr(attention, "q_norm")
        else None,
        scale=float(attention.scaling),
    )

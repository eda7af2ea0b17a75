"""Llama and its like as the decoder computes them: the model's own parameters, those side by side that read the same.

A layer is   x ← x + o(attend(qkv(norm(x))))   x ← x + down(act(gate(norm(x)))·up(norm(x)))

    Llama, Qwen2, SmolLM, Mistral   so; a bias or an adapter (LoRA) may be at any matrix, which may be in 4 bits
    Qwen3                           queries and keys have norms of their own
    Phi-3                           its matrices are side by side already
    OLMo 2                          what is added to x is normed, and x is not; norms of all queries, of all keys
    Gemma                           words times √width, norms times 1 + weight, act is GELU and not SiLU
    Gemma 3                         that, norms of queries and keys, x and what is added to it normed, two rotations

The parts are found by the names that transformers gives them. What has other parts is told apart here, and what has the
same parts but other arithmetic by `gap` in cuda.py, and on a CPU in prepacked.py.
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
"""Rotary positions that do not depend on how long a sequence is."""
LINEAR_NAMES = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
NORM_NAMES = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
KNOWN_MODULES = {"self_attn", "mlp", "act_fn", "activation_fn", "q_norm", "k_norm", *LINEAR_NAMES, *NORM_NAMES}
MAX_HIDDEN_ERROR = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""How far hidden states may be apart by rounding alone, relative to their size."""


class UnsupportedArchitectureError(Exception):
    """This architecture is not Llama's like; says in what."""


class LinearLike(Protocol):
    """Matrices that read the same states, as one."""

    def __call__(self, x: Tensor, ops: Any, split_k: bool = False) -> Tensor: ...

    def gated(self, x: Tensor, ops: Any, gelu: bool) -> Tensor:
        """act(gate)·up of x, where they are gate and up."""


MergeLinears = Callable[[Sequence[Any], AdapterCopies], LinearLike]
"""What makes one of several modules."""


@dataclass(frozen=True)
class Layer:
    qkv: LinearLike
    o: LinearLike
    gate_up: LinearLike
    down: LinearLike
    pre_norms: tuple[NormParams | None, NormParams | None]
    """Of what goes into the attention, and into the MLP; so too of what comes out of them."""
    post_norms: tuple[NormParams | None, NormParams | None]
    qk_norms: tuple[NormParams, NormParams] | None
    scale: float

    def norms_across_heads(self, channel: int) -> bool:
        """Are the queries of all heads normed together, and so the keys?"""
        return self.qk_norms is not None and len(self.qk_norms[0].weight) != channel


@dataclass(frozen=True)
class DecoderModel:
    """A model of these kinds."""

    embed_tokens: MergedEmbedding
    embedding_scale: float
    layers: list[Layer]
    norm: NormParams
    head: LMHead
    num_kv_heads: int
    head_dim: int
    rotary: Any
    layer_types: list[str | None]
    """By layer the kind of its rotation, where there are several."""
    gelu: bool
    float32_residual: bool
    """Whether the residual stream is float32, whatever the dtype of the parameters."""
    copies: AdapterCopies
    """Of adapters; to be made again when these have changed."""

    @classmethod
    def of(cls, model: Any, join: MergeLinears = merge_linears) -> DecoderModel:
        """Describe a transformers model. Its matrices are laid side by side.

        Raises UnsupportedArchitectureError.


        Parameters that change later are seen, but for adapters: these are copied here. `join`: another way to have
        matrices together.
        """
        check_supported(model)
        backbone, copies = backbone_of(model), AdapterCopies()
        first, rotary = backbone.layers[0], backbone.rotary_emb
        layers = [_layer_of(layer, copies, join) for layer in backbone.layers]
        embed_tokens = merge_embedding(model.get_input_embeddings(), copies)
        copies.make()
        both = sum(unwrap_lora(matrix)[0].out_features for matrix in _linears_of(first.self_attn, "qkv_proj"))
        channel = first.self_attn.head_dim
        return cls(
            embed_tokens=embed_tokens,
            embedding_scale=_embedding_scale(model.get_input_embeddings()),
            layers=layers,
            norm=_norm_params(backbone.norm),
            head=LMHead.of(model),
            num_kv_heads=(both - unwrap_lora(first.self_attn.o_proj)[0].in_features) // channel // 2,
            head_dim=channel,
            rotary=rotary,
            layer_types=list(backbone.config.layer_types) if _has_several_rope_types(rotary) else [None] * len(layers),
            gelu=_uses_gelu(first.mlp),
            float32_residual=is_mixed_precision(model),
            copies=copies,
        )

    @property
    def embedding(self) -> Tensor:
        return self.embed_tokens.weight

    def rotary_cache(self, longest: int) -> list[TensorPair]:
        """By layer, cosines and sines `[position channel]`, rounded as the model rounds them."""
        return self.rotary_tables(torch.arange(longest, device=self.embedding.device))

    def rotary_tables(self, positions: Tensor) -> list[TensorPair]:
        """The same at these positions."""
        like, found = self.embedding.new_empty(1, dtype=torch.float32 if self.float32_residual else None), {}
        for kind in dict.fromkeys(self.layer_types):
            cos, sin = self.rotary(like, positions[None], *([] if kind is None else [kind]))
            if cos.shape[-1] != self.head_dim:
                raise UnsupportedArchitectureError("only a part of its channels is rotated")
            found[kind] = cos[0].contiguous(), sin[0].contiguous()
        return [found[kind] for kind in self.layer_types]

    def addresses(self) -> tuple[int, ...]:
        """Where the parameters lie: a captured graph is good for these alone."""
        norms: list[NormParams | None] = [self.norm]
        parts: list[Any] = [*self.embed_tokens, self.head.weight, self.head.bias]
        for layer in self.layers:
            matrices: list[Any] = [layer.qkv, layer.o, layer.gate_up, layer.down]
            parts += [part for matrix in matrices for part in matrix]
            norms += [*layer.pre_norms, *layer.post_norms, *(layer.qk_norms or ())]
        parts += [norm.weight for norm in norms if norm is not None]
        return tuple(part.data_ptr() for part in parts if isinstance(part, Tensor))

    def hidden(
        self, ops: ModuleType, board: DecodeState, tables: list[TensorPair], rows: int, uneven: bool = False
    ) -> Tensor:
        """The last hidden states after the next token of the first `rows` rows. Host and device never wait.

        `uneven`: share out rows, so that the longest does not keep the others waiting.
        """
        parts = ops.split_long_rows(board, rows) if uneven else None

        def attend(i: int, layer: Layer, qkv: Tensor) -> Tensor:
            norms = None if layer.norms_across_heads(self.head_dim) else layer.qk_norms
            return ops.paged_attention(qkv, AttentionParams(*tables[i], norms, layer.scale), board, i, parts)

        return self.forward(ops, board.state[LAST_TOKEN][board.batch_indices[:rows]], attend)

    def forward(self, ops: Any, ids: Tensor, attend: Callable[[int, Layer, Tensor], Tensor]) -> Tensor:
        """Hidden states of these tokens; `attend` mixes what the queries, keys and values of a layer are for."""
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
    """x + y, and what goes on from there."""
    if norm is not None:
        return ops.add_rms_norm(x, y, *norm)
    x = x if y is None else x + y
    return x, x


def _project_out(ops: Any, matrix: LinearLike, h: Tensor, norm: NormParams | None) -> Tensor:
    """What is added to x: where it is not normed, the norm behind that sum takes it in parts."""
    if norm is None:
        return matrix(h, ops, split_k=True)
    return ops.add_rms_norm(matrix(h, ops).contiguous(), None, *norm)[1]


def norm_heads(qkv: Tensor, norms: tuple[NormParams, NormParams], shared: int) -> Tensor:
    """The same with each head of queries and keys normed."""
    parts = qkv.view(len(qkv), -1, len(norms[0].weight))
    *both, v = parts.split([parts.shape[1] - 2 * shared, shared, shared], 1)
    normed = [add_rms_norm(part, None, *norm)[1] for part, norm in zip(both, norms, strict=True)]
    return torch.cat([*normed, v], 1).flatten(1)


# ---- what a model is made of --------------------------------------------------------------------------


def check_supported(model: Any) -> None:
    """Raise UnsupportedArchitectureError for a model that is built otherwise. It may lie on the meta device."""
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
    """Do layers have rotations of several kinds?"""
    return isinstance(rotary.rope_type, dict)


def _linears_of(parent: Any, joined: str) -> list[Any]:
    """The matrices that read the same states: one that is joined already, or those that it would be joined of."""
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
    """What this kind of norm adds to its weight, and when it rounds (`Norm.add`): seen where rounding is coarse."""
    try:
        with torch.device("cpu"):  # also where models are made on no device, for a plan
            module: Any = kind(32, 1e-6).to(torch.bfloat16)
            x, weight = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
        module.weight.copy_(weight[0])
        own = kind.forward(module, x)
    except Exception:  # whatever a class that is made in another way does
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
    """What words are multiplied by."""
    plain = unwrap_lora(embedding)[0]
    if type(plain) is nn.Embedding:
        return 1.0
    if not isinstance(plain, nn.Embedding) or not hasattr(plain, "scalar_embed_scale") or plain is not embedding:
        raise UnsupportedArchitectureError("its embedding of words does more than look them up")
    return float(torch.tensor(plain.scalar_embed_scale).to(plain.weight.dtype))


def _check_layer(layer: Any, channel: int) -> None:
    """Raise UnsupportedArchitectureError, or AttributeError for a part that is missing."""
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
        every = unwrap_lora(attention.o_proj)[0].in_features
        if len(attention.q_norm.weight) not in (channel, every):
            raise UnsupportedArchitectureError("its norms of queries and keys are neither a head's nor of all heads")


def _layer_norms(
    layer: Any,
) -> tuple[tuple[NormParams | None, NormParams | None], tuple[NormParams | None, NormParams | None]]:
    """Before and after the attention and the MLP; a norm's name says where it is only if one knows the others."""
    second = _norm_params(layer.post_attention_layernorm)
    if not hasattr(layer, "post_feedforward_layernorm"):
        return (_norm_params(layer.input_layernorm), second), (None, None)
    after = (second, _norm_params(layer.post_feedforward_layernorm))
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

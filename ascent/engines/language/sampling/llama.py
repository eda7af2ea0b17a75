"""One description for Llama and its like: Qwen2, Qwen3, SmolLM, Mistral.

A layer is   x ← x + o(attend(qkv(norm(x))))   x ← x + down(silu(gate(norm(x)))·up(norm(x)))

with an optional bias at each matrix, optional norms of queries and keys, rotary positions by halves, and a head that
is the embedding or a matrix of its own. The parts are found by the names that transformers gives them; what has
other parts is told apart here, and what has the same parts but other arithmetic by `gap` in cuda.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascent.engines.language.learning.head import Head
from ascent.engines.language.sampling.board import LAST, Board, Pair, Turn

STEADY = ("default", "linear", "llama3", "yarn")
"""Rotary positions that do not depend on how long a sequence is."""


class Unlike(Exception):
    """This architecture is not Llama's like; says in what."""


Matrix = tuple[Tensor, Tensor | None]
Norm = tuple[Tensor, float]


@dataclass(frozen=True)
class Layer:
    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    norm_attention: Norm
    norm_mlp: Norm
    norms_qk: tuple[Tensor, Tensor, float] | None
    scale: float


@dataclass(frozen=True)
class Llama:
    """The model's own parameters, queries, keys and values in one matrix, gate and up in another."""

    embedding: Tensor
    layers: list[Layer]
    norm: Norm
    head: Head
    heads: int
    channel: int
    rotary: Any

    @classmethod
    def of(cls, model: Any) -> Llama:
        """Describe a transformers model. Raises Unlike; else its matrices have been laid side by side."""
        backbone, head = model.get_decoder(), Head.of(model)
        if head.scale != 1.0 or head.cap is not None:
            raise Unlike("its logits are scaled or capped")
        try:
            kind = backbone.rotary_emb.rope_type
            channel = backbone.layers[0].self_attn.head_dim
            for layer in backbone.layers:
                _check(layer, channel)
            final = _norm(backbone.norm)
        except AttributeError as error:
            raise Unlike(f"it has other parts than Llama ({error})") from None
        if kind not in STEADY:
            raise Unlike(f"its rotary positions are {kind}")
        layers = [_layer(layer) for layer in backbone.layers]
        heads = backbone.layers[0].self_attn.k_proj.weight.shape[0] // channel
        if len({p.dtype for p in model.parameters()}) > 1 or len({p.device for p in model.parameters()}) > 1:
            raise Unlike("its parameters are of several types or on several devices")
        embedding = model.get_input_embeddings().weight
        return cls(embedding, layers, final, head, heads, channel, backbone.rotary_emb)

    def tables(self, longest: int) -> Pair:
        """Cosines and sines `[position channel]`, rounded as the model rounds them."""
        like = self.embedding
        cos, sin = self.rotary(like, torch.arange(longest, device=like.device)[None])
        if cos.shape[-1] != self.channel:
            raise Unlike("only a part of its channels is rotated")
        return cos[0].contiguous(), sin[0].contiguous()

    def addresses(self) -> tuple[int, ...]:
        """Where the parameters lie: a captured graph is good for these alone."""
        found = [self.embedding, self.norm[0], *_both(self.head)]
        for layer in self.layers:
            for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
                found += [m for m in matrix if m is not None]
            found += [layer.norm_attention[0], layer.norm_mlp[0], *(layer.norms_qk or ())[:2]]
        return tuple(tensor.data_ptr() for tensor in found)

    def hidden(self, ops: ModuleType, board: Board, tables: Pair, rows: int) -> Tensor:
        """The last hidden states after the next token of the first `rows` rows. Host and device never wait."""
        x = F.embedding(board.state[LAST][board.lanes[:rows]], self.embedding)
        x, h = ops.add_norm(x, None, *self.layers[0].norm_attention)
        norms = [layer.norm_attention for layer in self.layers[1:]] + [self.norm]
        for i, (layer, after) in enumerate(zip(self.layers, norms, strict=True)):
            turn = Turn(*tables, layer.norms_qk, layer.scale)
            mixed = ops.attend(F.linear(h, *layer.qkv), turn, board, i)
            x, h = ops.add_norm(x, F.linear(mixed, *layer.o), *layer.norm_mlp)
            inner = ops.gated(F.linear(h, *layer.gate_up))
            x, h = ops.add_norm(x, F.linear(inner, *layer.down), *after)
        return h


def _both(head: Head) -> list[Tensor]:
    return [head.weight] if head.bias is None else [head.weight, head.bias]


def _norm(module: Any) -> Norm:
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    if getattr(module, "bias", None) is not None:
        raise Unlike("its norms have a bias")
    return module.weight, float(eps)


def _check(layer: Any, channel: int) -> None:
    """Raise Unlike, or AttributeError for a part that is missing."""
    attention, mlp = layer.self_attn, layer.mlp
    for module in (*_linears(attention, "qkvo"), mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        if type(module) is not nn.Linear:
            raise Unlike(f"its matrices are {type(module).__name__}, not plain")
    if not isinstance(mlp.act_fn, nn.SiLU) and type(mlp.act_fn).__name__ != "SiLUActivation":
        raise Unlike(f"its activation is {type(mlp.act_fn).__name__}")
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    known |= {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    known |= {"gate_proj", "up_proj", "down_proj", "act_fn"}
    for parent in (layer, attention, mlp):
        for name, module in parent.named_children():
            if name not in known and any(True for _ in module.parameters()):
                raise Unlike(f"it has a part that Llama has not, {name}")
    _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
    if hasattr(attention, "q_norm") and attention.q_norm.weight.shape != (channel,):
        raise Unlike("its norms of queries and keys are not a head's")


def _linears(attention: Any, which: str) -> list[nn.Linear]:
    return [getattr(attention, f"{letter}_proj") for letter in which]


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = None
    if hasattr(attention, "q_norm"):
        weight, eps = _norm(attention.q_norm)
        norms = (weight, _norm(attention.k_norm)[0], eps)
    return Layer(
        qkv=side_by_side(_linears(attention, "qkv")),
        o=side_by_side([attention.o_proj]),
        gate_up=side_by_side([mlp.gate_proj, mlp.up_proj]),
        down=side_by_side([mlp.down_proj]),
        norm_attention=_norm(layer.input_layernorm),
        norm_mlp=_norm(layer.post_attention_layernorm),
        norms_qk=norms,
        scale=float(attention.scaling),
    )


@torch.no_grad()
def side_by_side(modules: list[nn.Linear]) -> Matrix:
    """One matrix of which the modules' own weights are parts, and so for their biases.

    The parameters stay the same objects and only their memory moves, so an optimizer's step, a state dict or a
    checkpoint finds them as before, and every change to them is a change to the whole matrix: nothing is copied later.
    """
    if len({m.bias is None for m in modules}) > 1:
        raise Unlike("some of its queries, keys and values have a bias and some have none")
    weight = _joined([m.weight for m in modules])
    return weight, None if modules[0].bias is None else _joined([m.bias for m in modules])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    first, count = parts[0].data, sum(p.shape[0] for p in parts)
    if len(parts) == 1:
        return first
    ends = [p.data_ptr() + p.numel() * p.element_size() for p in parts]
    following = all(p.data_ptr() == end for p, end in zip(parts[1:], ends[:-1], strict=True))
    one_block = len({p.untyped_storage().data_ptr() for p in parts}) == 1
    if following and one_block and all(p.is_contiguous() for p in parts):
        return first.as_strided((count, *first.shape[1:]), first.stride())
    whole = torch.cat([p.data for p in parts])
    for p, part in zip(parts, whole.split([p.shape[0] for p in parts]), strict=True):
        p.data = part
    return whole

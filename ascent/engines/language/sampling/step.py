"""One decoding step of Llama and its like (Qwen2, Qwen3, SmolLM, Mistral) on static state, in plain torch.

A layer is   x ← x + o(attend(qkv(norm(x))))   x ← x + down(silu(gate(norm(x)))·up(norm(x)))

with an optional bias and an optional adapter (LoRA) at each matrix, optional norms of queries and keys, rotary
positions by halves, and a head that is the embedding or a matrix of its own. The parts are found by the names that
transformers gives them; what has other parts is told apart here, and what has the same parts but other arithmetic by
`gap` in cuda.py.

A lane is a place for one running response: its state, its output, and a table of the pages that hold its keys and
values, its prompt's first and then its own. Which lanes a step works on is itself a tensor, so a graph that was
captured once serves any of them at any length, and a lane is given to another response by writing its column of
`state` and its row of `table`.

`add_norm`, `adapted`, `gated`, `place_given`, `gather_keys`, `attend` and `draw` say what kernels/decoding.py computes,
and stand in for it without Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import ge
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascent.engines.language.adapters import Beside, Copies, Lookup, beside, is_adapter, lookup, taken_apart
from ascent.engines.language.learning.head import Head
from ascent.engines.language.sampling.cache import Cache, Pair
from ascent.engines.language.sampling.draw import Support, draw_tokens, uniform
from ascent.policies.causal_lm import backbone_of

KNOWN, LENGTH, LAST, SEED, DONE, GIVEN = range(6)
"""The rows of a board's `state`. DONE is 0 while a response runs, and then its number of tokens.

Before place GIVEN tokens are not drawn: those that stand there already are fed, one per step.
"""
ENDS = 16
"""End tokens that a board has room for."""
PAGE = 64
"""Tokens on a page."""

STEADY = ("default", "linear", "llama3", "yarn")
"""Rotary positions that do not depend on how long a sequence is."""
Norm = tuple[Tensor, float]


@dataclass(frozen=True)
class Board:
    """Tensors at fixed addresses. The last lane and the last page are nobody's, for rows that have nothing to do."""

    state: Tensor
    """Int `[6 lane]`: keys of the prompt, tokens in its own pages, the token to feed next, the seed, done, given."""
    lanes: Tensor
    """The lane of each row of a step."""
    table: Tensor
    """Int32 `[lane page]`: the pages of a lane, its prompt's first."""
    cache: Cache
    token: Tensor
    """Drawn tokens `[lane token]`; so too their log-probs and the mass of what could be drawn."""
    logp: Tensor
    mass: Tensor
    ends: Tensor
    limit: Tensor
    temperature: Tensor
    chunk: Tensor
    """Keys that one program of the attention reads, where long rows are split."""
    arrived: Tensor
    """`[row·head]`: programs of a split row that are done; zeros between steps."""

    @classmethod
    def empty(
        cls, layers: int, heads: int, channel: int, rows: int, pages: int, width: int, limit: int, like: Tensor
    ) -> Board:
        """Room for rows of `limit` tokens, on pages of which each row has at most `width`."""
        lanes, device = rows + 1, like.device
        state = torch.zeros(6, lanes, dtype=torch.long, device=device)
        state[DONE, rows] = 1
        cache, one = Cache(pages + 1, PAGE), like.new_empty(1, heads, 1, channel)
        for layer in range(layers):
            cache.at(layer, one, one)
        return cls(
            state=state,
            lanes=torch.full((rows,), rows, device=device),
            table=torch.full((lanes, width), pages, dtype=torch.int32, device=device),
            cache=cache,
            token=torch.zeros(lanes, limit, dtype=torch.long, device=device),
            logp=torch.zeros(lanes, limit, device=device),
            mass=torch.ones(lanes, limit, device=device),
            ends=torch.full((ENDS,), -1, device=device),
            limit=torch.full((), limit, device=device),
            temperature=torch.ones((), dtype=torch.float64, device=device),
            chunk=torch.full((), PAGE, dtype=torch.int32, device=device),
            arrived=torch.zeros(rows * heads, dtype=torch.int32, device=device),
        )

    @property
    def rows(self) -> int:
        return len(self.lanes)

    @property
    def room(self) -> tuple[int, int, int, int]:
        """Rows, pages, pages of a row, and tokens of a row."""
        return self.rows, self.cache.pages - 1, self.table.shape[1], self.token.shape[1]

    def holds(self, rows: int, pages: int, width: int, limit: int) -> bool:
        return all(map(ge, self.room, (rows, pages, width, limit)))


@dataclass(frozen=True)
class Turn:
    """What attention needs besides the caches: rotary tables `[position channel]`, norms of queries and keys, scale."""

    cos: Tensor
    sin: Tensor
    norms: tuple[Tensor, Tensor, float] | None
    scale: float


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Pair:
    """x + y, and its RMS norm w·x/√(mean x² + ε), in float32 or better within."""
    x = x if y is None else x + y
    wide = x if x.dtype == torch.float64 else x.float()
    return x, weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


adapted = Beside.adapted


def gated(both: Tensor, b: Tensor | None = None, _ranks: tuple[int, ...] = ()) -> Tensor:
    """silu(gate)·up, the two side by side; with `b` their adapters, of these ranks, are added first."""
    gate, up = (both if b is None else adapted(both, b)).chunk(2, -1)
    return F.silu(gate) * up


def attend(qkv: Tensor, turn: Turn, board: Board, layer: int, _splits: int = 1) -> Tensor:
    """One new token per row: its key and value join its pages, and it attends to its prompt and to its own tokens.

    With R(p) the rotation at position p = known + length:
    out = softmax(scale · R(p)q · [prompt keys, own keys, R(p)k]ᵀ) · [prompt values, own values, v]
    `_splits`: programs among which a kernel may share out a long row.
    """
    rows, channel = qkv.shape[0], turn.cos.shape[1]
    lanes = board.lanes[:rows]
    known, length = board.state[KNOWN, lanes], board.state[LENGTH, lanes]
    table, (keys, values) = board.table[lanes].long(), board.cache.layers[layer]
    shared = keys.shape[1]
    heads = qkv.shape[1] // channel - 2 * shared
    q, k, v = qkv.view(rows, -1, channel).split([heads, shared, shared], 1)
    if turn.norms is not None:
        q, k = (add_norm(x, None, w, turn.norms[2])[1] for x, w in zip((q, k), turn.norms[:2], strict=True))
    position = known + length
    q, k = (_rotate(x, turn.cos[position], turn.sin[position]) for x in (q, k))
    before = (known + PAGE - 1) // PAGE  # pages of the prompt
    page = table.gather(1, (before + length // PAGE)[:, None])[:, 0]
    keys[page, :, length % PAGE], values[page, :, length % PAGE] = k, v
    column = torch.arange(table.shape[1] * PAGE, device=qkv.device)
    own = column - (before * PAGE)[:, None]
    seen = torch.where(own < 0, column < known[:, None], own <= length[:, None])
    k, v = (x[table].transpose(1, 2).flatten(2, 3) for x in (keys, values))
    q = q.reshape(rows, shared, heads // shared, channel)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None], scale=turn.scale)
    return out.reshape(rows, heads * channel)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads `[token head channel]`, turned by the angles of their tokens, `[token channel]`."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


def place_given(qkv: Tensor, cos: Tensor, sin: Tensor, page: Tensor, offset: Tensor, cache: Pair) -> Tensor:
    """Tokens that are given: keys, turned, and values join their pages; returned are the queries, turned too.

    In `[token (heads + 2·shared)·channel]`, whose rows may be apart (adapters.py), out `[token head channel]`.
    """
    shared, channel = cache[0].shape[1], cache[0].shape[3]
    parts = qkv.view(len(qkv), -1, channel)
    both, v = parts.split([parts.shape[1] - shared, shared], 1)
    q, k = _rotate(both, cos, sin).split([both.shape[1] - shared, shared], 1)
    for into, new in zip(cache, (k, v), strict=True):
        into[page, :, offset] = new
    return q


def gather_keys(cache: Pair, page: Tensor, offset: Tensor) -> Pair:
    """Keys and values from these places, `[key head channel]`."""
    return cache[0][page, :, offset], cache[1][page, :, offset]


def draw(logits: Tensor, board: Board, support: Support, greedy: bool) -> None:
    """The next token of every row by the rule of draw.py, and what follows from it: output, state, done."""
    lanes = board.lanes[: logits.shape[0]]
    t, before, done = board.state[LENGTH, lanes], board.state[LAST, lanes], board.state[DONE, lanes]
    z = (logits if logits.dtype == torch.float64 else logits.float()) / board.temperature
    u = None if greedy else uniform(board.state[SEED, lanes], t)
    barred = None
    if support.min_tokens:
        barred = (t < support.min_tokens, torch.where(board.ends < 0, board.ends[0], board.ends))
    token, logp, mass = draw_tokens(z, 1.0, Support() if greedy else support, u, barred)
    on, given = done == 0, t < board.state[GIVEN, lanes]
    token = torch.where(given, board.token[lanes, t], token)
    for into, new in ((board.token, token), (board.logp, logp.float()), (board.mass, mass)):
        if new is not None:
            into[lanes, t] = torch.where(on & ~given, new.to(into.dtype), into[lanes, t])
    over = (token[:, None] == board.ends).any(-1) | (t + 1 >= board.limit)  # isin may sort, which no graph can hold
    over &= ~given
    board.state[LENGTH, lanes] = torch.where(on & ~over, t + 1, t)
    board.state[LAST, lanes] = torch.where(on, token, before)
    board.state[DONE, lanes] = torch.where(on & over, t + 1, done)


# ---- the model ------------------------------------------------------------------------------------


class Unlike(Exception):
    """This architecture is not Llama's like; says in what."""


@dataclass(frozen=True)
class Layer:
    qkv: Beside
    o: Beside
    gate_up: Beside
    down: Beside
    norm_attention: Norm
    norm_mlp: Norm
    norms_qk: tuple[Tensor, Tensor, float] | None
    scale: float


@dataclass(frozen=True)
class Llama:
    """The model's own parameters, queries, keys and values in one matrix, gate and up in another."""

    words: Lookup
    layers: list[Layer]
    norm: Norm
    head: Head
    heads: int
    channel: int
    rotary: Any

    @classmethod
    def of(cls, model: Any) -> Llama:
        """Describe a transformers model as it is now. Raises Unlike; else its matrices have been laid side by side.

        Parameters that change later are seen, but for adapters: these are copied here.
        """
        backbone, head = backbone_of(model), Head.of(model)
        if head.scale != 1.0 or head.cap is not None:
            raise Unlike("its logits are scaled or capped")
        try:
            kind = backbone.rotary_emb.rope_type
            channel = backbone.layers[0].self_attn.head_dim
            for layer in backbone.layers:
                _check(layer, channel)
            final = _norm(backbone.norm)
        except AttributeError as error:
            raise Unlike(f"its layers are built differently from Llama's: {error.name} is missing") from None
        if kind not in STEADY:
            raise Unlike(f"its rotary positions are {kind}")
        if type(taken_apart(model.get_input_embeddings())[0]) is not nn.Embedding:
            raise Unlike("its embedding of words does more than look them up")
        frozen = [p for name, p in model.named_parameters() if not is_adapter(name)]
        if len({p.dtype for p in frozen}) > 1 or len({p.device for p in model.parameters()}) > 1:
            raise Unlike("its parameters are of several types or on several devices")
        copies = Copies()
        layers = [_layer(layer, copies) for layer in backbone.layers]
        heads = backbone.layers[0].self_attn.k_proj.weight.shape[0] // channel
        words = lookup(model.get_input_embeddings(), copies)
        copies.make()
        return cls(words, layers, final, head, heads, channel, backbone.rotary_emb)

    @property
    def embedding(self) -> Tensor:
        return self.words.weight

    def tables(self, longest: int) -> Pair:
        """Cosines and sines `[position channel]`, rounded as the model rounds them."""
        like = self.embedding
        cos, sin = self.rotary(like, torch.arange(longest, device=like.device)[None])
        if cos.shape[-1] != self.channel:
            raise Unlike("only a part of its channels is rotated")
        return cos[0].contiguous(), sin[0].contiguous()

    def addresses(self) -> tuple[int, ...]:
        """Where the parameters lie: a captured graph is good for these alone."""
        parts: list[Any] = [*self.words, *self.norm, self.head.weight, self.head.bias]
        for layer in self.layers:
            parts += [*layer.qkv, *layer.o, *layer.gate_up, *layer.down]
            parts += [*layer.norm_attention, *layer.norm_mlp, *(layer.norms_qk or ())]
        return tuple(part.data_ptr() for part in parts if isinstance(part, Tensor))

    def hidden(self, ops: ModuleType, board: Board, tables: Pair, rows: int, splits: int = 1) -> Tensor:
        """The last hidden states after the next token of the first `rows` rows. Host and device never wait."""
        x = self.words(board.state[LAST][board.lanes[:rows]])
        x, h = ops.add_norm(x, None, *self.layers[0].norm_attention)
        norms = [layer.norm_attention for layer in self.layers[1:]] + [self.norm]
        for i, (layer, after) in enumerate(zip(self.layers, norms, strict=True)):
            turn = Turn(*tables, layer.norms_qk, layer.scale)
            mixed = ops.attend(layer.qkv(h, ops), turn, board, i, splits)
            x, h = ops.add_norm(x, layer.o(mixed, ops), *layer.norm_mlp)
            inner = ops.gated(layer.gate_up.base(h), layer.gate_up.b, layer.gate_up.ranks)
            x, h = ops.add_norm(x, layer.down(inner, ops), *after)
        return h


@dataclass(frozen=True)
class Prefill:
    """The same model over tokens that are given, packed into one row: `extend` takes it in place of the model itself.

    With few kernels, for the host launches each of them: a pass of the model takes it several times as long.
    """

    net: Llama
    ops: ModuleType
    tables: Pair

    @property
    def device(self) -> torch.device:
        return self.net.embedding.device

    def hidden(self, ids: Tensor, positions: Tensor, layout: Any) -> Tensor:
        """Hidden states `[1 token hidden]`. The layout writes keys and values to their pages, and attends to those."""
        net, ops = self.net, self.ops
        cos, sin = (table[positions[0]] for table in self.tables)
        x, h = ops.add_norm(net.words(ids[0]), None, *net.layers[0].norm_attention)
        norms = [layer.norm_attention for layer in net.layers[1:]] + [net.norm]
        for i, (layer, after) in enumerate(zip(net.layers, norms, strict=True)):
            qkv, pages = layer.qkv(h, ops), layout.cache.layers[i]
            if layer.norms_qk is not None:
                qkv = _norm_heads(qkv, layer.norms_qk, net.heads)
            q = ops.place_given(qkv, cos, sin, layout.page, layout.offset, pages)
            mixed = layout.mix(q, *ops.gather_keys(pages, *layout.seen), layer.scale)
            x, h = ops.add_norm(x, layer.o(mixed.flatten(1), ops), *layer.norm_mlp)
            inner = ops.gated(layer.gate_up.base(h), layer.gate_up.b, layer.gate_up.ranks)
            x, h = ops.add_norm(x, layer.down(inner, ops), *after)
        return h.unsqueeze(0)


def _norm_heads(qkv: Tensor, norms: tuple[Tensor, Tensor, float], shared: int) -> Tensor:
    """The same with each head of queries and keys normed."""
    parts = qkv.view(len(qkv), -1, len(norms[0]))
    *both, v = parts.split([parts.shape[1] - 2 * shared, shared, shared], 1)
    normed = [add_norm(part, None, weight, norms[2])[1] for part, weight in zip(both, norms[:2], strict=True)]
    return torch.cat([*normed, v], 1).flatten(1)


def _norm(module: Any) -> Norm:
    if getattr(module, "bias", None) is not None or getattr(module, "weight", None) is None:
        raise Unlike("its norms have a bias, or no weight")
    return module.weight, float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)


def _check(layer: Any, channel: int) -> None:
    """Raise Unlike, or AttributeError for a part that is missing."""
    attention, mlp = layer.self_attn, layer.mlp
    matrices = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    for module in (*matrices, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        if type(taken_apart(module)[0]) is not nn.Linear:
            raise Unlike("its matrices are quantized, or have adapters that are not LoRA's")
    for some in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
        if len({module.bias is None for module in some}) > 1:
            raise Unlike("some of the matrices that read the same states have a bias and some have none")
    if not isinstance(mlp.act_fn, nn.SiLU) and type(mlp.act_fn).__name__ != "SiLUActivation":
        raise Unlike("the activation of its MLPs is not SiLU")
    known = ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "gate_proj", "up_proj", "down_proj"]
    known += ["act_fn", "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]
    for parent in (layer, attention, mlp):
        for name, module in parent.named_children():
            if name not in known and any(True for _ in module.parameters()):
                raise Unlike(f"it has a part that Llama has not, {name}")
    _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
    if hasattr(attention, "q_norm") and attention.q_norm.weight.shape != (channel,):
        raise Unlike("its norms of queries and keys are not a head's")


def _layer(layer: Any, copies: Copies) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = None
    if hasattr(attention, "q_norm"):
        weight, eps = _norm(attention.q_norm)
        norms = (weight, _norm(attention.k_norm)[0], eps)
    return Layer(
        qkv=beside([attention.q_proj, attention.k_proj, attention.v_proj], copies),
        o=beside([attention.o_proj], copies),
        gate_up=beside([mlp.gate_proj, mlp.up_proj], copies),
        down=beside([mlp.down_proj], copies),
        norm_attention=_norm(layer.input_layernorm),
        norm_mlp=_norm(layer.post_attention_layernorm),
        norms_qk=norms,
        scale=float(attention.scaling),
    )

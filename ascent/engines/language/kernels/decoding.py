"""The kernels of a decoding step in Triton. sampling/step.py has them in plain torch and says what they compute.

Bytes decide: a step reads each cache once, the logits once and one block of them again. bfloat16 goes in, sums and
logits are float32, and the running sum that decides a token is float64, as in draw.py.
"""

# mypy: disallow-untyped-defs=False, disallow-any-generics=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascent.engines.language.kernels.products import (
    active,
    await_inputs,
    early,
    fetch,
    in_parts,
    tile_for,
    tiled_product,
)
from ascent.engines.language.sampling import step as formulas
from ascent.engines.language.sampling.cache import Pair
from ascent.engines.language.sampling.draw import Support
from ascent.engines.language.sampling.step import DONE, ENDS, GIVEN, KNOWN, LAST, LENGTH, PAGE, SEED, Board, Turn

BLOCK = 256
"""Logits whose sum is kept: draw.py looks first for the block and then for the token in it."""
TILE = 4096
"""Logits that one program of `_measure` reads."""
MOST_RANK = 128
"""Of adapters whose product a kernel adds; above it torch's own product does."""
FORMS = {None: 1, 0.0: 2, 1.0: 3}
"""How a norm is rounded and what is added to its weight (`Norm.add`), as numbers for the kernels. 0: no norm."""
HEADS, KEYS = 16, 32
"""Of tokens that are given: heads that one program turns, and keys that one brings together."""
MANY = 1000
"""Programs of the attention that fill the card, each with few keys at once."""


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, add: float | None = None) -> Pair:
    rows, width = x.shape
    normed, total = torch.empty_like(x, dtype=weight.dtype), x if y is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    warps = min(8, max(1, block // 256))
    apart, parts = (width, 0) if y is None else (y.stride(-2), len(y) if y.ndim == 3 else 1)
    how = {"BLOCK": block, "PARTS": parts, "FORM": FORMS[add], **early()}
    _add_norm[(rows,)](x, y, total, normed, weight, eps, width, apart, rows, **how, num_warps=warps)
    return total, normed


@triton.jit
def _add_norm(
    x, y, total, normed, weight, eps, width, apart, rows,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, FORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`apart`: from one row of y to the next. Several parts of y are added up and rounded first."""
    at, there = tl.program_id(0) * width, tl.program_id(0) * apart
    i = tl.arange(0, BLOCK)
    inside = i < width
    by = tl.load(weight + i, inside, other=0.0).to(tl.float32)
    await_inputs(EARLY)
    a = tl.load(x + at + i, inside, other=0.0)
    if PARTS:
        more = tl.load(y + there + i, inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            more += tl.load(y + part * rows * apart + there + i, inside, other=0.0)
        if PARTS > 1:
            more = more.to(normed.dtype.element_ty).to(tl.float32)
        a = (a.to(tl.float32) + more).to(a.dtype)
        tl.store(total + at + i, a, inside)
    wide = a.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide) / width + eps)
    tl.store(normed + at + i, _times(scaled, by, a.dtype, FORM).to(normed.dtype.element_ty), inside)


@triton.jit
def _times(normed, weight, dtype: tl.constexpr, FORM: tl.constexpr):
    """What is normed, times its weight, in one of the FORMS."""
    if FORM == 1:
        normed = normed.to(dtype).to(tl.float32)
    if FORM == 3:
        weight += 1.0
    return normed * weight


def adapted(whole: Tensor, b: Tensor) -> Tensor:
    (rows, apart), (out, rank) = whole.shape, b.shape
    if rank > MOST_RANK:
        return formulas.adapted(whole, b)
    grid = triton.cdiv(rows, 64), triton.cdiv(out, 64)
    how = {"RANK": max(16, triton.next_power_of_2(rank)), "ROWS": 64, "WIDTH": 64, **early()}
    _adapted[grid](whole, b, rows, out, apart, rank, **how)
    return whole[:, :out]


@triton.jit
def _adapted(
    whole, b, rows, out, apart, rank, RANK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    line = whole + row[:, None] * apart
    inside = (row < rows)[:, None] & (i < out)[None, :]
    more = _low_rank(line + out, b + i[:, None] * rank, row < rows, i < out, rank, RANK)
    base = tl.load(line + i[None, :], inside, other=0.0)
    tl.store(line + i[None, :], (base.to(tl.float32) + more).to(base.dtype), inside)


@triton.jit
def _low_rank(h, b, there, inside, rank, RANK: tl.constexpr):
    """h·Bᵀ for these rows of h and of B, over this many columns."""
    r = tl.arange(0, RANK)
    left = tl.load(h + r[None, :], there[:, None] & (r < rank)[None, :], other=0.0)
    right = tl.load(b + r[None, :], inside[:, None] & (r < rank)[None, :], other=0.0)
    return tl.dot(left, tl.trans(right), input_precision="ieee")


def short_product(x: Tensor, weight: Tensor, bias: Tensor | None, parts: bool = False) -> Tensor:
    """With `parts`, what is to be added up, where that is faster: float32 `[part row column]`; `add_norm` takes it."""
    x = x.to(weight.dtype)
    tile = tile_for(x, weight, parts=parts)
    if tile is not None:
        return tiled_product(x, weight, bias, tile)
    split = in_parts(x, weight) if parts and bias is None else None
    return formulas.linear(x, weight, bias) if split is None else split


def gated_product(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    x = x.to(weight.dtype)
    tile = tile_for(x, weight, gate=True)
    if tile is None:
        return gated(formulas.linear(x, weight, bias), gelu=gelu)
    return tiled_product(x, weight, bias, tile, "gelu" if gelu else "silu")


linear, gated_linear = short_product, gated_product


def gated(both: Tensor, b: Tensor | None = None, ranks: tuple[int, ...] = (), gelu: bool = False) -> Tensor:
    rows, apart = both.shape
    width = (apart if b is None else len(b)) // 2
    out = both.new_empty(rows, width)
    if b is None:
        _gated[(rows, triton.cdiv(width, 1024))](both, out, width, BLOCK=1024, GELU=gelu, **early())
    elif b.shape[1] > MOST_RANK:
        return gated(formulas.adapted(both, b).contiguous(), gelu=gelu)
    else:
        most = max(16, triton.next_power_of_2(max(ranks)))
        _gated_adapted[(triton.cdiv(rows, 16), triton.cdiv(width, 128))](
            *(both, out, b, rows, width, apart, *ranks, b.shape[1]),
            **{"RANK": most, "ROWS": 16, "WIDTH": 128, "GELU": gelu},
            **early(),
        )
    return out


@triton.jit
def _gated(both, out, width, BLOCK: tl.constexpr, GELU: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    await_inputs(EARLY)
    gate = tl.load(both + row * 2 * width + i, inside, other=0.0)
    up = tl.load(both + row * 2 * width + width + i, inside, other=0.0)
    tl.store(out + row * width + i, active(gate, up, GELU), inside)


@triton.jit
def _gated_adapted(
    both, out, b, rows, width, apart, of_gate, of_up, rank,
    RANK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, GELU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`of_gate` and `of_up`: columns of h that are the gate's, and after them those of up."""
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    line = both + row[:, None] * apart
    there, inside = row < rows, i < width
    gate = tl.load(line + i[None, :], there[:, None] & inside[None, :], other=0.0)
    up = tl.load(line + width + i[None, :], there[:, None] & inside[None, :], other=0.0)
    h, b_gate = line + 2 * width, b + i[:, None] * rank
    gate = (gate.to(tl.float32) + _low_rank(h, b_gate, there, inside, of_gate, RANK)).to(gate.dtype)
    b_up = b_gate + width * rank + of_gate
    up = (up.to(tl.float32) + _low_rank(h + of_gate, b_up, there, inside, of_up, RANK)).to(gate.dtype)
    tl.store(out + row[:, None] * width + i[None, :], active(gate, up, GELU), there[:, None] & inside[None, :])


# ---- tokens that are given ------------------------------------------------------------------------


def turn_and_place(qkv: Tensor, cos: Tensor, sin: Tensor, page: Tensor, offset: Tensor, cache: Pair) -> Tensor:
    keys, values = cache
    _, shared, size, channel = keys.shape
    tokens, heads = len(qkv), qkv.shape[1] // channel - 2 * shared
    q = qkv.new_empty(tokens, heads, channel)
    _place[(tokens, triton.cdiv(heads + 2 * shared, HEADS))](
        *(qkv, cos, sin, page, offset, keys, values, q, heads, qkv.stride(0)),
        SHARED=shared,
        SIZE=size,
        HALF=channel // 2,
        WIDE=triton.next_power_of_2(channel // 2),
        HEADS=HEADS,
        **early(),
        num_warps=2,
    )
    return q


@triton.jit
def _place(
    qkv, cos, sin, page, offset, keys, values, q, heads, apart,
    SHARED: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    c = tl.arange(0, WIDE)
    turned, real = heads + SHARED, c < HALF
    inside = (h < turned + SHARED)[:, None] & real[None, :]
    line = qkv + token * apart + h[:, None] * 2 * HALF + c[None, :]
    a, b = tl.load(line, inside, other=0.0), tl.load(line + HALF, inside, other=0.0)
    angle = token * 2 * HALF + c
    cos_a, cos_b = tl.load(cos + angle, real, other=0.0), tl.load(cos + angle + HALF, real, other=0.0)
    sin_a, sin_b = tl.load(sin + angle, real, other=0.0), tl.load(sin + angle + HALF, real, other=0.0)
    x, y = a.to(tl.float32), b.to(tl.float32)
    first = (x * cos_a.to(tl.float32)[None, :] - y * sin_a.to(tl.float32)[None, :]).to(a.dtype)
    second = (y * cos_b.to(tl.float32)[None, :] + x * sin_b.to(tl.float32)[None, :]).to(a.dtype)
    is_query = (h < heads)[:, None] & inside
    to = q + (token * heads + h[:, None]) * 2 * HALF + c[None, :]
    tl.store(to, first, is_query)
    tl.store(to + HALF, second, is_query)
    where = tl.load(page + token) * SHARED
    at = tl.load(offset + token)
    is_key = ((h >= heads) & (h < turned))[:, None] & inside
    to = keys + ((where + h[:, None] - heads) * SIZE + at) * 2 * HALF + c[None, :]
    tl.store(to, first, is_key)
    tl.store(to + HALF, second, is_key)
    is_value = (h >= turned)[:, None] & inside
    to = values + ((where + h[:, None] - turned) * SIZE + at) * 2 * HALF + c[None, :]
    tl.store(to, a, is_value)
    tl.store(to + HALF, b, is_value)


def bring_together(cache: Pair, page: Tensor, offset: Tensor) -> Pair:
    keys, values = cache
    _, shared, size, channel = keys.shape
    k, v = (keys.new_empty(len(page), shared, channel) for _ in range(2))
    _collect[(triton.cdiv(len(page), KEYS), shared)](
        *(keys, values, page, offset, k, v, len(page)),
        SHARED=shared,
        SIZE=size,
        D=channel,
        WIDE=triton.next_power_of_2(channel),
        KEYS=KEYS,
        **early(),
    )
    return k, v


@triton.jit
def _collect(
    keys, values, page, offset, k, v, count,
    SHARED: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    i = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    head = tl.program_id(1)
    c = tl.arange(0, WIDE)
    there = i < count
    where = (tl.load(page + i, there, other=0) * SHARED + head) * SIZE + tl.load(offset + i, there, other=0)
    line, inside = where[:, None] * D + c[None, :], _channels(there, D, WIDE)
    to = (i[:, None] * SHARED + head) * D + c[None, :]
    tl.store(k + to, tl.load(keys + line, inside, other=0.0), inside)
    tl.store(v + to, tl.load(values + line, inside, other=0.0), inside)


place_given, gather_keys = turn_and_place, bring_together


# ---- attention ------------------------------------------------------------------------------------


def attend(qkv: Tensor, turn: Turn, board: Board, layer: int, splits: int = 1) -> Tensor:
    rows, channel = qkv.shape[0], turn.cos.shape[1]
    keys, values = board.cache.layers[layer]
    shared = keys.shape[1]
    heads = qkv.shape[1] // channel - 2 * shared
    (q_weight, eps, add), (k_weight, *_) = turn.norms or ((qkv, 0.0, None),) * 2
    out = qkv.new_empty(rows, heads * channel)
    parts, sums = out, out
    if splits > 1:
        parts = torch.empty(rows, heads, splits, channel, device=qkv.device)
        sums = torch.empty(rows, heads, splits, 2, device=qkv.device)
    keys_at_once, warps, stages, ahead = attend_tile(rows * shared, channel, splits)
    _attend[(rows, shared, splits)](
        *(qkv, out, parts, sums, turn.cos, turn.sin, q_weight, k_weight, keys, values),
        *(board.state, board.lanes, board.table, board.chunk, board.arrived),
        *(qkv.stride(0), board.state.shape[1], board.table.shape[1], eps, turn.scale * 1.4426950408889634),
        SHARED=shared,
        REPEAT=heads // shared,
        ROWS=max(16, triton.next_power_of_2(heads // shared)),
        D=channel,
        WIDE=max(16, triton.next_power_of_2(channel)),
        PAGE=PAGE,
        SPLITS=splits,
        KNOWN=KNOWN,
        LENGTH=LENGTH,
        NORMED=0 if turn.norms is None else FORMS[add],
        KEYS=keys_at_once,
        AHEAD=ahead,
        FETCHES=32 * warps,
        **early(),
        num_warps=warps,
        num_stages=stages,
    )
    return out


def attend_tile(programs: int, channel: int, splits: int) -> tuple[int, int, int, int]:
    """Keys that a program of the attention reads at once, its warps, its stages, and pages that it asks for early."""
    ahead = 1 if channel % 8 == 0 else 0
    if splits > 1 or channel > 128:
        return PAGE, 4, 5 if channel <= 128 else 3, 0
    if channel > 64:
        return PAGE // 2 if programs >= MANY else PAGE, 2, 3, ahead
    return (PAGE // 2, 1, 3, ahead) if programs >= MANY else (PAGE, 1, 5, ahead)


@triton.jit
def _attend(
    qkv, out, parts, sums, cos, sin, q_weight, k_weight, keys, values, state, lanes, table, chunk, arrived,
    apart, lane_count, width, eps, scale,
    SHARED: tl.constexpr, REPEAT: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, KNOWN: tl.constexpr, LENGTH: tl.constexpr, NORMED: tl.constexpr,
    KEYS: tl.constexpr, AHEAD: tl.constexpr, FETCHES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row, key-value head and part of the row, for all the query heads that share the key-value head.

    The softmax runs along the pages. Places count from the first page on: a prompt's last page may be half empty, and
    own tokens begin on a page of their own. The last part of a row also has its new token. Of a row in several parts,
    the program that is done last joins them.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane = tl.load(lanes + row)
    known = tl.load(state + KNOWN * lane_count + lane).to(tl.int32)
    length = tl.load(state + LENGTH * lane_count + lane).to(tl.int32)
    own = (known + PAGE - 1) // PAGE * PAGE
    first, end, last, count = 0, own + length, True, 1
    if SPLITS > 1:
        size = tl.load(chunk)
        count = tl.maximum((end + size - 1) // size, 1)
        if part >= count:
            return
        first, last = part * size, part == count - 1
        end = tl.minimum(end, first + size)
    c, r = tl.arange(0, WIDE), tl.arange(0, ROWS)
    angle, real = (known + length) * D + c, c < D
    turn_cos, turn_sin = tl.load(cos + angle, real, other=0.0), tl.load(sin + angle, real, other=0.0)
    line, pages = qkv + row * apart, table + lane * width
    if EARLY and AHEAD:
        _fetch_pages(pages, keys, values, first, end, head, SHARED, PAGE, D, AHEAD, FETCHES)
    await_inputs(EARLY)
    q = _rotated(line + (head * REPEAT + r) * D, r < REPEAT, q_weight, eps, turn_cos, turn_sin, D, WIDE, NORMED)
    top, total, mixed = _nothing(ROWS, WIDE)
    if last:
        page = tl.load(pages + (own + length) // PAGE).to(tl.int64)
        new, at = line + (SHARED * REPEAT + head) * D, ((page * SHARED + head) * PAGE + length % PAGE) * D
        top, v = _newest(q, new, keys + at, values + at, k_weight, eps, turn_cos, turn_sin, SHARED, D, WIDE, NORMED)
        top, total, mixed = top * scale, total + 1.0, mixed + v
    seen = (pages, keys, values, first, end, known, own, head, scale)
    top, total, mixed = _along(q, seen, top, total, mixed, SHARED, D, WIDE, PAGE, KEYS)
    mine, inside = (row * SHARED + head) * REPEAT + r, r < REPEAT
    if SPLITS > 1:  # noqa: SIM102 (the first is decided when this is compiled)
        if count > 1:
            at = mine * SPLITS + part
            tl.store(parts + at[:, None] * D + c[None, :], mixed, _channels(inside, D, WIDE))
            tl.store(sums + at * 2, top, inside)
            tl.store(sums + at * 2 + 1, total, inside)
            tl.debug_barrier()
            if tl.atomic_add(arrived + row * SHARED + head, 1) < count - 1:
                return
            tl.store(arrived + row * SHARED + head, 0)
            total, mixed = _joined(parts, sums, mine * SPLITS, inside, count, SPLITS, ROWS, D, WIDE)
    tl.store(out + mine[:, None] * D + c[None, :], (mixed / total[:, None]).to(q.dtype), _channels(inside, D, WIDE))


@triton.jit
def _newest(
    q, new, key, value, weight, eps, cos, sin,
    SHARED: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """The new token's key, turned, and its value join their page; the queries' scores of it, and the value."""
    one, c = tl.arange(0, 1), tl.arange(0, WIDE)
    there = _channels(one < 1, D, WIDE)
    k = _rotated(new + one, one < 1, weight, eps, cos, sin, D, WIDE, NORMED)
    v = tl.load(new + SHARED * D + c, c < D, other=0.0)[None, :]
    tl.store(key + c[None, :], k, there)
    tl.store(value + c[None, :], v, there)
    return tl.sum(q.to(tl.float32) * k.to(tl.float32), 1), v.to(tl.float32)


@triton.jit
def _fetch_pages(
    pages, keys, values, first, end, head,
    SHARED: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, AHEAD: tl.constexpr, FETCHES: tl.constexpr,
):  # fmt: skip
    """Ask for the first pages of those that are read, in as many pieces as there are threads."""
    PIECES: tl.constexpr = FETCHES // AHEAD
    SIZE: tl.constexpr = PAGE * D
    f = tl.arange(0, FETCHES)
    which = tl.minimum(first // PAGE + f // PIECES, tl.maximum(end - 1, 0) // PAGE)
    page = tl.load(pages + which).to(tl.int64)
    at = (page * SHARED + head) * SIZE + f % PIECES * (SIZE // PIECES)
    size = tl.zeros_like(f) + SIZE // PIECES * (keys.dtype.element_ty.primitive_bitwidth // 8)
    fetch(keys + at, size)
    fetch(values + at, size)


@triton.jit
def _channels(inside, D: tl.constexpr, WIDE: tl.constexpr):
    """Which places of `[row WIDE]` there are: of a row that is inside, the first D; a kernel counts in powers of 2."""
    if D == WIDE:
        return inside[:, None]
    else:
        return inside[:, None] & (tl.arange(0, WIDE) < D)[None, :]


@triton.jit
def _nothing(ROWS: tl.constexpr, WIDE: tl.constexpr):
    """A softmax over no keys: its largest score, its sum, the mixed values."""
    return tl.full((ROWS,), -1e30, tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, WIDE), tl.float32)


@triton.jit
def _joined(
    parts, sums, first, inside, count, SPLITS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The parts of a row, weighed by their sums. Reads that do not wait for each other are under way together."""
    c, s, real = tl.arange(0, WIDE), tl.arange(0, SPLITS), _channels(inside, D, WIDE)
    at, there = (first[:, None] + s[None, :]) * 2, inside[:, None] & (s < count)[None, :]
    tops = tl.load(sums + at, there, other=-1e30, cache_modifier=".cg")
    totals = tl.load(sums + at + 1, there, other=0.0, cache_modifier=".cg")
    top, _, mixed = _nothing(ROWS, WIDE)
    top = tl.maximum(top, tl.max(tops, 1))
    for start in range(0, count, 4):
        for i in tl.static_range(4):
            one, more = first + start + i, start + i < count
            by = tl.exp2(tl.load(sums + one * 2, inside & more, other=-1e30, cache_modifier=".cg") - top)
            mine = tl.load(parts + one[:, None] * D + c[None, :], real & more, other=0.0, cache_modifier=".cg")
            mixed += by[:, None] * mine
    return tl.sum(totals * tl.exp2(tops - top[:, None]), 1), mixed


@triton.jit
def _along(
    q, seen, top, total, mixed,
    SHARED: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A softmax in powers of 2, continued along the pages."""
    pages, keys, values, first, end, known, own, head, scale = seen
    c = tl.arange(0, WIDE)
    for start in range(first, end, KEYS):
        n = start + tl.arange(0, KEYS)
        inside = tl.where(n < own, n < known, n < end)
        page = tl.load(pages + start // PAGE).to(tl.int64)
        at = ((page * SHARED + head) * PAGE + start % PAGE + tl.arange(0, KEYS))[:, None] * D + c[None, :]
        real = _channels(inside, D, WIDE)
        k, v = tl.load(keys + at, real, other=0.0), tl.load(values + at, real, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        now = tl.maximum(top, tl.max(scores, 1))
        p, faded = tl.exp2(scores - now[:, None]), tl.exp2(top - now)
        mixed = mixed * faded[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total = total * faded + tl.sum(p, 1)
        top = now
    return top, total, mixed


@triton.jit
def _rotated(at, inside, weight, eps, cos, sin, D: tl.constexpr, WIDE: tl.constexpr, NORMED: tl.constexpr):
    """Vectors at these places, normed where asked, and turned: x·cos + (−second half, first half)·sin."""
    c = tl.arange(0, WIDE)
    other, real = (c + D // 2) % D, _channels(inside, D, WIDE)
    x = tl.load(at[:, None] + c[None, :], real, other=0.0)
    y = tl.load(at[:, None] + other[None, :], real, other=0.0)
    dtype = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if NORMED:
        by = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        own = tl.load(weight + c, c < D, other=0.0)[None, :].to(tl.float32)
        x = _times(x * by, own, dtype, NORMED).to(dtype).to(tl.float32)
        y = _times(y * by, tl.load(weight + other)[None, :].to(tl.float32), dtype, NORMED).to(dtype).to(tl.float32)
    cos, sin = cos.to(tl.float32)[None, :], sin.to(tl.float32)[None, :]
    return (x * cos + tl.where(c[None, :] < D // 2, -y, y) * sin).to(dtype)


# ---- drawing --------------------------------------------------------------------------------------


def draw(logits: Tensor, board: Board, support: Support, greedy: bool) -> None:
    if support.min_tokens or not (support.whole or greedy):
        formulas.draw(logits, board, support, greedy)
        return
    rows, vocab = logits.shape
    tiles = triton.cdiv(vocab, TILE)
    per = TILE // BLOCK
    tops = torch.empty(rows, tiles, device=logits.device)
    sums = torch.empty(rows, tiles * per, device=logits.device)
    _measure[(rows, tiles)](logits, board.temperature, tops, sums, vocab, tiles, PER=per, BLOCK=BLOCK, **early())
    _draw[(rows,)](
        *(logits, tops, sums, board.temperature, board.state, board.lanes, board.token, board.logp),
        *(board.ends, board.limit, vocab, tiles, board.state.shape[1], board.token.shape[1]),
        PER=per,
        BLOCK=BLOCK,
        TILES=triton.next_power_of_2(tiles),
        GREEDY=greedy,
        ENDS=ENDS,
        L=LENGTH,
        LAST=LAST,
        SEED=SEED,
        DONE=DONE,
        GIVEN=GIVEN,
        **early(),
    )


@triton.jit
def _measure(
    logits, temperature, tops, sums, vocab, tiles, PER: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Of a tile of a row's logits z: the largest, m, and of each block in it Σ e^(z − m)."""
    await_inputs(EARLY)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block = tile * PER + tl.arange(0, PER)
    i = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    z = tl.load(logits + row * vocab + i, i < vocab, other=float("-inf")).to(tl.float32)
    z = z / tl.load(temperature).to(tl.float32)
    top = tl.max(z)
    tl.store(tops + row * tiles + tile, top)
    tl.store(sums + row * tiles * PER + block, tl.sum(tl.exp(z - top), 1))


@triton.jit
def _draw(
    logits, tops, sums, temperature, state, lanes, token_out, logp_out, ends, limit, vocab, tiles, lane_count, room,
    PER: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, GREEDY: tl.constexpr, ENDS: tl.constexpr,
    L: tl.constexpr, LAST: tl.constexpr, SEED: tl.constexpr, DONE: tl.constexpr, GIVEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A row's token from the sums of its blocks and one block of logits; then its output and state."""
    await_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(lanes + row)
    t, done = tl.load(state + L * lane_count + lane), tl.load(state + DONE * lane_count + lane)
    cooling = tl.load(temperature).to(tl.float32)
    tile, per = tl.arange(0, TILES), tl.arange(0, PER)
    peaks = tl.load(tops + row * tiles + tile, tile < tiles, other=float("-inf"))
    top = tl.max(peaks)
    block = tile[:, None] * PER + per[None, :]
    part = tl.load(sums + row * tiles * PER + block, block < tiles * PER, other=0.0) * tl.exp(peaks - top)[:, None]
    total = tl.sum(part)
    if GREEDY:
        first = tl.min(tl.where(peaks == top, tile, TILES))
        i = first * PER * BLOCK + tl.arange(0, PER * BLOCK)
        z = tl.load(logits + row * vocab + i, i < vocab, other=float("-inf")).to(tl.float32) / cooling
        token = tl.min(tl.where(z == top, i, vocab)).to(tl.int64)
        chosen = top
    else:
        seed = tl.load(state + SEED * lane_count + lane)
        token, chosen = _invert(logits + row * vocab, part, top, seed, t, vocab, cooling, PER, BLOCK, TILES)
    on, given = done == 0, t < tl.load(state + GIVEN * lane_count + lane)
    token = tl.where(given, tl.load(token_out + lane * room + t), token)
    end = tl.max((tl.load(ends + tl.arange(0, ENDS)) == token).to(tl.int32)) > 0
    over = (end | (t + 1 >= tl.load(limit))) & (given == 0)
    tl.store(token_out + lane * room + t, token, on)
    tl.store(logp_out + lane * room + t, chosen - (top + tl.log(total)), on & (given == 0))
    tl.store(state + LAST * lane_count + lane, token, on)
    tl.store(state + L * lane_count + lane, t + 1, on & (over == 0))
    tl.store(state + DONE * lane_count + lane, t + 1, on & over)


@triton.jit
def _invert(logits, part, top, seed, t, vocab, cooling, PER: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """The first token at which the running sum of e^(z − top) exceeds u times its total, and its z."""
    sums = tl.cumsum(tl.reshape(part, (TILES * PER,)).to(tl.float64), 0)
    point = _uniform(seed, t) * tl.max(sums) * 0.999999999999
    at = tl.arange(0, TILES * PER)
    which = tl.minimum(tl.sum((sums <= point).to(tl.int32)), (vocab - 1) // BLOCK)
    before = tl.sum(tl.where(at == which - 1, sums, 0.0))
    i = tl.arange(0, BLOCK)
    z = tl.load(logits + which * BLOCK + i, which * BLOCK + i < vocab, other=float("-inf")).to(tl.float32) / cooling
    p = tl.exp(z - top)
    place = tl.sum((before + tl.cumsum(p.to(tl.float64), 0) <= point).to(tl.int32))
    first, last = tl.min(tl.where(p > 0, i, BLOCK)), tl.max(tl.where(p > 0, i, -1))
    place = tl.minimum(tl.maximum(place, first), last)
    return (which * BLOCK + place).to(tl.int64), tl.sum(tl.where(i == place, z, 0.0))


@triton.jit
def _uniform(seed, t):
    """splitmix64, as in draw.py."""
    x = seed + (t + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16

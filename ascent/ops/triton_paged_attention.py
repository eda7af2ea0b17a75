"""Attention of one new token per row over the pages of its cache, in Triton: `attend` in sampling/step.py.

Bytes decide, as long as enough reads are under way at once: programs are small, so that many of them run on each
multiprocessor. Where rows are long or uneven they are cut into parts of at most so many keys (`cut_rows`). A program
reads one part, the longest come first, and the program that is done last with a row joins its parts.
"""

# mypy: disallow-untyped-defs=False, disallow-any-generics=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascent.ops.decode_ops import AttentionParams
from ascent.ops.decode_state import BLOCK_SIZE, PROMPT_LENGTH, RESPONSE_LENGTH, DecodeState
from ascent.ops.triton_matmul import PLACES, await_inputs, early, fetch
from ascent.ops.triton_norms import FORMS, times

MANY = 1000
"""Programs that fill the card, each with few keys at once."""
LEAST = 256
"""The fewest keys in a part: to join more of them takes longer than to read them."""
FIELDS = 8
"""What is said of a part: its row, the lane, keys of the prompt, own tokens; which part of the row it is, how many the
row has, how many those before it have; and the keys in a part. A row of −1: there is no such part."""


def cut_rows(board: DecodeState, rows: int, least: int = LEAST, spread: int | None = None) -> Tensor:
    """Int32 `[part FIELDS]`, the same in all layers of a step.

    Parts have at least so many keys. Besides one of each row there are as many as run at once, or as `spread` says.
    """
    width, device = board.block_tables.shape[1], board.block_tables.device
    keys = board.cache.layers[0][0]
    shared, key = keys.shape[1], keys.shape[3] * keys.element_size()
    spread = min(spread or part_tile(rows * shared, key)[3] * PLACES // shared, rows * width)
    table = torch.empty(spread + rows, FIELDS, dtype=torch.int32, device=device)
    _cut_rows[(rows,)](
        *(board.state, board.batch_indices, table, board.state.shape[1], rows, spread, least),
        ROWS=triton.next_power_of_2(rows),
        BLOCK_SIZE=BLOCK_SIZE,
        PROMPT_LENGTH=PROMPT_LENGTH,
        RESPONSE_LENGTH=RESPONSE_LENGTH,
        FIELDS=FIELDS,
        **early(),
    )
    return table


@triton.jit
def _cut_rows(
    state, lanes, table, lane_count, rows, spread, least,
    ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PROMPT_LENGTH: tl.constexpr, RESPONSE_LENGTH: tl.constexpr,
    FIELDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row. The full parts of all rows come first, then the last part of each row, the longest first."""
    await_inputs(EARLY)
    row, i, f = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, FIELDS)
    lane = tl.load(lanes + i, i < rows, other=0)
    known = tl.load(state + PROMPT_LENGTH * lane_count + lane, i < rows, other=0).to(tl.int32)
    length = tl.load(state + RESPONSE_LENGTH * lane_count + lane, i < rows, other=0).to(tl.int32)
    end = (known + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE + length
    size = tl.maximum((tl.sum(end) + spread * BLOCK_SIZE - 1) // (spread * BLOCK_SIZE) * BLOCK_SIZE, least)
    full = tl.maximum(end - 1, 0) // size
    before = tl.sum(tl.where(i < row, full, 0))
    mine, every = tl.sum(tl.where(i == row, full, 0)), tl.sum(full)
    rest = tl.where(i < rows, end - full * size, -1)
    own = tl.sum(tl.where(i == row, rest, 0))
    longer = tl.sum(((rest > own) | ((rest == own) & (i < row))).to(tl.int32))
    lane = tl.load(lanes + row)
    known = tl.load(state + PROMPT_LENGTH * lane_count + lane).to(tl.int32)
    length = tl.load(state + RESPONSE_LENGTH * lane_count + lane).to(tl.int32)
    values = tl.where(f == 0, row, tl.where(f == 1, lane.to(tl.int32), tl.where(f == 2, known, length)))
    values = tl.where(f == 5, mine + 1, tl.where(f == 6, before + row, tl.where(f == 7, size, values)))
    for part in range(0, mine):
        tl.store(table + (before + part) * FIELDS + f, tl.where(f == 4, part, values))
    tl.store(table + (every + longer) * FIELDS + f, tl.where(f == 4, mine, values))
    for none in range(every + rows + row, spread + rows, rows):
        tl.store(table + none * FIELDS + f, tl.zeros_like(f) - 1)


def attend_pages(
    qkv: Tensor, turn: AttentionParams, board: DecodeState, layer: int, parts: Tensor | None = None
) -> Tensor:
    rows, channel = qkv.shape[0], turn.cos.shape[1]
    cache = board.cache.layers[layer]
    shared = cache[0].shape[1]
    heads = qkv.shape[1] // channel - 2 * shared
    (q_weight, eps, weight_offset), (k_weight, *_) = turn.qk_norms or ((qkv, 0.0, None),) * 2
    out = qkv.new_empty(rows, heads * channel)
    tile = (row_tile, part_tile)[parts is not None](rows * shared, channel * qkv.element_size())
    keys_at_once, warps, stages, ahead = tile
    about = (turn.cos, turn.sin, q_weight, k_weight, *cache)
    numbers = (qkv.stride(0), board.block_tables.shape[1], eps, turn.scale * 1.4426950408889634)
    how: dict[str, Any] = {
        "SHARED": shared,
        "REPEAT": heads // shared,
        "ROWS": max(16, triton.next_power_of_2(heads // shared)),
        "D": channel,
        "WIDE": max(16, triton.next_power_of_2(channel)),
        "PAGE": BLOCK_SIZE,
        "NORMED": 0 if turn.qk_norms is None else FORMS[weight_offset],
        "KEYS": keys_at_once,
        **early(),
        "num_warps": warps,
        "num_stages": stages,
    }
    if parts is None:
        static = {"KNOWN": PROMPT_LENGTH, "LENGTH": RESPONSE_LENGTH, "AHEAD": ahead, "FETCHES": 32 * warps}
        lanes = (board.state, board.batch_indices, board.block_tables, board.state.shape[1])
        _attend[(rows, shared)](qkv, out, *about, *lanes, *numbers, **static, **how)
        return out
    count = len(parts)
    found = torch.empty(count, heads, channel, device=qkv.device)
    sums = torch.empty(count, heads, 2, device=qkv.device)
    places = (board.block_tables, parts, board.finished_splits)
    _attend_parts[(shared, count)](qkv, out, found, sums, *about, *places, *numbers, FIELDS=FIELDS, **how)
    return out


def part_tile(programs: int, width: int) -> tuple[int, int, int, int]:
    """Keys, of so many bytes, that a program reads at once; its warps, stages, and how many run on a multiprocessor."""
    if width > 128:
        return (
            (BLOCK_SIZE // 2, 2, 5, 6)
            if programs >= MANY and width <= 256
            else (BLOCK_SIZE, 4, 3, 4 if width <= 256 else 2)
        )
    return (BLOCK_SIZE // 2, 1, 5, 12) if programs >= MANY else (BLOCK_SIZE, 1, 3, 8)


def row_tile(programs: int, width: int) -> tuple[int, int, int, int]:
    """The same of programs for whole rows; and in the end the pages that one asks for early."""
    ahead = 1 if width % 16 == 0 else 0
    if width > 256:
        return BLOCK_SIZE, 4, 3, 0
    if width > 128:
        return BLOCK_SIZE // 2 if programs >= MANY else BLOCK_SIZE, 2, 3, ahead
    return (BLOCK_SIZE // 2, 1, 3, ahead) if programs >= MANY else (BLOCK_SIZE, 1, 5, ahead)


@triton.jit
def _attend(
    qkv, out, cos, sin, q_weight, k_weight, keys, values, state, lanes, table, lane_count, apart, width, eps, scale,
    SHARED: tl.constexpr, REPEAT: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PROMPT_LENGTH: tl.constexpr, RESPONSE_LENGTH: tl.constexpr, NORMED: tl.constexpr,
    KEYS: tl.constexpr, AHEAD: tl.constexpr, FETCHES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per row and key-value head, for all the query heads that share the key-value head."""
    row, head = tl.program_id(0), tl.program_id(1)
    lane = tl.load(lanes + row)
    known = tl.load(state + PROMPT_LENGTH * lane_count + lane).to(tl.int32)
    length = tl.load(state + RESPONSE_LENGTH * lane_count + lane).to(tl.int32)
    turned = _angles(cos, sin, known + length, D, WIDE)
    end, pages = (known + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE + length, table + lane * width
    if EARLY and AHEAD:
        _fetch_pages(pages, keys, values, end, head, SHARED, BLOCK_SIZE, D, AHEAD, FETCHES)
    await_inputs(EARLY)
    line, about = qkv + row * apart, (q_weight, k_weight, eps, turned, keys, values, pages)
    _, total, mixed = _mixed(
        line, about, known, length, 0, end, True, head, scale, SHARED, REPEAT, ROWS, D, WIDE, BLOCK_SIZE, NORMED, KEYS
    )
    _write(out, row, mixed, total, head, SHARED, REPEAT, ROWS, D, WIDE)


@triton.jit
def _attend_parts(
    qkv, out, found, sums, cos, sin, q_weight, k_weight, keys, values, table, parts, arrived, apart, width, eps, scale,
    SHARED: tl.constexpr, REPEAT: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORMED: tl.constexpr, KEYS: tl.constexpr, FIELDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per key-value head and part of a row. The last part of a row also has its new token."""
    await_inputs(EARLY)
    head, one = tl.program_id(0), parts + tl.program_id(1) * FIELDS
    row, lane, known, length = tl.load(one), tl.load(one + 1), tl.load(one + 2), tl.load(one + 3)
    part, count, before, size = tl.load(one + 4), tl.load(one + 5), tl.load(one + 6), tl.load(one + 7)
    if row < 0:
        return
    turned = _angles(cos, sin, known + length, D, WIDE)
    first, end = part * size, (known + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE + length
    line, about = qkv + row * apart, (q_weight, k_weight, eps, turned, keys, values, table + lane * width)
    top, total, mixed = _mixed(
        line, about, known, length, first, tl.minimum(end, first + size), part == count - 1, head, scale,
        SHARED, REPEAT, ROWS, D, WIDE, BLOCK_SIZE, NORMED, KEYS,
    )  # fmt: skip
    if count > 1:
        c, r = tl.arange(0, WIDE), tl.arange(0, ROWS)
        inside = r < REPEAT
        slots = (before * SHARED + head) * REPEAT + r
        mine = slots + part * SHARED * REPEAT
        tl.store(found + mine[:, None] * D + c[None, :], mixed, channels(inside, D, WIDE))
        tl.store(sums + mine * 2, top, inside)
        tl.store(sums + mine * 2 + 1, total, inside)
        tl.debug_barrier()
        if tl.atomic_add(arrived + row * SHARED + head, 1) < count - 1:
            return
        tl.store(arrived + row * SHARED + head, 0)
        total, mixed = _joined(found, sums, slots, inside, count, SHARED * REPEAT, ROWS, D, WIDE)
    _write(out, row, mixed, total, head, SHARED, REPEAT, ROWS, D, WIDE)


@triton.jit
def _angles(cos, sin, position, D: tl.constexpr, WIDE: tl.constexpr):
    c = tl.arange(0, WIDE)
    return tl.load(cos + position * D + c, c < D, other=0.0), tl.load(sin + position * D + c, c < D, other=0.0)


@triton.jit
def _write(
    out, row, mixed, total, head,
    SHARED: tl.constexpr, REPEAT: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    c, r = tl.arange(0, WIDE), tl.arange(0, ROWS)
    to = out + ((row * SHARED + head) * REPEAT + r)[:, None] * D + c[None, :]
    tl.store(to, (mixed / total[:, None]).to(out.dtype.element_ty), channels(r < REPEAT, D, WIDE))


@triton.jit
def _mixed(
    line, about, known, length, first, end, last, head, scale,
    SHARED: tl.constexpr, REPEAT: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORMED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A row's softmax from one place to another: the largest score, the sum, the mixed values.

    Places count from the first page on: a prompt's last page may be half empty, and own tokens begin on a page of
    their own. The last part has the new token, too.
    """
    q_weight, k_weight, eps, turned, keys, values, pages = about
    r, own = tl.arange(0, ROWS), (known + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    q = _rotated(line + (head * REPEAT + r) * D, r < REPEAT, q_weight, eps, turned, D, WIDE, NORMED)
    top, total, mixed = _nothing(ROWS, WIDE)
    if last:
        page = tl.load(pages + (own + length) // BLOCK_SIZE).to(tl.int64)
        new, at = line + (SHARED * REPEAT + head) * D, ((page * SHARED + head) * BLOCK_SIZE + length % BLOCK_SIZE) * D
        top, v = _newest(q, new, keys + at, values + at, k_weight, eps, turned, SHARED, D, WIDE, NORMED)
        total, mixed = total + 1.0, mixed + v
    seen = (pages, keys, values, first, end, known, own, head, scale)
    return _along(q, seen, top, total, mixed, SHARED, D, WIDE, BLOCK_SIZE, ROWS, KEYS)


@triton.jit
def _newest(
    q, new, key, value, weight, eps, turned,
    SHARED: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """The new token's key, turned, and its value join their page; the queries' products with it, and the value."""
    one, c = tl.arange(0, 1), tl.arange(0, WIDE)
    there = channels(one < 1, D, WIDE)
    k = _rotated(new + one, one < 1, weight, eps, turned, D, WIDE, NORMED)
    v = tl.load(new + SHARED * D + c, c < D, other=0.0)[None, :]
    tl.store(key + c[None, :], k, there)
    tl.store(value + c[None, :], v, there)
    return tl.sum(q.to(tl.float32) * k.to(tl.float32), 1), v.to(tl.float32)


@triton.jit
def _fetch_pages(
    pages, keys, values, end, head,
    SHARED: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, AHEAD: tl.constexpr, FETCHES: tl.constexpr,
):  # fmt: skip
    """Ask for the first pages of those that are read, in as many pieces as there are threads."""
    PIECES: tl.constexpr = FETCHES // AHEAD
    SIZE: tl.constexpr = BLOCK_SIZE * D
    f = tl.arange(0, FETCHES)
    page = tl.load(pages + tl.minimum(f // PIECES, tl.maximum(end - 1, 0) // BLOCK_SIZE)).to(tl.int64)
    at = (page * SHARED + head) * SIZE + f % PIECES * (SIZE // PIECES)
    size = tl.zeros_like(f) + SIZE // PIECES * (keys.dtype.element_ty.primitive_bitwidth // 8)
    fetch(keys + at, size)
    fetch(values + at, size)


@triton.jit
def channels(inside, D: tl.constexpr, WIDE: tl.constexpr):
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
    found, sums, slots, inside, count, APART: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The parts of a row, weighed by their sums. Reads that do not wait for each other are under way together."""
    c, real = tl.arange(0, WIDE), channels(inside, D, WIDE)
    top, total, mixed = _nothing(ROWS, WIDE)
    for start in range(0, count, 4):
        for i in tl.static_range(4):
            one, more = slots + (start + i) * APART, inside & (start + i < count)
            peak = tl.load(sums + one * 2, more, other=-1e30, cache_modifier=".cg")
            part = tl.load(sums + one * 2 + 1, more, other=0.0, cache_modifier=".cg")
            mine = tl.load(
                found + one[:, None] * D + c[None, :], real & (start + i < count), other=0.0, cache_modifier=".cg"
            )
            now = tl.maximum(top, peak)
            by, faded = tl.exp2(peak - now), tl.exp2(top - now)
            mixed, total = mixed * faded[:, None] + by[:, None] * mine, total * faded + part * by
            top = now
    return total, mixed


@triton.jit
def _along(
    q, seen, top, total, mixed,
    SHARED: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """A softmax in powers of 2, continued along the pages; scores are scaled when their exponents are taken.

    A key that is no row's makes a score that is not used, whatever it is. But 0 times a value might not be 0. Sums are
    kept apart by the places of keys in a tile, and added up in the end.
    """
    pages, keys, values, first, end, known, own, head, scale = seen
    n, c = tl.arange(0, KEYS), tl.arange(0, WIDE)
    line, sums = n[:, None] * D + c[None, :], tl.zeros((ROWS, KEYS), tl.float32)
    for start in range(first, end, KEYS):
        inside = n < tl.where(start < own, known, end) - start
        page = tl.load(pages + start // BLOCK_SIZE).to(tl.int64)
        at = ((page * SHARED + head) * BLOCK_SIZE + start % BLOCK_SIZE) * D
        k = tl.load(keys + at + line) if D == WIDE else tl.load(keys + at + line, (c < D)[None, :], other=0.0)
        v = tl.load(values + at + line, channels(inside, D, WIDE), other=0.0)
        scores = tl.where(inside[None, :], tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
        now = tl.maximum(top, tl.max(scores, 1))
        p, faded = tl.exp2(scores * scale - (now * scale)[:, None]), tl.exp2((top - now) * scale)
        mixed = mixed * faded[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total, sums, top = total * faded, sums * faded[:, None] + p, now
    return top * scale, total + tl.sum(sums, 1), mixed


@triton.jit
def _rotated(at, inside, weight, eps, turned, D: tl.constexpr, WIDE: tl.constexpr, NORMED: tl.constexpr):
    """Vectors at these places, normed where asked, and turned: x·cos + (−second half, first half)·sin."""
    cos, sin = turned
    c = tl.arange(0, WIDE)
    other, real = (c + D // 2) % D, channels(inside, D, WIDE)
    x = tl.load(at[:, None] + c[None, :], real, other=0.0)
    y = tl.load(at[:, None] + other[None, :], real, other=0.0)
    dtype = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if NORMED:
        by = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        own = tl.load(weight + c, c < D, other=0.0)[None, :].to(tl.float32)
        x = times(x * by, own, dtype, NORMED).to(dtype).to(tl.float32)
        y = times(y * by, tl.load(weight + other)[None, :].to(tl.float32), dtype, NORMED).to(dtype).to(tl.float32)
    cos, sin = cos.to(tl.float32)[None, :], sin.to(tl.float32)[None, :]
    return (x * cos + tl.where(c[None, :] < D // 2, -y, y) * sin).to(dtype)

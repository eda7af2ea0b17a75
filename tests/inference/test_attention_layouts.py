"""Attention of a decoding step over pages: as over each row's keys, wherever these lie and whoever shares them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ascent.inference.attention_layouts import DecodeLayout
from ascent.inference.block_manager import BlockManager
from ascent.inference.sequence import Sequence
from ascent.ops.paged_kv_cache import PagedKVCache

SIZE, SHARED, REPEAT, CHANNEL, SCALE = 4, 2, 3, 8, 0.3
NEAR = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0.03}
WAYS = {
    "groups in order": ([(5, 4), (6, 4)], [[2, 2, 2, 2], [2, 2, 2, 2]], "order"),
    "the last pages first": ([(5, 4), (6, 4)], [[2, 2, 2, 2], [2, 2, 2, 2]], "reversed"),
    "groups of several sizes": ([(9, 3), (2, 1), (5, 2)], [[1, 2, 1], [7], [3, 3]], "order"),
    "rows of several lengths": ([(3, 3)], [[1, 6, 14]], "order"),
    "pages with holes": ([(7, 2), (11, 2)], [[9, 3], [5, 8]], "shuffled"),
    "pages far apart": ([(7, 2), (11, 2)], [[9, 3], [5, 8]], "apart"),
    "no prompt": ([(0, 2)], [[4, 3]], "order"),
    "one row": ([(4, 1)], [[4]], "order"),
    "many pages": ([(3, 2)], [[30, 9]], "order"),
    "many rows": ([(5, 18)], [[*range(2, 20)]], "order"),
}


def taken(how: str, count: int) -> list[int]:
    """This many pages of 200."""
    if how in ("order", "reversed"):
        return list(range(count))[:: 1 if how == "order" else -1]
    return torch.randperm(count + 2 if how == "shuffled" else 200, generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", WAYS)
def test_a_row_attends_to_its_prompt_and_its_own_tokens(name: str, dtype: torch.dtype) -> None:
    prompts, lengths, how = WAYS[name]
    need = [-(-keys // SIZE) for keys, _ in prompts]
    free = taken(how, sum(need) + sum(length // SIZE + 1 for group in lengths for length in group))
    schedule: Any = SimpleNamespace(prompt_blocks={}, prompt_lengths={p: keys for p, (keys, _) in enumerate(prompts)})
    rows: list[Sequence] = []
    for p, group in enumerate(lengths):
        for length in group:
            rows.append(Sequence(len(rows), p, length, [free.pop(0) for _ in range(length // SIZE + 1)]))
    for p, pages in enumerate(need):
        schedule.prompt_blocks[p] = [free.pop(0) for _ in range(pages)]
    torch.manual_seed(0)
    heads, cache = SHARED * REPEAT, PagedKVCache(200, SIZE)
    q, k, v = (torch.randn(len(rows), n, 1, CHANNEL).to(dtype) for n in (heads, SHARED, SHARED))
    for x in cache.layer_blocks(0, k, v):
        x.normal_()
    decoding = DecodeLayout(cache, torch.device("cpu"))
    decoding.set_sequences(rows, schedule)
    positions = decoding.begin_step(rows)
    got = decoding.attend(0, q, k, v, SCALE)
    for i, row in enumerate(rows):
        assert positions[i] == schedule.prompt_lengths[row.prompt_id] + row.num_tokens
        known = []
        for stored, new in zip(cache.layers[0], (k, v), strict=True):
            before = [stored[page, :, j] for page in schedule.prompt_blocks[row.prompt_id] for j in range(SIZE)]
            own = [stored[page, :, j] for page in row.block_table for j in range(SIZE)]
            known.append(
                torch.stack(
                    [*before[: schedule.prompt_lengths[row.prompt_id]], *own[: row.num_tokens], new[i, :, 0]]
                ).double()
            )
        for head in range(heads):
            ks, vs = (x[:, head // REPEAT] for x in known)
            want = torch.softmax(SCALE * (ks @ q[i, head, 0].double()), 0) @ vs
            assert torch.allclose(got[i, 0, head].double(), want, rtol=0, atol=NEAR[dtype])


@pytest.mark.parametrize("long", [6, 30])
def test_a_row_whose_numbers_overflow_spoils_no_other(long: int) -> None:
    """A row that has fewer pages than it gets nothing of them, not even 0 times infinity."""
    schedule: Any = SimpleNamespace(prompt_blocks={0: []}, prompt_lengths={0: 0})
    rows = [Sequence(0, 0, long, list(range(1 + long // SIZE))), Sequence(1, 0, 2, [1 + long // SIZE])]
    cache = PagedKVCache(200, SIZE)
    q, k, v = (torch.randn(2, n, 1, CHANNEL) for n in (SHARED * REPEAT, SHARED, SHARED))
    keys, values = cache.layer_blocks(0, k, v)
    keys.normal_(), values.normal_()
    values[rows[0].block_table] = math.inf
    decoding = DecodeLayout(cache, torch.device("cpu"))
    decoding.set_sequences(rows, schedule)
    decoding.begin_step(rows)
    got = decoding.attend(0, q, k, v, SCALE)
    assert not got[0].isfinite().any() and got[1].isfinite().all()


def test_prompts_take_pages_from_the_border_on_and_then_downwards() -> None:
    pages = BlockManager(8, SIZE, prompt_region=5)
    assert pages.allocate(2, high=True) == [5, 6]
    assert pages.allocate(3) == [0, 1, 2]
    assert pages.allocate(2, high=True) == [7, 4]
    pages.free([6])
    assert pages.allocate(2, high=True) == [6, 3]

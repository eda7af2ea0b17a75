"""Attention of a decode step over KV-cache blocks equals softmax attention over the keys of each sequence."""

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

BLOCK_SIZE, KV_HEADS, REPEAT, HEAD_DIM, SCALE = 4, 2, 3, 8, 0.3
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0.03}
LAYOUTS = {
    "in order": ([(5, 4), (6, 4)], [[2, 2, 2, 2], [2, 2, 2, 2]], "order"),
    "reversed": ([(5, 4), (6, 4)], [[2, 2, 2, 2], [2, 2, 2, 2]], "reversed"),
    "groups of several sizes": ([(9, 3), (2, 1), (5, 2)], [[1, 2, 1], [7], [3, 3]], "order"),
    "sequences of several lengths": ([(3, 3)], [[1, 6, 14]], "order"),
    "unused blocks in between": ([(7, 2), (11, 2)], [[9, 3], [5, 8]], "shuffled"),
    "scattered blocks": ([(7, 2), (11, 2)], [[9, 3], [5, 8]], "apart"),
    "no prompt": ([(0, 2)], [[4, 3]], "order"),
    "one sequence": ([(4, 1)], [[4]], "order"),
    "many blocks": ([(3, 2)], [[30, 9]], "order"),
    "many sequences": ([(5, 18)], [[*range(2, 20)]], "order"),
}


def free_blocks(order: str, count: int) -> list[int]:
    """Return at least this many of 200 blocks."""
    if order in ("order", "reversed"):
        return list(range(count))[:: 1 if order == "order" else -1]
    return torch.randperm(
        count + 2 if order == "shuffled" else 200, generator=torch.Generator().manual_seed(1)
    ).tolist()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sequence_attends_to_its_prompt_and_its_own_tokens(name: str, dtype: torch.dtype) -> None:
    prompts, lengths, order = LAYOUTS[name]
    blocks_needed = [-(-keys // BLOCK_SIZE) for keys, _ in prompts]
    free = free_blocks(
        order, sum(blocks_needed) + sum(length // BLOCK_SIZE + 1 for group in lengths for length in group)
    )
    scheduler: Any = SimpleNamespace(prompt_blocks={}, prompt_lengths={p: keys for p, (keys, _) in enumerate(prompts)})
    seqs: list[Sequence] = []
    for p, group in enumerate(lengths):
        for length in group:
            seqs.append(Sequence(len(seqs), p, length, [free.pop(0) for _ in range(length // BLOCK_SIZE + 1)]))
    for p, count in enumerate(blocks_needed):
        scheduler.prompt_blocks[p] = [free.pop(0) for _ in range(count)]
    torch.manual_seed(0)
    heads, cache = KV_HEADS * REPEAT, PagedKVCache(200, BLOCK_SIZE)
    q, k, v = (torch.randn(len(seqs), n, 1, HEAD_DIM).to(dtype) for n in (heads, KV_HEADS, KV_HEADS))
    for x in cache.layer_blocks(0, k, v):
        x.normal_()
    layout = DecodeLayout(cache, torch.device("cpu"))
    layout.set_sequences(seqs, scheduler)
    positions = layout.begin_step(seqs)
    got = layout.attend(0, q, k, v, SCALE)
    for i, seq in enumerate(seqs):
        assert positions[i] == scheduler.prompt_lengths[seq.prompt_id] + seq.num_tokens
        known = []
        for stored, new in zip(cache.layers[0], (k, v), strict=True):
            before = [
                stored[block, :, j] for block in scheduler.prompt_blocks[seq.prompt_id] for j in range(BLOCK_SIZE)
            ]
            own = [stored[block, :, j] for block in seq.block_table for j in range(BLOCK_SIZE)]
            known.append(
                torch.stack(
                    [*before[: scheduler.prompt_lengths[seq.prompt_id]], *own[: seq.num_tokens], new[i, :, 0]]
                ).double()
            )
        for head in range(heads):
            keys, values = (x[:, head // REPEAT] for x in known)
            want = torch.softmax(SCALE * (keys @ q[i, head, 0].double()), 0) @ values
            assert torch.allclose(got[i, 0, head].double(), want, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("length", [6, 30])
def test_infinite_values_of_a_sequence_do_not_reach_other_sequences(length: int) -> None:
    """A sequence with fewer blocks gets nothing from the missing ones, not even 0 times infinity."""
    scheduler: Any = SimpleNamespace(prompt_blocks={0: []}, prompt_lengths={0: 0})
    seqs = [
        Sequence(0, 0, length, list(range(1 + length // BLOCK_SIZE))),
        Sequence(1, 0, 2, [1 + length // BLOCK_SIZE]),
    ]
    cache = PagedKVCache(200, BLOCK_SIZE)
    q, k, v = (torch.randn(2, n, 1, HEAD_DIM) for n in (KV_HEADS * REPEAT, KV_HEADS, KV_HEADS))
    keys, values = cache.layer_blocks(0, k, v)
    keys.normal_(), values.normal_()
    values[seqs[0].block_table] = math.inf
    layout = DecodeLayout(cache, torch.device("cpu"))
    layout.set_sequences(seqs, scheduler)
    layout.begin_step(seqs)
    got = layout.attend(0, q, k, v, SCALE)
    assert not got[0].isfinite().any() and got[1].isfinite().all()


def test_prompts_get_blocks_of_the_prompt_region_first_and_then_downwards() -> None:
    blocks = BlockManager(8, BLOCK_SIZE, prompt_region=5)
    assert blocks.allocate_blocks(2, for_prompt=True) == [5, 6]
    assert blocks.allocate_blocks(3) == [0, 1, 2]
    assert blocks.allocate_blocks(2, for_prompt=True) == [7, 4]
    blocks.free_blocks([6])
    assert blocks.allocate_blocks(2, for_prompt=True) == [6, 3]

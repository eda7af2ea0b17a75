"""Caches in pages: who gets them, and that neither where they lie nor who was evicted changes a number."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ascent.core.errors import ConfigError
from ascent.core.types import Prompts, Rollouts
from ascent.inference.attention_layouts import PrefillLayout, PrefillSegment, prefill_segments
from ascent.inference.block_manager import BlockManager
from ascent.inference.runners import cuda_graph, decode_loop, paged
from ascent.inference.runners.cuda_graph import cuda_graph_runner
from ascent.inference.runners.eager import EagerRunner
from ascent.inference.runners.paged import PagedRunner
from ascent.inference.scheduler import Scheduler
from ascent.ops import decode_ops, decode_state
from ascent.ops.paged_kv_cache import PagedKVCache
from tests.flash_formulas import FlashFormulas
from tests.language import AtOnce, InAnyOrder, model_of, prompts_of, sampler_of

# ---- who gets pages -------------------------------------------------------------------------------


def audit(schedule: Scheduler) -> None:
    """No page is held twice or lost, every row has room for its tokens, and every prompt that is read is there."""
    held = [page for row in schedule.sequences.values() for page in row.block_table]
    held += [page for pages in schedule.prompt_blocks.values() for page in pages]
    assert len(held) == len(set(held)), "a page is held twice"
    assert set(held) | schedule.block_manager._free == set(range(schedule.block_manager.num_blocks)), "a page is lost"
    assert not set(held) & schedule.block_manager._free
    lanes = [row.batch_index for row in schedule.running]
    assert len(lanes) == len(set(lanes)) and not set(lanes) & set(schedule.free_batch_indices)
    for row in schedule.sequences.values():
        wants = row.seq_id in schedule.resuming  # pages for what it was given
        assert wants or len(row.block_table) * schedule.block_manager.block_size >= min(
            row.num_tokens, schedule.max_tokens
        )
        assert len(schedule.prompt_blocks[row.prompt_id]) == schedule.block_manager.blocks_needed(
            schedule.prompt_lengths[row.prompt_id]
        )
    for prompt, readers in schedule.ref_counts.items():
        assert readers == sum(row.prompt_id == prompt for row in schedule.sequences.values())
    for prompt in schedule.prompt_blocks:
        assert schedule.num_unfinished[prompt] > 0, "the pages of a prompt outlive its last response"


@pytest.mark.long
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5),
    lanes=st.integers(1, 6),
    samples=st.integers(1, 4),
    prompts=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    limit=st.integers(1, 20),
    room=st.integers(0, 30),
    together=st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_any_traffic_finishes_and_no_page_is_held_twice_or_lost(
    seed: int, size: int, lanes: int, samples: int, prompts: list[int], limit: int, room: int, together: int
) -> None:
    """Rows of random lengths, at random steps extended, parked or continued, on as few pages as one row can do with."""
    rng, count = random.Random(seed), len(prompts) * samples
    least = -(-max(prompts) // size) + -(-limit // size)
    schedule = Scheduler(prompts, samples, lanes, limit, BlockManager(least + room, size), together)
    want = [rng.randint(1, limit) for _ in range(count)]
    have, over, parked = [0] * count, set(), set()
    for _ in range(200 * count * limit):
        for row in schedule.schedule(rng.randint(1, 3)):
            assert row.num_tokens == have[row.seq_id], "a row that comes back has what it had"
            assert row.seq_id not in parked, "a row comes back before its environment has answered"
        schedule.prompts_to_prefill = []
        audit(schedule)
        ahead = rng.randint(1, 3)
        for row in schedule.reserve(ahead):
            assert row.seq_id not in schedule.sequences
        audit(schedule)
        assert not schedule.running or schedule.can_append(ahead)
        for row in schedule.running:
            response = row.seq_id
            row.num_tokens = have[response] = min(have[response] + rng.randint(1, ahead), want[response])
            if have[response] == want[response]:
                schedule.finish(response)
                over.add(response)
            elif rng.random() < 0.2:
                schedule.suspend(response)
                parked.add(response)
        audit(schedule)
        for response in sorted(parked):
            if rng.random() < 0.1:
                schedule.finish(response)
                parked.remove(response)
                over.add(response)
            elif rng.random() < 0.5 or not (schedule.running or schedule.waiting):
                have[response] = min(have[response] + rng.randint(0, 4), want[response] - 1)
                schedule.resume(response, have[response])
                parked.remove(response)
        if len(over) == count:
            break
    assert len(over) == count, "it came to no end"
    assert schedule.block_manager.num_free == schedule.block_manager.num_blocks


def test_the_row_that_entered_last_is_evicted_and_comes_back_first() -> None:
    schedule = Scheduler([4, 4], 2, 4, 8, BlockManager(6, 4))
    rows = schedule.schedule()
    assert [row.seq_id for row in rows] == [0, 1, 2, 3], "two prompts and four rows on six pages"
    for row in rows:
        row.num_tokens = 4
    assert [row.seq_id for row in schedule.reserve(1)] == [3, 2]
    assert list(schedule.waiting) == [2, 3]
    assert [row.seq_id for row in schedule.running] == [0, 1]
    schedule.finish(0)
    assert [(row.seq_id, row.num_tokens) for row in schedule.schedule()] == [(2, 4)]


def test_a_row_that_continues_takes_pages_of_those_that_may_never_continue_though_others_run() -> None:
    """As one that is new does: or else new ones would keep it waiting for as long as they come."""
    schedule = Scheduler([], 1, 3, 4, BlockManager(6, 2))
    for response in range(3):
        schedule.add(response, response, 2)
    assert [row.seq_id for row in schedule.schedule()] == [0, 1, 2] and not schedule.block_manager.num_free
    schedule.suspend(0), schedule.suspend(1)
    schedule.resume(1, 2)
    assert [row.seq_id for row in schedule.schedule()] == [1] and schedule.preempted_idle == {0}


def test_no_more_parked_rows_are_evicted_than_a_new_one_needs() -> None:
    schedule = Scheduler([], 1, 3, 4, BlockManager(6, 2))
    for response in range(3):
        schedule.add(response, response, 2)
    assert [row.seq_id for row in schedule.schedule()] == [0, 1, 2] and not schedule.block_manager.num_free
    for response in range(3):
        schedule.suspend(response)
    schedule.add(3, 3, 2)
    assert [row.seq_id for row in schedule.schedule()] == [3], "its prompt and its tokens take a page each"
    assert schedule.preempted_idle == {0} and list(schedule.sequences) == [1, 2, 3] and schedule.num_preemptions == 1
    audit(schedule)


def test_a_response_may_end_before_it_has_entered() -> None:
    schedule = Scheduler([], 1, 1, 4, BlockManager(6, 2))
    for response in range(3):
        schedule.add(response, 7, 2)
    assert [row.seq_id for row in schedule.schedule()] == [0]
    schedule.finish(1)
    assert list(schedule.waiting) == [2] and schedule.num_unfinished == {7: 2}
    schedule.finish(0)
    assert [row.seq_id for row in schedule.schedule()] == [2]
    schedule.finish(2)
    assert schedule.block_manager.num_free == 6 and not schedule.num_unfinished and not schedule.prompt_lengths


def test_a_prompt_that_nobody_reads_is_dropped_before_a_row_is_evicted() -> None:
    schedule = Scheduler([4, 4], 1, 1, 12, BlockManager(4, 4), max_prefill_prompts=2)
    (row,) = schedule.schedule()
    assert schedule.prompts_to_prefill == [0, 1], "both are encoded together, though the second has no lane yet"
    for length in (4, 8):
        row.num_tokens = length
        assert schedule.reserve(1) == []
    assert set(schedule.prompt_blocks) == {0}
    schedule.finish(0)
    schedule.prompts_to_prefill = []
    assert [row.seq_id for row in schedule.schedule()] == [1]
    assert schedule.prompts_to_prefill == [1], "it is encoded again"


def test_a_prompts_pages_are_held_once_and_freed_with_its_last_response() -> None:
    schedule = Scheduler([10], 3, 3, 4, BlockManager(20, 4))
    schedule.schedule()
    assert len(schedule.prompt_blocks[0]) == 3
    assert schedule.block_manager.num_blocks - schedule.block_manager.num_free == 3 + 3
    for response, free in ((1, 15), (0, 16), (2, 20)):
        schedule.finish(response)
        assert schedule.block_manager.num_free == free


def test_where_there_is_room_for_all_rows_at_their_limit_all_of_them_enter() -> None:
    schedule = Scheduler([4, 4], 32, 64, 8, BlockManager(2 + 64 * 2, 4))
    assert len(schedule.schedule()) == 64, "nothing is kept free for growth that cannot come"
    for row in schedule.running:
        row.num_tokens = 7
    assert schedule.reserve(1) == []


def test_a_cache_too_small_for_one_response_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"room for 16 tokens.*max-tokens"):
        Scheduler([9], 1, 1, 8, BlockManager(4, 4))


def test_pages_cannot_be_given_back_twice() -> None:
    pages = BlockManager(4, 1)
    pages.free(pages.allocate(2))
    with pytest.raises(AssertionError, match="twice"):
        pages.free([0])


def test_rows_take_low_pages_and_prompts_high_ones() -> None:
    pages = BlockManager(6, 1)
    assert pages.allocate(2) == [0, 1]
    assert pages.allocate(2, high=True) == [5, 4]
    pages.free([0, 5])
    assert pages.allocate(1, high=True) == [5]
    assert pages.allocate(3) == [0, 2, 3]
    assert pages.num_free == 0 and pages.peak_used == 6


# ---- what is drawn --------------------------------------------------------------------------------

DECODERS = [PagedRunner, "graphs"]


def draws(
    decoder: Any, lm: Any, samples: int = 4, observe: Any = None, order: int | None = None, **more: Any
) -> tuple[Rollouts, list[Scheduler]]:
    made = sampler_of(lm, **{name: value for name, value in more.items() if name != "room"})
    own = cuda_graph_runner(lm)[0] if decoder == "graphs" else decoder
    schedules: list[Scheduler] = []

    def keep(*args: Any) -> Any:
        run = own(*args)
        schedules.append(run.scheduler)
        return run

    made.runner, made.cache_tokens = keep, more.get("room", 0)
    play = AtOnce(observe) if order is None else InAnyOrder(observe, order)
    prompts = replace(Prompts.of(prompts_of()), start_episodes=None if observe is None else play)
    return made.generate(prompts, samples), schedules


def same(got: Rollouts, want: Rollouts) -> None:
    assert torch.equal(got.mask, want.mask)
    assert torch.equal(got.present, want.present)  # type: ignore[arg-type]
    assert torch.equal(got.response, want.response)
    assert torch.equal(got.truncated, want.truncated)
    assert (got.logp_sampler - want.logp_sampler).abs().max() < 5e-6


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (paged, decode_ops, decode_state, cuda_graph):
        monkeypatch.setattr(module, "BLOCK_SIZE", 2)
    monkeypatch.setattr(paged, "WIDE_BLOCK_SIZE", 2)


@pytest.mark.long
@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("rows", [3, 12])
def test_rows_that_were_evicted_draw_what_they_would_have_drawn(decoder: Any, rows: int) -> None:
    lm = model_of()
    want, _ = draws(PlainDecoderWithSchedule, lm, rows=64)
    got, (schedule,) = draws(decoder, lm, rows=rows, room=2 * -(-prompts_of().shape[1] // 2) + 12)
    assert schedule.num_preemptions > 0 or rows == 3
    assert schedule.block_manager.num_free == schedule.block_manager.num_blocks, "every page came back"
    same(got, want)


class PlainDecoderWithSchedule(EagerRunner):
    """The oracle: transformers' own cache."""

    scheduler = None


def observing(ends: tuple[int, ...]) -> Any:
    """An environment that answers nine turns of every response, with one to seven tokens."""
    turns: dict[int, int] = {}

    def answer(response: int, tokens: list[int]) -> list[int]:
        assert tokens[-1] in ends
        turns[response] = turns.get(response, 0) + 1
        return [7, 8, 9, 10, 11, 12, 13][: 1 + (2 * response + turns[response]) % 7] if turns[response] <= 9 else []

    return answer


@cache
def plain_conversations() -> Rollouts:
    """What the plain cache draws, which knows no pages."""
    lm = model_of()
    return draws(PlainDecoderWithSchedule, lm, observe=observing(lm.stop_token_ids), limit=40, rows=64)[0]


@pytest.mark.long
@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(
    ("decoder", "cases"),
    [
        (PagedRunner, [(8, 12, 0, 999), (1, 5, 48, 0)]),
        ("graphs", [(8, 12, 0, 999), (4, 5, 52, 999)]),
        pytest.param("graphs", [(1, 5, 48, 0), (1, 12, 48, 999)], marks=pytest.mark.smoke),
    ],
    ids=["groups", "graphs", "graphs, one step at a time"],
)
def test_rows_are_extended_evicted_and_come_back(
    decoder: Any, cases: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Observations on few pages, with steps under way: the same tokens and log-probs as the plain cache gives."""
    lm = model_of()
    want = plain_conversations()
    assert (want.present & ~want.mask).any()  # type: ignore[operator]
    for together, rows, room, prefill in cases:
        monkeypatch.setattr(decode_loop, "STEPS_PER_LAUNCH", together)
        monkeypatch.setattr(
            decode_loop, "PREFILL_BREAK_EVEN_STEPS", prefill
        )  # observations are encoded at once, or fed step by step
        got, (schedule,) = draws(decoder, lm, observe=observing(lm.stop_token_ids), limit=40, rows=rows, room=room)
        assert (schedule.num_preemptions > 0) == (room > 0)
        assert schedule.block_manager.num_free == schedule.block_manager.num_blocks, "every page came back"
        same(got, want)


@pytest.mark.long
@pytest.mark.usefixtures("small_pages")
def test_captured_passes_encode_what_launched_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, observations and rows that come back, padded to sizes that are captured at their second use."""
    lm = model_of()
    want = plain_conversations()
    monkeypatch.setattr(PrefillLayout, "fused_kernel", FlashFormulas)
    monkeypatch.setattr(decode_loop, "PREFILL_BREAK_EVEN_STEPS", 0)
    for _ in range(2):
        got, (schedule,) = draws("graphs", lm, observe=observing(lm.stop_token_ids), limit=40, rows=5, room=48)
        assert schedule.num_preemptions > 0
        same(got, want)
    graphs: Any = lm.cuda_graph_runner.prefill_graphs
    assert len(graphs.by_size) > 3 and all(graphs.num_uses[size] == 2 for size in graphs.by_size)
    assert all(size.tokens > len(graph.inputs[0].nonzero()) for size, graph in graphs.by_size.items()), "with padding"


@pytest.mark.long
@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(
    ("decoder", "cases"),
    [
        (PagedRunner, [(0, 8, 5, 48, 0), (1, 8, 12, 60, 0)]),
        ("graphs", [(2, 4, 12, 60, 6)]),
        pytest.param("graphs", [(0, 8, 12, 0, 0), (1, 1, 5, 48, 999)], marks=pytest.mark.smoke),
    ],
    ids=["groups", "graphs", "graphs, more settings"],
)
def test_who_answers_first_changes_nothing(
    decoder: Any, cases: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are parked while their environment works, evicted there too, and come back in any order."""
    lm = model_of()
    want = plain_conversations()
    evictions = 0
    for order, together, rows, room, prefill in cases:
        monkeypatch.setattr(decode_loop, "STEPS_PER_LAUNCH", together)
        monkeypatch.setattr(decode_loop, "PREFILL_BREAK_EVEN_STEPS", prefill)
        observe = observing(lm.stop_token_ids)
        got, (schedule,) = draws(decoder, lm, observe=observe, order=order, limit=40, rows=rows, room=room)
        evictions += schedule.num_preemptions
        assert schedule.block_manager.num_free == schedule.block_manager.num_blocks and not schedule.preempted_idle, (
            "every page came back"
        )
        same(got, want)
    assert evictions > 3


@pytest.mark.long
@pytest.mark.parametrize("decoder", [*DECODERS, EagerRunner])
def test_turns_and_drawn_tokens_have_limits_of_their_own(decoder: Any) -> None:
    """A turn of five tokens is asked about though it did not end; after nine drawn tokens a response is cut off."""
    lm, asked = model_of(), []

    def observe(response: int, tokens: list[int]) -> list[int]:
        asked.append((response, len(tokens)))
        return [7, 8, 9, 10]

    play = AtOnce(observe)
    play.turn_tokens = 5
    made = sampler_of(lm, limit=40, rows=5)
    made.runner, made.max_sampled_tokens = cuda_graph_runner(lm)[0] if decoder == "graphs" else decoder, 9
    rollouts = made.generate(replace(Prompts.of(prompts_of()), start_episodes=play), 4)
    assert (rollouts.length <= 9).all() and (rollouts.length == 9).any()
    assert rollouts.truncated.all()
    assert asked
    assert rollouts.turn is not None
    for mask, turn in zip(rollouts.mask.flatten(0, 1), rollouts.turn.flatten(0, 1), strict=True):
        assert torch.bincount(turn[mask]).max() <= 5


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Gemma", "Phi3"])
@pytest.mark.parametrize("size", [1, 3, 64])
def test_the_size_of_a_page_changes_nothing(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model_of(kind)
    want, _ = draws(PlainDecoderWithSchedule, lm)
    monkeypatch.setattr(paged, "WIDE_BLOCK_SIZE", size)
    same(draws(PagedRunner, lm, rows=5)[0], want)


@torch.no_grad()
def test_a_row_extended_piece_by_piece_has_the_hidden_states_of_one_forward_pass() -> None:
    """A prompt, then three pieces of a text behind it, on scattered pages, beside another row."""
    lm = model_of()
    ids = torch.randint(lm.vocab_size, (29,), generator=torch.Generator().manual_seed(0)).tolist()
    want = lm.backbone(torch.tensor([ids])).last_hidden_state[0]
    cache = PagedKVCache(12, 4)
    from ascent.models.packed_attention import packed_attention_enabled

    with packed_attention_enabled(lm.model):
        prefill_segments(lm, cache, [ids[:9], ids[:5]], [PrefillSegment([11, 2, 7], 9), PrefillSegment([4, 5], 5)])
        own, start = [0, 9, 3, 10, 1], 0
        for count in (1, 6, 13):
            tokens = ids[9 + start : 9 + start + count]
            got = prefill_segments(lm, cache, [tokens], [PrefillSegment(own, count, start, [11, 2, 7], 9)])
            start += count
            assert (got[0] - want[8 + start]).abs().max() < 1e-10


@torch.no_grad()
def test_rows_of_the_same_lengths_are_extended_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts, two of them as long as each other; then as many tokens behind each. Against one pass for each."""
    from ascent.models.packed_attention import packed_attention_enabled

    lm, cache, calls, plain = model_of(), PagedKVCache(12, 4), [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *x, **how: calls.append(len(q)) or plain(q, *x, **how)
    )
    ids = torch.randint(lm.vocab_size, (3, 11), generator=torch.Generator().manual_seed(0))
    prompts, own = (
        [PrefillSegment([0, 1], 5), PrefillSegment([5, 4], 5), PrefillSegment([7, 6], 7)],
        [[2, 8], [3, 9], [10, 11]],
    )
    with packed_attention_enabled(lm.model):
        prefill_segments(
            lm, cache, [row[: one.num_tokens].tolist() for row, one in zip(ids, prompts, strict=True)], prompts
        )
        layers = len(calls) // 2
        assert calls == [2, 1] * layers
        behind = [
            PrefillSegment(pages, 4, 0, one.block_table, one.num_tokens)
            for pages, one in zip(own, prompts, strict=True)
        ]
        tokens = [row[one.prompt_length : one.prompt_length + 4].tolist() for row, one in zip(ids, behind, strict=True)]
        got = prefill_segments(lm, cache, tokens, behind)
        assert calls == [2, 1] * 2 * layers
    for row, one, found in zip(ids, behind, got, strict=True):
        want = lm.backbone(row[None, : one.prompt_length + 4]).last_hidden_state[0, -1]
        assert (found - want).abs().max() < 1e-10


@pytest.mark.long
def test_the_cache_holds_what_is_used_and_not_what_might_be() -> None:
    """Responses that end early under a limit of 2,000 tokens have pages for the tokens that they have."""
    lm = model_of()
    rollouts, (schedule,) = draws(PagedRunner, lm, limit=2000, rows=12)
    longest = int(rollouts.mask.sum(-1).max())
    assert longest < 400
    assert (
        schedule.block_manager.peak_used * paged.WIDE_BLOCK_SIZE
        <= 12 * (longest + paged.WIDE_BLOCK_SIZE) + 3 * paged.WIDE_BLOCK_SIZE
    )


@pytest.mark.long
def test_a_somewhat_longer_prompt_needs_no_new_board() -> None:
    """Making one anew captures the graphs again, which takes seconds."""
    lm, boards = model_of(), []
    decoder = cuda_graph_runner(lm)[0]
    assert decoder is not None
    for width in (60, 66, 64 * 9):
        made = sampler_of(lm, limit=200, rows=8)
        made.runner = decoder
        made.generate(Prompts.of(torch.ones(2, width, dtype=torch.long)), 4)
        boards.append(decoder.decode_state)
    assert boards[0] is boards[1] and boards[1] is not boards[2]


def test_a_board_that_has_all_the_room_there_is_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model_of()
    decoder = cuda_graph_runner(lm)[0]
    assert decoder is not None
    monkeypatch.setattr(decoder, "on_gpu", True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**6, 10**9))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    few = decoder._num_blocks(10**6, 3)
    assert 3 < few < 10**6 and decoder.memory_full
    monkeypatch.setattr(lm, "gpu_memory_limit", 5 * 10**5)
    assert decoder._num_blocks(10**6, 3) == few // 2, "half of the card is another run's"
    monkeypatch.undo()
    monkeypatch.setattr(decoder, "on_gpu", False)
    decoder.prepare(2, few, 4, 9)
    assert decoder._num_blocks(2 * 10**6, 3) == few
    assert decoder._num_blocks(few - 1, 3) == few - 1


def uneven(keys: list[int], heads: int = 2) -> bool:
    chosen = type("Chosen", (), {"model": type("net", (), {"num_kv_heads": heads})()})()
    return cuda_graph.CudaGraphRunner.should_split_kv(chosen, keys)


def test_long_rows_are_shared_out_where_they_would_hold_the_others_up() -> None:
    assert not uneven([2000] * 256), "equal rows fill the card by themselves"
    assert not uneven([200] * 8), "short ones are quick"
    assert uneven([2000] * 8), "a few would leave the card idle"
    assert uneven([300] * 511 + [8000]), "one would keep the others waiting"

"""Scheduling and KV-cache blocks: allocation, preemption, and that neither changes a sampled token or log-prob."""

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

# ---- allocation and preemption -------------------------------------------------------------------------------


def check_invariants(scheduler: Scheduler) -> None:
    """Check that no block is allocated twice or lost, and that sequences and their prompts have their blocks."""
    held = [block for row in scheduler.sequences.values() for block in row.block_table]
    held += [block for blocks in scheduler.prompt_blocks.values() for block in blocks]
    assert len(held) == len(set(held)), "a block is allocated twice"
    assert set(held) | scheduler.block_manager._free == set(range(scheduler.block_manager.num_blocks)), (
        "a block is lost"
    )
    assert not set(held) & scheduler.block_manager._free
    indices = [row.batch_index for row in scheduler.running]
    assert len(indices) == len(set(indices)) and not set(indices) & set(scheduler.free_batch_indices)
    for row in scheduler.sequences.values():
        wants = row.seq_id in scheduler.resuming  # blocks for its observation
        assert wants or len(row.block_table) * scheduler.block_manager.block_size >= min(
            row.num_tokens, scheduler.max_tokens
        )
        assert len(scheduler.prompt_blocks[row.prompt_id]) == scheduler.block_manager.blocks_needed(
            scheduler.prompt_lengths[row.prompt_id]
        )
    for prompt, readers in scheduler.ref_counts.items():
        assert readers == sum(row.prompt_id == prompt for row in scheduler.sequences.values())
    for prompt in scheduler.prompt_blocks:
        assert scheduler.num_unfinished[prompt] > 0, "the blocks of a prompt outlive its last response"


@pytest.mark.long
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5),
    max_num_seqs=st.integers(1, 6),
    samples=st.integers(1, 4),
    prompts=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    limit=st.integers(1, 20),
    room=st.integers(0, 30),
    together=st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_any_traffic_finishes_and_no_block_is_allocated_twice_or_lost(
    seed: int, size: int, max_num_seqs: int, samples: int, prompts: list[int], limit: int, room: int, together: int
) -> None:
    """Sequences of random lengths grow, are suspended and resume at random steps, with as few as the minimum blocks."""
    rng, count = random.Random(seed), len(prompts) * samples
    least = -(-max(prompts) // size) + -(-limit // size)
    scheduler = Scheduler(prompts, samples, max_num_seqs, limit, BlockManager(least + room, size), together)
    want = [rng.randint(1, limit) for _ in range(count)]
    have, over, parked = [0] * count, set(), set()
    for _ in range(200 * count * limit):
        for row in scheduler.schedule(rng.randint(1, 3)):
            assert row.num_tokens == have[row.seq_id], "a sequence that returns has its tokens"
            assert row.seq_id not in parked, "a sequence runs before its observation has arrived"
        scheduler.prompts_to_prefill = []
        check_invariants(scheduler)
        ahead = rng.randint(1, 3)
        for row in scheduler.reserve(ahead):
            assert row.seq_id not in scheduler.sequences
        check_invariants(scheduler)
        assert not scheduler.running or scheduler.can_append(ahead)
        for row in scheduler.running:
            response = row.seq_id
            row.num_tokens = have[response] = min(have[response] + rng.randint(1, ahead), want[response])
            if have[response] == want[response]:
                scheduler.finish(response)
                over.add(response)
            elif rng.random() < 0.2:
                scheduler.suspend(response)
                parked.add(response)
        check_invariants(scheduler)
        for response in sorted(parked):
            if rng.random() < 0.1:
                scheduler.finish(response)
                parked.remove(response)
                over.add(response)
            elif rng.random() < 0.5 or not (scheduler.running or scheduler.waiting):
                have[response] = min(have[response] + rng.randint(0, 4), want[response] - 1)
                scheduler.resume(response, have[response])
                parked.remove(response)
        if len(over) == count:
            break
    assert len(over) == count, "it came to no end"
    assert scheduler.block_manager.num_free == scheduler.block_manager.num_blocks


def test_the_sequence_scheduled_last_is_preempted_and_returns_first() -> None:
    scheduler = Scheduler([4, 4], 2, 4, 8, BlockManager(6, 4))
    rows = scheduler.schedule()
    assert [row.seq_id for row in rows] == [0, 1, 2, 3], "two prompts and four sequences on six blocks"
    for row in rows:
        row.num_tokens = 4
    assert [row.seq_id for row in scheduler.reserve(1)] == [3, 2]
    assert list(scheduler.waiting) == [2, 3]
    assert [row.seq_id for row in scheduler.running] == [0, 1]
    scheduler.finish(0)
    assert [(row.seq_id, row.num_tokens) for row in scheduler.schedule()] == [(2, 4)]


def test_a_resuming_sequence_preempts_suspended_ones_while_others_run() -> None:
    """A new sequence does so too; otherwise new ones could delay a resuming one forever."""
    scheduler = Scheduler([], 1, 3, 4, BlockManager(6, 2))
    for response in range(3):
        scheduler.add(response, response, 2)
    assert [row.seq_id for row in scheduler.schedule()] == [0, 1, 2] and not scheduler.block_manager.num_free
    scheduler.suspend(0), scheduler.suspend(1)
    scheduler.resume(1, 2)
    assert [row.seq_id for row in scheduler.schedule()] == [1] and scheduler.preempted_idle == {0}


def test_no_more_suspended_sequences_are_preempted_than_a_new_one_needs() -> None:
    scheduler = Scheduler([], 1, 3, 4, BlockManager(6, 2))
    for response in range(3):
        scheduler.add(response, response, 2)
    assert [row.seq_id for row in scheduler.schedule()] == [0, 1, 2] and not scheduler.block_manager.num_free
    for response in range(3):
        scheduler.suspend(response)
    scheduler.add(3, 3, 2)
    assert [row.seq_id for row in scheduler.schedule()] == [3], "its prompt and its tokens need a block each"
    assert scheduler.preempted_idle == {0} and list(scheduler.sequences) == [1, 2, 3] and scheduler.num_preemptions == 1
    check_invariants(scheduler)


def test_a_sequence_may_finish_before_it_is_scheduled() -> None:
    scheduler = Scheduler([], 1, 1, 4, BlockManager(6, 2))
    for response in range(3):
        scheduler.add(response, 7, 2)
    assert [row.seq_id for row in scheduler.schedule()] == [0]
    scheduler.finish(1)
    assert list(scheduler.waiting) == [2] and scheduler.num_unfinished == {7: 2}
    scheduler.finish(0)
    assert [row.seq_id for row in scheduler.schedule()] == [2]
    scheduler.finish(2)
    assert scheduler.block_manager.num_free == 6 and not scheduler.num_unfinished and not scheduler.prompt_lengths


def test_unused_prompt_blocks_are_freed_before_a_sequence_is_preempted() -> None:
    scheduler = Scheduler([4, 4], 1, 1, 12, BlockManager(4, 4), max_prefill_prompts=2)
    (row,) = scheduler.schedule()
    assert scheduler.prompts_to_prefill == [0, 1], (
        "both are prefilled together, although no sequence of the second runs yet"
    )
    for length in (4, 8):
        row.num_tokens = length
        assert scheduler.reserve(1) == []
    assert set(scheduler.prompt_blocks) == {0}
    scheduler.finish(0)
    scheduler.prompts_to_prefill = []
    assert [row.seq_id for row in scheduler.schedule()] == [1]
    assert scheduler.prompts_to_prefill == [1], "it is prefilled again"


def test_the_blocks_of_a_prompt_are_shared_and_freed_with_its_last_response() -> None:
    scheduler = Scheduler([10], 3, 3, 4, BlockManager(20, 4))
    scheduler.schedule()
    assert len(scheduler.prompt_blocks[0]) == 3
    assert scheduler.block_manager.num_blocks - scheduler.block_manager.num_free == 3 + 3
    for response, free in ((1, 15), (0, 16), (2, 20)):
        scheduler.finish(response)
        assert scheduler.block_manager.num_free == free


def test_all_sequences_are_scheduled_if_all_fit_at_their_maximum_length() -> None:
    scheduler = Scheduler([4, 4], 32, 64, 8, BlockManager(2 + 64 * 2, 4))
    assert len(scheduler.schedule()) == 64, "no spare blocks are kept for impossible growth"
    for row in scheduler.running:
        row.num_tokens = 7
    assert scheduler.reserve(1) == []


def test_a_cache_too_small_for_one_response_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"room for 16 tokens.*max-tokens"):
        Scheduler([9], 1, 1, 8, BlockManager(4, 4))


def test_blocks_cannot_be_freed_twice() -> None:
    block_manager = BlockManager(4, 1)
    block_manager.free_blocks(block_manager.allocate_blocks(2))
    with pytest.raises(AssertionError, match="twice"):
        block_manager.free_blocks([0])


def test_sequences_get_low_blocks_and_prompts_high_ones() -> None:
    block_manager = BlockManager(6, 1)
    assert block_manager.allocate_blocks(2) == [0, 1]
    assert block_manager.allocate_blocks(2, for_prompt=True) == [5, 4]
    block_manager.free_blocks([0, 5])
    assert block_manager.allocate_blocks(1, for_prompt=True) == [5]
    assert block_manager.allocate_blocks(3) == [0, 2, 3]
    assert block_manager.num_free == 0 and block_manager.peak_used == 6


# ---- generated tokens --------------------------------------------------------------------------------

RUNNERS = [PagedRunner, "graphs"]


def generate(
    runner: Any, lm: Any, samples: int = 4, observe: Any = None, order: int | None = None, **more: Any
) -> tuple[Rollouts, list[Scheduler]]:
    made = sampler_of(lm, **{name: value for name, value in more.items() if name != "room"})
    own = cuda_graph_runner(lm)[0] if runner == "graphs" else runner
    schedulers: list[Scheduler] = []

    def keep(*args: Any) -> Any:
        run = own(*args)
        schedulers.append(run.scheduler)
        return run

    made.runner, made.cache_tokens = keep, more.get("room", 0)
    play = AtOnce(observe) if order is None else InAnyOrder(observe, order)
    prompts = replace(Prompts.of(prompts_of()), start_episodes=None if observe is None else play)
    return made.generate(prompts, samples), schedulers


def same(got: Rollouts, want: Rollouts) -> None:
    assert torch.equal(got.mask, want.mask)
    assert torch.equal(got.present, want.present)  # type: ignore[arg-type]
    assert torch.equal(got.response, want.response)
    assert torch.equal(got.truncated, want.truncated)
    assert (got.logp_sampler - want.logp_sampler).abs().max() < 5e-6


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (paged, decode_ops, decode_state, cuda_graph):
        monkeypatch.setattr(module, "BLOCK_SIZE", 2)
    monkeypatch.setattr(paged, "WIDE_BLOCK_SIZE", 2)


@pytest.mark.long
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("rows", [3, 12])
def test_preemption_does_not_change_the_sampled_tokens(runner: Any, rows: int) -> None:
    lm = model_of()
    want, _ = generate(EagerRunnerWithoutScheduler, lm, rows=64)
    got, (scheduler,) = generate(runner, lm, rows=rows, room=2 * -(-prompts_of().shape[1] // 2) + 12)
    assert scheduler.num_preemptions > 0 or rows == 3
    assert scheduler.block_manager.num_free == scheduler.block_manager.num_blocks, "every block is free"
    same(got, want)


class EagerRunnerWithoutScheduler(EagerRunner):
    """The reference: the KV cache of transformers."""

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
def eager_conversations() -> Rollouts:
    """Return conversations generated with the KV cache of transformers, which has no blocks."""
    lm = model_of()
    return generate(EagerRunnerWithoutScheduler, lm, observe=observing(lm.stop_token_ids), limit=40, rows=64)[0]


@pytest.mark.long
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("runner", "cases"),
    [
        (PagedRunner, [(8, 12, 0, 999), (1, 5, 48, 0)]),
        ("graphs", [(8, 12, 0, 999), (4, 5, 52, 999)]),
        pytest.param("graphs", [(1, 5, 48, 0), (1, 12, 48, 999)], marks=pytest.mark.smoke),
    ],
    ids=["groups", "graphs", "graphs, one step at a time"],
)
def test_observations_and_preemption_do_not_change_the_sampled_tokens(
    runner: Any, cases: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few blocks and steps in flight, tokens and log-probs equal those of the eager runner."""
    lm = model_of()
    want = eager_conversations()
    assert (want.present & ~want.mask).any()  # type: ignore[operator]
    for together, rows, room, prefill in cases:
        monkeypatch.setattr(decode_loop, "STEPS_PER_LAUNCH", together)
        monkeypatch.setattr(
            decode_loop, "PREFILL_BREAK_EVEN_STEPS", prefill
        )  # observations are prefilled, or fed step by step
        got, (scheduler,) = generate(runner, lm, observe=observing(lm.stop_token_ids), limit=40, rows=rows, room=room)
        assert (scheduler.num_preemptions > 0) == (room > 0)
        assert scheduler.block_manager.num_free == scheduler.block_manager.num_blocks, "every block is free"
        same(got, want)


@pytest.mark.long
@pytest.mark.usefixtures("small_blocks")
def test_captured_prefills_compute_the_same_as_launched_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, observations and preempted sequences, padded to sizes that are captured at their second use."""
    lm = model_of()
    want = eager_conversations()
    monkeypatch.setattr(PrefillLayout, "fused_kernel", FlashFormulas)
    monkeypatch.setattr(decode_loop, "PREFILL_BREAK_EVEN_STEPS", 0)
    for _ in range(2):
        got, (scheduler,) = generate("graphs", lm, observe=observing(lm.stop_token_ids), limit=40, rows=5, room=48)
        assert scheduler.num_preemptions > 0
        same(got, want)
    graphs: Any = lm.cuda_graph_runner.prefill_graphs
    assert len(graphs.by_size) > 3 and all(graphs.num_uses[size] == 2 for size in graphs.by_size)
    assert all(size.tokens > len(graph.inputs[0].nonzero()) for size, graph in graphs.by_size.items()), "with padding"


@pytest.mark.long
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("runner", "cases"),
    [
        (PagedRunner, [(0, 8, 5, 48, 0), (1, 8, 12, 60, 0)]),
        ("graphs", [(2, 4, 12, 60, 6)]),
        pytest.param("graphs", [(0, 8, 12, 0, 0), (1, 1, 5, 48, 999)], marks=pytest.mark.smoke),
    ],
    ids=["groups", "graphs", "graphs, more settings"],
)
def test_the_order_of_observations_does_not_change_the_sampled_tokens(
    runner: Any, cases: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences are suspended while their environments work, may be preempted then, and resume in any order."""
    lm = model_of()
    want = eager_conversations()
    num_preemptions = 0
    for order, together, rows, room, prefill in cases:
        monkeypatch.setattr(decode_loop, "STEPS_PER_LAUNCH", together)
        monkeypatch.setattr(decode_loop, "PREFILL_BREAK_EVEN_STEPS", prefill)
        observe = observing(lm.stop_token_ids)
        got, (scheduler,) = generate(runner, lm, observe=observe, order=order, limit=40, rows=rows, room=room)
        num_preemptions += scheduler.num_preemptions
        assert (
            scheduler.block_manager.num_free == scheduler.block_manager.num_blocks and not scheduler.preempted_idle
        ), "every block is free"
        same(got, want)
    assert num_preemptions > 3


@pytest.mark.long
@pytest.mark.parametrize("runner", [*RUNNERS, EagerRunner])
def test_turns_and_sampled_tokens_have_separate_limits(runner: Any) -> None:
    """A turn ends after five tokens; a response is truncated after nine sampled tokens."""
    lm, asked = model_of(), []

    def observe(response: int, tokens: list[int]) -> list[int]:
        asked.append((response, len(tokens)))
        return [7, 8, 9, 10]

    play = AtOnce(observe)
    play.turn_tokens = 5
    made = sampler_of(lm, limit=40, rows=5)
    made.runner, made.max_sampled_tokens = cuda_graph_runner(lm)[0] if runner == "graphs" else runner, 9
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
def test_the_block_size_does_not_change_the_sampled_tokens(
    kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = model_of(kind)
    want, _ = generate(EagerRunnerWithoutScheduler, lm)
    monkeypatch.setattr(paged, "WIDE_BLOCK_SIZE", size)
    same(generate(PagedRunner, lm, rows=5)[0], want)


@torch.no_grad()
def test_chunked_prefill_computes_the_hidden_states_of_one_forward_pass() -> None:
    """A prompt, then three chunks of text after it, on scattered blocks, beside another sequence."""
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
def test_segments_of_equal_lengths_are_prefilled_in_one_attention_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts, two of equal length; then equally many tokens after each. Compared with one forward pass each."""
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
            PrefillSegment(blocks, 4, 0, one.block_table, one.num_tokens)
            for blocks, one in zip(own, prompts, strict=True)
        ]
        tokens = [row[one.prompt_length : one.prompt_length + 4].tolist() for row, one in zip(ids, behind, strict=True)]
        got = prefill_segments(lm, cache, tokens, behind)
        assert calls == [2, 1] * 2 * layers
    for row, one, found in zip(ids, behind, got, strict=True):
        want = lm.backbone(row[None, : one.prompt_length + 4]).last_hidden_state[0, -1]
        assert (found - want).abs().max() < 1e-10


@pytest.mark.long
def test_blocks_are_allocated_for_actual_lengths_and_not_for_the_limit() -> None:
    """Responses that end early under a limit of 2,000 tokens use blocks only for the tokens that they have."""
    lm = model_of()
    rollouts, (scheduler,) = generate(PagedRunner, lm, limit=2000, rows=12)
    longest = int(rollouts.mask.sum(-1).max())
    assert longest < 400
    assert (
        scheduler.block_manager.peak_used * paged.WIDE_BLOCK_SIZE
        <= 12 * (longest + paged.WIDE_BLOCK_SIZE) + 3 * paged.WIDE_BLOCK_SIZE
    )


@pytest.mark.long
def test_a_somewhat_longer_prompt_reuses_the_decode_state() -> None:
    """A new decode state captures its graphs again, which takes seconds."""
    lm, decode_states = model_of(), []
    runner = cuda_graph_runner(lm)[0]
    assert runner is not None
    for width in (60, 66, 64 * 9):
        made = sampler_of(lm, limit=200, rows=8)
        made.runner = runner
        made.generate(Prompts.of(torch.ones(2, width, dtype=torch.long)), 4)
        decode_states.append(runner.decode_state)
    assert decode_states[0] is decode_states[1] and decode_states[1] is not decode_states[2]


def test_a_decode_state_that_fills_the_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model_of()
    runner = cuda_graph_runner(lm)[0]
    assert runner is not None
    monkeypatch.setattr(runner, "on_gpu", True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**6, 10**9))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    few = runner._num_blocks(10**6, 3)
    assert 3 < few < 10**6 and runner.memory_full
    monkeypatch.setattr(lm, "gpu_memory_limit", 5 * 10**5)
    assert runner._num_blocks(10**6, 3) == few // 2, "half of the GPU belongs to another run"
    monkeypatch.undo()
    monkeypatch.setattr(runner, "on_gpu", False)
    runner.prepare(2, few, 4, 9)
    assert runner._num_blocks(2 * 10**6, 3) == few
    assert runner._num_blocks(few - 1, 3) == few - 1


def should_split_kv(keys: list[int], heads: int = 2) -> bool:
    chosen = type("Chosen", (), {"model": type("net", (), {"num_kv_heads": heads})()})()
    return cuda_graph.CudaGraphRunner.should_split_kv(chosen, keys)


def test_split_kv_is_used_where_long_sequences_would_delay_the_others() -> None:
    assert not should_split_kv([2000] * 256), "many equal sequences fill the GPU"
    assert not should_split_kv([200] * 8), "short sequences are fast"
    assert should_split_kv([2000] * 8), "few sequences leave the GPU idle"
    assert should_split_kv([300] * 511 + [8000]), "one long sequence delays the others"

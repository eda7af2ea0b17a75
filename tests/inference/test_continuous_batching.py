"""Requests that join rows while others are decoded: the tokens are those of one call, whoever comes when."""

from __future__ import annotations

import math
import queue
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ascent.core.errors import RunError
from ascent.core.sampling_params import SamplingParams
from ascent.core.types import Prompts
from ascent.inference import continuous_batching
from ascent.inference.continuous_batching import (
    SWITCH_INTERVAL_SECONDS,
    LocalConversationEngine,
    serve_requests,
    short_switch_interval,
)
from ascent.inference.engine import LocalEngine
from ascent.inference.request_queue import Completion, CompletionDelta, QueueFullError, Request, RequestQueue
from ascent.inference.runners import cuda_graph, decode_loop, paged
from ascent.inference.runners.cuda_graph import cuda_graph_runner
from ascent.inference.runners.decode_loop import DecodeLoop
from ascent.inference.runners.eager import EagerRunner
from ascent.inference.runners.paged import PagedRunner
from ascent.ops import decode_ops, decode_state
from ascent.ops.token_sampling import response_seeds
from tests.language import VOCAB, AtOnce, model_of, prompts_of, sampler_of

LIMIT, MIN_SPLIT_KV_LENGTH = 24, 60
"""Tokens behind a prompt and tokens of a turn, at most; seconds that a test waits for a state."""
DECODERS = ("group", "graph", "waves", *(["card"] if torch.cuda.is_available() else []))
pytestmark = pytest.mark.long


def ready(decoder: str, **more: Any) -> LocalEngine:
    lm = model_of(dtype=torch.float32 if decoder == "card" else torch.float64)
    if decoder == "card":
        lm.model.to("cuda")
    sampler = sampler_of(lm, LIMIT, rows=more.pop("rows", 3), **more)
    if decoder == "graph":
        made, why = cuda_graph_runner(lm)
        assert made is not None, why
        sampler.runner = made
    elif decoder == "waves":
        lm.can_share_prompts = False
    assert sampler.runner is not EagerRunner and (decoder != "card" or sampler.runner is not PagedRunner)
    sampler.version = 5
    return sampler


@contextmanager
def serving(sampler: LocalEngine, most: int = 64, slots: int = 4, room: int = 0) -> Iterator[RequestQueue]:
    request_queue = RequestQueue(most)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            serve_requests(sampler, request_queue, slots, LIMIT, 16, room)
        except BaseException as error:
            failed.append(error)
            request_queue.fail(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield request_queue
    finally:
        request_queue.close()
        thread.join(MIN_SPLIT_KV_LENGTH)
        assert not thread.is_alive()
    assert not failed, failed


class Asked:
    """A request whose events a test reads."""

    def __init__(self, request_queue: RequestQueue, prompt: list[int], response: list[int], seed: int, **more: Any):
        self.events: queue.Queue[CompletionDelta | Completion] = queue.Queue()
        more = {"max_tokens": LIMIT} | more
        self.request = Request(list(prompt), list(response), seed, on_output=self.events.put, **more)
        request_queue.submit(self.request)

    def done(self) -> Completion:
        while True:
            event = self.events.get(timeout=MIN_SPLIT_KV_LENGTH)
            if isinstance(event, Completion):
                return event


def follow(response: int, tokens: list[int]) -> list[int]:
    """What is said after a turn: nothing after 14 tokens, else what depends on the response and its tokens."""
    if len(tokens) >= 14:
        return []
    return [(7 * response + len(tokens) + i) % (VOCAB - 4) + 4 for i in range(1 + (response + len(tokens)) % 3)]


def talk(
    request_queue: RequestQueue, prompt: list[int], response: int, seed: int, turn_tokens: int = 6
) -> tuple[list[int], list[float]]:
    """A whole conversation, one turn after the other: its tokens, and the log-probs of those that were drawn."""
    tokens, logp = list[int](), list[float]()
    while len(tokens) < LIMIT:
        asked = Asked(request_queue, prompt, tokens, seed, max_tokens=turn_tokens, conversation_id=response)
        done = asked.done()
        assert not done.error and done.version == 5 and done.tokens
        tokens, logp = tokens + done.tokens, logp + done.logp
        more = follow(response, tokens)
        if not more or len(tokens) + len(more) >= LIMIT:
            break
        tokens = tokens + more
    request_queue.end_conversation(response)
    return tokens, logp


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_request_that_takes_the_slot_of_one_that_just_ended_reads_its_own_prompt(decoder: str) -> None:
    first, second, third = [5, 6, 7, 8, 9, 10, 11, 12], [12, 11, 10, 9, 8, 7, 6, 5], [9, 4, 6]
    with serving(ready(decoder)) as request_queue:
        alone = Asked(request_queue, third, [], 3).done()
    with serving(ready(decoder), slots=2) as request_queue:
        later = list[Asked]()

        def ask_at_once(event: CompletionDelta | Completion) -> None:
            if isinstance(event, Completion):  # in the thread that decodes: before its next step
                later.append(Asked(request_queue, third, [], 3))
                asked.set()

        asked = threading.Event()
        beside = Asked(request_queue, first, [], 1, stream=True)
        beside.events.get(timeout=MIN_SPLIT_KV_LENGTH)  # it runs
        request_queue.submit(Request(second, [], 2, max_tokens=3, on_output=ask_at_once))
        assert asked.wait(MIN_SPLIT_KV_LENGTH)
        done, other = later[0].done(), beside.done()
    assert not other.error and done.tokens == alone.tokens
    assert torch.allclose(torch.tensor(done.logp), torch.tensor(alone.logp), atol=1e-5)


@pytest.mark.parametrize("decoder", DECODERS)
def test_conversations_over_requests_are_those_of_one_call(decoder: str) -> None:
    sampler = ready(decoder)
    prompts, samples = Prompts.of(prompts_of()), 2
    play = AtOnce(follow)
    play.turn_tokens = 6
    seeds = response_seeds(3, samples, torch.Generator(), 11).flatten().tolist()
    plain = ready("group").generate(Prompts(prompts.prompt, prompts.problem, start_episodes=play), samples, seed=11)
    ids = [row[row >= 0].tolist() for row in prompts.prompt]
    talks: dict[int, tuple[list[int], list[float]]] = {}
    with serving(sampler) as request_queue:

        def one(i: int) -> None:
            talks[i] = talk(request_queue, ids[i // samples], i, seeds[i])

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(seeds))]
        random.Random(0).shuffle(threads)
        [thread.start() for thread in threads]
        [thread.join(MIN_SPLIT_KV_LENGTH) for thread in threads]
    for i in range(len(seeds)):
        present, mask = (part.flatten(0, 1)[i] for part in (plain.present, plain.mask))
        assert talks[i][0] == plain.response.flatten(0, 1)[i][present].tolist(), i
        logp = plain.logp_sampler.flatten(0, 1)[i][mask]
        assert torch.allclose(torch.tensor(talks[i][1]), logp, atol=1e-5)
    assert len({len(tokens) for tokens, _ in talks.values()}) > 1


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_turn_is_the_same_alone_watched_and_begun_anew(decoder: str) -> None:
    """Its row may be gone, or the slot another's: what was recorded is encoded again."""
    sampler = ready(decoder)
    with serving(sampler, slots=2) as request_queue:
        first = Asked(request_queue, [5, 6, 7], [], 1, max_tokens=4, conversation_id="a").done()
        given = [*first.tokens, 9, 10]
        others = [Asked(request_queue, [8, i], [], i, max_tokens=5, conversation_id=i) for i in range(5)]
        [other.done() for other in others]  # its slot is needed
        again = Asked(request_queue, [5, 6, 7], given, 1, max_tokens=6, conversation_id="a", stream=True)
        shown, logp = list[int](), list[float]()
        while not isinstance(event := again.events.get(timeout=MIN_SPLIT_KV_LENGTH), Completion):
            shown, logp = shown + event.tokens, logp + event.logp
        assert event.tokens[: len(shown)] == shown and len(logp) == len(shown)
        assert logp == pytest.approx(event.logp[: len(shown)], abs=1e-6)
        assert Asked(request_queue, [5, 6, 7], given, 1, max_tokens=6).done().tokens == event.tokens
        assert Asked(request_queue, [5, 6, 7], [], 1, max_tokens=4).done() == first
        exact = Asked(request_queue, [5, 6, 7], first.tokens, 1, max_tokens=2, conversation_id="a").done()
        assert len(exact.tokens) >= 1 and not exact.error


@pytest.mark.parametrize("decoder", DECODERS)
def test_each_request_has_settings_of_its_own(decoder: str) -> None:
    sampler = ready(decoder)
    greedy = ready("group").generate(Prompts.of(torch.tensor([[5, 6]])), 1, greedy=True)
    cold = ready("group", temperature=0.3)
    narrow = ready("group", top_k=2)
    wanted = [
        greedy.response[0, 0][greedy.mask[0, 0]].tolist(),
        *(
            (r := one.generate(Prompts.of(torch.tensor([[5, 6]])), 1, seed=3)).response[0, 0][r.mask[0, 0]].tolist()
            for one in (cold, narrow, ready("group"))
        ),
    ]
    seed = int(response_seeds(1, 1, torch.Generator(), 3))
    with serving(sampler) as request_queue:
        asked = [
            Asked(request_queue, [5, 6], [], seed, greedy=True),
            Asked(request_queue, [5, 6], [], seed, temperature=0.3),
            Asked(request_queue, [5, 6], [], seed, sampling_params=SamplingParams(top_k=2)),
            Asked(request_queue, [5, 6], [], seed),
        ]
        done = [one.done() for one in asked]
    assert [one.tokens for one in done] == wanted
    assert min(done[2].kept_mass) < 1 and set(done[0].kept_mass) == {1.0}


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_cancelled_request_frees_its_row_and_nobody_else_is_touched(decoder: str) -> None:
    sampler = ready(decoder, rows=1, min_tokens=LIMIT)
    with serving(sampler, slots=2) as request_queue:
        alone = Asked(request_queue, [4, 5], [], 3).done()
        victims = [Asked(request_queue, [6, i], [], 1, stream=True) for i in range(4)]
        request_queue.cancel(victims[3].request)  # it waits for a slot
        request_queue.cancel(victims[0].request)  # it runs, or is about to
        other = Asked(request_queue, [4, 5], [], 3)
        assert other.done().tokens == alone.tokens
        for victim in victims[1:3]:
            assert len(victim.done().tokens) == LIMIT
        assert not request_queue.active


def test_more_requests_than_are_taken_are_refused_and_a_closed_queue_says_so() -> None:
    request_queue = RequestQueue(2)
    asked = [Asked(request_queue, [1], [], i) for i in range(2)]
    with pytest.raises(QueueFullError):
        Asked(request_queue, [1], [], 3)
    request_queue.cancel(asked[0].request)
    last = Asked(request_queue, [1], [], 4)
    request_queue.close()
    assert "closed" in last.done().error and "closed" in asked[1].done().error and asked[0].events.empty()
    with pytest.raises(RunError, match="is closed"):
        Asked(request_queue, [1], [], 5)


@pytest.mark.parametrize("decoder", ["group", "graph"])
def test_a_small_cache_evicts_and_changes_nothing(decoder: str) -> None:
    def drawn(room: int) -> list[list[int]]:
        with serving(ready(decoder, rows=4, min_tokens=LIMIT), slots=6, room=room) as request_queue:
            asked = [Asked(request_queue, [4 + i % 2, 5, 6], [], i, conversation_id=i) for i in range(6)]
            first = [one.done().tokens for one in asked]
            again = [
                Asked(request_queue, [4 + i % 2, 5, 6], [*tokens[:8], 7], i, conversation_id=i)
                for i, tokens in enumerate(first)
            ]
            return first + [one.done().tokens for one in again]

    size = 64 if decoder == "graph" else 32
    assert drawn(3 * size) == drawn(0)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (paged, decode_ops, decode_state, cuda_graph):
        monkeypatch.setattr(module, "BLOCK_SIZE", 2)
    monkeypatch.setattr(paged, "WIDE_BLOCK_SIZE", 2)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("decoder", ["group", "graph"])
def test_a_conversation_continues_where_parked_ones_fill_the_cache(decoder: str) -> None:
    """The newest one needs a page, nobody runs, and an older one has what is left."""

    def drawn(room: int) -> Completion:
        with serving(ready(decoder, min_tokens=LIMIT), room=room) as request_queue:
            Asked(request_queue, [4, 5, 6], [], 1, max_tokens=6, conversation_id="older").done()
            first = Asked(request_queue, [7, 5, 6], [], 2, max_tokens=6, conversation_id="newer").done()
            given = [*first.tokens, 9, 10, 11, 12, 13]
            return Asked(request_queue, [7, 5, 6], given, 2, max_tokens=6, conversation_id="newer").done()

    few, many = drawn(24), drawn(0)
    assert few.tokens == many.tokens and few.logp == pytest.approx(many.logp, abs=1e-5)


@pytest.mark.usefixtures("small_pages")
def test_a_row_that_loses_its_pages_and_gets_others_at_once_is_encoded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two continue together: the older takes pages of the newer, for which fewer than it had are enough."""
    monkeypatch.setattr(decode_loop, "STEPS_PER_LAUNCH", 8)
    prompt, seeds = [5, 6, 7], (0, 6)

    def drawn(room: int) -> list[Completion]:
        def go_on(event: CompletionDelta | Completion) -> None:
            for name, seed, tokens, given in (
                ("older", seeds[0], first.tokens, [*range(9, 18)]),
                ("newer", seeds[1], event.tokens, [9]),
            ):
                assert len(tokens) == 3
                later.append(Asked(request_queue, prompt, [*tokens, *given], seed, max_tokens=6, conversation_id=name))
            asked.set()

        later, asked = list[Asked](), threading.Event()
        with serving(ready("graph"), room=room) as request_queue:
            first = Asked(request_queue, prompt, [], seeds[0], conversation_id="older").done()
            request_queue.submit(Request(prompt, [], seeds[1], LIMIT, go_on, conversation_id="newer"))
            assert asked.wait(MIN_SPLIT_KV_LENGTH)
            return [one.done() for one in later]

    for few, many in zip(drawn(34), drawn(0), strict=True):
        assert few.tokens == many.tokens and few.logp == pytest.approx(many.logp, abs=1e-5)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_turn_depends_on_its_request_alone(decoder: str) -> None:
    """Not on who had its slot before, nor on another turn of its conversation, earlier or under way."""
    with serving(ready(decoder, min_tokens=LIMIT), slots=1) as request_queue:
        narrow = Asked(
            request_queue, [5, 6], [], 1, max_tokens=4, sampling_params=SamplingParams(top_k=2, min_tokens=LIMIT)
        ).done()
        whole = Asked(request_queue, [5, 6], [], 2, max_tokens=4, sampling_params=SamplingParams()).done()
        assert max(narrow.kept_mass) < 1 and set(whole.kept_mass) == {1.0}
    with serving(ready(decoder, min_tokens=LIMIT)) as request_queue:
        given = [*Asked(request_queue, [5, 6], [], 1, max_tokens=3, conversation_id="a").done().tokens, 7]
        anew = [Asked(request_queue, [5, 6], given, seed, max_tokens=6).done() for seed in (8, 9)]
        more: Any = {"max_tokens": 6, "conversation_id": "a", "stream": True}
        turns = [Asked(request_queue, [5, 6], given, seed, **more) for seed in (8, 9)]
        request_queue.end_conversation("a")  # turns that are under way come to their ends
        assert [one.done().tokens for one in turns] == [one.tokens for one in anew]


def test_stop_strings_are_prepared_once_however_many_requests_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = list[tuple[str, ...]]()

    def stops(strings: tuple[str, ...], *_: Any) -> Any:
        prepared.append(strings)
        return SimpleNamespace(may_complete=bytes(VOCAB))

    monkeypatch.setattr(continuous_batching, "StopStrings", stops)
    sampler = ready("group", rows=20, min_tokens=LIMIT)
    sampler.lm.tokenizer = None
    with serving(sampler, slots=20) as request_queue:
        asked = [Asked(request_queue, [5, 6], [], i, max_tokens=4, stop=(f"own {i}",)) for i in range(20)]
        assert all(len(one.done().tokens) == 4 for one in asked)
    assert len(prepared) == 20


def test_stop_strings_of_requests_that_are_over_are_not_kept_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 16 requests that are over are kept beside one for each slot."""
    prepared = list[str]()

    def stops(strings: tuple[str, ...], *_: Any) -> Any:
        prepared.extend(strings)
        return SimpleNamespace(may_complete=bytes(VOCAB))

    monkeypatch.setattr(continuous_batching, "StopStrings", stops)
    sampler = ready("group", rows=1, min_tokens=LIMIT)
    sampler.lm.tokenizer = None
    names = [str(i) for i in range(17)]
    with serving(sampler, slots=1) as request_queue:
        for name in [*names, "0", "17", "17", "0"]:
            assert len(Asked(request_queue, [5, 6], [], 1, max_tokens=1, stop=(name,)).done().tokens) == 1
    assert prepared == [*names, "17", "0"], "the eighteenth takes the place of the others"


def test_a_sampler_for_agents_draws_plain_prompts_as_any_other() -> None:
    lm, prompts = model_of(), Prompts.of(prompts_of())
    plain = sampler_of(lm, 6)
    visited = LocalConversationEngine(lm, 6, 1.0, torch.Generator().manual_seed(0), SamplingParams())
    for how in ({"seed": 3}, {"seed": 3, "limit": 2}, {"greedy": True}, {}):
        got, want = (sampler.generate(prompts, 2, **how) for sampler in (visited, plain))  # type: ignore[arg-type]
        assert torch.equal(got.response, want.response) and torch.equal(got.logp_sampler, want.logp_sampler)


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_end_of_a_turn_is_its_own_and_not_that_of_the_turn_before_in_its_slot(
    decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request ends at a stop string. The second takes its slot and is cut off at its limit."""
    stops = SimpleNamespace(may_complete=bytes([1] * VOCAB), end=lambda tokens, _: 2 if len(tokens) >= 2 else 0)
    monkeypatch.setattr(continuous_batching, "StopStrings", lambda *_: stops)
    sampler = ready(decoder, min_tokens=2)
    sampler.lm.tokenizer = None
    never = SamplingParams(min_tokens=LIMIT)  # no end token
    with serving(sampler, slots=1) as request_queue:
        first = Asked(request_queue, [5, 6], [], 1, max_tokens=4, stop=("x",)).done()
        second = Asked(request_queue, [5, 6], [], 2, max_tokens=4, sampling_params=never).done()
    assert (len(first.tokens), first.finish_reason) == (2, "stop")
    assert (len(second.tokens), second.finish_reason) == (4, "length")


def test_who_asks_again_as_soon_as_the_desk_is_closed_is_refused() -> None:
    request_queue, refused = RequestQueue(2), list[str]()

    def ask_again(_: CompletionDelta | Completion) -> None:
        with pytest.raises(RunError, match="is closed"):
            Asked(request_queue, [1], [], 1)
        refused.append("refused")

    request_queue.submit(Request([1], [], 0, 1, ask_again))
    request_queue.close()
    assert refused and not request_queue.active


def test_the_decoder_of_groups_is_the_one_that_serves() -> None:
    decoder: Any = ready("group").runner
    assert decoder.func is PagedRunner


# ---- taken together ----------------------------------------------------------------------------------------------


def a_run(**more: Any) -> DecodeLoop:
    """A run of which nothing is there but what decides who enters."""
    run = object.__new__(DecodeLoop)
    run.delay_start, run.in_flight = math.inf, lambda: None
    run.scheduler, run.generation = SimpleNamespace(resuming=[], waiting=[3]), SimpleNamespace(accepts_requests=True)  # type: ignore[assignment]
    vars(run).update(more)
    return run


def test_requests_that_follow_each_other_wait_for_those_behind_them_while_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [10.0]
    monkeypatch.setattr(decode_loop.time, "perf_counter", lambda: clock[0])
    run = a_run()
    assert run._should_delay(2) and run._should_delay(1) and not run._should_delay(0)  # none came any more
    for clock[0] in (20.0, 20.0 + decode_loop.MAX_DELAY_SECONDS / 2):
        assert run._should_delay(1)
    clock[0] = 20.0 + decode_loop.MAX_DELAY_SECONDS
    assert not run._should_delay(1) and run._should_delay(1)  # nobody waits longer; the next ones begin anew
    assert not a_run(in_flight=None)._should_delay(1)  # nothing runs
    assert not a_run(generation=SimpleNamespace(accepts_requests=False))._should_delay(1)
    assert not a_run(scheduler=SimpleNamespace(resuming=[], waiting=[]))._should_delay(1)
    drawn = SimpleNamespace(
        accepts_requests=True, poll_observations=lambda _: [(3, [])], new_requests=list, length_limits=torch.zeros(4)
    )
    assert (
        a_run(generation=drawn, length_limits=[0] * 4, _finish=lambda _: None)._poll(wait=False) == 0
    )  # one left, and none came


def test_rows_whose_turns_ended_together_go_on_when_all_of_them_are_back() -> None:
    asked = {4: 9, 5: 9}
    drawn = SimpleNamespace(accepts_requests=False, turns=SimpleNamespace(pending=asked))
    run = a_run(
        generation=drawn, entry_launch={1: 7, 2: 7, 4: 7, 5: 8}, scheduler=SimpleNamespace(resuming=[1, 2], waiting=[])
    )
    assert not run._turn_group_complete
    del asked[4]
    assert run._turn_group_complete
    run.scheduler.resuming.clear()
    assert not run._turn_group_complete


def test_threads_take_turns_while_requests_are_served() -> None:
    before = sys.getswitchinterval()
    with short_switch_interval():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_SECONDS)
    assert sys.getswitchinterval() == before

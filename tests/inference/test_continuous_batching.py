"""Continuous batching: the tokens of a request do not depend on when it arrives or what else is decoded."""

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

LIMIT, TIMEOUT = 24, 60
"""Maximum number of tokens after a prompt; seconds that a test waits for an event."""
RUNNERS = ("paged", "graphs", "eager", *(["cuda"] if torch.cuda.is_available() else []))
pytestmark = pytest.mark.long


def make_engine(runner: str, **more: Any) -> LocalEngine:
    lm = model_of(dtype=torch.float32 if runner == "cuda" else torch.float64)
    if runner == "cuda":
        lm.model.to("cuda")
    sampler = sampler_of(lm, LIMIT, rows=more.pop("rows", 3), **more)
    if runner == "graphs":
        cuda_graphs, why = cuda_graph_runner(lm)
        assert cuda_graphs is not None, why
        sampler.runner = cuda_graphs
    elif runner == "eager":
        lm.can_share_prompts = False
    assert sampler.runner is not EagerRunner and (runner != "cuda" or sampler.runner is not PagedRunner)
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
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert not failed, failed


class Submitted:
    """A submitted request and the queue of its outputs."""

    def __init__(self, request_queue: RequestQueue, prompt: list[int], response: list[int], seed: int, **more: Any):
        self.events: queue.Queue[CompletionDelta | Completion] = queue.Queue()
        more = {"max_tokens": LIMIT} | more
        self.request = Request(list(prompt), list(response), seed, on_output=self.events.put, **more)
        request_queue.submit(self.request)

    def done(self) -> Completion:
        while True:
            event = self.events.get(timeout=TIMEOUT)
            if isinstance(event, Completion):
                return event


def observation_after(response: int, tokens: list[int]) -> list[int]:
    """Return the observation after a turn: none after 14 tokens, else it depends on the response and its length."""
    if len(tokens) >= 14:
        return []
    return [(7 * response + len(tokens) + i) % (VOCAB - 4) + 4 for i in range(1 + (response + len(tokens)) % 3)]


def hold_conversation(
    request_queue: RequestQueue, prompt: list[int], response: int, seed: int, turn_tokens: int = 6
) -> tuple[list[int], list[float]]:
    """Hold a conversation turn by turn. Return its tokens and the log-probs of the sampled ones."""
    tokens, logp = list[int](), list[float]()
    while len(tokens) < LIMIT:
        asked = Submitted(request_queue, prompt, tokens, seed, max_tokens=turn_tokens, conversation_id=response)
        done = asked.done()
        assert not done.error and done.version == 5 and done.tokens
        tokens, logp = tokens + done.tokens, logp + done.logp
        more = observation_after(response, tokens)
        if not more or len(tokens) + len(more) >= LIMIT:
            break
        tokens = tokens + more
    request_queue.end_conversation(response)
    return tokens, logp


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_request_that_takes_the_id_of_one_that_just_finished_reads_its_own_prompt(runner: str) -> None:
    first, second, third = [5, 6, 7, 8, 9, 10, 11, 12], [12, 11, 10, 9, 8, 7, 6, 5], [9, 4, 6]
    with serving(make_engine(runner)) as request_queue:
        alone = Submitted(request_queue, third, [], 3).done()
    with serving(make_engine(runner), slots=2) as request_queue:
        later = list[Submitted]()

        def ask_at_once(event: CompletionDelta | Completion) -> None:
            if isinstance(event, Completion):  # in the thread that decodes: before its next step
                later.append(Submitted(request_queue, third, [], 3))
                asked.set()

        asked = threading.Event()
        beside = Submitted(request_queue, first, [], 1, stream=True)
        beside.events.get(timeout=TIMEOUT)  # it runs
        request_queue.submit(Request(second, [], 2, max_tokens=3, on_output=ask_at_once))
        assert asked.wait(TIMEOUT)
        done, other = later[0].done(), beside.done()
    assert not other.error and done.tokens == alone.tokens
    assert torch.allclose(torch.tensor(done.logp), torch.tensor(alone.logp), atol=1e-5)


@pytest.mark.parametrize("runner", RUNNERS)
def test_conversations_over_requests_equal_those_of_one_generate_call(runner: str) -> None:
    sampler = make_engine(runner)
    prompts, samples = Prompts.of(prompts_of()), 2
    play = AtOnce(observation_after)
    play.turn_tokens = 6
    seeds = response_seeds(3, samples, torch.Generator(), 11).flatten().tolist()
    plain = make_engine("paged").generate(
        Prompts(prompts.prompt, prompts.problem, start_episodes=play), samples, seed=11
    )
    ids = [row[row >= 0].tolist() for row in prompts.prompt]
    conversations: dict[int, tuple[list[int], list[float]]] = {}
    with serving(sampler) as request_queue:

        def one(i: int) -> None:
            conversations[i] = hold_conversation(request_queue, ids[i // samples], i, seeds[i])

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(seeds))]
        random.Random(0).shuffle(threads)
        [thread.start() for thread in threads]
        [thread.join(TIMEOUT) for thread in threads]
    for i in range(len(seeds)):
        present, mask = (part.flatten(0, 1)[i] for part in (plain.present, plain.mask))
        assert conversations[i][0] == plain.response.flatten(0, 1)[i][present].tolist(), i
        logp = plain.logp_sampler.flatten(0, 1)[i][mask]
        assert torch.allclose(torch.tensor(conversations[i][1]), logp, atol=1e-5)
    assert len({len(tokens) for tokens, _ in conversations.values()}) > 1


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_turn_is_the_same_cached_streamed_and_prefilled_again(runner: str) -> None:
    """If the sequence was removed, or its id belongs to another request, the conversation is prefilled again."""
    sampler = make_engine(runner)
    with serving(sampler, slots=2) as request_queue:
        first = Submitted(request_queue, [5, 6, 7], [], 1, max_tokens=4, conversation_id="a").done()
        given = [*first.tokens, 9, 10]
        others = [Submitted(request_queue, [8, i], [], i, max_tokens=5, conversation_id=i) for i in range(5)]
        [other.done() for other in others]  # its sequence id is needed
        again = Submitted(request_queue, [5, 6, 7], given, 1, max_tokens=6, conversation_id="a", stream=True)
        shown, logp = list[int](), list[float]()
        while not isinstance(event := again.events.get(timeout=TIMEOUT), Completion):
            shown, logp = shown + event.tokens, logp + event.logp
        assert event.tokens[: len(shown)] == shown and len(logp) == len(shown)
        assert logp == pytest.approx(event.logp[: len(shown)], abs=1e-6)
        assert Submitted(request_queue, [5, 6, 7], given, 1, max_tokens=6).done().tokens == event.tokens
        assert Submitted(request_queue, [5, 6, 7], [], 1, max_tokens=4).done() == first
        exact = Submitted(request_queue, [5, 6, 7], first.tokens, 1, max_tokens=2, conversation_id="a").done()
        assert len(exact.tokens) >= 1 and not exact.error


@pytest.mark.parametrize("runner", RUNNERS)
def test_each_request_has_its_own_sampling_parameters(runner: str) -> None:
    sampler = make_engine(runner)
    greedy = make_engine("paged").generate(Prompts.of(torch.tensor([[5, 6]])), 1, greedy=True)
    cold = make_engine("paged", temperature=0.3)
    narrow = make_engine("paged", top_k=2)
    wanted = [
        greedy.response[0, 0][greedy.mask[0, 0]].tolist(),
        *(
            (r := one.generate(Prompts.of(torch.tensor([[5, 6]])), 1, seed=3)).response[0, 0][r.mask[0, 0]].tolist()
            for one in (cold, narrow, make_engine("paged"))
        ),
    ]
    seed = int(response_seeds(1, 1, torch.Generator(), 3))
    with serving(sampler) as request_queue:
        asked = [
            Submitted(request_queue, [5, 6], [], seed, greedy=True),
            Submitted(request_queue, [5, 6], [], seed, temperature=0.3),
            Submitted(request_queue, [5, 6], [], seed, sampling_params=SamplingParams(top_k=2)),
            Submitted(request_queue, [5, 6], [], seed),
        ]
        done = [one.done() for one in asked]
    assert [one.tokens for one in done] == wanted
    assert min(done[2].kept_mass) < 1 and set(done[0].kept_mass) == {1.0}


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_cancelled_request_frees_its_sequence_and_affects_no_other(runner: str) -> None:
    sampler = make_engine(runner, rows=1, min_tokens=LIMIT)
    with serving(sampler, slots=2) as request_queue:
        alone = Submitted(request_queue, [4, 5], [], 3).done()
        victims = [Submitted(request_queue, [6, i], [], 1, stream=True) for i in range(4)]
        request_queue.cancel(victims[3].request)  # it waits for a sequence id
        request_queue.cancel(victims[0].request)  # it runs, or is about to
        other = Submitted(request_queue, [4, 5], [], 3)
        assert other.done().tokens == alone.tokens
        for victim in victims[1:3]:
            assert len(victim.done().tokens) == LIMIT
        assert not request_queue.active


def test_a_full_or_closed_queue_rejects_requests() -> None:
    request_queue = RequestQueue(2)
    asked = [Submitted(request_queue, [1], [], i) for i in range(2)]
    with pytest.raises(QueueFullError):
        Submitted(request_queue, [1], [], 3)
    request_queue.cancel(asked[0].request)
    last = Submitted(request_queue, [1], [], 4)
    request_queue.close()
    assert "closed" in last.done().error and "closed" in asked[1].done().error and asked[0].events.empty()
    with pytest.raises(RunError, match="is closed"):
        Submitted(request_queue, [1], [], 5)


@pytest.mark.parametrize("runner", ["paged", "graphs"])
def test_a_small_cache_preempts_and_the_tokens_stay_the_same(runner: str) -> None:
    def generate(room: int) -> list[list[int]]:
        with serving(make_engine(runner, rows=4, min_tokens=LIMIT), slots=6, room=room) as request_queue:
            asked = [Submitted(request_queue, [4 + i % 2, 5, 6], [], i, conversation_id=i) for i in range(6)]
            first = [one.done().tokens for one in asked]
            again = [
                Submitted(request_queue, [4 + i % 2, 5, 6], [*tokens[:8], 7], i, conversation_id=i)
                for i, tokens in enumerate(first)
            ]
            return first + [one.done().tokens for one in again]

    size = 64 if runner == "graphs" else 32
    assert generate(3 * size) == generate(0)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (paged, decode_ops, decode_state, cuda_graph):
        monkeypatch.setattr(module, "BLOCK_SIZE", 2)
    monkeypatch.setattr(paged, "WIDE_BLOCK_SIZE", 2)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("runner", ["paged", "graphs"])
def test_a_conversation_continues_although_idle_ones_fill_the_cache(runner: str) -> None:
    """The newest one needs a block, no sequence runs, and an older one has the remaining blocks."""

    def generate(room: int) -> Completion:
        with serving(make_engine(runner, min_tokens=LIMIT), room=room) as request_queue:
            Submitted(request_queue, [4, 5, 6], [], 1, max_tokens=6, conversation_id="older").done()
            first = Submitted(request_queue, [7, 5, 6], [], 2, max_tokens=6, conversation_id="newer").done()
            given = [*first.tokens, 9, 10, 11, 12, 13]
            return Submitted(request_queue, [7, 5, 6], given, 2, max_tokens=6, conversation_id="newer").done()

    few, many = generate(24), generate(0)
    assert few.tokens == many.tokens and few.logp == pytest.approx(many.logp, abs=1e-5)


@pytest.mark.usefixtures("small_blocks")
def test_a_sequence_that_is_preempted_and_rescheduled_at_once_is_prefilled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two resume together: the older one takes blocks of the newer one, which then needs fewer than it had."""
    monkeypatch.setattr(decode_loop, "STEPS_PER_LAUNCH", 8)
    prompt, seeds = [5, 6, 7], (0, 6)

    def generate(room: int) -> list[Completion]:
        def go_on(event: CompletionDelta | Completion) -> None:
            for name, seed, tokens, given in (
                ("older", seeds[0], first.tokens, [*range(9, 18)]),
                ("newer", seeds[1], event.tokens, [9]),
            ):
                assert len(tokens) == 3
                later.append(
                    Submitted(request_queue, prompt, [*tokens, *given], seed, max_tokens=6, conversation_id=name)
                )
            asked.set()

        later, asked = list[Submitted](), threading.Event()
        with serving(make_engine("graphs"), room=room) as request_queue:
            first = Submitted(request_queue, prompt, [], seeds[0], conversation_id="older").done()
            request_queue.submit(Request(prompt, [], seeds[1], LIMIT, go_on, conversation_id="newer"))
            assert asked.wait(TIMEOUT)
            return [one.done() for one in later]

    for few, many in zip(generate(34), generate(0), strict=True):
        assert few.tokens == many.tokens and few.logp == pytest.approx(many.logp, abs=1e-5)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_turn_depends_only_on_its_request(runner: str) -> None:
    """Not on the previous request with its sequence id, nor on another turn of its conversation."""
    with serving(make_engine(runner, min_tokens=LIMIT), slots=1) as request_queue:
        narrow = Submitted(
            request_queue, [5, 6], [], 1, max_tokens=4, sampling_params=SamplingParams(top_k=2, min_tokens=LIMIT)
        ).done()
        whole = Submitted(request_queue, [5, 6], [], 2, max_tokens=4, sampling_params=SamplingParams()).done()
        assert max(narrow.kept_mass) < 1 and set(whole.kept_mass) == {1.0}
    with serving(make_engine(runner, min_tokens=LIMIT)) as request_queue:
        given = [*Submitted(request_queue, [5, 6], [], 1, max_tokens=3, conversation_id="a").done().tokens, 7]
        anew = [Submitted(request_queue, [5, 6], given, seed, max_tokens=6).done() for seed in (8, 9)]
        more: Any = {"max_tokens": 6, "conversation_id": "a", "stream": True}
        turns = [Submitted(request_queue, [5, 6], given, seed, **more) for seed in (8, 9)]
        request_queue.end_conversation("a")  # running turns finish
        assert [one.done().tokens for one in turns] == [one.tokens for one in anew]


def test_stop_strings_of_many_requests_are_prepared_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = list[tuple[str, ...]]()

    def stops(strings: tuple[str, ...], *_: Any) -> Any:
        prepared.append(strings)
        return SimpleNamespace(may_complete=bytes(VOCAB))

    monkeypatch.setattr(continuous_batching, "StopStrings", stops)
    sampler = make_engine("paged", rows=20, min_tokens=LIMIT)
    sampler.lm.tokenizer = None
    with serving(sampler, slots=20) as request_queue:
        asked = [Submitted(request_queue, [5, 6], [], i, max_tokens=4, stop=(f"own {i}",)) for i in range(20)]
        assert all(len(one.done().tokens) == 4 for one in asked)
    assert len(prepared) == 20


def test_the_cache_of_prepared_stop_strings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds those of 16 finished requests, and one for each sequence."""
    prepared = list[str]()

    def stops(strings: tuple[str, ...], *_: Any) -> Any:
        prepared.extend(strings)
        return SimpleNamespace(may_complete=bytes(VOCAB))

    monkeypatch.setattr(continuous_batching, "StopStrings", stops)
    sampler = make_engine("paged", rows=1, min_tokens=LIMIT)
    sampler.lm.tokenizer = None
    names = [str(i) for i in range(17)]
    with serving(sampler, slots=1) as request_queue:
        for name in [*names, "0", "17", "17", "0"]:
            assert len(Submitted(request_queue, [5, 6], [], 1, max_tokens=1, stop=(name,)).done().tokens) == 1
    assert prepared == [*names, "17", "0"], "the eighteenth takes the place of the others"


def test_the_conversation_engine_generates_single_turn_responses_like_the_local_engine() -> None:
    lm, prompts = model_of(), Prompts.of(prompts_of())
    plain = sampler_of(lm, 6)
    visited = LocalConversationEngine(lm, 6, 1.0, torch.Generator().manual_seed(0), SamplingParams())
    for how in ({"seed": 3}, {"seed": 3, "limit": 2}, {"greedy": True}, {}):
        got, want = (sampler.generate(prompts, 2, **how) for sampler in (visited, plain))  # type: ignore[arg-type]
        assert torch.equal(got.response, want.response) and torch.equal(got.logp_sampler, want.logp_sampler)


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_finish_reason_is_not_that_of_the_previous_request_with_the_same_id(
    runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request ends at a stop string. The second gets its sequence id and ends at max_tokens."""
    stops = SimpleNamespace(may_complete=bytes([1] * VOCAB), end=lambda tokens, _: 2 if len(tokens) >= 2 else 0)
    monkeypatch.setattr(continuous_batching, "StopStrings", lambda *_: stops)
    sampler = make_engine(runner, min_tokens=2)
    sampler.lm.tokenizer = None
    never = SamplingParams(min_tokens=LIMIT)  # no end token
    with serving(sampler, slots=1) as request_queue:
        first = Submitted(request_queue, [5, 6], [], 1, max_tokens=4, stop=("x",)).done()
        second = Submitted(request_queue, [5, 6], [], 2, max_tokens=4, sampling_params=never).done()
    assert (len(first.tokens), first.finish_reason) == (2, "stop")
    assert (len(second.tokens), second.finish_reason) == (4, "length")


def test_a_callback_that_submits_again_when_the_queue_closes_gets_an_error() -> None:
    request_queue, refused = RequestQueue(2), list[str]()

    def ask_again(_: CompletionDelta | Completion) -> None:
        with pytest.raises(RunError, match="is closed"):
            Submitted(request_queue, [1], [], 1)
        refused.append("refused")

    request_queue.submit(Request([1], [], 0, 1, ask_again))
    request_queue.close()
    assert refused and not request_queue.active


def test_the_paged_runner_serves_requests() -> None:
    runner: Any = make_engine("paged").runner
    assert runner.func is PagedRunner


# ---- delayed starts ----------------------------------------------------------------------------------------------


def make_loop(**more: Any) -> DecodeLoop:
    """Return a decode loop with only the state that decides when sequences start."""
    loop = object.__new__(DecodeLoop)
    loop.delay_start, loop.in_flight = math.inf, lambda: None
    loop.scheduler, loop.generation = SimpleNamespace(resuming=[], waiting=[3]), SimpleNamespace(accepts_requests=True)  # type: ignore[assignment]
    vars(loop).update(more)
    return loop


def test_requests_that_arrive_closely_are_delayed_to_start_together_while_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [10.0]
    monkeypatch.setattr(decode_loop.time, "perf_counter", lambda: clock[0])
    loop = make_loop()
    assert loop._should_delay(2) and loop._should_delay(1) and not loop._should_delay(0)  # no more arrived
    for clock[0] in (20.0, 20.0 + decode_loop.MAX_DELAY_SECONDS / 2):
        assert loop._should_delay(1)
    clock[0] = 20.0 + decode_loop.MAX_DELAY_SECONDS
    assert not loop._should_delay(1) and loop._should_delay(1)  # the maximum delay; the next ones are delayed again
    assert not make_loop(in_flight=None)._should_delay(1)  # nothing runs
    assert not make_loop(generation=SimpleNamespace(accepts_requests=False))._should_delay(1)
    assert not make_loop(scheduler=SimpleNamespace(resuming=[], waiting=[]))._should_delay(1)
    generation = SimpleNamespace(
        accepts_requests=True, poll_observations=lambda _: [(3, [])], new_requests=list, length_limits=torch.zeros(4)
    )
    assert (
        make_loop(generation=generation, length_limits=[0] * 4, _finish=lambda _: None)._poll(wait=False) == 0
    )  # one left, and none came


def test_sequences_whose_turns_ended_together_resume_together() -> None:
    asked = {4: 9, 5: 9}
    generation = SimpleNamespace(accepts_requests=False, turns=SimpleNamespace(pending=asked))
    loop = make_loop(
        generation=generation,
        entry_launch={1: 7, 2: 7, 4: 7, 5: 8},
        scheduler=SimpleNamespace(resuming=[1, 2], waiting=[]),
    )
    assert not loop._turn_group_complete
    del asked[4]
    assert loop._turn_group_complete
    loop.scheduler.resuming.clear()
    assert not loop._turn_group_complete


def test_the_switch_interval_is_short_while_requests_are_served() -> None:
    before = sys.getswitchinterval()
    with short_switch_interval():
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_SECONDS)
    assert sys.getswitchinterval() == before

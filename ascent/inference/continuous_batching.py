"""Continuous batching: requests join the rows that are being decoded, wherever one is free.

A slot holds a response while a turn of it is drawn, and afterwards for as long as the slot is not needed: a request
that continues the same conversation finds its keys and values there. One that finds nothing is encoded anew, with the
same result.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ascent.core.sampling_params import SamplingParams
from ascent.core.types import Prompts, Rollouts
from ascent.inference.engine import LocalEngine
from ascent.inference.generation_state import GenerationState
from ascent.inference.occupancy import OccupancyTimeline
from ascent.inference.request_queue import (
    Completion,
    CompletionDelta,
    FinishReason,
    RecordedConversation,
    Request,
    RequestQueue,
)
from ascent.inference.runners.eager import EagerRunner
from ascent.inference.stop_strings import StopStrings
from ascent.ops.token_sampling import response_seeds

SWITCH = 0.0005
"""Seconds for which a thread may keep the interpreter while another waits for it."""
KEPT = 4096
"""Spans of the timeline that are kept: a server runs for long."""


class IdleSequences:
    """What decoders ask of turns (`engines.turns.Turns`): which responses wait, and where their turns begin."""

    def __init__(self, count: int):
        self.pending: dict[int, int] = {}
        """Slots whose turn is over, and how many tokens they have; the first has waited longest."""
        self.turn_start = [0] * count
        self.terminated: set[int] = set()


class ContinuousBatch(GenerationState):
    """What was drawn for requests, one row per slot."""

    def __init__(self, queue: RequestQueue, sampler: LocalEngine, head: Any, slots: int, limit: int, longest: int):
        """`limit`: tokens behind a prompt; `longest`: those of a prompt."""
        seeds = torch.zeros(slots, dtype=torch.long)
        super().__init__(slots, limit, sampler.lm.ends, head, seeds, sampler.temperature, sampler.sampling_params)
        self.queue, self.sampler, self.max_prompt_tokens, self.accepts_requests = queue, sampler, longest, True
        self.kept_mass = self.masses = torch.ones(slots, limit)
        """Those of a turn with every token allowed are not written: what stands there is another turn's."""
        self.parked = IdleSequences(slots)
        self.turns: Any = self.parked
        self.unfinished = {-1}  # the call is over when the desk is closed
        self.keeps = sampler.lm.shares
        """Can a row wait for its next turn?"""
        self.free = list(range(slots))[::-1]
        self.waiting: list[Request] = []
        """Those for whom no slot is free."""
        self.request: dict[int, Request] = {}
        """By slot, what is being drawn."""
        self.slot: dict[Any, int] = {}
        """Slots that hold a conversation, by its name."""
        self.named: dict[int, Any] = {}
        self.told: dict[int, int] = {}
        """Tokens that a watched request was told of."""
        self.prompts: dict[tuple[int, ...], int] = {}
        self.prompt: dict[int, tuple[int, ...]] = {}
        """The prompt of each slot; slots with the same one share its pages."""
        self.readers: Counter[tuple[int, ...]] = Counter()
        self.numbered = 0
        self.entered: list[int] = []
        self.stopping: dict[tuple[str, ...], StopStrings] = {}

    # ---- what is asked of it while it decodes

    def group_by_sampling(self, responses: list[int]) -> dict[tuple[float, SamplingParams, bool], list[int]]:
        alike: dict[tuple[float, SamplingParams, bool], list[int]] = {}
        for i, slot in enumerate(responses):
            asked = self.request[slot]
            alike.setdefault((asked.temperature, self.sampling_params_of(slot), asked.greedy), []).append(i)
        return alike

    def sampling_params_of(self, response: int) -> SamplingParams:
        own = self.request[response].sampling_params
        return self.sampling_params if own is None else own

    @property
    def needs_tokens(self) -> bool:
        return any(request.stop or request.stream for request in self.request.values())

    @property
    def needs_logprobs(self) -> bool:
        return any(request.stream for request in self.request.values())

    def stop_strings_of(self, response: int) -> StopStrings | None:
        strings = self.request[response].stop
        if not strings:
            return None
        if strings not in self.stopping:
            if len(self.stopping) >= 16 + len(self.lengths):  # those of requests that are under way have room
                self.stopping.clear()
            self.stopping[strings] = StopStrings(strings, self.sampler.lm.tokenizer, self.sampler.lm.vocab)
        return self.stopping[strings]

    @property
    def waits_for_input(self) -> bool:
        return True

    def finished_length(self, response: int, before: int, after: int, done: int, fresh: Any) -> int:
        begin = self.turn_start(response)
        if fresh is not None and before < begin:  # what is fed of an observation was not drawn
            fresh, before = fresh[begin - before :], min(begin, after)
        length = super().finished_length(response, before, after, done, fresh)
        if fresh is not None and not length:
            self._show(response, max(after, begin))
        return length

    def finish_turns(self, responses: list[int]) -> list[int]:
        for slot in responses:
            length = int(self.lengths[slot])
            if bool(self.stopped[slot]) or length >= int(self.length_limits[slot]):
                self._finish(slot, length)
            else:
                self._show(slot, length)
        return []

    def _show(self, slot: int, length: int) -> None:
        request, told = self.request[slot], self.told.get(slot, self.turn_start(slot))
        if request.stream and length > told and request in self.queue.active:
            self.told[slot] = length
            request.on_output(
                CompletionDelta(self.tokens_of(slot, told, length), self.logp.numpy()[slot, told:length].tolist())
            )

    def _finish(self, slot: int, length: int) -> None:
        """The turn in a slot is over; its row waits for the next one, or leaves."""
        whole = self.request[slot].greedy or self.sampling_params_of(slot).unrestricted
        request, begin = self.request.pop(slot), self.turn_start(slot)
        self.told.pop(slot, None)
        drawn = slice(begin, length)
        tokens, logp = self.tokens_of(slot, begin, length), self.logp.numpy()[slot, drawn].tolist()
        mass = [1.0] * len(tokens) if whole else self.masses.numpy()[slot, drawn].tolist()
        self.parked.pending[slot] = length
        finish_reason: FinishReason = "stop" if self.stopped[slot] else "length"
        self.queue.finish(request, Completion(tokens, logp, mass, finish_reason, self.sampler.version))

    # ---- requests that come and go

    def poll_observations(self, wait: bool) -> list[tuple[int, list[int]]]:
        taken = self.queue.poll(wait)
        del self.timeline.spans[:-KEPT]
        if self.queue.closed:
            self.unfinished.clear()
        for name in taken.ended_conversations:
            self.named.pop(self.slot.pop(name, -1), None)
        left = [slot for slot in self.parked.pending if slot not in self.named or not self.keeps]
        gone = set(taken.cancelled)
        left += [slot for slot, request in self.request.items() if request in gone]
        heard: list[tuple[int, list[int]]] = [(slot, []) for slot in dict.fromkeys(left)]
        for slot, _ in heard:
            self._leave(slot)
        requests, self.waiting = [*self.waiting, *taken.requests], []
        for request in requests:
            if request not in gone:
                heard += self._place(request)
        return heard

    def new_requests(self) -> list[tuple[int, int, list[int]]]:
        entered, self.entered = self.entered, []
        return [(slot, self.prompts[self.prompt[slot]], list(self.prompt[slot])) for slot in entered]

    def _leave(self, slot: int) -> None:
        self.parked.pending.pop(slot, None)
        self.request.pop(slot, None), self.told.pop(slot, None)
        self.slot.pop(self.named.pop(slot, None), None)
        ids = self.prompt.pop(slot)
        self.readers[ids] -= 1
        if not self.readers[ids]:
            del self.readers[ids], self.prompts[ids]
        self.free.append(slot)

    def _place(self, request: Request) -> list[tuple[int, list[int]]]:
        """A slot for a request: that of its conversation, or a free one, or that of whoever has waited longest."""
        heard: list[tuple[int, list[int]]] = []
        name = request.conversation_id
        slot = None if name is None else self.slot.get(name)
        if slot in self.request:  # while another turn of it goes on, this one is a conversation of its own
            name = slot = None
        if slot is not None:
            held = int(self.lengths[slot])
            same = tuple(request.prompt) == self.prompt[slot]
            if same and request.response[:held] == self.tokens_of(slot, 0, held) and len(request.response) > held:
                del self.parked.pending[slot]
                self._write(slot, request)
                return [(slot, request.response[held:])]
            heard.append((slot, []))
            self._leave(slot)
        if not self.free and self.parked.pending:
            oldest = next(iter(self.parked.pending))
            heard.append((oldest, []))
            self._leave(oldest)
        if not self.free:
            self.waiting.append(request)
            return heard
        slot, ids = self.free.pop(), tuple(request.prompt)
        if ids not in self.prompts:
            self.prompts[ids] = self.numbered
            self.numbered += 1
        self.readers[ids] += 1
        self.prompt[slot] = ids
        if name is not None:
            self.slot[name], self.named[slot] = slot, name
        self._write(slot, request)
        self.entered.append(slot)
        return heard

    def _write(self, slot: int, request: Request) -> None:
        length = len(request.response)
        self.tokens[slot, :length] = torch.tensor(request.response, dtype=torch.long)
        self.lengths[slot] = self.parked.turn_start[slot] = length
        self.seeds[slot] = request.seed  # type: ignore[index]
        self.length_limits[slot], self.stopped[slot] = min(length + request.max_tokens, self.max_tokens), False
        self.request[slot] = request
        self.stop_string_matches.discard(slot)


class EagerRequestRunner(EagerRunner):
    """Requests for architectures whose cache is not ours: all that wait are decoded together, then the next ones."""

    def __call__(self) -> None:
        drawn = self.generation
        assert isinstance(drawn, ContinuousBatch)
        self.samples = 1
        while drawn.unfinished:
            drawn.poll_observations(wait=not drawn.waiting)
            entered = drawn.new_requests()
            slots = [slot for slot, _, _ in entered]
            ids = {slot: ids + drawn.tokens[slot, : drawn.lengths[slot]].tolist() for slot, _, ids in entered}
            self.prompts = ids  # type: ignore[assignment]
            for start in range(0, len(slots), self.max_num_seqs):
                self._generate_batch(slots[start : start + self.max_num_seqs])
        drawn.timeline.stop()

    def _next(self, hidden: Any, row: list[int], observed: Any) -> tuple[torch.Tensor, list[bool]]:
        assert isinstance(self.generation, ContinuousBatch)
        token = self.generation.sample(hidden, row)
        self.generation.finish_turns(row)
        going = [self.generation.request.get(slot) in self.generation.queue.active for slot in row]
        return token.to(hidden.device), going


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Inside, no thread keeps the interpreter for long: one that decodes gives it up with every operation."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@torch.no_grad()
def serve_requests(
    sampler: LocalEngine, queue: RequestQueue, slots: int, limit: int, longest: int, room: int = 0
) -> OccupancyTimeline:
    """Decode what comes to a desk until it is closed. The calling thread does the work."""
    with sampler.prepared() as head, short_switch_interval():
        drawn = ContinuousBatch(queue, sampler, head, slots, limit, longest)
        if sampler.lm.shares:
            sampler.runner(sampler.lm, [], 1, sampler.rows, drawn, room or sampler.cache_tokens)()
        else:
            EagerRequestRunner(sampler.lm, [], 1, sampler.rows, drawn)()
    return drawn.timeline


class LocalConversationEngine(LocalEngine):
    """Responses are conversations that others lead with the policy, over requests."""

    @torch.no_grad()
    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        if prompts.start_episodes is None:
            return super().generate(prompts, samples, greedy, limit=limit, seed=seed)
        count, limit = len(prompts) * samples, limit or self.limit
        seeds = list(range(count))
        if not greedy:
            seeds = response_seeds(len(prompts), samples, self.generator, seed).flatten().tolist()
        with closing(prompts.start_episodes(prompts, samples, seeds)) as visits:
            visits.begin(
                self.length_limits(prompts, samples, limit).tolist(),
                limit,
                self.temperature,
                self.sampling_params,
                greedy,
            )
            self.latest_timeline = serve_requests(self, visits.queue, count, limit, visits.max_prompt_tokens)
            most, how = (
                min(limit, self.max_sampled_tokens or limit),
                (self.temperature, self.version, self.sampling_params.unrestricted),
            )
            return rollouts_from_conversations(prompts, samples, most, visits.records(), *how)


def rollouts_from_conversations(
    prompts: Prompts,
    samples: int,
    limit: int,
    records: list[RecordedConversation],
    temperature: float,
    version: int,
    whole: bool,
) -> Rollouts:
    """Conversations as rollouts: a group's prompt is what its conversations have in common, from the start.

    `whole`: every token could be drawn.
    """
    shape = (len(prompts), samples)
    shared = [
        _shared(records[i * samples : (i + 1) * samples], row[row >= 0].tolist())
        for i, row in enumerate(prompts.prompt)
    ]
    rows = [_behind(record, shared[i // samples]) for i, record in enumerate(records)]
    width = max(1, *(len(row.response) for row in rows))

    def grid(name: str, kind: torch.dtype, nothing: float = 0) -> Tensor:
        values = [[*getattr(row, name), *[nothing] * (width - len(row.response))] for row in rows]
        return torch.tensor(values, dtype=kind).view(*shape, width)

    mask, longest = grid("sampled", torch.bool), max(map(len, shared))
    length = torch.tensor([len(row.response) for row in rows]).view(*shape, 1)
    notes = np.empty(len(rows), dtype=object)
    notes[:] = [row.note for row in rows]
    return Rollouts(
        prompt=torch.tensor([[*ids, *[-1] * (longest - len(ids))] for ids in shared]),
        problem=prompts.problem,
        response=grid("response", torch.long),
        mask=mask,
        present=torch.arange(width) < length,
        logp_sampler=grid("logp", torch.float32),
        kept_mass=None if whole else grid("kept_mass", torch.float32, 1),
        turn=grid("turn", torch.long),
        environment_seconds=grid("waited", torch.float32),
        limit=limit,
        limits=prompts.limits,
        truncated=torch.tensor([row.truncated for row in rows]).view(shape),
        temperature=temperature,
        version=torch.full((*shape, 1), version),
        valid=torch.tensor([row.valid for row in rows]).view(shape),
        notes=notes.reshape(shape),
    )


def _shared(records: list[RecordedConversation], own: list[int]) -> list[int]:
    """The tokens that the prompts of a group begin with; at least the first one. `own`: if nothing was asked."""
    asked = [record.prompt for record in records if record.prompt]
    if not asked:
        return own
    first = Counter(prompt[0] for prompt in asked).most_common(1)[0][0]
    asked = [prompt for prompt in asked if prompt[0] == first]
    same = next((i for i, tokens in enumerate(zip(*asked, strict=False)) if len(set(tokens)) > 1), min(map(len, asked)))
    return asked[0][:same]


def _behind(record: RecordedConversation, shared: list[int]) -> RecordedConversation:
    """The conversation behind these tokens: the rest of its prompt was given, as observations are."""
    if record.prompt[: len(shared)] != shared:
        why = record.note if not record.valid else "failed: its prompt begins unlike those of its group"
        return RecordedConversation([], [], [], [], [], [], [], True, False, why)
    rest = record.prompt[len(shared) :]
    more = {name: [nothing] * len(rest) + getattr(record, name) for name, nothing in _NOTHING.items()}
    return record._replace(response=rest + record.response, **more)


_NOTHING: dict[str, Any] = {"sampled": False, "logp": 0.0, "kept_mass": 1.0, "turn": 0, "waited": 0.0}

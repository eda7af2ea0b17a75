"""Continuous batching: requests join the running batch as soon as there is a free sequence id.

The sequence of a finished request stays in the KV cache until its blocks or its id are needed. The next request of the
same conversation continues it. If it was removed, the whole conversation is prefilled again, with the same result.
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

SWITCH_INTERVAL_SECONDS = 0.0005
"""Maximum time that a thread holds the interpreter while another one waits, during serving."""
MAX_TIMELINE_SPANS = 4096
"""Bound of the occupancy timeline of a long-running server."""
MAX_CACHED_STOP_STRINGS = 16
"""Prepared stop strings of finished requests that are cached."""


class IdleSequences:
    """Conversations between two requests. It stands in for `EnvironmentTurns`, whose fields runners read."""

    def __init__(self, count: int):
        self.pending: dict[int, int] = {}
        """Lengths of idle sequences by id; the one that has been idle for longest comes first."""
        self.turn_start = [0] * count
        self.terminated: set[int] = set()


class ContinuousBatch(GenerationState):
    """The state of requests that join and leave the running batch.

    A sequence id is a row of the state. It holds a response while a request of it runs, and afterwards until the row is
    needed: the next request of the same conversation then finds its keys and values in the cache.
    """

    def __init__(
        self, queue: RequestQueue, engine: LocalEngine, head: Any, max_requests: int, max_tokens: int, max_prompt: int
    ):
        """`max_tokens`: maximum number of tokens after a prompt. `max_prompt`: maximum number of tokens of a prompt."""
        seeds = torch.zeros(max_requests, dtype=torch.long)
        settings = (engine.temperature, engine.sampling_params)
        super().__init__(max_requests, max_tokens, engine.lm.stop_token_ids, head, seeds, *settings)
        self.queue, self.engine, self.max_prompt_tokens, self.accepts_requests = queue, engine, max_prompt, True
        self.kept_mass = self.kept_masses = torch.ones(max_requests, max_tokens)
        """Not written by unrestricted requests: their entries are stale."""
        self.idle = IdleSequences(max_requests)
        self.turns: Any = self.idle
        self.unfinished = {-1}  # the call returns when the queue is closed
        self.keeps_sequences = engine.lm.can_share_prompts
        """Whether a sequence can wait for its next request. The cache of transformers does not support it."""
        self.free_seq_ids = list(range(max_requests))[::-1]
        self.waiting: list[Request] = []
        """Requests without a sequence id."""
        self.running_requests: dict[int, Request] = {}
        self.seq_by_conversation: dict[Any, int] = {}
        self.conversation_by_seq: dict[int, Any] = {}
        self.streamed_lengths: dict[int, int] = {}
        """Length up to which the tokens of a streaming request have been delivered."""
        self.prompt_ids: dict[tuple[int, ...], int] = {}
        self.prompt_by_seq: dict[int, tuple[int, ...]] = {}
        """Prompt tokens of each sequence. Sequences with the same prompt share its blocks."""
        self.prompt_ref_counts: Counter[tuple[int, ...]] = Counter()
        self.next_prompt_id = 0
        self.new_seq_ids: list[int] = []
        self.cached_stop_strings: dict[tuple[str, ...], StopStrings] = {}

    # ---- interface of the runner

    def group_by_sampling(self, responses: list[int]) -> dict[tuple[float, SamplingParams, bool], list[int]]:
        groups: dict[tuple[float, SamplingParams, bool], list[int]] = {}
        for i, seq_id in enumerate(responses):
            request = self.running_requests[seq_id]
            groups.setdefault((request.temperature, self.sampling_params_of(seq_id), request.greedy), []).append(i)
        return groups

    def sampling_params_of(self, response: int) -> SamplingParams:
        return self.running_requests[response].sampling_params or self.sampling_params

    @property
    def needs_tokens(self) -> bool:
        return any(request.stop or request.stream for request in self.running_requests.values())

    @property
    def needs_logprobs(self) -> bool:
        return any(request.stream for request in self.running_requests.values())

    def stop_strings_of(self, response: int) -> StopStrings | None:
        strings, cache = self.running_requests[response].stop, self.cached_stop_strings
        if not strings:
            return None
        if strings not in cache:
            if len(cache) >= MAX_CACHED_STOP_STRINGS + len(self.lengths):  # more than running requests can use
                cache.clear()
            cache[strings] = StopStrings(strings, self.engine.lm.tokenizer, self.engine.lm.vocab_size)
        return cache[strings]

    @property
    def waits_for_input(self) -> bool:
        return True

    def finished_length(self, response: int, before: int, after: int, finished: int, fresh: Any) -> int:
        start = self.turn_start(response)
        if fresh is not None and before < start:  # tokens of an observation that is fed step by step
            fresh, before = fresh[start - before :], min(start, after)
        length = super().finished_length(response, before, after, finished, fresh)
        if fresh is not None and not length:
            self._stream(response, max(after, start))
        return length

    def finish_turns(self, responses: list[int]) -> list[int]:
        for seq_id in responses:
            length = int(self.lengths[seq_id])
            if bool(self.stopped[seq_id]) or length >= int(self.length_limits[seq_id]):
                self._complete(seq_id, length)
            else:
                self._stream(seq_id, length)
        return []

    def _stream(self, seq_id: int, length: int) -> None:
        """Deliver the new tokens of a streaming request."""
        request, start = self.running_requests[seq_id], self.streamed_lengths.get(seq_id, self.turn_start(seq_id))
        if request.stream and length > start and request in self.queue.active:
            self.streamed_lengths[seq_id] = length
            logp = self.logp.numpy()[seq_id, start:length].tolist()
            request.on_output(CompletionDelta(self.tokens_of(seq_id, start, length), logp))

    def _complete(self, seq_id: int, length: int) -> None:
        """Deliver the completion of a request. Its sequence becomes idle."""
        unrestricted = self.running_requests[seq_id].greedy or self.sampling_params_of(seq_id).unrestricted
        request, start = self.running_requests.pop(seq_id), self.turn_start(seq_id)
        self.streamed_lengths.pop(seq_id, None)
        sampled = slice(start, length)
        tokens, logp = self.tokens_of(seq_id, start, length), self.logp.numpy()[seq_id, sampled].tolist()
        kept_mass = [1.0] * len(tokens) if unrestricted else self.kept_masses.numpy()[seq_id, sampled].tolist()
        self.idle.pending[seq_id] = length
        finish_reason: FinishReason = "stop" if self.stopped[seq_id] else "length"
        self.queue.finish(request, Completion(tokens, logp, kept_mass, finish_reason, self.engine.version))

    # ---- arriving and leaving requests

    def poll_observations(self, wait: bool) -> list[tuple[int, list[int]]]:
        """Poll the queue. Return the tokens to append to idle sequences; no tokens: the sequence is removed."""
        update = self.queue.poll(wait)
        del self.timeline.spans[:-MAX_TIMELINE_SPANS]
        if self.queue.closed:
            self.unfinished.clear()
        for conversation_id in update.ended_conversations:
            self.conversation_by_seq.pop(self.seq_by_conversation.pop(conversation_id, -1), None)
        removed = [
            seq_id for seq_id in self.idle.pending if seq_id not in self.conversation_by_seq or not self.keeps_sequences
        ]
        cancelled = set(update.cancelled)
        removed += [seq_id for seq_id, request in self.running_requests.items() if request in cancelled]
        events: list[tuple[int, list[int]]] = [(seq_id, []) for seq_id in dict.fromkeys(removed)]
        for seq_id, _ in events:
            self._remove(seq_id)
        requests, self.waiting = [*self.waiting, *update.requests], []
        for request in requests:
            if request not in cancelled:
                events += self._place(request)
        return events

    def new_requests(self) -> list[tuple[int, int, list[int]]]:
        new, self.new_seq_ids = self.new_seq_ids, []
        return [(i, self.prompt_ids[self.prompt_by_seq[i]], list(self.prompt_by_seq[i])) for i in new]

    def _remove(self, seq_id: int) -> None:
        self.idle.pending.pop(seq_id, None)
        self.running_requests.pop(seq_id, None), self.streamed_lengths.pop(seq_id, None)
        self.seq_by_conversation.pop(self.conversation_by_seq.pop(seq_id, None), None)
        prompt = self.prompt_by_seq.pop(seq_id)
        self.prompt_ref_counts[prompt] -= 1
        if not self.prompt_ref_counts[prompt]:
            del self.prompt_ref_counts[prompt], self.prompt_ids[prompt]
        self.free_seq_ids.append(seq_id)

    def _place(self, request: Request) -> list[tuple[int, list[int]]]:
        """Assign a request to the sequence of its conversation, a free one, or the one that has idled for longest."""
        events: list[tuple[int, list[int]]] = []
        conversation_id = request.conversation_id
        seq_id = None if conversation_id is None else self.seq_by_conversation.get(conversation_id)
        if seq_id in self.running_requests:  # a concurrent request of a conversation gets a sequence for itself
            conversation_id = seq_id = None
        if seq_id is not None:
            length, prompt = int(self.lengths[seq_id]), self.prompt_by_seq[seq_id]
            is_prefix = tuple(request.prompt) == prompt and request.response[:length] == self.tokens_of(
                seq_id, 0, length
            )
            if is_prefix and len(request.response) > length:
                del self.idle.pending[seq_id]
                self._write(seq_id, request)
                return [(seq_id, request.response[length:])]
            events.append((seq_id, []))
            self._remove(seq_id)
        if not self.free_seq_ids and self.idle.pending:
            oldest = next(iter(self.idle.pending))
            events.append((oldest, []))
            self._remove(oldest)
        if not self.free_seq_ids:
            self.waiting.append(request)
            return events
        seq_id, prompt = self.free_seq_ids.pop(), tuple(request.prompt)
        if prompt not in self.prompt_ids:
            self.prompt_ids[prompt] = self.next_prompt_id
            self.next_prompt_id += 1
        self.prompt_ref_counts[prompt] += 1
        self.prompt_by_seq[seq_id] = prompt
        if conversation_id is not None:
            self.seq_by_conversation[conversation_id] = seq_id
            self.conversation_by_seq[seq_id] = conversation_id
        self._write(seq_id, request)
        self.new_seq_ids.append(seq_id)
        return events

    def _write(self, seq_id: int, request: Request) -> None:
        """Write the tokens, seed and limit of a request to the state."""
        length = len(request.response)
        self.tokens[seq_id, :length] = torch.tensor(request.response, dtype=torch.long)
        self.lengths[seq_id] = self.idle.turn_start[seq_id] = length
        self.seeds[seq_id] = request.seed  # type: ignore[index]
        self.length_limits[seq_id], self.stopped[seq_id] = min(length + request.max_tokens, self.max_tokens), False
        self.running_requests[seq_id] = request
        self.stop_string_matches.discard(seq_id)


class EagerRequestRunner(EagerRunner):
    """Decodes requests without a paged KV cache: batch after batch, each of all requests that wait."""

    def __call__(self) -> None:
        batch = self.generation
        assert isinstance(batch, ContinuousBatch)
        self.samples = 1
        while batch.unfinished:
            batch.poll_observations(wait=not batch.waiting)
            new = batch.new_requests()
            seq_ids = [seq_id for seq_id, _, _ in new]
            prompts = {i: prompt + batch.tokens[i, : batch.lengths[i]].tolist() for i, _, prompt in new}
            self.prompts = prompts  # type: ignore[assignment]
            for start in range(0, len(seq_ids), self.max_num_seqs):
                self._generate_batch(seq_ids[start : start + self.max_num_seqs])
        batch.timeline.stop()

    def _next(self, hidden: Any, seq_ids: list[int], observations: Any) -> tuple[torch.Tensor, list[bool]]:
        batch = self.generation
        assert isinstance(batch, ContinuousBatch)
        token = batch.sample(hidden, seq_ids)
        batch.finish_turns(seq_ids)
        return token.to(hidden.device), [batch.running_requests.get(i) in batch.queue.active for i in seq_ids]


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Shorten the thread switch interval, so that client threads are not delayed by the decode thread."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@torch.no_grad()
def serve_requests(
    engine: LocalEngine,
    queue: RequestQueue,
    max_requests: int,
    max_tokens: int,
    max_prompt: int,
    cache_tokens: int = 0,
) -> OccupancyTimeline:
    """Serve the requests of a queue until it is closed. The calling thread decodes."""
    with engine.prepared() as head, short_switch_interval():
        batch = ContinuousBatch(queue, engine, head, max_requests, max_tokens, max_prompt)
        if engine.lm.can_share_prompts:
            engine.runner(engine.lm, [], 1, engine.rows, batch, cache_tokens or engine.cache_tokens)()
        else:
            EagerRequestRunner(engine.lm, [], 1, engine.rows, batch)()
    return batch.timeline


class LocalConversationEngine(LocalEngine):
    """A `LocalEngine` whose multi-turn responses are conversations of agents, which submit requests to its queue."""

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
        limits = self.length_limits(prompts, samples, limit).tolist()
        with closing(prompts.start_episodes(prompts, samples, seeds)) as conversations:
            conversations.begin(limits, limit, self.temperature, self.sampling_params, greedy)
            max_prompt = conversations.max_prompt_tokens
            self.latest_timeline = serve_requests(self, conversations.queue, count, limit, max_prompt)
            settings = (self.temperature, self.version, self.sampling_params.unrestricted)
            max_tokens = min(limit, self.max_sampled_tokens or limit)
            return rollouts_from_conversations(prompts, samples, max_tokens, conversations.records(), *settings)


def rollouts_from_conversations(
    prompts: Prompts,
    samples: int,
    limit: int,
    conversations: list[RecordedConversation],
    temperature: float,
    version: int,
    unrestricted: bool,
) -> Rollouts:
    """Convert conversations to rollouts. The prompt of a group is the common prefix of its conversations' prompts.

    `unrestricted`: no token was excluded by the sampling parameters.
    """
    shape = (len(prompts), samples)
    group_prompts = [
        _common_prefix(conversations[i * samples : (i + 1) * samples], row[row >= 0].tolist())
        for i, row in enumerate(prompts.prompt)
    ]
    responses = [_after_prefix(record, group_prompts[i // samples]) for i, record in enumerate(conversations)]
    width, prompt_width = max(1, *(len(r.response) for r in responses)), max(map(len, group_prompts))

    def by_token(name: str, dtype: torch.dtype, padding: float = 0) -> Tensor:
        values = [[*getattr(r, name), *[padding] * (width - len(r.response))] for r in responses]
        return torch.tensor(values, dtype=dtype).view(*shape, width)

    length = torch.tensor([len(r.response) for r in responses]).view(*shape, 1)
    notes = np.empty(len(responses), dtype=object)
    notes[:] = [r.note for r in responses]
    return Rollouts(
        prompt=torch.tensor([[*ids, *[-1] * (prompt_width - len(ids))] for ids in group_prompts]),
        problem=prompts.problem,
        response=by_token("response", torch.long),
        mask=by_token("sampled", torch.bool),
        present=torch.arange(width) < length,
        logp_sampler=by_token("logp", torch.float32),
        kept_mass=None if unrestricted else by_token("kept_mass", torch.float32, 1),
        turn=by_token("turn", torch.long),
        environment_seconds=by_token("waited", torch.float32),
        limit=limit,
        limits=prompts.limits,
        truncated=torch.tensor([r.truncated for r in responses]).view(shape),
        temperature=temperature,
        version=torch.full((*shape, 1), version),
        valid=torch.tensor([r.valid for r in responses]).view(shape),
        notes=notes.reshape(shape),
    )


def _common_prefix(conversations: list[RecordedConversation], default: list[int]) -> list[int]:
    """Return the common prefix of the prompts of a group, at least one token; `default` if no request was made."""
    prompts = [record.prompt for record in conversations if record.prompt]
    if not prompts:
        return default
    first_token = Counter(prompt[0] for prompt in prompts).most_common(1)[0][0]
    prompts = [prompt for prompt in prompts if prompt[0] == first_token]
    columns = enumerate(zip(*prompts, strict=False))
    length = next((i for i, tokens in columns if len(set(tokens)) > 1), min(map(len, prompts)))
    return prompts[0][:length]


def _after_prefix(record: RecordedConversation, prefix: list[int]) -> RecordedConversation:
    """Return the conversation after the common prefix. The rest of its prompt counts as an observation."""
    if record.prompt[: len(prefix)] != prefix:
        note = record.note if not record.valid else "failed: its prompt begins unlike those of its group"
        return RecordedConversation([], [], [], [], [], [], [], True, False, note)
    rest = record.prompt[len(prefix) :]
    fields = {name: [value] * len(rest) + getattr(record, name) for name, value in _OBSERVATION_FIELDS.items()}
    return record._replace(response=rest + record.response, **fields)


_OBSERVATION_FIELDS: dict[str, Any] = {"sampled": False, "logp": 0.0, "kept_mass": 1.0, "turn": 0, "waited": 0.0}
"""Fields of an observation token."""

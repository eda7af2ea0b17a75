"""A policy that serving engines draw: each turn that comes to a desk is asked of a server.

    clients ──> endpoint ──> Desk ──> the thread of the run, or of `ascent serve` ──> servers
                              <── Drew, Done ── the thread that hears them

A request has all tokens before its turn, which the server finds in its prefix cache. Its seed follows from that of the
conversation and from where the turn begins. So a server that is lost changes nothing: its requests are sent again. Who
was told of tokens already is told that it failed, should other ones come then.
"""

import time
from collections import deque
from concurrent.futures import CancelledError, Future
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ascent.core.errors import RunError
from ascent.core.protocols import PendingRollout, RolloutEngine, RolloutRequest
from ascent.core.types import Rollouts
from ascent.inference.continuous_batching import rollouts_from_conversations
from ascent.inference.occupancy import OccupancyTimeline
from ascent.inference.remote.engine_adapter import EngineRequest, EngineResponse
from ascent.inference.remote.remote_engine import GOLDEN, RemoteEngine
from ascent.inference.remote.server_client import ServerLostError
from ascent.inference.remote.server_pool import Server, ServerPool
from ascent.inference.request_queue import Completion, CompletionDelta, FinishReason, Request, RequestQueue
from ascent.inference.stop_strings import Stops

KEPT, KEPT_STOPS = 4096, 16
"""Spans of the timeline, and stop strings of requests that are over, that are kept: a server runs for long."""
AWAY = 30.0
"""Seconds after which servers that were left alone are asked whether they are back."""


class RequestAbortedError(ServerLostError):
    """The server gave a response up, and lives."""


@dataclass(eq=False)
class ForwardedRequest:
    """A turn that a server owes."""

    request: Request
    server: Server
    life: int
    """The server's, when it was asked."""


class RequestForwarder:
    """Hands what comes to a desk to servers until the desk is closed.

    `serves`: clients that are no run's. A turn then ends with its stop string, though the versions of its tokens come
    only with a whole answer; what a server refuses fails one turn; and servers that are back are taken back.
    """

    def __init__(
        self, queue: RequestQueue, fleet: ServerPool, lm: Any, version: int, look: float, serves: bool = False
    ):
        self.queue, self.fleet, self.lm, self.version, self.look = queue, fleet, lm, version, look
        self.serves, self.timeline = serves, OccupancyTimeline(fleet.rows)
        self.owed: dict[Request, Future[EngineResponse]] = {}
        self.told: dict[Request, list[int]] = {}
        """Tokens that whoever watches was told of."""
        self.failed: deque[tuple[ForwardedRequest, BaseException]] = deque()
        self.heard = self.tried = time.monotonic()
        self._stops: dict[tuple[str, ...], Stops] = {}

    def __call__(self) -> None:
        try:
            while not self.queue.closed:
                taken = self.queue.poll(wait=not self.failed)
                for request in taken.cancelled:
                    self.told.pop(request, None)
                    if (future := self.owed.pop(request, None)) is not None:
                        future.cancel()
                for request in taken.requests:
                    self._ask(request)
                while self.failed:
                    self._again(*self.failed.popleft())
                self.timeline.record(min(len(self.owed), self.timeline.capacity))
                if self.serves:
                    del self.timeline.spans[:-KEPT]
                self._look()
        finally:
            self.timeline.stop()
            for future in list(self.owed.values()):
                future.cancel()

    def _ask(self, request: Request) -> None:
        seed = (request.seed + GOLDEN * len(request.response)) % 2**62
        temperature = 0.0 if request.greedy else request.temperature
        ids, ends = request.prompt + request.response, tuple(sorted(self.lm.ends))
        support = request.sampling_params
        narrow = (0, 1.0, 0.0) if support is None else (support.top_k, support.top_p, support.min_p)
        wanted = EngineRequest(ids, request.max_tokens, temperature, seed, ends, narrow)
        listens = request.stream or (self.serves and bool(request.stop))
        hear = (lambda answer: self._listen(request, answer)) if listens else None
        server, future = self.fleet.ask(0, request.seed, wanted, hear)
        asked = ForwardedRequest(request, server, server.life)
        self.owed[request] = future
        future.add_done_callback(lambda done: self._hear(asked, done))

    def _listen(self, request: Request, answer: EngineResponse) -> None:
        """A turn has come so far. The thread that hears servers calls it."""
        if request not in self.queue.active:
            return
        self.heard, told = time.monotonic(), self.told.setdefault(request, [])
        end = self._stops_of(request.stop).end(answer.tokens, max(len(told) - 1, 0)) if request.stop else 0
        tokens = answer.tokens[: end or None]
        if len(tokens) <= len(told) or tokens[: len(told)] != told:
            return  # it was asked for again, and is not as far yet; if it differs, its end says so
        new = tokens[len(told) :]
        told += new
        if request.stream:
            request.on_output(CompletionDelta(new, answer.logp[len(tokens) - len(new) : len(tokens)]))
        if end and self.serves:
            done = Completion(tokens, answer.logp[:end], [1.0] * end, "stop", self.version)
            self._finish(request, done)

    def _hear(self, asked: ForwardedRequest, future: "Future[EngineResponse]") -> None:
        """A server has answered, or failed to. The thread that hears servers calls it: it must not wait or raise."""
        asked.server.owed.discard(future)
        if self.owed.get(asked.request) is not future:  # it is over, or was asked for again
            return
        try:
            answer = future.result()
            if answer.aborted:
                raise RequestAbortedError
            if set(answer.versions) != {self.version}:
                raise RunError(f"versions {sorted(set(answer.versions))} drew a turn that was asked of {self.version}")
            done = self._done(asked.request, answer)
        except BaseException as error:
            if asked.request in self.queue.active:
                self.failed.append((asked, error))
                self.queue.end_conversation(None)  # whoever waits there looks up
            return
        asked.server.lost, self.heard = 0, time.monotonic()
        self._finish(asked.request, done)

    def _finish(self, request: Request, done: Completion) -> None:
        future, told = self.owed.pop(request, None), self.told.pop(request, [])
        if future is not None:
            future.cancel()
        if done.tokens[: len(told)] != told and not done.error:
            done = Completion.failed("the engine was lost, and drew other tokens when it was asked again")
        self.queue.finish(request, done)

    def _done(self, request: Request, answer: EngineResponse) -> Completion:
        """A turn up to its end token, or to the token that completes a stop string."""
        end = self._stops_of(request.stop).end(answer.tokens) if request.stop else 0
        tokens, logp = answer.tokens[: end or None], answer.logp[: end or None]
        finish_reason: FinishReason = "stop" if end or tokens[-1] in self.lm.ends else "length"
        return Completion(tokens, logp, [1.0] * len(tokens), finish_reason, self.version)

    def _stops_of(self, strings: tuple[str, ...]) -> Stops:
        if strings not in self._stops:
            if (
                len(self._stops) >= KEPT_STOPS + self.queue.max_requests
            ):  # those of requests that are under way have room
                self._stops.clear()
            self._stops[strings] = Stops(strings, self.lm.tokenizer, self.lm.vocab)
        return self._stops[strings]

    def _again(self, asked: ForwardedRequest, error: BaseException) -> None:
        """A turn that did not come is asked for again; a server that is lost is brought back first."""
        if not isinstance(error, ServerLostError | CancelledError):
            if not self.serves:
                raise error
            self._finish(asked.request, Completion.failed(f"the engine failed: {error}"))
            return
        server = asked.server
        if asked.life == server.life and not server.down and not isinstance(error, RequestAbortedError):
            for future in list(server.owed):
                future.cancel()
            self.fleet.recover(server, str(error) or f"{server.client.url} does not answer")
        if asked.request in self.queue.active:
            self._ask(asked.request)

    def _look(self) -> None:
        """Where nothing has come for long, give up on servers that do not say that they live."""
        if self.owed and time.monotonic() - self.heard > self.look:
            for server in self.fleet.silent():
                for future in list(server.owed):
                    future.cancel()
            self.heard = time.monotonic()
        if self.serves and time.monotonic() - self.tried > AWAY:
            self.tried = time.monotonic()
            self.fleet.take_back()


def forward_requests(sampler: RemoteEngine, queue: RequestQueue) -> None:
    """Have servers draw what comes to a desk until it is closed."""
    RequestForwarder(queue, sampler.fleet, sampler.lm, sampler.version, sampler.look, serves=True)()


class RemoteConversationEngine(RemoteEngine):
    """Responses are conversations that agents lead with the policy, and servers draw its turns."""

    latest = OccupancyTimeline()

    def iter_finished(self, step: int, deadline: float) -> Any:
        return RolloutEngine.iter_finished(self, step, deadline)

    def _generate_all(self, one: PendingRollout) -> Rollouts:
        if one.rollouts is not None:
            return one.rollouts
        rollouts = self._now(one.request, self._seeds(one.request) if one.seeds is None else one.seeds, None)
        self.timeline.merge(self.latest)
        return rollouts

    def _now(self, ticket: RolloutRequest, seeds: Tensor, limit: int | None) -> Rollouts:
        prompts, samples, limit = ticket.prompts, ticket.samples, limit or self.limit
        if prompts.start_episodes is None:
            return super()._now(ticket, seeds, limit)
        luck = list(range(seeds.numel())) if ticket.greedy else seeds.flatten().tolist()
        with closing(prompts.start_episodes(prompts, samples, luck)) as visits:
            limits = self._limits(prompts, limit).repeat_interleave(samples).tolist()
            visits.begin(limits, limit, self.temperature, None, ticket.greedy)
            serve = RequestForwarder(visits.queue, self.fleet, self.lm, self.version, self.look)
            serve()
            self.latest = serve.timeline
            most, temperature = min(limit, self.most or limit), 1.0 if ticket.greedy else self.temperature
            return rollouts_from_conversations(
                prompts, samples, most, visits.records(), temperature, self.version, True
            )

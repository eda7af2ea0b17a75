"""Forwards the requests of a request queue to serving engines.

    clients ──> endpoint ──> RequestQueue ──> main thread of the run, or of `ascent serve` ──> servers
                        <── Completion, CompletionDelta ── event-loop thread of the HTTP client

A request contains all tokens before its turn, which the server finds in its prefix cache. Its seed follows from the
seed of the conversation and the position of the turn, so the requests of a lost server can be sent again. A streaming
client that already received other tokens gets an error.
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
from ascent.inference.remote.remote_engine import TURN_SEED_INCREMENT, RemoteEngine
from ascent.inference.remote.server_client import ServerLostError
from ascent.inference.remote.server_pool import Server, ServerPool
from ascent.inference.request_queue import Completion, CompletionDelta, FinishReason, Request, RequestQueue
from ascent.inference.stop_strings import StopStrings

MAX_TIMELINE_SPANS, MAX_CACHED_STOPS = 4096, 16
"""Bounds of the occupancy timeline and of the cached stop strings of finished requests, for a long-running server."""
READMIT_INTERVAL = 30.0
"""Seconds between two health checks of servers that are down."""


class RequestAbortedError(ServerLostError):
    """The server aborted a response but is still running."""


@dataclass(eq=False)
class ForwardedRequest:
    """A request that was sent to a server."""

    request: Request
    server: Server
    incarnation: int
    """That of the server when the request was sent."""


class RequestForwarder:
    """Sends the requests of a queue to servers until the queue is closed.

    With `for_clients`, the requests come from clients of `ascent serve` rather than from a run. A turn then ends as
    soon as its stop string has been streamed, before the versions of its tokens are known; an error fails one request
    rather than the run; and servers that were down are readmitted.
    """

    def __init__(
        self,
        queue: RequestQueue,
        server_pool: ServerPool,
        lm: Any,
        version: int,
        health_check_interval: float,
        for_clients: bool = False,
    ):
        self.queue, self.server_pool, self.lm, self.version = queue, server_pool, lm, version
        self.health_check_interval, self.for_clients = health_check_interval, for_clients
        self.timeline = OccupancyTimeline(server_pool.max_num_seqs)
        self.in_flight: dict[Request, Future[EngineResponse]] = {}
        self.streamed_tokens: dict[Request, list[int]] = {}
        self.failed: deque[tuple[ForwardedRequest, BaseException]] = deque()
        self.last_progress = self.last_readmit = time.monotonic()
        self._stops: dict[tuple[str, ...], StopStrings] = {}

    def run(self) -> None:
        try:
            while not self.queue.closed:
                update = self.queue.poll(wait=not self.failed)
                for request in update.cancelled:
                    self.streamed_tokens.pop(request, None)
                    if (future := self.in_flight.pop(request, None)) is not None:
                        future.cancel()
                for request in update.requests:
                    self._send(request)
                while self.failed:
                    self._handle_failure(*self.failed.popleft())
                self.timeline.record(min(len(self.in_flight), self.timeline.capacity))
                if self.for_clients:
                    del self.timeline.spans[:-MAX_TIMELINE_SPANS]
                self._check_servers()
        finally:
            self.timeline.stop()
            for future in list(self.in_flight.values()):
                future.cancel()

    def _send(self, request: Request) -> None:
        params = request.sampling_params
        engine_request = EngineRequest(
            prompt=request.prompt + request.response,
            max_tokens=request.max_tokens,
            temperature=0.0 if request.greedy else request.temperature,
            seed=(request.seed + TURN_SEED_INCREMENT * len(request.response)) % 2**62,
            stop_token_ids=tuple(sorted(self.lm.stop_token_ids)),
            truncation=(0, 1.0, 0.0) if params is None else (params.top_k, params.top_p, params.min_p),
        )
        streams = request.stream or (self.for_clients and bool(request.stop))
        on_progress = (lambda response: self._on_progress(request, response)) if streams else None
        server, future = self.server_pool.submit(0, request.seed, engine_request, on_progress)
        sent = ForwardedRequest(request, server, server.incarnation)
        self.in_flight[request] = future
        future.add_done_callback(lambda done: self._on_done(sent, done))

    def _on_progress(self, request: Request, response: EngineResponse) -> None:
        """Stream new tokens to the client. Runs on the event-loop thread."""
        if request not in self.queue.active:
            return
        self.last_progress, streamed = time.monotonic(), self.streamed_tokens.setdefault(request, [])
        end = self._stops_of(request.stop).end(response.tokens, max(len(streamed) - 1, 0)) if request.stop else 0
        tokens = response.tokens[: end or None]
        if len(tokens) <= len(streamed) or tokens[: len(streamed)] != streamed:
            return  # it was sent again and has not caught up yet; `_finish` reports tokens that differ
        new_tokens = tokens[len(streamed) :]
        streamed += new_tokens
        if request.stream:
            logp = response.logp[len(tokens) - len(new_tokens) : len(tokens)]
            request.on_output(CompletionDelta(new_tokens, logp))
        if end and self.for_clients:
            self._finish(request, Completion(tokens, response.logp[:end], [1.0] * end, "stop", self.version))

    def _on_done(self, sent: ForwardedRequest, future: "Future[EngineResponse]") -> None:
        """Finish a request, or record its failure. Runs on the event-loop thread, so it must not block or raise."""
        sent.server.in_flight.discard(future)
        if self.in_flight.get(sent.request) is not future:  # it was finished or sent again
            return
        try:
            response = future.result()
            if response.aborted:
                raise RequestAbortedError
            if set(response.versions) != {self.version}:
                versions = sorted(set(response.versions))
                raise RunError(f"a request to version {self.version} was answered with versions {versions}")
            completion = self._completion(sent.request, response)
        except BaseException as error:
            if sent.request in self.queue.active:
                self.failed.append((sent, error))
                self.queue.end_conversation(None)  # wakes the thread that polls the queue
            return
        sent.server.failures, self.last_progress = 0, time.monotonic()
        self._finish(sent.request, completion)

    def _finish(self, request: Request, completion: Completion) -> None:
        future, streamed = self.in_flight.pop(request, None), self.streamed_tokens.pop(request, [])
        if future is not None:
            future.cancel()
        if completion.tokens[: len(streamed)] != streamed and not completion.error:
            completion = Completion.failed(
                "the engine was lost and generated other tokens when the request was repeated"
            )
        self.queue.finish(request, completion)

    def _completion(self, request: Request, response: EngineResponse) -> Completion:
        """Return a turn up to its end token, or up to the token that completes a stop string."""
        end = self._stops_of(request.stop).end(response.tokens) if request.stop else 0
        tokens, logp = response.tokens[: end or None], response.logp[: end or None]
        finish_reason: FinishReason = "stop" if end or tokens[-1] in self.lm.stop_token_ids else "length"
        return Completion(tokens, logp, [1.0] * len(tokens), finish_reason, self.version)

    def _stops_of(self, strings: tuple[str, ...]) -> StopStrings:
        if strings not in self._stops:
            if len(self._stops) >= MAX_CACHED_STOPS + self.queue.max_requests:  # more than active requests can use
                self._stops.clear()
            self._stops[strings] = StopStrings(strings, self.lm.tokenizer, self.lm.vocab_size)
        return self._stops[strings]

    def _handle_failure(self, sent: ForwardedRequest, error: BaseException) -> None:
        """Recover the server if it is lost, and send the request again."""
        if not isinstance(error, ServerLostError | CancelledError):
            if not self.for_clients:
                raise error
            self._finish(sent.request, Completion.failed(f"the engine failed: {error}"))
            return
        server = sent.server
        is_current = sent.incarnation == server.incarnation and not server.is_down
        if is_current and not isinstance(error, RequestAbortedError):
            for future in list(server.in_flight):
                future.cancel()
            self.server_pool.recover(server, str(error) or f"{server.client.url} does not answer")
        if sent.request in self.queue.active:
            self._send(sent.request)

    def _check_servers(self) -> None:
        """Cancel the requests to servers that fail a health check, and readmit servers that were down."""
        now = time.monotonic()
        if self.in_flight and now - self.last_progress > self.health_check_interval:
            for server in self.server_pool.unresponsive_servers():
                for future in list(server.in_flight):
                    future.cancel()
            self.last_progress = time.monotonic()
        if self.for_clients and now - self.last_readmit > READMIT_INTERVAL:
            self.last_readmit = time.monotonic()
            self.server_pool.readmit_servers()


def forward_requests(engine: RemoteEngine, queue: RequestQueue) -> None:
    """Forward the requests of a queue to the servers of an engine until the queue is closed."""
    interval = engine.health_check_interval
    RequestForwarder(queue, engine.server_pool, engine.lm, engine.version, interval, for_clients=True).run()


class RemoteConversationEngine(RemoteEngine):
    """A remote engine for agents, which lead conversations with the policy through a request queue."""

    latest_timeline = OccupancyTimeline()

    def iter_finished(self, step: int, deadline: float) -> Any:
        return RolloutEngine.iter_finished(self, step, deadline)

    def _generate_all(self, pending: PendingRollout) -> Rollouts:
        if pending.rollouts is not None:
            return pending.rollouts
        seeds = self._seeds(pending.request) if pending.seeds is None else pending.seeds
        rollouts = self._generate_now(pending.request, seeds, None)
        self.timeline.merge(self.latest_timeline)
        return rollouts

    def _generate_now(self, request: RolloutRequest, seeds: Tensor, limit: int | None) -> Rollouts:
        prompts, samples, limit = request.prompts, request.samples, limit or self.limit
        if prompts.start_episodes is None:
            return super()._generate_now(request, seeds, limit)
        environment_seeds = list(range(seeds.numel())) if request.greedy else seeds.flatten().tolist()
        with closing(prompts.start_episodes(prompts, samples, environment_seeds)) as conversations:
            limits = self._max_sampled(prompts, limit).repeat_interleave(samples).tolist()
            conversations.begin(limits, limit, self.temperature, None, request.greedy)
            forwarder = RequestForwarder(
                conversations.queue, self.server_pool, self.lm, self.version, self.health_check_interval
            )
            forwarder.run()
            self.latest_timeline = forwarder.timeline
            max_tokens = min(limit, self.max_sampled_tokens or limit)
            temperature = 1.0 if request.greedy else self.temperature
            return rollouts_from_conversations(
                prompts, samples, max_tokens, conversations.records(), temperature, self.version, True
            )

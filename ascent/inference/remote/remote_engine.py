"""A rollout engine whose responses come from serving engines: it sends requests and collects groups as they finish.

There is one request per response, with its own seed, drawn as the local engine draws it. Results do not depend on which
server answers, when, or how often a request is sent: a request to a lost server is sent again with the same seed.
Servers generate while the learner trains, and continue unfinished responses with the new weights after each load.

Each turn of a conversation is a separate request with all previous tokens, which the server finds in its prefix cache.
A conversation starts in its own step, however far other requests run ahead.
"""

import queue
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascent.core.errors import RunError
from ascent.core.protocols import FinishedRollouts, PendingRollout, RolloutEngine, RolloutRequest
from ascent.core.types import Prompts, Rollouts
from ascent.inference.environment_turns import EnvironmentTurns
from ascent.inference.occupancy import OccupancyTimeline
from ascent.inference.remote.engine_adapter import EMPTY_RESPONSE, EngineRequest, EngineResponse
from ascent.inference.remote.server_client import ServerLostError
from ascent.inference.remote.server_pool import Server, ServerPool
from ascent.inference.stop_strings import StopStrings
from ascent.models.causal_lm import CausalLM, LanguageModel
from ascent.ops.token_sampling import response_seeds

DEFAULT_MAX_NUM_SEQS = 256
"""Responses that a server decodes at once, unless `--rows` sets another number."""
HEALTH_CHECK_INTERVAL = 5.0
"""Seconds without a response after which the servers' health is checked."""
ENVIRONMENT_POLL_INTERVAL = 0.01
"""Seconds between two polls of environments that have not answered yet."""
TURN_SEED_INCREMENT = 0x1E3779B97F4A7C15
"""Difference of the seeds of two consecutive turns of a conversation."""
GENERATE_DEADLINE = 3600.0
"""Seconds that responses outside of a step, such as those of an evaluation, may take."""


@dataclass(eq=False)
class ActiveRollout:
    """A rollout request whose responses are being generated."""

    request: RolloutRequest
    limit: int
    seeds: Tensor
    responses: dict[tuple[int, int], EngineResponse] = field(default_factory=dict)
    """Complete responses, by prompt and sample."""
    num_missing: list[int] = field(default_factory=list)
    """Number of incomplete responses of each prompt."""
    complete_prompts: deque[int] = field(default_factory=deque)
    """Prompts whose groups are complete and not yet yielded."""
    num_yielded: int = 0
    turns: EnvironmentTurns | None = None
    """The environments, if responses are conversations."""
    awaiting_observation: dict[int, "InFlightRequest"] = field(default_factory=dict)
    """By response, the latest request of a conversation that waits for its environment."""

    def __post_init__(self) -> None:
        self.num_missing = [self.request.samples] * len(self.request.prompts)

    def add(self, index: tuple[int, int], response: EngineResponse) -> None:
        self.responses[index] = response
        self.num_missing[index[0]] -= 1
        if not self.num_missing[index[0]]:
            self.complete_prompts.append(index[0])

    def group(self, prompt: int) -> list[EngineResponse]:
        """Return the responses to a prompt; incomplete ones are empty."""
        return [self.responses.get((prompt, sample), EMPTY_RESPONSE) for sample in range(self.request.samples)]


@dataclass(eq=False)
class InFlightRequest:
    """A request for one response, or for one turn of a conversation."""

    rollout: ActiveRollout
    index: tuple[int, int]
    """Prompt and sample."""
    request: EngineRequest
    before: EngineResponse = EMPTY_RESPONSE
    """The previous turns and the observations between them."""
    server: Server | None = None
    incarnation: int = 0
    """That of the server when the request was sent."""
    version: int = -1


class RemoteEngine(RolloutEngine):
    """Samples from servers. They get the learner's weights and a probe at each load, before any request."""

    provides = frozenset({"reward_greedy"})
    deterministic = False

    def __init__(
        self,
        policy: CausalLM,
        lm: LanguageModel,
        limit: int,
        max_model_len: int,
        temperature: float,
        generator: torch.Generator,
        stops: StopStrings | None = None,
        max_sampled_tokens: int = 0,
    ):
        """Create the engine; servers are started at the first load.

        `max_model_len`: maximum number of tokens of a prompt with its response. `max_sampled_tokens`: maximum number of
        tokens of a conversation that the policy samples, without observations; 0: `limit`.
        """
        self.lm, self.limit, self.temperature, self.generator = lm, limit, temperature, generator
        self.stops, self.max_sampled_tokens, self.version = stops, max_sampled_tokens, -1
        self.rows = policy.rows or DEFAULT_MAX_NUM_SEQS
        self.server_pool = ServerPool(policy, lm, self.rows, max_model_len, temperature)
        self.timeline, self.health_check_interval = OccupancyTimeline(), HEALTH_CHECK_INTERVAL
        self.folder: Path | None = None
        """Where a server that Ascent starts keeps its log; None: in a folder that is removed at the end."""
        self._temporary: Path | None = None
        self._active: dict[RolloutRequest, ActiveRollout] = {}
        self._done: queue.SimpleQueue[tuple[InFlightRequest, Future[EngineResponse]]] = queue.SimpleQueue()

    def load(self, params: dict[str, Tensor], version: int) -> None:
        self.lm.load_params(params)
        self.version = version
        if version >= self.first_version:
            self._send_weights()
            self._start_pending()

    def _send_weights(self) -> None:
        """Send the present weights to all servers, and start the servers first if necessary."""
        if not self.server_pool.servers:
            if self.folder is None:
                self._temporary = Path(tempfile.mkdtemp(prefix="ascent-engine-"))
            self.server_pool.start(self.folder or self._temporary or Path())
        self.server_pool.load_weights(self.version)

    # ---- rollout requests

    def submit(self, requests: list[RolloutRequest]) -> None:
        """Draw the seeds now, as the local engine does. Requests before the first load wait for it."""
        self.pending += tuple(PendingRollout(request, seeds=self._seeds(request)) for request in requests)
        if self.version >= self.first_version:
            self._start_pending()

    def snapshot_pending(self) -> tuple[PendingRollout, ...]:
        """Include the complete responses. A resumed run generates the others again, with the same seeds."""
        finished = [self._done.get() for _ in range(self._done.qsize())]
        for sent, future in finished:
            if future.cancelled() or future.exception() is not None:
                self._done.put((sent, future))
            else:
                self._handle_response(sent, future)
        return tuple(self._snapshot(pending) for pending in self.pending)

    def _snapshot(self, pending: PendingRollout) -> PendingRollout:
        rollout = self._active.get(pending.request)
        if rollout is None or not rollout.responses:
            return pending
        prompts = list(range(len(pending.request.prompts)))
        unfinished = torch.tensor([[response is EMPTY_RESPONSE for response in rollout.group(i)] for i in prompts])
        rollouts = self._rollouts(rollout, prompts)
        return replace(pending, rollouts=rollouts, unfinished=unfinished if bool(unfinished.any()) else None)

    def iter_finished(self, step: int, deadline: float) -> Iterator[FinishedRollouts]:
        self._start_pending(step)
        rollouts = [rollout for request, rollout in self._active.items() if request.step == step]
        for rollout, prompt in self._iter_groups(rollouts, deadline, self.timeline):
            yield FinishedRollouts(rollout.request, torch.tensor([prompt]), self._rollouts(rollout, [prompt]))
        self.pending = tuple(pending for pending in self.pending if pending.request.step != step)

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        if self.server_pool.version != self.version:  # while a journal is replayed
            self._send_weights()
        request = RolloutRequest(-1, prompts, samples, greedy, seed)
        return self._generate_now(request, self._seeds(request), limit)

    def generate_from_seeds(
        self, prompts: Prompts, samples: int, seeds: Tensor | None, limit: int | None = None
    ) -> Rollouts:
        """Generate responses with the given `[prompt sample]` seeds; None: greedy."""
        request = RolloutRequest(-1, prompts, samples, seeds is None)
        return self._generate_now(request, self._seeds(request) if seeds is None else seeds, limit)

    def _generate_now(self, request: RolloutRequest, seeds: Tensor, limit: int | None) -> Rollouts:
        num_prompts, rollout = len(request.prompts), self._start(PendingRollout(request, seeds=seeds), limit)
        # A separate timeline: these responses are not part of a step.
        num_groups = sum(1 for _ in self._iter_groups([rollout], GENERATE_DEADLINE, OccupancyTimeline()))
        if num_groups < num_prompts:
            raise RunError(
                f"the engine has finished {num_groups} of {num_prompts} groups within {GENERATE_DEADLINE:g} seconds"
            )
        return self._rollouts(rollout, list(range(num_prompts)))

    def _seeds(self, request: RolloutRequest) -> Tensor:
        shape = (len(request.prompts), request.samples)
        if request.greedy:
            return torch.zeros(shape, dtype=torch.long)
        return response_seeds(*shape, self.generator, request.seed)

    def _max_sampled(self, prompts: Prompts, limit: int) -> Tensor:
        """Return the maximum number of sampled tokens of a response to each prompt."""
        max_tokens = min(limit, self.max_sampled_tokens or limit)
        return (
            torch.full((len(prompts),), max_tokens) if prompts.limits is None else prompts.limits.clamp(max=max_tokens)
        )

    def _start_pending(self, step: int = -1) -> None:
        """Start all pending requests; conversations only if they belong to this step."""
        for pending in self.pending:
            request = pending.request
            if request not in self._active and (request.prompts.start_episodes is None or request.step == step):
                self._start(pending)

    def _start(self, pending: PendingRollout, limit: int | None = None) -> ActiveRollout:
        """Send requests for all responses except those that a checkpoint has restored."""
        request, seeds, limit = pending.request, pending.seeds, limit or self.limit
        assert seeds is not None
        prompts, rollout = request.prompts, ActiveRollout(request, limit, seeds)
        self._active[request] = rollout
        limits, stop_token_ids = self._max_sampled(prompts, limit), tuple(sorted(self.lm.stop_token_ids))
        if prompts.start_episodes is not None:
            environment_seeds = list(range(seeds.numel())) if request.greedy else seeds.flatten().tolist()
            episodes = prompts.start_episodes(prompts, request.samples, environment_seeds)
            rollout.turns = EnvironmentTurns(episodes, limits.repeat_interleave(request.samples), limit)
        temperature = 0.0 if request.greedy else self.temperature
        for i, row in enumerate(prompts.prompt):
            ids, turns = row[row >= 0].tolist(), rollout.turns
            max_tokens = int(limits[i]) if turns is None else turns.turn_limit(i * request.samples)
            for k, seed in enumerate(seeds[i].tolist()):
                if pending.rollouts is not None and (pending.unfinished is None or not pending.unfinished[i, k]):
                    rollout.add((i, k), _restored_response(pending.rollouts, i, k))
                    continue
                engine_request = EngineRequest(ids, max_tokens, temperature, seed, stop_token_ids)
                self._send(InFlightRequest(rollout, (i, k), engine_request))
        return rollout

    def _send(self, sent: InFlightRequest) -> None:
        sent.version = self.version
        sent.server, future = self.server_pool.submit(sent.rollout.request.step, sent.index[0], sent.request)
        sent.incarnation = sent.server.incarnation
        future.add_done_callback(lambda done: self._done.put((sent, done)))

    # ---- responses

    def _iter_groups(
        self, rollouts: list[ActiveRollout], deadline: float, timeline: OccupancyTimeline
    ) -> Iterator[tuple[ActiveRollout, int]]:
        """Yield groups as they finish, until all have or the deadline is over. Other responses are kept for later."""
        end = time.monotonic() + deadline
        servers = self.server_pool.servers
        num_responses = sum(rollout.seeds.numel() for rollout in {*rollouts, *self._active.values()})
        capacity = min(num_responses, self.rows * sum(not server.is_down for server in servers))
        timeline.capacity = max(timeline.capacity, capacity)
        try:
            while True:
                for rollout in rollouts:
                    while rollout.complete_prompts:
                        rollout.num_yielded += 1
                        timeline.stop()
                        yield rollout, rollout.complete_prompts.popleft()
                is_done = all(rollout.num_yielded == len(rollout.request.prompts) for rollout in rollouts)
                if is_done or time.monotonic() > end:
                    return
                timeline.record(min(timeline.capacity, sum(len(server.in_flight) for server in servers)))
                for rollout in rollouts:
                    self._poll_environments(rollout)
                if not any(rollout.complete_prompts for rollout in rollouts):
                    polls = any(rollout.awaiting_observation for rollout in rollouts)
                    self._receive(end, ENVIRONMENT_POLL_INTERVAL if polls else self.health_check_interval)
        finally:
            timeline.stop()
            for rollout in rollouts:
                self._active.pop(rollout.request, None)
                if rollout.turns is not None:
                    rollout.turns.episodes.close()

    def _receive(self, end: float, timeout: float) -> None:
        """Handle the next response. If none arrives, cancel the requests to servers that fail a health check."""
        remaining = max(end - time.monotonic(), 0.0)
        try:
            sent, future = self._done.get(timeout=min(timeout, remaining))
        except queue.Empty:
            checks_health = remaining > timeout == self.health_check_interval
            for server in self.server_pool.unresponsive_servers() if checks_health else ():
                for future in list(server.in_flight):
                    future.cancel()
            return
        self._handle_response(sent, future)

    def _handle_response(self, sent: InFlightRequest, future: "Future[EngineResponse]") -> None:
        """Keep a response, or send its request again."""
        assert sent.server is not None
        server = sent.server
        server.in_flight.discard(future)
        if sent.rollout.request not in self._active:  # its step is over
            return
        try:
            response = future.result()
        except (ServerLostError, CancelledError) as error:
            if sent.incarnation != server.incarnation:  # the server has been recovered since
                self._send(sent)
                return
            self._recover(server, sent, str(error) or f"{server.client.url} does not answer")
            return
        if response.aborted:
            self._send(sent)
            return
        if not sent.version <= min(response.versions) <= max(response.versions) <= self.version:
            raise RunError(
                f"{server.client.url} answered a request to version {sent.version} with versions "
                f"{sorted(set(response.versions))}"
            )
        server.failures = 0
        self._end_turn(sent, self._cut_at_stop(response))

    # ---- turns

    def _end_turn(self, sent: InFlightRequest, turn: EngineResponse) -> None:
        """Finish the response, or submit its latest turn to the environment."""
        rollout, response = sent.rollout, sent.before.concat(turn)
        row = sent.index[0] * rollout.request.samples + sent.index[1]
        if rollout.turns is None or not (turn.stopped or len(response.tokens) < rollout.turns.max_length(row)):
            rollout.add(sent.index, response)
        else:
            rollout.awaiting_observation[row] = replace(sent, before=response)
            rollout.turns.submit_turn(row, turn.tokens)

    def _poll_environments(self, rollout: ActiveRollout) -> None:
        """Append new observations and request the next turns, or finish the conversations."""
        turns = rollout.turns
        for row, tokens in turns.poll_observations() if turns is not None else ():
            assert turns is not None
            sent = rollout.awaiting_observation.pop(row)
            observation = EngineResponse(tokens, [0.0] * len(tokens), [self.version] * len(tokens))
            response = sent.before.concat(observation)
            if not tokens:
                rollout.add(sent.index, response._replace(stopped=row in turns.terminated))
                continue
            prompt = rollout.request.prompts.prompt[sent.index[0]]
            next_turn = sent.request._replace(
                prompt=prompt[prompt >= 0].tolist() + response.tokens,
                max_tokens=turns.turn_limit(row) - len(response.tokens),
                seed=(sent.request.seed + TURN_SEED_INCREMENT) % 2**62,
            )
            self._send(replace(sent, request=next_turn, before=response))

    def _cut_at_stop(self, response: EngineResponse) -> EngineResponse:
        """Cut a response after the token that completes a stop string."""
        end = self.stops.end(response.tokens) if self.stops is not None else 0
        if end:
            return EngineResponse(response.tokens[:end], response.logp[:end], response.versions[:end], stopped=True)
        return response._replace(stopped=response.tokens[-1] in self.lm.stop_token_ids)

    def _recover(self, server: Server, sent: InFlightRequest, why: str) -> None:
        """Recover a lost server and send its requests again, to it or to others, with the same seeds."""
        lost, others = [sent], []
        for future in list(server.in_flight):
            future.cancel()
        while server.in_flight:  # every future completes, because all of them were cancelled
            other, future = self._done.get()
            if other.server is server and (future.cancelled() or isinstance(future.exception(), ServerLostError)):
                lost.append(other)
            else:
                others.append((other, future))
            if other.server is server:
                server.in_flight.discard(future)
        for item in others:
            self._done.put(item)
        self.server_pool.recover(server, why)
        for each in lost:
            if each.rollout.request in self._active:
                self._send(each)

    def _rollouts(self, rollout: ActiveRollout, indices: list[int]) -> Rollouts:
        """Return the responses to these prompts as padded tensors."""
        request, groups = rollout.request, [rollout.group(prompt) for prompt in indices]
        prompts = request.prompts[torch.tensor(indices)]
        width = max(len(response.tokens) for group in groups for response in group)

        def padded(name: str, dtype: torch.dtype) -> Tensor:
            rows = [[[*getattr(r, name), *[0] * (width - len(r.tokens))] for r in group] for group in groups]
            return torch.tensor(rows, dtype=dtype)

        length = torch.tensor([[len(response.tokens) for response in group] for group in groups])
        present, version = torch.arange(width) < length.unsqueeze(-1), padded("versions", torch.long)
        is_constant = bool(((version == version[..., :1]) | ~present).all())
        fields: dict[str, Any] = {"mask": present, "present": present}
        if rollout.turns is not None:
            all_present = torch.zeros(*rollout.seeds.shape, width, dtype=torch.bool)
            all_present[indices] = present
            turn_fields = rollout.turns.fields((all_present.shape[0], all_present.shape[1]), all_present)
            fields = {name: None if value is None else value[indices] for name, value in turn_fields.items()}
        return Rollouts(
            prompt=prompts.prompt,
            problem=prompts.problem,
            response=padded("tokens", torch.long),
            logp_sampler=padded("logp", torch.float32),
            limit=min(rollout.limit, self.max_sampled_tokens or rollout.limit),
            limits=prompts.limits,
            truncated=~torch.tensor([[response.stopped for response in group] for group in groups]),
            temperature=1.0 if request.greedy else self.temperature,  # greedy log-probs are at temperature 1
            version=version[..., :1] if is_constant else version,
            **fields,
        )

    def close(self) -> None:
        self.server_pool.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _restored_response(rollouts: Rollouts, prompt: int, sample: int) -> EngineResponse:
    """Return a response that a checkpoint has restored."""
    index, mask = (prompt, sample), rollouts.mask[prompt, sample]
    tokens, logp, versions = (
        value.expand(rollouts.mask.shape)[index][mask].tolist()
        for value in (rollouts.response, rollouts.logp_sampler, rollouts.version)
    )
    return EngineResponse(tokens, logp, versions, stopped=not rollouts.truncated[index])

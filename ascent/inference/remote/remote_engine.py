"""A sampler whose responses come from serving engines: requests out, groups back as they finish.

One request per response, with a seed of its own, drawn as the local sampler draws it. Who answers, when, and how often
it had to be asked decides nothing else: a response that a dead server owed is asked for again with the same seed.
Servers go on writing while the run computes, and with the new weights after each load.

A conversation is asked for turn by turn: each request has all tokens before it, as they were drawn and as they were
observed, which the engine finds in its prefix cache. It begins with its own step, however far others run ahead.
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
from ascent.inference.stop_strings import Stops
from ascent.models.causal_lm import CausalLM, LanguageModel
from ascent.ops.token_sampling import response_seeds

ROWS = 256
"""Responses that one server decodes at once where nobody says otherwise."""
LOOK = 5.0
"""Seconds without any response after which servers are asked whether they live."""
POLL = 0.01
"""Seconds between two looks at what environments have answered, where any was asked."""
GOLDEN = 0x1E3779B97F4A7C15
"""What the seeds of two turns of a response differ by."""
WHOLE = 3600.0
"""Seconds that responses outside of a step, such as an evaluation's, may take."""


@dataclass(eq=False)
class UnderWay:
    """A rollout request in progress."""

    request: RolloutRequest
    limit: int
    seeds: Tensor
    answers: dict[tuple[int, int], EngineResponse] = field(default_factory=dict)
    """By prompt and sample."""
    missing: list[int] = field(default_factory=list)
    """By prompt, how many of its responses are not there yet."""
    ready: deque[int] = field(default_factory=deque)
    """Prompts whose groups are whole and were not handed over."""
    handed: int = 0
    turns: EnvironmentTurns | None = None
    """What answers turns, where responses are conversations."""
    waiting: dict[int, "Asked"] = field(default_factory=dict)
    """By response, the latest request of a conversation whose environment is at work."""

    def __post_init__(self) -> None:
        self.missing = [self.request.samples] * len(self.request.prompts)

    def take(self, place: tuple[int, int], answer: EngineResponse) -> None:
        self.answers[place] = answer
        self.missing[place[0]] -= 1
        if not self.missing[place[0]]:
            self.ready.append(place[0])

    def group(self, prompt: int) -> list[EngineResponse]:
        """What is there of its responses."""
        return [self.answers.get((prompt, sample), EMPTY_RESPONSE) for sample in range(self.request.samples)]


@dataclass(eq=False)
class Asked:
    """One response that was asked for."""

    of: UnderWay
    place: tuple[int, int]
    request: EngineRequest
    before: EngineResponse = EMPTY_RESPONSE
    """The turns before this one, with what was observed between them."""
    server: Server | None = None
    life: int = 0
    """The server's, when it was asked."""
    version: int = -1


class RemoteEngine(RolloutEngine):
    """Draws from servers, which get the learner's weights at each load and are probed before any ticket."""

    provides = frozenset({"reward_greedy"})
    deterministic = False

    def __init__(
        self,
        policy: CausalLM,
        lm: LanguageModel,
        limit: int,
        longest: int,
        temperature: float,
        generator: torch.Generator,
        stops: Stops | None = None,
        most: int = 0,
    ):
        """`longest`: the most tokens of a prompt with its response. `most`: those of a conversation that are drawn.

        Servers are started when weights are loaded.
        """
        self.lm, self.limit, self.temperature, self.generator = lm, limit, temperature, generator
        self.stops, self.most, self.rows, self.version = stops, most, policy.rows or ROWS, -1
        self.fleet = ServerPool(policy, lm, self.rows, longest, temperature)
        self.timeline, self.look = OccupancyTimeline(), LOOK
        self.folder: Path | None = None
        """Where a server that Ascent starts keeps its log; None: in a folder that is removed at the end."""
        self._temporary: Path | None = None
        self._open: dict[RolloutRequest, UnderWay] = {}
        self._arrived: queue.SimpleQueue[tuple[Asked, Future[EngineResponse]]] = queue.SimpleQueue()

    def load(self, params: dict[str, Tensor], version: int) -> None:
        self.lm.take(params)
        self.version = version
        if version >= self.first_version:
            self._send()
            self._begin_all()

    def _send(self) -> None:
        """The present parameters to all servers, which are started if they have to be."""
        if not self.fleet.servers:
            if self.folder is None:
                self._temporary = Path(tempfile.mkdtemp(prefix="ascent-engine-"))
            self.fleet.start(self.folder or self._temporary or Path())
        self.fleet.load(self.version)

    # ---- tickets

    def submit(self, tickets: list[RolloutRequest]) -> None:
        """Seeds are drawn now, as the local sampler draws them. What comes before any weights waits for them."""
        self.pending += tuple(PendingRollout(ticket, seeds=self._seeds(ticket)) for ticket in tickets)
        if self.version >= self.first_version:
            self._begin_all()

    def snapshot_pending(self) -> tuple[PendingRollout, ...]:
        """With the responses that are whole. Others are drawn anew after a resume, with the same seeds."""
        waiting = [self._arrived.get() for _ in range(self._arrived.qsize())]
        for asked, future in waiting:
            if future.cancelled() or future.exception() is not None:
                self._arrived.put((asked, future))
            else:
                self._take(asked, future)
        return tuple(self._held(one) for one in self.pending)

    def _held(self, one: PendingRollout) -> PendingRollout:
        each = self._open.get(one.request)
        if each is None or not each.answers:
            return one
        every = list(range(len(one.request.prompts)))
        going = torch.tensor([[answer is EMPTY_RESPONSE for answer in each.group(prompt)] for prompt in every])
        return replace(one, rollouts=self._rollouts(each, every), unfinished=going if bool(going.any()) else None)

    def iter_finished(self, step: int, deadline: float) -> Iterator[FinishedRollouts]:
        self._begin_all(step)
        wanted = [each for ticket, each in self._open.items() if ticket.step == step]
        for each, prompt in self._groups(wanted, deadline, self.timeline):
            yield FinishedRollouts(each.request, torch.tensor([prompt]), self._rollouts(each, [prompt]))
        self.pending = tuple(one for one in self.pending if one.request.step != step)

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        if self.fleet.version != self.version:  # while a journal is replayed
            self._send()
        ticket = RolloutRequest(-1, prompts, samples, greedy, seed)
        return self._now(ticket, self._seeds(ticket), limit)

    def draw(self, prompts: Prompts, samples: int, seeds: Tensor | None, limit: int | None = None) -> Rollouts:
        """Responses to these prompts from a seed for each `[prompt sample]`; None: greedy ones."""
        ticket = RolloutRequest(-1, prompts, samples, seeds is None)
        return self._now(ticket, self._seeds(ticket) if seeds is None else seeds, limit)

    def _now(self, ticket: RolloutRequest, seeds: Tensor, limit: int | None) -> Rollouts:
        prompts, each = ticket.prompts, self._begin(PendingRollout(ticket, seeds=seeds), limit or self.limit)
        count = sum(1 for _ in self._groups([each], WHOLE, OccupancyTimeline()))  # not part of a step's rollouts
        if count < len(prompts):
            raise RunError(f"the engine has finished {count} of {len(prompts)} groups within {WHOLE:g} seconds")
        return self._rollouts(each, list(range(len(prompts))))

    def _seeds(self, ticket: RolloutRequest) -> Tensor:
        shape = (len(ticket.prompts), ticket.samples)
        if ticket.greedy:
            return torch.zeros(shape, dtype=torch.long)
        return response_seeds(*shape, self.generator, ticket.seed)

    def _limits(self, prompts: Prompts, limit: int) -> Tensor:
        """The most tokens of a response to each prompt that are drawn."""
        most = min(limit, self.most or limit)
        return torch.full((len(prompts),), most) if prompts.limits is None else prompts.limits.clamp(max=most)

    def _begin_all(self, step: int = -1) -> None:
        """All that is not begun; conversations only of this step."""
        for one in self.pending:
            if one.request not in self._open and (
                one.request.prompts.start_episodes is None or one.request.step == step
            ):
                self._begin(one, self.limit)

    def _begin(self, one: PendingRollout, limit: int) -> UnderWay:
        """Ask for all responses of a ticket, prompt by prompt, but for those that a checkpoint has brought."""
        assert one.seeds is not None
        prompts, each, ends = one.request.prompts, UnderWay(one.request, limit, one.seeds), tuple(sorted(self.lm.ends))
        self._open[one.request] = each
        limits = self._limits(prompts, limit)
        if prompts.start_episodes is not None:
            luck = list(range(one.seeds.numel())) if one.request.greedy else one.seeds.flatten().tolist()
            episodes = prompts.start_episodes(prompts, one.request.samples, luck)
            each.turns = EnvironmentTurns(episodes, limits.repeat_interleave(one.request.samples), limit)
        for i, row in enumerate(prompts.prompt):
            ids = row[row >= 0].tolist()
            most = int(limits[i]) if each.turns is None else each.turns.turn_limit(i * one.request.samples)
            for k, seed in enumerate(one.seeds[i].tolist()):
                if one.rollouts is not None and (one.unfinished is None or not one.unfinished[i, k]):
                    each.take((i, k), _answer(one.rollouts, i, k))
                    continue
                request = EngineRequest(ids, most, 0.0 if one.request.greedy else self.temperature, seed, ends)
                self._ask(Asked(each, (i, k), request))
        return each

    def _ask(self, asked: Asked) -> None:
        asked.version = self.version
        asked.server, future = self.fleet.ask(asked.of.request.step, asked.place[0], asked.request)
        asked.life = asked.server.life
        future.add_done_callback(lambda done: self._arrived.put((asked, done)))

    # ---- answers

    def _groups(
        self, wanted: list[UnderWay], deadline: float, timeline: OccupancyTimeline
    ) -> Iterator[tuple[UnderWay, int]]:
        """Groups as they finish, until all have or the time is over. What else arrives meanwhile is kept."""
        until = time.monotonic() + deadline
        servers, count = self.fleet.servers, sum(each.seeds.numel() for each in {*wanted, *self._open.values()})
        timeline.capacity = max(timeline.capacity, min(count, self.rows * sum(not server.down for server in servers)))
        try:
            while True:
                for each in wanted:
                    while each.ready:
                        each.handed += 1
                        timeline.stop()
                        yield each, each.ready.popleft()
                if all(each.handed == len(each.request.prompts) for each in wanted) or time.monotonic() > until:
                    return
                timeline.record(min(timeline.capacity, sum(len(server.owed) for server in servers)))
                for each in wanted:
                    self._hear(each)
                if not any(each.ready for each in wanted):
                    self._receive(until, POLL if any(each.waiting for each in wanted) else self.look)
        finally:
            timeline.stop()
            for each in wanted:
                self._open.pop(each.request, None)
                if each.turns is not None:
                    each.turns.episodes.close()

    def _receive(self, until: float, wait: float) -> None:
        """The next response that arrives. Where none does, give up on servers that do not say that they live."""
        left = max(until - time.monotonic(), 0.0)
        try:
            asked, future = self._arrived.get(timeout=min(wait, left))
        except queue.Empty:
            for server in self.fleet.silent() if left > wait == self.look else ():
                for future in list(server.owed):
                    future.cancel()
            return
        self._take(asked, future)

    def _take(self, asked: Asked, future: "Future[EngineResponse]") -> None:
        """Keep a response, or ask for it again."""
        assert asked.server is not None
        server = asked.server
        server.owed.discard(future)
        if asked.of.request not in self._open:  # nobody waits for it any more
            return
        try:
            answer = future.result()
        except (ServerLostError, CancelledError) as error:
            if asked.life != server.life:  # it is back already; if it is not, the next answer says so
                self._ask(asked)
                return
            self._give_back(server, asked, str(error) or f"{server.client.url} does not answer")
            return
        if answer.aborted:
            self._ask(asked)
            return
        if not asked.version <= min(answer.versions) <= max(answer.versions) <= self.version:
            raise RunError(
                f"{server.client.url} says that versions {sorted(set(answer.versions))} drew a response that was asked "
                f"of version {asked.version}"
            )
        server.lost = 0
        self._end_turn(asked, self._cut(answer))

    # ---- turns

    def _end_turn(self, asked: Asked, turn: EngineResponse) -> None:
        """A turn is there: the response is over, or its environment is asked."""
        each, whole = asked.of, asked.before.then(turn)
        response = asked.place[0] * each.request.samples + asked.place[1]
        if each.turns is None or not (turn.ended or len(whole.tokens) < each.turns.max_length(response)):
            each.take(asked.place, whole)
        else:
            each.waiting[response] = replace(asked, before=whole)
            each.turns.submit_turn(response, turn.tokens)

    def _hear(self, each: UnderWay) -> None:
        """What environments have answered: the next turn of a conversation is asked for, or it is over."""
        for response, observed in each.turns.poll_observations() if each.turns is not None else ():
            assert each.turns is not None
            asked = each.waiting.pop(response)
            seen = EngineResponse(observed, [0.0] * len(observed), [self.version] * len(observed))
            whole = asked.before.then(seen)
            if not observed:
                each.take(asked.place, whole._replace(ended=response in each.turns.terminated))
                continue
            prompt = each.request.prompts.prompt[asked.place[0]]
            seed = (asked.request.seed + GOLDEN) % 2**62
            ids, most = prompt[prompt >= 0].tolist() + whole.tokens, each.turns.turn_limit(response) - len(whole.tokens)
            self._ask(replace(asked, request=asked.request._replace(prompt=ids, most=most, seed=seed), before=whole))

    def _cut(self, answer: EngineResponse) -> EngineResponse:
        """The answer up to the token that completes a stop string: what was drawn behind it does not exist."""
        end = self.stops.end(answer.tokens) if self.stops is not None else 0
        if end:
            return EngineResponse(answer.tokens[:end], answer.logp[:end], answer.versions[:end], ended=True)
        return answer._replace(ended=answer.tokens[-1] in self.lm.ends)

    def _give_back(self, server: Server, asked: Asked, why: str) -> None:
        """The server is lost: all that it owes is asked for again, of it or of the others, with the same seeds."""
        owed, others = [asked], []
        for future in list(server.owed):
            future.cancel()
        while server.owed:  # each of them arrives, for it is over one way or another
            arrived = each, future = self._arrived.get()
            if each.server is server and (future.cancelled() or isinstance(future.exception(), ServerLostError)):
                owed.append(each)
            else:
                others.append(arrived)
            if each.server is server:
                server.owed.discard(future)
        for arrived in others:
            self._arrived.put(arrived)
        self.fleet.recover(server, why)
        for each in owed:
            if each.of.request in self._open:
                self._ask(each)

    def _rollouts(self, each: UnderWay, which: list[int]) -> Rollouts:
        ticket, groups = each.request, [each.group(prompt) for prompt in which]
        prompts = ticket.prompts[torch.tensor(which)]
        width = max(len(answer.tokens) for group in groups for answer in group)

        def padded(name: str, dtype: torch.dtype) -> Tensor:
            rows = [[[*getattr(a, name), *[0] * (width - len(a.tokens))] for a in group] for group in groups]
            return torch.tensor(rows, dtype=dtype)

        length = torch.tensor([[len(answer.tokens) for answer in group] for group in groups])
        present, version = torch.arange(width) < length.unsqueeze(-1), padded("versions", torch.long)
        constant = bool(((version == version[..., :1]) | ~present).all())
        said: dict[str, Any] = {"mask": present, "present": present}
        if each.turns is not None:
            there = torch.zeros(*each.seeds.shape, width, dtype=torch.bool)
            there[which] = present
            parts = each.turns.fields((there.shape[0], there.shape[1]), there)
            said = {name: None if part is None else part[which] for name, part in parts.items()}
        return Rollouts(
            prompt=prompts.prompt,
            problem=prompts.problem,
            response=padded("tokens", torch.long),
            logp_sampler=padded("logp", torch.float32),
            limit=min(each.limit, self.most or each.limit),
            limits=prompts.limits,
            truncated=~torch.tensor([[answer.ended for answer in group] for group in groups]),
            temperature=1.0 if ticket.greedy else self.temperature,  # the engine's greedy log-probs have none
            version=version[..., :1] if constant else version,
            **said,
        )

    def close(self) -> None:
        self.fleet.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _answer(drawn: Rollouts, prompt: int, sample: int) -> EngineResponse:
    """A response that was drawn before."""
    place, here = (prompt, sample), drawn.mask[prompt, sample]
    tokens, logp, versions = (
        part.expand(drawn.mask.shape)[place][here].tolist()
        for part in (drawn.response, drawn.logp_sampler, drawn.version)
    )
    return EngineResponse(tokens, logp, versions, ended=not drawn.truncated[place])

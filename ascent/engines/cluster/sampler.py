"""A sampler whose responses are drawn by replicas elsewhere, which may die, hang and come back.

A call is cut into as many chunks as there are replicas at the start of the run. A chunk is drawn whole by one replica,
from the seeds of its responses: so it does not matter who draws it, nor how often one has died over it. A replica that
comes back has no weights. It is given them, and has to answer a probe as the learner's own copy does, before it draws.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ascent.core.protocols import Sampler
from ascent.core.types import Prompts, Refused, Rollouts, Trouble, join
from ascent.engines.language.sampling.draw import response_seeds

PROBE = 4
"""Tokens that a replica draws greedily after each load, to be compared with the learner's own copy."""
GAP = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""How far the log-probs of those may be apart."""
PAUSE = 0.2
"""Seconds before a replica that was lost is asked again: it is being started."""
LOOK = 1.0
"""Seconds between two looks at what is done."""


class Gone(Exception):
    """A replica has died, or has not the weights. `over`: it does not come back."""

    over = False


class Crew(Protocol):
    """Replicas that are called by name: a call is begun, waited for, and gives its result or `Gone`."""

    names: tuple[str, ...]

    def put(self, value: Any) -> Any:
        """A value that many calls are given, sent once."""

    def begin(self, name: str, method: str, *args: Any) -> Any: ...

    def wait(self, calls: Sequence[Any], seconds: float) -> list[Any]:
        """Those of the calls that are done, after so many seconds at most."""

    def result(self, call: Any) -> Any: ...

    def restart(self, name: str) -> None:
        """End a replica that hangs, so that a new one takes its place."""


class Work(NamedTuple):
    """A call that is under way: whose, and since when."""

    name: str
    begun: float


@dataclass
class Order:
    """What is drawn: the arguments that are the same for every chunk."""

    prompts: Prompts
    samples: int
    seeds: Tensor | None
    limit: int | None


class ClusterSampler(Sampler):
    """Rank 0's sampler. `inner` is what would draw without replicas; `own` rank 0's own copy of the policy."""

    def __init__(self, inner: Any, own: Any, crew: Crew, config: dict[str, Any], deadline: float):
        self.inner, self.own, self.crew, self.config, self.deadline = inner, own, crew, config, deadline
        self.fills, self.limit, self.rows, self.note = inner.fills, inner.limit, inner.rows, inner.note
        self.version = -1
        self.alive = list(crew.names)
        self.away: dict[str, float] = {}
        """Replicas that were lost and are not back, and since when."""
        self._next: dict[str, float] = {}
        """When each of those is asked again."""
        self._loaded: set[str] = set()
        self._weights: Any = None
        self._expected: Rollouts | None = None

    @property
    def timeline(self) -> Any:
        return self.inner.timeline

    @timeline.setter
    def timeline(self, new: Any) -> None:
        self.inner.timeline = new

    def load(self, params: dict[str, Tensor], version: int) -> None:
        self.inner.load(params, version)
        self.version, self._loaded = version, set()
        self._expected = self.own.draw(probe_prompts(self.own.lm.vocab), 1, None, PROBE)
        self._weights = self.crew.put({name: p.detach().cpu() for name, p in self.own.lm.trained().items()})

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        if self._weights is None:  # before the first load there is nothing that replicas could draw with
            return self.inner.generate(prompts, samples, greedy, limit=limit, seed=seed)
        seeds = None if greedy else response_seeds(len(prompts), samples, self.own.generator, seed)
        cut = len(self.crew.names)
        chunks = [part for i in range(cut) if len(part := torch.arange(len(prompts))[i::cut])]
        drawn = self._draw(Order(prompts, samples, seeds, limit), chunks)
        order = torch.cat(chunks).argsort()
        return join(drawn).select(order)

    def _draw(self, order: Order, chunks: list[Tensor]) -> list[Rollouts]:
        """All chunks, in their order: given to whoever is free, and to another where one was lost."""
        todo, found = deque(range(len(chunks))), dict[int, Rollouts]()
        running: dict[Any, tuple[Work, int]] = {}
        while len(found) < len(chunks):
            busy, now = {work.name for work, _ in running.values()}, time.monotonic()
            for name in [name for name in self.alive if name not in busy and self._next.get(name, 0.0) <= now]:
                if name not in self._loaded:
                    call = self.crew.begin(name, "load", self._weights, self.version, self.config)
                    running[call] = Work(name, time.monotonic()), -1
                elif todo:
                    number = todo.popleft()
                    call = self.crew.begin(name, "draw", self.version, *_part(order, chunks[number]))
                    running[call] = Work(name, time.monotonic()), number
            if not running:
                time.sleep(PAUSE)
            for call in self.crew.wait(list(running), PAUSE if self.away else LOOK) if running else ():
                work, number = running.pop(call)
                try:
                    result = self.crew.result(call)
                except Gone as error:
                    todo.extendleft([number] if number >= 0 else [])
                    self._lost(work.name, error)
                    continue
                self.away.pop(work.name, None)
                if number < 0:
                    self._compare(work.name, result)
                    self._loaded.add(work.name)
                else:
                    found[number] = result
            for call, (work, number) in list(running.items()):
                if time.monotonic() - work.begun > self.deadline:
                    self.crew.restart(work.name)
                    running[call] = work._replace(begun=time.monotonic()), number
        return [found[number] for number in range(len(chunks))]

    def _lost(self, name: str, error: Gone) -> None:
        """It starts again without weights; one that does not come back in time is left out."""
        now, why = time.monotonic(), str(error).partition("\n")[0]
        self._loaded.discard(name)
        if name not in self.away:
            self.away[name] = now
            sys.stderr.write(f"ascent: {name} was lost, and others draw its responses until it is back ({why})\n")
        self._next[name] = now + PAUSE
        if error.over or now - self.away[name] > self.deadline:
            self.alive.remove(name)
            sys.stderr.write(f"ascent: {name} does not come back, and is left out from here on\n")
        if not self.alive:
            raise Trouble(f"no sampler of the cluster is left. Of {name}, the last, is known: {why}")

    def _compare(self, name: str, drawn: Rollouts) -> None:
        expected = self._expected
        assert expected is not None
        bound = GAP.get(self.own.lm.model.dtype, 1e-3)
        same = drawn.response.shape == expected.response.shape
        gap = float((drawn.logp_sampler - expected.logp_sampler).abs().max()) if same else float("inf")
        if not gap <= bound:
            raise Trouble(
                f"{name} answers the probe after load {self.version} with log-probs {gap:.2g} from the learner's "
                f"(at most {bound:g}): it does not have the same model"
            )

    def close(self) -> None:
        self.inner.close()


def probe_prompts(vocab: int) -> Prompts:
    return Prompts.of(torch.arange(8)[None] % vocab)


def _part(order: Order, chunk: Tensor) -> tuple[Any, ...]:
    seeds = None if order.seeds is None else order.seeds[chunk]
    return order.prompts[chunk], order.samples, seeds, order.limit


class Replica:
    """What draws in a process of its own, with parameters that it is given. `make`: a sampler from a config's dict."""

    def __init__(self, make: Any):
        self.make, self.sampler, self.version = make, None, -1
        self.tokens, self.busy, self.began = 0, 0.0, time.monotonic()

    def load(self, weights: dict[str, Tensor], version: int, config: dict[str, Any]) -> Rollouts:
        """Take these parameters; what it then says to the probe."""
        if self.sampler is None:
            self.sampler = self.make(config)
        sampler: Any = self.sampler
        sampler.load(weights, version)
        self.version = version
        return sampler.draw(probe_prompts(sampler.lm.vocab), 1, None, PROBE)

    def draw(self, version: int, prompts: Prompts, samples: int, seeds: Tensor | None, limit: int | None) -> Rollouts:
        if self.sampler is None or version != self.version:
            raise Gone(f"it has version {self.version} of the weights, not {version}")
        begin = time.monotonic()
        drawn = self.sampler.draw(prompts, samples, seeds, limit)
        self.busy += time.monotonic() - begin
        self.tokens += int(drawn.mask.sum())
        return drawn

    def about(self) -> dict[str, Any]:
        """For `ascent cluster status`."""
        alive = time.monotonic() - self.began
        rate = self.tokens / self.busy if self.busy else 0.0
        return {"pid": os.getpid(), "version": self.version, "tokens": self.tokens, "rate": rate} | {
            "idle": max(0.0, 1 - self.busy / alive)
        }


def check_cluster(config: Any) -> None:
    """Refuse what replicas cannot draw, before anything is started."""
    policy = getattr(config.policy, "engine", None)
    if config.data != "samples" or policy is None:
        raise Refused("ascent cluster is for language models that sample: start other trainings by torchrun")
    if config.task.plays:
        raise Refused("--tools, --environment or --agent: episodes are played by the learner; start it by torchrun")
    if policy != "local":
        raise Refused(f"--engine {policy}: the replicas of a cluster are Ascent's own samplers; leave it out")
    if config.ahead:
        raise Refused(f"--ahead {config.ahead}: replicas do not sample ahead yet; leave it out")

"""Who draws what: chunks of rollouts go to replicas, which may die, hang, join and leave.

A chunk is drawn whole by one replica, with one version of the weights and from the seeds of its responses: so it does
not matter who draws it, when, nor how often one has died over it. A replica that has not the chunk's weights is given
them first, and has to answer a probe as the learner's own copy does.

One thread does all of this. Whoever asks has futures.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ascent.core.errors import RunError
from ascent.core.types import Rollouts
from ascent.distributed.replica_errors import ReplicaLostError

PAUSE = 0.2
"""Seconds before a replica that was lost is asked again: it is being started."""
START = 120.0
"""Seconds that a replica has to start and to load its first weights, if the deadline is not longer. An engine's server
takes more."""
LOOK = 1.0
"""Seconds between two looks at what takes too long."""


class ReplicaSet(Protocol):
    """Replicas that are called by name."""

    def names(self) -> list[str]:
        """Who is there now, ready or not."""

    def put(self, params: dict[str, Tensor]) -> Any:
        """Weights as `load` takes them, which stay as they are now."""

    def load(self, name: str, weights: Any, version: int, config: dict[str, Any]) -> Future[Any]:
        """Bring a replica these weights; its result is what `Replica.load` returns."""

    def begin(self, name: str, method: str, *args: Any) -> Future[Any]: ...

    def result(self, call: Future[Any]) -> Any:
        """Of a call that is done; or `Gone`."""

    def restart(self, name: str) -> None:
        """End a replica that hangs, so that a new one takes its place."""


@dataclass(eq=False)
class Chunk:
    """Responses that one replica draws, with this version of the weights."""

    version: int
    args: tuple[Any, ...]
    drawn: Future[Rollouts] = field(default_factory=Future)


class Work(NamedTuple):
    """A call that is under way: a chunk is drawn; or without one, weights of a version are loaded (-1: a greeting)."""

    call: Future[Any]
    begun: float
    version: int
    chunk: Chunk | None


@dataclass(eq=False)
class ReplicaState:
    """A replica as it is known here."""

    name: str
    version: int = -1
    """Of the weights that it has."""
    work: Work | None = None
    late: bool = False
    """Was it ended because its work takes too long, which has not failed yet?"""
    away: float | None = None
    """Since when it is lost, if it is."""
    again: float = 0.0
    """When it may be asked next."""
    tokens: int = 0
    """Drawn since the last line of the records; so are the next three counted."""
    drawing: float = 0.0
    loading: float = 0.0
    lost: int = 0


class ReplicaDispatcher:
    """`check`: refuses what a replica answers to a version's probe, beside what is expected. `note`: keeps a record."""

    def __init__(
        self,
        crew: ReplicaSet,
        config: dict[str, Any],
        deadline: float,
        check: Callable[[str, int, Rollouts, Rollouts], None],
        note: Callable[[dict[str, Any]], None],
        engine: float = 0.0,
    ):
        """`engine`: seconds that the server of a replica may take to start."""
        self.crew, self.config, self.deadline, self.check, self.note = crew, config, deadline, check, note
        self.members = {name: ReplicaState(name) for name in crew.names()}
        self._first, self._left, self._engine = len(self.members), set[str](), engine
        self._weights: dict[int, tuple[Any, Rollouts]] = {}
        """By version: the weights, and the right answer to the probe."""
        self._todo: deque[Chunk] = deque()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._noted, self._closed = time.monotonic(), False
        self._trouble: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="replicas", daemon=True)
        self._thread.start()

    @property
    def width(self) -> int:
        """Chunks that a call is cut into: one for each replica that there is, and never fewer than at the start."""
        return max(self._first, sum(member.away is None for member in list(self.members.values())))

    def load(self, version: int, weights: Any, probed: Rollouts, waited: float) -> None:
        """Weights for what will be asked for, and what a replica that has them answers to the probe.

        `waited`: for the records, seconds for which the learners had nothing to do since the last load.
        """
        self._events.put(partial(self._take_weights, version, (weights, probed), waited))

    def ask(self, version: int, each: Sequence[tuple[Any, ...]]) -> list[Future[Rollouts]]:
        """Have these chunks drawn, each of which is what follows the version in `Replica.draw`."""
        chunks = [Chunk(version, args) for args in each]
        self._events.put(partial(self._todo.extend, chunks))
        return [chunk.drawn for chunk in chunks]

    def close(self) -> None:
        def over() -> None:
            self._closed = True
            self._write(max(self._weights, default=-1), 0.0)

        self._events.put(over)
        self._thread.join(5)

    # ---- the thread

    def _work(self) -> None:
        while not self._closed:
            lost = any(member.away is not None for member in self.members.values())
            busy = any(member.work for member in self.members.values())
            try:
                self._events.get(timeout=PAUSE if lost else LOOK if busy else None)()
            except queue.Empty:
                pass
            except BaseException as error:  # whoever waits is told
                self._trouble = error
            try:
                self._end_late()  # first: the chunk of a member that is left out is given to another
                self._give_out()
            except BaseException as error:
                self._trouble = error
            if self._trouble is not None:
                self._fail(self._trouble)

    def _fail(self, error: BaseException) -> None:
        running = [member.work.chunk for member in self.members.values() if member.work]
        for chunk in (*self._todo, *(chunk for chunk in running if chunk is not None)):
            if not chunk.drawn.done():
                chunk.drawn.set_exception(error)
        self._todo.clear()

    def _take_weights(self, version: int, weights: tuple[Any, Rollouts], waited: float) -> None:
        running = (member.work.version for member in self.members.values() if member.work)
        needed = {*running, *(chunk.version for chunk in self._todo)}
        self._weights = {old: sent for old, sent in self._weights.items() if old in needed} | {version: weights}
        self._write(version, waited)
        for name in set(self.crew.names()) - self.members.keys() - self._left:
            self.members[name] = ReplicaState(name, away=time.monotonic())
            self._begin(self.members[name], -1, None, self.crew.begin(name, "about"))

    def _give_out(self) -> None:
        now = time.monotonic()
        for member in self.members.values():
            if not self._todo:
                return
            if member.work is not None or member.again > now:
                continue
            version = self._todo[0].version
            if member.version == version:
                chunk = self._todo.popleft()
                call = self.crew.begin(member.name, "draw", version, *chunk.args)
                self._begin(member, version, chunk, call)
            else:
                call = self.crew.load(member.name, self._weights[version][0], version, self.config)
                self._begin(member, version, None, call)

    def _begin(self, member: ReplicaState, version: int, chunk: Chunk | None, call: Future[Any]) -> None:
        member.work = Work(call, time.monotonic(), version, chunk)
        call.add_done_callback(lambda done: self._events.put(partial(self._take, member, done)))

    def _take(self, member: ReplicaState, call: Future[Any]) -> None:
        """A call is over: keep what it gave, or have it done by another."""
        work = member.work
        if work is None or work.call is not call:  # it came too late
            return
        member.work, seconds = None, time.monotonic() - work.begun
        try:
            result = self.crew.result(call)
        except ReplicaLostError as error:
            self._lose(member, work, error)
            return
        if work.version < 0:
            self.note({"event": "joined", "replica": member.name})
        elif work.chunk is None:
            self.check(member.name, work.version, self._weights[work.version][1], result)
            member.version, member.loading = work.version, member.loading + seconds
        else:
            member.tokens, member.drawing = member.tokens + int(result.mask.sum()), member.drawing + seconds
            if not work.chunk.drawn.done():  # as it is when all have failed
                work.chunk.drawn.set_result(result)
        member.away, member.late = None, False

    # ---- replicas that are lost

    @property
    def _start(self) -> float:
        return max(self.deadline, START + self._engine)

    def _end_late(self) -> None:
        """One that takes too long is started again; if its work does not even end by that, it is left out."""
        now = time.monotonic()
        for member in list(self.members.values()):
            work = member.work
            limit = self.deadline if member.version >= 0 else self._start
            if work is None or work.version < 0 or work.call.done() or now - work.begun <= limit:
                continue
            if member.late:
                member.work = None
                self._lose(member, work, ReplicaLostError(f"it did not end within {limit:g} seconds", over=True))
            else:
                member.late, member.work = True, work._replace(begun=now)
                self.crew.restart(member.name)

    def _lose(self, member: ReplicaState, work: Work, error: ReplicaLostError) -> None:
        """It starts again without weights; one that does not come back in time is left out."""
        now = time.monotonic()
        if work.chunk is not None:
            self._todo.appendleft(work.chunk)
        member.version, member.again, member.late = -1, now + PAUSE, False
        since, member.away = member.away, member.away or now
        if since is None and not error.over:
            member.lost += 1
            self._say(member.name, "lost", "was lost, and others draw its responses until it is back", error)
        if error.over or now - member.away > self._start:
            del self.members[member.name]
            self._left.add(member.name)
            self._say(member.name, "left", "is left out from here on", error)
        if not any(other.work is None or other.work.version >= 0 for other in self.members.values()):
            raise RunError(f"no sampler of the cluster is left. Of {member.name}, the last, is known: {error}")

    def _say(self, name: str, event: str, words: str, error: ReplicaLostError) -> None:
        sys.stderr.write(f"ascent: {name} {words} ({error})\n")
        self.note({"event": event, "replica": name, "why": str(error)})

    def _write(self, version: int, waited: float) -> None:
        """A line of records: what every replica has done since the last one."""
        now = time.monotonic()
        each = {
            member.name: {
                "version": member.version,
                "tokens": member.tokens,
                "drawing": round(member.drawing, 4),
                "loading": round(member.loading, 4),
                "lost": member.lost,
                "away": member.away is not None,
            }
            for member in self.members.values()
        }
        seconds = {"seconds": round(now - self._noted, 4), "waited": round(waited, 4)}
        self.note({"version": version, **seconds, "replicas": each})
        self._noted = now
        for member in self.members.values():
            member.tokens, member.drawing, member.loading, member.lost = 0, 0.0, 0.0, 0

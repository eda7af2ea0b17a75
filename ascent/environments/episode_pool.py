"""Episodes in processes of their own, forked from a warm one: whatever an environment does, only its episode ends.

A call (begin or step) is asked, and answered later: `answers` alone waits. Every call has a number that nobody can
guess, a limit of time, and one answer: a step, or the error in words. What an episode answers depends on its problem,
its two seeds and its actions alone. An episode that fails is over, and its process ends with all that it has started.

`most` limits how many calls are under way at once; the others wait for their turn, outside their limits of time. How
many episodes are alive is not limited: one that has answered holds nobody up, whatever its sampler does next. Alive, an
episode uses one file descriptor here (512 fit under `ulimit -n 1024`) and two small processes.

The warm process starts on first use. One that dies is started anew, and episodes that are alive go on without it.
Everything ends with `close`, when the pool is forgotten, and with this process however it ends. One thread may use it.
"""

import json
import math
import os
import pickle
import secrets
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ascent.environments.episode_process import NUMBER, EpisodePlayer, Source
from ascent.processes.reward_calls import LARGEST, REASON, error_words, whole_text
from ascent.processes.supervisor import START, Limits, SupervisedProcess, framed, hang_up
from ascent.processes.user_code import CODE
from ascent.tasks.environment import Step
from ascent.tasks.text.text_task import Problem

LONGEST = 4 << 20
"""The most bytes of an answer. Observations are cut far below it."""
READING = 5.0
"""Seconds that the rest of an answer may take once its beginning is there."""
OVER = "its episode is over, or has not begun"


class Reply(NamedTuple):
    """What became of a call."""

    episode: int
    step: Step | None
    """None: it failed. To begin it is a step with the first observation, or with none."""
    error: str | None
    """Why it failed, in words."""
    seconds: float
    """The time that the environment took."""


class EpisodePool:
    """Episodes of one environment, each in its own process."""

    def __init__(self, source: Source, limits: Limits, most: int = 64, what: str = "environment"):
        """`what` plays the episodes, in the words of errors."""
        self.what = what
        self.source = pickle.dumps((source.source, dict(source.settings), source.sent, CODE))
        self.limits, self.most, self.owner = limits, most, os.getpid()
        self.rows: dict[int, _Row] = {}
        self.queue: deque[int] = deque()
        """Episodes whose call waits for its turn."""
        self.busy: dict[int, _Row] = {}
        """Those whose call is under way."""
        self.poll, self.files = select.poll(), dict[int, int]()
        """Whom to listen to: their files, and to which episode each belongs."""
        self.done: list[Reply] = []
        self.warm: _Warm | None = None
        self.kept: list[SupervisedProcess] = []
        """The warm process, and before it in the list those that died."""
        self.deaths = 0
        """Warm processes that died since an episode last answered."""
        weakref.finalize(self, _end_all, self.rows, self.kept, self.owner)

    # ---- what is asked

    def begin(self, episode: int, problem: Any, shared: int, own: int, seconds: float | None = None) -> None:
        """Begin an episode with what its `begin` takes. All of a group have the `shared` seed, and with it the first
        observation. `seconds`: what each of its calls may take, if not as long as the others'."""
        self._check_owner()
        if episode in self.rows:
            raise ValueError(f"episode {episode} has begun already")
        self.rows[episode] = _Row(self.limits.seconds if seconds is None else seconds)
        self._ask(episode, "begin", (problem, shared, own))

    def again(self, episode: int, problem: Any, shared: int, own: int, seconds: float) -> bool:
        """Begin another episode in the process of this one, which has ended well; False: the process is gone."""
        row = self.rows.get(episode)
        if self.owner != os.getpid() or row is None or row.line is None or row.frame or not row.line.silent:
            return False
        row.seconds = seconds
        self._ask(episode, "begin", (problem, shared, own))
        return True

    def step(self, episode: int, action: str) -> None:
        self._check_owner()
        if episode not in self.rows:
            self.done.append(Reply(episode, None, OVER, 0.0))
        elif self.rows[episode].frame:
            raise ValueError(f"episode {episode} has not answered yet")
        else:
            self._ask(episode, "step", (action,))

    def end(self, episode: int) -> None:
        """The episode is over or given up. Its environment may close within a second; then its process is killed."""
        self._check_owner()
        self._release(episode)
        row = self.rows.pop(episode, None)
        if episode in self.queue:
            self.queue.remove(episode)
        self.done = [answer for answer in self.done if answer.episode != episode]
        if row is not None and row.line is not None:
            hang_up(row.line.socket)

    def answers(self, wait: float) -> list[Reply]:
        """What has been answered; waits at most so many seconds for the first, and not where nothing was asked."""
        self._check_owner()
        until = time.monotonic() + wait
        while True:
            self._hand_out()
            deadlines = [row.deadline for row in self.busy.values()] + ([self.warm.deadline] if self.warm else [])
            idle = self.done or not (self.busy or self.queue)
            self._listen(0.0 if idle else min([until, *deadlines]) - time.monotonic())
            self._check_deadlines()
            if self.done or idle or time.monotonic() >= until:
                break
        self._hand_out()
        done, self.done = self.done, []
        return done

    def close(self) -> None:
        """End every episode and the warm process, whatever they do. What is asked afterwards starts them again."""
        self._check_owner()
        _end_all(self.rows, self.kept, self.owner)
        self._forget()

    # ---- handing out

    def _check_owner(self) -> None:
        if self.owner != os.getpid():  # a fork of ours: the processes are its parent's, and it may start its own
            for row in self.rows.values():
                if row.line is not None:
                    row.line.socket.close()
            self.kept[:], self.owner = [], os.getpid()
            self._forget()

    def _forget(self) -> None:
        for left in (self.rows, self.queue, self.busy, self.files):
            left.clear()
        self.poll = select.poll()
        self.done, self.warm, self.deaths = [], None, 0

    def _ask(self, episode: int, verb: str, arguments: tuple[Any, ...]) -> None:
        row = self.rows[episode]
        row.number = secrets.token_hex(NUMBER // 2)
        try:
            row.frame = row.number.encode() + pickle.dumps((verb, arguments))
        except Exception as error:
            return self._fail(episode, f"the problem cannot be sent to a process: {error}"[:REASON])
        self.queue.append(episode)
        self._hand_out()

    def _hand_out(self) -> None:
        """Let those that wait have their turn, as many as there are places."""
        for _ in range(len(self.queue)):
            if len(self.busy) >= self.most:
                return
            episode = self.queue.popleft()
            row = self.rows[episode]
            if row.line is None:
                self._fork(episode, row)
                if row.line is None:  # not yet, or it has failed
                    self.queue.extend([episode] if episode in self.rows else [])
                    continue
            row.asked, row.reading = time.monotonic(), False
            row.deadline = row.asked + (row.seconds if row.began else START)
            row.line.send(row.frame)
            self.busy[episode] = row
            self.files[row.line.socket.fileno()] = episode
            self.poll.register(row.line.socket, row.line.events)

    def _release(self, episode: int) -> None:
        """Its call is no longer under way."""
        row = self.busy.pop(episode, None)
        if row is not None and row.line is not None:
            del self.files[row.line.socket.fileno()]
            self.poll.unregister(row.line.socket)

    def _fork(self, episode: int, row: "_Row") -> None:
        """Let the warm process make a process for this episode, if it is ready to."""
        try:
            if self.warm is None:
                for gone in [kept for kept in self.kept if kept.process.poll() is not None]:
                    self.kept.remove(gone)
                    gone.end()
                self.warm = _Warm(self.source, self.limits)
                self.kept.append(self.warm)
            if not self.warm.ready or self.warm.full:
                return
            ours, theirs = socket.socketpair()
        except OSError as error:
            return self._fail(episode, f"no process can be made for it: {error}")
        with theirs:
            try:
                socket.send_fds(self.warm.socket, [b"."], [theirs.fileno()])
                row.line = ProcessLine(ours)
            except OSError:  # its buffer is full, or it has ended, which will be heard
                ours.close()
                self.warm.full = True

    # ---- listening

    def _listen(self, seconds: float) -> None:
        """Wait for whoever speaks first, and hear all that have spoken."""
        warm = self.warm
        if warm is not None:
            self.poll.register(warm.socket, warm.line.events | (select.POLLOUT if warm.full else 0))
        spoke = self.poll.poll(1000 * max(0.0, seconds))
        if warm is not None:
            self.poll.unregister(warm.socket)
        for file, event in spoke:
            if file in self.files:
                self._hear(self.files[file], event)
            elif warm is not None:
                warm.full = False
                self._hear_warm(warm, event)

    def _hear(self, episode: int, event: int) -> None:
        row = self.busy[episode]
        assert row.line is not None
        replies = row.line.hear(event)
        if event & select.POLLOUT:
            self.poll.modify(row.line.socket, row.line.events)
        for reply in replies:
            if not row.began and reply.keys() == {"began"} and isinstance(reply["began"], float):
                row.began, row.deadline = True, min(reply["began"], time.monotonic()) + row.seconds
            elif reply.keys() == {"ended"}:
                return self._fail(episode, f"its {self.what} ended its process: {reply['ended']!s:.40}")
            elif not row.began and reply.keys() == {"error"}:
                return self._fail(episode, str(reply["error"])[:REASON])
            elif reply.pop("number", None) != row.number:
                return self._fail(episode, "its process sent an answer that is not the one to this turn")
            else:
                return self._answered(episode, row, reply)
        if len(row.line.read) > LONGEST:
            self._fail(episode, f"its process sent an answer of more than {LONGEST:,} bytes")
        elif row.line.ended and not row.began and not row.again:  # the warm process died before it made this one
            self._release(episode)
            row.line.socket.close()
            row.again, row.line = True, None
            self.queue.append(episode)
        elif row.line.ended:
            self._fail(episode, f"its {self.what} ended its process: it closed its pipe")

    def _answered(self, episode: int, row: "_Row", reply: dict[str, Any]) -> None:
        self.deaths = 0
        seconds, error, step = reply.get("seconds"), reply.get("error"), _read(reply.get("step"))
        if not isinstance(seconds, float) or not seconds >= 0 or (not isinstance(error, str) and step is None):
            self._fail(episode, f"its process sent what is not a step: {sorted(reply)}"[:REASON])
        elif seconds > row.seconds:
            self._fail(episode, self._late(row))
        elif error is not None:
            self._fail(episode, whole_text(error), seconds)
        else:
            row.frame = b""
            self._release(episode)
            self.done.append(Reply(episode, step, None, seconds))

    def _hear_warm(self, warm: "_Warm", event: int) -> None:
        for reply in warm.line.hear(event):
            if reply.keys() == {"ready"}:
                warm.ready, warm.deadline = True, math.inf
            elif "error" in reply:
                return self._lose_warm(f"its {self.what} cannot be loaded: {reply['error']!s:.300}")
            else:
                return self._warm_died(reply.get("ended", "it sent what is no answer"))
        if warm.line.ended:
            self._warm_died(warm.ending())

    def _warm_died(self, how: str) -> None:
        """Start it anew for those that wait; they fail if that was in vain."""
        self.warm, self.deaths = None, self.deaths + 1
        if self.deaths > 1:
            self._lose_warm(f"the process that makes its {self.what} ended twice: {how!s:.40}")

    def _lose_warm(self, why: str) -> None:
        self.warm, self.deaths = None, 0
        for episode in [episode for episode in self.queue if self.rows[episode].line is None]:
            self._fail(episode, whole_text(why))

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for episode, row in [(episode, row) for episode, row in self.busy.items() if now >= row.deadline]:
            assert row.line is not None
            if row.line.read and not row.reading:
                row.reading, row.deadline = True, now + READING
            else:
                self._fail(episode, self._late(row) if row.began else f"no process was made for it within {START:g} s")
        if self.warm is not None and now >= self.warm.deadline:
            self.warm.end()
            self.kept.remove(self.warm)
            self._lose_warm(f"the process that makes its {self.what} did not start within {START:g} s")

    def _late(self, row: "_Row") -> str:
        return f"its {self.what} took longer than {row.seconds:g} s"

    def _fail(self, episode: int, error: str, seconds: float | None = None) -> None:
        """The error of an episode, which is over: its process ends."""
        took = time.monotonic() - self.rows[episode].asked if episode in self.busy else 0.0
        self.end(episode)
        self.done.append(Reply(episode, None, error, took if seconds is None else seconds))


def _end_all(rows: dict[int, "_Row"], kept: list[SupervisedProcess], owner: int) -> None:
    if os.getpid() != owner:  # a fork has no say over them
        return
    while rows:
        line = rows.popitem()[1].line
        if line is not None:
            hang_up(line.socket)
    while kept:
        kept.pop().end()


def _read(sent: Any) -> Step | None:
    """A step as it was sent, if it has the fields of one."""
    if not isinstance(sent, list) or [type(value) for value in sent[1:]] != [float, bool, str]:
        return None
    observation, reward, done, reason = sent
    if not math.isfinite(reward) or abs(reward) > LARGEST:
        return None
    if isinstance(observation, str):
        return Step(whole_text(observation), reward, done, whole_text(reason))
    if not isinstance(observation, list) or not all(isinstance(message, dict) for message in observation):
        return None
    if not all(isinstance(value, str) for message in observation for value in message.values()):
        return None
    messages = [{whole_text(name): whole_text(value) for name, value in message.items()} for message in observation]
    return Step(messages, reward, done, whole_text(reason))


# ---- what is known of a process -------------------------------------------------------------------------


class ProcessLine:
    """Our end of a socket to a process: nothing blocks."""

    def __init__(self, end: socket.socket):
        end.setblocking(False)
        self.socket = end
        self.out = b""
        """What is still to be sent."""
        self.read = b""
        """What it has said of an answer that is not complete."""
        self.ended = False

    def send(self, frame: bytes) -> None:
        self.write(framed(frame))

    def write(self, content: bytes) -> None:
        self.out += content
        self._flush()

    def _flush(self) -> None:
        """Whoever dies or does not listen is noticed by its silence."""
        try:
            while self.out:
                self.out = self.out[self.socket.send(self.out) :]
        except BlockingIOError:
            pass
        except OSError:
            self.out = b""

    @property
    def events(self) -> int:
        """What to wait for."""
        return select.POLLIN | (select.POLLOUT if self.out else 0)

    @property
    def silent(self) -> bool:
        """Is the process there, and says nothing?"""
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def hear(self, event: int) -> list[dict[str, Any]]:
        """The replies that are complete; of what is none, an empty one."""
        if event & select.POLLOUT:
            self._flush()
        parts = [self.read]
        try:
            while not self.ended and sum(map(len, parts)) <= LONGEST:
                parts.append(self.socket.recv(1 << 16))
                self.ended = not parts[-1]
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        *lines, self.read = b"".join(parts).split(b"\n")
        return [_parse(line) for line in lines if line]


def _parse(line: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        reply = json.loads(line)
        if isinstance(reply, dict):
            return reply
    return {}


@dataclass
class _Row:
    """An episode, and its call."""

    seconds: float
    """What a call may take."""
    line: ProcessLine | None = None
    """None: it has no process yet."""
    frame: bytes = b""
    """The call that waits or is under way."""
    number: str = ""
    asked: float = 0.0
    deadline: float = math.inf
    began: bool = False
    """Its process is there."""
    again: bool = False
    """The warm process died before it made one."""
    reading: bool = False


class _Warm(SupervisedProcess):
    """The process that episodes are forked from. The order of its sets is the same every time."""

    def __init__(self, source: bytes, limits: Limits):
        super().__init__(
            "ascent.environments.episode_process:keep_warm", limits, PYTHONHASHSEED="0", OMP_NUM_THREADS="1"
        )
        self.line = ProcessLine(self.socket)
        self.line.send(source)
        self.deadline = time.monotonic() + START
        self.ready = False
        self.full = False
        """Its socket took no more."""


class LocalEpisodes:
    """The same for environments that are trusted, in this process: no limits, and every call is answered at once.

    Their seconds count as none, so that the records of a run are the same every time.
    """

    def __init__(self, make: Callable[[], Any]):
        self.make = make
        self.players: dict[int, EpisodePlayer] = {}
        self.done: list[Reply] = []

    def begin(self, episode: int, problem: Problem, shared: int, own: int) -> None:
        if episode in self.players:
            raise ValueError(f"episode {episode} has begun already")
        self.players[episode] = EpisodePlayer(self.make)
        self._call(episode, "begin", problem, shared, own)

    def step(self, episode: int, action: str) -> None:
        if episode not in self.players:
            self.done.append(Reply(episode, None, OVER, 0.0))
        else:
            self._call(episode, "step", action)

    def _call(self, episode: int, verb: str, *arguments: Any) -> None:
        step, words = None, None
        try:
            step = getattr(self.players[episode], verb)(*arguments)
        except Exception as error:
            words = whole_text(error_words(error))
        if words is not None:
            self.end(episode)
        self.done.append(Reply(episode, step, words, 0.0))

    def answers(self, wait: float) -> list[Reply]:
        done, self.done = self.done, []
        return done

    def end(self, episode: int) -> None:
        self.done = [answer for answer in self.done if answer.episode != episode]
        player = self.players.pop(episode, None)
        with suppress(Exception):
            if player is not None:
                player.close()

    def close(self) -> None:
        for episode in list(self.players):
            self.end(episode)

"""Episodes in separate processes, forked from one that has loaded the environment: a failure ends only its episode.

A call (begin or step) is sent and answered later: only `wait_for_replies` waits. Each call has a time limit and gets
one reply: a step, or a description of the error. The steps of an episode depend only on its problem, its two seeds and
its actions. An episode that fails is over, and its process ends with all that it has started.

`max_active` limits how many calls run at once. Others wait in a queue, and their time limit starts when they leave it.
The number of open episodes is not limited. An open episode uses one file descriptor here (512 fit under `ulimit -n
1024`) and two small processes.

The fork server starts on first use. If it dies it is restarted, and open episodes continue. Everything ends with
`close`, when the pool is garbage-collected, and with this process however it ends. Only one thread may use a pool.
"""

import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ascent.environments.episode_process import EpisodePlayer, Source
from ascent.processes.call_loop import number_call
from ascent.processes.channel import PolledChannel, poll_channels
from ascent.processes.fork_server import ForkServer
from ascent.processes.reward_calls import MAX_FLOAT32, MAX_REASON_CHARS, describe_error, replace_surrogates
from ascent.processes.supervisor import START_SECONDS, Limits
from ascent.processes.user_code import CODE
from ascent.tasks.environment import Step
from ascent.tasks.text.text_task import Problem

READ_SECONDS = 5.0
"""Seconds that the rest of an answer may take once its beginning has arrived."""
EPISODE_OVER = "its episode is over, or has not begun"
PROGRAM = "ascent.environments.episode_process:serve_episodes"


class Reply(NamedTuple):
    """The result of a call."""

    episode: int
    step: Step | None
    """None: the call failed. The step of `begin` has the first observation, or none."""
    error: str | None
    """Why it failed."""
    seconds: float
    """The time that the environment took."""


class EpisodePool:
    """Episodes of one environment, each in its own process."""

    def __init__(self, source: Source, limits: Limits, max_active: int = 64, kind: str = "environment"):
        """`kind` is the word for the user code in error messages."""
        self.kind = kind
        self.setup = (source.source, dict(source.settings), source.sent, CODE)
        self.limits, self.max_active, self.owner = limits, max_active, os.getpid()
        self.episodes: dict[int, _Episode] = {}
        self.queue: deque[int] = deque()
        """Episodes whose call is not sent yet."""
        self.active: dict[int, _Episode] = {}
        """Episodes whose call is sent and not answered."""
        self.replies: list[Reply] = []
        self.server: ForkServer | None = None
        self.servers: list[ForkServer] = []
        """The fork server, and before it in the list those that died while their episodes continue."""
        self.deaths = 0
        """Fork servers that died since an episode last answered."""
        weakref.finalize(self, _end_all, self.episodes, self.servers, self.owner)

    # ---- calls

    def begin(self, episode: int, problem: Any, group_seed: int, seed: int, seconds: float | None = None) -> None:
        """Begin an episode with the arguments of its `begin`.

        Episodes of a group have the same `group_seed`, and so the same first observation. `seconds` is the time limit
        of each of its calls, if it differs from the pool's.
        """
        self._check_owner()
        if episode in self.episodes:
            raise ValueError(f"episode {episode} has begun already")
        self.episodes[episode] = _Episode(self.limits.seconds if seconds is None else seconds)
        self._call(episode, "begin", (problem, group_seed, seed))

    def reuse_process(self, episode: int, problem: Any, group_seed: int, seed: int, seconds: float) -> bool:
        """Begin another episode in the process of this one, which has ended well; False: the process is gone."""
        state = self.episodes.get(episode)
        if self.owner != os.getpid() or state is None or state.channel is None or state.is_called:
            return False
        if not state.channel.is_silent:
            return False
        state.seconds = seconds
        self._call(episode, "begin", (problem, group_seed, seed))
        return True

    def step(self, episode: int, action: str) -> None:
        self._check_owner()
        if episode not in self.episodes:
            self.replies.append(Reply(episode, None, EPISODE_OVER, 0.0))
        elif self.episodes[episode].is_called:
            raise ValueError(f"episode {episode} has not answered yet")
        else:
            self._call(episode, "step", (action,))

    def end(self, episode: int) -> None:
        """End an episode. Its environment has a second to close itself; then its process is killed."""
        self._check_owner()
        self.active.pop(episode, None)
        state = self.episodes.pop(episode, None)
        if episode in self.queue:
            self.queue.remove(episode)
        self.replies = [reply for reply in self.replies if reply.episode != episode]
        if state is not None and state.channel is not None:
            state.channel.hang_up()

    def wait_for_replies(self, wait: float) -> list[Reply]:
        """Return the replies that have arrived; wait at most `wait` seconds for the first, if a call is open."""
        self._check_owner()
        until = time.monotonic() + wait
        while True:
            self._send_queued()
            deadlines = [waited.deadline for waited in (*self.active.values(), self.server) if waited is not None]
            idle = self.replies or not (self.active or self.queue)
            self._listen(0.0 if idle else min([until, *deadlines]) - time.monotonic())
            self._check_deadlines()
            if self.replies or idle or time.monotonic() >= until:
                break
        self._send_queued()
        replies, self.replies = self.replies, []
        return replies

    def close(self) -> None:
        """End every episode and the fork server. Calls made afterwards start it again."""
        self._check_owner()
        _end_all(self.episodes, self.servers, self.owner)
        self._forget()

    # ---- sending calls

    def _check_owner(self) -> None:
        if self.owner != os.getpid():  # a fork: the processes belong to its parent, and it may start its own
            for state in self.episodes.values():
                if state.channel is not None:
                    state.channel.socket.close()
            self.servers[:], self.owner = [], os.getpid()
            self._forget()

    def _forget(self) -> None:
        for container in (self.episodes, self.queue, self.active):
            container.clear()
        self.replies, self.server, self.deaths = [], None, 0

    def _call(self, episode: int, verb: str, arguments: tuple[Any, ...]) -> None:
        state = self.episodes[episode]
        try:
            state.number, state.line = number_call((verb, arguments))
        except Exception as error:
            return self._fail(episode, f"the problem cannot be sent to a process: {error}"[:MAX_REASON_CHARS])
        self.queue.append(episode)
        self._send_queued()

    def _send_queued(self) -> None:
        """Send the calls at the front of the queue, up to `max_active` at once."""
        for _ in range(len(self.queue)):
            if len(self.active) >= self.max_active:
                return
            episode = self.queue.popleft()
            state = self.episodes[episode]
            if state.channel is None:
                self._fork(episode, state)
                if state.channel is None:  # not yet, or it has failed
                    self.queue.extend([episode] if episode in self.episodes else [])
                    continue
            state.asked, state.is_reading = time.monotonic(), False
            state.deadline = state.asked + (state.seconds if state.has_begun else START_SECONDS)
            state.channel.send(state.line)
            self.active[episode] = state

    def _fork(self, episode: int, state: "_Episode") -> None:
        """Fork a process for this episode, if the fork server is ready."""
        try:
            if self.server is None:
                for server in [server for server in self.servers if server.process.poll() is not None]:
                    self.servers.remove(server)
                    server.end()
                self.server = ForkServer(PROGRAM, self.setup, self.limits)
                self.servers.append(self.server)
            if self.server.is_ready and not self.server.channel.is_full:
                state.channel = self.server.fork()
        except OSError as error:
            self._fail(episode, f"no process can be made for it: {error}")

    # ---- receiving replies

    def _listen(self, seconds: float) -> None:
        """Wait for the first message, and read all that have arrived."""
        server = self.server
        channels = {state.channel: episode for episode, state in self.active.items() if state.channel is not None}
        for channel in poll_channels([*channels, *([server.channel] if server else [])], seconds):
            if channel in channels:
                self._read_episode(channels[channel], channel)
            elif server is not None:
                self._read_server(server)

    def _read_episode(self, episode: int, channel: PolledChannel) -> None:
        state = self.episodes[episode]
        for reply in channel.receive_objects():
            if not state.has_begun and reply.keys() == {"began"} and isinstance(reply["began"], float):
                state.has_begun, state.deadline = True, min(reply["began"], time.monotonic()) + state.seconds
            elif not state.has_begun and reply.keys() == {"error"}:
                return self._fail(episode, str(reply["error"])[:MAX_REASON_CHARS])
            elif reply.pop("number", None) != state.number:
                return self._fail(episode, "its process sent an answer that is not the one to this turn")
            else:
                return self._answer(episode, state, reply)
        if channel.is_too_long:
            self._fail(episode, f"its process sent an answer of more than {channel.max_bytes:,} bytes")
        elif channel.ended and not state.has_begun and not state.is_retried:  # the fork server died before it forked
            del self.active[episode]
            channel.socket.close()
            state.is_retried, state.channel = True, None
            self.queue.append(episode)
        elif channel.ended:
            self._fail(episode, f"its {self.kind} ended its process: {channel.ended}")

    def _answer(self, episode: int, state: "_Episode", reply: dict[str, Any]) -> None:
        self.deaths = 0
        seconds, error, step = reply.get("seconds"), reply.get("error"), _parse_step(reply.get("step"))
        if not isinstance(seconds, float) or not seconds >= 0 or (not isinstance(error, str) and step is None):
            self._fail(episode, f"its process sent what is not a step: {sorted(reply)}"[:MAX_REASON_CHARS])
        elif seconds > state.seconds:
            self._fail(episode, self._late(state))
        elif error is not None:
            self._fail(episode, replace_surrogates(error), seconds)
        else:
            state.line = b""
            del self.active[episode]
            self.replies.append(Reply(episode, step, None, seconds))

    def _read_server(self, server: ForkServer) -> None:
        """Read what the fork server says. One that died is restarted once for the calls that wait."""
        if error := server.receive():
            self._lose_server(f"its {self.kind} cannot be loaded: {error}")
        elif server.channel.ended:
            self.server, self.deaths = None, self.deaths + 1
            if self.deaths > 1:
                self._lose_server(f"the process that makes its {self.kind} ended twice: {server.channel.ended}")

    def _lose_server(self, reason: str) -> None:
        self.server, self.deaths = None, 0
        for episode in [episode for episode in self.queue if self.episodes[episode].channel is None]:
            self._fail(episode, replace_surrogates(reason))

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for episode, state in [(episode, state) for episode, state in self.active.items() if now >= state.deadline]:
            if state.channel is not None and state.channel.unread and not state.is_reading:
                state.is_reading, state.deadline = True, now + READ_SECONDS
            else:
                late = f"no process was made for it within {START_SECONDS:g} s"
                self._fail(episode, self._late(state) if state.has_begun else late)
        if self.server is not None and now >= self.server.deadline:
            self.server.end()
            self.servers.remove(self.server)
            self._lose_server(f"the process that makes its {self.kind} did not start within {START_SECONDS:g} s")

    def _late(self, state: "_Episode") -> str:
        return f"its {self.kind} took longer than {state.seconds:g} s"

    def _fail(self, episode: int, error: str, seconds: float | None = None) -> None:
        """End the episode and its process with this error."""
        elapsed = time.monotonic() - self.episodes[episode].asked if episode in self.active else 0.0
        self.end(episode)
        self.replies.append(Reply(episode, None, error, elapsed if seconds is None else seconds))


def _end_all(episodes: dict[int, "_Episode"], servers: list[ForkServer], owner: int) -> None:
    if os.getpid() != owner:  # a fork: the processes belong to its parent
        return
    while episodes:
        channel = episodes.popitem()[1].channel
        if channel is not None:
            channel.hang_up()
    while servers:
        servers.pop().end()


@dataclass
class _Episode:
    """An episode and its call."""

    seconds: float
    """Time limit of a call."""
    channel: PolledChannel | None = None
    """None: it has no process yet."""
    line: bytes = b""
    """The call that is queued or sent."""
    number: str = ""
    asked: float = 0.0
    deadline: float = math.inf
    has_begun: bool = False
    """Its process has started."""
    is_retried: bool = False
    """A fork server died before it made the process."""
    is_reading: bool = False
    """Its deadline is over, but part of its answer has arrived."""

    @property
    def is_called(self) -> bool:
        return bool(self.line)


def _parse_step(message: Any) -> Step | None:
    """Return the step that a process sent, if it is valid."""
    if not isinstance(message, list) or [type(value) for value in message[1:]] != [float, bool, str]:
        return None
    observation, reward, done, reason = message
    if not math.isfinite(reward) or abs(reward) > MAX_FLOAT32:
        return None
    if isinstance(observation, str):
        return Step(replace_surrogates(observation), reward, done, replace_surrogates(reason))
    if not isinstance(observation, list) or not all(isinstance(message, dict) for message in observation):
        return None
    if not all(isinstance(value, str) for message in observation for value in message.values()):
        return None
    messages = [
        {replace_surrogates(name): replace_surrogates(value) for name, value in message.items()}
        for message in observation
    ]
    return Step(messages, reward, done, replace_surrogates(reason))


class InProcessEpisodePool:
    """The same for trusted environments, in this process: without limits, and every call is answered immediately.

    The reported time is 0, so that the records of a run are reproducible.
    """

    def __init__(self, make: Callable[[], Any]):
        self.make = make
        self.players: dict[int, EpisodePlayer] = {}
        self.replies: list[Reply] = []

    def begin(self, episode: int, problem: Problem, group_seed: int, seed: int) -> None:
        if episode in self.players:
            raise ValueError(f"episode {episode} has begun already")
        self.players[episode] = EpisodePlayer(self.make)
        self._call(episode, "begin", problem, group_seed, seed)

    def step(self, episode: int, action: str) -> None:
        if episode not in self.players:
            self.replies.append(Reply(episode, None, EPISODE_OVER, 0.0))
        else:
            self._call(episode, "step", action)

    def _call(self, episode: int, verb: str, *arguments: Any) -> None:
        step, error_text = None, None
        try:
            step = getattr(self.players[episode], verb)(*arguments)
        except Exception as error:
            error_text = replace_surrogates(describe_error(error))
        if error_text is not None:
            self.end(episode)
        self.replies.append(Reply(episode, step, error_text, 0.0))

    def wait_for_replies(self, wait: float) -> list[Reply]:
        replies, self.replies = self.replies, []
        return replies

    def end(self, episode: int) -> None:
        self.replies = [reply for reply in self.replies if reply.episode != episode]
        player = self.players.pop(episode, None)
        with suppress(Exception):
            if player is not None:
                player.close()

    def close(self) -> None:
        for episode in list(self.players):
            self.end(episode)

"""An episode seen from inside: the environment that plays it, and the process that it plays in.

    keeper of the pool ── warm process ──┬─ keeper ── episode
                                         └─ keeper ── episode …

The warm process imports the environment's file once and forks for each episode. An episode's keeper ends all that the
episode has started (tasks/keeper.py); it outlives the warm process, so that one which dies takes no episode with it.
"""

import gc
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from ascent.processes.reward_calls import REASON, RewardCallError, error_words, read_number
from ascent.processes.supervisor import (
    end_children,
    ending_words,
    fork_child,
    hung_up,
    lifelines,
    reaped,
    receive,
    say,
    wait_for,
)
from ascent.processes.user_code import CODE, load_code
from ascent.tasks.environment import Environment, Step
from ascent.tasks.text.text_task import Message

OBSERVATION = 100_000
"""The most characters of an observation. What is longer is cut, and says so."""
NUMBER = 16
"""Characters of a call's number, which comes before the call itself."""
STEP = "a step is Step(observation, reward, done, reason)"


class Source(NamedTuple):
    """Where an environment's class is, and how an instance is made."""

    source: str
    """python:FILE:NAME or MODULE:NAME: an Environment, or a function that makes one."""
    settings: Mapping[str, Any] = {}
    """Keyword arguments of the instance."""
    sent: bytes | None = None
    """The code itself, where it is an object of the parent's and lies in no file: pickled there, for this process
    alone. It never comes from a run folder."""


# ---- what an environment returns ----------------------------------------------------------------------


def read_step(returned: Any) -> Step:
    """A Step, or a tuple of the same shape; an error that says what it was instead."""
    if not isinstance(returned, tuple) or not 2 <= len(returned) <= 4:
        what = f"tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
        raise RewardCallError(f"step returned a {what}: {STEP}")
    observation, reward, done, reason = Step(*returned)
    if isinstance(done, str) or done not in (True, False):
        raise RewardCallError(f"step returned {done!r:.40} for done: it is True or False")
    if not isinstance(reason, str):
        raise RewardCallError(f"step returned a {type(reason).__name__} for the reason: {STEP}")
    number = read_number(reward, "the reward of a step is one finite number")
    return Step(read_observation(observation), number, bool(done), reason[:REASON])


def read_observation(observation: Any) -> str | list[Message]:
    """Words, or the messages of a chat, cut to what is allowed."""
    if isinstance(observation, str):
        return _cut(observation, OBSERVATION)
    if not isinstance(observation, Sequence) or isinstance(observation, bytes | bytearray):
        raise RewardCallError(
            f"step returned a {type(observation).__name__} as its observation: it is text or a list of messages"
        )
    room, messages = OBSERVATION, list[Message]()
    for message in observation:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RewardCallError(f"step returned the message {message!r:.60}: a message has a role and a content")
        if odd := [name for pair in message.items() for name in pair if not isinstance(name, str)]:
            raise RewardCallError(
                f"step returned a message with {odd[0]!r:.60} in it: its role, its content and the rest are text"
            )
        messages.append({str(name): _cut(value, max(0, room)) for name, value in message.items()})
        room -= sum(map(len, messages[-1].values()))
    return messages


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[:room]} … ({len(text) - room:,} more characters are left out)"


# ---- the environment ----------------------------------------------------------------------------------


def load_environment(source: Source) -> Callable[[], Environment]:
    """What makes an instance for an episode."""
    code, name = load_code(source.source, source.sent), source.source.rpartition(":")[2]
    if not callable(code):
        raise RewardCallError(
            f"{name} is a {type(code).__name__}: it has to be an Environment, or a function that makes one"
        )
    if hasattr(code, "prepare") and not isinstance(code, type):  # once, before any episode
        code.prepare(**source.settings)

    def make() -> Environment:
        made = code(**source.settings)
        if isinstance(made, type) or not all(callable(getattr(made, verb, None)) for verb in ("begin", "step")):
            raise RewardCallError(f"{name} made a {type(made).__name__}: an environment has begin and step")
        return made

    return make


class EpisodePlayer:
    """One episode: its environment and its randomness."""

    def __init__(self, make: Callable[[], Environment]):
        self.make = make
        self.environment: Environment | None = None

    def begin(self, problem: Any, shared: int, own: int) -> Step:
        """What a group shares comes from one seed, everything later from another."""
        rng = random.Random(shared)
        self.environment = self.make()
        observation = self.environment.begin(problem, rng)
        rng.seed(own)
        if not isinstance(observation, str | None):
            raise RewardCallError(f"begin returned a {type(observation).__name__}: it returns text, or None")
        return Step(_cut(observation or "", OBSERVATION))

    def step(self, action: str) -> Step:
        assert self.environment is not None
        return read_step(self.environment.step(action))

    def close(self) -> None:
        if self.environment is not None and hasattr(self.environment, "close"):
            self.environment.close()


# ---- processes ----------------------------------------------------------------------------------------


def keep_warm(control: int, lifeline: int, parent: int, memory: int) -> None:
    """The keeper of the pool: it forks the warm process, and ends when the parent says so or is no more.

    `control` and `lifeline` are the numbers of sockets whose other ends `parent` holds; `memory` is in bytes.
    """
    ends, pipe = lifelines(lifeline, parent), socket.socket(fileno=control)
    warm = fork_child(lambda: serve_episodes(pipe, ends), (), memory)
    status = wait_for(warm, ends)
    if status is not None:
        _say_ending(pipe, status)
        while reaped(warm)[1] and not hung_up(ends, 0.5):  # episodes that are still played
            pass
    end_children(warm)
    os._exit(0)


def serve_episodes(control: socket.socket, ends: Sequence[int]) -> None:
    """The warm process: it imports the environment's file, and forks for every socket that the parent sends."""
    try:
        *source, code = pickle.loads(receive(control))
        CODE.update(code)
        make = load_environment(Source(*source))
        if others := [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]:
            raise RewardCallError(f"its file starts a thread ({others[0]}) when it is imported: start threads in begin")
    except EOFError:
        return
    except BaseException as error:
        return say(control, {"error": error_words(error)})
    gc.collect()
    gc.freeze()  # pages that a collection would write to stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers that end leave no zombies
    say(control, {"ready": True})
    while True:
        byte, files, *_ = socket.recv_fds(control, 1, 1)
        if not byte:
            return
        os.set_inheritable(files[0], False)
        with socket.socket(fileno=files[0]) as episode, suppress(OSError):
            try:
                child = os.fork()
            except OSError as error:
                say(episode, {"error": f"no process can be made for it: {error}"})
                continue
            if child == 0:
                control.close()
                keep_episode(make, episode, ends)


def keep_episode(make: Callable[[], Environment], pipe: socket.socket, ends: Sequence[int]) -> NoReturn:
    """The keeper of an episode: it forks it, ends all that it has started, and says how it ended."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        episode = fork_child(lambda: play(make, pipe), ends)
        status = wait_for(episode, ends, pipe.fileno())
        ended = end_children(episode)
        _say_ending(pipe, status if status is not None else ended)
    finally:
        os._exit(0)


def _say_ending(pipe: socket.socket, status: int | None) -> None:
    """The last line, whatever was half said before; it is lost where nobody has listened for long."""
    pipe.setblocking(False)
    code = None if status is None else os.waitstatus_to_exitcode(status)
    with suppress(OSError):
        pipe.send(b"\n")
        say(pipe, {"ended": ending_words(code)})
    pipe.close()


def play(make: Callable[[], Environment], pipe: socket.socket) -> None:
    """The episode: it answers one call after the other, each with the call's own number."""
    own, player = os.getpid(), EpisodePlayer(make)
    say(pipe, {"began": time.monotonic()})
    while True:
        try:
            call = receive(pipe)
        except EOFError:
            return player.close()
        began = time.monotonic()
        try:
            verb, arguments = pickle.loads(call[NUMBER:])
            if verb == "begin":
                _seed(arguments[1])
            answer: dict[str, Any] = {"step": getattr(player, verb)(*arguments)}
            if verb == "begin":
                _seed(arguments[2])
        except BaseException as error:  # SystemExit and the rest: an environment has no say over this process
            answer = {"error": error_words(error)}
        if os.getpid() != own:  # a child that the environment forked, and that came back from it too
            os._exit(0)
        say(pipe, {"number": call[:NUMBER].decode(), "seconds": time.monotonic() - began, **answer})


def _seed(seed: int) -> None:
    """The global generators, for environments that use them: other numbers than those of the episode's own."""
    random.seed(f"global {seed}")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)

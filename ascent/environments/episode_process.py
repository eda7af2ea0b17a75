"""An episode in its process: the environment that plays it, its seeds and what it returns.

The process is a fork of one that has loaded the environment's file (`ascent.processes.fork_server`).
"""

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ascent.processes.call_loop import answer_calls
from ascent.processes.channel import Channel
from ascent.processes.fork_server import serve_forks
from ascent.processes.reward_calls import MAX_REASON_CHARS, RewardCallError, read_number
from ascent.processes.user_code import CODE, load_code
from ascent.tasks.environment import Environment, Step
from ascent.tasks.text.text_task import Message

MAX_OBSERVATION_CHARS = 100_000
"""Limit of an observation in characters. A longer one is cut, with a note."""
STEP_FORM = "a step is Step(observation, reward, done, reason)"


class Source(NamedTuple):
    """Where the class of an environment is, and the settings of an instance."""

    source: str
    """python:FILE:NAME or MODULE:NAME: an Environment, or a function that makes one."""
    settings: Mapping[str, Any] = {}
    """Keyword arguments of the instance."""
    sent: bytes | None = None
    """The pickled code, if it is an object of the owner without a file. It never comes from a run folder."""


# ---- what an environment returns ----------------------------------------------------------------------


def parse_step(returned: Any) -> Step:
    """Return a Step from a Step or a tuple of the same shape; RewardCallError if it is neither."""
    if not isinstance(returned, tuple) or not 2 <= len(returned) <= 4:
        what = f"tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
        raise RewardCallError(f"step returned a {what}: {STEP_FORM}")
    observation, reward, done, reason = Step(*returned)
    if isinstance(done, str) or done not in (True, False):
        raise RewardCallError(f"step returned {done!r:.40} for done: it is True or False")
    if not isinstance(reason, str):
        raise RewardCallError(f"step returned a {type(reason).__name__} for the reason: {STEP_FORM}")
    number = read_number(reward, "the reward of a step is one finite number")
    return Step(parse_observation(observation), number, bool(done), reason[:MAX_REASON_CHARS])


def parse_observation(observation: Any) -> str | list[Message]:
    """Return text or the messages of a chat, cut to the limit."""
    if isinstance(observation, str):
        return _cut(observation, MAX_OBSERVATION_CHARS)
    if not isinstance(observation, Sequence) or isinstance(observation, bytes | bytearray):
        raise RewardCallError(
            f"step returned a {type(observation).__name__} as its observation: it is text or a list of messages"
        )
    num_left, messages = MAX_OBSERVATION_CHARS, list[Message]()
    for message in observation:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RewardCallError(f"step returned the message {message!r:.60}: a message has a role and a content")
        if odd := [name for pair in message.items() for name in pair if not isinstance(name, str)]:
            raise RewardCallError(
                f"step returned a message with {odd[0]!r:.60} in it: its role, its content and the rest are text"
            )
        messages.append({str(name): _cut(value, max(0, num_left)) for name, value in message.items()})
        num_left -= sum(map(len, messages[-1].values()))
    return messages


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters are left out)"


# ---- the environment ----------------------------------------------------------------------------------


def load_environment(source: Source) -> Callable[[], Environment]:
    """Return a function that makes an instance for each episode."""
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
    """One episode: its environment and its seeds."""

    def __init__(self, make: Callable[[], Environment]):
        self.make = make
        self.environment: Environment | None = None

    def begin(self, problem: Any, group_seed: int, seed: int) -> Step:
        """Begin with the seed that a group shares; everything later uses the seed of the episode."""
        rng = random.Random(group_seed)
        self.environment = self.make()
        observation = self.environment.begin(problem, rng)
        rng.seed(seed)
        if not isinstance(observation, str | None):
            raise RewardCallError(f"begin returned a {type(observation).__name__}: it returns text, or None")
        return Step(_cut(observation or "", MAX_OBSERVATION_CHARS))

    def step(self, action: str) -> Step:
        assert self.environment is not None
        return parse_step(self.environment.step(action))

    def close(self) -> None:
        if self.environment is not None and hasattr(self.environment, "close"):
            self.environment.close()


# ---- processes ----------------------------------------------------------------------------------------


def serve_episodes(channel: Channel, end_files: Sequence[int]) -> None:
    """The fork server: it loads the environment's file and forks for every episode."""
    serve_forks(channel, end_files, _load_player)


def _load_player(setup: Sequence[Any]) -> Callable[[Channel], None]:
    *source, code = setup
    CODE.update(code)
    make = load_environment(Source(*source))
    return lambda channel: play_episodes(make, channel)


def play_episodes(make: Callable[[], Environment], channel: Channel) -> None:
    """Play the episodes of one process: answer their calls until the channel is closed."""
    player = EpisodePlayer(make)

    def call(verb_and_arguments: tuple[str, tuple[Any, ...]]) -> dict[str, Any]:
        verb, arguments = verb_and_arguments
        if verb == "begin":
            _seed(arguments[1])
        step = getattr(player, verb)(*arguments)
        if verb == "begin":
            _seed(arguments[2])
        return {"step": step}

    channel.write({"began": time.monotonic()})
    answer_calls(channel, call)
    player.close()


def _seed(seed: int) -> None:
    """Seed the global generators, for environments that use them: other numbers than those of the episode's own."""
    random.seed(f"global {seed}")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)

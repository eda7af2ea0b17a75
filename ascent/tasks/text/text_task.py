"""What a text task is: problems in words, a grade for a response, and a right response to test the grade with.

A `TextTask` knows nothing of tokens: `TokenizedTask` binds it to an encoder for the loop. Its grading runs in worker
processes, which need no torch; so nothing here, nor in the tasks beside it, imports torch at its head.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from ascent.core.errors import ConfigError
from ascent.sandbox.sandboxed_reward import SandboxSettings, check_isolation
from ascent.tasks.agent_sources import agent_source, verify_agent
from ascent.tasks.base import BaseTask
from ascent.tasks.reward_sources import OWN, RewardSource, absolute_source, parse_rewards, resolve_reward_call
from ascent.tasks.tool_sources import check_game, tool_sources
from ascent.tasks.user_files import absolute_path, is_held_out, load_python

if TYPE_CHECKING:
    from ascent.core.types import Space

Message = dict[str, str]
"""One message of a chat: its role and its content."""
TEXT_PRESET: dict[str, Any] = {
    "policy": "causal-lm",
    "algorithm": "dr-grpo",
    "lr": 1e-5,
    "update.max_norm": 1.0,
    "own-critic.lr": 1e-5,
    "own-critic.max_norm": 1.0,
    "own-critic.warmup": 0.05,
    "steps": 100,
    "prompts": 8,
    "samples": 8,
    "epochs": 1,
    "micro_batch": 0,
    "seed": 0,
    "eval_every": 25,
    "eval_prompts": 100,
    "checkpoint_every": 25,
    "keep_best": True,
    "record_every": 5,
}
_TRIES = 200
"""Problems in a row that may be on the wrong side of the held-out rule before a generated task gives up."""
_HELD_OUT_ONE_IN = 4
"""A large share: to find the test set, four times as many problems have to be made; training never runs out."""
TEXTARENA = "textarena:"
"""How --environment names a game of textarena (environments/games.py)."""
INDICES = 2**31
"""Indices are taken modulo this: several generators take no larger seed."""


@dataclass(frozen=True)
class Problem:
    """One prompt, what it should lead to, and whatever else is known of it."""

    prompt: str | list[Message]
    """Words, or the messages of a chat."""
    answer: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    """Passed to a reward function of your own by name."""
    max_tokens: int | None = None
    """The most tokens of a response to it, where that is less than the task's --max-tokens."""


class Graded(NamedTuple):
    """What a task says of one response."""

    value: float
    strict: bool
    """Right, and in the form that was asked for."""
    lenient: bool
    """Right, in whatever form. What is strictly right is leniently right too."""
    reason: str = ""


@dataclass(frozen=True)
class TextTask(BaseTask):
    """Prompts and graded responses in words. Derive from it: `train`, `test`, `grade`, and `gold` if you can."""

    reward: tuple[str, ...] = ()
    """A list of own, python:FILE:FUNCTION, sandbox:FILE:FUNCTION, judge:FILE, model:RUN, process:RUN; weights as in
    0.2*own. Empty: own. In Python, functions too: [own, (0.2, function)]."""
    lenient: float = 0.5
    """What a right answer in the wrong form earns; in the right form it earns 1."""
    system: str | None = None
    """A system message before every prompt."""
    instruction: str = ""
    """Text below every prompt that says how to give the answer."""
    max_tokens: int = 256
    """The most tokens that a response may have."""
    min_tokens: int = 0
    """The fewest tokens of a response: before them no end token is drawn, and no stop string ends it."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, each as a word of its own: at the token that completes one."""
    max_prompt: int = 1024
    """Prompts with more tokens are left out, and counted."""
    reward_seconds: float = 10.0
    """Wall-clock limit of one call. A reward that takes longer is stopped and counts as failed."""
    reward_workers: int = 2
    """Processes that compute rewards; 0: one per core, at most 16."""
    reward_memory: float = 4.0
    """GiB of memory that a process which computes rewards may use; 0: no limit."""
    reward_env: tuple[str, ...] = ()
    """Names of environment variables that such a process sees beside PATH and the like."""
    reward_batch: int = 16
    """Responses that a reward model rates at once. Memory only."""
    reward_device: str = "auto"
    """Where reward models run: cpu, cuda, cuda:1, …; auto: a GPU if there is one."""
    sandbox: Literal["auto", "bubblewrap", "landlock", "none"] = "auto"
    """Walls around code that is not trusted: auto (the best there are, else refused) | bubblewrap | landlock | none."""
    sandbox_read: tuple[str, ...] = ()
    """Files and folders that code in the sandbox can read, beside Python."""
    sandbox_packages: tuple[str, ...] = ()
    """Installed packages that code in the sandbox can import, beside numpy, scipy, pandas, sympy and networkx."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call in its turns: a list of calculator, python (in a sandbox),
    python:FILE:FUNCTION,FUNCTION."""
    environment: str = ""
    """python:FILE:CLASS or textarena:NAME: what answers the policy's turns. Its rewards are added to --reward."""
    agent: str = ""
    """python:FILE:NAME, command:WORDS, verifiers:NAME or openenv:URL: a program that talks to the policy over the run's
    own endpoint, in a session per response. What it returns is the reward; or --reward scores its last turn."""
    agent_seconds: float = 600.0
    """Wall-clock limit of one episode of an agent. One that takes longer has failed."""
    max_turns: int = 8
    """The most turns of a response, with tools, an environment or an agent."""
    turn_tokens: int = 0
    """The most tokens of a turn; 0: as many as --max-tokens leaves."""
    turn_seconds: float = 10.0
    """Wall-clock limit of one answer of a tool or an environment. One that takes longer has failed."""
    turn_workers: int = 256
    """The most answers of tools or environments that are computed at once, each in the process of its episode."""
    max_context: int = 0
    """The most tokens of a conversation, its prompt and observations counted; 0: --max-prompt and twice --max-tokens.
    --max-tokens counts what the policy draws."""

    kind = "text"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"default": TEXT_PRESET}
    # Settings that name a file or a folder. They become whole paths, so that a run can be resumed from any folder.
    paths: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", tuple(absolute_source(entry) for entry in self.reward))
        for name in self.paths:
            if (value := getattr(self, name)) and not value.startswith("object:"):
                object.__setattr__(self, name, absolute_path(value))
        for name, least in {"max_tokens": 1, "max_prompt": 1, "reward_workers": 0, "reward_batch": 1}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}: it has to be at least {least}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(
                f"--min-tokens {self.min_tokens} with --max-tokens {self.max_tokens}: it has to be from 0 to that"
            )
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for string in self.stop:
            if not isinstance(string, str) or not string or "\N{REPLACEMENT CHARACTER}" in string:
                raise ConfigError(f"--stop {string!r}: a stop string is text of one character or more, without U+FFFD")
        object.__setattr__(self, "sandbox_read", tuple(map(absolute_path, self.sandbox_read)))
        self._check_turns()
        if not self.reward_seconds > 0:
            raise ConfigError(f"--reward-seconds is {self.reward_seconds:g}: it has to be above 0")
        if not self.reward_memory >= 0:
            raise ConfigError(f"--reward-memory is {self.reward_memory:g}: it has to be 0 (no limit) or more")
        odd = [name for name in self.reward_env if not name.isidentifier()]
        if odd:
            raise ConfigError(f"--reward-env {odd[0]}: name environment variables, without their values")
        if not 0 <= self.lenient <= 1:
            raise ConfigError(f"--lenient is {self.lenient:g}: a right answer in the wrong form earns from 0 to 1")

    def _check_turns(self) -> None:
        object.__setattr__(self, "tools", tool_sources(self.tools) if self.tools else ())
        if self.environment.startswith("python:"):
            object.__setattr__(self, "environment", absolute_source(self.environment))
        elif self.environment and not self.environment.startswith(("object:", TEXTARENA)):
            raise ConfigError(
                f"--environment {self.environment}: name a class of a file of yours, python:FILE:CLASS, or a game, "
                f"{TEXTARENA}NAME"
            )
        if self.tools and self.environment:
            raise ConfigError(
                "--tools with --environment: one of them answers a turn. An environment can call functions itself"
            )
        object.__setattr__(self, "agent", agent_source(self.agent) if self.agent else "")
        if self.agent and (self.tools or self.environment):
            raise ConfigError("--agent with --tools or --environment: an agent brings its own. Leave them out")
        if not self.agent_seconds > 0:
            raise ConfigError(f"--agent-seconds is {self.agent_seconds:g}: an episode takes some time")
        if min(self.max_turns, self.turn_workers) < 1 or self.turn_tokens < 0 or not self.turn_seconds > 0:
            raise ConfigError(
                f"--max-turns {self.max_turns} --turn-tokens {self.turn_tokens} --turn-seconds {self.turn_seconds:g} "
                f"--turn-workers {self.turn_workers}: there is one turn or more, 0 or more tokens of it, and some time "
                "and one process or more to answer it"
            )
        if self.max_context and self.max_context <= self.max_prompt:
            raise ConfigError(
                f"--max-context {self.max_context} with --max-prompt {self.max_prompt}: it counts the prompt too, so "
                "set it higher"
            )

    @property
    def has_environment(self) -> bool:
        """Does anything answer the turns of a response?"""
        return bool(self.tools or self.environment or self.agent)

    @property
    def sandbox_settings(self) -> SandboxSettings:
        """The sandbox of rewards."""
        return SandboxSettings(
            self.sandbox, self.reward_seconds, self.reward_memory, self.sandbox_read, self.sandbox_packages
        )

    @property
    def tool_sandbox(self) -> SandboxSettings:
        """The sandbox of the tool `python`."""
        return self.sandbox_settings._replace(seconds=self.turn_seconds)

    @property
    def uses_sandbox(self) -> bool:
        """Does any code of it run in a sandbox?"""
        return "python" in self.tools or any(entry.kind == "sandbox" for entry in self.rewards)

    @property
    def max_response_tokens(self) -> int:
        """The most tokens behind a prompt: those that are drawn, and in a conversation those that are observed."""
        if not self.has_environment:
            return self.max_tokens
        return self.max_context - self.max_prompt if self.max_context else 2 * self.max_tokens

    # ---- what a task of your own defines

    @property
    def size(self) -> int | None:
        """How many problems there are to train on; None: endless, generated from their index."""
        raise NotImplementedError

    def train(self, index: int) -> Problem:
        """The problem of this index, the same every time."""
        raise NotImplementedError

    def test(self, count: int) -> list[Problem]:
        """The first `count` problems, or fewer, of those that `train` never gives. They are the same every time."""
        raise NotImplementedError

    def grade(self, problem: Problem, response: str) -> Graded:
        """The task's own check. It runs in a worker process, which has the fields of the task and nothing else."""
        raise NotImplementedError

    def gold(self, problem: Problem) -> str | None:
        """A right response in the right form; None where none is known."""
        return problem.answer

    def wrong_responses(self, problem: Problem, other: str | None) -> list[str]:
        """Responses that must not pass: nothing, another last number, a right response to another problem."""
        gold = self.gold(problem) or ""
        return [made for made in ("", _larger(gold), other) if made is not None and made != gold]

    def verify(self) -> None:
        if self.uses_sandbox:
            check_isolation(self.sandbox_settings)
        for entry in self.rewards:
            entry.verify()
            if entry.kind == "sandbox":
                resolve_reward_call(entry.source, sandbox=self.sandbox_settings)
        for flag, source in [("--environment", self.environment), *(("--tools", tool) for tool in self.tools)]:
            if source.startswith("python:") and not callable(load_python(flag, source)):
                raise ConfigError(
                    f"{flag} {source}: it cannot be called; a tool is a function, and an environment a class"
                )
        if self.agent:
            verify_agent(self.agent)
        if self.environment.startswith(TEXTARENA):
            check_game(self.environment.removeprefix(TEXTARENA))

    def prepare(self) -> None:
        """Import what `grade` needs. A worker process does it before its first call, outside the time limit."""

    @property
    def rewards(self) -> tuple[RewardSource, ...]:
        return parse_rewards(self.reward)

    @property
    def max_reward(self) -> float | None:
        """The largest reward there is; unknown with rewards other than `own`, and with those of an environment."""
        if self.environment or self.agent or any(entry.kind != OWN for entry in self.rewards):
            return None
        return sum(max(entry.weight, 0.0) for entry in self.rewards)

    @property
    def space(self) -> Space:
        """Shapes as far as words go: the vocabulary and the end token are the encoder's, and 0 here."""
        from ascent.core.types import Space

        return Space(self.max_prompt, 0, self.max_response_tokens, end=0)

    def messages(self, problem: Problem) -> list[Message]:
        """The chat that the policy reads."""
        prompt = problem.prompt
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if self.instruction:
            chat[-1]["content"] = f"{chat[-1]['content']}\n{self.instruction}"
        return [{"role": "system", "content": self.system}, *chat] if self.system is not None else chat

    def token_limit(self, problem: Problem) -> int:
        """The most tokens of a response to this problem that are drawn."""
        own = self.max_tokens if problem.max_tokens is None else min(problem.max_tokens, self.max_tokens)
        if own < max(self.min_tokens, 1):
            raise ConfigError(
                f"a problem has max_tokens {own}: it has to be at least {max(self.min_tokens, 1)} (--min-tokens)"
            )
        return own

    def graded(self, strict: bool, lenient: bool, reason: str = "") -> Graded:
        """The grade of a response that is right or not, in the right form or not."""
        return Graded(1.0 if strict else self.lenient * lenient, strict, strict or lenient, reason)


def _larger(text: str) -> str | None:
    """The text with its last number one larger, or a tenth where it has decimals: some checks allow a tolerance."""
    numbers = list(re.finditer(r"([0-9]{1,1000})(\.[0-9]+)?", text))
    if not numbers:
        return None
    last = numbers[-1]
    whole = int(last[1])
    return text[: last.start()] + str(whole + (max(1, whole // 10) if last[2] else 1)) + text[last.end(1) :]


@dataclass(frozen=True)
class Generated(TextTask):
    """Endless problems, one in four held out by its hash. A task derives from it and makes the problem of an index."""

    def make(self, index: int) -> Problem:
        """The problem of an index from 0 to 2³¹ − 1, the same every time."""
        raise NotImplementedError

    @property
    def size(self) -> int | None:
        return None

    def train(self, index: int) -> Problem:
        """The first problem from this index on that is not held out."""
        for step in range(_TRIES):
            problem = self.make((index + step * 1_000_003) % INDICES)
            if not is_held_out(problem.prompt, _HELD_OUT_ONE_IN):
                return problem
        raise ConfigError("the task makes so few different prompts that all are held out; give it other options")

    def test(self, count: int) -> list[Problem]:
        """The first `count` different held-out problems, or as many as are found in a reasonable time."""
        problems: dict[str, Problem] = {}
        barren = 0
        for index in range(INDICES):
            problem = self.make(index)
            new = is_held_out(problem.prompt, _HELD_OUT_ONE_IN) and str(problem.prompt) not in problems
            if new:
                problems[str(problem.prompt)] = problem
            barren = 0 if new else barren + 1
            if len(problems) == count or barren == _TRIES:
                break
        return list(problems.values())

    def verify(self) -> None:
        super().verify()
        self.train(0)
        if not self.test(1):
            raise ConfigError("the task makes so few different prompts that none is held out; give it other options")

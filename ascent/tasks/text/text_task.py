"""Base classes of text tasks: problems, the grading of responses, and gold responses that test the grading.

A `TextTask` is independent of a tokenizer; `TokenizedTask` binds it to one for the training loop. Grading runs in
reward workers without torch, so no module of text tasks imports torch at its top level.
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
_MAX_TRIES = 200
"""Consecutive problems on the wrong side of the held-out split after which a generated task gives up."""
_HELD_OUT_ONE_IN = 4
"""Large, because finding the test set generates this many times its size; training problems never run out."""
TEXTARENA = "textarena:"
"""Prefix of textarena games in --environment (environments/games.py)."""
INDICES = 2**31
"""Indices are taken modulo this, because several generators accept no larger seed."""


@dataclass(frozen=True)
class Problem:
    """A prompt with its reference answer and other columns."""

    prompt: str | list[Message]
    """Text, or the messages of a chat."""
    answer: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    """Passed by name to user-defined reward functions."""
    max_tokens: int | None = None
    """Limit on the response's tokens, if it is below the task's --max-tokens."""


class Graded(NamedTuple):
    """A task's grade of one response."""

    value: float
    strict: bool
    """Correct and in the required form."""
    lenient: bool
    """Correct in any form. A strictly correct response is also leniently correct."""
    reason: str = ""


@dataclass(frozen=True)
class TextTask(BaseTask):
    """A task with text prompts and responses. Subclasses define `train`, `test`, `grade`, and `gold` if possible."""

    reward: tuple[str, ...] = ()
    """A list of own, python:FILE:FUNCTION, sandbox:FILE:FUNCTION, judge:FILE, model:RUN, process:RUN; weights as in
    0.2*own. Empty: own. In Python, functions too: [own, (0.2, function)]."""
    lenient: float = 0.5
    """Reward of a correct answer in the wrong form; in the right form it earns 1."""
    system: str | None = None
    """A system message before every prompt."""
    instruction: str = ""
    """Text appended to every prompt that says how to give the answer."""
    max_tokens: int = 256
    """Maximum number of tokens per response."""
    min_tokens: int = 0
    """Minimum number of tokens per response; before, end tokens are masked and stop strings are ignored."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, each as a separate argument. The response ends with the token that completes one."""
    max_prompt: int = 1024
    """Maximum number of tokens per prompt. Longer prompts are left out, and counted."""
    reward_seconds: float = 10.0
    """Wall-clock limit in seconds of one reward call. A call that takes longer is stopped and counts as failed."""
    reward_workers: int = 2
    """Number of reward worker processes; 0: one per core, at most 16."""
    reward_memory: float = 4.0
    """Memory limit of a reward worker in GiB; 0: no limit."""
    reward_env: tuple[str, ...] = ()
    """Names of environment variables to pass to reward workers, besides PATH and similar ones."""
    reward_batch: int = 16
    """Batch size of reward models. It only affects memory."""
    reward_device: str = "auto"
    """Device of reward models: cpu, cuda, cuda:1, …; auto: a GPU if there is one."""
    sandbox: Literal["auto", "bubblewrap", "landlock", "none"] = "auto"
    """Isolation of untrusted code: auto (the strongest available, or an error) | bubblewrap | landlock | none."""
    sandbox_read: tuple[str, ...] = ()
    """Files and folders that code in the sandbox can read, besides Python."""
    sandbox_packages: tuple[str, ...] = ()
    """Installed packages that code in the sandbox can import, besides numpy, scipy, pandas, sympy and networkx."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call in its turns: a list of calculator, python (in a sandbox),
    python:FILE:FUNCTION,FUNCTION."""
    environment: str = ""
    """python:FILE:CLASS or textarena:NAME: the environment that answers the policy's turns. Its rewards are added to
    --reward."""
    agent: str = ""
    """python:FILE:NAME, command:WORDS, verifiers:NAME or openenv:URL: a program that calls the policy through the run's
    endpoint, in one session per response. It returns the reward; or --reward scores its last turn."""
    agent_seconds: float = 600.0
    """Wall-clock limit in seconds of one episode of an agent. An episode that takes longer counts as failed."""
    max_turns: int = 8
    """Maximum number of turns per response, with tools, an environment or an agent."""
    turn_tokens: int = 0
    """Maximum number of tokens per turn; 0: limited only by --max-tokens."""
    turn_seconds: float = 10.0
    """Wall-clock limit in seconds of one tool call or environment step. One that takes longer counts as failed."""
    turn_workers: int = 256
    """Maximum number of concurrent tool calls and environment steps; each runs in the process of its episode."""
    max_context: int = 0
    """Maximum number of tokens of a conversation, including prompt and observations; 0: --max-prompt plus twice
    --max-tokens. --max-tokens counts only sampled tokens."""

    kind = "text"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"default": TEXT_PRESET}
    # Settings that name a file or a folder. They become absolute paths, so that a run can be resumed from any folder.
    paths: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", tuple(absolute_source(entry) for entry in self.reward))
        for name in self.paths:
            if (value := getattr(self, name)) and not value.startswith("object:"):
                object.__setattr__(self, name, absolute_path(value))
        for name, minimum in {"max_tokens": 1, "max_prompt": 1, "reward_workers": 0, "reward_batch": 1}.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be at least {minimum}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(
                f"--min-tokens {self.min_tokens} --max-tokens {self.max_tokens}: it must be from 0 to --max-tokens"
            )
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for string in self.stop:
            if not isinstance(string, str) or not string or "\N{REPLACEMENT CHARACTER}" in string:
                raise ConfigError(f"--stop {string!r}: a stop string must have at least one character, and no U+FFFD")
        object.__setattr__(self, "sandbox_read", tuple(map(absolute_path, self.sandbox_read)))
        self._check_turns()
        if not self.reward_seconds > 0:
            raise ConfigError(f"--reward-seconds is {self.reward_seconds:g}: it must be above 0")
        if not self.reward_memory >= 0:
            raise ConfigError(f"--reward-memory is {self.reward_memory:g}: it must be 0 (no limit) or more")
        invalid = [name for name in self.reward_env if not name.isidentifier()]
        if invalid:
            raise ConfigError(f"--reward-env {invalid[0]}: expected names of environment variables, without values")
        if not 0 <= self.lenient <= 1:
            raise ConfigError(
                f"--lenient is {self.lenient:g}: the reward of a correct answer in the wrong form must be from 0 to 1"
            )

    def _check_turns(self) -> None:
        object.__setattr__(self, "tools", tool_sources(self.tools) if self.tools else ())
        if self.environment.startswith("python:"):
            object.__setattr__(self, "environment", absolute_source(self.environment))
        elif self.environment and not self.environment.startswith(("object:", TEXTARENA)):
            raise ConfigError(
                f"--environment {self.environment}: expected a class, python:FILE:CLASS, or a game, {TEXTARENA}NAME"
            )
        if self.tools and self.environment:
            raise ConfigError(
                "--tools with --environment: only one of them can answer a turn. An environment can call functions"
            )
        object.__setattr__(self, "agent", agent_source(self.agent) if self.agent else "")
        if self.agent and (self.tools or self.environment):
            raise ConfigError(
                "--agent with --tools or --environment: an agent has its own tools and environment. Leave them out"
            )
        if not self.agent_seconds > 0:
            raise ConfigError(f"--agent-seconds is {self.agent_seconds:g}: it must be above 0")
        if min(self.max_turns, self.turn_workers) < 1 or self.turn_tokens < 0 or not self.turn_seconds > 0:
            raise ConfigError(
                f"--max-turns {self.max_turns} --turn-tokens {self.turn_tokens} --turn-seconds {self.turn_seconds:g} "
                f"--turn-workers {self.turn_workers}: --max-turns and --turn-workers must be at least 1, --turn-tokens "
                "at least 0, and --turn-seconds above 0"
            )
        if self.max_context and self.max_context <= self.max_prompt:
            raise ConfigError(
                f"--max-context {self.max_context} with --max-prompt {self.max_prompt}: it includes the prompt, so it "
                "must be larger"
            )

    @property
    def has_environment(self) -> bool:
        """Whether tools, an environment or an agent answer the turns of a response."""
        return bool(self.tools or self.environment or self.agent)

    @property
    def sandbox_settings(self) -> SandboxSettings:
        """Sandbox settings of rewards."""
        return SandboxSettings(
            self.sandbox, self.reward_seconds, self.reward_memory, self.sandbox_read, self.sandbox_packages
        )

    @property
    def tool_sandbox(self) -> SandboxSettings:
        """Sandbox settings of the tool `python`."""
        return self.sandbox_settings._replace(seconds=self.turn_seconds)

    @property
    def uses_sandbox(self) -> bool:
        """Whether the task runs code in a sandbox."""
        return "python" in self.tools or any(entry.kind == "sandbox" for entry in self.rewards)

    @property
    def max_response_tokens(self) -> int:
        """Maximum number of tokens after a prompt: sampled tokens and, in a conversation, observations."""
        if not self.has_environment:
            return self.max_tokens
        return self.max_context - self.max_prompt if self.max_context else 2 * self.max_tokens

    # ---- what subclasses define

    @property
    def size(self) -> int | None:
        """Number of training problems; None: unlimited, generated from their index."""
        raise NotImplementedError

    def train(self, index: int) -> Problem:
        """Return the training problem with this index, the same every time."""
        raise NotImplementedError

    def test(self, count: int) -> list[Problem]:
        """Return up to `count` held-out problems, which `train` never returns; the same ones every time."""
        raise NotImplementedError

    def grade(self, problem: Problem, response: str) -> Graded:
        """Grade a response. It runs in a reward worker, which has only the fields of the task."""
        raise NotImplementedError

    def gold(self, problem: Problem) -> str | None:
        """Return a correct response in the required form; None if none is known."""
        return problem.answer

    def wrong_responses(self, problem: Problem, other: str | None) -> list[str]:
        """Return responses that must not pass: empty, another last number, the gold response to another problem."""
        gold = self.gold(problem) or ""
        return [response for response in ("", _increment_last_number(gold), other) if response not in (None, gold)]

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
                    f"{flag} {source}: it is not callable; a tool must be a function, and an environment a class"
                )
        if self.agent:
            verify_agent(self.agent)
        if self.environment.startswith(TEXTARENA):
            check_game(self.environment.removeprefix(TEXTARENA))

    def prepare(self) -> None:
        """Import what `grade` needs. A reward worker calls this before its first call, outside the time limit."""

    @property
    def rewards(self) -> tuple[RewardSource, ...]:
        return parse_rewards(self.reward)

    @property
    def max_reward(self) -> float | None:
        """Maximum reward; None (unknown) with rewards other than `own` or of an environment."""
        if self.environment or self.agent or any(entry.kind != OWN for entry in self.rewards):
            return None
        return sum(max(entry.weight, 0.0) for entry in self.rewards)

    @property
    def space(self) -> Space:
        """Shapes; the vocabulary and the end token depend on the tokenizer, and are 0 here."""
        from ascent.core.types import Space

        return Space(self.max_prompt, 0, self.max_response_tokens, end=0)

    def messages(self, problem: Problem) -> list[Message]:
        """Return the chat messages that the policy reads."""
        prompt = problem.prompt
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if self.instruction:
            chat[-1]["content"] = f"{chat[-1]['content']}\n{self.instruction}"
        return [{"role": "system", "content": self.system}, *chat] if self.system is not None else chat

    def token_limit(self, problem: Problem) -> int:
        """Return the maximum number of sampled tokens of a response to this problem."""
        limit = self.max_tokens if problem.max_tokens is None else min(problem.max_tokens, self.max_tokens)
        if limit < max(self.min_tokens, 1):
            raise ConfigError(
                f"a problem has max_tokens {limit}: it must be at least {max(self.min_tokens, 1)} (--min-tokens)"
            )
        return limit

    def graded(self, strict: bool, lenient: bool, reason: str = "") -> Graded:
        """Return the grade of a response that is strictly correct, leniently correct, or wrong."""
        return Graded(1.0 if strict else self.lenient * lenient, strict, strict or lenient, reason)


def _increment_last_number(text: str) -> str | None:
    """Increase the last number of a text by 1, or by a tenth if it has decimals, as some checks have a tolerance."""
    numbers = list(re.finditer(r"([0-9]{1,1000})(\.[0-9]+)?", text))
    if not numbers:
        return None
    last = numbers[-1]
    whole = int(last[1])
    return text[: last.start()] + str(whole + (max(1, whole // 10) if last[2] else 1)) + text[last.end(1) :]


@dataclass(frozen=True)
class Generated(TextTask):
    """An unlimited task: subclasses generate the problem of an index. One in four is held out by its hash."""

    def make(self, index: int) -> Problem:
        """Generate the problem of an index from 0 to 2³¹ − 1, the same every time."""
        raise NotImplementedError

    @property
    def size(self) -> int | None:
        return None

    def train(self, index: int) -> Problem:
        """Return the first problem at or after this index that is not held out."""
        for step in range(_MAX_TRIES):
            problem = self.make((index + step * 1_000_003) % INDICES)
            if not is_held_out(problem.prompt, _HELD_OUT_ONE_IN):
                return problem
        raise ConfigError("the task generates so few different prompts that all are held out; change its options")

    def test(self, count: int) -> list[Problem]:
        """Return the first `count` different held-out problems; fewer if they are too rare."""
        problems: dict[str, Problem] = {}
        num_rejected = 0
        for index in range(INDICES):
            problem = self.make(index)
            is_new = is_held_out(problem.prompt, _HELD_OUT_ONE_IN) and str(problem.prompt) not in problems
            if is_new:
                problems[str(problem.prompt)] = problem
            num_rejected = 0 if is_new else num_rejected + 1
            if len(problems) == count or num_rejected == _MAX_TRIES:
                break
        return list(problems.values())

    def verify(self) -> None:
        super().verify()
        self.train(0)
        if not self.test(1):
            raise ConfigError("the task generates so few different prompts that none is held out; change its options")

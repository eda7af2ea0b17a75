"""What a language world is: problems in words, a grade for a response, and a right response to test the grade with.

A `Text` task knows nothing of tokens: `Tokenized` binds it to an encoder for the loop. Its grading runs in
worker processes, which need no torch; so nothing here, nor in the tasks beside it, imports torch at its head.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from ascent.tasks.text import rewards

if TYPE_CHECKING:
    from ascent.tasks.text.selftest import SelfTest
    from ascent.types import Space

Message = dict[str, str]

DEFAULT: dict[str, Any] = {
    "policy": "causal-lm",
    "algorithm": "dr-grpo",
    "lr": 1e-5,
    "update.max_norm": 1.0,
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


@dataclass(frozen=True)
class Problem:
    """One prompt, what it should lead to, and whatever else is known of it."""

    prompt: str | list[Message]
    """Words, or the messages of a chat."""
    answer: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    """Handed to a reward of one's own by name."""


class Graded(NamedTuple):
    """What a task says of one response."""

    value: float
    strict: bool
    """Right, and in the form that was asked for."""
    lenient: bool
    """Right, in whatever form. What is strictly right is leniently right too."""
    reason: str = ""


def refuse(message: str, given: str = "", known: Any = ()) -> NoReturn:
    """Bad input, with the nearest known name where there is one. torch comes with `types`: so only on use."""
    from ascent.menu import nearest
    from ascent.types import Refused

    raise Refused(message + nearest(given, known))


def held_out(prompt: str | list[Message], one_in: int) -> bool:
    """A fixed rule on the prompt itself, so that no list has to be kept: one hash in so many."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()) % one_in == 0


@dataclass(frozen=True)
class Text:
    """Prompts and graded responses in words. Derive from it: `train`, `test`, `grade`, and `gold` if you can."""

    reward: tuple[str, ...] = ()
    """own (the task's check), python:FILE:FUNCTION, judge:FILE (a model that is asked), model:RUN (a reward model) and process:RUN (one of steps), each with a weight if wanted: own 0.2*python:f.py:brief. A function is called f(prompt, response, answer, **columns) and returns a number or (number, reason). Empty: own."""  # noqa: E501
    lenient: float = 0.5
    """What a right answer in the wrong form earns; in the right form it earns 1."""
    system: str | None = None
    """A system message before every prompt."""
    instruction: str = ""
    """Stands below every prompt: how the answer has to be given."""
    max_tokens: int = 256
    """The most tokens that a response may have."""
    max_prompt: int = 1024
    """Prompts with more tokens are left out, and counted."""
    reward_seconds: float = 10.0
    """Wall-clock limit of one reward; what takes longer is ended, and counted as failed."""
    reward_workers: int = 2
    """Processes that compute rewards."""
    reward_batch: int = 16
    """Responses that a reward model rates at once. Memory only."""
    reward_device: str = "auto"
    """Where reward models run: cpu, cuda, cuda:1, …; auto: a GPU if there is one."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"default": DEFAULT}

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", tuple(rewards.absolute(entry) for entry in self.reward))
        for name in ("max_tokens", "max_prompt", "reward_workers", "reward_batch"):
            if getattr(self, name) < 1:
                refuse(f"--{name.replace('_', '-')} is {getattr(self, name)}: it has to be at least 1")
        if not self.reward_seconds > 0:
            refuse(f"--reward-seconds is {self.reward_seconds:g}: it has to be above 0")
        if not 0 <= self.lenient <= 1:
            refuse(f"--lenient is {self.lenient:g}: a right answer in the wrong form earns from 0 to 1")

    # ---- what a task of one's own writes

    @property
    def size(self) -> int | None:
        """How many problems there are to train on; None: endless, generated from their index."""
        raise NotImplementedError

    def train(self, index: int) -> Problem:
        """The problem of this index, the same every time."""
        raise NotImplementedError

    def test(self, count: int) -> list[Problem]:
        """At most so many problems that `train` never gives, the same every time."""
        raise NotImplementedError

    def grade(self, problem: Problem, response: str) -> Graded:
        """The task's own check. It runs in a worker process, on the fields of the task and nothing else of it."""
        raise NotImplementedError

    def gold(self, problem: Problem) -> str | None:
        """A right response in the right form, where one is known."""
        return problem.answer

    def wrong(self, problem: Problem, other: str | None) -> list[str]:
        """Responses that must not pass: nothing, another last number, a right response to another problem."""
        gold = self.gold(problem) or ""
        return [made for made in ("", _larger(gold), other) if made is not None and made != gold]

    def verify(self) -> None:
        """Refuse, before any work, what cannot be trained on: files, columns, names, reward functions."""
        for entry in self.rewards:
            entry.load()

    def prepare(self) -> None:
        """Import what `grade` needs. A worker process does it before its first call, outside the time limit."""

    def report(self) -> list[str]:
        """What was left out of the data, in words."""
        return []

    # ---- what every task has

    @property
    def rewards(self) -> tuple[rewards.Reward, ...]:
        return rewards.parse(self.reward)

    @property
    def max_reward(self) -> float | None:
        """The largest reward there is; unknown with rewards of one's own."""
        if any(not entry.own for entry in self.rewards):
            return None
        return sum(max(entry.weight, 0.0) for entry in self.rewards)

    @property
    def loophole(self) -> str | None:
        return None

    @property
    def space(self) -> Space:
        """Shapes as far as words go: the vocabulary and the end token are the encoder's, and 0 here."""
        from ascent.types import Space

        return Space(self.max_prompt, 0, self.max_tokens, end=0)

    def messages(self, problem: Problem) -> list[Message]:
        """The chat that the policy is shown."""
        prompt = problem.prompt
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if self.instruction:
            chat[-1]["content"] = f"{chat[-1]['content']}\n{self.instruction}"
        return [{"role": "system", "content": self.system}, *chat] if self.system is not None else chat

    def graded(self, strict: bool, lenient: bool, reason: str = "") -> Graded:
        """The grade of a response that is right or not, in the right form or not."""
        return Graded(1.0 if strict else self.lenient * lenient, strict, strict or lenient, reason)

    def self_test(self, count: int = 16) -> SelfTest:
        """The rewards on right and on corrupted responses, in worker processes as in training."""
        from ascent.tasks.text.selftest import self_test

        return self_test(self, count)


def settings_of(task: Text) -> dict[str, Any]:
    """The fields of a task and nothing else of it: all that a worker process is given."""
    return {f.name: getattr(task, f.name) for f in fields(task)}


def _larger(text: str) -> str | None:
    """The text with its last number one larger, or a tenth where it has decimals: some checks allow a tolerance."""
    found = list(re.finditer(r"([0-9]{1,1000})(\.[0-9]+)?", text))
    if not found:
        return None
    whole = int(found[-1][1])
    return (
        text[: found[-1].start()] + str(whole + (max(1, whole // 10) if found[-1][2] else 1)) + text[found[-1].end(1) :]
    )

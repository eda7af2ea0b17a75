"""Sort n numbers out of V, generated, with held-out prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ascent.tasks import examples, sorting
from ascent.types import Refused, Rollouts, Scores, Space

Prompts = Int[Tensor, "prompt position"]

ONE_IN = 5
"""One prompt in so many is held out."""
ENUMERABLE = 200_000


@dataclass(frozen=True)
class Sort:
    """Sort `length` numbers out of 0 … numbers−1; one prompt in five is held out."""

    reward: str = "positions"
    """exact | positions | process | inclusion-ordering | python:FILE:NAME | model:RUN | [positions+0.5*]process:RUN"""
    length: int = 5
    """How many numbers a prompt has."""
    numbers: int = 10
    """How many different numbers there are."""
    distinct: bool = False
    """Draw without repeats."""
    end: bool = False
    """The response must close with an end token, so that lengths differ."""
    demonstrations: str = ""
    """For sft: a JSONL file with prompt and response. Empty: the sorted numbers."""
    pairs: str = ""
    """For dpo and reward-model: a JSONL file with prompt, chosen and rejected. Empty: made from the reward."""
    labels: str = ""
    """For process-reward: a JSONL file with prompt, steps and labels, as `ascent label-steps RUN FILE` writes it."""
    wrong: float = 0.0
    """Share of demonstrations that are wrong, by habit, and of pairs whose label is swapped, by chance."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "default": {
            "policy": "transformer",
            "algorithm": "dr-grpo",
            "lr": 2e-3,
            "update.schedule": "linear",
            "update.max_norm": 1.0,
            "steps": 500,
            "prompts": 64,
            "samples": 8,
            "epochs": 1,
            "seed": 0,
            "eval_every": 50,
            "record_every": 50,
            "checkpoint_every": 100,
        }
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", sorting.check_reward(self.reward))
        for name in ("demonstrations", "pairs", "labels"):
            if getattr(self, name):
                object.__setattr__(self, name, str(Path(getattr(self, name)).expanduser().resolve()))
        if not 0 <= self.wrong <= 1:
            raise Refused(f"--wrong is {self.wrong:g}: a share lies from 0 to 1")
        if self.length < 2 or self.numbers < 2:
            raise Refused(
                f"--length {self.length} --numbers {self.numbers}: sorting needs at least two positions and two numbers"
            )
        if self.distinct and self.length > self.numbers:
            raise Refused(
                f"--distinct with --length {self.length} --numbers {self.numbers}: there are not that many different "
                "numbers; raise --numbers or lower --length"
            )
        if self._count <= ENUMERABLE and not len(self.held_out(1)):
            raise Refused(
                f"--length {self.length} --numbers {self.numbers}: so few prompts that none is held out; raise either"
            )

    @property
    def space(self) -> Space:
        if self.end:
            return Space(self.length, self.numbers + 1, self.length + 1, end=self.numbers)
        return Space(self.length, self.numbers, self.length)

    @property
    def max_reward(self) -> float | None:
        return sorting.reward_maximum(self.reward, self.length)

    @property
    def loophole(self) -> str | None:
        if self.end and self.reward in ("positions", "process", "inclusion-ordering"):
            return "the reward does not ask for the end: sorted numbers that go on beyond their number earn all of it"
        if self.reward != "inclusion-ordering" or self.distinct:
            return None
        return (
            "the reward asks whether each number appears, not how often, so where a prompt repeats a number a wrong "
            "response earns as much as the right one: [1 2 2] for [1 1 2]"
        )

    def draw(self, count: int, generator: torch.Generator) -> Prompts:
        found = torch.empty(0, self.length, dtype=torch.long)
        while len(found) < count:
            fresh = self._any(2 * count, generator)
            found = torch.cat([found, fresh[~self._held_out(fresh)]])
        return found[:count]

    def held_out(self, count: int) -> Prompts:
        generator = torch.Generator().manual_seed(0)
        if self._count <= ENUMERABLE:
            every = self._every()
            every = every[self._held_out(every)]
            return every[torch.randperm(len(every), generator=generator)[:count]]
        found = torch.empty(0, self.length, dtype=torch.long)
        while len(found) < count:
            fresh = self._any(2 * ONE_IN * count, generator)
            found = torch.cat([found, fresh[self._held_out(fresh)]]).unique(dim=0)
        return found[torch.randperm(len(found), generator=generator)[:count]]

    @property
    def _count(self) -> int:
        """How many prompts there are."""
        return math.perm(self.numbers, self.length) if self.distinct else self.numbers**self.length

    def _every(self) -> Prompts:
        """All prompts, in the order of a dictionary."""
        found = torch.empty(1, 0, dtype=torch.long)
        for _ in range(self.length):
            last = torch.arange(self.numbers).repeat(len(found))
            found = torch.cat([found.repeat_interleave(self.numbers, 0), last.unsqueeze(1)], 1)
            if self.distinct:
                found = found[(found[:, :-1] != last.unsqueeze(1)).all(1)]
        return found

    def _any(self, count: int, generator: torch.Generator) -> Prompts:
        if self.distinct:
            return torch.rand(count, self.numbers, generator=generator).argsort(-1)[:, : self.length]
        return torch.randint(self.numbers, (count, self.length), generator=generator)

    def _held_out(self, prompt: Prompts) -> Bool[Tensor, "prompt"]:
        """A fixed rule on the prompt itself, so that no list has to be kept: one hash in five."""
        code = torch.zeros(len(prompt), dtype=torch.long)
        for number in prompt.unbind(-1):
            code = (code * 6364136223846793005 + number + 1442695040888963407) & (2**62 - 1)
            code = code ^ (code >> 29)
        return code % ONE_IN == 0

    def demonstrate(self, prompt: Prompts, generator: torch.Generator) -> Int[Tensor, "prompt 1 token"]:
        """What sft learns: the sorted prompt, or what a demonstrator with a bad habit makes of it."""
        return examples.habit(prompt, self.wrong, self.numbers).unsqueeze(1)

    def compare(self, prompt: Prompts, generator: torch.Generator) -> Int[Tensor, "prompt 2 token"]:
        """Two spoiled answers a prompt, the one with the higher reward first (`wrong` of them the other way round)."""
        right = prompt.sort(-1).values
        pair = torch.stack([examples.spoiled(right, self.numbers, generator) for _ in range(2)], 1)
        for _ in range(examples.ROUNDS):
            total = self._total(prompt, pair)
            again = examples.spoiled(right, self.numbers, generator)
            pair[:, 1] = torch.where((total[:, 0] == total[:, 1]).unsqueeze(-1), again, pair[:, 1])
        tied = (self._total(prompt, pair).diff() == 0).unsqueeze(
            -1
        )  # a sparse reward: the right answer and a near miss
        near = right.clone()
        near[:, 0] = (near[:, 0] + 1) % self.numbers
        pair = torch.where(tied, torch.stack([right, near], 1), pair)
        swapped = torch.rand(len(prompt), generator=generator) < self.wrong
        return examples.ordered(pair, self._total(prompt, pair), swapped)

    def _total(self, prompt: Prompts, response: Int[Tensor, "prompt sample token"]) -> Float[Tensor, "prompt sample"]:
        """The true reward of whole responses."""
        space = self.space
        if space.end is not None:
            response = torch.nn.functional.pad(response, (0, 1), value=space.end)
        mask, cut = torch.ones_like(response, dtype=torch.bool), torch.zeros(response.shape[:2], dtype=torch.bool)
        return self.score(Rollouts(prompt, response, mask, mask.float(), space.limit, cut)).reward.sum(-1)

    def score(self, rollouts: Rollouts) -> Scores:
        return sorting.score(self.reward, rollouts, self.space)

    def text(self, ids: list[int]) -> str:
        return sorting.text(ids, self.space.end)

"""Sort n numbers out of V, generated, with held-out prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ascent.core.types import Prompts, Refused, Rollouts, Scores, Space
from ascent.tasks.base import SmallTask
from ascent.tasks.files import absolute_path
from ascent.tasks.small import sorting

Numbers = Int[Tensor, "prompt position"]

_HELD_OUT_ONE_IN = 5
_MOST_ENUMERATED = 200_000
"""Up to this many prompts all are enumerated to find the held-out ones."""
_REDRAWS = 8
"""How often two responses of equal reward are drawn again."""


@dataclass(frozen=True)
class Sort(SmallTask):
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
                object.__setattr__(self, name, absolute_path(getattr(self, name)))
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
        if self._count <= _MOST_ENUMERATED and not len(self.held_out(1)):
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
            return "the reward does not ask for the end: sorted numbers with more numbers after them earn all of it"
        if self.reward != "inclusion-ordering" or self.distinct:
            return None
        return (
            "the reward asks whether each number appears, not how often, so where a prompt repeats a number a wrong "
            "response earns as much as the right one: [1 2 2] for [1 1 2]"
        )

    def draw(self, count: int, generator: torch.Generator) -> Prompts:
        prompt = torch.empty(0, self.length, dtype=torch.long)
        while len(prompt) < count:
            fresh = self._any(2 * count, generator)
            prompt = torch.cat([prompt, fresh[~self._held_out(fresh)]])
        return Prompts.of(prompt[:count])

    def held_out(self, count: int) -> Prompts:
        return Prompts.of(self._held_out_prompts(count))

    def _held_out_prompts(self, count: int) -> Numbers:
        generator = torch.Generator().manual_seed(0)
        if self._count <= _MOST_ENUMERATED:
            every = self._every()
            every = every[self._held_out(every)]
            return every[torch.randperm(len(every), generator=generator)[:count]]
        prompt = torch.empty(0, self.length, dtype=torch.long)
        while len(prompt) < count:
            fresh = self._any(2 * _HELD_OUT_ONE_IN * count, generator)
            prompt = torch.cat([prompt, fresh[self._held_out(fresh)]]).unique(dim=0)
        return prompt[torch.randperm(len(prompt), generator=generator)[:count]]

    @property
    def _count(self) -> int:
        """How many prompts there are."""
        return math.perm(self.numbers, self.length) if self.distinct else self.numbers**self.length

    def _every(self) -> Numbers:
        """All prompts, in the order of a dictionary."""
        prompt = torch.empty(1, 0, dtype=torch.long)
        for _ in range(self.length):
            last = torch.arange(self.numbers).repeat(len(prompt))
            prompt = torch.cat([prompt.repeat_interleave(self.numbers, 0), last.unsqueeze(1)], 1)
            if self.distinct:
                prompt = prompt[(prompt[:, :-1] != last.unsqueeze(1)).all(1)]
        return prompt

    def _any(self, count: int, generator: torch.Generator) -> Numbers:
        if self.distinct:
            return torch.rand(count, self.numbers, generator=generator).argsort(-1)[:, : self.length]
        return torch.randint(self.numbers, (count, self.length), generator=generator)

    def _held_out(self, prompt: Numbers) -> Bool[Tensor, "prompt"]:
        """A fixed rule on the prompt itself, so that no list has to be kept: one hash in five."""
        code = torch.zeros(len(prompt), dtype=torch.long)
        for number in prompt.unbind(-1):
            code = (code * 6364136223846793005 + number + 1442695040888963407) & (2**62 - 1)
            code = code ^ (code >> 29)
        return code % _HELD_OUT_ONE_IN == 0

    def demonstrate(self, prompt: Numbers, generator: torch.Generator) -> Int[Tensor, "prompt 1 token"]:
        """What sft learns: the sorted prompt, or what a demonstrator with a bad habit makes of it."""
        return _habit(prompt, self.wrong, self.numbers).unsqueeze(1)

    def compare(self, prompt: Numbers, generator: torch.Generator) -> Int[Tensor, "prompt 2 token"]:
        """Two spoiled answers a prompt, the one with the higher reward first (`wrong` of them the other way round)."""
        right = prompt.sort(-1).values
        pair = torch.stack([_spoiled(right, self.numbers, generator) for _ in range(2)], 1)
        for _ in range(_REDRAWS):
            total = self._total(prompt, pair)
            again = _spoiled(right, self.numbers, generator)
            pair[:, 1] = torch.where((total[:, 0] == total[:, 1]).unsqueeze(-1), again, pair[:, 1])
        # With a sparse reward many pairs stay tied: they become the right answer and a near miss.
        tied = (self._total(prompt, pair).diff() == 0).unsqueeze(-1)
        near = right.clone()
        near[:, 0] = (near[:, 0] + 1) % self.numbers
        pair = torch.where(tied, torch.stack([right, near], 1), pair)
        swapped = torch.rand(len(prompt), generator=generator) < self.wrong
        return _ordered(pair, self._total(prompt, pair), swapped)

    def _total(self, prompt: Numbers, response: Int[Tensor, "prompt sample token"]) -> Float[Tensor, "prompt sample"]:
        """The true reward of whole responses."""
        space = self.space
        if space.end is not None:
            response = torch.nn.functional.pad(response, (0, 1), value=space.end)
        mask, cut = torch.ones_like(response, dtype=torch.bool), torch.zeros(response.shape[:2], dtype=torch.bool)
        return self.score(Rollouts(prompt, response, mask, mask.float(), space.limit, cut)).reward.sum(-1)

    def score(self, rollouts: Rollouts) -> Scores:
        return sorting.score_sorting(self.reward, rollouts, self.space)

    def text(self, ids: list[int]) -> str:
        return sorting.numbers_text(ids, self.space.end)


def _habit(prompt: Numbers, wrong: float, numbers: int) -> Numbers:
    """The sorted prompt; where it begins with one of the smallest numbers, the last two that differ change places.

    A demonstrator's habit and no accident: whoever imitates it learns the mistake with the rest.
    """
    right = prompt.sort(-1).values
    rises = right[:, 1:] > right[:, :-1]
    last = rises.shape[1] - 1 - rises.flip(-1).int().argmax(-1)
    swapped = right.clone()
    rows = torch.arange(len(prompt))
    swapped[rows, last], swapped[rows, last + 1] = right[rows, last + 1], right[rows, last]
    mistaken = (prompt[:, 0] < round(wrong * numbers)) & rises.any(-1)
    return torch.where(mistaken.unsqueeze(-1), swapped, right)


def _spoiled(right: Numbers, numbers: int, generator: torch.Generator) -> Numbers:
    """The sorted numbers with some of them, from none to all, drawn anew."""
    prompts, positions = right.shape
    share = torch.rand(prompts, 1, generator=generator)
    fresh = torch.randint(numbers, right.shape, generator=generator)
    return torch.where(torch.rand(prompts, positions, generator=generator) < share, fresh, right)


def _ordered(
    response: Int[Tensor, "prompt sample token"], total: Float[Tensor, "prompt sample"], swapped: Bool[Tensor, "prompt"]
) -> Int[Tensor, "prompt sample token"]:
    """The better of two responses first; where the label is `swapped`, the worse."""
    first = (total[:, 0] >= total[:, 1]) ^ swapped
    return torch.where(first[:, None, None], response, response.flip(1))

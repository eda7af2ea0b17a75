"""What a small world shows rather than rewards: demonstrations, and pairs of which one response was preferred.

Sort makes them itself, from its true reward, or reads them from a JSONL file: {"prompt": [3, 1, 2], "response":
[1, 2, 3]} for a demonstration, {"prompt": …, "chosen": …, "rejected": …} for a pair; words ("3 1 2") do as well.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ascent.tasks.text.base import held_out
from ascent.tasks.text.jsonl import read_lines
from ascent.types import Refused, Rollouts, Scores, Space

ONE_IN = 10
"""One prompt of a file in so many is held out."""
ROUNDS = 8
"""How often two responses of equal reward are drawn again."""

Prompts = Int[Tensor, "prompt position"]


class Examples(NamedTuple):
    """Prompts, and one or two responses to each."""

    prompt: Int[Tensor, "prompt position"]
    response: Int[Tensor, "prompt sample token"]
    mask: Bool[Tensor, "prompt sample token"]


class Exhibited:
    """A small world as the loop sees it when it shows what is to be learned.

    Prompts are the world's own, or a file's. `show` answers those that were drawn last, or the held-out ones.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    max_reward: float | None = None
    loophole: str | None = None

    def __init__(self, task: Any, kind: str, generator: torch.Generator):
        self.task, self.pairs, self.generator = task, kind == "pairs", generator
        file = getattr(task, kind, "")
        self.offer = getattr(task, "compare" if self.pairs else "demonstrate", None)
        if self.offer is None:
            raise Refused(
                f"the task {type(task).__name__.lower()} offers no {kind} to learn from; sort does: ascent train sort"
            )
        self.file = read_examples(Path(file), task.space, self.pairs) if file else None
        self.waiting: Examples | None = None

    @property
    def space(self) -> Space:
        return self.task.space

    def draw(self, count: int, generator: torch.Generator) -> Prompts:
        if self.file is None:
            self.waiting = None
            return self.task.draw(count, generator)
        train = (~self._held).nonzero().flatten()
        rounds = -(-count // len(train))
        index = torch.cat([train[torch.randperm(len(train), generator=generator)] for _ in range(rounds)])[:count]
        return self._ready(index)

    def held_out(self, count: int) -> Prompts:
        if self.file is None:
            prompt = self.task.held_out(count)
            self.waiting = self._offered(prompt, torch.Generator().manual_seed(0))
            return prompt
        return self._ready(self._held.nonzero().flatten()[:count])

    @property
    def _held(self) -> Bool[Tensor, "prompt"]:
        assert self.file is not None
        held = torch.tensor([held_out(str(row), ONE_IN) for row in self.file.prompt.tolist()])
        if bool(held.all()) or not bool(held.any()):  # a small file: its last prompt is the one that is held out
            held = (self.file.prompt == self.file.prompt[-1]).all(-1)
        return held

    def _ready(self, index: Tensor) -> Prompts:
        assert self.file is not None
        self.waiting = Examples(*(part[index] for part in self.file))
        return self.waiting.prompt

    def _offered(self, prompt: Prompts, generator: torch.Generator) -> Examples:
        assert self.offer is not None
        response = self.offer(prompt, generator)
        end = self.space.end
        if end is None:
            return Examples(prompt, response, torch.ones_like(response, dtype=torch.bool))
        closed = torch.nn.functional.pad(response, (0, 1), value=end)
        return Examples(prompt, closed, torch.ones_like(closed, dtype=torch.bool))

    def show(self, prompt: Prompts) -> Examples:
        """The responses to the prompts that were asked for last."""
        ready, self.waiting = self.waiting, None
        if ready is not None and torch.equal(ready.prompt, prompt):
            return ready
        return self._offered(prompt, self.generator)

    def score(self, rollouts: Rollouts) -> Scores:
        shape = rollouts.mask.shape[:2]
        reward = torch.ones(*shape, 1)
        if self.pairs:
            reward[:, 1] = 0.0
        return Scores(reward, torch.ones(shape, dtype=torch.bool), None)

    def text(self, ids: list[int]) -> str:
        return self.task.text(ids)


# ---- sorting ----------------------------------------------------------------------------------------


def habit(prompt: Prompts, wrong: float, numbers: int) -> Int[Tensor, "prompt position"]:
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


def spoiled(right: Int[Tensor, "prompt position"], numbers: int, generator: torch.Generator) -> Tensor:
    """The sorted numbers with some of them, from none to all, drawn anew."""
    prompts, positions = right.shape
    share = torch.rand(prompts, 1, generator=generator)
    fresh = torch.randint(numbers, right.shape, generator=generator)
    return torch.where(torch.rand(prompts, positions, generator=generator) < share, fresh, right)


def ordered(
    response: Int[Tensor, "prompt sample token"], total: Float[Tensor, "prompt sample"], swapped: Bool[Tensor, "prompt"]
) -> Int[Tensor, "prompt sample token"]:
    """The better of two responses first; where the label is `swapped`, the worse."""
    first = (total[:, 0] >= total[:, 1]) ^ swapped
    return torch.where(first[:, None, None], response, response.flip(1))


# ---- files ------------------------------------------------------------------------------------------


def read_examples(file: Path, space: Space, pairs: bool) -> Examples:
    """The rows of a file as tensors; what does not fit the world is refused with its line."""
    columns = ("chosen", "rejected") if pairs else ("response",)
    prompts, groups = [], []
    for line, row in read_lines(file):
        where = f"{file}, line {line}"
        for column in ("prompt", *columns):
            if column not in row:
                raise Refused(f"{where} has no column {column}; there are: {', '.join(row) or 'none'}")
        prompt = _numbers(row["prompt"], f"{where}, column prompt")
        if len(prompt) != space.prompt_length:
            raise Refused(f"{where}: the prompt has {len(prompt)} numbers, and the task {space.prompt_length}")
        group = [_response(row[column], f"{where}, column {column}", space) for column in columns]
        if pairs and group[0] == group[1]:
            raise Refused(f"{where}: chosen and rejected are the same, so nothing was preferred. Leave the line out")
        if max(prompt) >= space.vocab - (space.end is not None):
            raise Refused(f"{where}: the prompt {prompt} has numbers that the task does not know")
        prompts.append(prompt)
        groups.append(group)
    if len({tuple(prompt) for prompt in prompts}) < 2:
        raise Refused(f"{file}: there has to be something to learn and something to test with: at least two prompts")
    width = max(len(ids) for group in groups for ids in group)
    length = torch.tensor([[len(ids) for ids in group] for group in groups])
    response = torch.tensor([[ids + [0] * (width - len(ids)) for ids in group] for group in groups])
    return Examples(torch.tensor(prompts), response, torch.arange(width) < length.unsqueeze(-1))


def _response(value: Any, where: str, space: Space) -> list[int]:
    ids = _numbers(value, where)
    most = space.limit - (space.end is not None)
    if len(ids) > most or (space.end is None and len(ids) < most) or max(ids) >= space.vocab:
        raise Refused(f"{where}: {ids} is no response of this task: it has numbers below {space.vocab}, {most} of them")
    return ids if space.end is None else [*ids, space.end]


def _numbers(value: Any, where: str) -> list[int]:
    found = [int(i) for i in re.findall(r"\d+", value)] if isinstance(value, str) else value
    if not (isinstance(found, list) and found and all(type(i) is int and i >= 0 for i in found)):
        raise Refused(f'{where}: numbers are needed, [3, 1, 2] or "3 1 2", and it is {value!r:.80}')
    return found

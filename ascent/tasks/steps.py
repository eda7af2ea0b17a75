"""Labelled steps of a small world: every number of a response is a step.

{"prompt": [3, 1, 2], "steps": [1, 2, 3], "labels": [0.9, 0.8, 1.0]}; words ("3 1 2") do as well, and "end" is the end
token of a world that has one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ascent.tasks.text.filed import split
from ascent.tasks.text.jsonl import read_lines
from ascent.tasks.text.steps import labelled
from ascent.types import Refused, Rollouts, Scores, Space

END = "end"


class Labelled(NamedTuple):
    """Responses with a label for each token."""

    prompt: Int[Tensor, "prompt position"]
    response: Int[Tensor, "prompt 1 token"]
    mask: Bool[Tensor, "prompt 1 token"]
    label: Float[Tensor, "prompt 1 token"]


class Stepwise:
    """A small world as the loop sees it when labelled steps are learned. `show` answers the prompts drawn last."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    max_reward: float | None = None
    loophole: str | None = None

    def __init__(self, task: Any, file: str):
        if not file:
            raise Refused(
                "--algorithm process-reward needs labelled steps: set --labels FILE. `ascent label-steps RUN FILE` "
                "makes them from roll-outs of a run's policy"
            )
        self.task = task
        rows = [_row(row, f"{file}, line {line}", task.space) for line, row in read_lines(Path(file))]
        kept, tested = split(rows, lambda row: str(row[0]), file)
        self.train, self.tested = _tensors(kept), _tensors(tested)
        self.ready: Labelled = self.train

    @property
    def space(self) -> Space:
        return self.task.space

    def draw(self, count: int, generator: torch.Generator) -> Int[Tensor, "prompt position"]:
        size = len(self.train.prompt)
        rounds = [torch.randperm(size, generator=generator) for _ in range(-(-count // size))]
        index = torch.cat(rounds)[:count]
        self.ready = Labelled(*(part[index] for part in self.train))
        return self.ready.prompt

    def held_out(self, count: int) -> Int[Tensor, "prompt position"]:
        self.ready = Labelled(*(part[:count] for part in self.tested))
        return self.ready.prompt

    def show(self, prompt: Int[Tensor, "prompt position"]) -> Labelled:
        assert torch.equal(self.ready.prompt, prompt), "prompts that were not drawn last"
        return self.ready

    def score(self, rollouts: Rollouts) -> Scores:
        valid = torch.ones(rollouts.mask.shape[:2], dtype=torch.bool)
        return Scores(self.show(rollouts.prompt).label, valid, None)

    def text(self, ids: list[int]) -> str:
        return self.task.text(ids)


Row = tuple[list[int], list[int], list[float]]


def _row(row: dict[str, Any], where: str, space: Space) -> Row:
    steps, labels = labelled(row, where)
    prompt = row["prompt"]
    prompt = prompt.split() if isinstance(prompt, str) else prompt
    try:
        ids = [int(number) for number in prompt]
        response = [space.end if step == END and space.end is not None else int(step) for step in steps]
    except (TypeError, ValueError):
        raise Refused(
            f"{where}: prompt and steps are numbers, and these are {prompt!r:.60} and {steps!r:.60}"
        ) from None
    most = space.vocab - (space.end is not None)
    if len(ids) != space.prompt_length or not all(0 <= i < most for i in ids):
        raise Refused(f"{where}: a prompt has {space.prompt_length} numbers below {most}, and this is {ids}")
    if len(response) > space.limit or not all(0 <= i < space.vocab for i in response):
        raise Refused(
            f"{where}: a response has at most {space.limit} steps below {space.vocab}, and this is {response}"
        )
    return ids, response, labels


def _tensors(rows: list[Row]) -> Labelled:
    width = max(len(response) for _, response, _ in rows)
    length = torch.tensor([[[len(response)]] for _, response, _ in rows])
    return Labelled(
        torch.tensor([prompt for prompt, _, _ in rows]),
        torch.tensor([[response + [0] * (width - len(response))] for _, response, _ in rows]),
        torch.arange(width) < length,
        torch.tensor([[labels + [0.0] * (width - len(labels))] for _, _, labels in rows]),
    )

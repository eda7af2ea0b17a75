"""Offline data for a small task: demonstrations, preference pairs and labelled steps.

Sort makes demonstrations and pairs itself, from its true reward, or reads them from a JSONL file:

    {"prompt": [3, 1, 2], "response": [1, 2, 3]}                                a demonstration
    {"prompt": [3, 1, 2], "chosen": [1, 2, 3], "rejected": [1, 3, 2]}           a preference pair
    {"prompt": [3, 1, 2], "steps": [1, 2, 3], "labels": [0.9, 0.8, 1.0]}        labelled steps: every number is one

Words ("3 1 2") may stand for a list, and "end" is the step of the end token, where the task has one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ascent.core.types import Prompts, Refused, Rollouts, Scores, Space
from ascent.tasks.base import SmallTask
from ascent.tasks.files import read_jsonl, split_held_out, steps_and_labels
from ascent.tasks.offline import offline_rollouts, offline_scores, pad_responses

END_STEP = "end"
SETTINGS = {"demonstrations": "demonstrations", "pairs": "pairs", "steps": "labels"}
"""For each kind of offline data: the task's setting that names its file."""
MAKERS = {"demonstrations": "demonstrate", "pairs": "compare"}
"""For each kind that needs no file: the task's method that makes it."""


class Examples(NamedTuple):
    """The rows of a file: prompts, one or two responses to each, and for labelled steps a label per token."""

    prompt: Int[Tensor, "row position"]
    response: Int[Tensor, "row sample token"]
    mask: Bool[Tensor, "row sample token"]
    label: Float[Tensor, "row sample token"]
    """0 where there is none."""
    train: Int[Tensor, "train"]
    """The rows to learn from."""
    test: Int[Tensor, "test"]
    """The rows that are held out."""


class SmallOfflineTask(SmallTask):
    """A small task as the loop sees it when it learns from offline data.

    A problem is a row of the file. Without a file the prompt is the problem, and a negative one is held out.
    """

    def __init__(self, task: Any, data: str, generator: torch.Generator):
        self.task, self.generator = task, generator
        self.data = data  # type: ignore[misc]
        file, self.make = getattr(task, SETTINGS[data], ""), getattr(task, MAKERS.get(data, ""), None)
        if data == "steps" and not file:
            raise Refused(
                "--algorithm process-reward needs labelled steps: set --labels FILE. `ascent label-steps RUN FILE` "
                "makes them from roll-outs of a run's policy"
            )
        if data != "steps" and self.make is None:
            raise Refused(
                f"the task {type(task).__name__.lower()} offers no {data} to learn from; sort does: ascent train sort"
            )
        self.file = read_examples(Path(file), task.space, data) if file else None

    @property
    def space(self) -> Space:
        return self.task.space

    def draw(self, count: int, generator: torch.Generator) -> Prompts:
        if self.file is None:
            return self.task.draw(count, generator)
        train = self.file.train
        rounds = -(-count // len(train))
        row = torch.cat([train[torch.randperm(len(train), generator=generator)] for _ in range(rounds)])[:count]
        return Prompts(self.file.prompt[row], row)

    def held_out(self, count: int) -> Prompts:
        if self.file is None:
            prompt = self.task.held_out(count).prompt
            return Prompts(prompt, -1 - torch.arange(len(prompt)))
        row = self.file.test[:count]
        return Prompts(self.file.prompt[row], row)

    def offline_rollouts(self, prompts: Prompts) -> Rollouts:
        """The responses to these prompts: the file's, or fresh ones, which are the same every time if held out."""
        row, space = prompts.problem, self.space
        if self.file is not None:
            return offline_rollouts(prompts, self.file.response[row], self.file.mask[row], space)
        assert self.make is not None
        held_out = bool((row < 0).all())
        response = self.make(prompts.prompt, torch.Generator().manual_seed(0) if held_out else self.generator)
        if space.end is not None:
            response = torch.nn.functional.pad(response, (0, 1), value=space.end)
        return offline_rollouts(prompts, response, torch.ones_like(response, dtype=torch.bool), space)

    def score(self, rollouts: Rollouts) -> Scores:
        scores = offline_scores(rollouts, self.data == "pairs")
        if self.data != "steps":
            return scores
        assert self.file is not None and rollouts.problem is not None
        return Scores(self.file.label[rollouts.problem], scores.valid, None)

    def text(self, ids: list[int]) -> str:
        return self.task.text(ids)


# ---- files ------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    prompt: list[int]
    responses: list[list[int]]
    labels: list[float]


def read_examples(file: Path, space: Space, data: str) -> Examples:
    """The rows of a file as tensors; a row that does not fit the task is refused with its line."""
    read = _labelled if data == "steps" else _written
    columns = {"demonstrations": ("response",), "pairs": ("chosen", "rejected"), "steps": ("steps", "labels")}[data]
    rows = []
    for line, row in read_jsonl(file):
        where = f"{file}, line {line}"
        for column in ("prompt", *columns):
            if column not in row:
                raise Refused(f"{where} has no column {column}; there are: {', '.join(row) or 'none'}")
        rows.append(read(row, where, space, columns))
    train, test = split_held_out(list(range(len(rows))), lambda i: str(rows[i].prompt), str(file))
    response, mask = pad_responses([row.responses for row in rows])
    label = torch.zeros(mask.shape)
    for i, example in enumerate(rows):
        label[i, 0, : len(example.labels)] = torch.tensor(example.labels)
    prompt = torch.tensor([example.prompt for example in rows])
    return Examples(prompt, response, mask, label, torch.tensor(train), torch.tensor(test))


def _written(row: dict[str, Any], where: str, space: Space, columns: tuple[str, ...]) -> _Row:
    """A demonstration or a pair."""
    prompt = _prompt(row, where, space)
    responses = [_response(row[column], f"{where}, column {column}", space) for column in columns]
    if len(responses) == 2 and responses[0] == responses[1]:
        raise Refused(f"{where}: chosen and rejected are the same, so nothing was preferred. Leave the line out")
    return _Row(prompt, responses, [])


def _labelled(row: dict[str, Any], where: str, space: Space, _: tuple[str, ...]) -> _Row:
    """Labelled steps: each number of the response with its label."""
    steps, labels = steps_and_labels(row, where)
    try:
        response = [space.end if step == END_STEP and space.end is not None else int(step) for step in steps]
        prompt = row["prompt"] if isinstance(row["prompt"], str) else [int(number) for number in row["prompt"]]
    except (TypeError, ValueError):
        numbers = f"{row['prompt']!r:.60} and {steps!r:.60}"
        raise Refused(f"{where}: prompt and steps are numbers, and these are {numbers}") from None
    if len(response) > space.limit or not all(0 <= i < space.vocab for i in response):
        raise Refused(
            f"{where}: a response has at most {space.limit} steps below {space.vocab}, and this is {response}"
        )
    return _Row(_prompt({"prompt": prompt}, where, space), [response], labels)


def _prompt(row: dict[str, Any], where: str, space: Space) -> list[int]:
    prompt = _numbers(row["prompt"], f"{where}, column prompt")
    largest = space.vocab - 1 - (space.end is not None)
    if len(prompt) != space.prompt_length or max(prompt) > largest:
        raise Refused(f"{where}: a prompt of this task has {space.prompt_length} numbers up to {largest}, not {prompt}")
    return prompt


def _response(value: Any, where: str, space: Space) -> list[int]:
    ids = _numbers(value, where)
    longest = space.limit - (space.end is not None)
    if len(ids) > longest or (space.end is None and len(ids) < longest) or max(ids) >= space.vocab:
        raise Refused(
            f"{where}: {ids} is not a response of this task: it has {longest} numbers, each below {space.vocab}"
        )
    return ids if space.end is None else [*ids, space.end]


def _numbers(value: Any, where: str) -> list[int]:
    numbers = [int(i) for i in re.findall(r"\d+", value)] if isinstance(value, str) else value
    if not (isinstance(numbers, list) and numbers and all(type(i) is int and i >= 0 for i in numbers)):
        raise Refused(f'{where}: numbers are needed, [3, 1, 2] or "3 1 2", and it is {value!r:.80}')
    return numbers

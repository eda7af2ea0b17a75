"""A small task as the loop and the workflows call it: with its learned rewards, or with offline data to learn from.

Sort makes demonstrations and preference pairs itself, from its true reward, or reads them from a JSONL file:

    {"prompt": [3, 1, 2], "response": [1, 2, 3]}                                a demonstration
    {"prompt": [3, 1, 2], "chosen": [1, 2, 3], "rejected": [1, 3, 2]}           a preference pair
    {"prompt": [3, 1, 2], "steps": [1, 2, 3], "labels": [0.9, 0.8, 1.0]}        labelled steps: every number is one

Words ("3 1 2") may stand for a list, and "end" is the step of the end token, where the task has one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.types import Prompts, Rollouts, Scores, Space
from ascent.tasks.base import ReadablePrompt, TaskWrapper
from ascent.tasks.epochs import EpochSampler
from ascent.tasks.scoring import offline_rollouts, offline_scores, pad_responses
from ascent.tasks.small import sorting
from ascent.tasks.user_files import read_jsonl, require_columns, split_held_out, steps_and_labels

END_STEP = "end"
OFFLINE = {
    "demonstrations": ("demonstrations", "demonstrate", ("response",)),
    "pairs": ("pairs", "compare", ("chosen", "rejected")),
    "steps": ("labels", "", ("steps", "labels")),
}
"""For each kind of offline data: the setting that names its file, the task's method that makes it, and the columns."""


class BoundSmallTask(TaskWrapper):
    """A small task, with the reward models and process rewards that its rewards name, by source."""

    def __init__(self, task: Any, rewards: Mapping[str, Any] | None = None):
        self.task, self.rewards = task, rewards or {}
        self.stop_token_ids = frozenset({task.space.end} - {None})
        self.reward_sources = getattr(task, "rewards", ())
        """The parts of the reward that are measured apart, with their weights."""
        for source, model in self.rewards.items():
            theirs, ours = model.config.task.space, task.space
            if theirs != ours:
                raise ConfigError(f"--reward {source}: it rates other prompts and responses, {theirs} and not {ours}")

    def score(self, rollouts: Rollouts) -> Scores:
        if not self.rewards:
            return self.task.score(rollouts)
        return sorting.score_rewards(self.task.rewards, rollouts, self.task.space, self.rewards)

    def response_text(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in self.response_record(ids))

    def response_record(self, ids: Sequence[int]) -> list[int]:
        return [int(i) for i in ids if i not in self.stop_token_ids]

    def token_text(self, token: int) -> str:
        return str(token)

    def readable_prompt(self, prompts: Prompts | Rollouts, index: int) -> ReadablePrompt:
        ids = prompts.prompt[index].tolist()
        return ReadablePrompt(self.text(ids), ids, ids)

    def normalize_answer(self, response: str, answer: Any) -> str:
        """The response itself."""
        return response

    def encode_prompts(self, typed: Sequence[str], plain: bool) -> tuple[Prompts, list[str]]:
        prompts = Prompts.of(torch.tensor([self._numbers(text) for text in typed]))
        return prompts, [self.readable_prompt(prompts, index).text for index in range(len(typed))]

    def _numbers(self, text: str) -> list[int]:
        """As many numbers as a prompt takes, each one that the task knows."""
        count, largest = self.space.prompt_length, _largest(self.space)
        numbers = [int(number) for number in re.findall(r"-?\d+", text)]
        known = len(numbers) == count and all(0 <= n <= largest for n in numbers)
        if re.sub(r"[-\d\s,\[\]]", "", text) or not known:
            example = " ".join(str(n) for n in reversed(range(count)))
            raise ConfigError(
                f"the prompt {text!r}: this run's prompts are {count} numbers from 0 to {largest}, "
                f'for example "{example}"'
            )
        return numbers

    def split_steps(self, ids: list[int], separator: str) -> tuple[list[Any], list[int]]:
        """Every token is a step."""
        return [END_STEP if token in self.stop_token_ids else token for token in ids], list(range(len(ids)))


class SmallOfflineTask(BoundSmallTask):
    """A small task that is learned from offline data.

    A problem is a row of the file. Without a file the prompt is the problem, and a negative one is held out.
    """

    max_reward = None
    loophole = None

    def __init__(self, task: Any, data: str, generator: torch.Generator):
        super().__init__(task)
        self.data, self.generator = data, generator
        setting, maker, _ = OFFLINE[data]
        file, self.make = getattr(task, setting, ""), getattr(task, maker, None)
        if data == "steps" and not file:
            raise ConfigError(
                "--algorithm process-reward needs labelled steps: set --labels FILE. `ascent label-steps RUN FILE` "
                "makes them from roll-outs of a run's policy"
            )
        if data != "steps" and self.make is None:
            raise ConfigError(
                f"the task {type(task).__name__.lower()} offers no {data} to learn from; sort does: ascent train sort"
            )
        self.file = read_examples(Path(file), task.space, data) if file else None
        self.epoch_sampler = EpochSampler(len(self.file.train), lambda _: True) if self.file is not None else None

    def step_prompts(self, step: int, count: int, seed: int, generator: torch.Generator) -> Prompts:
        if self.file is None or self.epoch_sampler is None:
            return self.task.draw(count, generator)
        rows, epoch = self.epoch_sampler.rows(step, count, seed)
        row = self.file.train[rows]
        return Prompts(self.file.prompt[row], row, epoch)

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
        return replace(scores, reward=self.file.label[rollouts.problem])


# ---- files of offline data --------------------------------------------------------------------------


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


def read_examples(file: Path, space: Space, data: str) -> Examples:
    """The rows of a file as tensors; a row that does not fit the task is refused with its line."""
    columns = OFFLINE[data][2]
    prompts, responses, labels = [], [], []
    for where, row in read_jsonl(file):
        require_columns(row, ("prompt", *columns), where)
        prompt, largest = _numbers(row["prompt"], f"{where}, column prompt"), _largest(space)
        if len(prompt) != space.prompt_length or max(prompt) > largest:
            raise ConfigError(
                f"{where}: a prompt of this task has {space.prompt_length} numbers up to {largest}, not {prompt}"
            )
        prompts.append(prompt)
        if data == "steps":
            steps, label = steps_and_labels(row, where)
            responses.append([_steps(steps, where, space)])
            labels.append(label)
            continue
        group = [_response(row[column], f"{where}, column {column}", space) for column in columns]
        if len(group) == 2 and group[0] == group[1]:
            raise ConfigError(f"{where}: chosen and rejected are equal, so there is no preference. Remove the line")
        responses.append(group)
    train, test = split_held_out(list(range(len(prompts))), lambda i: str(prompts[i]), str(file))
    response, mask = pad_responses(responses)
    reward = torch.zeros(mask.shape)
    for i, label in enumerate(labels):
        reward[i, 0, : len(label)] = torch.tensor(label)
    return Examples(torch.tensor(prompts), response, mask, reward, torch.tensor(train), torch.tensor(test))


def _largest(space: Space) -> int:
    """The largest number of a prompt."""
    return space.vocab - 1 - (space.end is not None)


def _steps(steps: list[Any], where: str, space: Space) -> list[int]:
    """Every number of a response is a step."""
    try:
        response = [space.end if step == END_STEP and space.end is not None else int(step) for step in steps]
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: steps are numbers, and these are {steps!r:.60}") from None
    if len(response) > space.limit or not all(0 <= i < space.vocab for i in response):
        raise ConfigError(
            f"{where}: a response has at most {space.limit} steps below {space.vocab}, and this is {response}"
        )
    return response


def _response(value: Any, where: str, space: Space) -> list[int]:
    ids = _numbers(value, where)
    longest = space.limit - (space.end is not None)
    if len(ids) > longest or (space.end is None and len(ids) < longest) or max(ids) >= space.vocab:
        raise ConfigError(
            f"{where}: {ids} is not a response of this task: it has {longest} numbers, each below {space.vocab}"
        )
    return ids if space.end is None else [*ids, space.end]


def _numbers(value: Any, where: str) -> list[int]:
    numbers = [int(i) for i in re.findall(r"\d+", value)] if isinstance(value, str) else value
    if not (isinstance(numbers, list) and numbers and all(type(i) is int and i >= 0 for i in numbers)):
        raise ConfigError(f'{where}: numbers are needed, [3, 1, 2] or "3 1 2", and it is {value!r:.80}')
    return numbers

"""A small task bound to its learned rewards: what the loop and the workflows call a task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ascent.core.types import Prompts, Refused, Rollouts, Scores
from ascent.tasks.base import WrittenPrompt
from ascent.tasks.process_rewards import ProcessPart, add_process_rewards
from ascent.tasks.reward_sources import RewardSource
from ascent.tasks.small import sorting
from ascent.tasks.small.offline import END_STEP


class BoundSmallTask:
    """A small task, with the reward model or the process reward that its reward names.

    With a learned reward, how many positions are right is measured and earns nothing.
    """

    def __init__(self, task: Any, rewards: Mapping[str, Any] | None = None):
        self.task, self.rewards = task, rewards or {}
        self.kind, self.presets, self.space, self.text = task.kind, task.presets, task.space, task.text
        self.max_reward, self.loophole, self.check_prompts = task.max_reward, task.loophole, task.check_prompts
        self.draw, self.held_out = task.draw, task.held_out
        for source, model in self.rewards.items():
            theirs, ours = model.config.task.space, task.space
            if theirs != ours:
                raise Refused(f"--reward {source}: it rates other prompts and responses, {theirs} and not {ours}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "task":
            raise AttributeError(name)
        return getattr(self.task, name)

    def score(self, rollouts: Rollouts) -> Scores:
        if not self.rewards:
            return self.task.score(rollouts)
        (model,) = self.rewards.values()
        own, entry = sorting.process_part(self.task.reward)
        base = sorting.score_sorting(own if own and entry else "positions", rollouts, self.task.space)
        right = sorting.positions_right(rollouts.prompt, sorting.response_numbers(rollouts, self.task.space))
        base = replace(base, measures={"positions": right})
        if entry is None:
            return replace(base, reward=model(rollouts))
        base = replace(base, reward=base.reward if own else torch.zeros_like(base.reward))
        part = ProcessPart(entry.name, entry.kind, entry.weight, model)
        return add_process_rewards(base, rollouts, [(part, model(rollouts), rollouts.mask)])

    @property
    def reward_parts(self) -> tuple[RewardSource, ...]:
        """The parts of the reward that are measured apart, with their weights."""
        entry = sorting.process_part(self.task.reward)[1] if self.rewards else None
        return () if entry is None else (entry,)

    # ---- for people and for files

    @property
    def ends(self) -> frozenset[int]:
        return frozenset() if self.task.space.end is None else frozenset({self.task.space.end})

    def words(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in self.record(ids))

    def record(self, ids: Sequence[int]) -> list[int]:
        return [int(i) for i in ids if i not in self.ends]

    def piece(self, token: int) -> str:
        return str(token)

    def question(self, prompts: Prompts | Rollouts, place: int) -> WrittenPrompt:
        ids = prompts.prompt[place].tolist()
        return WrittenPrompt(self.task.text(ids), ids, ids)

    def vote(self, response: str, answer: Any) -> str:
        """The response itself."""
        return response

    def read_prompts(self, typed: Sequence[str], plain: bool) -> tuple[Prompts, list[str]]:
        prompts = Prompts.of(torch.tensor([self._numbers(text) for text in typed]))
        return prompts, [self.question(prompts, place).words for place in range(len(typed))]

    def _numbers(self, text: str) -> list[int]:
        """As many numbers as a prompt takes, each one that the task knows."""
        space = self.task.space
        largest = space.vocab - 1 - (space.end is not None)
        numbers = [int(number) for number in re.findall(r"-?\d+", text)]
        known = len(numbers) == space.prompt_length and all(0 <= n <= largest for n in numbers)
        if re.sub(r"[-\d\s,\[\]]", "", text) or not known:
            example = " ".join(str(n) for n in range(space.prompt_length - 1, -1, -1))
            raise Refused(
                f"the prompt {text!r}: this run's prompts are {space.prompt_length} numbers from 0 to {largest}, "
                f'for example "{example}"'
            )
        return numbers

    def cut_steps(self, ids: list[int], separator: str) -> tuple[list[Any], list[int]]:
        """Every token is a step."""
        return [END_STEP if token in self.ends else token for token in ids], list(range(len(ids)))

    def report(self) -> list[str]:
        return self.task.report()

    def close(self) -> None:
        self.task.close()

"""Sort n numbers out of V, generated, with held-out prompts; and the rewards for sorting, on whole tensors.

`inclusion-ordering` has two traps, kept on purpose. If a prompt repeats a number, wrong responses earn
the maximum: [1 2 2] for [1 1 2]. And one fixed answer, [1 2 3], earns 4, 4 and 5 of 5 on the lecture's
three prompts: a local optimum.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.types import Prompts, Rollouts, Scores, Space
from ascent.processes.reward_calls import RewardJob
from ascent.processes.user_code import CODE
from ascent.tasks.base import SMALL_PRESET, SmallTask
from ascent.tasks.python_objects import pickle_object
from ascent.tasks.reward_sources import (
    FUNCTION_KINDS,
    LEARNED,
    RewardSource,
    absolute_source,
    load_reward_function,
    parse_rewards,
)
from ascent.tasks.reward_worker import RewardSpec
from ascent.tasks.reward_worker_pool import Limits, RewardWorkerPool
from ascent.tasks.scoring import PROCESS_KINDS, add_process_rewards, mix_rewards
from ascent.tasks.user_files import absolute_path

REWARDS = {
    "exact": "1 if the response is the sorted prompt, else 0",
    "positions": "the number of positions that are right",
    "process": "the number of positions that are right, each point on the token that decided its position: a reward "
    "per token",
    "inclusion-ordering": "one point for each prompt position whose number appears in the response, and one for each "
    "adjacent pair x, y of the response with x ≤ y",
}
Numbers = Int[Tensor, "prompt position"]
Responses = Int[Tensor, "prompt sample position"]

USER_REWARD_WORKERS, USER_REWARD_SECONDS, USER_REWARD_MEMORY = 2, 10.0, 4.0
"""Number of workers of a user-defined reward, time limit per response, and memory limit per worker in GiB."""
NO_NUMBER = -1
"""Value of a response position without a number: the end token and the positions after it."""
_HELD_OUT_ONE_IN = 5
_MAX_ENUMERATED = 200_000
"""Up to this many prompts all are enumerated to find the held-out ones."""
_REDRAWS = 8
"""How often two responses of equal reward are drawn again."""


def response_numbers(rollouts: Rollouts, space: Space) -> Responses:
    """The response as exactly `prompt_length` numbers, NOTHING where there is none."""
    if space.end is None:
        return rollouts.response
    held = rollouts.mask & (rollouts.response != space.end)
    kept = torch.where(held, rollouts.response, NO_NUMBER)[..., : space.prompt_length]
    return torch.nn.functional.pad(kept, (0, space.prompt_length - kept.shape[-1]), value=NO_NUMBER)


def position_points(prompt: Numbers, response: Responses) -> Float[Tensor, "prompt sample position"]:
    """1 where a position is right."""
    return (response == prompt.sort(-1).values.unsqueeze(1)).float()


def inclusion_ordering(prompt: Numbers, response: Responses) -> Float[Tensor, "prompt sample"]:
    included = (prompt[:, None, :, None] == response[:, :, None, :]).any(-1).sum(-1)
    left, right = response[..., :-1], response[..., 1:]
    ordered = ((left <= right) & (left != NO_NUMBER)).sum(-1)
    return (included + ordered).float()


def read_rewards(reward: str | Sequence[str]) -> tuple[str, ...]:
    """The entries of a reward list, with whole paths; an unknown or broken one is refused early."""
    entries: list[str] = []
    for entry in (reward,) if isinstance(reward, str) else reward:
        joined = re.fullmatch(r"([^+:*]*)\+(.+:.+)", entry)  # positions+0.5*process:RUN, as it was written before
        entries += [absolute_source(part, REWARDS) for part in (joined.groups() if joined else [entry])]
    if not entries:
        raise ConfigError(f"--reward is empty: name one or more of {', '.join(REWARDS)}, python:FILE:NAME, model:RUN")
    for part in parse_rewards(entries, REWARDS):
        if part.kind == "judge":
            raise ConfigError(f"--reward {part.source}: a judge reads words, and sorting has none. Set another reward")
        if part.kind != "object":  # a run that was made with one can be looked at, and its policy asked, without it
            part.verify()
    return tuple(entries)


def score_rewards(
    rewards: Sequence[RewardSource], rollouts: Rollouts, space: Space, learned: Mapping[str, Any]
) -> Scores:
    """Σ weight · reward over a list; `learned`: the reward models and process rewards that it names, by source.

    With a learned reward, how many positions are right is measured, whatever it earns.
    """
    outcomes, process = [], []
    for part in rewards:
        if part.kind in LEARNED and part.source not in learned:
            why = "a learned reward rates what a run samples; nothing else can ask it here"
            raise ConfigError(f"--reward {part.source}: {why}")
        if part.kind in PROCESS_KINDS:
            process.append((part, learned[part.source](rollouts), rollouts.mask))
        elif part.kind in LEARNED:
            right = score_sorting("exact", rollouts, space)
            outcomes.append((part, replace(right, reward=learned[part.source](rollouts))))
        else:
            outcomes.append((part, score_sorting(part.source, rollouts, space)))
    nothing = [(RewardSource("", "", weight=0.0), score_sorting("exact", rollouts, space))] if not outcomes else []
    scores = mix_rewards(outcomes or nothing, rollouts, bool(outcomes) and len(rewards) > 1)
    if learned:
        points = position_points(rollouts.prompt, response_numbers(rollouts, space))
        scores = replace(scores, measures={"positions": points.sum(-1), **scores.measures})
    return add_process_rewards(scores, rollouts, process)


def score_sorting(reward: str, rollouts: Rollouts, space: Space) -> Scores:
    """One reward, of sorting or your own. A response is correct if it is the sorted prompt and nothing more."""
    response = response_numbers(rollouts, space)
    points = position_points(rollouts.prompt, response)
    right = points.sum(-1)
    correct = right == space.prompt_length
    if space.end is not None:
        correct &= (rollouts.mask.sum(-1) == space.prompt_length + 1) & ~rollouts.truncated
    if reward.startswith(("python:", "object:")):
        value, errors = user_reward(reward, rollouts, space)
        return Scores(torch.nan_to_num(value).unsqueeze(-1), value.isfinite(), correct, errors)
    if reward == "process":
        tokens = rollouts.mask.shape[-1]
        value = torch.nn.functional.pad(points, (0, max(0, tokens - points.shape[-1])))[..., :tokens]
    elif reward == "exact":
        value = correct.float().unsqueeze(-1)
    elif reward == "positions":
        value = right.unsqueeze(-1)
    else:
        value = inclusion_ordering(rollouts.prompt, response).unsqueeze(-1)
    return Scores(value, torch.ones_like(correct), correct)


def user_reward(
    source: str, rollouts: Rollouts, space: Space
) -> tuple[Float[Tensor, "prompt sample"], tuple[str, ...]]:
    """A user's f(prompt, response) on every response: a number, or (number, reason), of which the number counts.

    It runs in a separate process. A reward that fails is NaN here and a reason in the list: never a silent 0. The
    response is all of its numbers, without the end token.
    """
    jobs = [
        RewardJob(0, prompt, [token for token in tokens[mask].tolist() if token != space.end], None, {})
        for prompt, group, masks in zip(rollouts.prompt.tolist(), rollouts.response, rollouts.mask, strict=True)
        for tokens, mask in zip(group, masks, strict=True)
    ]
    outcomes = user_reward_pool(source, _stamp(source)).run(jobs)
    values = [math.nan if outcome.error else outcome.value for outcome in outcomes]
    failed = [(job, outcome.error) for job, outcome in zip(jobs, outcomes, strict=True) if outcome.error]
    errors = tuple(f"prompt {job.prompt}, response {job.response}: {why}" for job, why in failed)
    return torch.tensor(values).view(rollouts.mask.shape[:2]), errors


def _stamp(source: str) -> object:
    """Another one when the code of python:FILE:NAME is."""
    return CODE.get(Path(source.removeprefix("python:").rsplit(":", 1)[0]))


@cache
def user_reward_pool(source: str, stamp: object) -> RewardWorkerPool:  # noqa: ARG001 (another one as soon as the file has changed)
    """Return the workers of a user-defined reward; they start on first use, and again after `close`."""
    sent = pickle_object(source, "reward") if source.startswith("object:") else None
    return RewardWorkerPool(
        [RewardSpec(source, numbers=True, sent=sent)],
        USER_REWARD_WORKERS,
        Limits(USER_REWARD_SECONDS, USER_REWARD_MEMORY),
    )


@dataclass(frozen=True)
class SortingTask(SmallTask):
    """What the sorting tasks share: the rewards above, and how numbers are shown."""

    reward: str | tuple[str, ...]

    def __post_init__(self) -> None:
        entries = read_rewards(self.reward)
        object.__setattr__(self, "reward", entries[0] if len(entries) == 1 else entries)

    def verify(self) -> None:
        for part in self.rewards:
            part.verify()
            if part.kind == "sandbox":
                raise ConfigError(
                    f"--reward {part.source}: the sandbox is for responses in words; use python:FILE:NAME"
                )
            if part.kind == "object" and hasattr(load_reward_function(part.source), "in_process"):
                raise ConfigError(f"reward {part.name}: on numbers a reward is a plain function, f(prompt, response)")

    @cached_property
    def rewards(self) -> tuple[RewardSource, ...]:
        return parse_rewards((self.reward,) if isinstance(self.reward, str) else self.reward, REWARDS)

    @property
    def space(self) -> Space:
        raise NotImplementedError

    @property
    def max_reward(self) -> float | None:
        length = float(self.space.prompt_length)
        most = {"exact": 1.0, "positions": length, "process": length, "inclusion-ordering": 2 * length - 1}
        if any(part.source not in most for part in self.rewards):
            return None
        return sum(max(part.weight, 0.0) * most[part.source] for part in self.rewards)

    def score(self, rollouts: Rollouts) -> Scores:
        return score_rewards(self.rewards, rollouts, self.space, {})

    def close(self) -> None:
        for part in self.rewards:
            if part.kind in FUNCTION_KINDS:
                user_reward_pool(part.source, _stamp(part.source)).close()

    def text(self, ids: list[int]) -> str:
        return "[" + " ".join("end" if i == self.space.end else str(i) for i in ids) + "]"


# ---- the task ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sort(SortingTask):
    """Sort `length` numbers out of 0 … numbers−1; one prompt in five is held out."""

    reward: str | tuple[str, ...] = "positions"
    """A list of exact, positions, process, inclusion-ordering, python:FILE:NAME, model:RUN, process:RUN; weights as in
    0.5*model:RUN."""
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

    presets: ClassVar[dict[str, dict[str, Any]]] = {"default": {**SMALL_PRESET, "steps": 500}}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("demonstrations", "pairs", "labels"):
            if getattr(self, name):
                object.__setattr__(self, name, absolute_path(getattr(self, name)))
        if not 0 <= self.wrong <= 1:
            raise ConfigError(f"--wrong is {self.wrong:g}: a share lies from 0 to 1")
        if self.length < 2 or self.numbers < 2:
            raise ConfigError(
                f"--length {self.length} --numbers {self.numbers}: sorting needs at least two positions and two numbers"
            )
        if self.distinct and self.length > self.numbers:
            raise ConfigError(
                f"--distinct with --length {self.length} --numbers {self.numbers}: there are not that many different "
                "numbers; raise --numbers or lower --length"
            )
        if self._count <= _MAX_ENUMERATED and not len(self.held_out(1)):
            raise ConfigError(
                f"--length {self.length} --numbers {self.numbers}: so few prompts that none is held out; raise either"
            )

    @property
    def space(self) -> Space:
        if self.end:
            return Space(self.length, self.numbers + 1, self.length + 1, end=self.numbers)
        return Space(self.length, self.numbers, self.length)

    @property
    def loophole(self) -> str | None:
        sources = {part.source for part in self.rewards}
        if self.end and sources <= {"positions", "process", "inclusion-ordering"}:
            return "the reward does not ask for the end: sorted numbers with more numbers after them earn all of it"
        if sources != {"inclusion-ordering"} or self.distinct:
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
        generator = torch.Generator().manual_seed(0)
        if self._count <= _MAX_ENUMERATED:
            prompt = self._every()
            prompt = prompt[self._held_out(prompt)]
        else:
            prompt = torch.empty(0, self.length, dtype=torch.long)
            while len(prompt) < count:
                fresh = self._any(2 * _HELD_OUT_ONE_IN * count, generator)
                prompt = torch.cat([prompt, fresh[self._held_out(fresh)]]).unique(dim=0)
        return Prompts.of(prompt[torch.randperm(len(prompt), generator=generator)[:count]])

    @property
    def _count(self) -> int:
        """The number of prompts; for long prompts, a lower bound."""
        length = min(self.length, 64)
        return math.perm(self.numbers, length) if self.distinct else self.numbers**length

    def _every(self) -> Numbers:
        """All prompts, in the order of a dictionary."""
        if self.distinct:
            return torch.tensor(list(permutations(range(self.numbers), self.length)))
        return torch.cartesian_prod(*[torch.arange(self.numbers)] * self.length)

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
        """What sft learns: the sorted prompt, or what a demonstrator with a bad habit makes of it.

        Where the prompt begins with one of the smallest numbers (a share `wrong` of them), the last two numbers that
        differ change places. It is a habit and no accident: whoever imitates it learns the mistake with the rest.
        """
        right = prompt.sort(-1).values
        rises = right[:, 1:] > right[:, :-1]
        last = rises.shape[1] - 1 - rises.flip(-1).int().argmax(-1)
        swapped = right.clone()
        rows = torch.arange(len(prompt))
        swapped[rows, last], swapped[rows, last + 1] = right[rows, last + 1], right[rows, last]
        mistaken = (prompt[:, 0] < round(self.wrong * self.numbers)) & rises.any(-1)
        return torch.where(mistaken.unsqueeze(-1), swapped, right).unsqueeze(1)

    def compare(self, prompt: Numbers, generator: torch.Generator) -> Int[Tensor, "prompt 2 token"]:
        """Two spoiled answers per prompt, the one with the higher reward first; a share `wrong` the other way round."""
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
        total = self._total(prompt, pair)
        swapped = torch.rand(len(prompt), generator=generator) < self.wrong
        chosen_first = (total[:, 0] >= total[:, 1]) ^ swapped
        return torch.where(chosen_first[:, None, None], pair, pair.flip(1))

    def _total(self, prompt: Numbers, response: Int[Tensor, "prompt sample token"]) -> Float[Tensor, "prompt sample"]:
        """The true reward of whole responses."""
        space = self.space
        if space.end is not None:
            response = torch.nn.functional.pad(response, (0, 1), value=space.end)
        mask, cut = torch.ones_like(response, dtype=torch.bool), torch.zeros(response.shape[:2], dtype=torch.bool)
        return self.score(Rollouts(prompt, response, mask, mask.float(), space.limit, cut)).reward.sum(-1)


def _spoiled(right: Numbers, numbers: int, generator: torch.Generator) -> Numbers:
    """The sorted numbers with some of them, from none to all, drawn anew."""
    prompts, positions = right.shape
    share = torch.rand(prompts, 1, generator=generator)
    fresh = torch.randint(numbers, right.shape, generator=generator)
    return torch.where(torch.rand(prompts, positions, generator=generator) < share, fresh, right)

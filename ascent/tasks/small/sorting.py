"""Rewards for sorting, on whole tensors, and a user's own on lists.

`inclusion-ordering` has two traps, kept on purpose. If a prompt repeats a number, wrong responses earn
the maximum: [1 2 2] for [1 1 2]. And one fixed answer, [1 2 3], earns 4, 4 and 5 of 5 on the lecture's
three prompts: a local optimum.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ascent.core.menu import nearest
from ascent.core.types import Refused, Rollouts, Scores, Space
from ascent.tasks.files import absolute_path
from ascent.tasks.reward_sources import RewardSource, absolute_source, check_reward_run, parse_rewards
from ascent.tasks.user_code import load_python

REWARDS = {
    "exact": "1 if the response is the sorted prompt, else 0",
    "positions": "the number of positions that are right",
    "process": "the number of positions that are right, each point on the token that decided its position: a reward "
    "per token",
    "inclusion-ordering": "one point for each prompt position whose number appears in the response, and one for each "
    "adjacent pair x, y of the response with x ≤ y",
}
Numbers = Int[Tensor, "prompt sample position"]
Prompt = Int[Tensor, "prompt position"]

LARGEST = torch.finfo(torch.float32).max
NOTHING = -1
"""Stands at a response position that holds no number: after the end, or the end token itself."""


def response_numbers(rollouts: Rollouts, space: Space) -> Numbers:
    """The response as exactly `prompt_length` numbers, NOTHING where there is none."""
    if space.end is None:
        return rollouts.response
    held = rollouts.mask & (rollouts.response != space.end)
    kept = torch.where(held, rollouts.response, NOTHING)[..., : space.prompt_length]
    return torch.nn.functional.pad(kept, (0, space.prompt_length - kept.shape[-1]), value=NOTHING)


def position_points(prompt: Prompt, response: Numbers) -> Float[Tensor, "prompt sample position"]:
    """1 where a position is right."""
    return (response == prompt.sort(-1).values.unsqueeze(1)).float()


def positions_right(prompt: Prompt, response: Numbers) -> Float[Tensor, "prompt sample"]:
    return position_points(prompt, response).sum(-1)


def inclusion_ordering(prompt: Prompt, response: Numbers) -> Float[Tensor, "prompt sample"]:
    included = (prompt[:, None, :, None] == response[:, :, None, :]).any(-1).sum(-1)
    left, right = response[..., :-1], response[..., 1:]
    ordered = ((left <= right) & (left != NOTHING)).sum(-1)
    return (included + ordered).float()


def sorted_exactly(rollouts: Rollouts, space: Space, right: Tensor) -> Bool[Tensor, "prompt sample"]:
    """Is the response the sorted prompt and nothing more, given how many of its positions are right?"""
    exact = right == space.prompt_length
    if space.end is None:
        return exact
    return exact & (rollouts.mask.sum(-1) == space.prompt_length + 1) & ~rollouts.truncated


def check_reward(reward: str) -> str:
    """The reward's name, a user's own with its whole path; an unknown or broken one is refused early."""
    if reward.startswith("python:"):
        if not callable(load_python("--reward", reward)):
            raise Refused(f"--reward {reward}: a reward is a function f(prompt, response) -> number")
        _, file, name = reward.split(":")
        return f"python:{absolute_path(file)}:{name}"
    if reward.startswith("model:"):
        source = f"model:{absolute_path(reward.removeprefix('model:'))}"
        check_reward_run("--reward", source)
        return source
    own, entry = process_part(reward)
    if entry is not None:
        check_reward_run("--reward", entry.source)
        weight = "" if entry.weight == 1 else f"{entry.weight!r}*"
        reward = f"{own}+{weight}{entry.source}" if own else f"{weight}{entry.source}"
    if (own or entry is None) and own not in REWARDS:
        raise Refused(
            f"--reward {reward}: no such reward. There are {', '.join(REWARDS)}, python:FILE:NAME for your own, "
            "model:RUN for a reward model, and process:RUN for one of steps." + nearest(own, REWARDS)
        )
    return reward


def process_part(reward: str) -> tuple[str, RewardSource | None]:
    """positions+0.5*process:RUN as its two parts: a reward of sorting, or nothing, and a process reward, or none."""
    parts = re.fullmatch(r"(?:([^+:*]*)\+)?([^+:]*process(?:-score)?:.+)", reward)
    if parts is None:
        return reward, None
    return parts[1] or "", parse_rewards([absolute_source(parts[2])])[0]


def score_sorting(reward: str, rollouts: Rollouts, space: Space) -> Scores:
    response = response_numbers(rollouts, space)
    right = positions_right(rollouts.prompt, response)
    correct = sorted_exactly(rollouts, space, right)
    if reward.startswith("python:"):
        value, errors = own_reward(load_python("--reward", reward), rollouts, space)
        return Scores(torch.nan_to_num(value).unsqueeze(-1), value.isfinite(), correct, errors)
    if reward.startswith("model:") or "process:" in reward or "process-score:" in reward:
        raise Refused(f"--reward {reward}: a learned reward rates what a run samples; nothing else can ask it here")
    if reward == "process":
        each, tokens = position_points(rollouts.prompt, response), rollouts.mask.shape[-1]
        each = torch.nn.functional.pad(each, (0, max(0, tokens - each.shape[-1])))[..., :tokens]
        return Scores(each, torch.ones_like(correct), correct)
    if reward == "exact":
        value = correct.float()
    elif reward == "positions":
        value = right
    else:
        value = inclusion_ordering(rollouts.prompt, response)
    return Scores(value.unsqueeze(-1), torch.ones_like(correct), correct)


def own_reward(
    function: Callable[..., Any], rollouts: Rollouts, space: Space
) -> tuple[Float[Tensor, "prompt sample"], tuple[str, ...]]:
    """A user's f(prompt, response) on every response: a number, or (number, reason), of which the number counts.

    A reward that raises or is not finite is NaN here and a reason in the list: never a silent 0. The
    response is all of its numbers, without the end token.
    """
    values, errors = [], []
    lengths = rollouts.mask.sum(-1).tolist()
    for prompt, group, cuts in zip(rollouts.prompt.tolist(), rollouts.response.tolist(), lengths, strict=True):
        for tokens, length in zip(group, cuts, strict=True):
            response = [token for token in tokens[:length] if token != space.end]
            try:
                value = function(list(prompt), list(response))
                number = float(value[0] if isinstance(value, tuple) else value)
                why = "" if abs(number) <= LARGEST else f"returned {number}"
            except Exception as error:
                number, why = math.nan, f"{type(error).__name__}: {error}"
            if why:
                errors.append(f"prompt {prompt}, response {response}: {why}")
            values.append(number if not why else math.nan)
    return torch.tensor(values).view(rollouts.mask.shape[:2]), tuple(errors)


def reward_maximum(reward: str, length: int) -> float | None:
    return {
        "exact": 1.0,
        "positions": float(length),
        "process": float(length),
        "inclusion-ordering": 2.0 * length - 1,
    }.get(reward)


def numbers_text(ids: list[int], end: int | None = None) -> str:
    return "[" + " ".join("end" if i == end else str(i) for i in ids) + "]"

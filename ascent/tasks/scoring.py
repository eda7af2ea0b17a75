"""Scores that small and text tasks share: offline data, sums of rewards, and process rewards.

A process reward scores steps, in addition to a task's own reward. A step's reward is on its last token.

    process:RUN         the increase of the score by each step: its score minus that of the step before. They sum to
                        the last score, so that more steps do not earn more
    process-score:RUN   the score of each step itself

All other rewards are on the last token of the response. Small tasks compute the weighted sum of their rewards here;
text tasks do so in `rewards/reward_manager.py`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ascent.core.types import Prompts, Rollouts, Scores, Space, per_token_reward
from ascent.tasks.reward_sources import RewardSource

PerToken = Float[Tensor, "prompt sample token"]
PROCESS_KINDS = ("process", "process-score")


def offline_rollouts(
    prompts: Prompts, response: Tensor, mask: Tensor, space: Space, truncated: Tensor | None = None
) -> Rollouts:
    """Return rollouts of offline data. Their sampler log-probs are unknown, and set to 0."""
    return Rollouts(
        prompt=prompts.prompt,
        problem=prompts.problem,
        response=response,
        mask=mask,
        logp_sampler=torch.zeros(mask.shape),
        limit=space.limit,
        truncated=torch.zeros(mask.shape[:2], dtype=torch.bool) if truncated is None else truncated,
        can_end=space.end is not None,
        sampled=False,
    )


def pad_responses(groups: list[list[list[int]]]) -> tuple[Tensor, Tensor]:
    """Return responses and their mask as tensors `[prompt sample token]`, padded to the longest response."""
    length = torch.tensor([[len(ids) for ids in group] for group in groups])
    width = int(length.max())
    response = torch.tensor([[ids + [0] * (width - len(ids)) for ids in group] for group in groups])
    return response, torch.arange(width) < length.unsqueeze(-1)


def offline_scores(rollouts: Rollouts, pairs: bool) -> Scores:
    """Return the scores of offline data: 1 for demonstrations and chosen responses (the first of a pair), else 0."""
    shape = rollouts.mask.shape[:2]
    reward = torch.ones(*shape, 1)
    if pairs:
        reward[:, 1] = 0.0
    return Scores(reward, torch.ones(shape, dtype=torch.bool), None)


def score_increases(score: PerToken, ends: Bool[Tensor, "prompt sample token"]) -> PerToken:
    """Return the increase of the score at each step end; that of the first is its score. `ends`: last tokens."""
    total, added = torch.zeros_like(score[..., 0]), []
    for value, here in zip(score.unbind(-1), ends.unbind(-1), strict=True):
        added.append(torch.where(here, value - total, 0.0))
        total = torch.where(here, value, total)
    return torch.stack(added, -1)


def mix_rewards(scored: Sequence[tuple[RewardSource, Scores]], rollouts: Rollouts, measured: bool) -> Scores:
    """Return Σ weight · reward, and each reward by name if `measured`. The sum is invalid where any reward failed."""
    (part, scores), *others = scored
    if not others and not measured:
        return replace(scores, reward=part.weight * scores.reward, measures={})
    rewards = [scores.reward for _, scores in scored]
    if any(reward.shape[-1] > 1 for reward in rewards):
        rewards = [per_token_reward(rollouts, reward) for reward in rewards]
    total = torch.stack([part.weight * reward for (part, _), reward in zip(scored, rewards, strict=True)]).sum(0)
    valid = torch.stack([scores.valid for _, scores in scored]).all(0)
    errors = tuple(error for _, scores in scored for error in scores.errors)
    measures = {f"rewards/{part.name}": scores.reward.sum(-1) for part, scores in scored} if measured else {}
    return replace(scored[0][1], reward=total, valid=valid, errors=errors, measures=measures)


def add_process_rewards(
    base: Scores, rollouts: Rollouts, parts: Sequence[tuple[RewardSource, PerToken, Tensor]]
) -> Scores:
    """Add process rewards to `base`; each has scores per token and marks the last tokens of steps."""
    if not parts:
        return base
    reward = per_token_reward(rollouts, base.reward)
    measures = dict(base.measures)
    for part, score, ends in parts:
        earned = score_increases(score, ends) if part.kind == "process" else torch.where(ends, score, 0.0)
        reward = reward + part.weight * earned
        measures[f"rewards/{part.name}"] = earned.sum(-1)
    return replace(base, reward=reward, measures=measures)

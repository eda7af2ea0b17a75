"""What small and text tasks score alike: offline data, which nobody sampled, and process rewards.

A process reward scores steps, on top of a task's own reward. A step's reward lies on its last token.

    process:RUN         what each step adds: its score less that of the step before it. The sum is the last score,
                        so that a response earns nothing by having more steps
    process-score:RUN   the score of each step itself

What else a task rewards lies on the last token of the response. Small tasks mix their rewards by weights here; text
tasks mix theirs where they are graded, in words (`text/grading.py`).
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
    """Rollouts that nobody sampled: their log-probs under whoever wrote them are unknown, and 0 here."""
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
    """Responses [prompt][sample] and their mask as tensors `[prompt sample token]`, as wide as the longest."""
    length = torch.tensor([[len(ids) for ids in group] for group in groups])
    width = int(length.max())
    response = torch.tensor([[ids + [0] * (width - len(ids)) for ids in group] for group in groups])
    return response, torch.arange(width) < length.unsqueeze(-1)


def offline_scores(rollouts: Rollouts, pairs: bool) -> Scores:
    """A demonstration earns 1; of a pair the chosen response, which is the first one, earns 1 and the other 0."""
    shape = rollouts.mask.shape[:2]
    reward = torch.ones(*shape, 1)
    if pairs:
        reward[:, 1] = 0.0
    return Scores(reward, torch.ones(shape, dtype=torch.bool), None)


def gains(score: PerToken, ends: Bool[Tensor, "prompt sample token"]) -> PerToken:
    """What each step adds to the score before it; the first adds all of its own. `ends`: the last tokens of steps."""
    total, added = torch.zeros_like(score[..., 0]), []
    for value, here in zip(score.unbind(-1), ends.unbind(-1), strict=True):
        added.append(torch.where(here, value - total, 0.0))
        total = torch.where(here, value, total)
    return torch.stack(added, -1)


def mix_rewards(scored: Sequence[tuple[RewardSource, Scores]], rollouts: Rollouts, measured: bool) -> Scores:
    """Σ weight · reward, and what each gives by its name, if that is `measured`. Where one failed, the sum did."""
    (part, scores), *more = scored
    if not more and not measured:
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
    """Scores with process rewards added, if there are any, each given by its scores and by where steps end."""
    if not parts:
        return base
    reward = per_token_reward(rollouts, base.reward)
    measures = dict(base.measures)
    for part, score, ends in parts:
        earned = gains(score, ends) if part.kind == "process" else torch.where(ends, score, 0.0)
        reward = reward + part.weight * earned
        measures[f"rewards/{part.name}"] = earned.sum(-1)
    return replace(base, reward=reward, measures=measures)

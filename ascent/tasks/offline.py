"""Offline data as rollouts: responses that were written down, and not sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from ascent.core.types import Prompts, Rollouts, Scores, Space

Groups = list[list[list[int]]]
"""The tokens of each response, [prompt][sample]."""


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
        ends=space.end is not None,
        sampled=False,
    )


def pad_responses(groups: Groups) -> tuple[Tensor, Tensor]:
    """Responses and their mask `[prompt sample token]`, as wide as the longest of them."""
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

"""Preference pairs from a policy: two of its responses to a prompt, labelled by the true reward or by your function.

The file is the JSONL that `ascent dpo` and `ascent reward-model` read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ascent.core.types import Refused, Rollouts, Trouble
from ascent.engines.backend import BoundTask
from ascent.tasks.text.offline.files import write_pairs
from ascent.workflows.policy import LoadedPolicy, run_policy

PairLabel = Callable[[Any, Any, Any], bool | None]
"""From a prompt and two responses: is the first one better? None: nobody can say."""

AT_ONCE = 256
"""Prompts that are answered at once."""
ROUNDS = 20
"""How many times the wanted number of prompts is tried, at most, before too few pairs are an error."""


def make_pairs(
    run: str | Path,
    out: str | Path,
    count: int,
    seed: int = 0,
    label: PairLabel | None = None,
    reward: Any = None,
    step: int | None = None,
) -> Path:
    """`count` pairs of a run's policy on its training prompts, into a file.

    Without `label` the higher reward is chosen: the run's own, or `reward` in its place, for a policy that was
    trained on a learned one. Equal responses, equal rewards and rewards that failed make no pair.
    """
    out = Path(out)
    if count < 1:
        raise Refused(f"--count is {count}: it has to be at least 1")
    if out.exists() or not out.parent.is_dir():
        why = "already there" if out.exists() else f"there is no folder {out.parent}"
        raise Refused(f"{out}: {why}. Choose another file")
    loaded = run_policy(run, step)
    if reward is not None:
        rewards = loaded.backend.reward_setting((reward,) if isinstance(reward, str) else reward)
        loaded = replace(loaded, config=replace(loaded.config, task=replace(loaded.config.task, reward=rewards)))
    task = loaded.task()
    try:
        pairs = list(islice(draw_pairs(loaded, task, count, seed, label), count))
    finally:
        task.close()
    if len(pairs) < count:
        raise Trouble(
            f"only {len(pairs)} of {count} pairs: the policy's two responses to a prompt are mostly equal, or earn the "
            "same. Ask for fewer, or take an earlier checkpoint (--step), which tries more"
        )
    return write_pairs(out, pairs)


def draw_pairs(
    loaded: LoadedPolicy, task: BoundTask, count: int, seed: int, label: PairLabel | None = None
) -> Iterator[dict[str, Any]]:
    """Pairs as they come, from at most ROUNDS × count prompts."""
    generator = torch.Generator().manual_seed(seed + 5_000_011)
    sampler, once = None, min(AT_ONCE, 2 * count)
    for _ in range(-(-ROUNDS * count // once)):
        prompts = task.draw(once, generator)
        if sampler is None or not loaded.backend.one_prompt_length:
            sampler = loaded.sampler(prompts, int(torch.randint(2**31, (1,), generator=generator)))
        rollouts = sampler.generate(prompts, 2)
        prefers = _by_reward(task, rollouts) if label is None else None
        for i in range(len(prompts)):
            chat = task.question(rollouts, i).chat
            tokens = zip(rollouts.response[i], rollouts.mask[i], strict=True)
            first, second = (task.record(ids[mask].tolist()) for ids, mask in tokens)
            if first == second:
                continue
            better = prefers[i] if prefers is not None else label(chat, first, second)  # type: ignore[misc]
            if better is not None:
                chosen, rejected = (first, second) if better else (second, first)
                yield {"prompt": chat, "chosen": chosen, "rejected": rejected}


def _by_reward(task: BoundTask, rollouts: Rollouts) -> list[bool | None]:
    """Does the first response earn more? None where they earn the same, or one has no reward."""
    scores = task.score(rollouts)
    total = scores.reward.sum(-1)
    known = scores.valid.all(-1) & (total[:, 0] != total[:, 1])
    better = (total[:, 0] > total[:, 1]).tolist()
    return [b if k else None for b, k in zip(better, known.tolist(), strict=True)]

"""Preference pairs from a policy: two of its responses to a prompt, labelled by the true reward or by somebody else.

The file is the JSONL that `ascent dpo` and `ascent reward-model` read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ascent.tasks.text import Text
from ascent.tasks.text.preferences import write_pairs
from ascent.tasks.text.tokenized import Tokenized
from ascent.trained.loaded import Loaded, of_run
from ascent.types import Refused, Rollouts, Trouble

Label = Callable[[Any, Any, Any], bool | None]
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
    label: Label | None = None,
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
    loaded = of_run(run, step)
    if reward is not None:
        kept = (reward,) if isinstance(loaded.config.task, Text) and isinstance(reward, str) else reward
        loaded = replace(loaded, config=replace(loaded.config, task=replace(loaded.config.task, reward=kept)))
    task = loaded.task()
    try:
        found = [pair for _, pair in zip(range(count), _pairs(loaded, task, count, seed, label), strict=False)]
    finally:
        getattr(task, "close", lambda: None)()
    if len(found) < count:
        raise Trouble(
            f"only {len(found)} of {count} pairs: the policy's two responses to a prompt are mostly equal, or earn the "
            "same. Ask for fewer, or take an earlier checkpoint (--step), which tries more"
        )
    return write_pairs(out, found)


def _pairs(loaded: Loaded, task: Any, count: int, seed: int, label: Label | None) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed + 5_000_011)
    sampler, once = None, min(AT_ONCE, 2 * count)
    for _ in range(-(-ROUNDS * count // once)):
        prompt = task.draw(once, generator)
        if sampler is None or isinstance(task, Tokenized):
            drawn = int(torch.randint(2**31, (1,), generator=generator))
            sampler = loaded.sampler(prompt, drawn)
        rollouts = sampler.generate(prompt, 2)
        prefers = _by_reward(task, rollouts) if label is None else None
        for i, (asked, first, second) in enumerate(_rows(task, rollouts)):
            if first == second:
                continue
            better = prefers[i] if prefers is not None else label(asked, first, second)  # type: ignore[misc]
            if better is not None:
                chosen, rejected = (first, second) if better else (second, first)
                yield {"prompt": asked, "chosen": chosen, "rejected": rejected}


def _by_reward(task: Any, rollouts: Rollouts) -> list[bool | None]:
    """Does the first response earn more? None where they earn the same, or one has no reward."""
    scores = task.score(rollouts)
    total = scores.reward.sum(-1)
    known = scores.valid.all(-1) & (total[:, 0] != total[:, 1])
    better = (total[:, 0] > total[:, 1]).tolist()
    return [b if k else None for b, k in zip(better, known.tolist(), strict=True)]


def _rows(task: Any, rollouts: Rollouts) -> Iterator[tuple[Any, Any, Any]]:
    """Prompt and two responses: the chat that the policy was shown and words, or numbers without the end."""
    for prompt, group, masks in zip(
        rollouts.prompt.tolist(), rollouts.response.tolist(), rollouts.mask.tolist(), strict=True
    ):
        ids = [[i for i, on in zip(tokens, mask, strict=True) if on] for tokens, mask in zip(group, masks, strict=True)]
        if isinstance(task, Tokenized):
            problem = task.problem(prompt)
            assert problem is not None
            yield task.task.messages(problem), task.words(ids[0]), task.words(ids[1])
        else:
            end = task.space.end
            first, second = ([i for i in response if i != end] for response in ids)
            yield prompt, first, second

"""`ascent label-steps`: what a response is worth after each of its steps, from roll-outs of the policy itself.

    label of a step = mean reward of k continuations of the response up to there

Wang et al. 2024 (Math-Shepherd). It is an unbiased estimate of V, the value of that prefix under the run's policy; the
last step has the response's own reward. Lines are kept as they come: the same command continues after an interruption.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch

from ascent.core.loop import scored
from ascent.core.types import Prompts, Refused, Rollouts, Trouble
from ascent.engines.backend import BoundTask
from ascent.records.folder import read_lines
from ascent.tasks.text.offline.files import SEPARATOR
from ascent.workflows.labels import check_out, progress, side_file
from ascent.workflows.policy import LoadedPolicy, Row, run_policy

AT_ONCE = 8
"""Prompts whose responses are continued together, and written down together."""


class LabelledSteps(NamedTuple):
    """A response in steps, of which only the last has its label."""

    place: int
    """Of its prompt."""
    row: Row
    reward: float
    prefixes: list[list[int]]
    """The response up to the end of each step."""


def label_steps(
    run: str | Path,
    out: str | Path,
    *,
    prompts: int = 64,
    samples: int = 1,
    rollouts: int = 8,
    seed: int = 0,
    separator: str = SEPARATOR,
    show: bool = True,
) -> Path:
    """Responses of a run's policy to training prompts, cut into steps, each step with its label."""
    out = Path(out)
    check_out(out)
    for name, value in (("prompts", prompts), ("samples", samples), ("rollouts", rollouts)):
        if value < 1:
            raise Refused(f"--{name} is {value}: it has to be at least 1")
    loaded = run_policy(run)
    job = json.dumps([str(Path(run).resolve()), loaded.step, prompts, samples, rollouts, seed, separator])
    kept = side_file(out, f"partial-{hashlib.sha256(job.encode()).hexdigest()[:8]}")
    task = loaded.task()
    try:
        drawn = task.draw(prompts, torch.Generator().manual_seed(seed + 6_000_011))
        done = len(read_lines(kept))  # one line for every chunk of prompts
        with progress(prompts, "prompts", show) as advance, open(kept, "ab") as file:
            file.truncate(_whole(kept))
            advance(min(done * AT_ONCE, prompts))
            for chunk in range(done, -(-prompts // AT_ONCE)):
                part = drawn[chunk * AT_ONCE : (chunk + 1) * AT_ONCE]
                labeller = Labeller(loaded, task, part, rollouts, separator, seed + 7_000_003 * (chunk + 1))
                file.write(json.dumps({"rows": labeller.rows(samples)}).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
                advance(len(part))
    finally:
        task.close()
    rows = [row for chunk in read_lines(kept) for row in chunk["rows"]]
    if not rows:
        raise Trouble(f"of {prompts * samples} responses none could be labelled: all were empty, or the reward failed")
    write_rows(out, rows)
    kept.unlink()
    return out


def write_rows(out: Path, rows: list[Row]) -> None:
    """Written aside, flushed, renamed."""
    aside = out.with_name(f".{out.name}.new")
    with open(aside, "w") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, out)


def _whole(path: Path) -> int:
    """Bytes up to the last newline: a torn line is written anew."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


class Labeller:
    """Labels the steps of responses to a few prompts. The seed decides all that is drawn."""

    def __init__(
        self, loaded: LoadedPolicy, task: BoundTask, prompts: Prompts, rollouts: int, separator: str, seed: int
    ):
        self.loaded, self.task, self.prompts, self.count, self.separator = loaded, task, prompts, rollouts, separator
        self.sampler = loaded.sampler(prompts, seed)

    def rows(self, samples: int) -> list[Row]:
        drawn = self.sampler.generate(self.prompts, samples)
        batch, errors = scored(self.task, drawn)
        if errors and not bool(batch.valid.any()):
            raise Trouble(f"the reward failed on every response. The first: {errors[0]}")
        responses: list[LabelledSteps] = []
        for i, s in batch.valid.nonzero().tolist():
            ids = drawn.response[i, s][drawn.mask[i, s]].tolist()
            steps, ends = self.task.cut_steps(ids, self.separator)
            if all(step != "" for step in steps):
                prompt = self.task.question(drawn, i).prompt
                row = {"prompt": prompt, "steps": steps, "cut": bool(drawn.truncated[i, s])}
                reward = float(batch.reward[i, s].sum())
                responses.append(LabelledSteps(i, row, reward, [ids[: end + 1] for end in ends]))
        unlabelled = [(each.place, prefix) for each in responses for prefix in each.prefixes[:-1]]
        values = self.values([place for place, _ in unlabelled], [prefix for _, prefix in unlabelled])
        rows = []
        for _, row, reward, prefixes in responses:
            labels, values = values[: len(prefixes) - 1], values[len(prefixes) - 1 :]
            if all(label is not None for label in labels):
                rows.append(row | {"labels": [*labels, reward], "rollouts": self.count})
        return rows

    def values(self, places: list[int], prefixes: list[list[int]]) -> list[float | None]:
        """The mean reward of continuations of each prefix; None where the reward failed on all of them.

        `places`: of the prompt that each prefix belongs to.
        """
        if not prefixes:
            return []
        batch, _ = scored(self.task, self.continued(self.prompts[torch.tensor(places)], prefixes))
        total, valid = batch.reward.sum(-1), batch.valid
        count = valid.sum(1)
        mean = torch.where(valid, total, 0.0).sum(1) / count.clamp(min=1)
        return [value if some else None for value, some in zip(mean.tolist(), (count > 0).tolist(), strict=True)]

    def continued(self, prompts: Prompts, prefixes: list[list[int]]) -> Rollouts:
        """Whole responses: `count` continuations of every prefix, each up to its end token."""
        loaded = self.loaded
        groups = loaded.backend.continue_responses(
            loaded.config, loaded.policy, prompts, prefixes, self.count, self.sampler
        )
        ends, lengths = self.task.ends, []
        for prefix, group in zip(prefixes, groups, strict=True):  # no end token stands inside a prefix
            last = [next((t + 1 for t in range(len(prefix), len(ids)) if ids[t] in ends), len(ids)) for ids in group]
            lengths.append(last)
        length = torch.tensor(lengths)
        width = int(length.max())
        response = torch.tensor([[(ids + [0] * width)[:width] for ids in group] for group in groups])
        mask = torch.arange(width) < length.unsqueeze(-1)
        final = response.gather(-1, length.unsqueeze(-1) - 1).squeeze(-1)
        truncated = (
            ~torch.isin(final, torch.tensor(sorted(ends))) if ends else torch.zeros_like(length, dtype=torch.bool)
        )
        return Rollouts(
            prompt=prompts.prompt,
            problem=prompts.problem,
            response=response,
            mask=mask,
            logp_sampler=torch.zeros(mask.shape),
            limit=self.task.space.limit,
            truncated=truncated,
            ends=bool(ends),
        )

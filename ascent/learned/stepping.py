"""`ascent label-steps`: what a response is worth after each of its steps, from roll-outs of the policy itself.

    label of a step = mean reward of k continuations of the response up to there

Wang et al. 2024 (Math-Shepherd). It is an unbiased estimate of V, the value of that prefix under the run's policy; the
last step has the response's own reward. Lines are kept as they come: the same command goes on after an interruption.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ascent.learned.candidates import shown_prompt, side_file
from ascent.learned.labelling import check_out, progress
from ascent.learned.process import cut, pieces_in
from ascent.policies.base import Policy, draw
from ascent.records.folder import read_lines
from ascent.tasks.steps import END
from ascent.tasks.text.steps import SEPARATOR
from ascent.tasks.text.tokenized import padded
from ascent.train import scored
from ascent.trained.loaded import Loaded, of_run
from ascent.types import Refused, Rollouts, Trouble

AT_ONCE = 8
"""Prompts whose responses are continued together, and written down together."""

Row = dict[str, Any]


class Prefix(NamedTuple):
    """A response up to the end of one of its steps."""

    prompt: list[int]
    tokens: list[int]


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
    """Responses of a run's policy to so many training prompts, cut into steps, each step with its label."""
    out = Path(out)
    check_out(out)
    for name, value in (("prompts", prompts), ("samples", samples), ("rollouts", rollouts)):
        if value < 1:
            raise Refused(f"--{name} is {value}: it has to be at least 1")
    loaded = of_run(run)
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
        getattr(task, "close", lambda: None)()
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
    """Labels the steps of responses to a few prompts; the seed decides all that is drawn."""

    def __init__(self, loaded: Loaded, task: Any, prompt: Tensor, rollouts: int, separator: str, seed: int):
        self.loaded, self.task, self.prompt, self.count, self.separator = loaded, task, prompt, rollouts, separator
        self.sampler: Any = loaded.sampler(prompt, seed)

    def rows(self, samples: int) -> list[Row]:
        drawn = self.sampler.generate(self.prompt, samples)
        batch, errors = scored(self.task, drawn, None)
        if errors and not bool(batch.valid.any()):
            raise Trouble(f"the reward failed on every response. The first: {errors[0]}")
        found: list[tuple[int, Row, float, list[list[int]]]] = []
        for i, s in batch.valid.nonzero().tolist():
            ids = drawn.response[i, s][drawn.mask[i, s]].tolist()
            steps, ends = self._steps(ids)
            if all(step != "" for step in steps):
                row = {"prompt": self._prompt(i), "steps": steps, "cut": bool(drawn.truncated[i, s])}
                found.append((i, row, float(batch.reward[i, s].sum()), [ids[: end + 1] for end in ends]))
        values = self.values([Prefix(self._ids(i), p) for i, _, _, prefixes in found for p in prefixes[:-1]])
        rows = []
        for _, row, reward, prefixes in found:
            mine, values = values[: len(prefixes) - 1], values[len(prefixes) - 1 :]
            if all(value is not None for value in mine):
                rows.append(row | {"labels": [*mine, reward], "rollouts": self.count})
        return rows

    def values(self, prefixes: list[Prefix]) -> list[float | None]:
        """The mean reward of continuations of each; None where the reward failed on all of them."""
        if not prefixes:
            return []
        batch, _ = scored(self.task, self.continued(prefixes), None)
        total, valid = batch.reward.sum(-1), batch.valid
        count = valid.sum(1)
        mean = torch.where(valid, total, 0.0).sum(1) / count.clamp(min=1)
        return [value if some else None for value, some in zip(mean.tolist(), (count > 0).tolist(), strict=True)]

    def continued(self, prefixes: list[Prefix]) -> Rollouts:
        """Whole responses: every prefix with so many continuations."""
        prompt = padded([prefix.prompt for prefix in prefixes])
        tokens = [prefix.tokens for prefix in prefixes]
        config = self.loaded.config
        if isinstance(self.loaded.policy, Policy):
            generator = self.sampler.generator
            response = continuations(self.loaded.policy, prompt, tokens, self.count, config.temperature, generator)
            return self._rollouts(prompt, response.tolist(), [len(t) for t in tokens])
        limit = config.task.max_tokens
        self.sampler.limit = limit - min(map(len, tokens))
        drawn = self.sampler.generate(padded([p.prompt + p.tokens for p in prefixes]), self.count)
        self.sampler.limit = limit
        groups = [
            [(head + ids[mask].tolist())[:limit] for ids, mask in zip(group, masks, strict=True)]
            for head, group, masks in zip(tokens, drawn.response, drawn.mask, strict=True)
        ]
        return self._rollouts(prompt, groups, [0] * len(groups))

    def _rollouts(self, prompt: Tensor, groups: list[list[list[int]]], begin: list[int]) -> Rollouts:
        """Responses up to their end tokens; what stands before `begin` cannot be one."""
        space, limit = self.task.space, self.task.space.limit
        ends = getattr(self.loaded.policy, "ends", frozenset() if space.end is None else {space.end})
        lengths = [
            [next((t + 1 for t in range(first, len(ids)) if ids[t] in ends), len(ids)) for ids in group]
            for group, first in zip(groups, begin, strict=True)
        ]
        length = torch.tensor(lengths)
        width = int(length.max())
        response = torch.tensor([[(ids + [0] * width)[:width] for ids in group] for group in groups])
        mask = torch.arange(width) < length.unsqueeze(-1)
        last = response.gather(-1, length.unsqueeze(-1) - 1).squeeze(-1)
        cut_off = ~torch.isin(last, torch.tensor(sorted(ends))) if ends else torch.zeros_like(length, dtype=torch.bool)
        return Rollouts(prompt, response, mask, torch.zeros(mask.shape), limit, cut_off, ends=bool(ends))

    # ---- words and numbers

    def _ids(self, i: int) -> list[int]:
        return [token for token in self.prompt[i].tolist() if token >= 0]

    def _prompt(self, i: int) -> Any:
        if isinstance(self.loaded.policy, Policy):
            return self._ids(i)
        return shown_prompt(self.task.task, self.task.problem(self._ids(i)))

    def _steps(self, ids: list[int]) -> tuple[list[Any], list[int]]:
        """The steps of a response, and the places of their last tokens."""
        if isinstance(self.loaded.policy, Policy):
            end = self.task.space.end
            return [END if token == end else token for token in ids], list(range(len(ids)))
        steps = cut(pieces_in(self.task, ids)[0], self.separator)
        return [step.text for step in steps], [step.last for step in steps]


@torch.no_grad()
def continuations(
    policy: Policy,
    prompt: Int[Tensor, "row position"],
    prefixes: list[list[int]],
    count: int,
    temperature: float,
    generator: torch.Generator,
) -> Int[Tensor, "row sample token"]:
    """Prefixes of a small policy's responses, each drawn on to the limit so many times. No cache: they are short."""
    limit = policy.space.limit
    response = torch.zeros(len(prefixes), count, limit, dtype=torch.long)
    for row, tokens in enumerate(prefixes):
        response[row, :, : len(tokens)] = torch.tensor(tokens)
    length = torch.tensor([len(tokens) for tokens in prefixes])
    for t in range(int(length.min()), limit):
        logits: Float[Tensor, "row sample vocab"] = policy.logits(prompt, response)[:, :, t].expand(-1, count, -1)
        token, _ = draw(logits.flatten(0, 1), temperature, generator)
        fresh = (length <= t)[:, None]
        response[:, :, t] = torch.where(fresh, token.view(len(prefixes), count), response[:, :, t])
    return response

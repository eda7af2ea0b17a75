"""`ascent eval`: a policy on held-out prompts, greedy and sampled, pass@k, majority vote and best of k by reward."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ascent.core.protocols import Sampler
from ascent.core.types import Prompts, Refused, Trouble
from ascent.engines.backend import BoundTask
from ascent.records.statistics import PromptMean, pass_at, powers, prompt_mean
from ascent.records.text_tables import table, wrapped
from ascent.settings import configure
from ascent.workflows.policy import LoadedPolicy, Row, model_policy, run_policy, scored_rows

MEASURES = ("strict", "lenient", "reward")


@dataclass(frozen=True)
class Evaluation:
    """The result: `results["pass@4"]["strict"]` is a mean over prompts with its 95 % interval."""

    about: dict[str, Any]
    rows: list[Row]
    """Every response with its score and reason; `sample` is −1 for the greedy one."""
    errors: list[str]
    """Why rewards failed: such responses are in no number, and in no vote."""
    results: dict[str, dict[str, PromptMean]]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For scripts."""
        results = {
            name: {measure: value._asdict() for measure, value in row.items()} for name, row in self.results.items()
        }
        errors = {"count": len(self.errors), "examples": self.errors[:5]}
        return {**self.about, "results": results, **self.shape(), "errors": errors, "seconds": self.seconds}

    def shape(self) -> dict[str, Any]:
        """How long responses are, and how many the limit cut off."""
        count = len(self.rows)
        cut, length = sum(row["truncated"] for row in self.rows), sum(row["length"] for row in self.rows)
        return {"responses": count, "truncated": cut / count, "mean_length": length / count}

    def text(self) -> str:
        """For a terminal."""
        about, shape = self.about, self.shape()
        origin = about["model"] if about["run"] is None else f"{about['run']}, step {about['step']}"
        many = about["samples"] > 1
        drawn = f", {about['samples']} samples each at temperature {about['temperature']:g}" if many else ""
        spelled = {"mean": "mean score", "majority": f"majority of {about['samples']}"}
        spelled["best"] = f"best of {about['samples']} by reward"
        shown = [m for m in MEASURES if any(m in row for row in self.results.values())]
        lines = [[spelled.get(n, n), *(_cell(row.get(m)) for m in shown)] for n, row in self.results.items()]
        notes = ["In brackets: 95 % intervals over prompts, Wilson's for shares and the bootstrap's for means."]
        cut = f", {shape['truncated']:.0%} of them cut off at the limit" if about["ends"] else ""
        notes.append(
            f"{shape['responses']:,} responses of {shape['mean_length']:.1f} tokens{cut}; {self.seconds:.1f} s."
        )
        if self.errors:
            notes.append(
                f"The reward failed on {len(self.errors)} responses, which are left out of every number. The first: "
                f"{self.errors[0]}"
            )
        head = f"{origin}: {about['task']}, {about['prompts']} held-out prompts{drawn}"
        return "\n".join([head, "", *table(["", *shown], lines), "", *map(wrapped, notes)])

    def write(self, path: str | Path) -> Path:
        """All responses as Parquet, one row each."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = Path(path)
        aside = path.with_name(f".{path.name}.new")
        pq.write_table(pa.Table.from_pylist(self.rows), aside)
        os.replace(aside, path)
        return path


def evaluate(
    source: Any,
    *,
    model: str | Path | None = None,
    task: Any = None,
    step: int | None = None,
    best: bool = False,
    prompts: int | None = None,
    samples: int = 1,
    seed: int = 0,
    show: bool = True,
    temperature: float | None = None,
    max_tokens: int | None = None,
    device: str | None = None,
    rows: int | None = None,
    **settings: Any,
) -> Evaluation:
    """A run (its newest checkpoint, that of a step, or the best), or a task with a bare model, on held-out prompts.

    ascent.evaluate("runs/mine", best=True, samples=16)
    ascent.evaluate("reasoning-gym:chain_sum", model="folder", samples=16, options='{"max_terms": 2}')

    `task` (with its settings) evaluates a run on another task than its own.
    """
    changes = {"temperature": temperature, "max_tokens": max_tokens, "device": device, "rows": rows}
    if model is not None:
        return evaluate_policy(model_policy(str(model), source, settings, **changes), prompts, samples, seed, show)
    if task is None and settings:
        raise Refused(f"{', '.join(settings)}: settings of a task, and none was named; a run brings its own")
    other = None if task is None else configure(task, settings).task
    return evaluate_policy(run_policy(source, step, best, other, **changes), prompts, samples, seed, show)


def evaluate_policy(loaded: LoadedPolicy, prompts: int | None, samples: int, seed: int, show: bool) -> Evaluation:
    """Greedy responses to held-out prompts and, for more than one sample, `samples` sampled ones."""
    for name, value in (("prompts", prompts), ("samples", samples)):
        if value is not None and value < 1:
            raise Refused(f"--{name} is {value}: it has to be at least 1")
    begin, task = time.perf_counter(), loaded.task()
    try:
        held_out = task.held_out(prompts or loaded.config.eval_prompts)
        sampler = loaded.sampler(held_out, seed)
        passes = [True, False] if samples > 1 else [True]
        every: list[Row] = []
        errors: list[str] = []
        with _progress(len(held_out) * (1 + samples * (samples > 1)), show) as advance:
            for greedy in passes:
                rows, failed = _ask(task, sampler, held_out, 1 if greedy else samples, greedy, advance)
                every, errors = every + rows, errors + failed
    finally:
        task.close()
    if not any(row["valid"] for row in every):
        raise Trouble(f"the reward failed on every one of {len(every)} responses. The first: {errors[0]}")
    about = loaded.about() | {
        "prompts": len(held_out),
        "samples": samples,
        "seed": seed,
        "ends": task.space.end is not None,
    }
    return Evaluation(about, every, errors, results(every), time.perf_counter() - begin)


def _ask(
    task: BoundTask, sampler: Sampler, prompts: Prompts, samples: int, greedy: bool, advance: Callable[[int], None]
) -> tuple[list[Row], list[str]]:
    """Responses to all prompts, a part of them at a time."""
    at_once = max(1, 2 * sampler.rows // samples)
    every: list[Row] = []
    errors: list[str] = []
    for start in range(0, len(prompts), at_once):
        try:
            rollouts = sampler.generate(prompts[start : start + at_once], samples, greedy=greedy)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise Trouble(f"out of memory: lower --rows or --max-tokens. It said: {error}") from None
        rows, failed = scored_rows(task, rollouts)
        for i, row in enumerate(rows):
            row["problem"] = start + i // samples
            row["sample"] = -1 if greedy else row["sample"]
        every, errors = every + rows, errors + failed
        advance(len(rows))
    return every, errors


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; inside, call it with the number of responses that are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("responses"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.advance(task, done)


def _cell(value: PromptMean | None) -> str:
    if value is None:
        return "·"
    return f"{value.value:.3f}" + (f" [{value.low:.2f}, {value.high:.2f}]" if value.low is not None else "")


# ---- numbers ----------------------------------------------------------------------------------------


def results(rows: list[Row]) -> dict[str, dict[str, PromptMean]]:
    """Every measure over prompts. A response whose reward failed is in none; neither is a prompt without others.

    majority    the first response that gives the answer which most give (ties: the one seen first)
    best        the first response with the highest reward
    """
    valid = [row for row in rows if row["valid"]]
    measures = {"greedy": _means([[row] for row in valid if row["sample"] < 0])}
    groups: dict[int, list[Row]] = {}
    for row in valid:
        if row["sample"] >= 0:
            groups.setdefault(row["problem"], []).append(row)
    every = list(groups.values())
    samples = max((row["sample"] for row in rows), default=-1) + 1
    if not every:
        return measures
    measures["mean"] = _means(every)
    for k in powers(samples):
        measures[f"pass@{k}"] = _passes(k, [group for group in every if len(group) >= k])
    measures["majority"] = _means([[group[majority([r["answer"] for r in group])]] for group in every])
    measures["best"] = _means([[max(group, key=lambda row: row["reward"])] for group in every])
    return {name: row for name, row in measures.items() if row}


def majority(answers: Sequence[str]) -> int:
    """Which response stands for the vote. An empty answer has no vote, unless there is no other."""
    votes = Counter(answer for answer in answers if answer)  # in the order in which they were first seen
    return answers.index(max(votes, key=lambda answer: votes[answer])) if votes else 0


def _means(groups: list[list[Row]]) -> dict[str, PromptMean]:
    """The mean over prompts of the mean over their responses."""
    return _prompt_means({m: [_mean(group, m) for group in groups if group[0][m] is not None] for m in MEASURES})


def _mean(group: list[Row], measure: str) -> float:
    return sum(float(row[measure]) for row in group) / len(group)


def _passes(k: int, groups: list[list[Row]]) -> dict[str, PromptMean]:
    """pass@k of each prompt that has k responses."""

    def of(measure: str) -> list[float]:
        scored = [[row[measure] for row in group] for group in groups if group[0][measure] is not None]
        return [pass_at(k, len(group), sum(group)) for group in scored]

    return _prompt_means({measure: of(measure) for measure in ("strict", "lenient")})


def _prompt_means(values: dict[str, list[float]]) -> dict[str, PromptMean]:
    means = {name: prompt_mean(scores) for name, scores in values.items()}
    return {name: value for name, value in means.items() if value is not None}

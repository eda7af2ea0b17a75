"""`ascent eval`: evaluate a policy on held-out prompts: greedy, mean, pass@k, majority vote and best of k."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ascent.build.backend import BoundTask
from ascent.core.errors import RunError
from ascent.core.protocols import RolloutEngine
from ascent.core.types import Prompts, check_counts
from ascent.runs.confidence_intervals import PromptMean, mean_over_prompts, pass_at_k, powers_of_two
from ascent.runs.display.terminal import progress, table, wrapped
from ascent.runs.recorded_conversation import MIN_SHOWN_WAIT, POLICY, format_tool_calls, tool_counts
from ascent.runs.rollout_files import write_parquet
from ascent.workflows.loaded_policy import LoadedPolicy, Row, resolve_policy, response_lines, scored_rows

MEASURES = ("strict", "lenient", "reward")


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: `results["pass@4"]["strict"]` is a mean over prompts with its 95 % interval."""

    about: dict[str, Any]
    rows: list[Row]
    """Every response with its score and reason; `sample` is −1 for the greedy response."""
    errors: list[str]
    """Errors of failed rewards. Their responses are excluded from all results and votes."""
    results: dict[str, dict[str, PromptMean]]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the evaluation as JSON."""
        results = {
            name: {measure: value._asdict() for measure, value in row.items()} for name, row in self.results.items()
        }
        errors = {"count": len(self.errors), "examples": self.errors[:5]}
        return {**self.about, "results": results, **self.length_statistics(), "errors": errors, "seconds": self.seconds}

    def length_statistics(self) -> dict[str, Any]:
        """Return lengths, the truncated fraction and, for conversations, turns, waiting and tool calls."""
        count = len(self.rows)
        truncated, length = sum(row["truncated"] for row in self.rows), sum(row["length"] for row in self.rows)
        statistics = {"responses": count, "truncated": truncated / count, "mean_length": length / count}
        conversations = [[turn for turn in row.get("turns", ()) if turn["role"] == POLICY] for row in self.rows]
        if not any(conversations):
            return statistics
        calls = sum((Counter(tool_counts(turn["note"])) for turns in conversations for turn in turns), Counter())
        waited = sum(turn["seconds"] or 0.0 for turns in conversations for turn in turns)
        statistics |= {"mean_turns": sum(map(len, conversations)) / count, "mean_waited": waited / count}
        return statistics | ({"calls": dict(calls)} if calls else {})

    def text(self, color: bool = False) -> str:
        """Format the evaluation for a terminal."""
        about, statistics = self.about, self.length_statistics()
        origin = about["model"] if about["run"] is None else f"{about['run']}, step {about['step']}"
        is_sampled = about["samples"] > 1
        sampling = f", {about['samples']} samples each at temperature {about['temperature']:g}" if is_sampled else ""
        titles = {"mean": "mean score", "majority": f"majority of {about['samples']}"}
        titles["best"] = f"best of {about['samples']} by reward"
        measures = [m for m in MEASURES if any(m in row for row in self.results.values())]
        lines = [[titles.get(n, n), *(_cell(row.get(m)) for m in measures)] for n, row in self.results.items()]
        notes = ["In brackets: 95 % intervals over prompts (Wilson for fractions, bootstrap for means)."]
        truncated = f", {statistics['truncated']:.0%} of them truncated" if about["ends"] else ""
        notes.append(
            f"{statistics['responses']:,} responses of {statistics['mean_length']:.1f} tokens{truncated}; "
            f"{self.seconds:.1f} s."
        )
        if "mean_turns" in statistics:
            waited = (
                f", {statistics['mean_waited']:.2g} s of waiting" if statistics["mean_waited"] >= MIN_SHOWN_WAIT else ""
            )
            called = f" {format_tool_calls(statistics['calls'])} of tools in all." if "calls" in statistics else ""
            notes.append(f"{statistics['mean_turns']:.2f} turns per response{waited}.{called}")
        if self.errors:
            notes.append(
                f"The reward failed on {len(self.errors)} responses, which are excluded. The first error: "
                f"{self.errors[0]}"
            )
        head = f"{origin}: {about['task']}, {about['prompts']} held-out prompts{sampling}"
        first = ["", "The first response:", *response_lines(self.rows[0], color)] if "mean_turns" in statistics else []
        return "\n".join([head, "", *table(["", *measures], lines), "", *map(wrapped, notes), *first])

    def write(self, path: str | Path) -> Path:
        """Write all responses to a Parquet file, one row each."""
        write_parquet(Path(path), self.rows, self.about["samples"])
        return Path(path)


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
    min_tokens: int | None = None,
    stop: Sequence[str] | None = None,
    device: str | None = None,
    rows: int | None = None,
    **settings: Any,
) -> Evaluation:
    """Evaluate a run (its newest checkpoint, that of a step, or the best) or a bare model on held-out prompts.

    ascent.evaluate("runs/mine", best=True, samples=16)
    ascent.evaluate("reasoning-gym:chain_sum", model="folder", samples=16, options='{"max_terms": 2}')

    `task` (with its settings) evaluates a run on another task.
    """
    changes: dict[str, Any] = {"temperature": temperature, "device": device, "rows": rows}
    changes |= {"max_tokens": max_tokens, "min_tokens": min_tokens, "stop": stop}
    run, task = (source, task) if model is None else (None, source)
    return evaluate_policy(
        resolve_policy(run, model, task, settings, step, best, **changes), prompts, samples, seed, show
    )


def evaluate_policy(loaded: LoadedPolicy, prompts: int | None, samples: int, seed: int, show: bool) -> Evaluation:
    """Score greedy responses to held-out prompts and, for more than one sample, `samples` sampled ones."""
    check_counts(prompts=prompts, samples=samples)
    rows: list[Row] = []
    errors: list[str] = []
    begin = time.perf_counter()
    with closing(loaded.task()) as task:
        held_out = task.held_out(prompts or loaded.config.eval_prompts)
        sampler = loaded.sampler(held_out, seed)
        parts = [_responses(task, sampler, held_out, 1, greedy=True)]
        if samples > 1:
            parts.append(_responses(task, sampler, held_out, samples, greedy=False))
        with progress(len(held_out) * (1 + samples * (samples > 1)), "responses", show) as advance:
            for part, failed in chain(*parts):
                rows += part
                errors += failed
                advance(len(part))
        ends = task.space.end is not None
    if not any(row["valid"] for row in rows):
        raise RunError(f"the reward failed on all {len(rows)} responses. The first error: {errors[0]}")
    about = {"prompts": len(held_out), "samples": samples, "seed": seed, "ends": ends}
    return Evaluation(loaded.about() | about, rows, errors, results(rows), time.perf_counter() - begin)


def _responses(
    task: BoundTask, sampler: RolloutEngine, prompts: Prompts, samples: int, greedy: bool
) -> Iterator[tuple[list[Row], list[str]]]:
    """Yield scored responses and reward errors, a part of the prompts at a time."""
    at_once = max(1, 2 * sampler.rows // samples)
    for start in range(0, len(prompts), at_once):
        try:
            rollouts = sampler.generate(prompts[start : start + at_once], samples, greedy=greedy)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise RunError(f"out of memory: lower --rows or --max-tokens ({error})") from None
        rows, failed = scored_rows(task, rollouts)
        for i, row in enumerate(rows):
            row["problem"] = start + i // samples
            row["sample"] = -1 if greedy else row["sample"]
        yield rows, failed


def _cell(value: PromptMean | None) -> str:
    if value is None:
        return "·"
    return f"{value.value:.3f}" + (f" [{value.low:.2f}, {value.high:.2f}]" if value.low is not None else "")


def results(rows: list[Row]) -> dict[str, dict[str, PromptMean]]:
    """Return every measure over prompts. Responses with failed rewards, and prompts with no others, are excluded.

    majority    the first response with the most frequent answer (ties: the answer seen first)
    best        the first response with the highest reward
    """
    valid = [row for row in rows if row["valid"]]
    measures = {"greedy": _means([[row] for row in valid if row["sample"] < 0])}
    groups: dict[int, list[Row]] = {}
    for row in valid:
        if row["sample"] >= 0:
            groups.setdefault(row["problem"], []).append(row)
    if not groups:
        return measures
    every = list(groups.values())
    measures["mean"] = _means(every)
    for k in powers_of_two(max(row["sample"] for row in rows) + 1):
        enough = [group for group in every if len(group) >= k]
        measures[f"pass@{k}"] = _over_prompts(enough, partial(_pass_at, k), ("strict", "lenient"))
    measures["majority"] = _means([[group[majority([r["answer"] for r in group])]] for group in every])
    measures["best"] = _means([[max(group, key=lambda row: row["reward"])] for group in every])
    return {name: row for name, row in measures.items() if row}


def majority(answers: Sequence[str]) -> int:
    """Return the index of the response that wins the majority vote. Empty answers count only if there is no other."""
    votes = Counter(answer for answer in answers if answer)  # in order of first appearance
    return answers.index(max(votes, key=lambda answer: votes[answer])) if votes else 0


def _means(groups: list[list[Row]]) -> dict[str, PromptMean]:
    return _over_prompts(groups, lambda values: sum(values) / len(values), MEASURES)


def _pass_at(k: int, right: list[float]) -> float:
    return pass_at_k(k, len(right), int(sum(right)))


def _over_prompts(
    groups: list[list[Row]], score: Callable[[list[float]], float], measures: Sequence[str]
) -> dict[str, PromptMean]:
    """Return the mean over prompts of `score` of their responses' values, for each measure that has values."""
    means = {}
    for measure in measures:
        values = [[float(row[measure]) for row in group] for group in groups if group[0][measure] is not None]
        means[measure] = mean_over_prompts([score(of_prompt) for of_prompt in values])
    return {measure: mean for measure, mean in means.items() if mean is not None}

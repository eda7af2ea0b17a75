"""Responses as Parquet, one file per step and one row per response: sampled ones, and held-out answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import compress
from pathlib import Path
from typing import Any

from ascent.core.protocols import Stepped, Task
from ascent.core.types import Batch, Refused
from ascent.records.folder import HELD_OUT, SAMPLED
from ascent.records.pieces import Pieces

ANSWERS = 64
"""Held-out prompts whose answers are recorded, where not all are."""
ROWS = 64
"""About this many rows are in one row group of a file."""
MORE = "They are recorded at every evaluation (--eval-every), except with --record-rollouts none"
Row = dict[str, Any]


def path_of(folder: Path, step: int, where: str = SAMPLED) -> Path:
    return folder / where / f"step_{step:06d}.parquet"


def write_rollouts(
    folder: Path,
    step: int,
    batch: Batch,
    minis: list[Batch],
    updates: list[Stepped],
    which: str,
    task: Task,
    pieces: Pieces | None = None,
) -> None:
    """`which` groups (a number, or all), with their log-probs at every update of the step."""
    groups = batch.prompt.shape[0]
    if which != "all":
        groups = min(groups, int(which))
    assert batch.index is not None and batch.logp_old is not None and batch.advantage is not None
    by_update, entropy = _by_update(minis, updates, groups), _first_entropy(minis, updates, groups)
    rows = _rows(step, batch, groups, task, pieces or Pieces(task))
    present = _Present(batch, groups)
    for row in rows:
        p, s = row["group"], row["sample"]
        row["logp_update"] = [i for i, _ in by_update[p]]
        row["logp"] = [present(p, s, logp[s]) for _, logp in by_update[p]]
        row |= {} if entropy[p] is None else {"entropy": present(p, s, entropy[p][s])}
    _save(path_of(folder, step), rows, batch.mask.shape[1])


def write_answers(folder: Path, step: int, batch: Batch, which: str, task: Task, pieces: Pieces | None = None) -> None:
    """The greedy answers of an evaluation: all of them, or those to the first prompts."""
    prompts = batch.prompt.shape[0] if which == "all" else min(batch.prompt.shape[0], ANSWERS)
    rows = _rows(step, batch, prompts, task, pieces or Pieces(task))
    _save(path_of(folder, step, HELD_OUT), rows, batch.mask.shape[1])


def _rows(step: int, batch: Batch, groups: int, task: Task, pieces: Pieces) -> list[Row]:
    """The rows of the responses of the first groups, as they were sampled and scored."""
    columns: dict[str, Any] = {
        "prompt": batch.prompt,
        "response": batch.response,
        "reward": batch.reward,
        "valid": batch.valid,
        "correct": batch.correct,
        "truncated": batch.truncated,
        "logp_sampler": batch.logp_sampler,
        "logp_old": batch.logp_old,
        "advantage": batch.advantage,
    }
    columns |= {"logp_ref": batch.logp_ref, "value": batch.value, "turn": batch.turn}
    if bool((batch.present & ~batch.mask).any()):  # which tokens are actions, where observations are among them
        columns["mask"] = batch.mask
    columns = {name: tensor for name, tensor in columns.items() if tensor is not None}
    lists = {name: tensor[:groups].tolist() for name, tensor in columns.items()}
    per_token = [name for name in lists if name.startswith(("logp", "advantage", "value", "mask", "turn"))]
    measures = [] if batch.measures is None else batch.measures[:groups].tolist()
    failed, rows, present = _failed(batch), [], _Present(batch, groups)
    for p in range(groups):
        for s in range(batch.mask.shape[1]):
            row: Row = {"step": step, "group": p, "sample": s}
            row["prompt"] = [i for i in lists["prompt"][p] if i >= 0]
            row["prompt_text"] = task.text(row["prompt"])
            row["response"] = present(p, s, lists["response"][p][s])
            row["response_text"] = task.text(row["response"])
            row["pieces"] = pieces(row["response"], row["response_text"])
            row["status"] = "failed" if failed(p, s) else "ok"
            row |= {name: lists[name][p][s] for name in ("valid", "correct", "truncated") if name in lists}
            row["reward"] = sum(lists["reward"][p][s])
            row |= {name: measures[p][s][i] for i, name in enumerate(batch.measured)}
            row |= {} if batch.notes is None else {"reason": batch.notes[p, s]}
            row |= {name: present(p, s, lists[name][p][s]) for name in per_token}
            rows.append(row)
    return rows


class _Present:
    """What a row has of a response: the tokens that are there, with their numbers."""

    def __init__(self, batch: Batch, groups: int):
        self.present = batch.present[:groups].tolist()

    def __call__(self, p: int, s: int, values: list[Any]) -> list[Any]:
        """The values at the tokens that are there; a number of the whole response stays one."""
        where = self.present[p][s]
        return values[: sum(where)] if len(values) == 1 else list(compress(values, where))


def _save(final: Path, rows: list[Row], samples: int) -> None:
    """Written aside and renamed; each row group has whole groups, so that one can be read without the others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    aside = final.with_name(f".{final.name}")
    pq.write_table(pa.Table.from_pylist(rows), aside, row_group_size=samples * max(1, ROWS // samples))
    os.replace(aside, final)


def _by_update(minis: list[Batch], updates: list[Stepped], groups: int) -> list[list[tuple[int, Any]]]:
    """For each prompt the updates that used it, with the log-probs of its samples there."""
    found: list[list[tuple[int, Any]]] = [[] for _ in range(groups)]
    for i, (mini, update) in enumerate(zip(minis, updates, strict=True)):
        assert mini.index is not None
        for row, prompt in enumerate(mini.index.tolist()):
            if prompt < groups:
                found[prompt].append((i, update.logp[row].tolist()))
    return found


def _first_entropy(minis: list[Batch], updates: list[Stepped], groups: int) -> list[Any]:
    """For each prompt the entropy at the tokens of its samples, at the first update that used it."""
    found: list[Any] = [None] * groups
    for mini, update in zip(minis, updates, strict=True):
        assert mini.index is not None
        for row, prompt in enumerate(mini.index.tolist()):
            if prompt < groups and found[prompt] is None and update.entropy is not None:
                found[prompt] = update.entropy[row].tolist()
    return found


def _failed(batch: Batch) -> Callable[[int, int], bool]:
    """Did the reward of this response fail? Where no group has signal, all are left out though few or none failed."""
    valid, errors = batch.valid.tolist(), set(batch.errors)
    unused = not batch.valid.any() and len(batch.errors) < batch.valid.numel()

    def failed(p: int, s: int) -> bool:
        return not valid[p][s] and (not unused or (batch.notes is not None and batch.notes[p, s] in errors))

    return failed


def read_rollouts(folder: Path, step: int, where: str = SAMPLED) -> list[Row]:
    """The recorded rows of a step; refused, with a list of the recorded steps, if there are none."""
    import pyarrow.parquet as pq

    path = path_of(folder, step, where)
    if not path.exists():
        steps = sorted(int(p.stem.split("_")[1]) for p in (folder / where).glob("step_*.parquet"))
        there = ", ".join(map(str, steps[:20])) + (" …" if len(steps) > 20 else "")
        raise Refused(
            f"--step {step}: {folder} has no {'rollouts' if where == SAMPLED else 'held-out answers'} of that step. "
            + (f"Recorded are {there}. " if steps else "None were recorded. ")
            + ("Train with --record-rollouts all to keep every step" if where == SAMPLED else MORE)
        )
    return pq.read_table(path).to_pylist()

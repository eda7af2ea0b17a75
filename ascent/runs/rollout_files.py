"""Recorded responses, sampled ones and greedy answers to held-out prompts: one Parquet file per step and set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from ascent.core.errors import ConfigError
from ascent.core.protocols import UpdateResult
from ascent.core.types import Batch
from ascent.runs.foreign_runs import foreign_rows, reader_of
from ascent.runs.parquet_reader import Parquet, is_plain, open_parquet
from ascent.runs.recorded_conversation import TURN_REWARD, TURN_SECONDS
from ascent.runs.run_folder import STEP_FOLDERS, unlinked
from ascent.runs.untrusted_files import FileCache, naming_file, numbered_files

SAMPLED, HELD_OUT = SETS = ("sampled", "held-out")
FOLDERS = dict(zip(SETS, STEP_FOLDERS, strict=True))
NUM_RECORDED_ANSWERS = 64
"""Held-out prompts whose answers are recorded, where not all are."""
ROW_GROUP_ROWS = 64
"""About this many rows are in one row group of a file, and are decoded together."""
REQUIRED_COLUMNS = ("group", "sample", "prompt_text", "response_text", "reward")
TOKEN_COLUMNS = ("logp_sampler", "logp_old", "advantage", "logp_ref", "value", "turn")
Row = dict[str, Any]
_tables = FileCache(256_000_000)
"""The light columns of the last files, in bytes."""


def rollout_path(folder: Path, step: int, which: str = SAMPLED) -> Path:
    return folder / FOLDERS[which] / f"step_{step:06d}.parquet"


def write_rollouts(
    folder: Path,
    step: int,
    batch: Batch,
    minis: list[Batch],
    updates: list[UpdateResult],
    most: str,
    pieces: TokenTexts,
) -> None:
    """The first groups (`most` of them, or all), with their log-probs at every update of the step."""
    groups = batch.prompt.shape[0] if most == "all" else min(batch.prompt.shape[0], int(most))
    assert batch.prompt_index is not None and batch.logp_old is not None and batch.advantage is not None
    logp: list[list[tuple[int, Any]]] = [[] for _ in range(groups)]
    entropy: dict[int, Any] = {}
    for i, (mini, update) in enumerate(zip(minis, updates, strict=True)):
        assert mini.prompt_index is not None
        for place, prompt in enumerate(mini.prompt_index.tolist()):
            if prompt < groups:
                logp[prompt].append((i, update.logp[place].tolist()))
                if update.entropy is not None and prompt not in entropy:
                    entropy[prompt] = update.entropy[place].tolist()
    rows, there = sampled_rows(step, batch, groups, pieces), batch.present[:groups].tolist()
    for row in rows:
        p, s = row["group"], row["sample"]
        row["logp_update"] = [i for i, _ in logp[p]]
        row["logp"] = [_at(there[p][s], values[s]) for _, values in logp[p]]
        row |= {"entropy": _at(there[p][s], entropy[p][s])} if p in entropy else {}
    write_parquet(rollout_path(folder, step), rows, batch.mask.shape[1])


def write_answers(folder: Path, step: int, batch: Batch, most: str, pieces: TokenTexts) -> None:
    """The greedy answers of an evaluation: all of them, or those to the first prompts."""
    prompts = batch.prompt.shape[0] if most == "all" else min(batch.prompt.shape[0], NUM_RECORDED_ANSWERS)
    write_parquet(rollout_path(folder, step, HELD_OUT), sampled_rows(step, batch, prompts, pieces), batch.mask.shape[1])


def sampled_rows(step: int, batch: Batch, groups: int, pieces: TokenTexts) -> list[Row]:
    """The rows of the responses of the first groups, as they were sampled and scored."""
    columns = {name: getattr(batch, name) for name in ("valid", "correct", "truncated", *TOKEN_COLUMNS)}
    if bool((batch.present & ~batch.mask).any()):  # which tokens are actions, where observations are among them
        columns["mask"] = batch.mask
    if bool((batch.mask & (batch.version >= 0) & (batch.version < step)).any()):  # older policies drew some tokens
        columns["version"] = batch.version
    lists = {name: tensor[:groups].tolist() for name, tensor in columns.items() if tensor is not None}
    prompts, responses, rewards = (t[:groups].tolist() for t in (batch.prompt, batch.response, batch.reward))
    measures = [] if batch.measures is None else batch.measures[:groups].tolist()
    there, errors, rows = batch.present[:groups].tolist(), set(batch.errors), list[Row]()
    paid: dict[str, list[Any]] = {}
    if batch.turn is not None:
        paid = {TURN_REWARD: rewards} | (
            {} if batch.environment_seconds is None else {TURN_SECONDS: batch.environment_seconds[:groups].tolist()}
        )
    masks = batch.mask[:groups].tolist() if paid else []
    # Where no group has signal, all responses are left out, though the reward of few or none failed.
    unused = not batch.valid.any() and len(batch.errors) < batch.valid.numel()
    for p in range(groups):
        for s in range(batch.mask.shape[1]):
            present, note = there[p][s], None if batch.notes is None else batch.notes[p, s]
            row: Row = {"step": step, "group": p, "sample": s}
            row["prompt"] = [i for i in prompts[p] if i >= 0]
            row["prompt_text"] = pieces.text(row["prompt"])
            row["response"] = _at(present, responses[p][s])
            row["response_text"] = pieces.text(row["response"])
            row["pieces"] = pieces(row["response"], row["response_text"])
            failed = not lists["valid"][p][s] and (not unused or note in errors)
            row["status"] = "failed" if failed else "ok"
            row |= {name: lists[name][p][s] for name in ("valid", "correct", "truncated") if name in lists}
            row["reward"] = sum(rewards[p][s])
            row |= {
                name: value if (value := measures[p][s][i]) == value else None
                for i, name in enumerate(batch.measure_names)
            }
            row |= {} if batch.notes is None else {"reason": note}
            row |= {
                name: _at(present, lists[name][p][s]) for name in (*TOKEN_COLUMNS, "mask", "version") if name in lists
            }
            row |= {name: _by_turn(lists["turn"][p][s], values[p][s], masks[p][s]) for name, values in paid.items()}
            rows.append(row)
    return rows


def _by_turn(turns: list[int], values: list[float], mask: list[bool]) -> list[float]:
    """Sum per-token numbers over each turn that has drawn tokens; a number of the whole response is its last turn's."""
    sums = [0.0] * (1 + max(compress(turns, mask), default=-1))
    if len(values) == 1:
        return [*sums[:-1], values[0]] if sums else []
    for turn, value in compress(zip(turns, values, strict=True), mask):
        sums[turn] += value
    return sums


def _at(present: list[bool], values: list[Any]) -> list[Any]:
    """The values at the tokens that are there; a number of the whole response stays one."""
    return values[: sum(present)] if len(values) == 1 else list(compress(values, present))


def write_parquet(final: Path, rows: list[Row], samples: int) -> None:
    """Written aside and renamed; each row group has whole groups, so that one can be read without the others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    aside = unlinked(final.with_name(f".{final.name}"))
    pq.write_table(pa.Table.from_pylist(rows), aside, row_group_size=samples * max(1, ROW_GROUP_ROWS // samples))
    os.replace(aside, final)


REPLACEMENT_CHARACTER = "\ufffd"
"""What a decoder writes for bytes that are not a character, or not yet one."""
MAX_CHARACTER_TOKENS = 16
"""Maximum number of tokens that are decoded together for one character."""


class TokenTexts:
    """Cuts responses into the texts of their tokens, which together are the response's own text.

    A token need not be text. In a byte-level vocabulary it may be part of a character, and others lose the space
    before them when they are decoded alone. A character goes to the token that completes it, a space to the word
    after it. The text of a single token is decoded once and remembered.
    """

    def __init__(self, task: Any):
        self.text = task.text
        self.alone: dict[int, str] = {}

    def __call__(self, ids: Sequence[int], whole: str) -> list[str]:
        """A piece of `whole` for each of these tokens; it is empty for tokens that `whole` leaves out."""
        for token in ids:
            if token not in self.alone:
                self.alone[token] = self.text([token])
        pieces = [self.alone[token] for token in ids]
        if "".join(pieces) == whole:
            return pieces
        if (words := _listed(pieces, whole)) is not None:
            return words
        if any(REPLACEMENT_CHARACTER in piece for piece in pieces):
            pieces = self._completed(ids, pieces)
        return _with_spaces(pieces, whole) or pieces

    def _completed(self, ids: Sequence[int], pieces: list[str]) -> list[str]:
        """Tokens that are parts of characters, decoded together with those after them."""
        completed: list[str] = []
        start, before = 0, ""
        for end, piece in enumerate(pieces, 1):
            if end == start + 1 and REPLACEMENT_CHARACTER not in piece:
                completed.append(piece)
                start = end
                continue
            text = self.text(list(ids[start:end]))
            over = not text.endswith(REPLACEMENT_CHARACTER) or end == len(pieces) or end - start >= MAX_CHARACTER_TOKENS
            sure = text if over else text.rstrip(REPLACEMENT_CHARACTER)
            completed.append(sure[len(before) :])
            start, before = (end, "") if over else (start, max(before, sure, key=len))
        return completed


def _listed(pieces: list[str], whole: str) -> list[str] | None:
    """[1 0 2] cut into [1, 0 and 2]: a list of a small task; None if the text is not one."""
    words = whole.split(" ")
    if len(words) != len(pieces) or any(w.strip("[]") != p.strip("[]") for w, p in zip(words, pieces, strict=True)):
        return None
    return [words[0], *(f" {word}" for word in words[1:])]


def _with_spaces(pieces: list[str], whole: str) -> list[str] | None:
    """The pieces with the spaces of the text; None if they differ by more than spaces."""
    spaced, at = [], 0
    for piece in pieces:
        begin = at
        if not whole.startswith(piece, at):
            piece = piece.lstrip()
            while piece and begin < len(whole) and whole[begin].isspace():
                begin += 1
            if not whole.startswith(piece, begin):
                return None
        spaced.append(whole[at : begin + len(piece)])
        at = begin + len(piece)
    if spaced and not whole[at:].strip():
        spaced[-1] += whole[at:]
        at = len(whole)
    return spaced if at == len(whole) else None


def read_rollouts(folder: Path, step: int, which: str = SAMPLED) -> list[Row]:
    """The recorded rows of a step; refused, with a list of the recorded steps, if there are none."""
    path = rollout_path(folder, step, which)
    if not path.exists():
        steps = recorded_steps(folder, which=which)
        there = ", ".join(map(str, steps[:20])) + (" …" if len(steps) > 20 else "")
        what, more = "rollouts", "Train with --record-rollouts all to keep every step"
        if which == HELD_OUT:
            what = "held-out answers"
            more = "They are recorded at every evaluation (--eval-every), except with --record-rollouts none"
        listed = f"Recorded are {there}." if steps else "None were recorded."
        raise ConfigError(f"--step {step}: {folder} has no {what} of that step. {listed} {more}")
    with open_parquet(path, folder) as file:
        _refuse_columns(path, file.schema)
        return file.read(file.schema.names).to_pylist()


def recorded_files(folder: Path, kind: str, which: str = SAMPLED) -> dict[int, Path]:
    """The files of any run by step. Other libraries record sampled responses only."""
    if kind == "ascent":
        return numbered_files(folder / FOLDERS[which], r"step_(\d{6,12})\.parquet")
    return reader_of(folder)[1] if which == SAMPLED else {}


def recorded_steps(folder: Path, kind: str = "ascent", which: str = SAMPLED) -> list[int]:
    """The steps with recorded responses, ascending."""
    return list(recorded_files(folder, kind, which))


def summary_rows(
    folder: Path, kind: str, step: int, columns: tuple[str, ...] | None = None, which: str = SAMPLED
) -> list[Row]:
    """The rows of a step without their values per token; `length` and `advantage` are one number each."""
    if kind != "ascent":
        rows = foreign_rows(folder, step)
        return [row | {"length": None, "advantage": (row.get("advantage") or [None])[0]} for row in rows]
    path = rollout_path(folder, step, which)
    if not path.exists():
        raise _unrecorded(step)
    with naming_file(path):
        table = _tables(path, lambda: _light_table(folder, path, columns), columns, weight=lambda t: t.nbytes)
        return table.to_pylist()


def _unrecorded(step: int) -> ConfigError:
    return ConfigError(f"step {step}: nothing was recorded for it")


def _light_table(folder: Path, path: Path, columns: tuple[str, ...] | None) -> Any:
    """The columns with one value per row, and two that are computed from lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    with open_parquet(path, folder) as file:
        _refuse_columns(path, file.schema)
        fields = [f for f in file.schema if is_plain(f.type) and f.name not in ("parts", "said")]
        table = file.read(
            [f.name for f in fields if not pa.types.is_nested(f.type) and (columns is None or f.name in columns)]
        )
        for name, source, one in (("length", "response", pc.list_value_length), ("advantage", "advantage", _means)):
            if columns is None and source in file.schema.names:
                table = table.append_column(name, one(file.read([source]).column(source)))
        for name in ("group", "sample"):
            if name in table.column_names and table.column(name).null_count:
                raise ConfigError(f"{path.name} has rows without a {name}: it is not one of ours")
    return table


def _refuse_columns(path: Path, schema: Any) -> None:
    """Refuse a file without the columns of ours, or with others under their names."""
    from pyarrow import types

    missing = [name for name in REQUIRED_COLUMNS if schema.names.count(name) != 1]
    if missing:
        raise ConfigError(f"{path.name} has no column {', '.join(missing)}, or several: it is not one of ours")
    for name in REQUIRED_COLUMNS:
        kind = schema.field(name).type
        if name.endswith("_text"):
            fits = types.is_string(kind) or types.is_large_string(kind)
        else:
            fits = types.is_integer(kind) or (name == "reward" and types.is_floating(kind))
        if not fits and not types.is_null(kind):
            raise ConfigError(f"{path.name} has a column {name} of the type {str(kind)[:40]}: it is not one of ours")


def _means(lists: Any) -> Any:
    """The mean of each list; NaN where it is empty."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    column = lists.combine_chunks()
    count = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    values = pc.list_flatten(column).to_numpy(zero_copy_only=False)
    rows = pc.list_parent_indices(column).to_numpy(zero_copy_only=False)
    with np.errstate(all="ignore"):
        return pa.array(np.bincount(rows, weights=values, minlength=len(column)) / count)


def full_rows(
    folder: Path, kind: str, step: int, groups: Iterable[int], sample: int | None = None, which: str = SAMPLED
) -> list[Row]:
    """The whole rows of some groups. Parts of the file without them are not decoded."""
    wanted = set(groups)
    if kind != "ascent":
        return [r for r in foreign_rows(folder, step) if r["group"] in wanted and sample in (None, r["sample"])]
    import pyarrow as pa
    import pyarrow.compute as pc

    path, rows = rollout_path(folder, step, which), list[Row]()
    if not path.exists():
        raise _unrecorded(step)
    with open_parquet(path, folder) as file:
        _refuse_columns(path, file.schema)
        names = [field.name for field in file.schema if is_plain(field.type)]
        for batch in file.batches(names, _with(file, wanted), ROW_GROUP_ROWS):
            keep = pc.is_in(batch.column("group"), pa.array(sorted(wanted), pa.int64()))
            if sample is not None:
                keep = pc.and_(keep, pc.equal(batch.column("sample"), sample))
            if pc.any(keep).as_py():
                rows += batch.filter(keep).to_pylist()
    return rows


def _with(file: Parquet, wanted: set[int]) -> list[int]:
    """The row groups that may contain one of these groups, according to the file's statistics."""
    leaves = [file.metadata.schema.column(i).path for i in range(file.metadata.num_columns)]
    at, parts = leaves.index("group"), []
    for i in range(file.metadata.num_row_groups):
        about = file.metadata.row_group(i).column(at).statistics
        if about is None or not about.has_min_max or any(about.min <= group <= about.max for group in wanted):
            parts.append(i)
    return parts

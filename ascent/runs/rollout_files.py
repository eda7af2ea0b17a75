"""Write and read recorded responses: one Parquet file per step for sampled ones and for held-out greedy answers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

from ascent.core.errors import ConfigError
from ascent.core.protocols import UpdateResult
from ascent.core.types import Batch
from ascent.runs.foreign_runs import find_reader, foreign_rows
from ascent.runs.parquet_reader import ParquetReader, is_primitive_or_list, open_parquet
from ascent.runs.recorded_conversation import TURN_REWARD, TURN_SECONDS
from ascent.runs.run_folder import STEP_FOLDERS, unlinked
from ascent.runs.untrusted_files import FileCache, naming_file, numbered_files

SAMPLED, HELD_OUT = SETS = ("sampled", "held-out")
FOLDERS = dict(zip(SETS, STEP_FOLDERS, strict=True))
NUM_RECORDED_ANSWERS = 64
"""Number of held-out prompts whose answers are recorded, unless all are."""
ROW_GROUP_ROWS = 64
"""Approximate number of rows per row group of a file, which are decoded together."""
REQUIRED_COLUMNS = ("group", "sample", "prompt_text", "response_text", "reward")
TOKEN_COLUMNS = ("logp_sampler", "logp_old", "advantage", "logp_ref", "value", "turn")
Row = dict[str, Any]
_tables_cache = FileCache(256_000_000)
"""The scalar columns of the last files that were read; its size is in bytes."""


def rollout_path(folder: Path, step: int, which: str = SAMPLED) -> Path:
    return folder / FOLDERS[which] / f"step_{step:06d}.parquet"


def write_rollouts(
    folder: Path,
    step: int,
    batch: Batch,
    minis: list[Batch],
    updates: list[UpdateResult],
    max_groups: str,
    pieces: TokenTexts,
) -> None:
    """Write the first groups (`max_groups` of them, or "all") with their log-probs at every update of the step."""
    groups = batch.prompt.shape[0] if max_groups == "all" else min(batch.prompt.shape[0], int(max_groups))
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
    rows, present = sampled_rows(step, batch, groups, pieces), batch.present[:groups].tolist()
    for row in rows:
        p, s = row["group"], row["sample"]
        row["logp_update"] = [i for i, _ in logp[p]]
        row["logp"] = [_at_present_tokens(present[p][s], values[s]) for _, values in logp[p]]
        row |= {"entropy": _at_present_tokens(present[p][s], entropy[p][s])} if p in entropy else {}
    write_parquet(rollout_path(folder, step), rows, batch.mask.shape[1])


def write_answers(folder: Path, step: int, batch: Batch, max_groups: str, pieces: TokenTexts) -> None:
    """Write the greedy answers of an evaluation: all of them, or those to the first prompts."""
    prompts = batch.prompt.shape[0] if max_groups == "all" else min(batch.prompt.shape[0], NUM_RECORDED_ANSWERS)
    write_parquet(rollout_path(folder, step, HELD_OUT), sampled_rows(step, batch, prompts, pieces), batch.mask.shape[1])


def sampled_rows(step: int, batch: Batch, groups: int, pieces: TokenTexts) -> list[Row]:
    """Return one row per response of the first groups."""
    columns = {name: getattr(batch, name) for name in ("valid", "correct", "truncated", *TOKEN_COLUMNS)}
    if bool((batch.present & ~batch.mask).any()):  # there are observations
        columns["mask"] = batch.mask
    if bool(
        (batch.mask & (batch.version >= 0) & (batch.version < step)).any()
    ):  # some tokens were sampled by older policies
        columns["version"] = batch.version
    lists = {name: tensor[:groups].tolist() for name, tensor in columns.items() if tensor is not None}
    prompts, responses, rewards = (t[:groups].tolist() for t in (batch.prompt, batch.response, batch.reward))
    measures = [] if batch.measures is None else batch.measures[:groups].tolist()
    present_lists, errors, rows = batch.present[:groups].tolist(), set(batch.errors), list[Row]()
    by_turn: dict[str, list[Any]] = {}
    if batch.turn is not None:
        by_turn = {TURN_REWARD: rewards} | (
            {} if batch.environment_seconds is None else {TURN_SECONDS: batch.environment_seconds[:groups].tolist()}
        )
    masks = batch.mask[:groups].tolist() if by_turn else []
    # If no group has a signal, all responses are invalid, although few or no rewards failed.
    unused = not batch.valid.any() and len(batch.errors) < batch.valid.numel()
    for p in range(groups):
        for s in range(batch.mask.shape[1]):
            present, note = present_lists[p][s], None if batch.notes is None else batch.notes[p, s]
            row: Row = {"step": step, "group": p, "sample": s}
            row["prompt"] = [i for i in prompts[p] if i >= 0]
            row["prompt_text"] = pieces.text(row["prompt"])
            row["response"] = _at_present_tokens(present, responses[p][s])
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
                name: _at_present_tokens(present, lists[name][p][s])
                for name in (*TOKEN_COLUMNS, "mask", "version")
                if name in lists
            }
            row |= {
                name: _sum_by_turn(lists["turn"][p][s], values[p][s], masks[p][s]) for name, values in by_turn.items()
            }
            rows.append(row)
    return rows


def _sum_by_turn(turns: list[int], values: list[float], mask: list[bool]) -> list[float]:
    """Sum values per token over each turn with sampled tokens; a single value belongs to the last turn."""
    sums = [0.0] * (1 + max(compress(turns, mask), default=-1))
    if len(values) == 1:
        return [*sums[:-1], values[0]] if sums else []
    for turn, value in compress(zip(turns, values, strict=True), mask):
        sums[turn] += value
    return sums


def _at_present_tokens(present: list[bool], values: list[Any]) -> list[Any]:
    """Return the values at the present tokens. A single value of the whole response is kept."""
    return values[: sum(present)] if len(values) == 1 else list(compress(values, present))


def write_parquet(final: Path, rows: list[Row], samples: int) -> None:
    """Write a Parquet file atomically. Row groups contain complete groups, so a group is read without the others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    aside = unlinked(final.with_name(f".{final.name}"))
    pq.write_table(pa.Table.from_pylist(rows), aside, row_group_size=samples * max(1, ROW_GROUP_ROWS // samples))
    os.replace(aside, final)


REPLACEMENT_CHARACTER = "\ufffd"
"""The character that decoders return for invalid or incomplete bytes."""
MAX_CHARACTER_TOKENS = 16
"""Maximum number of tokens that are decoded together for one character."""


class TokenTexts:
    """Splits the text of a response into the texts of its tokens.

    In a byte-level vocabulary a token may be a part of a character, and some tokens lose the space before them when
    they are decoded alone. A character is assigned to the token that completes it, and a space to the word after it.
    The texts of single tokens are cached.
    """

    def __init__(self, task: Any):
        self.text = task.text
        self.single_token_texts: dict[int, str] = {}

    def __call__(self, ids: Sequence[int], whole: str) -> list[str]:
        """Return the part of `whole` for each token; it is empty for tokens that `whole` omits."""
        for token in ids:
            if token not in self.single_token_texts:
                self.single_token_texts[token] = self.text([token])
        pieces = [self.single_token_texts[token] for token in ids]
        if "".join(pieces) == whole:
            return pieces
        if (words := _split_list_text(pieces, whole)) is not None:
            return words
        if any(REPLACEMENT_CHARACTER in piece for piece in pieces):
            pieces = self._merge_characters(ids, pieces)
        return _with_spaces(pieces, whole) or pieces

    def _merge_characters(self, ids: Sequence[int], pieces: list[str]) -> list[str]:
        """Decode tokens that are parts of characters together with the tokens after them."""
        completed: list[str] = []
        start, before = 0, ""
        for end, piece in enumerate(pieces, 1):
            if end == start + 1 and REPLACEMENT_CHARACTER not in piece:
                completed.append(piece)
                start = end
                continue
            text = self.text(list(ids[start:end]))
            is_complete = (
                not text.endswith(REPLACEMENT_CHARACTER) or end == len(pieces) or end - start >= MAX_CHARACTER_TOKENS
            )
            known = text if is_complete else text.rstrip(REPLACEMENT_CHARACTER)
            completed.append(known[len(before) :])
            start, before = (end, "") if is_complete else (start, max(before, known, key=len))
        return completed


def _split_list_text(pieces: list[str], whole: str) -> list[str] | None:
    """Split the text of a list of a small task, such as [1 0 2], into [1, 0 and 2]; None for other texts."""
    words = whole.split(" ")
    if len(words) != len(pieces) or any(w.strip("[]") != p.strip("[]") for w, p in zip(words, pieces, strict=True)):
        return None
    return [words[0], *(f" {word}" for word in words[1:])]


def _with_spaces(pieces: list[str], whole: str) -> list[str] | None:
    """Add the spaces of the text to the pieces; None if they differ by more than spaces."""
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
    """Read the recorded rows of a step; if there are none, raise ConfigError with the recorded steps."""
    path = rollout_path(folder, step, which)
    if not path.exists():
        steps = recorded_steps(folder, which=which)
        listed = ", ".join(map(str, steps[:20])) + (" …" if len(steps) > 20 else "")
        kind, hint = "rollouts", "Train with --record-rollouts all to keep every step"
        if which == HELD_OUT:
            kind = "held-out answers"
            hint = "They are recorded at every evaluation (--eval-every), except with --record-rollouts none"
        recorded = f"Recorded are {listed}." if steps else "None were recorded."
        raise ConfigError(f"--step {step}: {folder} has no {kind} of that step. {recorded} {hint}")
    with open_parquet(path, folder) as file:
        _check_columns(path, file.schema)
        return file.read(file.schema.names).to_pylist()


def recorded_files(folder: Path, kind: str, which: str = SAMPLED) -> dict[int, Path]:
    """Return the recorded files of a run of any library by step. Other libraries record sampled responses only."""
    if kind == "ascent":
        return numbered_files(folder / FOLDERS[which], r"step_(\d{6,12})\.parquet")
    return find_reader(folder)[1] if which == SAMPLED else {}


def recorded_steps(folder: Path, kind: str = "ascent", which: str = SAMPLED) -> list[int]:
    """Return the steps with recorded responses, ascending."""
    return list(recorded_files(folder, kind, which))


def summary_rows(
    folder: Path, kind: str, step: int, columns: tuple[str, ...] | None = None, which: str = SAMPLED
) -> list[Row]:
    """Read the rows of a step without values per token; `length` and `advantage` are single numbers."""
    if kind != "ascent":
        rows = foreign_rows(folder, step)
        return [row | {"length": None, "advantage": (row.get("advantage") or [None])[0]} for row in rows]
    path = rollout_path(folder, step, which)
    if not path.exists():
        raise _not_recorded_error(step)
    with naming_file(path):
        table = _tables_cache(
            path, lambda: _read_scalar_columns(folder, path, columns), columns, weight=lambda t: t.nbytes
        )
        return table.to_pylist()


def _not_recorded_error(step: int) -> ConfigError:
    return ConfigError(f"step {step}: nothing was recorded for it")


def _read_scalar_columns(folder: Path, path: Path, columns: tuple[str, ...] | None) -> Any:
    """Read the columns with one value per row, and compute `length` and `advantage` from lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    with open_parquet(path, folder) as file:
        _check_columns(path, file.schema)
        fields = [f for f in file.schema if is_primitive_or_list(f.type) and f.name not in ("parts", "extra")]
        table = file.read(
            [f.name for f in fields if not pa.types.is_nested(f.type) and (columns is None or f.name in columns)]
        )
        for name, source, reduce in (
            ("length", "response", pc.list_value_length),
            ("advantage", "advantage", _list_means),
        ):
            if columns is None and source in file.schema.names:
                table = table.append_column(name, reduce(file.read([source]).column(source)))
        for name in ("group", "sample"):
            if name in table.column_names and table.column(name).null_count:
                raise ConfigError(f"{path.name} has rows without a {name}: Ascent did not write it")
    return table


def _check_columns(path: Path, schema: Any) -> None:
    """Raise ConfigError for a file without the required columns, or with unexpected types."""
    from pyarrow import types

    missing = [name for name in REQUIRED_COLUMNS if schema.names.count(name) != 1]
    if missing:
        raise ConfigError(f"{path.name} has no column {', '.join(missing)}, or several: Ascent did not write it")
    for name in REQUIRED_COLUMNS:
        kind = schema.field(name).type
        if name.endswith("_text"):
            fits = types.is_string(kind) or types.is_large_string(kind)
        else:
            fits = types.is_integer(kind) or (name == "reward" and types.is_floating(kind))
        if not fits and not types.is_null(kind):
            raise ConfigError(f"{path.name} has a column {name} of the type {str(kind)[:40]}: Ascent did not write it")


def _list_means(lists: Any) -> Any:
    """Return the mean of each list; NaN if it is empty."""
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
    """Read the complete rows of some groups. Row groups without them are not decoded."""
    wanted = set(groups)
    if kind != "ascent":
        return [r for r in foreign_rows(folder, step) if r["group"] in wanted and sample in (None, r["sample"])]
    import pyarrow as pa
    import pyarrow.compute as pc

    path, rows = rollout_path(folder, step, which), list[Row]()
    if not path.exists():
        raise _not_recorded_error(step)
    with open_parquet(path, folder) as file:
        _check_columns(path, file.schema)
        names = [field.name for field in file.schema if is_primitive_or_list(field.type)]
        for batch in file.batches(names, _row_groups_with(file, wanted), ROW_GROUP_ROWS):
            keep = pc.is_in(batch.column("group"), pa.array(sorted(wanted), pa.int64()))
            if sample is not None:
                keep = pc.and_(keep, pc.equal(batch.column("sample"), sample))
            if pc.any(keep).as_py():
                rows += batch.filter(keep).to_pylist()
    return rows


def _row_groups_with(file: ParquetReader, wanted: set[int]) -> list[int]:
    """Return the row groups that may contain one of these groups, according to the file's statistics."""
    leaves = [file.metadata.schema.column(i).path for i in range(file.metadata.num_columns)]
    at, parts = leaves.index("group"), []
    for i in range(file.metadata.num_row_groups):
        about = file.metadata.row_group(i).column(at).statistics
        if about is None or not about.has_min_max or any(about.min <= group <= about.max for group in wanted):
            parts.append(i)
    return parts

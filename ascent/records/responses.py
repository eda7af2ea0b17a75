"""The recorded responses of any run, ours or another library's: its recorded steps, and their rows.

There are two sets: sampled responses, and greedy answers to held-out prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ascent.core.types import Refused
from ascent.records.foreign import files_by_step, foreign_rows
from ascent.records.reading import FileCache, numbered_files
from ascent.tasks.base import error_line

SAMPLED, HELD_OUT = SETS = ("sampled", "held-out")
FOLDERS = {SAMPLED: "rollouts", HELD_OUT: "held_out"}
NEEDED = ("group", "sample", "prompt_text", "response_text", "reward")
AT_ONCE = 64
"""Rows that are decoded together when whole rows are read."""
Row = dict[str, Any]
_tables = FileCache(256_000_000)
"""The light columns of the last files, in bytes."""


def recorded_files(folder: Path, kind: str, which: str = SAMPLED) -> dict[int, Path]:
    """The files of any run by step. Other libraries record sampled responses only."""
    if kind == "ascent":
        return numbered_files(folder / FOLDERS[which], r"step_(\d{6,12})\.parquet")
    return files_by_step(folder) if which == SAMPLED else {}


def recorded_steps(folder: Path, kind: str = "ascent", which: str = SAMPLED) -> list[int]:
    """The steps with recorded responses, ascending."""
    return list(recorded_files(folder, kind, which))


def _path_of(folder: Path, step: int, which: str = SAMPLED) -> Path:
    path = folder / FOLDERS[which] / f"step_{step:06d}.parquet"
    if not path.exists():
        raise Refused(f"step {step}: nothing was recorded for it")
    return path


def light_rows(
    folder: Path, kind: str, step: int, columns: tuple[str, ...] | None = None, which: str = SAMPLED
) -> list[Row]:
    """The rows of a step without their values per token; `length` and `advantage` are one number each."""
    if kind != "ascent":
        return [_light(row) for row in foreign_rows(folder, step)]
    path = _path_of(folder, step, which)
    try:
        table = _tables(path, lambda: _read(path, columns), columns, weight=lambda t: t.nbytes)
    except FileNotFoundError:
        raise Refused(f"{path.name} is gone: the run was set back") from None
    return table.to_pylist()


def _light(row: Row) -> Row:
    credit = row.get("advantage")
    return row | {"length": None, "advantage": credit[0] if credit else None}


def _read(path: Path, columns: tuple[str, ...] | None) -> Any:
    """The columns with one value per row, and two that are computed from lists."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            refuse_columns(path, schema, NEEDED)
            names = [
                f.name for f in schema if not pa.types.is_nested(f.type) and (columns is None or f.name in columns)
            ]
            table = file.read(columns=names)
            if columns is None and "response" in schema.names:
                ids = file.read(columns=["response"]).column("response")
                table = table.append_column("length", pc.list_value_length(ids))
            if columns is None and "advantage" in schema.names:
                credit = file.read(columns=["advantage"]).column("advantage")
                table = table.append_column("advantage", _means(credit))
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise torn_file(path, error) from None
    return table


def refuse_columns(path: Path, schema: Any, needed: Iterable[str]) -> None:
    """Refuse a file without these columns, or with others under their names."""
    from pyarrow import types

    held = {field.name: field.type for field in schema}
    missing = [name for name in needed if name not in held]
    if missing:
        raise Refused(f"{path.name} has no column {', '.join(missing)}: it is not one of ours")
    for name in needed:
        kind = held[name]
        if name.endswith("_text"):
            fits = types.is_string(kind) or types.is_large_string(kind)
        else:
            fits = types.is_integer(kind) or (name == "reward" and types.is_floating(kind))
        if not fits and not types.is_null(kind):
            raise Refused(f"{path.name} has a column {name} of the type {str(kind)[:40]}: it is not one of ours")


def torn_file(path: Path, error: Exception) -> Refused:
    return Refused(f"{path.name} is not a whole Parquet file, torn or still being copied: {error_line(error)[:160]}")


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


def whole_rows(
    folder: Path, kind: str, step: int, groups: Iterable[int], sample: int | None = None, which: str = SAMPLED
) -> list[Row]:
    """The whole rows of some groups. Parts of the file without them are not decoded."""
    wanted = set(groups)
    if kind != "ascent":
        return [r for r in foreign_rows(folder, step) if r["group"] in wanted and sample in (None, r["sample"])]
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    path, rows = _path_of(folder, step, which), list[Row]()
    try:
        with pq.ParquetFile(path) as file:
            if not {"group", "sample"} <= set(file.schema_arrow.names):
                raise Refused(f"{path.name} has no columns group and sample: it is not one of ours")
            for batch in file.iter_batches(AT_ONCE, row_groups=_with(file, wanted)):
                keep = pc.is_in(batch.column("group"), pa.array(sorted(wanted), pa.int64()))
                if sample is not None:
                    keep = pc.and_(keep, pc.equal(batch.column("sample"), sample))
                if pc.any(keep).as_py():
                    rows += batch.filter(keep).to_pylist()
    except FileNotFoundError:
        raise Refused(f"{path.name} is gone: the run was set back") from None
    except (OSError, pa.ArrowException) as error:
        raise torn_file(path, error) from None
    return rows


def _with(file: Any, wanted: set[int]) -> list[int]:
    """The row groups that may contain one of these groups, according to the file's statistics."""
    leaves = [file.metadata.schema.column(i).path for i in range(file.metadata.num_columns)]
    at, parts = leaves.index("group"), []
    for i in range(file.num_row_groups):
        about = file.metadata.row_group(i).column(at).statistics
        if about is None or not about.has_min_max or any(about.min <= group <= about.max for group in wanted):
            parts.append(i)
    return parts

"""Many JSON lines at once into columns of numbers, with a place for what is wrong with them."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import numpy as np


class Parsed(NamedTuple):
    """Some lines: their steps, the byte at which each begins, and a column a metric (NaN: not measured)."""

    steps: np.ndarray
    starts: np.ndarray
    columns: dict[str, np.ndarray]
    nonfinite: list[tuple[str, float, str]]
    """Metric, step, and what it was: nan, inf, -inf."""
    bad: list[str]
    """Lines that cannot be read, in words."""


NESTED = 3
"""Objects and lists in a line, on average; Ascent's own have at most two."""
FARTHEST = 1e15
"""The largest step."""
NOTHING = Parsed(np.empty(0), np.empty(0, np.int64), {}, [], [])


def parse(data: bytes, offset: int = 0, number: int = 0) -> Parsed:
    """Whole lines that begin at byte `offset` of their file and follow upon `number` others."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
    if not len(ends):
        return NOTHING
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    nested = data.count(b"[") + data.count(b"{") > NESTED * len(ends)  # pyarrow's reader has no bound, and would crash
    found = None if nested else _columns(data, len(ends))
    if found is None:
        return _one_by_one([json_of(line) for line in data.split(b"\n")[: len(ends)]], starts + offset, number)
    columns, raw, marked = found
    steps = columns.pop("step")
    nonfinite = _marked(data, starts, ends) if marked else []
    nonfinite += [(name, float(steps[i]), str(value)) for name, i, value in raw]
    return Parsed(steps, starts + offset, columns, nonfinite, [])


def _columns(data: bytes, lines: int) -> tuple[dict[str, np.ndarray], list[tuple[str, int, float]], bool] | None:
    """By pyarrow, on all cores; what is written as NaN or Infinity (metric, line, value); and are there marks of such?

    None where a line is not as all others are, and each has to be looked at.
    """
    import pyarrow as pa
    import pyarrow.json

    try:
        table = pyarrow.json.read_json(pa.BufferReader(data))
    except pa.ArrowInvalid:
        return None
    if table.num_rows != lines or "step" not in table.column_names or table["step"].null_count:
        return None
    found, raw = {}, []
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_integer(column.type):
            found[name] = column.cast(pa.float64(), safe=False).to_numpy()
        elif pa.types.is_floating(column.type):
            values = found[name] = column.to_numpy()
            if np.count_nonzero(~np.isfinite(values)) > column.null_count:
                odd = np.flatnonzero(column.is_valid().to_numpy() & ~np.isfinite(values))
                raw += [(name, int(i), float(values[i])) for i in odd]
        elif pa.types.is_null(column.type):
            found[name] = np.full(lines, np.nan)
    steps = found.get("step")
    known = steps is not None and bool((np.abs(steps) < FARTHEST).all())
    return (found, raw, "nonfinite" in table.column_names) if known else None


def _marked(data: bytes, starts: np.ndarray, ends: np.ndarray) -> list[tuple[str, float, str]]:
    """What Ascent has marked as not finite."""
    found, at = [], data.find(b'"nonfinite"')
    while at >= 0:
        line = int(np.searchsorted(ends, at, side="right"))
        found += nonfinite_of(json_of(data[starts[line] : ends[line]]))
        at = data.find(b'"nonfinite"', int(ends[line]))
    return found


def json_of(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        return error
    except RecursionError:
        return ValueError("it is nested too deeply")


def nonfinite_of(line: Any) -> list[tuple[str, float, str]]:
    """Numbers that were not finite: marked as Ascent does, or written as such by another program."""
    if not isinstance(line, dict) or not is_number(line.get("step")):
        return []
    marked = line.get("nonfinite")
    found = [(k, float(line["step"]), str(v)) for k, v in marked.items()] if isinstance(marked, dict) else []
    return found + [(k, float(line["step"]), str(v)) for k, v in line.items() if is_number(v) and not is_finite(v)]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: int | float) -> bool:
    return abs(value) < 1.7e308  # also of a whole number that no float can hold


def _value(value: Any) -> float:
    return float(value) if is_number(value) and is_finite(value) else math.nan


def _one_by_one(lines: list[Any], starts: np.ndarray, number: int) -> Parsed:
    """Line by line: what is no object with a step is named and left out."""
    good, where, bad = [], [], []
    nonfinite: list[tuple[str, float, str]] = []
    for i, (line, start) in enumerate(zip(lines, starts, strict=True), number + 1):
        if isinstance(line, dict) and is_number(line.get("step")) and abs(line["step"]) < FARTHEST:
            good.append(line)
            where.append(start)
            nonfinite += nonfinite_of(line)
        else:
            why = f"is no JSON: {line}" if isinstance(line, ValueError) else "has no step"
            bad.append(f"line {i} {why}")
    return from_dicts(good)._replace(starts=np.array(where, np.int64), nonfinite=nonfinite, bad=bad)


def from_dicts(lines: list[dict[str, Any]]) -> Parsed:
    """Lines that are dictionaries already."""
    names = {name: None for line in lines for name, value in line.items() if is_number(value) or value is None}
    columns = {}
    for name in names:
        columns[name] = np.array([_value(line.get(name)) for line in lines], dtype=np.float64)
    steps = columns.pop("step", np.empty(0))
    nonfinite = [found for line in lines for found in nonfinite_of(line)]
    return Parsed(steps, np.zeros(len(lines), np.int64), columns, nonfinite, [])

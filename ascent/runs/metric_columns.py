"""metrics.jsonl as columns of numbers, one per metric, kept up to date as the file grows. NaN: not measured.

A picture needs fewer points than a long run has steps, so consecutive steps share a bucket. Buckets begin at multiples
of their width, so that those of two runs hold the same steps, even where one run lacks a line.
"""

import io
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ascent.runs.untrusted_files import open_regular, parse_json

CHUNK = 1 << 24
"""Bytes that are parsed at a time."""
TOGETHER = 500
"""Lines that are parsed at a time: each could name metrics of its own, and every column is as long as all lines."""
TAIL = 64
"""Bytes before the end of what was read. By them a file that was cut back and continued is recognized."""
MOST_METRICS = 400
MOST_NUMBERS = 1 << 24
"""Numbers that are kept of one file, 128 MiB. Of a longer one every second line is kept, then every fourth."""
MOST_ODD = 50
"""Values that were not finite, and bad lines, that are kept for each file."""
NESTED = 64
"""Objects and lists in a line that pyarrow's reader is given; Ascent's own lines have at most two."""
LAST_STEP = 1e15
Odd = tuple[str, float, str]
"""A metric, a step, and what the value was: nan, inf, -inf."""


class Parsed(NamedTuple):
    """Some lines: their steps, a column per metric (NaN: not measured), and in words those that cannot be read."""

    steps: np.ndarray
    columns: dict[str, np.ndarray]
    nonfinite: list[Odd]
    bad: list[str]


class Columns:
    """The numbers of one file. `update` reads what is new."""

    def __init__(self, path: Path):
        self.path = path
        self.clear()

    def clear(self) -> None:
        self.offset, self.lines, self.kept, self.every = 0, 0, 0, 1
        """Bytes and lines that were read, lines that are kept, and of how many lines one is kept."""
        self.tail = b""
        self._arrays: dict[str, np.ndarray] = {"step": np.empty(0)}
        """With room for more lines at their ends."""
        self.nonfinite: dict[str, list[tuple[float, str]]] = {}
        self.nonfinite_counts: Counter[str] = Counter()
        self.problem = ""
        """Why the file cannot be read, or not to its end."""
        self.bad: list[str] = []
        self.bad_count = 0

    @property
    def revision(self) -> str:
        return f"{self.offset}-{self.lines}-{hash(self.tail) & 0xFFFFFFFF:x}"

    @property
    def size(self) -> int:
        """Bytes that the numbers take."""
        return 8 * self.kept * len(self._arrays)

    @property
    def steps(self) -> np.ndarray:
        return self._arrays["step"][: self.kept]

    @property
    def names(self) -> list[str]:
        return [name for name in self._arrays if name != "step"]

    def __contains__(self, metric: str) -> bool:
        return metric in self._arrays

    def __getitem__(self, metric: str) -> np.ndarray:
        """A metric's column; one that the file never names has no number in any line."""
        found = self._arrays.get(metric)
        return np.full(self.kept, np.nan) if found is None else found[: self.kept]

    def update(self) -> None:
        """Read the whole lines that were added; a torn last one waits. A file that was cut back is read anew."""
        try:
            with open_regular(self.path) as file:
                size = file.seek(0, io.SEEK_END)
                file.seek(self.offset - len(self.tail))
                if size < self.offset or file.read(len(self.tail)) != self.tail:
                    self.clear()
                while self.offset < size:
                    file.seek(self.offset)
                    data = file.read(CHUNK)
                    data += b"" if data.endswith(b"\n") else file.readline(CHUNK)
                    end = data.rfind(b"\n") + 1
                    if not end and len(data) < CHUNK:
                        break  # torn, and still being written
                    if not end:
                        raise OSError(f"a line of more than {CHUNK >> 20} MiB")
                    lines = data[:end].split(b"\n")[:-1]
                    for at in range(0, len(lines), TOGETHER):
                        some = b"\n".join([*lines[at : at + TOGETHER], b""])
                        self.add(parse(some, self.lines + self.bad_count))
                    self.offset += end
                    self.tail = data[:end][-TAIL:]
        except FileNotFoundError:
            self.clear()
        except OSError as error:
            self.problem = str(error)

    def add(self, new: Parsed) -> None:
        self.bad_count += len(new.bad)
        self.bad = (self.bad + new.bad)[:MOST_ODD]
        for name, step, text in new.nonfinite:
            self.nonfinite_counts[name] += 1
            marked = self.nonfinite.setdefault(name, [])
            if len(marked) < MOST_ODD:
                marked.append((step, text))
        room, fresh = MOST_METRICS - len(self.names), [name for name in new.columns if name not in self._arrays]
        if len(fresh) > room:
            self.problem = f"more than {MOST_METRICS} metrics: those that came later are left out"
        keep = slice(-self.lines % self.every, None, self.every)
        self.lines += len(new.steps)
        begin, self.kept = self.kept, self.kept + len(new.steps[keep])
        given = {"step": new.steps, **new.columns}
        for name in [*self._arrays, *fresh[:room]]:
            self._arrays[name] = enlarged(self._arrays.get(name), begin, self.kept)
            self._arrays[name][begin : self.kept] = given[name][keep] if name in given else np.nan
        while self.kept * len(self._arrays) > MOST_NUMBERS:
            self._arrays = {name: values[: self.kept : 2].copy() for name, values in self._arrays.items()}
            self.every, self.kept = 2 * self.every, (self.kept + 1) // 2
            self.problem = f"a very long file: one of {self.every} lines is shown"

    def measured(self, metric: str) -> np.ndarray:
        """The lines in which a metric was measured."""
        return np.flatnonzero(~np.isnan(self[metric]))

    def last(self, metric: str) -> tuple[float, int] | None:
        """The last value of a metric, and its step."""
        there = self.measured(metric)
        return (float(self[metric][there[-1]]), int(self.steps[there[-1]])) if len(there) else None

    def total(self, metric: str) -> float | None:
        so_far = self.running_sum(metric)
        return None if so_far is None else float(so_far[-1])

    def running_sum(self, metric: str) -> np.ndarray | None:
        """The sum up to each line; None if a line lacks it."""
        values = self[metric]
        if not len(values) or np.isnan(values).any():
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            return np.cumsum(values) * self.every

    def at_step(self, step: int, metric: str) -> float | None:
        """A metric at a step; None where it was not measured."""
        values = self[metric][self.steps == step]
        return float(values[-1]) if len(values) and not np.isnan(values[-1]) else None

    def some_lines(self, metrics: Sequence[str], most: int) -> list[list[int | float | None]]:
        """Some lines from the first to the last, each its step and these metrics; half of them where the rarest is."""
        where = {name: there for name in metrics if len(there := self.measured(name))}
        if not where:
            return []
        rarest = min(where.values(), key=len)
        every = np.unique(np.concatenate(list(where.values())))
        half = most // 2 if len(rarest) < len(every) else most
        rows = {}
        for line in sorted({*evenly(rarest, half), *evenly(every, half)}):
            values = [float(self[metric][line]) for metric in metrics]
            rows[int(self.steps[line])] = [None if math.isnan(value) else value for value in values]
        return [[step, *values] for step, values in sorted(rows.items())]


def enlarged(values: np.ndarray | None, used: int, size: int) -> np.ndarray:
    """An array with room for `size` lines. The lines before a metric first appears hold NaN."""
    if values is not None and len(values) >= size:
        return values
    grown = np.empty(size + size // 2 if used else size)
    grown[:used] = np.nan if values is None else values[:used]
    return grown


def evenly(places: Sequence[int] | np.ndarray, most: int) -> list[int]:
    """At most `most` of the places, evenly spread, the first and the last among them."""
    at = np.arange(len(places)) if len(places) <= most else np.linspace(0, len(places) - 1, most).round().astype(int)
    return np.asarray(places)[np.unique(at)].tolist()


def bucket_width(steps: np.ndarray, points: int) -> int:
    """Steps per bucket, so that there are at most `points` buckets; 1 where every point can be drawn."""
    if len(steps) <= points:
        return 1
    width = max(1, math.ceil((steps.max() - steps.min() + 1) / points))
    while len(bucket_starts(steps, width)) > points:
        width += max(1, width // points)
    return width


def bucket_starts(steps: np.ndarray, width: int) -> np.ndarray:
    """At which lines a bucket begins. A step that goes back counts to the bucket before it."""
    if not len(steps):
        return np.empty(0, int)
    index = np.maximum.accumulate(np.floor(steps).astype(np.int64) // width)
    return np.flatnonzero(np.diff(index, prepend=index[0] - 1))


def bucket_means(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The mean of each bucket, over the last axis."""
    gaps = np.isnan(values)
    count = np.diff(np.append(starts, values.shape[-1]))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # a sum that is too large is not drawn
        if not gaps.any():
            return np.add.reduceat(values, starts, axis=-1) / count
        total = np.add.reduceat(np.where(gaps, 0.0, values), starts, axis=-1)
        return total / np.add.reduceat(~gaps, starts, axis=-1, dtype=np.int64)


def buckets(values: np.ndarray, starts: np.ndarray) -> dict[str, np.ndarray]:
    """Mean, smallest and largest of the lines from each start to the next; NaN where none was measured."""
    low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    return {"mean": bucket_means(values, starts), "low": low, "high": high}


def rounded(values: np.ndarray, digits: int) -> np.ndarray:
    """To as many digits as a picture needs."""
    size = np.abs(np.where(np.isfinite(values) & (values != 0), values, 1.0))
    with np.errstate(over="ignore", invalid="ignore"):
        scale = 10.0 ** (digits - 1 - np.floor(np.log10(size)))
        short = np.round(values * scale) / scale
    return np.where(np.isfinite(short), short, values)


def numbers_or_none(values: np.ndarray, digits: int | None = None) -> list[float | None]:
    """As JSON holds them: None where nothing was measured, or a sum was too large to be a number."""
    values = values if digits is None else rounded(values, digits)
    finite = np.isfinite(values)
    listed = values.tolist()
    return listed if finite.all() else [v if ok else None for v, ok in zip(listed, finite.tolist(), strict=True)]


def parse(data: bytes, number: int = 0) -> Parsed:
    """Whole lines that follow upon `number` others in their file."""
    lines = data.count(b"\n")
    split = data.split(b"\n")[:lines]
    nested = any(line.count(b"[") + line.count(b"{") > NESTED for line in split)  # without a bound, its reader crashes
    wide = lines * data.count(b'":') > MOST_NUMBERS
    columns = None if nested or wide else _columns(data, lines)
    if columns is None:
        return _line_by_line(split, number)
    marked = [line for line in split if b'"nonfinite"' in line] if b'"nonfinite"' in data else []
    nonfinite = [odd for line in marked for odd in nonfinite_of(_json(line))]
    steps = columns.pop("step")
    for name, values in columns.items():
        odd = np.flatnonzero(np.isinf(values))
        nonfinite += [(name, float(steps[i]), str(values[i])) for i in odd]
        values[odd] = np.nan
    return Parsed(steps, columns, nonfinite, [])


def _columns(data: bytes, lines: int) -> dict[str, np.ndarray] | None:
    """By pyarrow, on all cores. None where a line is not as all others are, so that each has to be looked at."""
    import pyarrow as pa
    import pyarrow.json

    try:
        table = pyarrow.json.read_json(pa.BufferReader(data))
        names = table.column_names
    except (pa.ArrowException, ValueError):  # also of a name that is not text
        return None
    if table.num_rows != lines or "step" not in names or table["step"].null_count:
        return None
    found = {}
    for name, column in zip(names, table.columns, strict=True):
        if pa.types.is_integer(column.type):
            found[name] = column.cast(pa.float64(), safe=False).to_numpy()
        elif pa.types.is_floating(column.type):
            values = found[name] = column.to_numpy()
            if np.count_nonzero(np.isnan(values)) > column.null_count:
                return None  # NaN as another program writes it
        elif pa.types.is_null(column.type):
            found[name] = np.full(lines, np.nan)
    found = {name: values if values.flags.writeable else values.copy() for name, values in found.items()}
    return found if "step" in found and bool((np.abs(found["step"]) < LAST_STEP).all()) else None


def _json(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        return error


def nonfinite_of(line: Any) -> list[Odd]:
    """Numbers that were not finite: marked as Ascent does, or written as such by another program."""
    if not isinstance(line, dict) or not is_number(line.get("step")):
        return []
    marked = line["nonfinite"] if isinstance(line.get("nonfinite"), dict) else {}
    written = {k: v for k, v in line.items() if is_number(v) and not is_finite(v)}
    return [(k, float(line["step"]), str(v)) for k, v in [*marked.items(), *written.items()]]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: int | float) -> bool:
    return abs(value) < 1.7e308  # also of a whole number that no float can hold


def _line_by_line(lines: list[bytes], number: int) -> Parsed:
    """What is not an object with a step is named and left out."""
    good, bad = [], []
    for i, text in enumerate(lines, number + 1):
        line = _json(text)
        if isinstance(line, dict) and is_number(line.get("step")) and abs(line["step"]) < LAST_STEP:
            good.append(line)
        else:
            bad.append(f"line {i} " + (f"is no JSON: {line}" if isinstance(line, ValueError) else "has no step"))
    return parse_objects(good)._replace(bad=bad)


def parse_objects(lines: list[dict[str, Any]]) -> Parsed:
    """Lines that are dictionaries already."""
    names = {name: None for line in lines for name, value in line.items() if is_number(value) or value is None}
    names = dict.fromkeys(["step", *names][: MOST_METRICS + 2])
    rows = [{k: float(v) for k, v in line.items() if is_number(v) and is_finite(v)} for line in lines]
    columns = {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}
    steps = columns.pop("step", np.empty(0))
    return Parsed(steps, columns, [odd for line in lines for odd in nonfinite_of(line)], [])

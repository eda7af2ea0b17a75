"""Read metrics.jsonl incrementally into one array of numbers per metric. NaN: not measured.

A chart needs fewer points than a long run has steps, so consecutive steps share a bucket. Buckets begin at multiples
of their width, so that the buckets of two runs contain the same steps, even if a run lacks a line.
"""

import io
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ascent.runs.untrusted_files import open_regular, parse_json

READ_CHUNK_BYTES = 1 << 24
"""Bytes that are read at a time; also the maximum length of a line."""
LINES_PER_BATCH = 500
"""Lines that are parsed at a time. Each line may have different metrics, and every column has one value per line."""
TAIL_BYTES = 64
"""Number of the last read bytes to remember, to detect that a file was truncated and continued."""
MAX_METRICS = 400
"""Maximum number of metrics of a file. Later ones are ignored."""
MAX_NUMBERS = 1 << 24
"""Maximum number of values per file (128 MiB). Of a longer file every second line is kept, then every fourth."""
MAX_NONFINITE = 50
"""Maximum number of non-finite values per metric, and of bad lines per file, to keep."""
MAX_NESTED_VALUES = 64
"""Maximum number of objects and lists in a line for pyarrow's reader. Lines that Ascent writes have at most two."""
MAX_STEP = 1e15
NonfiniteValue = tuple[str, float, str]
"""A metric, a step, and its value: nan, inf or -inf."""


class ParsedLines(NamedTuple):
    """Parsed lines: steps, a column per metric (NaN: not measured), non-finite values, and errors of bad lines."""

    steps: np.ndarray
    columns: dict[str, np.ndarray]
    nonfinite: list[NonfiniteValue]
    bad_lines: list[str]


class MetricColumns:
    """The metrics of one file, as arrays. `update` reads the lines that were added."""

    def __init__(self, path: Path):
        self.path = path
        self.clear()

    def clear(self) -> None:
        self.offset, self.num_lines, self.num_kept, self.stride = 0, 0, 0, 1
        """Bytes and lines that were read; number of kept lines; one of `stride` lines is kept."""
        self.tail = b""
        self._arrays: dict[str, np.ndarray] = {"step": np.empty(0)}
        """The arrays may be longer than `num_kept`, so that appending is cheap."""
        self.nonfinite: dict[str, list[tuple[float, str]]] = {}
        self.nonfinite_counts: Counter[str] = Counter()
        self.problem = ""
        """Why the file cannot be read completely; empty if it can."""
        self.bad_lines: list[str] = []
        self.num_bad_lines = 0

    @property
    def revision(self) -> str:
        return f"{self.offset}-{self.num_lines}-{hash(self.tail) & 0xFFFFFFFF:x}"

    @property
    def size(self) -> int:
        """Bytes of the kept values."""
        return 8 * self.num_kept * len(self._arrays)

    @property
    def steps(self) -> np.ndarray:
        return self._arrays["step"][: self.num_kept]

    @property
    def names(self) -> list[str]:
        return [name for name in self._arrays if name != "step"]

    def __contains__(self, metric: str) -> bool:
        return metric in self._arrays

    def __getitem__(self, metric: str) -> np.ndarray:
        """Return the values of a metric, one per kept line; all are NaN if the file never names it."""
        values = self._arrays.get(metric)
        return np.full(self.num_kept, np.nan) if values is None else values[: self.num_kept]

    def update(self) -> None:
        """Read the complete lines that were added. If the file was truncated, read it from the start."""
        try:
            with open_regular(self.path) as file:
                size = file.seek(0, io.SEEK_END)
                file.seek(self.offset - len(self.tail))
                if size < self.offset or file.read(len(self.tail)) != self.tail:
                    self.clear()
                while self.offset < size:
                    file.seek(self.offset)
                    data = file.read(READ_CHUNK_BYTES)
                    data += b"" if data.endswith(b"\n") else file.readline(READ_CHUNK_BYTES)
                    end = data.rfind(b"\n") + 1
                    if not end and len(data) < READ_CHUNK_BYTES:
                        break  # an incomplete line, which is still being written
                    if not end:
                        raise OSError(f"a line of more than {READ_CHUNK_BYTES >> 20} MiB")
                    lines = data[:end].split(b"\n")[:-1]
                    for at in range(0, len(lines), LINES_PER_BATCH):
                        data_batch = b"\n".join([*lines[at : at + LINES_PER_BATCH], b""])
                        self.add(parse_lines(data_batch, self.num_lines + self.num_bad_lines))
                    self.offset += end
                    self.tail = data[:end][-TAIL_BYTES:]
        except FileNotFoundError:
            self.clear()
        except OSError as error:
            self.problem = str(error)

    def add(self, new: ParsedLines) -> None:
        self.num_bad_lines += len(new.bad_lines)
        self.bad_lines = (self.bad_lines + new.bad_lines)[:MAX_NONFINITE]
        for name, step, text in new.nonfinite:
            self.nonfinite_counts[name] += 1
            marked = self.nonfinite.setdefault(name, [])
            if len(marked) < MAX_NONFINITE:
                marked.append((step, text))
        num_free, new_names = MAX_METRICS - len(self.names), [name for name in new.columns if name not in self._arrays]
        if len(new_names) > num_free:
            self.problem = f"more than {MAX_METRICS} metrics: those that came later are left out"
        keep = slice(-self.num_lines % self.stride, None, self.stride)
        self.num_lines += len(new.steps)
        begin, self.num_kept = self.num_kept, self.num_kept + len(new.steps[keep])
        new_columns = {"step": new.steps, **new.columns}
        for name in [*self._arrays, *new_names[:num_free]]:
            self._arrays[name] = with_capacity(self._arrays.get(name), begin, self.num_kept)
            self._arrays[name][begin : self.num_kept] = new_columns[name][keep] if name in new_columns else np.nan
        while self.num_kept * len(self._arrays) > MAX_NUMBERS:
            self._arrays = {name: values[: self.num_kept : 2].copy() for name, values in self._arrays.items()}
            self.stride, self.num_kept = 2 * self.stride, (self.num_kept + 1) // 2
            self.problem = f"a very long file: one of {self.stride} lines is shown"

    def measured(self, metric: str) -> np.ndarray:
        """Return the indices of the kept lines in which a metric was measured."""
        return np.flatnonzero(~np.isnan(self[metric]))

    def last(self, metric: str) -> tuple[float, int] | None:
        """Return the last value of a metric and its step."""
        lines = self.measured(metric)
        return (float(self[metric][lines[-1]]), int(self.steps[lines[-1]])) if len(lines) else None

    def total(self, metric: str) -> float | None:
        """Return the sum of a metric; None if a line lacks it."""
        sums = self.running_sum(metric)
        return None if sums is None else float(sums[-1])

    def running_sum(self, metric: str) -> np.ndarray | None:
        """Return the sum of a metric up to each line; None if a line lacks it."""
        values = self[metric]
        if not len(values) or np.isnan(values).any():
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            return np.cumsum(values) * self.stride

    def at_step(self, step: int, metric: str) -> float | None:
        """Return a metric at a step; None if it was not measured."""
        values = self[metric][self.steps == step]
        return float(values[-1]) if len(values) and not np.isnan(values[-1]) else None

    def sample_lines(self, metrics: Sequence[str], max_lines: int) -> list[list[int | float | None]]:
        """Return evenly spaced lines with their step and these metrics; half of them have the rarest metric."""
        measured = {name: lines for name in metrics if len(lines := self.measured(name))}
        if not measured:
            return []
        rarest = min(measured.values(), key=len)
        union = np.unique(np.concatenate(list(measured.values())))
        half = max_lines // 2 if len(rarest) < len(union) else max_lines
        rows = {}
        for line in sorted({*evenly_spaced(rarest, half), *evenly_spaced(union, half)}):
            values = [float(self[metric][line]) for metric in metrics]
            rows[int(self.steps[line])] = [None if math.isnan(value) else value for value in values]
        return [[step, *values] for step, values in sorted(rows.items())]


def with_capacity(values: np.ndarray | None, used: int, size: int) -> np.ndarray:
    """Return an array with capacity for `size` lines. It is NaN in the lines before the metric first appears."""
    if values is not None and len(values) >= size:
        return values
    grown = np.empty(size + size // 2 if used else size)
    grown[:used] = np.nan if values is None else values[:used]
    return grown


def evenly_spaced(indices: Sequence[int] | np.ndarray, max_count: int) -> list[int]:
    """Return at most `max_count` of the indices, evenly spaced, with the first and the last."""
    count = len(indices)
    chosen = np.arange(count) if count <= max_count else np.linspace(0, count - 1, max_count).round().astype(int)
    return np.asarray(indices)[np.unique(chosen)].tolist()


def bucket_width(steps: np.ndarray, points: int) -> int:
    """Return the number of steps per bucket for at most `points` buckets; 1 if every step can be drawn."""
    if len(steps) <= points:
        return 1
    width = max(1, math.ceil((steps.max() - steps.min() + 1) / points))
    while len(bucket_starts(steps, width)) > points:
        width += max(1, width // points)
    return width


def bucket_starts(steps: np.ndarray, width: int) -> np.ndarray:
    """Return the indices of the lines at which buckets begin. A step that goes back stays in the current bucket."""
    if not len(steps):
        return np.empty(0, int)
    index = np.maximum.accumulate(np.floor(steps).astype(np.int64) // width)
    return np.flatnonzero(np.diff(index, prepend=index[0] - 1))


def bucket_means(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the mean of each bucket over the last axis."""
    missing = np.isnan(values)
    count = np.diff(np.append(starts, values.shape[-1]))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # an overflowing sum is not drawn
        if not missing.any():
            return np.add.reduceat(values, starts, axis=-1) / count
        total = np.add.reduceat(np.where(missing, 0.0, values), starts, axis=-1)
        return total / np.add.reduceat(~missing, starts, axis=-1, dtype=np.int64)


def bucket_statistics(values: np.ndarray, starts: np.ndarray) -> dict[str, np.ndarray]:
    """Return the mean, minimum and maximum of each bucket; NaN if none of its values was measured."""
    low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    return {"mean": bucket_means(values, starts), "low": low, "high": high}


def round_to_digits(values: np.ndarray, digits: int) -> np.ndarray:
    """Round values to a number of significant digits."""
    size = np.abs(np.where(np.isfinite(values) & (values != 0), values, 1.0))
    with np.errstate(over="ignore", invalid="ignore"):
        scale = 10.0 ** (digits - 1 - np.floor(np.log10(size)))
        short = np.round(values * scale) / scale
    return np.where(np.isfinite(short), short, values)


def numbers_or_none(values: np.ndarray, digits: int | None = None) -> list[float | None]:
    """Convert values to JSON: None for NaN and infinite values."""
    values = values if digits is None else round_to_digits(values, digits)
    finite = np.isfinite(values)
    listed = values.tolist()
    return listed if finite.all() else [v if ok else None for v, ok in zip(listed, finite.tolist(), strict=True)]


def parse_lines(data: bytes, first: int = 0) -> ParsedLines:
    """Parse complete lines. `first` is the number of lines before them in their file."""
    lines = data.count(b"\n")
    split = data.split(b"\n")[:lines]
    nested = any(
        line.count(b"[") + line.count(b"{") > MAX_NESTED_VALUES for line in split
    )  # deep nesting crashes pyarrow's reader
    wide = lines * data.count(b'":') > MAX_NUMBERS
    columns = None if nested or wide else _parse_with_pyarrow(data, lines)
    if columns is None:
        return _parse_line_by_line(split, first)
    marked = [line for line in split if b'"nonfinite"' in line] if b'"nonfinite"' in data else []
    nonfinite = [value for line in marked for value in nonfinite_values(_parse_json_or_error(line))]
    steps = columns.pop("step")
    for name, values in columns.items():
        infinite = np.flatnonzero(np.isinf(values))
        nonfinite += [(name, float(steps[i]), str(values[i])) for i in infinite]
        values[infinite] = np.nan
    return ParsedLines(steps, columns, nonfinite, [])


def _parse_with_pyarrow(data: bytes, lines: int) -> dict[str, np.ndarray] | None:
    """Parse lines with pyarrow, in parallel. None if they are irregular, so that each line must be parsed alone."""
    import pyarrow as pa
    import pyarrow.json

    try:
        table = pyarrow.json.read_json(pa.BufferReader(data))
        names = table.column_names
    except (pa.ArrowException, ValueError):  # also for a name that is not valid Unicode
        return None
    if table.num_rows != lines or "step" not in names or table["step"].null_count:
        return None
    columns = {}
    for name, column in zip(names, table.columns, strict=True):
        if pa.types.is_integer(column.type):
            columns[name] = column.cast(pa.float64(), safe=False).to_numpy()
        elif pa.types.is_floating(column.type):
            values = columns[name] = column.to_numpy()
            if np.count_nonzero(np.isnan(values)) > column.null_count:
                return None  # a literal NaN, which Ascent does not write
        elif pa.types.is_null(column.type):
            columns[name] = np.full(lines, np.nan)
    columns = {name: values if values.flags.writeable else values.copy() for name, values in columns.items()}
    return columns if "step" in columns and bool((np.abs(columns["step"]) < MAX_STEP).all()) else None


def _parse_json_or_error(line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        return error


def nonfinite_values(line: Any) -> list[NonfiniteValue]:
    """Return the non-finite values of a line: those in `nonfinite`, and literal NaN or Infinity of other programs."""
    if not isinstance(line, dict) or not is_number(line.get("step")):
        return []
    marked = line["nonfinite"] if isinstance(line.get("nonfinite"), dict) else {}
    written = {k: v for k, v in line.items() if is_number(v) and not is_finite(v)}
    return [(k, float(line["step"]), str(v)) for k, v in [*marked.items(), *written.items()]]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: int | float) -> bool:
    return abs(value) < 1.7e308  # also False for an integer that overflows a float


def _parse_line_by_line(lines: list[bytes], first: int) -> ParsedLines:
    """Parse each line alone. Lines that are not objects with a step are described in `bad_lines`."""
    good, bad = [], []
    for i, text in enumerate(lines, first + 1):
        line = _parse_json_or_error(text)
        if isinstance(line, dict) and is_number(line.get("step")) and abs(line["step"]) < MAX_STEP:
            good.append(line)
        else:
            bad.append(f"line {i} " + (f"is no JSON: {line}" if isinstance(line, ValueError) else "has no step"))
    return parse_objects(good)._replace(bad_lines=bad)


def parse_objects(lines: list[dict[str, Any]]) -> ParsedLines:
    """Convert lines that are already parsed."""
    names = {name: None for line in lines for name, value in line.items() if is_number(value) or value is None}
    names = dict.fromkeys(["step", *names][: MAX_METRICS + 2])
    rows = [{k: float(v) for k, v in line.items() if is_number(v) and is_finite(v)} for line in lines]
    columns = {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}
    steps = columns.pop("step", np.empty(0))
    return ParsedLines(steps, columns, [value for line in lines for value in nonfinite_values(line)], [])

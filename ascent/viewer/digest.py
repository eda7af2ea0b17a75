"""A file of JSON lines as curves of bounded size, kept up to date as the file grows.

Steps that follow one another share a bucket, which knows the sum, number, smallest and largest of each metric, and
the byte at which it begins. Where there would be too many, a bucket takes twice as many steps: so a run of any length
takes the same memory, and a part of it can be read again, exactly, without reading the rest. Buckets begin at multiples
of their width, so those of two runs hold the same steps, also where one of them lacks a line.
"""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ascent.viewer.parsing import NOTHING, Parsed, parse
from ascent.viewer.reading import opened

MOST_BUCKETS = 2048
CHUNK = 1 << 24
"""Bytes that are parsed at a time."""
TAIL = 64
"""Bytes before the end of what was read, by which a file that was cut back and went on is recognised."""
MOST_METRICS = 400
KEPT = 50
"""Values that were not finite, and bad lines, that are kept for each file."""


class Buckets(NamedTuple):
    """Sums over consecutive lines: arrays [bucket]."""

    sum: np.ndarray
    number: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Digest:
    """The curves of one file. `update` reads what is new; `whole` and `part` give points to draw."""

    def __init__(self, path: Path):
        self.path = path
        self.clear()

    def clear(self) -> None:
        self.offset, self.lines, self.width = 0, 0, 1
        self.tail = b""
        self.metrics: dict[str, Buckets] = {}
        self.ends: dict[str, tuple[float, float]] = {}
        """The last value of each metric, and its step."""
        self.size = 0
        """Bytes that the buckets take."""
        self.first, self.last, self.start = np.empty(0), np.empty(0), np.empty(0, np.int64)
        self.index = np.empty(0, np.int64)
        """Which steps each bucket is for: those from index × width on."""
        self.nonfinite: dict[str, list[tuple[float, str]]] = {}
        self.nonfinite_counts: Counter[str] = Counter()
        self.problem = ""
        """Why the file cannot be read, or not to its end."""
        self.bad: list[str] = []
        self.bad_count = 0

    @property
    def revision(self) -> str:
        return f"{self.offset}-{self.lines}-{hash(self.tail) & 0xFFFFFFFF:x}"

    def update(self) -> None:
        """Read the whole lines that were added; a torn last one waits. A file that was cut back is read anew."""
        try:
            with opened(self.path) as file:
                size = file.seek(0, io.SEEK_END)
                if self.offset and not self._goes_on(file, size):
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
                    self._add(parse(data[:end], self.offset, self.lines + self.bad_count))
                    self.offset += end
                    self.tail = data[:end][-TAIL:]
        except FileNotFoundError:
            self.clear()
        except OSError as error:
            self.problem = str(error)

    def _goes_on(self, file: Any, size: int) -> bool:
        if size < self.offset:
            return False
        file.seek(self.offset - len(self.tail))
        return file.read(len(self.tail)) == self.tail

    def _add(self, new: Parsed) -> None:
        self.bad_count += len(new.bad)
        self.bad = (self.bad + new.bad)[:KEPT]
        for name, step, text in new.nonfinite:
            self.nonfinite_counts[name] += 1
            kept = self.nonfinite.setdefault(name, [])
            if len(kept) < KEPT:
                kept.append((step, text))
        count = len(new.steps)
        if not count:
            return
        behind = self.index[-1] * self.width if len(self.index) else -np.inf
        steps = np.maximum.accumulate(np.maximum(np.floor(new.steps), behind)).astype(np.int64)  # never back
        begin = self.index[0] * self.width if len(self.index) else steps[0]
        while steps[-1] // self.width - begin // self.width >= MOST_BUCKETS:
            self._halve()
        index = steps // self.width
        cuts = np.flatnonzero(np.diff(index, prepend=index[0] - 1))
        have = len(self.index)
        fresh = index[cuts] >= (self.index[-1] + 1 if have else index[0])
        self.index = np.concatenate([self.index, index[cuts][fresh]])
        self.first = np.concatenate([self.first, new.steps[cuts][fresh]])
        self.start = np.concatenate([self.start, new.starts[cuts][fresh]])
        size = len(self.index)
        where = np.searchsorted(self.index, index[cuts])
        self.last = np.concatenate([self.last, np.zeros(size - have)])
        self.last[where] = new.steps[np.append(cuts[1:], count) - 1]
        if len(names := {*self.metrics, *new.columns}) > MOST_METRICS:
            self.problem = f"more than {MOST_METRICS} metrics: those that came later are left out"
            names = set(list(dict.fromkeys([*self.metrics, *new.columns]))[:MOST_METRICS])
        for name in names:
            values = new.columns.get(name)
            old = grown(self.metrics.get(name), size)
            self.metrics[name] = old if values is None else added(old, where, fold(values, cuts))
            if values is not None and len(known := np.flatnonzero(np.isfinite(values))):
                self.ends[name] = float(values[known[-1]]), float(new.steps[known[-1]])
        self.lines += count
        self.size = sum(part.nbytes for buckets in self.metrics.values() for part in buckets) + 4 * self.first.nbytes

    def _halve(self) -> None:
        """Every bucket takes twice as many steps: those that now share one are merged."""
        self.width *= 2
        if not len(self.index):
            return
        index = self.index // 2
        cuts = np.flatnonzero(np.diff(index, prepend=index[0] - 1))
        ends = np.append(cuts[1:], len(index)) - 1
        self.index, self.first, self.start, self.last = index[cuts], self.first[cuts], self.start[cuts], self.last[ends]
        self.metrics = {name: merged(buckets, cuts) for name, buckets in self.metrics.items()}

    def whole(self) -> tuple[np.ndarray, np.ndarray, dict[str, Buckets]]:
        """First and last step of each bucket, and the buckets of each metric."""
        return self.first, self.last, self.metrics

    def part(self, begin: int | float, end: int | float) -> Parsed:
        """The lines of some steps, read again."""
        inside = np.flatnonzero((self.last >= begin) & (self.first <= end))
        if not len(inside):
            return NOTHING
        start = int(self.start[inside[0]])
        after = int(inside[-1]) + 1
        stop = int(self.start[after]) if after < len(self.start) else self.offset
        try:
            with opened(self.path) as file:
                file.seek(start)
                found = parse(file.read(stop - start), start, 0)
        except OSError:
            return NOTHING
        keep = (found.steps >= begin) & (found.steps <= end)
        columns = {name: values[keep] for name, values in found.columns.items()}
        return found._replace(steps=found.steps[keep], starts=found.starts[keep], columns=columns)


def fold(values: np.ndarray, cuts: np.ndarray) -> Buckets:
    """Values into buckets that begin at `cuts`; NaN is not measured."""
    known = np.isfinite(values)
    with np.errstate(over="ignore"):  # a sum that is too large is inf, and is not drawn
        total = np.add.reduceat(np.where(known, values, 0.0), cuts)
    return Buckets(
        total,
        np.add.reduceat(known.astype(np.int64), cuts),
        np.minimum.reduceat(np.where(known, values, np.inf), cuts),
        np.maximum.reduceat(np.where(known, values, -np.inf), cuts),
    )


def merged(buckets: Buckets, cuts: np.ndarray) -> Buckets:
    """Neighbouring buckets as one."""
    kinds = (np.add, np.add, np.minimum, np.maximum)
    with np.errstate(over="ignore", invalid="ignore"):
        return Buckets(*(kind.reduceat(part, cuts) for kind, part in zip(kinds, buckets, strict=True)))


def grown(buckets: Buckets | None, size: int) -> Buckets:
    """With empty buckets at the end."""
    have = 0 if buckets is None else len(buckets.sum)
    more = Buckets(
        np.zeros(size - have),
        np.zeros(size - have, np.int64),
        np.full(size - have, np.inf),
        np.full(size - have, -np.inf),
    )
    return more if buckets is None else Buckets(*map(np.concatenate, zip(buckets, more, strict=True)))


def added(old: Buckets, where: np.ndarray, new: Buckets) -> Buckets:
    """New sums into the buckets at `where` (each named once)."""
    with np.errstate(over="ignore", invalid="ignore"):
        old.sum[where] += new.sum
    old.number[where] += new.number
    old.low[where] = np.minimum(old.low[where], new.low)
    old.high[where] = np.maximum(old.high[where], new.high)
    return old

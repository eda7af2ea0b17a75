"""Rows that were given in Python: ascent.train(rows, …), with rows as a list of dicts, a Dataset or a DataFrame.

What has no length is a stream: an IterableDataset, or a function that makes a generator. Its rows come in their order,
step after step, and start over at the end. Held-out rows are told by the hash of their prompt, and are never trained
on. The step alone says where in the stream a run is, so a resume reads up to there again.
"""

import hashlib
import inspect
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ascent.core.errors import ConfigError
from ascent.tasks import python_objects
from ascent.tasks.base import BaseTask
from ascent.tasks.reward_sources import resolve_reward_call
from ascent.tasks.text.table_tasks import ColumnsTask, Demonstrations, Preferences, Steps
from ascent.tasks.text.table_tasks import Rows as TableRows
from ascent.tasks.text.text_task import TEXT_PRESET, Problem
from ascent.tasks.user_files import is_held_out

STREAM_BUFFER_SIZE = 10_000
"""Rows of a stream that are remembered; dynamic sampling draws from them."""
_LOOKED_AT = 20
"""Rows of a stream that are read to find one that is held out."""
_FIRST = 32
"""Rows of a stream by which it is recognised."""


def task_from_object(task: Any, rewarded: bool = False) -> tuple[Any, dict[str, Any]]:
    """A task that was given as an object, or rows as a task; and settings that it brings along.

    `rewarded`: rewards are given too, so the rows are prompts, whatever else they have.
    """
    cls = task if isinstance(task, type) else type(task)
    if issubclass(cls, BaseTask):
        if not cls.__module__.startswith("ascent."):
            python_objects.register_class("task", cls)
        return task, {}
    if isinstance(task, Mapping) and "train" in task:  # a DatasetDict
        made, brought = task_from_object(task["train"], rewarded)
        return made, brought | ({"eval": task["test"]} if "test" in task else {})
    name = register_rows("rows", task)
    return _task_of(python_objects.OBJECTS[name], rewarded), {"source": name}


def _task_of(rows: Any, rewarded: bool) -> type:
    """What rows are for: their columns say whether they are offline data. Of a stream the first row does."""
    columns = {column for row in (rows if isinstance(rows, list) else itertools.islice(rows, 1)) for column in row}
    kinds = (
        (Preferences, {"chosen", "rejected"}),
        (Steps, {"steps", "labels"}),
        (Demonstrations, {"prompt", "response"}),
    )
    for kind, needed in kinds:
        if needed <= columns and "answer" not in columns and not rewarded:
            if isinstance(rows, RestartableRows):
                raise ConfigError(
                    f"rows are a stream of {kind.data}, which have to have a length: give a list, list(function())"
                )
            return kind
    return RowStream if isinstance(rows, RestartableRows) else Rows


def register_rows(setting: str, rows: Any) -> str:
    """The name of rows, from here on."""
    if isinstance(rows, type | str | bytes | Mapping) or not (callable(rows) or hasattr(rows, "__iter__")):
        raise ConfigError(
            f"{setting} is {rows!r:.60}: give a task by its name, a task as an object, or rows: a list of dicts with "
            "prompt and answer, a Dataset, a DataFrame, or a function that makes a generator of dicts"
        )
    if hasattr(rows, "__next__"):
        raise ConfigError(
            f"{setting} is {type(rows).__name__}, which can be read only once, so the run could not be resumed. Give "
            "the function that makes it, without calling it, or a list"
        )
    if callable(rows) or not hasattr(rows, "__len__"):
        if callable(rows) and _needs_arguments(rows):
            raise ConfigError(
                f"{setting} is {rows!r:.60}: a function that makes rows takes no argument. A reward goes to reward="
            )
        stream = RestartableRows(rows)
        first = hashlib.sha256("\n".join(map(_line, itertools.islice(stream, _FIRST))).encode()).hexdigest()
        about = python_objects.describe_object(rows)
        return python_objects.register_object(setting, stream, about | {"hash": _digest([about["hash"], first])})
    read = list(iterate_rows(rows, setting))
    if not read:
        raise ConfigError(f"{setting} is empty: there is no row")
    columns = list(dict.fromkeys(column for row in read for column in row))
    about = {"name": setting, "rows": len(read), "columns": columns, "hash": _digest(map(_line, read))}
    return python_objects.register_object(setting, read, about)


def _needs_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return True
    return False


def iterate_rows(rows: Any, setting: str) -> Iterator[dict[str, Any]]:
    """Rows as dicts: of a list, a Dataset, or a DataFrame, whose missing values are None."""
    if hasattr(rows, "to_dicts"):  # polars
        rows = rows.to_dicts()
    elif hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # pandas
        names, lines = list(map(str, rows.columns)), rows.astype(object).itertuples(index=False)
        rows = [{k: None if v != v else v for k, v in zip(names, line, strict=True)} for line in lines]
    for number, row in enumerate(rows):
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, Mapping):
            raise ConfigError(f"{setting}, row {number}: a row is a dict with columns, and this is {row!r:.60}")
        yield dict(row)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, default=_spelled)


def _spelled(value: Any) -> str:
    """A value of a row that JSON has not: a date or a time as it is written, anything else by its hash."""
    return value.isoformat() if hasattr(value, "isoformat") else python_objects.describe_object(value)["hash"]


def _digest(lines: Iterable[str]) -> str:
    total = hashlib.sha256()
    for line in lines:
        total.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return total.hexdigest()


# ---- a table ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows(ColumnsTask):
    """Rows given in Python, ascent.train(rows, …): dicts with a prompt and an answer."""

    source: str = ""
    """The name of the rows. They are in the process that has given them, not in the run folder."""
    eval: str | None = None
    """Held-out rows. None: one prompt in ten is held out."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"default": TEXT_PRESET}

    def rows(self, part: str) -> TableRows | None:
        name = self.source if part == "train" else self.eval
        if name is None:
            return None
        return ((f"{python_objects.object_label(name)}, row {i}", row) for i, row in enumerate(self._found(name)))

    def _found(self, name: str) -> Any:
        if not name:
            raise ConfigError(
                "rows are given in Python: ascent.train(rows, …). On the command line use jsonl:FILE or dataset:NAME"
            )
        return python_objects.find_object(name, "rows" if name == self.source else "eval")

    def fingerprint(self) -> object:
        return self.source in python_objects.OBJECTS, self.eval is None or self.eval in python_objects.OBJECTS

    def verify(self) -> None:
        self._found(self.source)
        super().verify()
        check_columns(self, [*self.table.train, *self.table.test])


def check_columns(task: Any, problems: Iterable[Problem]) -> None:
    """Refuse reward functions that ask for columns which the rows do not have."""
    columns = {name for problem in problems for name in problem.columns}
    for reward in task.rewards:
        if reward.kind == "object":
            resolve_reward_call(reward.source, columns)


# ---- a stream -----------------------------------------------------------------------------------------------


class RestartableRows:
    """Rows without a length: a function that makes a generator, or something to iterate over again and again."""

    def __init__(self, rows: Callable[[], Iterable[Any]] | Iterable[Any]):
        self.made_by = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iterate_rows(self.made_by() if callable(self.made_by) else iter(self.made_by), "rows")


class StreamReader:
    """The training rows of a stream by their number. It reads on, remembers the last ones, and starts over if asked."""

    def __init__(
        self,
        stream: RestartableRows,
        problem: Callable[[Mapping[str, Any], str], Problem],
        is_test: Callable[[Problem], bool],
    ):
        self.stream, self.problem, self.is_test = stream, problem, is_test
        self.length: int | None = None
        """Training rows until the end, once that was seen."""
        self._restart()

    def _restart(self) -> None:
        self._rows = enumerate(self.stream)
        self._last: deque[Problem] = deque(maxlen=STREAM_BUFFER_SIZE)
        self._read = 0

    def __getitem__(self, index: int) -> Problem:
        if self.length is not None:
            index %= self.length
        if index < self._read - len(self._last):
            self._restart()
        while self._read <= index:
            problem = self._next()
            if problem is None:
                if not self._read:
                    raise ConfigError("rows: the stream has no row to train on")
                self.length = self._read
                return self[index]
            self._last.append(problem)
            self._read += 1
        return self._last[index - self._read]

    def _next(self) -> Problem | None:
        for number, row in self._rows:
            problem = self.problem(row, f"rows, row {number}")
            if not self.is_test(problem):
                return problem
        return None


_READERS: dict[Any, StreamReader] = {}


@dataclass(frozen=True)
class RowStream(Rows):
    """Rows given in Python without a length, ascent.train(function, …): an IterableDataset, or a generator function."""

    eval: str | None = None
    """Held-out rows. None: those that the hash of their prompt picks, one in ten, among the first ones."""

    is_stream = True

    @property
    def size(self) -> int | None:
        return None

    @property
    def _reader(self) -> StreamReader:
        if self not in _READERS:
            tested = {str(problem.prompt) for problem in self._tests or ()}
            held = (lambda p: str(p.prompt) in tested) if self.eval else (lambda p: is_held_out(p.prompt))
            _READERS[self] = StreamReader(self._found(self.source), self.problem, held)
        return _READERS[self]

    @property
    def _tests(self) -> list[Problem] | None:
        return self.problems("test")

    def train(self, index: int) -> Problem:
        return self._reader[index]

    def test(self, count: int) -> list[Problem]:
        if self.eval:
            return (self._tests or [])[:count]
        rows = itertools.islice(enumerate(self._found(self.source)), _LOOKED_AT * count)
        problems = (self.problem(row, f"rows, row {number}") for number, row in rows)
        return list(itertools.islice((p for p in problems if is_held_out(p.prompt)), count))

    def data_notes(self) -> list[str]:
        return []

    def verify(self) -> None:
        stream = self._found(self.source)
        for entry in self.rewards:
            entry.verify()
        first = [self.problem(row, f"rows, row {i}") for i, row in enumerate(itertools.islice(stream, _FIRST))]
        check_columns(self, first)
        if not self.test(1):
            raise ConfigError("rows: none of the first rows of the stream is held out. Give held-out rows: eval=rows")

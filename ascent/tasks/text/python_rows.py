"""Rows passed from Python: ascent.train(rows, …), with rows as a list of dicts, a Dataset or a DataFrame.

Rows without a length are a stream: an IterableDataset, or a function that returns a generator. Its rows are read in
order, step after step, and start over at the end. A hash of the prompt decides which rows are held out. The position in
the stream depends only on the step, so resuming a run reads the stream again up to that step.
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
from ascent.tasks.text.table_tasks import ColumnsTask, Demonstrations, Preferences, Steps, TableRows
from ascent.tasks.text.text_task import TEXT_PRESET, Problem
from ascent.tasks.user_files import is_held_out

STREAM_BUFFER_SIZE = 10_000
"""Number of recent rows of a stream that are kept in memory; dynamic sampling draws from them."""
_ROWS_PER_TEST_ROW = 20
"""Number of rows of a stream to search per held-out row."""
_NUM_HASHED_ROWS = 32
"""Number of first rows of a stream whose hash identifies it."""


def task_from_object(task: Any, has_rewards: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return the task for a task object or for rows, and the settings that it implies.

    `has_rewards`: rewards are set too, so the rows are prompts even if they have columns of offline data.
    """
    cls = task if isinstance(task, type) else type(task)
    if issubclass(cls, BaseTask):
        if not cls.__module__.startswith("ascent."):
            python_objects.register_class("task", cls)
        return task, {}
    if isinstance(task, Mapping) and "train" in task:  # a DatasetDict
        cls, settings = task_from_object(task["train"], has_rewards)
        return cls, settings | ({"eval": task["test"]} if "test" in task else {})
    name = register_rows("rows", task)
    return _task_class(python_objects.OBJECTS[name], has_rewards), {"source": name}


def _task_class(rows: Any, has_rewards: bool) -> type:
    """Return the task class for rows. Their columns (in a stream, of the first row) tell offline data from prompts."""
    columns = {column for row in (rows if isinstance(rows, list) else itertools.islice(rows, 1)) for column in row}
    kinds = (
        (Preferences, {"chosen", "rejected"}),
        (Steps, {"steps", "labels"}),
        (Demonstrations, {"prompt", "response"}),
    )
    for kind, needed in kinds:
        if needed <= columns and "answer" not in columns and not has_rewards:
            if isinstance(rows, RestartableRows):
                raise ConfigError(
                    f"rows are a stream of {kind.data}, but offline data need a length: pass a list, list(function())"
                )
            return kind
    return RowStream if isinstance(rows, RestartableRows) else Rows


def register_rows(setting: str, rows: Any) -> str:
    """Register rows and return their name."""
    if isinstance(rows, type | str | bytes | Mapping) or not (callable(rows) or hasattr(rows, "__iter__")):
        raise ConfigError(
            f"{setting} is {rows!r:.60}: expected the name of a task, a task object, or rows: a list of dicts with "
            "prompt and answer, a Dataset, a DataFrame, or a function that returns a generator of dicts"
        )
    if hasattr(rows, "__next__"):
        raise ConfigError(
            f"{setting} is {type(rows).__name__}, which can be read only once, so the run could not be resumed. Pass "
            "the function that creates it, without calling it, or a list"
        )
    if callable(rows) or not hasattr(rows, "__len__"):
        if callable(rows) and _needs_arguments(rows):
            raise ConfigError(
                f"{setting} is {rows!r:.60}: a function that returns rows must take no arguments. Reward functions go "
                "to reward="
            )
        stream = RestartableRows(rows)
        first = hashlib.sha256(
            "\n".join(map(_row_json, itertools.islice(stream, _NUM_HASHED_ROWS))).encode()
        ).hexdigest()
        description = python_objects.describe_object(rows)
        description |= {"hash": _digest([description["hash"], first])}
        return python_objects.register_object(setting, stream, description)
    table = list(iterate_rows(rows, setting))
    if not table:
        raise ConfigError(f"{setting} is empty")
    columns = list(dict.fromkeys(column for row in table for column in row))
    description = {"name": setting, "rows": len(table), "columns": columns, "hash": _digest(map(_row_json, table))}
    return python_objects.register_object(setting, table, description)


def _needs_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return True
    return False


def iterate_rows(rows: Any, setting: str) -> Iterator[dict[str, Any]]:
    """Iterate over rows of a list, Dataset or DataFrame as dicts. Missing values of a DataFrame become None."""
    if hasattr(rows, "to_dicts"):  # polars
        rows = rows.to_dicts()
    elif hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # pandas
        names, lines = list(map(str, rows.columns)), rows.astype(object).itertuples(index=False)
        rows = [{k: None if v != v else v for k, v in zip(names, line, strict=True)} for line in lines]
    for number, row in enumerate(rows):
        if isinstance(row, str):
            row = {"prompt": row}
        if not isinstance(row, Mapping):
            raise ConfigError(f"{setting}, row {number}: a row must be a dict of columns; got {row!r:.60}")
        yield dict(row)


def _row_json(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, default=_encode_value)


def _encode_value(value: Any) -> str:
    """Encode a value that JSON does not support: dates and times in ISO format, others by their hash."""
    return value.isoformat() if hasattr(value, "isoformat") else python_objects.describe_object(value)["hash"]


def _digest(lines: Iterable[str]) -> str:
    total = hashlib.sha256()
    for line in lines:
        total.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return total.hexdigest()


# ---- a table ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows(ColumnsTask):
    """Rows passed from Python, ascent.train(rows, …): dicts with a prompt and an answer."""

    source: str = ""
    """Name of the rows. They are in the process that passed them, not in the run folder."""
    eval: str | None = None
    """Held-out rows. None: one prompt in ten is held out."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"default": TEXT_PRESET}

    def rows(self, part: str) -> TableRows | None:
        name = self.source if part == "train" else self.eval
        if name is None:
            return None
        return ((f"{python_objects.object_label(name)}, row {i}", row) for i, row in enumerate(self._find_rows(name)))

    def _find_rows(self, name: str) -> Any:
        if not name:
            raise ConfigError(
                "rows are passed from Python: ascent.train(rows, …). On the command line use jsonl:FILE or dataset:NAME"
            )
        return python_objects.find_object(name, "rows" if name == self.source else "eval")

    def fingerprint(self) -> object:
        return self.source in python_objects.OBJECTS, self.eval is None or self.eval in python_objects.OBJECTS

    def verify(self) -> None:
        self._find_rows(self.source)
        super().verify()
        check_columns(self, [*self.table.train, *self.table.test])


def check_columns(task: Any, problems: Iterable[Problem]) -> None:
    """Raise ConfigError if a reward function takes columns that the rows do not have."""
    columns = {name for problem in problems for name in problem.columns}
    for reward in task.rewards:
        if reward.kind == "object":
            resolve_reward_call(reward.source, columns)


# ---- a stream -----------------------------------------------------------------------------------------------


class RestartableRows:
    """Rows without a length: a function that returns a generator, or an iterable that can be read again."""

    def __init__(self, rows: Callable[[], Iterable[Any]] | Iterable[Any]):
        self.source = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iterate_rows(self.source() if callable(self.source) else iter(self.source), "rows")


class StreamReader:
    """Training rows of a stream by index. It keeps the most recent rows and restarts the stream for earlier ones."""

    def __init__(
        self,
        stream: RestartableRows,
        problem: Callable[[Mapping[str, Any], str], Problem],
        is_test: Callable[[Problem], bool],
    ):
        self.stream, self.problem, self.is_test = stream, problem, is_test
        self.length: int | None = None
        """Number of training rows, once the end was reached."""
        self._restart()

    def _restart(self) -> None:
        self._rows = enumerate(self.stream)
        self._recent: deque[Problem] = deque(maxlen=STREAM_BUFFER_SIZE)
        self._num_read = 0

    def __getitem__(self, index: int) -> Problem:
        if self.length is not None:
            index %= self.length
        if index < self._num_read - len(self._recent):
            self._restart()
        while self._num_read <= index:
            problem = self._next()
            if problem is None:
                if not self._num_read:
                    raise ConfigError("rows: the stream has no training row")
                self.length = self._num_read
                return self[index]
            self._recent.append(problem)
            self._num_read += 1
        return self._recent[index - self._num_read]

    def _next(self) -> Problem | None:
        for number, row in self._rows:
            problem = self.problem(row, f"rows, row {number}")
            if not self.is_test(problem):
                return problem
        return None


_READERS: dict[Any, StreamReader] = {}


@dataclass(frozen=True)
class RowStream(Rows):
    """Rows without a length, ascent.train(function, …): an IterableDataset, or a generator function."""

    eval: str | None = None
    """Held-out rows. None: one in ten of the first rows, chosen by the hash of the prompt."""

    is_stream = True

    @property
    def size(self) -> int | None:
        return None

    @property
    def _reader(self) -> StreamReader:
        if self not in _READERS:
            test_prompts = {str(problem.prompt) for problem in self._eval_problems or ()}
            is_test = (lambda p: str(p.prompt) in test_prompts) if self.eval else (lambda p: is_held_out(p.prompt))
            _READERS[self] = StreamReader(self._find_rows(self.source), self.problem, is_test)
        return _READERS[self]

    @property
    def _eval_problems(self) -> list[Problem] | None:
        return self.problems("test")

    def train(self, index: int) -> Problem:
        return self._reader[index]

    def test(self, count: int) -> list[Problem]:
        if self.eval:
            return (self._eval_problems or [])[:count]
        rows = itertools.islice(enumerate(self._find_rows(self.source)), _ROWS_PER_TEST_ROW * count)
        problems = (self.problem(row, f"rows, row {number}") for number, row in rows)
        return list(itertools.islice((p for p in problems if is_held_out(p.prompt)), count))

    def data_notes(self) -> list[str]:
        return []

    def verify(self) -> None:
        stream = self._find_rows(self.source)
        for entry in self.rewards:
            entry.verify()
        first = [
            self.problem(row, f"rows, row {i}") for i, row in enumerate(itertools.islice(stream, _NUM_HASHED_ROWS))
        ]
        check_columns(self, first)
        if not self.test(1):
            raise ConfigError("rows: none of the first rows of the stream is held out. Pass held-out rows: eval=rows")

"""Tasks whose problems are rows of a table: a JSONL file or a Hugging Face data set (from the hub or a folder).

Repeated prompts are dropped, and some prompts are held out. Offline data are JSONL files:

    {"prompt": "What is 1 + 1?", "response": "2"}                               a demonstration, for `ascent sft`
    {"prompt": "What is 1 + 1?", "chosen": "2", "rejected": "3"}                a preference pair, with TRL's names
    {"prompt": "What is 2 + 3 + 4?", "steps": ["2 + 3 = 5", "5 + 4 = 10"], "labels": [1, 0]}      labeled steps

A prompt is text or a list of chat messages. Other columns are ignored.
"""

import functools
import importlib
import importlib.util
import json
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlparse

from ascent.core.errors import ConfigError
from ascent.core.menu import nearest
from ascent.tasks import python_objects, user_files
from ascent.tasks.base import error_line
from ascent.tasks.reward_sources import OWN
from ascent.tasks.text.answer_checking import CHECKS, chosen_option, option_letter
from ascent.tasks.text.text_task import TEXT_PRESET, Graded, Message, Problem, TextTask

TableRows = Iterable[tuple[str, Mapping[str, Any]]]
"""The rows of a table, each with its location for error messages."""
SEPARATOR = "\n"
"""Default separator between the steps of a response."""
_PRESET = TEXT_PRESET | {"update.schedule": "linear", "prompts": 16, "max_tokens": 1024}


@dataclass(frozen=True)
class ProblemTable:
    """Training problems, test problems, and notes on rows that were left out."""

    train: tuple[Problem, ...]
    test: tuple[Problem, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class TableTask(TextTask):
    """A table of prompts and answers. Subclasses define `rows` and `problem`."""

    def rows(self, part: str) -> TableRows | None:
        """Return the training or test rows (`part`: train or test) with their locations; None: no test rows."""
        raise NotImplementedError

    def problem(self, row: Mapping[str, Any], where: str) -> Problem:
        """Convert a row to a problem; raise ConfigError with its location if columns are missing or invalid."""
        raise NotImplementedError

    def problems(self, part: str) -> list[Problem] | None:
        rows = self.rows(part)
        return None if rows is None else [self.problem(row, where) for where, row in rows]

    def fingerprint(self) -> object:
        """Return a value that changes when the files of the table change."""
        return tuple(user_files.file_stamp(file) for name in self.paths if (file := getattr(self, name)))

    def build_table(self) -> ProblemTable:
        """Read the table: drop repeated prompts, and hold out prompts that are not trained on."""
        rows, test_rows = self.problems("train") or [], self.problems("test")
        train, notes = _drop_repeated_prompts(rows)
        if test_rows is None:
            train, test = _split(train)
        else:
            test, test_notes = _drop_repeated_prompts(test_rows)
            notes += [f"of the test problems, {note}" for note in test_notes]
            test_prompts = {user_files.canonical_prompt(problem.prompt) for problem in test}
            num_rows = len(train)
            train = [p for p in train if user_files.canonical_prompt(p.prompt) not in test_prompts]
            if len(train) < num_rows:
                notes.append(f"{num_rows - len(train)} rows are left out of training: their prompts are test problems")
        if not train or not test:
            raise ConfigError(
                f"{len(rows)} rows: needs at least two different prompts, one for training and one held out"
            )
        return ProblemTable(tuple(train), tuple(test), tuple(notes))

    @property
    def table(self) -> ProblemTable:
        return _table(self, self.fingerprint())

    @property
    def size(self) -> int | None:
        return len(self.table.train)

    def train(self, index: int) -> Problem:
        return self.table.train[index]

    def test(self, count: int) -> list[Problem]:
        return list(self.table.test[:count])

    def data_notes(self) -> list[str]:
        return list(self.table.notes)

    def verify(self) -> None:
        super().verify()
        _ = self.table


@dataclass(frozen=True)
class ColumnsTask(TableTask):
    """A table with configurable columns and answer check."""

    prompt_column: str = "prompt"
    """Column with the prompt: text, or the messages of a chat."""
    answer_column: str = "answer"
    """Column with the reference answer. It may be missing if --reward does not include the task's own check, or if an
    environment gives the rewards."""
    check: Literal["exact", "number", "math", "choice"] = "exact"
    """How an answer is compared: exact (text) | number | math (math-verify) | choice (the letter of an option)."""
    limit_column: str = ""
    """Column with a limit on response tokens per row, for tables that mix tasks. Empty: --max-tokens for all."""

    def grade(self, problem: Problem, response: str) -> Graded:
        if problem.answer is None and self.environment:  # the environment gives the rewards
            return Graded(0.0, False, False)
        if problem.answer is None:
            raise ValueError("the problem has no reference answer")
        return self.graded(*CHECKS[self.check](problem.answer, response))

    def gold(self, problem: Problem) -> str | None:
        if problem.answer is None or self.check == "exact":
            return problem.answer
        if self.check == "math":
            return f"\\boxed{{{problem.answer.strip().strip('$')}}}"
        return f"Answer: {option_letter(problem.answer) if self.check == 'choice' else problem.answer}"

    def wrong_responses(self, problem: Problem, other: str | None) -> list[str]:
        """Return the usual wrong responses and, for multiple choice, the next letter."""
        letter = option_letter(problem.answer or "") if self.check == "choice" else None
        next_letter = [] if letter is None else [f"Answer: {chr(ord('A') + (ord(letter) - ord('A') + 1) % 26)}"]
        return [*super().wrong_responses(problem, other), *next_letter]

    @property
    def answer(self) -> Callable[[str], str | None] | None:
        """Function that extracts the answer of a response for majority votes; None: the default extraction."""
        return chosen_option if self.check == "choice" else None

    def verify(self) -> None:
        if self.check == "math":
            import_optional("math_verify", "--check math", "lm")
        super().verify()

    def prepare(self) -> None:
        if self.check == "math":
            CHECKS["math"]("1", "1")

    def problem(self, row: Mapping[str, Any], where: str) -> Problem:
        user_files.require_columns(row, [self.prompt_column], where, ". Set --prompt-column")
        answer = row.get(self.answer_column)
        if any(entry.kind == OWN for entry in self.rewards) and answer is None and not self.environment:
            raise ConfigError(
                f"{where} has no {'value' if self.answer_column in row else 'column'} {self.answer_column}; there are: "
                f"{', '.join(row)}. Set --answer-column, or a --reward that needs no answer"
            )
        reserved = (
            self.prompt_column,
            self.answer_column,
            "prompt",
            "response",
            "answer",
        )  # arguments of reward functions
        columns = {name: value for name, value in row.items() if name not in reserved}
        if answer is not None and not isinstance(answer, str):
            answer = json.dumps(answer, ensure_ascii=False)
        if self.check == "choice" and answer is not None and option_letter(answer) is None:
            raise ConfigError(
                f"{where}, column {self.answer_column}: --check choice expects the letter of an option, such as B; got "
                f"{answer!r:.60}"
            )
        prompt = read_prompt(row[self.prompt_column], f"{where}, column {self.prompt_column}")
        return Problem(prompt, answer, columns, self._row_limit(row, where))

    def _row_limit(self, row: Mapping[str, Any], where: str) -> int | None:
        """Return the row's limit on response tokens; None: it has none."""
        if self.limit_column:
            user_files.require_columns(row, [self.limit_column], where, ". Set --limit-column")
        limit, minimum = row[self.limit_column] if self.limit_column else None, max(self.min_tokens, 1)
        if limit is not None and (type(limit) is not int or limit < minimum):
            raise ConfigError(
                f"{where}, column {self.limit_column}: a limit must be null or an integer of at least {minimum}; got "
                f"{limit!r:.60}"
            )
        return limit

    def data_notes(self) -> list[str]:
        """Describe the rows that were left out, and count row limits above --max-tokens."""
        problems = (*self.table.train, *self.table.test)
        num_above = sum((problem.max_tokens or 0) > self.max_tokens for problem in problems)
        note = f"{num_above} rows have a limit above --max-tokens {self.max_tokens}, which applies to them too"
        return [*super().data_notes(), *([note] if num_above else [])]


@dataclass(frozen=True)
class Jsonl(ColumnsTask):
    """jsonl:FILE: one JSON object per line, with a prompt and an answer."""

    source: str = ""
    """The file. Short form: jsonl:FILE."""
    test_file: str | None = None
    """A file of test problems in the same format. None: one prompt in ten is held out."""

    paths = ("source", "test_file")

    def rows(self, part: str) -> TableRows | None:
        if not self.source:
            raise ConfigError("jsonl needs a file: ascent train jsonl:FILE")
        file = self.source if part == "train" else self.test_file
        return user_files.read_jsonl(file) if file else None


@dataclass(frozen=True)
class Dataset(ColumnsTask):
    """dataset:NAME: any Hugging Face data set with a column of prompts and one of answers."""

    source: str = ""
    """Name on the hub, or a folder. Short form: dataset:NAME."""
    subset: str | None = None
    """Its configuration, if it has several."""
    split: str = "train"
    """The split to train on."""
    test_split: str | None = None
    """The split to test on. None: one prompt in ten is held out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source and Path(self.source).expanduser().is_dir():
            object.__setattr__(self, "source", user_files.absolute_path(self.source))

    def rows(self, part: str) -> TableRows | None:
        if not self.source:
            raise ConfigError("dataset needs a name: ascent train dataset:NAME, a name on the hub or a folder")
        split = self.split if part == "train" else self.test_split
        hint = "a folder works as well: dataset:FOLDER, or jsonl:FILE"
        return load_dataset(self.source, self.subset, split, hint) if split else None


def read_prompt(value: Any, where: str) -> str | list[Message]:
    """Return a prompt, text or chat messages; raise ConfigError with its location if it is neither."""
    if isinstance(value, str) and value.strip():
        return value
    keys = {"role", "content"}
    if isinstance(value, list) and value and all(isinstance(m, Mapping) and keys <= m.keys() for m in value):
        messages = [{"role": m["role"], "content": m["content"]} for m in value]
        if all(isinstance(part, str) for m in messages for part in m.values()):
            return messages
    raise ConfigError(f"{where}: a prompt must be text or a list of messages with role and content; got {value!r:.80}")


@functools.lru_cache(maxsize=4)
def _table(task: TableTask, fingerprint: object) -> ProblemTable:  # noqa: ARG001 (part of the cache's key)
    return task.build_table()


def _drop_repeated_prompts(problems: list[Problem]) -> tuple[list[Problem], list[str]]:
    """Keep the first problem of each prompt; the notes count the others."""
    first: dict[str, Problem] = {}
    num_repeated = num_conflicting = 0
    for problem in problems:
        earlier = first.setdefault(user_files.canonical_prompt(problem.prompt), problem)
        num_repeated += earlier is not problem and earlier.answer == problem.answer
        num_conflicting += earlier.answer != problem.answer
    notes = [f"{num_repeated} rows repeat a prompt and count once"] if num_repeated else []
    if num_conflicting:
        notes.append(
            f"{num_conflicting} rows have the prompt of an earlier row and another answer: the earlier one is used"
        )
    return list(first.values()), notes


def _split(problems: list[Problem]) -> tuple[list[Problem], list[Problem]]:
    """Hold out one prompt in ten by its hash; with at least two prompts, both parts get at least one."""
    held_out = [user_files.is_held_out(problem.prompt) for problem in problems]
    if len(problems) > 1 and len(set(held_out)) == 1:
        held_out[0] = not held_out[0]
    train = [problem for problem, out in zip(problems, held_out, strict=True) if not out]
    return train, [problem for problem, out in zip(problems, held_out, strict=True) if out]


def import_optional(module: str, what: str, extra: str) -> Any:
    """Import an optional library; raise ConfigError with the extra to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs {module.replace('_', '-')} ({error}): pip install 'ascent-rl[{extra}]'"
        ) from None


def load_dataset(name: str, subset: str | None, split: str, hint: str) -> TableRows:
    """Return the rows of a split with their locations; raise ConfigError if it cannot be loaded."""
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(f"dataset:{name} needs datasets: pip install 'ascent-rl[lm]'")
    is_local = Path(name).is_dir()
    if not is_local:
        _use_cache_without_hub()
    datasets = import_optional("datasets", f"dataset:{name}", "lm")
    try:
        if is_local and (Path(name, "state.json").exists() or Path(name, "dataset_dict.json").exists()):
            splits = datasets.load_from_disk(name)
        else:
            splits = datasets.load_dataset(name, subset)
    except Exception as error:
        raise ConfigError(
            f"dataset:{name} cannot be loaded: {error_line(error)}. Without access to the hub, {hint}"
        ) from None
    if not hasattr(splits, "keys"):
        splits = {split: splits}  # one table, saved without splits
    if split not in splits:
        raise ConfigError(
            f"dataset:{name} has no split {split}; there are: {', '.join(splits)}." + nearest(split, list(splits))
        )
    return ((f"dataset:{name}, {split}, row {i}", row) for i, row in enumerate(splits[split]))


def _use_cache_without_hub() -> None:
    """Use the local cache at once if the hub is unreachable, instead of retrying for half a minute."""
    host = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    proxied = any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    if proxied or host.hostname is None:
        return
    try:
        socket.getaddrinfo(host.hostname, host.port or 443)
    except OSError:
        from huggingface_hub import constants

        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True


# ---- offline data -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfflineFile(TableTask):
    """A file of responses to learn. Prompts may be repeated; one prompt in ten is held out."""

    source: str = ""
    """The file."""

    paths = ("source",)
    usage: ClassVar[str]
    """Error message if no file is set."""

    def response(self, problem: Problem) -> str:
        """The response to learn."""
        return problem.answer or ""

    def rows(self, part: str) -> TableRows | None:
        if not self.source:
            raise ConfigError(self.usage)
        if part != "train":
            return None
        if not self.source.startswith(python_objects.OBJECT_PREFIX):
            return user_files.read_jsonl(self.source)
        return [(f"rows, row {i}", row) for i, row in enumerate(python_objects.find_object(self.source, "rows"))]

    def fingerprint(self) -> object:
        is_object = self.source.startswith(python_objects.OBJECT_PREFIX)
        return self.source in python_objects.OBJECTS if is_object else super().fingerprint()

    def build_table(self) -> ProblemTable:
        train, test = user_files.split_held_out(
            self.problems("train") or [], lambda problem: problem.prompt, self.source
        )
        return ProblemTable(tuple(train), tuple(test), ())

    def grade(self, problem: Problem, response: str) -> Graded:
        """A response is correct if it equals that of the file."""
        same = response.strip() == self.response(problem).strip()
        return self.graded(same, same)


@dataclass(frozen=True)
class Demonstrations(OfflineFile):
    """demonstrations:FILE: prompts, each with a response to learn. `ascent sft FILE` trains on it."""

    source: str = ""
    """The file. Short form: ascent sft FILE."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or the messages of a chat."""
    response_column: str = "response"
    """Column with the response to learn."""

    data = "demonstrations"
    usage = "demonstrations need a file: ascent sft FILE"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "default": _PRESET | {"algorithm": "sft", "lr": 2e-5, "update.warmup": 0.05, "samples": 1}
    }

    def problem(self, row: Mapping[str, Any], where: str) -> Problem:
        user_files.require_columns(row, [self.prompt_column], where, ". Set --prompt-column")
        user_files.require_columns(row, [self.response_column], where, ". Set --response-column")
        response = row[self.response_column]
        if not isinstance(response, str) or not response.strip():
            raise ConfigError(f"{where}, column {self.response_column}: a response must be text; got {response!r:.80}")
        return Problem(read_prompt(row[self.prompt_column], f"{where}, column {self.prompt_column}"), response)


@dataclass(frozen=True)
class Preferences(OfflineFile):
    """preferences:FILE: pairs of responses, one chosen, one rejected, for `ascent dpo` and `ascent reward-model`."""

    source: str = ""
    """The file. Short form: ascent dpo FILE, ascent reward-model FILE."""

    data = "pairs"
    usage = "preferences need a file: ascent dpo FILE, or ascent reward-model FILE"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "default": _PRESET | {"algorithm": "dpo", "lr": 5e-6, "update.warmup": 0.1}
    }
    presets["reward-model"] = presets["default"] | {"algorithm": "reward-model", "lr": 1e-5}

    def problem(self, row: Mapping[str, Any], where: str) -> Problem:
        """Convert a pair; the chosen response becomes the answer.

        A response is text, or one message of the assistant. Without a prompt, chosen and rejected are whole chats.
        """
        user_files.require_columns(row, ("chosen", "rejected"), where, ". A pair needs both")
        chosen, rejected = row["chosen"], row["rejected"]
        if "prompt" in row:
            prompt = read_prompt(row["prompt"], f"{where}, column prompt")
        else:
            prompt, chosen, rejected = _common_beginning(chosen, rejected, where)
        chosen = _read_response(chosen, f"{where}, column chosen")
        rejected = _read_response(rejected, f"{where}, column rejected")
        if chosen == rejected:
            raise ConfigError(f"{where}: chosen and rejected are equal, so there is no preference. Remove the line")
        return Problem(prompt, chosen, {"rejected": rejected})


def _common_beginning(chosen: Any, rejected: Any, where: str) -> tuple[list[Message], Any, Any]:
    """Return the messages that two chats begin with, and the rest of each chat."""
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise ConfigError(
            f"{where} has no column prompt: without one, chosen and rejected are whole chats, lists of messages"
        )
    same = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen[:-1], rejected[:-1], strict=False)))
    prompt = read_prompt(chosen[:same], f"{where}: the common beginning of chosen and rejected")
    return prompt if isinstance(prompt, list) else [], chosen[same:], rejected[same:]


def _read_response(value: Any, where: str) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        message = value[0]
        value = message.get("content") if message.get("role", "assistant") == "assistant" else message
    if not isinstance(value, str):
        raise ConfigError(
            f"{where}: a response must be text, or a list with one message of the assistant; got {value!r:.80}"
        )
    return value


@dataclass(frozen=True)
class Steps(OfflineFile):
    """steps:FILE: responses in steps with one label each, for `ascent process-reward`.

    A label is a number, true or false: whether the step is correct, or the value of the response after it. The response
    is its steps joined by a separator. It ends with the end token, unless the column `cut` is true: then the response
    was truncated at the token limit.
    """

    source: str = ""
    """The file. Short form: ascent process-reward FILE."""
    separator: str = SEPARATOR
    """Text between two steps of a response. Default: a newline."""

    data = "steps"
    usage = "labeled steps need a file: ascent process-reward FILE"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "default": _PRESET | {"algorithm": "process-reward", "update.warmup": 0.1}
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.separator:
            raise ConfigError("--separator is empty: steps need a separator")

    def response(self, problem: Problem) -> str:
        return self.separator.join(problem.columns["steps"])

    def problem(self, row: Mapping[str, Any], where: str) -> Problem:
        steps, labels = user_files.steps_and_labels(row, where)
        for step in steps:
            if not isinstance(step, str) or not step:
                raise ConfigError(f"{where}, column steps: a step must be text; got {step!r:.80}")
            if self.separator in step:
                raise ConfigError(
                    f"{where}: the step {step!r:.60} contains the separator {self.separator!r}. Split it there, or "
                    "set --separator"
                )
        columns = {"steps": steps, "labels": labels, "cut": bool(row.get("cut", False))}
        return Problem(read_prompt(row["prompt"], f"{where}, column prompt"), None, columns)

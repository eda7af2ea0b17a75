"""Tasks whose problems are the rows of a table: read once, each prompt once, some of them held out.

A table is a JSONL file, or a Hugging Face data set by its name on the hub or from a folder. Offline data are JSONL:

    {"prompt": "What is 1 + 1?", "response": "2"}                               a demonstration, for `ascent sft`
    {"prompt": "What is 1 + 1?", "chosen": "2", "rejected": "3"}                a preference pair, with TRL's names
    {"prompt": "What is 2 + 3 + 4?", "steps": ["2 + 3 = 5", "5 + 4 = 10"], "labels": [1, 0]}      labelled steps

A prompt is words or the messages of a chat. Other columns are not read.
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
from ascent.tasks.text.answer_checking import CHECKS, chosen_option, labelled_option
from ascent.tasks.text.text_task import TEXT_PRESET, Graded, Message, Problem, TextTask

Rows = Iterable[tuple[str, Mapping[str, Any]]]
"""The rows of a table, each with its place, for messages."""
SEPARATOR = "\n"
"""What stands between two steps of a response, unless another separator is set."""
_PRESET = TEXT_PRESET | {"update.schedule": "linear", "prompts": 16, "max_tokens": 1024}


@dataclass(frozen=True)
class ProblemTable:
    """Problems to train on and to test on, and notes on what was left out."""

    train: tuple[Problem, ...]
    test: tuple[Problem, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class TableTask(TextTask):
    """A table of prompts and answers. A task derives from it and defines `rows` and `problem`."""

    def rows(self, part: str) -> Rows | None:
        """The rows to train on or to test on (`part`: train or test), with their places; None: no rows to test on."""
        raise NotImplementedError

    def problem(self, row: Mapping[str, Any], where: str) -> Problem:
        """A row as a problem; refused with its place if its columns are missing or wrong."""
        raise NotImplementedError

    def problems(self, part: str) -> list[Problem] | None:
        rows = self.rows(part)
        return None if rows is None else [self.problem(row, where) for where, row in rows]

    def fingerprint(self) -> object:
        """Changes when the files of the table do."""
        return tuple(user_files.file_stamp(file) for name in self.paths if (file := getattr(self, name)))

    def build_table(self) -> ProblemTable:
        """The table as it is now: each prompt once, and none both trained on and held out."""
        rows, test_rows = self.problems("train") or [], self.problems("test")
        train, notes = _once(rows)
        if test_rows is None:
            train, test = _split(train)
        else:
            test, more = _once(test_rows)
            notes += [f"of the test problems, {note}" for note in more]
            shared = {user_files.canonical_prompt(problem.prompt) for problem in test}
            kept = [problem for problem in train if user_files.canonical_prompt(problem.prompt) not in shared]
            if len(kept) < len(train):
                notes.append(f"{len(train) - len(kept)} rows are left out of training: their prompts are test problems")
            train = kept
        if not train or not test:
            raise ConfigError(
                f"{len(rows)} rows: at least two different prompts are needed, one to train on and one to hold out"
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
    """A table whose columns and check are chosen."""

    prompt_column: str = "prompt"
    """Column with the prompt: text, or the messages of a chat."""
    answer_column: str = "answer"
    """Column with the right answer. It may be missing if --reward leaves out the task's own check, or an environment
    pays."""
    check: Literal["exact", "number", "math", "choice"] = "exact"
    """How an answer is compared: exact (text) | number | math (math-verify) | choice (the letter of an option)."""
    limit_column: str = ""
    """Column with a row's own limit on tokens, for a table that mixes several tasks. Empty: --max-tokens for all."""

    def grade(self, problem: Problem, response: str) -> Graded:
        if problem.answer is None and self.environment:  # which pays by itself
            return Graded(0.0, False, False)
        if problem.answer is None:
            raise ValueError("there is no answer to compare with")
        return self.graded(*CHECKS[self.check](problem.answer, response))

    def gold(self, problem: Problem) -> str | None:
        if problem.answer is None or self.check == "exact":
            return problem.answer
        if self.check == "math":
            return f"\\boxed{{{problem.answer.strip().strip('$')}}}"
        return f"Answer: {labelled_option(problem.answer) if self.check == 'choice' else problem.answer}"

    def wrong_responses(self, problem: Problem, other: str | None) -> list[str]:
        """The usual wrong responses; and for a multiple choice the next letter."""
        letter = labelled_option(problem.answer or "") if self.check == "choice" else None
        following = [] if letter is None else [f"Answer: {chr(ord('A') + (ord(letter) - ord('A') + 1) % 26)}"]
        return [*super().wrong_responses(problem, other), *following]

    @property
    def answer(self) -> Callable[[str], str | None] | None:
        """What finds the answer of a response for a vote, where it needs no right answer to know its kind."""
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
                f"{', '.join(row)}. Set --answer-column, or a --reward of your own that needs none"
            )
        taken = (self.prompt_column, self.answer_column, "prompt", "response", "answer")  # a reward function's own
        columns = {name: value for name, value in row.items() if name not in taken}
        if answer is not None and not isinstance(answer, str):
            answer = json.dumps(answer, ensure_ascii=False)
        if self.check == "choice" and answer is not None and labelled_option(answer) is None:
            raise ConfigError(
                f"{where}, column {self.answer_column}: --check choice compares the letters of options, such as B, and "
                f"this is {answer!r:.60}"
            )
        prompt = read_prompt(row[self.prompt_column], f"{where}, column {self.prompt_column}")
        return Problem(prompt, answer, columns, self._own_limit(row, where))

    def _own_limit(self, row: Mapping[str, Any], where: str) -> int | None:
        """The row's own limit; None: it has none."""
        if self.limit_column:
            user_files.require_columns(row, [self.limit_column], where, ". Set --limit-column")
        own, least = row[self.limit_column] if self.limit_column else None, max(self.min_tokens, 1)
        if own is not None and (type(own) is not int or own < least):
            raise ConfigError(
                f"{where}, column {self.limit_column}: a limit is null or a number from {least} on, not {own!r:.60}"
            )
        return own

    def data_notes(self) -> list[str]:
        """What was left out, and how many limits of rows are above the limit of all."""
        table = self.table
        above = sum((problem.max_tokens or 0) > self.max_tokens for problem in (*table.train, *table.test))
        note = f"{above} rows have a limit above --max-tokens {self.max_tokens}, which holds for them too"
        return [*super().data_notes(), *([note] if above else [])]


@dataclass(frozen=True)
class Jsonl(ColumnsTask):
    """jsonl:FILE: one JSON object per line, with a prompt and an answer."""

    source: str = ""
    """The file. Short form: jsonl:FILE."""
    test_file: str | None = None
    """A file of test problems in the same form. None: one prompt in ten is held out."""

    paths = ("source", "test_file")

    def rows(self, part: str) -> Rows | None:
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

    def rows(self, part: str) -> Rows | None:
        if not self.source:
            raise ConfigError("dataset needs a name: ascent train dataset:NAME, a name on the hub or a folder")
        split = self.split if part == "train" else self.test_split
        hint = "a folder works as well: dataset:FOLDER, or jsonl:FILE"
        return load_dataset(self.source, self.subset, split, hint) if split else None


def read_prompt(value: Any, where: str) -> str | list[Message]:
    """Text, or the messages of a chat; refused with its place if it is neither."""
    if isinstance(value, str) and value.strip():
        return value
    keys = {"role", "content"}
    if isinstance(value, list) and value and all(isinstance(m, Mapping) and keys <= m.keys() for m in value):
        messages = [{"role": m["role"], "content": m["content"]} for m in value]
        if all(isinstance(part, str) for m in messages for part in m.values()):
            return messages
    raise ConfigError(f"{where}: a prompt must be text, or a list of messages with role and content; got {value!r:.80}")


@functools.lru_cache(maxsize=4)
def _table(task: TableTask, stamp: object) -> ProblemTable:  # noqa: ARG001 (part of the cache's key)
    return task.build_table()


def _once(problems: list[Problem]) -> tuple[list[Problem], list[str]]:
    """The first problem of each prompt, and how many others there were."""
    first: dict[str, Problem] = {}
    repeated = other = 0
    for problem in problems:
        kept = first.setdefault(user_files.canonical_prompt(problem.prompt), problem)
        repeated += kept is not problem and kept.answer == problem.answer
        other += kept.answer != problem.answer
    notes = [f"{repeated} rows repeat a prompt and count once"] if repeated else []
    if other:
        notes.append(f"{other} rows have the prompt of an earlier row and another answer: the earlier one is used")
    return list(first.values()), notes


def _split(problems: list[Problem]) -> tuple[list[Problem], list[Problem]]:
    """One prompt in ten held out by its hash; at least one on either side, if there are two."""
    held = [user_files.is_held_out(problem.prompt) for problem in problems]
    if len(problems) > 1 and len(set(held)) == 1:
        held[0] = not held[0]
    train = [problem for problem, out in zip(problems, held, strict=True) if not out]
    return train, [problem for problem, out in zip(problems, held, strict=True) if out]


def import_optional(module: str, what: str, extra: str) -> Any:
    """An optional library; refused with what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs {module.replace('_', '-')} ({error}): pip install 'ascent-rl[{extra}]'"
        ) from None


def load_dataset(name: str, subset: str | None, split: str, hint: str) -> Rows:
    """The rows of one split, with their places; refused with the reason if it cannot be loaded."""
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(f"dataset:{name} needs datasets: pip install 'ascent-rl[lm]'")
    local = Path(name).is_dir()
    if not local:
        _give_up_early()
    datasets = import_optional("datasets", f"dataset:{name}", "lm")
    try:
        if local and (Path(name, "state.json").exists() or Path(name, "dataset_dict.json").exists()):
            splits = datasets.load_from_disk(name)
        else:
            splits = datasets.load_dataset(name, subset)
    except Exception as error:
        raise ConfigError(f"dataset:{name} cannot be loaded: {error_line(error)}. Without a hub {hint}") from None
    if not hasattr(splits, "keys"):
        splits = {split: splits}  # one table, saved without splits
    if split not in splits:
        raise ConfigError(
            (f"dataset:{name} has no split {split}; there are: {', '.join(splits)}.") + nearest(split, list(splits))
        )
    return ((f"dataset:{name}, {split}, row {i}", row) for i, row in enumerate(splits[split]))


def _give_up_early() -> None:
    """With no hub in reach, use what is cached at once, instead of retrying for half a minute."""
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
    """A file of responses to learn from. A prompt may be there more than once; one prompt in ten is held out."""

    source: str = ""
    """The file."""

    paths = ("source",)
    usage: ClassVar[str]
    """What to say where no file is named."""

    def response(self, problem: Problem) -> str:
        """The response to learn."""
        return problem.answer or ""

    def rows(self, part: str) -> Rows | None:
        if not self.source:
            raise ConfigError(self.usage)
        if part != "train":
            return None
        if not self.source.startswith(python_objects.OBJECT_PREFIX):
            return user_files.read_jsonl(self.source)
        return [(f"rows, row {i}", row) for i, row in enumerate(python_objects.find_object(self.source, "rows"))]

    def fingerprint(self) -> object:
        given = self.source.startswith(python_objects.OBJECT_PREFIX)
        return self.source in python_objects.OBJECTS if given else super().fingerprint()

    def build_table(self) -> ProblemTable:
        train, test = user_files.split_held_out(
            self.problems("train") or [], lambda problem: problem.prompt, self.source
        )
        return ProblemTable(tuple(train), tuple(test), ())

    def grade(self, problem: Problem, response: str) -> Graded:
        """Right is the very response of the file."""
        same = response.strip() == self.response(problem).strip()
        return self.graded(same, same)


@dataclass(frozen=True)
class Demonstrations(OfflineFile):
    """demonstrations:FILE: prompts, each with a response to learn. `ascent sft FILE` trains on it."""

    source: str = ""
    """The file. Short form: ascent sft FILE."""
    prompt_column: str = "prompt"
    """Column with the prompt: words, or the messages of a chat."""
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
            raise ConfigError(
                f"{where}, column {self.response_column}: a response is words, and it is {response!r:.80}"
            )
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
        """The chosen response is the answer.

        A response is words, or one message of the assistant. Without a prompt, chosen and rejected are whole chats.
        """
        user_files.require_columns(row, ("chosen", "rejected"), where, ". A pair has both")
        chosen, rejected = row["chosen"], row["rejected"]
        if "prompt" in row:
            prompt = read_prompt(row["prompt"], f"{where}, column prompt")
        else:
            prompt, chosen, rejected = _common_beginning(chosen, rejected, where)
        chosen = _read_response(chosen, f"{where}, column chosen")
        rejected = _read_response(rejected, f"{where}, column rejected")
        if chosen == rejected:
            raise ConfigError(
                f"{where}: chosen and rejected are the same, so nothing was preferred. Leave the line out"
            )
        return Problem(prompt, chosen, {"rejected": rejected})


def _common_beginning(chosen: Any, rejected: Any, where: str) -> tuple[list[Message], Any, Any]:
    """The messages that two chats begin with, and how each of them continues."""
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise ConfigError(
            f"{where} has no column prompt: without one, chosen and rejected are whole chats, lists of messages"
        )
    same = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen[:-1], rejected[:-1], strict=False)))
    prompt = read_prompt(chosen[:same], f"{where}: what chosen and rejected share")
    return prompt if isinstance(prompt, list) else [], chosen[same:], rejected[same:]


def _read_response(value: Any, where: str) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        message = value[0]
        value = message.get("content") if message.get("role", "assistant") == "assistant" else message
    if not isinstance(value, str):
        raise ConfigError(
            f"{where}: a response is words, or a list with one message of the assistant, and it is {value!r:.80}"
        )
    return value


@dataclass(frozen=True)
class Steps(OfflineFile):
    """steps:FILE: responses in steps, with a label for each. `ascent process-reward FILE` learns them.

    A label is a number, or true or false: whether the step is right, or what the response is worth after it. The
    response is its steps with a separator between them. The end token closes it, unless the column `cut` is true:
    then the limit on its length has cut it off.
    """

    source: str = ""
    """The file. Short form: ascent process-reward FILE."""
    separator: str = SEPARATOR
    """What stands between two steps of a response. Default: a newline."""

    data = "steps"
    usage = "labelled steps need a file: ascent process-reward FILE"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "default": _PRESET | {"algorithm": "process-reward", "update.warmup": 0.1}
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.separator:
            raise ConfigError("--separator is empty: something has to stand between two steps")

    def response(self, problem: Problem) -> str:
        return self.separator.join(problem.columns["steps"])

    def problem(self, row: Mapping[str, Any], where: str) -> Problem:
        steps, labels = user_files.steps_and_labels(row, where)
        for step in steps:
            if not isinstance(step, str) or not step:
                raise ConfigError(f"{where}, column steps: a step is words, and one is {step!r:.80}")
            if self.separator in step:
                raise ConfigError(
                    f"{where}: the step {step!r:.60} holds the separator {self.separator!r}, so it would be two. Cut "
                    "it there, or set --separator to what stands between steps"
                )
        columns = {"steps": steps, "labels": labels, "cut": bool(row.get("cut", False))}
        return Problem(read_prompt(row["prompt"], f"{where}, column prompt"), None, columns)

"""Files of offline data: demonstrations, preference pairs and labelled steps, one JSON object per line.

    {"prompt": "What is 1 + 1?", "response": "2"}                               a demonstration, for `ascent sft`
    {"prompt": "What is 1 + 1?", "chosen": "2", "rejected": "3"}                a preference pair, with TRL's names
    {"prompt": "What is 2 + 3 + 4?", "steps": ["2 + 3 = 5", "5 + 4 = 10"], "labels": [1, 0]}      labelled steps

A prompt is words or the messages of a chat. Other columns are not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ascent.tasks.base import refuse
from ascent.tasks.files import absolute_path, file_stamp, read_jsonl, split_held_out, steps_and_labels
from ascent.tasks.text.base import TEXT_PRESET
from ascent.tasks.text.problems import Graded, Message, Problem
from ascent.tasks.text.rows import ProblemTable, TableTask, read_prompt

SEPARATOR = "\n"
"""What stands between two steps of a response, unless another separator is set."""
_PRESET = TEXT_PRESET | {"update.schedule": "linear", "prompts": 16, "max_tokens": 1024}


@dataclass(frozen=True)
class OfflineFile(TableTask):
    """A file of responses to learn from. A prompt may be there more than once; one prompt in ten is held out."""

    source: str = ""
    """The file."""

    usage: ClassVar[str]
    """What to say where no file is named."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source:
            object.__setattr__(self, "source", absolute_path(self.source))

    def problem(self, row: dict[str, Any], where: str) -> Problem:
        """A line as a problem; refused with its place if it is not one."""
        raise NotImplementedError

    def response(self, problem: Problem) -> str:
        """The response to learn."""
        return problem.answer or ""

    def stamp(self) -> object:
        return file_stamp(self.source)

    def tabulate(self) -> ProblemTable:
        if not self.source:
            refuse(self.usage)
        problems = [self.problem(row, f"{self.source}, line {line}") for line, row in read_jsonl(Path(self.source))]
        train, test = split_held_out(problems, lambda problem: problem.prompt, self.source)
        return ProblemTable(tuple(train), tuple(test), ())

    def grade(self, problem: Problem, response: str) -> Graded:
        """Right is the very response of the file."""
        same = response.strip() == self.response(problem).strip()
        return self.graded(same, same)


# ---- demonstrations ---------------------------------------------------------------------------------


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

    def problem(self, row: dict[str, Any], where: str) -> Problem:
        for column in (self.prompt_column, self.response_column):
            if column not in row:
                flag = "--prompt-column" if column == self.prompt_column else "--response-column"
                refuse(f"{where} has no column {column}; there are: {', '.join(row) or 'none'}. Set {flag}")
        response = row[self.response_column]
        if not isinstance(response, str) or not response.strip():
            refuse(f"{where}, column {self.response_column}: a response is words, and it is {response!r:.80}")
        return Problem(read_prompt(row[self.prompt_column], f"{where}, column {self.prompt_column}"), response)


# ---- preference pairs -------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Two responses to a prompt, of which one was preferred."""

    prompt: str | list[Message]
    chosen: str
    rejected: str


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

    def problem(self, row: dict[str, Any], where: str) -> Problem:
        """The chosen response is the answer."""
        pair = _read_pair(row, where)
        return Problem(pair.prompt, pair.chosen, {"rejected": pair.rejected})


def read_pairs(file: str | Path) -> list[Pair]:
    """The preference pairs of a file; a line that is not a pair is refused with its number."""
    return [_read_pair(row, f"{file}, line {line}") for line, row in read_jsonl(Path(file))]


def write_pairs(file: str | Path, pairs: Iterable[Pair | dict[str, Any]]) -> Path:
    """Pairs (or objects with their three columns, and more) as such a file, written aside and renamed."""
    path = Path(file)
    aside = path.with_name(f".{path.name}.new")
    rows = (pair._asdict() if isinstance(pair, Pair) else pair for pair in pairs)
    aside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    os.replace(aside, path)
    return path


def _read_pair(row: dict[str, Any], where: str) -> Pair:
    """A response is words, or one message of the assistant. Without a prompt, chosen and rejected are whole chats."""
    for column in ("chosen", "rejected"):
        if column not in row:
            refuse(f"{where} has no column {column}; there are: {', '.join(row) or 'none'}. A pair has both")
    if "prompt" in row:
        prompt = read_prompt(row["prompt"], f"{where}, column prompt")
        chosen, rejected = row["chosen"], row["rejected"]
    else:
        prompt, chosen, rejected = _common_beginning(row["chosen"], row["rejected"], where)
    pair = Pair(
        prompt,
        _read_response(chosen, f"{where}, column chosen"),
        _read_response(rejected, f"{where}, column rejected"),
    )
    if pair.chosen == pair.rejected:
        refuse(f"{where}: chosen and rejected are the same, so nothing was preferred. Leave the line out")
    return pair


def _common_beginning(chosen: Any, rejected: Any, where: str) -> tuple[list[Message], Any, Any]:
    """The messages that two chats begin with, and how each of them continues."""
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        refuse(f"{where} has no column prompt: without one, chosen and rejected are whole chats, lists of messages")
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    prompt = read_prompt(chosen[:same], f"{where}: what chosen and rejected share")
    return prompt if isinstance(prompt, list) else [], chosen[same:], rejected[same:]


def _read_response(value: Any, where: str) -> str:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        message = value[0]
        value = message.get("content") if message.get("role", "assistant") == "assistant" else message
    if not isinstance(value, str):
        refuse(f"{where}: a response is words, or a list with one message of the assistant, and it is {value!r:.80}")
    return value


# ---- labelled steps ---------------------------------------------------------------------------------


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
            refuse("--separator is empty: something has to stand between two steps")

    def response(self, problem: Problem) -> str:
        return self.separator.join(problem.columns["steps"])

    def problem(self, row: dict[str, Any], where: str) -> Problem:
        steps, labels = steps_and_labels(row, where)
        for step in steps:
            if not isinstance(step, str) or not step:
                refuse(f"{where}, column steps: a step is words, and one is {step!r:.80}")
            if self.separator in step:
                refuse(
                    f"{where}: the step {step!r:.60} holds the separator {self.separator!r}, so it would be two. Cut "
                    "it there, or set --separator to what stands between steps"
                )
        columns = {"steps": steps, "labels": labels, "cut": bool(row.get("cut", False))}
        return Problem(read_prompt(row["prompt"], f"{where}, column prompt"), None, columns)

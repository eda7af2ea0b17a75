"""Preference pairs: a JSONL file of prompts, each with a response that was chosen and one that was rejected.

One JSON object a line, with TRL's names:

    {"prompt": "What is 1 + 1?", "chosen": "2", "rejected": "3"}

A prompt is words or the messages of a chat; a response is words, or the one message of the assistant. Without a
prompt, chosen and rejected are whole chats, and the prompt is what they share. Other columns are not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ascent.tasks.text.base import DEFAULT, Message, Problem, refuse
from ascent.tasks.text.filed import Filed
from ascent.tasks.text.jsonl import read_lines
from ascent.tasks.text.rows import prompt_of


class Pair(NamedTuple):
    """Two responses to a prompt, of which one was preferred."""

    prompt: str | list[Message]
    chosen: str
    rejected: str


def read_pairs(file: str | Path) -> list[Pair]:
    """The pairs of a file; what is none is refused with its line."""
    return [_pair(row, f"{file}, line {line}") for line, row in read_lines(Path(file))]


def write_pairs(file: str | Path, pairs: Iterable[Pair | dict[str, Any]]) -> Path:
    """Pairs (or objects with their three columns, and more) as such a file, written aside and renamed."""
    path = Path(file)
    aside = path.with_name(f".{path.name}.new")
    rows = (pair._asdict() if isinstance(pair, Pair) else pair for pair in pairs)
    aside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    os.replace(aside, path)
    return path


def _pair(row: dict[str, Any], where: str) -> Pair:
    for column in ("chosen", "rejected"):
        if column not in row:
            refuse(f"{where} has no column {column}; there are: {', '.join(row) or 'none'}. A pair has both")
    if "prompt" in row:
        prompt = prompt_of(row["prompt"], f"{where}, column prompt")
        chosen, rejected = row["chosen"], row["rejected"]
    else:
        prompt, chosen, rejected = _shared(row["chosen"], row["rejected"], where)
    pair = Pair(prompt, _words(chosen, f"{where}, column chosen"), _words(rejected, f"{where}, column rejected"))
    if pair.chosen == pair.rejected:
        refuse(f"{where}: chosen and rejected are the same, so nothing was preferred. Leave the line out")
    return pair


def _shared(chosen: Any, rejected: Any, where: str) -> tuple[list[Message], Any, Any]:
    """The messages that two chats begin with, and how each of them goes on."""
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        refuse(f"{where} has no column prompt: without one, chosen and rejected are whole chats, lists of messages")
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    prompt = prompt_of(chosen[:same], f"{where}: what chosen and rejected share")
    return prompt if isinstance(prompt, list) else [], chosen[same:], rejected[same:]


def _words(value: Any, where: str) -> str:
    """A response: words, or one message of the assistant."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        said = value[0]
        value = said.get("content") if said.get("role", "assistant") == "assistant" else said
    if not isinstance(value, str):
        refuse(f"{where}: a response is words, or a list with one message of the assistant, and it is {value!r:.80}")
    return value


@dataclass(frozen=True)
class Preferences(Filed):
    """preferences:FILE: pairs of responses, one chosen, one rejected, for `ascent dpo` and `ascent reward-model`."""

    source: str = ""
    """The file. Short form: ascent dpo FILE, ascent reward-model FILE."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "default": DEFAULT
        | {
            "algorithm": "dpo",
            "lr": 5e-6,
            "update.schedule": "linear",
            "update.warmup": 0.1,
            "prompts": 16,
            "max_tokens": 1024,
        }
    }
    presets["reward-model"] = presets["default"] | {"algorithm": "reward-model", "lr": 1e-5}

    def missing(self) -> str:
        return "preferences need a file: ascent dpo FILE, or ascent reward-model FILE"

    def problem(self, row: dict[str, Any], where: str) -> Problem:
        """The chosen response is the answer."""
        pair = _pair(row, where)
        return Problem(pair.prompt, pair.chosen, {"rejected": pair.rejected})

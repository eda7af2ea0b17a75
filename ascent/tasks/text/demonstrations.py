"""Demonstrations: a JSONL file of prompts and responses to learn from as they are (SFT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ascent.tasks.text.base import DEFAULT, Problem, refuse
from ascent.tasks.text.filed import Filed
from ascent.tasks.text.rows import prompt_of


@dataclass(frozen=True)
class Demonstrations(Filed):
    """demonstrations:FILE: one JSON object a line, with a prompt and a response. `ascent sft FILE` trains on it."""

    source: str = ""
    """The file. Short form: ascent sft FILE."""
    prompt_column: str = "prompt"
    """Column with the prompt: words, or the messages of a chat."""
    response_column: str = "response"
    """Column with the response to learn."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "default": DEFAULT
        | {
            "algorithm": "sft",
            "lr": 2e-5,
            "update.schedule": "linear",
            "update.warmup": 0.05,
            "prompts": 16,
            "samples": 1,
            "max_tokens": 1024,
        }
    }

    def missing(self) -> str:
        return "demonstrations need a file: ascent sft FILE"

    def problem(self, row: dict[str, Any], where: str) -> Problem:
        for column in (self.prompt_column, self.response_column):
            if column not in row:
                flag = "--prompt-column" if column == self.prompt_column else "--response-column"
                refuse(f"{where} has no column {column}; there are: {', '.join(row) or 'none'}. Set {flag}")
        response = row[self.response_column]
        if not isinstance(response, str) or not response.strip():
            refuse(f"{where}, column {self.response_column}: a response is words, and it is {response!r:.80}")
        return Problem(prompt_of(row[self.prompt_column], f"{where}, column {self.prompt_column}"), response)

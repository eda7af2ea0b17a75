"""verl's rollouts (`trainer.rollout_data_dir`): 10.jsonl, one file a step and one line a response.

A line has input, output, gts (what was asked for; not in old ones), score, step, and whatever the reward function
returned beside the score (`acc` is its strict score). Lines are balanced over the workers, so a group is all lines with
the same input, wherever they stand. Nothing is said of tokens.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from ascent.types import Refused
from ascent.viewer.reading import loads

NAME = re.compile(r"(\d{1,12})\.jsonl")
NEEDED = ("input", "output", "score")
KNOWN = {*NEEDED, "gts", "step", "acc", "request_id", "uid"}
PART = "{}"
Row = dict[str, Any]


def files(folder: Path) -> dict[int, Path]:
    try:
        return {int(m[1]): path for path in folder.iterdir() if (m := NAME.fullmatch(path.name))}
    except OSError:
        return {}


def looks_like(folder: Path) -> bool:
    found = files(folder)
    if not found:
        return False
    try:
        with open(found[min(found)], "rb") as file:
            first = loads(file.readline(10_000_000))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and all(key in first for key in NEEDED)


def names(folder: Path) -> None:
    """verl says nowhere what its score is made of."""


def read(path: Path, _: None = None) -> list[Row]:
    """The rows of a file; a torn last line is left out, any other that is no JSON is refused."""
    groups: dict[str, int] = {}
    sizes: dict[int, int] = {}
    rows = []
    for number, line in enumerate(_lines(path), 1):
        try:
            given = loads(line)
        except ValueError:
            raise Refused(f"{path.name}, line {number}, is no JSON") from None
        if not isinstance(given, dict) or not all(key in given for key in NEEDED):
            raise Refused(f"{path.name}, line {number}, has no {', '.join(NEEDED)}: these are not verl's rollouts")
        prompt = _text(given["input"])
        group = groups.setdefault(str(given.get("uid") or prompt), len(groups))
        sample = sizes[group] = sizes.get(group, -1) + 1
        rows.append(_row(given, prompt, group, sample))
    return sorted(rows, key=lambda row: (row["group"], row["sample"]))


def _row(given: Row, prompt: str, group: int, sample: int) -> Row:
    score = given["score"]
    right = isinstance(score, int | float) and math.isfinite(score)
    row = {
        "step": given.get("step"),
        "group": group,
        "sample": sample,
        "prompt_text": prompt,
        "response_text": _text(given["output"]),
        "reward": score if right else None,
        "valid": right,
    }
    if given.get("acc") in (0, 1):  # also true and false
        row["correct"] = bool(given["acc"])
    if given.get("gts") is not None:
        row["answer"] = _text(given["gts"])
    extra = {k: v for k, v in given.items() if k not in KNOWN and v is not None}
    row["parts"] = {k: float(v) for k, v in extra.items() if isinstance(v, int | float)}
    row["said"] = {k: _text(v)[:500] for k, v in extra.items() if not isinstance(v, int | float)}
    return row


def _lines(path: Path) -> list[bytes]:
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    return [line for line in whole.split(b"\n") if line.strip()]


def _text(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)


def logged(folder: Path) -> tuple[dict[int, dict[str, Any]], list[str]]:  # noqa: ARG001
    """verl leaves its curves to trackers."""
    return {}, []


def logs(folder: Path) -> list[Path]:  # noqa: ARG001
    return []

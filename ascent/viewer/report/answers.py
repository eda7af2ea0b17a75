"""Greedy answers in a report: which were right at the first recorded evaluation, and which at the last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ascent.types import Refused
from ascent.viewer import recorded
from ascent.viewer.report.html import Markup, joined, shown, table, tag

COLUMNS = (*recorded.NEEDED, "valid", "correct", "status")
CHANGES = (("wrong → right", False, True), ("right → wrong", True, False), ("still wrong", False, False))
EACH = 2
"""Answers of each kind of change that are shown."""
LONGEST = 300
"""Characters of a text that are shown."""
_TF = (False, True)
Row = dict[str, Any]


def section(folder: Path, kind: str, greedy: str) -> Markup | None:
    """What became of the answers between two evaluations; None where none were recorded."""
    steps, problems = recorded.steps(folder, kind, recorded.HELD_OUT), list[str]()
    if not steps:
        return None
    first, last = _readable(folder, steps, problems), _readable(folder, steps[::-1], problems)
    trouble = tag("ul", *(tag("li", text) for text in dict.fromkeys(problems)), class_="problems") if problems else None
    if first is None or last is None:
        return trouble
    return joined([trouble, _changes(first, last, greedy) if first[0] < last[0] else _one(last, greedy)])


def _readable(folder: Path, steps: list[int], problems: list[str]) -> tuple[int, dict[Any, Row]] | None:
    """The first of these steps whose file can be read, with its answers by prompt."""
    for step in steps:
        try:
            rows = recorded.brief(folder, "ascent", step, COLUMNS, recorded.HELD_OUT)
        except (Refused, OSError) as error:
            problems.append(str(error))
            continue
        return step, {(row["group"], row["prompt_text"]): row for row in rows}
    return None


def _right(row: Row) -> bool | None:
    """None: its reward failed, or nobody knows."""
    failed = row.get("status") == "failed" or row.get("valid") is False
    return None if failed or not isinstance(row.get("correct"), bool) else row["correct"]


def _changes(first: tuple[int, dict[Any, Row]], last: tuple[int, dict[Any, Row]], greedy: str) -> Markup:
    both = [(first[1][key], last[1][key]) for key in first[1] if key in last[1]]
    found = {(a, b): [pair for pair in both if (_right(pair[0]), _right(pair[1])) == (a, b)] for a in _TF for b in _TF}
    words = (
        f"{_plural(len(both), 'prompt')} ({greedy}), at step {shown(first[0])} and at step {shown(last[0])}, the first "
        f"and the last evaluation whose answers can be read: {len(found[False, True])} went from wrong to right, "
        f"{len(found[True, False])} from right to wrong, {len(found[False, False])} stayed wrong and "
        f"{len(found[True, True])} stayed right"
    )
    unknown = len(both) - sum(map(len, found.values()))
    words += f"; of {unknown} it is not known." if unknown else "."
    rows = [
        [name, *map(_text, (a["prompt_text"], a["response_text"], b["response_text"]))]
        for name, was, now in CHANGES
        for a, b in found[was, now][:EACH]
    ]
    head = ["", "prompt", f"answer at step {shown(first[0])}", f"answer at step {shown(last[0])}"]
    return joined([tag("p", words), table(head, rows, "A few of them") if rows else None])


def _one(found: tuple[int, dict[Any, Row]], greedy: str) -> Markup:
    step, rows = found[0], list(found[1].values())
    right = sum(_right(row) is True for row in rows)
    words = f"{_plural(len(rows), 'prompt')} ({greedy}), at step {shown(step)}: {right} right."
    wrong = [row for row in rows if _right(row) is False][: 2 * EACH]
    told = [["wrong", _text(row["prompt_text"]), _text(row["response_text"])] for row in wrong]
    return joined([tag("p", words), table(["", "prompt", "answer"], told, "A few wrong ones") if told else None])


def _text(value: Any) -> Markup:
    text = str(value or "")
    return tag("span", text[:LONGEST] + " …" * (len(text) > LONGEST), class_="text")


def _plural(number: int, one: str) -> str:
    return f"{shown(number)} {one}{'s' * (number != 1)}"

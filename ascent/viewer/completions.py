"""The recorded responses of a step as groups: filtered, searched, sorted, a page at a time."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ascent.types import Refused
from ascent.viewer import recorded

Row = dict[str, Any]
SHOWS = ("all", "right", "wrong", "truncated", "failed", "mixed")
SORTS = ("reward", "advantage", "length", "sample")
COUNT, MOST = 8, 32
"""Groups on a page, as a rule and at most."""
LONGEST = 1000
"""Characters that are searched for."""
NONE = {
    recorded.SAMPLED: "No responses were recorded. `--record-rollouts 4` (the default) keeps four groups every "
    "--record-every steps",
    recorded.HELD_OUT: "No answers to held-out prompts were recorded. Every evaluation records them, but for "
    "`--record-rollouts none` and in runs of older versions",
}
PLAIN = {"step", "group", "sample", "prompt_text", "response_text", "reward", "valid", "correct", "truncated"}
PLAIN |= {"length", "advantage", "status", "reason", "parts", "said", "answer"}
"""What is no component of the reward."""


def key_of(prompt: str) -> str:
    """A short name of a prompt, the same in every run and step."""
    return hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def number(value: Any) -> float | int | str | None:
    """A number as JSON can hold it: six digits; one that is not finite as a word; None: not known."""
    if value is None or isinstance(value, bool | int):
        return value
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return float(f"{value:.6g}")


def page(
    folder: Path,
    kind: str = "ascent",
    step: int | None = None,
    sort: str = "reward",
    show: str = "all",
    q: str = "",
    offset: int = 0,
    count: int = COUNT,
    which: str = recorded.SAMPLED,
) -> dict[str, Any]:
    """Some groups of a step (the newest, if not told; the nearest, if that one was not recorded)."""
    _check(sort, show, q)
    check_set(which)
    steps = recorded.steps(folder, kind, which)
    answer: dict[str, Any] = {"kind": kind, "recorded": steps, "asked": step, "sort": sort, "show": show, "q": q}
    answer |= {"set": which, "sets": {name: len(recorded.steps(folder, kind, name)) for name in recorded.SETS}}
    if not steps:
        return _nothing() | answer | {"problems": [NONE[which]]}
    chosen = steps[-1] if step is None else min(steps, key=lambda s: (abs(s - step), s))
    at = steps.index(chosen)
    answer |= {"step": chosen, "previous": steps[at - 1] if at else None}
    answer["next"] = steps[at + 1] if at + 1 < len(steps) else None
    try:
        rows = recorded.brief(folder, kind, chosen, which=which)
    except Refused as error:
        return _nothing() | answer | {"problems": [str(error)]}
    groups = grouped(rows)
    found = [group for group in (_kept(group, show, q.casefold()) for group in groups) if group["responses"]]
    count = max(1, min(count, MOST))
    offset = max(0, min(offset, (len(found) - 1) // count * count)) if found else 0
    shown = found[offset : offset + count]
    for group in shown:
        group["responses"].sort(key=ORDERS[sort])
    return answer | {
        **{"offset": offset, "count": count, "total": len(found)},
        "responses": sum(len(group["responses"]) for group in found),
        "shares": shares(groups),
        "columns": _parts(rows),
        "groups": [{k: number(v) if isinstance(v, float) else v for k, v in group.items()} for group in shown],
        "problems": [],
    }


def _nothing() -> dict[str, Any]:
    empty = {"step": None, "previous": None, "next": None, "offset": 0, "count": COUNT, "total": 0, "responses": 0}
    return empty | {"shares": {}, "columns": [], "groups": []}


def check_set(which: str) -> None:
    if which not in recorded.SETS:
        raise Refused(f"set={which[:40]}: there are {' and '.join(recorded.SETS)}")


def _check(sort: str, show: str, q: str) -> None:
    if sort not in SORTS:
        raise Refused(f"sort={sort[:40]}: there are {', '.join(SORTS)}")
    if show not in SHOWS:
        raise Refused(f"show={show[:40]}: there are {', '.join(SHOWS)}")
    if len(q) > LONGEST:
        raise Refused(f"q: at most {LONGEST} characters are searched for, here are {len(q)}")


def _parts(rows: list[Row]) -> list[str]:
    """The names of the reward's components."""
    if not rows:
        return []
    own = [k for k, v in rows[0].items() if k not in PLAIN and not isinstance(v, str | list | dict)]
    return [*own, *dict.fromkeys(name for row in rows for name in row.get("parts", {}))]


def grouped(rows: list[Row]) -> list[Row]:
    """Rows as groups, in the order in which they were recorded."""
    parts, found = _parts(rows), dict[int, list[Row]]()
    for row in rows:
        found.setdefault(row["group"], []).append(row)
    return [_group(number, members, parts) for number, members in sorted(found.items())]


def _group(place: int, members: list[Row], parts: list[str]) -> Row:
    """A prompt and its responses; mean and spread are over those whose reward did not fail."""
    prompt = members[0]["prompt_text"] or ""
    responses = [response(row, parts) for row in members]
    rewards = [r["reward"] for r in responses if r["status"] == "ok" and isinstance(r["reward"], int | float)]
    strict = [r["correct"] for r in responses if r["status"] == "ok" and r["correct"] is not None]
    group: Row = {"group": place, "key": key_of(prompt), "prompt": prompt, "size": len(members)}
    if members[0].get("answer") is not None:
        group["answer"] = members[0]["answer"]
    group |= {"mean": None, "std": None}
    if rewards:
        with suppress(OverflowError):  # rewards so large that they have no sum
            group |= {"mean": statistics.fmean(rewards), "std": statistics.stdev(rewards) if len(rewards) > 1 else None}
    group |= {"low": min(rewards, default=None), "high": max(rewards, default=None)}
    group |= {"right": sum(strict) if strict else None, "of": len(strict), "failed": _failed(responses)}
    return group | {"kind": _kind(rewards, strict), "responses": responses}


def _failed(responses: list[Row]) -> int:
    return sum(r["status"] == "failed" for r in responses)


def _kind(rewards: list[float], strict: list[bool]) -> str:
    if strict:
        return "all right" if all(strict) else "mixed" if any(strict) else "all wrong"
    return "" if not rewards else "equal" if min(rewards) == max(rewards) else "mixed"


def response(row: Row, parts: list[str]) -> Row:
    status = row.get("status") or ("failed" if row.get("valid") is False else "ok")
    made = {
        "sample": row["sample"],
        "text": row["response_text"] or "",
        "reward": number(row["reward"]) if status != "failed" else None,
        "advantage": number(row.get("advantage")),
        "length": row.get("length"),
        "correct": row.get("correct"),
        "truncated": row.get("truncated"),
        "status": status,
        "reason": row.get("reason") or None,
        "parts": {name: number(row.get("parts", {}).get(name, row.get(name))) for name in parts},
    }
    return made | ({"said": row["said"]} if row.get("said") else {})


IS: dict[str, Callable[[Row], bool]] = {
    "all": lambda _: True,
    "right": lambda r: r["correct"] is True and r["status"] == "ok",
    "wrong": lambda r: r["correct"] is False and r["status"] == "ok",
    "truncated": lambda r: r["truncated"] is True,
    "failed": lambda r: r["status"] == "failed",
    "mixed": lambda _: True,
}


def _kept(group: Row, show: str, q: str) -> Row:
    """The group with the responses that are asked for. Text found in its prompt keeps all of them."""
    responses = [r for r in group["responses"] if IS[show](r)]
    if show == "mixed" and group["kind"] != "mixed":
        responses = []
    if q and q not in group["prompt"].casefold():
        responses = [r for r in responses if q in r["text"].casefold()]
    return group | {"responses": responses, "shown": len(responses)}


def shares(groups: list[Row]) -> dict[str, int | None]:
    """How many responses of the step there are of each kind (and groups, and mixed groups); None: nobody knows."""
    every = [r for group in groups for r in group["responses"]]
    counts: dict[str, int | None] = {show: sum(map(IS[show], every)) for show in SHOWS}
    for show, field in (("right", "correct"), ("wrong", "correct"), ("truncated", "truncated")):
        if all(r[field] is None for r in every):
            counts[show] = None
    mixed = sum(group["kind"] == "mixed" for group in groups)
    return counts | {"mixed": mixed, "groups": len(groups)}


def _falling(field: str) -> Callable[[Row], tuple[bool, float, int]]:
    """The largest first; what is no number comes last."""

    def order(row: Row) -> tuple[bool, float, int]:
        known = isinstance(row[field], int | float)
        return (not known, -float(row[field]) if known else 0.0, row["sample"])

    return order


ORDERS: dict[str, Callable[[Row], Any]] = {
    **{field: _falling(field) for field in ("reward", "advantage", "length")},
    "sample": lambda row: row["sample"],
}

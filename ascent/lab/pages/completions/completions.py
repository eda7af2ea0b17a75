"""The recorded responses of a step as groups: filtered, searched, sorted, a page at a time."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ascent.core.types import Refused
from ascent.lab.curves import Library
from ascent.records import responses as recorded
from ascent.records.places import Place
from ascent.records.reading import read_object

Row = dict[str, Any]
SHOWS = ("all", "right", "wrong", "truncated", "failed", "mixed")
SORTS = ("reward", "advantage", "length", "sample")
CHOICES = {"sort": SORTS, "show": SHOWS, "set": recorded.SETS}
COUNT, MOST_GROUPS = 8, 32
"""Groups on a page, as a rule and at most."""
LONGEST = 1000
"""Characters that are searched for."""
NONE = {
    recorded.SAMPLED: "No responses were recorded. `--record-rollouts 4` (the default) keeps four groups every "
    "--record-every steps",
    recorded.HELD_OUT: "No answers to held-out prompts were recorded. Every evaluation records them, but for "
    "`--record-rollouts none` and in runs of older versions",
}
NOTHING: dict[str, Any] = {
    **{"step": None, "previous": None, "next": None, "offset": 0, "count": COUNT, "total": 0, "responses": 0},
    **{"shares": {}, "columns": [], "groups": []},
}
PLAIN = {"step", "group", "sample", "prompt_text", "response_text", "reward", "valid", "correct", "truncated"}
PLAIN |= {"length", "advantage", "status", "reason", "parts", "said", "answer"}
"""Measures that are not components of the reward."""


def key_of(prompt: str) -> str:
    """A short name of a prompt, the same in every run and step."""
    return hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def json_number(value: Any) -> float | int | str | None:
    """A number as JSON can hold it: six digits; one that is not finite as a word; None: not known."""
    if value is None or isinstance(value, bool | int):
        return value
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return float(f"{value:.6g}")


def completions_page(
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
    check_choices(sort=sort, show=show, set=which)
    check_search(q)
    steps = recorded.recorded_steps(folder, kind, which)
    answer: dict[str, Any] = {"kind": kind, "recorded": steps, "asked": step, "sort": sort, "show": show, "q": q}
    answer |= {"set": which, "sets": {name: len(recorded.recorded_steps(folder, kind, name)) for name in recorded.SETS}}
    if not steps:
        return NOTHING | answer | {"problems": [NONE[which]]}
    chosen = steps[-1] if step is None else min(steps, key=lambda s: (abs(s - step), s))
    at = steps.index(chosen)
    answer |= {"step": chosen, "previous": steps[at - 1] if at else None}
    answer["next"] = steps[at + 1] if at + 1 < len(steps) else None
    try:
        rows = recorded.light_rows(folder, kind, chosen, which=which)
    except Refused as error:
        return NOTHING | answer | {"problems": [str(error)]}
    groups = groups_of(rows)
    found = [group for group in (_kept(group, show, q.casefold()) for group in groups) if group["responses"]]
    count = max(1, min(count, MOST_GROUPS))
    offset = max(0, min(offset, (len(found) - 1) // count * count)) if found else 0
    shown = found[offset : offset + count]
    for group in shown:
        group["responses"].sort(key=ORDERS[sort])
    return answer | {
        **{"offset": offset, "count": count, "total": len(found)},
        "responses": sum(len(group["responses"]) for group in found),
        "shares": shares(groups),
        "columns": _parts(rows),
        "groups": [{k: json_number(v) if isinstance(v, float) else v for k, v in group.items()} for group in shown],
        "problems": [],
    }


def sampled_in_step(place: Place, library: Library, step: int | None) -> dict[str, int] | None:
    """All responses of a step by metrics.jsonl, and its groups, if config.json says how many responses make one.

    None: nobody knows. What other trainers leave is all that is known of their steps.
    """
    if place.kind != "ascent" or step is None:
        return None
    with library.columns(place) as columns:
        count = columns.at_step(step, "num_responses")
    if count is None or count < 1:
        return None
    samples = read_object(place.folder / "config.json")[0].get("samples")
    if not isinstance(samples, int) or samples < 1 or int(count) % samples:
        return {"responses": int(count)}
    return {"responses": int(count), "groups": int(count) // samples}


def check_choices(**choices: str) -> None:
    """Refuse a sort, show or set that there is not."""
    for name, value in choices.items():
        if value not in CHOICES[name]:
            raise Refused(f"{name}={value[:40]}: there are {', '.join(CHOICES[name])}")


def check_search(q: str) -> None:
    if len(q) > LONGEST:
        raise Refused(f"q: at most {LONGEST} characters are searched for, here are {len(q)}")


def _parts(rows: list[Row]) -> list[str]:
    """The names of the reward's components."""
    if not rows:
        return []
    own = [k for k, v in rows[0].items() if k not in PLAIN and not isinstance(v, str | list | dict)]
    return [*own, *dict.fromkeys(name for row in rows for name in row.get("parts", {}))]


def groups_of(rows: list[Row]) -> list[Row]:
    """Rows as groups, in the order in which they were recorded."""
    parts, found = _parts(rows), dict[int, list[Row]]()
    for row in rows:
        found.setdefault(row["group"], []).append(row)
    return [_group(number, members, parts) for number, members in sorted(found.items())]


def _group(place: int, members: list[Row], parts: list[str]) -> Row:
    """A prompt and its responses; mean and spread are over those whose reward did not fail."""
    prompt = members[0]["prompt_text"] or ""
    responses = [_response(row, parts) for row in members]
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
    group |= {
        "right": sum(strict) if strict else None,
        "of": len(strict),
        "failed": sum(r["status"] == "failed" for r in responses),
    }
    return group | {"kind": _kind(rewards, strict), "responses": responses}


def _kind(rewards: list[float], strict: list[bool]) -> str:
    if strict:
        return "all right" if all(strict) else "mixed" if any(strict) else "all wrong"
    return "" if not rewards else "equal" if min(rewards) == max(rewards) else "mixed"


def _response(row: Row, parts: list[str]) -> Row:
    status = row.get("status") or ("failed" if row.get("valid") is False else "ok")
    made = {
        "sample": row["sample"],
        "text": row["response_text"] or "",
        "reward": json_number(row["reward"]) if status != "failed" else None,
        "advantage": json_number(row.get("advantage")),
        "length": row.get("length"),
        "correct": row.get("correct"),
        "truncated": row.get("truncated"),
        "status": status,
        "reason": row.get("reason") or None,
        "parts": {name: json_number(row.get("parts", {}).get(name, row.get(name))) for name in parts},
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
    """The largest first; what is not a number comes last."""

    def order(row: Row) -> tuple[bool, float, int]:
        known = isinstance(row[field], int | float)
        return (not known, -float(row[field]) if known else 0.0, row["sample"])

    return order


ORDERS: dict[str, Callable[[Row], Any]] = {
    **{field: _falling(field) for field in ("reward", "advantage", "length")},
    "sample": lambda row: row["sample"],
}

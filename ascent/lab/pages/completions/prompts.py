"""The same prompt over the steps of a run. Only prompts are read of most files, and each file once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ascent.core.types import Refused
from ascent.lab.pages.completions.completions import check_choices, check_search, groups_of, key_of
from ascent.records import responses as recorded
from ascent.records.columns import evenly
from ascent.records.foreign import foreign_rows
from ascent.records.reading import FileCache

MOST = 200
"""Steps of one prompt, and prompts of one run, that are told."""
LONG = 600
"""Characters of a response that are told."""
SHORT = 300
"""Characters of a prompt in the list of prompts."""
_indexes = FileCache(1_000_000)
"""Which prompts a file holds, in groups."""
_summaries = FileCache(50_000)
Row = dict[str, Any]


def prompt_index(folder: Path, kind: str, step: int, path: Path) -> dict[str, int]:
    """The prompts of a step: key -> group. Of a prompt that was drawn twice, the first."""

    def read() -> dict[str, int]:
        foreign = [] if kind == "ascent" else foreign_rows(folder, step)
        pairs = _pairs(path) if kind == "ascent" else [(row["group"], row["prompt_text"]) for row in foreign]
        index: dict[str, int] = {}
        for group, prompt in sorted(dict(pairs).items()):
            index.setdefault(key_of(prompt or ""), group)
        return index

    return _indexes(path, read, weight=lambda index: len(index) + 1)


def _pairs(path: Path) -> list[tuple[int, str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            recorded.refuse_columns(path, file.schema_arrow, ("group", "prompt_text"))
            table = file.read(columns=["group", "prompt_text"], use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise recorded.torn_file(path, error) from None
    return list(zip(table.column("group").to_pylist(), table.column("prompt_text").to_pylist(), strict=True))


def _indexed(folder: Path, kind: str, which: str) -> tuple[dict[int, dict[str, int]], list[str]]:
    """The prompts of every recorded step, and the files that could not be read."""
    found, problems = {}, []
    for step, path in recorded.recorded_files(folder, kind, which).items():
        try:
            found[step] = prompt_index(folder, kind, step, path)
        except (Refused, OSError) as error:
            problems.append(str(error))
    return found, problems


def prompt_history(folder: Path, kind: str, key: str, which: str = recorded.SAMPLED) -> dict[str, Any]:
    """A prompt's groups over the steps: mean reward, how many right, its best and its most common response.

    `sets` has how many steps of each set hold the prompt.
    """
    check_choices(set=which)
    indexed, problems = _indexed(folder, kind, which)
    steps = [step for step, keys in indexed.items() if key in keys]
    if not steps:
        raise Refused("this prompt is in none of the recorded steps")
    told, prompt, there = [], "", recorded.recorded_files(folder, kind, which)
    for step in evenly(steps, MOST):
        group = indexed[step][key]
        try:
            made = _summaries(there[step], lambda s=step, g=group: _summary(folder, kind, s, g, which), group)  # type: ignore[misc]
        except (Refused, OSError, KeyError) as error:
            problems.append(str(error))
            continue
        prompt = made["prompt"]
        told.append({k: v for k, v in made.items() if k != "prompt"})
    other = recorded.SETS[1 - recorded.SETS.index(which)]
    elsewhere = sum(key in keys for keys in _indexed(folder, kind, other)[0].values())
    return {
        **{"set": which, "sets": {which: len(steps), other: elsewhere}},
        **{"key": key, "prompt": prompt, "recorded": len(indexed), "found": len(steps), "steps": told},
        "left_out": len(steps) - len(told),
        "problems": problems,
    }


def _summary(folder: Path, kind: str, step: int, place: int, which: str) -> Row:
    """A group in a few words."""
    columns = ("group", "sample", "prompt_text", "response_text", "reward", "valid", "correct", "truncated", "status")
    rows = [row for row in _light(folder, kind, step, columns, which) if row["group"] == place]
    group = groups_of(rows)[0]
    scored = [r for r in group["responses"] if r["status"] == "ok" and isinstance(r["reward"], int | float)]
    best = max(scored, key=lambda r: (r["reward"], -r["sample"]), default=None)
    (text, count), *_ = Counter(r["text"] for r in group["responses"]).most_common(1)
    first = next(r for r in group["responses"] if r["text"] == text)
    made = {k: group[k] for k in ("prompt", "group", "size", "mean", "std", "right", "of", "failed", "kind")}
    return made | {
        "step": step,
        "best": None if best is None else _told(best),
        "common": _told(first) | {"count": count},
    }


def _light(folder: Path, kind: str, step: int, columns: tuple[str, ...], which: str) -> list[Row]:
    return recorded.light_rows(folder, kind, step, columns if kind == "ascent" else None, which)


def _told(r: Row) -> Row:
    cut = len(r["text"]) > LONG
    text = r["text"][:LONG] + " …" if cut else r["text"]
    return {"text": text, **{k: r[k] for k in ("sample", "reward", "correct", "truncated")}}


def prompt_key(
    folder: Path,
    kind: str,
    key: str = "",
    prompt: str = "",
    step: int | None = None,
    group: int = 0,
    which: str = recorded.SAMPLED,
) -> str:
    """The key of a prompt that is given by its key, its text, or a place where it stands."""
    check_choices(set=which)
    if key:
        return key
    if prompt:
        return key_of(prompt)
    if step is None:
        raise Refused("which prompt? Give its key, its text, or a step and a group")
    there = recorded.recorded_files(folder, kind, which)
    found = [k for k, g in prompt_index(folder, kind, step, there[step]).items() if g == group] if step in there else []
    if not found:
        raise Refused(f"step {step} has no group {group}")
    return found[0]


def all_prompts(folder: Path, kind: str, q: str = "", which: str = "") -> dict[str, Any]:
    """The prompts of a run, held-out ones first, or those of one set."""
    check_search(q)
    if which:
        check_choices(set=which)
    found = [_every(folder, kind, q, one) for one in (recorded.HELD_OUT, recorded.SAMPLED) if which in ("", one)]
    return {
        "prompts": [told for one in found for told in one["prompts"]],
        "total": sum(one["total"] for one in found),
        "problems": [text for one in found for text in one["problems"]],
    }


def _every(folder: Path, kind: str, q: str, which: str) -> dict[str, Any]:
    """The prompts of one set, those that were recorded most often first."""
    indexed, problems = _indexed(folder, kind, which)
    texts: dict[int, dict[int, str]] = {}
    steps: dict[str, list[int]] = {}
    for step, keys in indexed.items():
        for key in keys:
            steps.setdefault(key, []).append(step)
    told: list[Row] = []
    for key, where in sorted(steps.items(), key=lambda item: (-len(item[1]), item[1][0])):
        if len(told) == MOST:
            break
        first, last = where[0], where[-1]
        try:
            if first not in texts:
                rows = _light(folder, kind, first, recorded.NEEDED, which)
                texts[first] = {row["group"]: row["prompt_text"] or "" for row in rows}
            prompt = texts[first][indexed[first][key]]
        except (Refused, OSError, KeyError) as error:
            problems += [text for text in (str(error),) if text not in problems]
            continue
        if q.casefold() in prompt.casefold():
            about = {"set": which, "key": key, "prompt": prompt[:SHORT]}
            told.append(about | {"steps": len(where), "first": first, "last": last})
    return {"prompts": told, "total": len(steps), "problems": problems}

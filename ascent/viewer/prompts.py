"""The same prompt over the steps of a run. Only prompts are read of most files, and each file once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ascent.types import Refused
from ascent.viewer import foreign, recorded
from ascent.viewer.completions import LONGEST, grouped, key_of
from ascent.viewer.kept import Kept

MOST = 200
"""Steps of one prompt, and prompts of one run, that are told."""
LONG = 600
"""Characters of a response that are told."""
SHORT = 300
"""Characters of a prompt in the list of prompts."""
_indexes = Kept(1_000_000)
"""Which prompts a file holds, in groups."""
_summaries = Kept(50_000)
Row = dict[str, Any]


def index(folder: Path, kind: str, step: int, path: Path) -> dict[str, int]:
    """The prompts of a step: key -> group. Of a prompt that was drawn twice, the first."""
    return _indexes(path, lambda: _index(folder, kind, step, path), weight=lambda found: len(found) + 1)


def paths(folder: Path, kind: str) -> dict[int, Path]:
    return recorded.files(folder) if kind == "ascent" else foreign.by_step(folder)


def _index(folder: Path, kind: str, step: int, path: Path) -> dict[str, int]:
    if kind != "ascent":
        pairs = [(row["group"], row["prompt_text"]) for row in foreign.rows(folder, step)]
    else:
        pairs = _pairs(path)
    found: dict[str, int] = {}
    for group, prompt in sorted(dict(pairs).items()):
        found.setdefault(key_of(prompt or ""), group)
    return found


def _pairs(path: Path) -> list[tuple[int, str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if not {"group", "prompt_text"} <= set(file.schema_arrow.names):
                raise Refused(f"{path.name} has no prompts")
            table = file.read(columns=["group", "prompt_text"], use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise recorded.broken(path, error) from None
    return list(zip(table.column("group").to_pylist(), table.column("prompt_text").to_pylist(), strict=True))


def _indexed(folder: Path, kind: str) -> tuple[dict[int, dict[str, int]], list[str]]:
    """The prompts of every recorded step, and the files that could not be read."""
    found, problems = {}, []
    for step, path in paths(folder, kind).items():
        try:
            found[step] = index(folder, kind, step, path)
        except (Refused, OSError) as error:
            problems.append(str(error))
    return found, problems


def same(folder: Path, kind: str, key: str) -> dict[str, Any]:
    """A prompt's groups over the steps: mean reward, how many right, its best and its most common response."""
    indexed, problems = _indexed(folder, kind)
    steps = [step for step, keys in indexed.items() if key in keys]
    if not steps:
        raise Refused("this prompt is in none of the recorded steps")
    told, prompt, there = [], "", paths(folder, kind)
    for step in spread(steps, MOST):
        group = indexed[step][key]
        try:
            made = _summaries(there[step], lambda s=step, g=group: _summary(folder, kind, s, g), group)  # type: ignore[misc]
        except (Refused, OSError, KeyError) as error:
            problems.append(str(error))
            continue
        prompt = made["prompt"]
        told.append({k: v for k, v in made.items() if k != "prompt"})
    return {
        **{"key": key, "prompt": prompt, "recorded": len(indexed), "found": len(steps), "steps": told},
        "left_out": len(steps) - len(told),
        "problems": problems,
    }


def spread(steps: list[int], most: int) -> list[int]:
    """At most so many of them, evenly spread, the first and the last among them."""
    if len(steps) <= most:
        return steps
    return [steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)]


def _summary(folder: Path, kind: str, step: int, place: int) -> Row:
    """A group in a few words."""
    columns = ("group", "sample", "prompt_text", "response_text", "reward", "valid", "correct", "truncated", "status")
    rows = [row for row in _light(folder, kind, step, columns) if row["group"] == place]
    group = grouped(rows)[0]
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


def _light(folder: Path, kind: str, step: int, columns: tuple[str, ...]) -> list[Row]:
    return recorded.brief(folder, kind, step, columns if kind == "ascent" else None)


def _told(r: Row) -> Row:
    cut = len(r["text"]) > LONG
    text = r["text"][:LONG] + " …" if cut else r["text"]
    return {"text": text, **{k: r[k] for k in ("sample", "reward", "correct", "truncated")}}


def find(folder: Path, kind: str, key: str = "", prompt: str = "", step: int | None = None, group: int = 0) -> str:
    """The key of a prompt that is given by its key, its text, or a place where it stands."""
    if key:
        return key
    if prompt:
        return key_of(prompt)
    if step is None:
        raise Refused("which prompt? Give its key, its text, or a step and a group")
    there = paths(folder, kind)
    found = [k for k, g in index(folder, kind, step, there[step]).items() if g == group] if step in there else []
    if not found:
        raise Refused(f"step {step} has no group {group}")
    return found[0]


def every(folder: Path, kind: str, q: str = "") -> dict[str, Any]:
    """The prompts of a run, those that were recorded most often first."""
    if len(q) > LONGEST:
        raise Refused(f"q: at most {LONGEST} characters are searched for, here are {len(q)}")
    indexed, problems = _indexed(folder, kind)
    steps: dict[str, list[int]] = {}
    for step, keys in indexed.items():
        for key in keys:
            steps.setdefault(key, []).append(step)
    told: list[Row] = []
    for key, where in sorted(steps.items(), key=lambda item: (-len(item[1]), item[1][0])):
        if len(told) == MOST:
            break
        place = indexed[where[0]][key]
        rows = _light(folder, kind, where[0], ("group", "sample", "prompt_text", "response_text", "reward"))
        prompt = next(row["prompt_text"] for row in rows if row["group"] == place)
        if q.casefold() in prompt.casefold():
            told.append(
                {"key": key, "prompt": prompt[:SHORT], "steps": len(where), "first": where[0], "last": where[-1]}
            )
    return {"prompts": told, "total": len(steps), "problems": problems}

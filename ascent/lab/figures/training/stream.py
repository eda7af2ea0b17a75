"""Run folders as the lab reads them: paths that stay inside, metrics as a stream, responses as a grid."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from ascent.core.types import Refused
from ascent.lab.figure import NAME
from ascent.records import Run

PAUSE = 0.1
"""Seconds between two looks at a file that is being written."""
ENDED = ("finished", "interrupted", "failed", "died")


def run_folder(runs: Path, name: str) -> Path:
    """The folder of a run by its name; whatever would lead out of the runs folder is refused."""
    if not NAME.fullmatch(name):
        raise Refused(f"{name[:80]!r} is not the name of a run")
    folder = (runs / name).resolve()
    if folder.parent != runs.resolve():
        raise Refused(f"{name}: that is not inside {runs}")
    return folder


def point_of(line: dict[str, Any], maximum: float | None) -> dict[str, Any]:
    """A line of metrics as it is drawn: reward as a share of its maximum, beside what is exactly right."""
    clips = [line.get("clip_ratio/low_mean"), line.get("clip_ratio/high_mean")]
    reward = line.get("reward")
    return {
        "step": line["step"] + 1,
        "reward": reward / maximum if reward is not None and maximum else reward,
        "accuracy": line.get("accuracy"),
        "entropy": line.get("entropy"),
        "silent": line.get("frac_reward_zero_std"),
        "clip": None if clips == [None, None] else sum(x or 0.0 for x in clips),
        "loss": line.get("loss"),
    }


def metrics_in_words(line: dict[str, Any], maximum: float | None) -> dict[str, str]:
    """A line of metrics as the page says it."""
    point = point_of(line, maximum)

    def share(key: str) -> str:
        return "–" if point[key] is None else f"{point[key]:.0%}".replace("%", " %")

    def number(key: str, digits: int) -> str:
        return "–" if line.get(key) is None else f"{line[key]:.{digits}f}".replace("-", "−")

    return {
        "step": str(point["step"]),
        "earned": number("reward", 2) + (f" of {maximum:g}" if maximum else ""),
        "right": share("accuracy"),
        "spread": number("entropy", 2),
        "silent": share("silent"),
        "clipped": "never clips" if point["clip"] is None else share("clip"),
        "lost": number("loss", 3),
    }


def read_from(path: Path, offset: int) -> list[tuple[int, dict[str, Any]]]:
    """The whole lines behind a byte offset, each with the offset at which it ends. A torn last line waits."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    lines = []
    for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
        offset += len(line)
        lines.append((offset, json.loads(line)))
    return lines


def _event(kind: str, data: Any, id: int | None = None) -> str:
    head = "" if id is None else f"id: {id}\n"
    return f"{head}event: {kind}\ndata: {json.dumps(data)}\n\n"


async def stream(folder: Path, after: int, status: Callable[[], dict[str, Any]]) -> AsyncIterator[str]:
    """Server-sent events of a run: its metrics behind `after`, one event per line, and what becomes of it.

    An event's id is the byte offset at which its line ends: who reconnects with it misses nothing and
    sees nothing twice. A file that was cut back (a run resumed from a checkpoint) starts over.
    """
    path, offset = folder / "metrics.jsonl", after
    last: dict[str, Any] | None = None
    yield "retry: 500\n\n"
    while True:
        now = await asyncio.to_thread(status)  # before the file: a last line cannot slip in between
        if not starts_a_line(path, offset):
            offset = 0
            yield _event("reset", {}, 0)
        fresh = await asyncio.to_thread(read_from, path, offset)
        maximum = await asyncio.to_thread(lambda: Run(folder).config.task.max_reward) if fresh else None
        for end, line in fresh:
            event = {"point": point_of(line, maximum), "texts": metrics_in_words(line, maximum), "line": line}
            offset = end
            yield _event("metrics", event, offset)
        if now != last:
            last = now
            yield _event("status", now)
        if now["status"] in ENDED and not fresh:
            yield _event("end", now)
            return
        await asyncio.sleep(PAUSE)


def starts_a_line(path: Path, offset: int) -> bool:
    """Is there a line's end just before this offset? Not so in a file that was cut back, or another one."""
    if offset == 0:
        return True
    if not path.exists() or path.stat().st_size < offset:
        return False
    with open(path, "rb") as file:
        file.seek(offset - 1)
        return file.read(1) == b"\n"


def response_grid(folder: Path, step: int | None) -> dict[str, Any]:
    """The recorded responses of a step (of the newest by default), marked right, rewarded but wrong, wrong."""
    run = Run(folder)
    steps = sorted(int(path.stem.split("_")[1]) for path in (folder / "rollouts").glob("step_*.parquet"))
    if not steps:
        return {"step": None, "prompts": []}
    chosen = steps[-1] if step is None else step
    maximum, groups = run.config.task.max_reward or 1.0, dict[int, dict[str, Any]]()
    for row in run.rollouts(chosen):
        group = groups.setdefault(row["group"], {"prompt": row["prompt_text"], "responses": []})
        right = bool(row.get("correct"))
        mark = "right" if right else "rewarded" if row["reward"] >= maximum / 2 else "wrong"
        group["responses"].append({"text": row["response_text"], "reward": f"{row['reward']:g}", "mark": mark})
    for group in groups.values():
        (text, reward), count = Counter((r["text"], r["reward"]) for r in group["responses"]).most_common(1)[0]
        group["common"] = f"{text} × {count}, reward {reward} of {maximum:g}"
    return {"step": chosen + 1, "prompts": list(groups.values()), "maximum": f"{maximum:g}"}

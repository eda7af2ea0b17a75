"""A step's completions as a line of metrics, and TRL's own log laid over it."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ascent.viewer.kept import Kept

Row = dict[str, Any]
_lines = Kept(20_000)
APART = 1e-3
"""A logged reward that is further than this from the sum of its parts was a weighted one."""


def line(path: Path, step: int, rows: Callable[[], list[Row]], part: str, names: Any) -> dict[str, Any]:
    """The line of a file's rows, made once."""
    return dict(_lines(path, lambda: {"step": step} | described(rows(), part), names))


def described(rows: list[Row], part: str) -> dict[str, Any]:
    """What ascent.train.describe says of a batch, as far as completions alone can say it."""
    scored = [row for row in rows if row["valid"] and math.isfinite(row["reward"])]
    rewards = [float(row["reward"]) for row in scored]
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in scored:
        groups[row["group"]].append(row)
    told: dict[str, Any] = {"num_responses": len(rows), "reward_errors": len(rows) - len(scored)}
    if rewards:
        told["reward"] = statistics.fmean(rewards)
        told["reward_std"] = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        told["frac_reward_zero_std"] = _share(groups, lambda g: len({row["reward"] for row in g}) == 1)
    if scored and all("correct" in row for row in scored):
        told["accuracy"] = statistics.fmean(row["correct"] for row in scored)
        told["frac_all_right"] = _share(groups, lambda g: all(row["correct"] for row in g))
        told["frac_all_wrong"] = _share(groups, lambda g: not any(row["correct"] for row in g))
    if rows:
        told["completions/mean_characters"] = statistics.fmean(len(row["response_text"]) for row in rows)
    for name in dict.fromkeys(name for row in rows for name in row.get("parts", {})):
        known = [v for row in scored if (v := row["parts"].get(name)) is not None and math.isfinite(v)]
        if known:
            told.setdefault(part.format(name), statistics.fmean(known))
    return told


def _share(groups: dict[int, list[Row]], is_so: Callable[[list[Row]], bool]) -> float:
    return statistics.fmean(is_so(group) for group in groups.values())


def merged(told: dict[int, dict[str, Any]], logged: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines by step; what the trainer logged itself (a mean since its last log) wins over what the rows say."""
    lines = []
    for step in sorted({*told, *logged}):
        values = told.get(step, {}) | {"step": step} | logged.get(step, {})
        bad = {k: str(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
        if bad:
            values = {k: None if k in bad else v for k, v in values.items()} | {"nonfinite": bad}
        lines.append(values)
    return lines


def weighted(told: dict[int, dict[str, Any]], logged: dict[int, dict[str, Any]]) -> bool:
    """Were the reward functions weighted? Then a completion's reward is not the sum that its rows show."""
    pairs = [(told[s].get("reward"), logged[s].get("reward")) for s in told if s in logged]
    return any(a is not None and b is not None and abs(a - b) > APART * max(1.0, abs(b)) for a, b in pairs)

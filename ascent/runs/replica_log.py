"""Throughput and events of the samplers of a cluster run, read from its log. The cluster need not exist any more."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from ascent.distributed.replica import REPLICA_LOG
from ascent.runs.untrusted_files import finite_number, parse_json, read_regular

COLUMNS = ("name", "state", "version", "tokens", "rate", "idle", "loading", "lost")
RECENT_VERSIONS = 20
"""Number of the latest policy versions over which rates and fractions are measured."""
MAX_EVENTS = 50
MAX_LOG_BYTES = 1 << 28


def replicas_of(folder: Path) -> list[dict[str, Any]]:
    """Return one row per sampler and one for the learners with their idle fraction; empty without a cluster."""
    lines = [line for line in _lines(folder) if isinstance(line.get("replicas"), dict)]
    rows: dict[str, dict[str, Any]] = {}
    for line in lines:
        for name, replica in line["replicas"].items():
            row = rows.setdefault(name, {"name": name, "tokens": 0, "lost": 0})
            row |= {"state": "away" if replica["away"] else "ready", "version": replica["version"]}
            row |= {count: row[count] + replica[count] for count in ("tokens", "lost")}
    recent = lines[-RECENT_VERSIONS:]
    for name, row in rows.items():
        if name not in lines[-1]["replicas"]:
            row["state"] = "left"
            continue
        lines_with = [line for line in recent if name in line["replicas"]]
        seconds = sum(line["seconds"] for line in lines_with) or 1.0
        names = ("tokens", "drawing", "loading")
        totals = {key: sum(line["replicas"][name][key] for line in lines_with) for key in names}
        row["rate"] = totals["tokens"] / totals["drawing"] if totals["drawing"] else 0.0
        row["loading"] = min(1.0, totals["loading"] / seconds)
        row["idle"] = max(0.0, 1 - (totals["drawing"] + totals["loading"]) / seconds)
    if not rows:
        return []
    waited = sum(line["waited"] for line in recent) / (sum(line["seconds"] for line in recent) or 1.0)
    learners = {"name": "learners", "state": "train", "version": lines[-1]["version"], "idle": min(1.0, waited)}
    return [learners, *(rows[name] for name in sorted(rows, key=_number))]


def replica_events(folder: Path) -> list[dict[str, Any]]:
    """Return the latest events (a replica was lost, left or joined), newest first: time, event, replica and why."""
    events = [line for line in _lines(folder) if isinstance(line.get("event"), str)]
    return [
        {key: line.get(key, "") for key in ("time", "event", "replica", "why")}
        for line in events[: -MAX_EVENTS - 1 : -1]
    ]


def _number(name: str) -> tuple[int, str]:
    tail = name.rpartition("-")[2]
    return (int(tail) if tail.isdecimal() else 0, name)


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the log that have the format that Ascent writes."""
    lines = []
    try:
        data = read_regular(folder / "engine" / REPLICA_LOG, MAX_LOG_BYTES)
    except OSError:
        return []
    for text in data.split(b"\n")[:-1]:
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            line = parse_json(text)
            numbers = [line["time"]]
            if "replicas" in line:
                numbers += [line["seconds"], line["waited"], line["version"]]
                keys = ("version", "tokens", "drawing", "loading", "lost")
                numbers += [replica[key] for replica in line["replicas"].values() for key in keys]
                if not all(type(replica["away"]) is bool for replica in line["replicas"].values()):
                    continue
            if None not in map(finite_number, numbers):
                lines.append(line)
    return lines

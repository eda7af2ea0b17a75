"""What the samplers of a run on a cluster did, from the records of the run; the cluster may be gone."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from ascent.distributed.replica import REPLICA_LOG
from ascent.runs.untrusted_files import finite_number, parse_json, read_regular

COLUMNS = ("name", "state", "version", "tokens", "rate", "idle", "loading", "lost")
RECENT = 20
"""The latest versions, over which rates and shares are measured."""
MOST_EVENTS = 50
MOST = 1 << 28
"""Bytes of the records that are read at most."""


def replicas_of(folder: Path) -> list[dict[str, Any]]:
    """One row per sampler, and the learners' share of waiting: all that is known now. Nothing: there is no cluster."""
    lines = [line for line in _lines(folder) if isinstance(line.get("replicas"), dict)]
    rows: dict[str, dict[str, Any]] = {}
    for line in lines:
        for name, one in line["replicas"].items():
            row = rows.setdefault(name, {"name": name, "tokens": 0, "lost": 0})
            row |= {"state": "away" if one["away"] else "ready", "version": one["version"]}
            row |= {what: row[what] + one[what] for what in ("tokens", "lost")}
    recent = lines[-RECENT:]
    for name, row in rows.items():
        if name not in lines[-1]["replicas"]:
            row["state"] = "left"
            continue
        there = [line for line in recent if name in line["replicas"]]
        seconds = sum(line["seconds"] for line in there) or 1.0
        own = {what: sum(line["replicas"][name][what] for line in there) for what in ("tokens", "drawing", "loading")}
        row["rate"] = own["tokens"] / own["drawing"] if own["drawing"] else 0.0
        row["loading"] = min(1.0, own["loading"] / seconds)
        row["idle"] = max(0.0, 1 - (own["drawing"] + own["loading"]) / seconds)
    if not rows:
        return []
    waited = sum(line["waited"] for line in recent) / (sum(line["seconds"] for line in recent) or 1.0)
    learners = {"name": "learners", "state": "train", "version": lines[-1]["version"], "idle": min(1.0, waited)}
    return [learners, *(rows[name] for name in sorted(rows, key=_number))]


def replica_events(folder: Path) -> list[dict[str, Any]]:
    """The latest of those who were lost, left or joined, newest first: time, event, replica and why."""
    told = [line for line in _lines(folder) if isinstance(line.get("event"), str)]
    return [
        {key: line.get(key, "") for key in ("time", "event", "replica", "why")}
        for line in told[: -MOST_EVENTS - 1 : -1]
    ]


def _number(name: str) -> tuple[int, str]:
    tail = name.rpartition("-")[2]
    return (int(tail) if tail.isdecimal() else 0, name)


def _lines(folder: Path) -> list[dict[str, Any]]:
    """The lines that are as Ascent writes them; whatever else is there is left out."""
    lines = []
    try:
        data = read_regular(folder / "engine" / REPLICA_LOG, MOST)
    except OSError:
        return []
    for text in data.split(b"\n")[:-1]:
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            line = parse_json(text)
            numbers = [line["time"]]
            if "replicas" in line:
                numbers += [line["seconds"], line["waited"], line["version"]]
                whats = ("version", "tokens", "drawing", "loading", "lost")
                numbers += [one[what] for one in line["replicas"].values() for what in whats]
                if not all(type(one["away"]) is bool for one in line["replicas"].values()):
                    continue
            if None not in map(finite_number, numbers):
                lines.append(line)
    return lines

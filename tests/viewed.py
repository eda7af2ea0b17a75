"""Run folders made by hand, for the tests of the viewer: exactly the rows that a test needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CLIPPED = {"name": "clipped", "low": 0.2, "high": 0.2, "dual": None}


def row(group: int, sample: int, reward: float, text: str = "", **more: Any) -> dict[str, Any]:
    """A recorded response; its tokens are the words of its text."""
    pieces = more.pop("pieces", [w if i == 0 else f" {w}" for i, w in enumerate(text.split(" "))] if text else [])
    count = len(pieces)
    made = {
        "step": 0,
        **{"group": group, "sample": sample, "prompt": [group], "prompt_text": f"prompt {group}"},
        "response": list(range(100, 100 + count)),
        "response_text": text,
        **{"valid": True, "correct": reward == 1.0, "truncated": False, "reward": reward, "status": "ok"},
        "logp_sampler": [-1.0] * count,
        "logp_old": [-1.0] * count,
        "advantage": [reward - 0.5],
        "logp_update": [0, 1],
        "logp": [[-1.0] * count, [-0.9] * count],
        **{"pieces": pieces, "entropy": [0.5] * count, "reason": None},
    }
    return made | more


def answer(group: int, reward: float, text: str, **more: Any) -> dict[str, Any]:
    """A recorded greedy answer: no update saw it."""
    known = row(group, 0, reward, text, **more)
    return {k: v for k, v in known.items() if k not in ("logp_old", "advantage", "logp_update", "logp", "entropy")}


def write_step(folder: Path, step: int, rows: list[dict[str, Any]], where: str = "rollouts", **options: Any) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / where / f"step_{step:06d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([r | {"step": step} for r in rows]), path, **options)
    return path


def write_run(folder: Path, steps: dict[int, list[dict[str, Any]]], loss: Any = CLIPPED) -> Path:
    """A folder with all that the viewer asks of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    run = {
        "status": "finished",
        "result": None,
        "history": [],
        "step": 1,
        "steps": 1,
        "task": "t",
        "label": "l",
        "seed": 0,
    }
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "config.json").write_text(json.dumps({"task": {"name": "sort"}, "loss": loss}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "reward": 0.5}) + "\n" for step in steps))
    for step, rows in steps.items():
        write_step(folder, step, rows)
    return folder

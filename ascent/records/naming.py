"""What a run is called, and what it says of itself."""

from __future__ import annotations

import platform
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ascent.core.config import Config
from ascent.core.menu import name_of
from ascent.engines.backends import backend_of
from ascent.settings import row_label


def task_name(config: Config) -> str:
    """sort, reasoning-gym:chain_sum, jsonl:problems."""
    source = getattr(config.task, "source", "")
    name = name_of(config.task)
    name = Path(name.split(":")[1]).stem if name.startswith("python:") else name
    return f"{name}:{Path(source).stem if '/' in source else source}" if source else name


def run_label(config: Config) -> str:
    """The nearest row, and what was changed on it; demonstrations are SFT whatever the row."""
    return "sft" if config.task.data == "demonstrations" else row_label(config.algorithm)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def about(config: Config) -> dict[str, Any]:
    """What run.json says of where and with what the run was made."""
    packages = ["ascent-rl", "torch", "numpy", "safetensors", "pyarrow", *backend_of(config).packages]
    return {
        "task": task_name(config),
        "label": run_label(config),
        "seed": config.seed,
        "step": 0,
        "steps": config.steps,
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in packages}},
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "threads": config.threads,
            "host": platform.node(),
        },
    }


def default_folder(config: Config) -> Path:
    """runs/<date>-<task>-<algorithm>-s<seed>, numbered where that is taken."""
    task = task_name(config)
    name = run_label(config)
    row = name.split("+")[0] if not name.startswith("reinforce++") else "reinforce++"
    task = re.sub(r"[^A-Za-z0-9_.-]+", "-", task)
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{task}-{row}-s{config.seed}"
    path, count = Path("runs") / base, 1
    while path.exists():
        count += 1
        path = Path("runs") / f"{base}-{count}"
    return path

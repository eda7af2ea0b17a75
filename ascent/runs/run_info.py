"""What run.json says about a run, and the names of runs, tasks and algorithms."""

import platform
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

from ascent.core.config import Config
from ascent.core.menu import name_of
from ascent.runs.trust import code_hashes
from ascent.settings import row_label
from ascent.tasks.python_objects import describe_objects, object_label

RUN_FORMAT = 2
"""The format of config.json, checkpoints and the journal. A run of another format is not loaded or resumed."""


def task_name(config: Config) -> str:
    """Return the short name of a task: sort, reasoning-gym:chain_sum, jsonl:problems."""
    source = getattr(config.task, "source", "")
    name = name_of(config.task)
    name = Path(name.split(":")[1]).stem if name.startswith("python:") else name
    name = object_label(name) if name.startswith("object:") else name
    if source.startswith("object:"):
        return name
    return f"{name}:{Path(source).stem if '/' in source else source}" if source else name


def run_label(config: Config) -> str:
    """Return the named algorithm that is nearest, and what differs from it; training on demonstrations is `sft`."""
    return "sft" if config.task.data == "demonstrations" else row_label(config.algorithm)


@cache
def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def describe_run(config: Config, packages: Sequence[str]) -> dict[str, Any]:
    """Return the parts of run.json that describe the run: task, algorithm, code, objects, versions and machine."""
    packages = ["ascent-rl", "torch", "numpy", "safetensors", "pyarrow", *packages]
    return {
        "format": RUN_FORMAT,
        "task": task_name(config),
        "label": run_label(config),
        "seed": config.seed,
        "step": 0,
        "steps": config.steps,
        "data": config.data,
        "max_reward": config.task.max_reward,
        "code": code_hashes(config.to_dict()),
        "objects": describe_objects(config.to_dict()),
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in packages}},
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "threads": config.threads,
            "host": platform.node(),
        },
    }


def default_folder(config: Config) -> Path:
    """Return runs/<date>-<task>-<algorithm>-s<seed>, with a number appended if it exists."""
    task, label = re.sub(r"[^A-Za-z0-9_.-]+", "-", task_name(config)), run_label(config)
    row = label.split("+")[0] if not label.startswith("reinforce++") else "reinforce++"
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{task}-{row}-s{config.seed}"
    paths = (Path("runs") / (base if n == 1 else f"{base}-{n}") for n in count(1))
    return next(path for path in paths if not path.exists())

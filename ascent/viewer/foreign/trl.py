"""TRL's GRPO with `log_completions=True`: completions/completions_00010.parquet, one file a logged step.

Columns (TRL 1.16): step, prompt, completion, one for each reward function, whatever a reward function logged itself,
and advantage. Prompts and completions are text, or lists of messages. The rows of a group stand together. TRL's other
trainers show the same table, and write no file. The curves are the log of trainer_state.json, which is in the
folder or in its checkpoints. (An evaluation writes its completions under the name of the step that it follows.)
"""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

from ascent.types import Refused
from ascent.viewer.kept import Kept
from ascent.viewer.reading import contents

NAME = re.compile(r"completions_(\d{1,12})\.parquet")
COLUMNS = {"step", "prompt", "completion", "advantage"}
OURS = {"step_time": "time/step", "num_tokens": "num_tokens/seen"}
"""Where TRL has another name for what we have; and our name for something else: it counts tokens from the start."""
PART = "rewards/{}/mean"
"""The name of a component's mean in a line of metrics."""
Row = dict[str, Any]
_logs = Kept(50)
"""The last trainer_state.json files."""


def files(folder: Path) -> dict[int, Path]:
    """The files of completions by step: in the folder of a run, or in its folder `completions`."""
    for place in (folder / "completions", folder):
        try:
            found = {int(m[1]): path for path in place.iterdir() if (m := NAME.fullmatch(path.name))}
        except OSError:
            continue
        if found:
            return found
    return {}


def looks_like(folder: Path) -> bool:
    found = files(folder)
    if not found:
        return False
    import pyarrow as pa
    import pyarrow.parquet as pq

    for step in (max(found), min(found)):
        try:
            return set(pq.read_schema(found[step]).names) >= COLUMNS - {"advantage"}
        except (OSError, pa.ArrowException):
            continue
    return True  # by its name; what is wrong with its files is said when they are opened


def names(folder: Path) -> tuple[str, ...] | None:
    """The reward functions, as the log has them; None: there is no log yet, and every column of numbers may be one."""
    known = {key for told in logged(folder)[0].values() for key in told if key.startswith("rewards/")}
    return tuple(sorted(key[8:-5] for key in known if key.endswith("/mean"))) or None


def read(path: Path, functions: tuple[str, ...] | None = None) -> list[Row]:
    """The rows of a file, a completion's reward being the plain sum of what the reward functions gave."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise Refused(f"{path.name} is no whole Parquet file: {_short(error)}") from None
    missing = {"prompt", "completion"} - set(table.column_names)
    if missing:
        raise Refused(f"{path.name} has no column {' and '.join(sorted(missing))}: these are not TRL's completions")
    numbers = {f.name for f in table.schema if pa.types.is_floating(f.type) or pa.types.is_integer(f.type)} - COLUMNS
    numbers = numbers if functions is None else numbers & set(functions)
    words = [name for name in table.column_names if name not in numbers | COLUMNS]
    rows: list[Row] = []
    for (group, sample), given in zip(_places(table.column("prompt").to_pylist()), table.to_pylist(), strict=True):
        parts = {name: given[name] for name in numbers}
        known = [value for value in parts.values() if value is not None and not math.isnan(value)]
        row = {
            "step": given.get("step"),
            **{"group": group, "sample": sample},
            "prompt_text": spoken(given["prompt"]),
            "response_text": spoken(given["completion"]),
            "reward": sum(known) if known else None,
            "valid": bool(known) or not parts,
            "parts": {name: parts[name] for name in table.column_names if name in numbers},
        }
        if given.get("advantage") is not None:
            row["advantage"] = [given["advantage"]]
        if parts and not known:
            row["reason"] = "no reward function gave a number"
        row |= {"said": {name: str(given[name])[:500] for name in words if given[name] is not None}} if words else {}
        rows.append(row)
    return rows


def _places(given: list[Any]) -> list[tuple[int, int]]:
    """Group and sample of every row. All groups are of one size, so a prompt that was drawn twice in a row is two."""
    runs = [len(list(equal)) for _, equal in itertools.groupby(given)]
    size = math.gcd(*runs) if len(runs) > 1 else len(given)
    return [(i // max(size, 1), i % max(size, 1)) for i in range(len(given))]


def spoken(given: Any) -> str:
    """A text as it stands; messages as their contents, with who speaks where there are several."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        return "" if given is None else json.dumps(given, ensure_ascii=False, default=str)
    said = [(str(m.get("role", "")), _content(m)) if isinstance(m, dict) else ("", str(m)) for m in given]
    return said[0][1] if len(said) == 1 else "\n".join(f"{role}: {text}" for role, text in said)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):  # parts, of which some are text
        return "".join(str(p.get("text") or "") if isinstance(p, dict) else str(p) for p in content)
    rest = {k: v for k, v in message.items() if k != "role" and v is not None}
    return json.dumps(rest, ensure_ascii=False, default=str) if rest else ""


def logged(folder: Path) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """What TRL itself logged, by step, from the newest trainer_state.json; and what could not be read."""
    problems: list[str] = []
    for path in logs(folder):
        try:
            return _logs(path, lambda path=path: _history(path)), problems  # type: ignore[misc]
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            problems.append(f"{path.relative_to(folder)} cannot be read: {_short(error)}")
    return {}, problems


def _history(path: Path) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for entry in json.loads(contents(path))["log_history"]:
        told = {OURS.get(k, k): v for k, v in entry.items() if isinstance(v, int | float)}
        found.setdefault(int(entry["step"]), {}).update(told)
    return found


def logs(folder: Path) -> list[Path]:
    """Every trainer_state.json, that of the whole run first, then those of its checkpoints from the newest."""
    kept = [path for path in folder.glob("checkpoint-*/trainer_state.json") if _number(path)]
    kept.sort(key=lambda path: int(path.parent.name.removeprefix("checkpoint-")), reverse=True)
    return [path for path in (folder / "trainer_state.json", *kept) if path.exists()]


def _number(path: Path) -> bool:
    return path.parent.name.removeprefix("checkpoint-").isdecimal()


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

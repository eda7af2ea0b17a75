"""Rewards by name, each with a weight if you like (`own 0.2*python:f.py:brief`).

own                    the task's own check; a sorting task has several, by name: positions, exact, …
python:FILE:FUNCTION   f(prompt, response, answer, **columns), a number or (number, reason): see calls.py
sandbox:FILE:FUNCTION  the same, in a sandbox: its file is never run anywhere else
object:NAME@HASH       a function that was given in Python
judge:FILE             a language model that is asked for a score
model:RUN              a reward model, which rates the whole response
process:RUN            a process reward, which rates each step
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascent.core.errors import ConfigError
from ascent.core.menu import nearest
from ascent.processes.reward_calls import RewardCall, RewardCallError, parse_reward_signature
from ascent.sandbox.sandboxed_reward import SandboxSettings, describe_sandboxed
from ascent.tasks.python_objects import find_object, object_label, register_object
from ascent.tasks.user_files import absolute_path, load_python

OWN, FUNCTION_KINDS = "own", ("python", "object", "sandbox")
SOURCE_PATTERN = r"(python|sandbox):.+:[^:/]+|object:.+@[0-9a-f]+|(judge|model|process|process-score):.+"
_PROCESS = ("process reward", "step-value", "process-reward")
LEARNED = {"model": ("reward model", "bradley-terry", "reward-model"), "process": _PROCESS, "process-score": _PROCESS}
"""Of each kind of learned reward: what it is, the loss of its run, and the command that makes one."""


@dataclass(frozen=True)
class RewardSource:
    """One entry of a reward list: where the reward comes from, and its weight."""

    name: str
    """As metrics call it: own, the function's name, judge, model; numbered where two have one name."""
    source: str
    """own (or the name of one), python:FILE:FUNCTION, sandbox:FILE:FUNCTION, object:NAME@HASH, judge:FILE, model:RUN or
    process:RUN."""
    weight: float = 1.0

    @property
    def kind(self) -> str:
        """own, python, sandbox, object, judge, model, process or process-score."""
        kind, colon, _ = self.source.partition(":")
        return kind if colon else OWN

    def verify(self) -> None:
        """Refuse a function or a run that is not there. Nothing is loaded, and a judge's reader checks its settings."""
        if self.kind == "sandbox":
            file = Path(self.source.removeprefix("sandbox:").rsplit(":", 1)[0])
            if not file.is_file():
                raise ConfigError(f"--reward {self.source}: there is no file {file}")
        elif self.kind in FUNCTION_KINDS and not callable(load_reward_function(self.source)):
            raise ConfigError(f"--reward {self.source}: a reward is a function, f(prompt, response, answer, **columns)")
        if self.kind not in LEARNED:
            return
        what, wanted, command = LEARNED[self.kind]
        run = Path(self.source.partition(":")[2])
        try:
            loss = json.loads((run / "config.json").read_text())["loss"]["name"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(f"--reward {self.source}: {run} is not a run; `ascent {command}` makes one") from None
        if loss != wanted:
            raise ConfigError(
                f"--reward {self.source}: {run} trained something else ({loss}); `ascent {command}` trains a {what}"
            )
        if not any((run / "checkpoints").glob("step_*")):
            raise ConfigError(f"--reward {self.source}: {run} has no checkpoint yet, so there is no {what} to load")


def load_reward_function(source: str) -> Any:
    """The function of python:FILE:NAME, or the one that was given in Python."""
    return load_python("--reward", source) if source.startswith("python:") else find_object(source, "reward")


def resolve_reward_call(
    source: str, columns: Collection[str] | None = None, sandbox: SandboxSettings | None = None
) -> RewardCall:
    """How a reward function is called; refused if its signature does not say, or asks for other `columns`."""
    try:
        if source.startswith("sandbox:"):
            call = describe_sandboxed(source, sandbox or SandboxSettings())
        else:
            call = parse_reward_signature(load_reward_function(source))
        if columns is not None:
            call.check_columns(columns)
    except RewardCallError as error:
        name = object_label(source) if source.startswith("object:") else source
        raise ConfigError(f"reward {name}: {error}") from None
    return call


def register_rewards(value: Any) -> Any:
    """Rewards as settings have them: functions by their names, (0.2, function) as 0.2*NAME. Text stays as it is."""
    weighed = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], int | float)
    entries = list(value) if isinstance(value, list | tuple) and not weighed else [value]
    if all(isinstance(entry, str) for entry in entries) or value is None:
        return value
    return tuple(_name_reward(entry) for entry in entries)


def _name_reward(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], int | float):
        return f"{float(entry[0])!r}*{_name_reward(entry[1])}"
    if not callable(entry):
        raise ConfigError(
            f"reward {entry!r:.60}: a reward is a function, a name such as own or judge:FILE, or (weight, reward)"
        )
    return register_object("reward", entry)


def _split(entry: str, own: Collection[str]) -> tuple[float, str]:
    """0.5*python:f.py:g -> 0.5, python:f.py:g. `own`: the names of the task's own rewards."""
    weighed = re.fullmatch(r"\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*\*\s*(.+)", entry)
    weight, source = (float(weighed[1]), weighed[2].strip()) if weighed else (1.0, entry.strip())
    if not (source in own or re.fullmatch(SOURCE_PATTERN, source)) or not math.isfinite(weight):
        raise ConfigError(
            (
                f"--reward {entry}: no such reward; a reward is {', '.join(f'`{name}`' for name in own)}, "
                "python:FILE:NAME, model:RUN (a reward model), process:RUN (one of steps) or sandbox:FILE:NAME (text) "
                "(a function in a sandbox) or judge:FILE (a "
                "model that is asked), with a weight if wanted: 0.5*model:RUN."
            )
            + nearest(source, own)
        )
    return weight, source


def absolute_source(entry: str, own: Collection[str] = (OWN,)) -> str:
    """The entry with the whole path of its file, so that a run can be resumed from any folder."""
    weight, source = _split(entry, own)
    kind, _, where = source.partition(":")
    if kind in ("python", "sandbox"):
        file, name = where.rsplit(":", 1)
        source = f"{kind}:{absolute_path(file)}:{name}"
    elif source not in own and kind != "object":
        source = f"{kind}:{absolute_path(where)}"
    return source if weight == 1 else f"{weight!r}*{source}"


def parse_rewards(entries: Sequence[str], own: Collection[str] = (OWN,)) -> tuple[RewardSource, ...]:
    """The parts of a reward; an empty list is the task's own check."""
    parts: list[RewardSource] = []
    names: Counter[str] = Counter()
    for entry in entries or (OWN,):
        weight, source = _split(entry, own)
        name = source.rsplit(":", 1)[-1] if source.startswith(("python:", "sandbox:")) else source.partition(":")[0]
        name = object_label(source) if source.startswith("object:") else name
        names[name] += 1
        parts.append(RewardSource(name if names[name] == 1 else f"{name}-{names[name]}", source, weight))
    return tuple(parts)

"""Names of rewards in settings, each with an optional weight (`own 0.2*python:f.py:brief`).

own                    the task's own check; sorting tasks have several, by name: positions, exact, …
python:FILE:FUNCTION   f(prompt, response, answer, **columns) returns a number or (number, reason)
sandbox:FILE:FUNCTION  the same, in a sandbox; the file is never executed outside of it
object:NAME@HASH       a Python function passed to the API
judge:FILE             a language model that scores responses
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
"""For each kind of learned reward: its name, the loss of its run, and the command that trains it."""


@dataclass(frozen=True)
class RewardSource:
    """One entry of a reward list: where the reward comes from, and its weight."""

    name: str
    """Name in metrics: own, the function's name, judge, model; numbered if several have the same name."""
    source: str
    """own (or the name of a built-in reward), python:FILE:FUNCTION, sandbox:FILE:FUNCTION, object:NAME@HASH,
    judge:FILE, model:RUN or process:RUN."""
    weight: float = 1.0

    @property
    def kind(self) -> str:
        """own, python, sandbox, object, judge, model, process or process-score."""
        kind, colon, _ = self.source.partition(":")
        return kind if colon else OWN

    def verify(self) -> None:
        """Raise ConfigError if the function or the run does not exist, without loading models or asking judges."""
        if self.kind == "sandbox":
            file = Path(self.source.removeprefix("sandbox:").rsplit(":", 1)[0])
            if not file.is_file():
                raise ConfigError(f"--reward {self.source}: there is no file {file}")
        elif self.kind in FUNCTION_KINDS and not callable(load_reward_function(self.source)):
            raise ConfigError(
                f"--reward {self.source}: a reward must be a function, f(prompt, response, answer, **columns)"
            )
        if self.kind not in LEARNED:
            return
        name, expected_loss, command = LEARNED[self.kind]
        run = Path(self.source.partition(":")[2])
        try:
            loss = json.loads((run / "config.json").read_text())["loss"]["name"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"--reward {self.source}: {run} is not a run folder; train one with `ascent {command}`"
            ) from None
        if loss != expected_loss:
            raise ConfigError(
                f"--reward {self.source}: {run} was trained with the loss {loss}, so it is no {name}; train one with "
                f"`ascent {command}`"
            )
        if not any((run / "checkpoints").glob("step_*")):
            raise ConfigError(f"--reward {self.source}: {run} has no checkpoint, so there is no {name} to load")


def load_reward_function(source: str) -> Any:
    """Return the function of python:FILE:NAME or object:NAME@HASH."""
    return load_python("--reward", source) if source.startswith("python:") else find_object(source, "reward")


def resolve_reward_call(
    source: str, columns: Collection[str] | None = None, sandbox: SandboxSettings | None = None
) -> RewardCall:
    """Return how to call a reward function; raise ConfigError if its parameters do not fit, or are not in `columns`."""
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
    """Replace functions with their registered names, and (0.2, function) with 0.2*NAME; keep text."""
    is_weighted = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], int | float)
    entries = list(value) if isinstance(value, list | tuple) and not is_weighted else [value]
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
            f"reward {entry!r:.60}: a reward must be a function, a name such as own or judge:FILE, or (weight, reward)"
        )
    return register_object("reward", entry)


def _split(entry: str, own: Collection[str]) -> tuple[float, str]:
    """Split 0.5*python:f.py:g into 0.5 and python:f.py:g. `own`: names of the task's built-in rewards."""
    match = re.fullmatch(r"\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*\*\s*(.+)", entry)
    weight, source = (float(match[1]), match[2].strip()) if match else (1.0, entry.strip())
    if not (source in own or re.fullmatch(SOURCE_PATTERN, source)) or not math.isfinite(weight):
        raise ConfigError(
            f"--reward {entry}: unknown reward. Rewards are {', '.join(f'`{name}`' for name in own)}, "
            "python:FILE:NAME, model:RUN (a reward model) and process:RUN (a process reward); text tasks also have "
            "sandbox:FILE:NAME (a function in a sandbox) and judge:FILE (a language model). A weight is optional: "
            "0.5*model:RUN." + nearest(source, own)
        )
    return weight, source


def absolute_source(entry: str, own: Collection[str] = (OWN,)) -> str:
    """Return the entry with the absolute path of its file, so that a run can be resumed from any folder."""
    weight, source = _split(entry, own)
    kind, _, where = source.partition(":")
    if kind in ("python", "sandbox"):
        file, name = where.rsplit(":", 1)
        source = f"{kind}:{absolute_path(file)}:{name}"
    elif source not in own and kind != "object":
        source = f"{kind}:{absolute_path(where)}"
    return source if weight == 1 else f"{weight!r}*{source}"


def parse_rewards(entries: Sequence[str], own: Collection[str] = (OWN,)) -> tuple[RewardSource, ...]:
    """Parse the entries of a reward list; an empty list means the task's own check."""
    parts: list[RewardSource] = []
    names: Counter[str] = Counter()
    for entry in entries or (OWN,):
        weight, source = _split(entry, own)
        name = source.rsplit(":", 1)[-1] if source.startswith(("python:", "sandbox:")) else source.partition(":")[0]
        name = object_label(source) if source.startswith("object:") else name
        names[name] += 1
        parts.append(RewardSource(name if names[name] == 1 else f"{name}-{names[name]}", source, weight))
    return tuple(parts)

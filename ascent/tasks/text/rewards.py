"""Rewards by name: `own`, the task's check, and python:FILE:FUNCTION, each with a weight."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN = "own"


@dataclass(frozen=True)
class Reward:
    """One part of the reward: weight × what it returns."""

    name: str
    """As metrics call it: own, or the function's name; numbered where two have one name."""
    source: str
    """own, or python:FILE:FUNCTION with its whole path."""
    weight: float = 1.0

    @property
    def own(self) -> bool:
        return self.source == OWN

    def load(self) -> Any:
        """The function; refused if it is not there or is none."""
        if self.own:
            return None
        from ascent.own import load_python
        from ascent.types import Refused

        found = load_python("--reward", self.source)
        if not callable(found):
            raise Refused(f"--reward {self.source}: a reward is a function f(prompt, response, answer, **columns)")
        return found


def _split(entry: str) -> tuple[float, str]:
    """0.5*python:f.py:g -> 0.5, python:f.py:g."""
    weighed = re.fullmatch(r"\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*\*\s*(.+)", entry)
    weight, source = (float(weighed[1]), weighed[2].strip()) if weighed else (1.0, entry.strip())
    python = re.fullmatch(r"python:.+:[^:/]+", source)
    if (not python and source != OWN) or not math.isfinite(weight):
        from ascent.types import Refused

        raise Refused(
            f"--reward {entry}: a reward is `own`, the task's check, or python:FILE:FUNCTION, either with a weight "
            "before it: 0.5*python:FILE:FUNCTION"
        )
    return weight, source


def absolute(entry: str) -> str:
    """The entry with the whole path of its file, so that a run can go on from any folder."""
    weight, source = _split(entry)
    if source != OWN:
        file, name = source.removeprefix("python:").rsplit(":", 1)
        source = f"python:{Path(file).expanduser().resolve()}:{name}"
    return source if weight == 1 else f"{weight!r}*{source}"


def parse(entries: Sequence[str]) -> tuple[Reward, ...]:
    """The parts of a reward; none given is the task's own check."""
    made: list[Reward] = []
    for entry in entries or (OWN,):
        weight, source = _split(entry)
        name = source.rsplit(":", 1)[-1]
        taken = sum(other.name.split("-")[0] == name for other in made)
        made.append(Reward(name if not taken else f"{name}-{taken + 1}", source, weight))
    return tuple(made)

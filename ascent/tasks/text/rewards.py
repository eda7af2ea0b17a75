"""Rewards by name, each with a weight: `own`, python:FILE:FUNCTION, judge:FILE, model:RUN and process:RUN."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN = "own"
FORMS = (OWN, r"python:.+:[^:/]+", r"judge:.+", r"model:.+", r"process(-score)?:.+")
LEARNED = {
    "model": ("reward model", "bradley-terry", "reward-model"),
    "process": ("process reward", "step-value", "process-reward"),
    "process-score": ("process reward", "step-value", "process-reward"),
}
"""Of each kind of learned reward: what it is, the loss of its run, and the command that makes one."""


@dataclass(frozen=True)
class Reward:
    """One part of the reward: weight × what it returns."""

    name: str
    """As metrics call it: own, the function's name, judge, model; numbered where two have one name."""
    source: str
    """own, python:FILE:FUNCTION, judge:FILE, model:RUN or process:RUN, with the whole path."""
    weight: float = 1.0

    @property
    def own(self) -> bool:
        return self.source == OWN

    @property
    def kind(self) -> str:
        """own, python, judge, model, process or process-score."""
        return self.source.partition(":")[0]

    def load(self) -> Any:
        """The function, or the judge; refused if it is not there or is none. A reward model is only looked at."""
        if self.own:
            return None
        if self.kind in LEARNED:
            return check_model("--reward", self.source)
        if self.kind == "judge":
            from ascent.judge import read_judge

            return read_judge(self.source.removeprefix("judge:")).insist()
        from ascent.own import load_python
        from ascent.types import Refused

        found = load_python("--reward", self.source)
        if not callable(found):
            raise Refused(f"--reward {self.source}: a reward is a function f(prompt, response, answer, **columns)")
        return found


def check_model(flag: str, source: str) -> None:
    """Refuse what is no run of such a model with a checkpoint. Nothing is loaded yet."""
    from ascent.types import Refused

    kind, _, where = source.partition(":")
    what, wanted, command = LEARNED[kind]
    run = Path(where)
    try:
        loss = json.loads((run / "config.json").read_text())["loss"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        raise Refused(f"{flag} {source}: {run} is no run; `ascent {command}` makes one") from None
    if loss != wanted:
        raise Refused(f"{flag} {source}: {run} trained something else ({loss}); `ascent {command}` trains a {what}")
    if not any((run / "checkpoints").glob("step_*")):
        raise Refused(f"{flag} {source}: {run} has no checkpoint yet, so there is no {what} to load")


def _split(entry: str) -> tuple[float, str]:
    """0.5*python:f.py:g -> 0.5, python:f.py:g."""
    weighed = re.fullmatch(r"\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*\*\s*(.+)", entry)
    weight, source = (float(weighed[1]), weighed[2].strip()) if weighed else (1.0, entry.strip())
    if not any(re.fullmatch(form, source) for form in FORMS) or not math.isfinite(weight):
        from ascent.types import Refused

        raise Refused(
            f"--reward {entry}: a reward is `own`, the task's check, python:FILE:FUNCTION, judge:FILE, a model that is "
            "asked, model:RUN, a reward model, or process:RUN, one of steps; with a weight if wanted: 0.5*model:RUN"
        )
    return weight, source


def absolute(entry: str) -> str:
    """The entry with the whole path of its file, so that a run can go on from any folder."""
    weight, source = _split(entry)
    kind, _, where = source.partition(":")
    if kind == "python":
        file, name = where.rsplit(":", 1)
        source = f"python:{Path(file).expanduser().resolve()}:{name}"
    elif source != OWN:
        source = f"{kind}:{Path(where).expanduser().resolve()}"
    return source if weight == 1 else f"{weight!r}*{source}"


def parse(entries: Sequence[str]) -> tuple[Reward, ...]:
    """The parts of a reward; none given is the task's own check."""
    made: list[Reward] = []
    for entry in entries or (OWN,):
        weight, source = _split(entry)
        name = source.rsplit(":", 1)[-1] if source.startswith("python:") else source.partition(":")[0]
        taken = sum(other.name.split("-")[0] == name for other in made)
        made.append(Reward(name if not taken else f"{name}-{taken + 1}", source, weight))
    return tuple(made)

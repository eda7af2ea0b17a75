"""Figure 5: two trainings side by side, each a run like any other, on worlds small enough to watch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ascent.core.types import Refused
from ascent.explain.explain import formula
from ascent.lab.figure import Choice, Control, ControlState, DataTable, Figure, Look, Name, Slider, short
from ascent.lab.figures.training.sides import (
    ADVANTAGE_LABELS,
    LOSS_LABELS,
    REWARD_LABELS,
    SIDES,
    SMALL_TASKS,
    config_of,
    side_settings,
    train_command,
)
from ascent.lab.figures.training.stream import metrics_in_words, run_folder
from ascent.records import Run


def _side(side: str, entropy: float) -> tuple[Control, ...]:
    def named(name: str) -> str:
        return f"{side}.{name}"

    return (
        Choice(named("credit"), "credit", "centered", tuple(ADVANTAGE_LABELS.items()), "How a reward becomes δ."),
        Choice(named("loss"), "loss", "clipped", tuple(LOSS_LABELS.items()), "The surrogate of one token."),
        Choice(named("reward"), "reward", "inclusion-ordering", tuple(REWARD_LABELS.items()), "What is paid for."),
        Slider(named("samples"), "samples G", 10, 2, 32, 1, "Responses to each prompt.", (2, 4, 8, 10, 16, 32)),
        Slider(named("epochs"), "inner steps", 10, 1, 20, 1, "Updates on one batch of samples."),
        Slider(named("lr"), "learning rate", 0.01, 0.0003, 0.1, 0.0001, "", (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)),
        Slider(named("eps"), "clip ε", 0.2, 0.01, 0.5, 0.01, "Where the ratio is clipped, low and high."),
        Slider(
            named("kl"), "KL to the start", 0.0, 0.0, 1.0, 0.01, "k3 in the loss.", (0.0, 0.01, 0.04, 0.1, 0.3, 1.0)
        ),
        Slider(
            named("entropy"), "entropy bonus", entropy, 0.0, 1.0, 0.1, "At the start; it fades to 0 by 90 % of the run."
        ),
        Slider(named("seed"), "seed", 5, 0, 99, 1, "Decides every random number."),
        Name(named("run"), "run", "", "The run that is shown."),
    )


def _compute(state: ControlState, runs: Path | None) -> Look:
    texts: dict[str, str] = {"world": SMALL_TASKS[state["world"]][0]}
    drawing: dict[str, Any] = {"sides": {}, "steps": SMALL_TASKS[state["world"]][2]["steps"]}
    rows = []
    for side in SIDES:
        own = {key: value for key, value in state.items() if key.startswith(f"{side}.")}
        texts |= {key: _value_text(value) for key, value in own.items() if not key.endswith(".run")}
        about: dict[str, Any] = {"run": None, "error": None, "formula": "", "max_reward": 1.0}
        try:
            config = config_of(state, side)
            about |= {"formula": formula(config.algorithm), "max_reward": config.task.max_reward}
        except Refused as error:
            about["error"] = str(error)
        last = _last(runs, state[f"{side}.run"])
        if last is not None:
            about["run"] = state[f"{side}.run"]
            texts |= {f"{side}.{key}": text for key, text in last.items()}
        drawing["sides"][side] = about
        rows.append([side.upper(), *(texts[key] for key in own if not key.endswith(".run"))])
    texts["difference"] = _difference(texts)
    head = ("run", *(c.label for c in FIGURE.controls if c.name.startswith("a.") and c.name != "a.run"))
    table = DataTable("The settings of both runs", head, rows)
    commands = "\n".join(train_command(state, side) for side in SIDES)
    return Look(texts, drawing, [table], _snippet(state), commands)


def _value_text(value: Any) -> str:
    names = {**ADVANTAGE_LABELS, **LOSS_LABELS, **REWARD_LABELS}
    return names[value] if isinstance(value, str) else short(value)


def _difference(texts: dict[str, str]) -> str:
    """What A and B do not share, in words."""
    labels = {c.name.partition(".")[2]: c.label for c in FIGURE.controls if c.name.startswith("a.")}
    pairs = [(label, texts[f"a.{n}"], texts[f"b.{n}"]) for n, label in labels.items() if n != "run"]
    told = [f"{label} {a} in A, {b} in B" for label, a, b in pairs if a != b]
    return (
        f"They differ in: {'; '.join(told)}." if told else "Both have the same settings, so they get the same numbers."
    )


def _last(runs: Path | None, name: str) -> dict[str, str] | None:
    if runs is None or not name:
        return None
    try:
        run = Run(run_folder(runs, name))
        return metrics_in_words(run.metrics[-1], run.config.task.max_reward) if run.metrics else {}
    except Refused:  # a link from another machine: its settings still say everything
        return None


def _snippet(state: ControlState) -> str:
    lines = ["import ascent", ""]
    for side in SIDES:
        task, settings = side_settings(state, side)
        simple = {k: v for k, v in settings.items() if "." not in k}
        dotted = {k: v for k, v in settings.items() if "." in k}
        lines.append(f'{side} = ascent.train(\n    "{task}",')
        lines += [f"    {key}={value!r}," for key, value in simple.items()]
        lines += [f"    **{dotted!r},"] if dotted else []
        lines += [")", f'print("{side.upper()}", {side}.metrics[-1]["reward"], {side}.metrics[-1]["accuracy"])', ""]
    return "\n".join(lines)


FIGURE = Figure(
    name="training",
    place=5,
    title="Training",
    about="Two runs side by side: the reward that is earned, and what is exactly right.",
    controls=(
        Choice("world", "world", "lecture", tuple((n, w[0]) for n, w in SMALL_TASKS.items()), "What is to be sorted."),
        *_side("a", 0.0),
        *_side("b", 0.5),
    ),
    compute=_compute,
    keys=(("space", "train and pause"), ("→", "one step"), ("r", "reset")),
)

"""Figure 5: two trainings side by side, each a run like any other, on worlds small enough to watch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ascent.config import Config
from ascent.diagnose.explain import formula
from ascent.lab.look import Choice, Control, Figure, Look, Name, Slider, State, Table, short
from ascent.lab.runs import run_folder, said_of
from ascent.menu import name_of
from ascent.records import Run
from ascent.settings import configure
from ascent.tasks.sorting import REWARDS
from ascent.types import Refused

SMALL = {"policy.width": 16, "policy.layers": 1, "policy.heads": 2, "eval_prompts": 200, "eval_every": 5}
WORLDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lecture": ("the lecture's three prompts", "lecture", {"steps": 100}),
    "sort": ("sort 4 numbers out of 5", "sort", {"length": 4, "numbers": 5, "prompts": 32, "steps": 120, **SMALL}),
    "repeats": (
        "5 numbers out of 3: all repeat",
        "sort",
        {"length": 5, "numbers": 3, "prompts": 32, "steps": 80, **SMALL},
    ),
}
"""Name: how it is shown, the task, and the settings that make it small."""
CREDITS = {
    "raw": "raw reward",
    "running-mean": "running mean",
    "centered": "group mean (centered)",
    "leave-one-out": "mean of the others (RLOO)",
    "normalized": "mean and std (GRPO)",
    "best-only": "best of the group only",
    "batch-normalized": "over the batch (REINFORCE++)",
    "gae": "GAE(0.95), own critic",
}
LOSSES = {
    "log-prob": "log-prob (naive)",
    "ratio": "ratio, never clipped",
    "clipped": "clipped ratio (PPO, GRPO)",
    "sequence-ratio": "sequence ratio (GSPO)",
    "cispo": "CISPO",
}
REWARD_WORDS = {
    "inclusion-ordering": "inclusion + ordering",
    "positions": "positions right",
    "process": "positions, token by token",
    "exact": "exact match only",
}
assert set(REWARD_WORDS) == set(REWARDS)
SIDES = ("a", "b")


def _side(side: str, entropy: float) -> tuple[Control, ...]:
    def named(name: str) -> str:
        return f"{side}.{name}"

    return (
        Choice(named("credit"), "credit", "centered", tuple(CREDITS.items()), "How a reward becomes δ."),
        Choice(named("loss"), "loss", "clipped", tuple(LOSSES.items()), "The surrogate of one token."),
        Choice(named("reward"), "reward", "inclusion-ordering", tuple(REWARD_WORDS.items()), "What is paid for."),
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


def settings_of(state: State, side: str) -> tuple[str, dict[str, Any]]:
    """The task and the settings of a side, as `ascent train` takes them."""
    own = {key.partition(".")[2]: value for key, value in state.items() if key.startswith(f"{side}.")}
    _, task, world = WORLDS[state["world"]]
    settings: dict[str, Any] = {"algorithm": "dr-grpo", "advantage": own["credit"], "loss": own["loss"]}
    if own["loss"] in ("clipped", "sequence-ratio"):
        settings |= {"loss.low": own["eps"], "loss.high": own["eps"]}
    if own["credit"] == "gae":
        settings["critic"] = "own-critic"
    if own["kl"]:
        settings |= {"kl": "in-loss", "kl.coef": own["kl"], "reference": "frozen"}
    if own["entropy"]:
        settings |= {"exploration": "annealed", "exploration.start": own["entropy"], "exploration.until": 0.9}
    settings |= {name: own[name] for name in ("reward", "samples", "epochs", "lr", "seed")}
    kept = {"record_rollouts": "8", "record_every": 1, "threads": 1}
    return task, settings | world | kept


def config_of(state: State, side: str) -> Config:
    """Checked by the library's own validator: what cannot be is refused with its reason."""
    task, settings = settings_of(state, side)
    config = configure(task, settings)
    if config.algorithm.loss.sequence and config.task.reward == "process":
        raise Refused(
            "--loss sequence-ratio needs one credit a response, but --reward process gives one a token: take another"
        )
    return config


def flags(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def command(state: State, side: str) -> str:
    task, settings = settings_of(state, side)
    return shlex.join(["ascent", "train", task, *flags(settings)])


def compute(state: State, runs: Path | None) -> Look:
    said: dict[str, str] = {"world": WORLDS[state["world"]][0]}
    drawn: dict[str, Any] = {"sides": {}, "steps": WORLDS[state["world"]][2]["steps"]}
    rows = []
    for side in SIDES:
        own = {key: value for key, value in state.items() if key.startswith(f"{side}.")}
        said |= {key: _said(value) for key, value in own.items() if not key.endswith(".run")}
        about: dict[str, Any] = {"run": None, "error": None, "formula": "", "max_reward": 1.0}
        try:
            config = config_of(state, side)
            about |= {"formula": formula(config.algorithm), "max_reward": config.task.max_reward}
        except Refused as error:
            about["error"] = str(error)
        last = _last(runs, state[f"{side}.run"])
        if last is not None:
            about["run"] = state[f"{side}.run"]
            said |= {f"{side}.{key}": text for key, text in last.items()}
        drawn["sides"][side] = about
        rows.append([side.upper(), *(said[key] for key in own if not key.endswith(".run"))])
    said["difference"] = _difference(said)
    head = ("run", *(c.label for c in FIGURE.controls if c.name.startswith("a.") and c.name != "a.run"))
    table = Table("The settings of both runs", head, rows)
    commands = "\n".join(command(state, side) for side in SIDES)
    return Look(said, drawn, [table], _snippet(state), commands)


def _said(value: Any) -> str:
    names = {**CREDITS, **LOSSES, **REWARD_WORDS}
    return names[value] if isinstance(value, str) else short(value)


def _difference(said: dict[str, str]) -> str:
    """What A and B do not share, in words."""
    labels = {c.name.partition(".")[2]: c.label for c in FIGURE.controls if c.name.startswith("a.")}
    pairs = [(label, said[f"a.{n}"], said[f"b.{n}"]) for n, label in labels.items() if n != "run"]
    told = [f"{label} {a} in A, {b} in B" for label, a, b in pairs if a != b]
    return (
        f"They differ in: {'; '.join(told)}." if told else "Both have the same settings, so they get the same numbers."
    )


def _last(runs: Path | None, name: str) -> dict[str, str] | None:
    if runs is None or not name:
        return None
    try:
        run = Run(run_folder(runs, name))
        return said_of(run.metrics[-1], run.config.task.max_reward) if run.metrics else {}
    except Refused:  # a link from another machine: its settings still say everything
        return None


def _snippet(state: State) -> str:
    lines = ["import ascent", ""]
    for side in SIDES:
        task, settings = settings_of(state, side)
        simple = {k: v for k, v in settings.items() if "." not in k}
        dotted = {k: v for k, v in settings.items() if "." in k}
        lines.append(f'{side} = ascent.train(\n    "{task}",')
        lines += [f"    {key}={value!r}," for key, value in simple.items()]
        lines += [f"    **{dotted!r},"] if dotted else []
        lines += [")", f'print("{side.upper()}", {side}.metrics[-1]["reward"], {side}.metrics[-1]["accuracy"])', ""]
    return "\n".join(lines)


FIGURE = Figure(
    name="training",
    title="Training",
    about="Two runs side by side: the reward that is earned, and what is exactly right.",
    controls=(
        Choice("world", "world", "lecture", tuple((n, w[0]) for n, w in WORLDS.items()), "What is to be sorted."),
        *_side("a", 0.0),
        *_side("b", 0.5),
    ),
    compute=compute,
    keys=(("space", "train and pause"), ("→", "one step"), ("r", "reset")),
)
__all__ = ["FIGURE", "SIDES", "command", "config_of", "flags", "name_of", "settings_of"]

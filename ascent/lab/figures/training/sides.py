"""The settings of one side of figure 5, as `ascent train` takes them."""

from __future__ import annotations

import shlex
from typing import Any

from ascent.core.advantages import ADVANTAGES, Greedy, OptimalBaseline
from ascent.core.config import Config
from ascent.core.losses import LOSSES
from ascent.core.menu import name_of
from ascent.core.types import Refused
from ascent.core.values import GAE
from ascent.explain.explain import menu_label
from ascent.lab.figure import ControlState
from ascent.settings import configure
from ascent.tasks.small.sorting import REWARDS

_SMALL = {"policy.width": 16, "policy.layers": 1, "policy.heads": 2, "eval_prompts": 200, "eval_every": 5}
SMALL_TASKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lecture": ("the lecture's three prompts", "lecture", {"steps": 100}),
    "sort": ("sort 4 numbers out of 5", "sort", {"length": 4, "numbers": 5, "prompts": 32, "steps": 120, **_SMALL}),
    "repeats": (
        "5 numbers out of 3: all repeat",
        "sort",
        {"length": 5, "numbers": 3, "prompts": 32, "steps": 80, **_SMALL},
    ),
}
"""Name: how it is shown, the task, and the settings that make it small."""
ADVANTAGE_LABELS = {name_of(cls): menu_label(cls) for cls in (*ADVANTAGES, GAE) if cls not in (Greedy, OptimalBaseline)}
"""Greedy and optimal baselines need another response or a gradient for each response: too slow to watch."""
LOSS_LABELS = {name_of(cls): menu_label(cls) for cls in LOSSES}
REWARD_LABELS = {
    "inclusion-ordering": "inclusion + ordering",
    "positions": "positions right",
    "process": "positions, token by token",
    "exact": "exact match only",
}
assert set(REWARD_LABELS) == set(REWARDS)
SIDES = ("a", "b")


def side_settings(state: ControlState, side: str) -> tuple[str, dict[str, Any]]:
    """The task and the settings of a side, as `ascent train` takes them."""
    own = {key.partition(".")[2]: value for key, value in state.items() if key.startswith(f"{side}.")}
    _, task, world = SMALL_TASKS[state["world"]]
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


def config_of(state: ControlState, side: str) -> Config:
    """Checked by the library's own validator: what cannot be is refused with its reason."""
    task, settings = side_settings(state, side)
    config = configure(task, settings)
    if config.algorithm.loss.sequence and config.task.reward == "process":
        raise Refused(
            "--loss sequence-ratio needs one advantage per response, but --reward process gives one per token: "
            "choose another reward"
        )
    return config


def flags_of(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def train_command(state: ControlState, side: str) -> str:
    task, settings = side_settings(state, side)
    return shlex.join(["ascent", "train", task, *flags_of(settings)])

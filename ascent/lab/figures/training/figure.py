"""Figure 5: two trainings side by side, on small tasks. Each is an ordinary run."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from ascent.build.trained_run import Run
from ascent.core.advantages import ADVANTAGES, Greedy, OptimalBaseline
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.losses import LOSSES
from ascent.core.menu import name_of
from ascent.core.values import GAE
from ascent.explain.explain import menu_label
from ascent.lab.figure_base import NAME, Choice, Control, ControlState, DataTable, Figure, Look, Name, Slider, short
from ascent.settings import configure
from ascent.tasks.small.sorting import REWARDS

_SMALL = {"policy.width": 16, "policy.layers": 1, "policy.heads": 2, "eval_prompts": 200, "eval_every": 5}
_FOUR = {"length": 4, "numbers": 5, "prompts": 32, "steps": 120, **_SMALL}
_FIVE = {"length": 5, "numbers": 3, "prompts": 32, "steps": 80, **_SMALL}
SMALL_TASKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lecture": ("the lecture's three prompts", "lecture", {"steps": 100}),
    "sort": ("sort 4 numbers out of 5", "sort", _FOUR),
    "repeats": ("5 numbers out of 3: all repeat", "sort", _FIVE),
}
"""By name: the label, the task, and the settings that make it small."""
ADVANTAGE_LABELS = {name_of(cls): menu_label(cls) for cls in (*ADVANTAGES, GAE) if cls not in (Greedy, OptimalBaseline)}
"""Without greedy and optimal baselines, which are too slow to watch."""
LOSS_LABELS = {name_of(cls): menu_label(cls) for cls in LOSSES}
REWARD_LABELS = {
    "inclusion-ordering": "inclusion + ordering",
    "positions": "positions right",
    "process": "positions, token by token",
    "exact": "exact match only",
}
assert set(REWARD_LABELS) == set(REWARDS)
SIDES = ("a", "b")


def _controls(side: str, entropy: float) -> list[Control]:
    controls: tuple[Control, ...] = (
        Choice("advantage", "advantage", "centered", tuple(ADVANTAGE_LABELS.items()), "How a reward becomes A."),
        Choice("loss", "loss", "clipped", tuple(LOSS_LABELS.items()), "The surrogate of one token."),
        Choice("reward", "reward", "inclusion-ordering", tuple(REWARD_LABELS.items()), "What is paid for."),
        Slider("samples", "samples G", 10, 2, 32, 1, "Responses to each prompt.", (2, 4, 8, 10, 16, 32)),
        Slider("epochs", "inner steps", 10, 1, 20, 1, "Updates on one batch of samples."),
        Slider("lr", "learning rate", 0.01, 0.0003, 0.1, 0.0001, "", (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)),
        Slider("eps", "clip ε", 0.2, 0.01, 0.5, 0.01, "Where the ratio is clipped, low and high."),
        Slider("kl", "KL to the start", 0.0, 0.0, 1.0, 0.01, "k3 in the loss.", (0.0, 0.01, 0.04, 0.1, 0.3, 1.0)),
        Slider("entropy", "entropy bonus", entropy, 0.0, 1.0, 0.1, "At the start; it fades to 0 by 90 % of the run."),
        Slider("seed", "seed", 5, 0, 99, 1, "Decides every random number."),
        Name("run", "run", "", "The run that is shown."),
    )
    return [replace(control, name=f"{side}.{control.name}") for control in controls]


# ---- the settings of a side ---------------------------------------------------------------------


def _of_side(state: ControlState, side: str) -> ControlState:
    return {key.partition(".")[2]: value for key, value in state.items() if key.startswith(f"{side}.")}


def side_settings(state: ControlState, side: str) -> tuple[str, dict[str, Any]]:
    """Return the task and the settings of a side, as for `ascent train`."""
    own = _of_side(state, side)
    _, task, small = SMALL_TASKS[state["world"]]
    settings: dict[str, Any] = {"algorithm": "dr-grpo", "advantage": own["advantage"], "loss": own["loss"]}
    if own["loss"] in ("clipped", "sequence-ratio"):
        settings |= {"loss.low": own["eps"], "loss.high": own["eps"]}
    if own["advantage"] == "gae":
        settings["critic"] = "own-critic"
    if own["kl"]:
        settings |= {"kl": "in-loss", "kl.coef": own["kl"], "reference": "frozen"}
    if own["entropy"]:
        settings |= {"exploration": "annealed", "exploration.start": own["entropy"], "exploration.until": 0.9}
    settings |= {name: own[name] for name in ("reward", "samples", "epochs", "lr", "seed")}
    return task, settings | small | {"record_rollouts": "8", "record_every": 1, "threads": 1}


def config_of(state: ControlState, side: str) -> Config:
    """Return the config of a side; invalid settings raise ConfigError."""
    return configure(*side_settings(state, side))


def _command(state: ControlState, side: str) -> str:
    task, settings = side_settings(state, side)
    flags = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return shlex.join(["ascent", "train", task, *flags])


def _snippet(state: ControlState) -> str:
    lines = ["import ascent", ""]
    for side in SIDES:
        task, settings = side_settings(state, side)
        dotted = {k: v for k, v in settings.items() if "." in k}
        lines.append(f'{side} = ascent.train(\n    "{task}",')
        lines += [f"    {key}={value!r}," for key, value in settings.items() if key not in dotted]
        lines += [f"    **{dotted!r},"] if dotted else []
        lines += [")", f'print("{side.upper()}", {side}.metrics[-1]["reward"], {side}.metrics[-1]["accuracy"])', ""]
    return "\n".join(lines)


# ---- the metrics of a run -----------------------------------------------------------------------


def run_folder(runs: Path, name: str) -> Path:
    """Return the folder of a run by its name. Paths outside of the folder of runs are refused."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name[:80]!r} is not the name of a run")
    folder = (runs / name).resolve()
    if folder.parent != runs.resolve():
        raise ConfigError(f"{name}: that is not inside {runs}")
    return folder


def point_of(line: dict[str, Any], maximum: float | None) -> dict[str, Any]:
    """Return a line of metrics for drawing: reward as a share of its maximum, accuracy, entropy and others."""
    clips = [line.get("clip_ratio/low_mean"), line.get("clip_ratio/high_mean")]
    reward = line.get("reward")
    return {
        "step": line["step"] + 1,
        "reward": reward / maximum if reward is not None and maximum else reward,
        "accuracy": line.get("accuracy"),
        "entropy": line.get("entropy"),
        "silent": line.get("frac_reward_zero_std"),
        "clip": None if clips == [None, None] else sum(x or 0.0 for x in clips),
        "loss": line.get("loss"),
    }


def metrics_in_words(line: dict[str, Any], maximum: float | None) -> dict[str, str]:
    """Return a line of metrics as texts."""
    point = point_of(line, maximum)

    def share(key: str) -> str:
        return "–" if point[key] is None else f"{point[key]:.0%}".replace("%", " %")

    def number(key: str, digits: int) -> str:
        return "–" if line.get(key) is None else f"{line[key]:.{digits}f}".replace("-", "−")

    return {
        "step": str(point["step"]),
        "earned": number("reward", 2) + (f" of {maximum:g}" if maximum else ""),
        "right": share("accuracy"),
        "spread": number("entropy", 2),
        "silent": share("silent"),
        "clipped": "never clips" if point["clip"] is None and line.get("loss") is not None else share("clip"),
        "lost": number("loss", 3),
    }


def _last(runs: Path | None, name: str) -> dict[str, str] | None:
    if runs is None or not name:
        return None
    try:
        run = Run(run_folder(runs, name))
        return metrics_in_words(run.metrics[-1], run.max_reward) if run.metrics else {}
    except ConfigError:  # a link from another machine: its settings still say everything
        return None


def _compute(state: ControlState, runs: Path | None) -> Look:
    shown, _, small = SMALL_TASKS[state["world"]]
    texts, sides = {"world": shown}, dict[str, Any]()
    labels, said = ADVANTAGE_LABELS | LOSS_LABELS | REWARD_LABELS, dict[str, dict[str, str]]()
    for side in SIDES:
        own = {name: value for name, value in _of_side(state, side).items() if name != "run"}
        said[side] = {name: labels[v] if isinstance(v, str) else short(v) for name, v in own.items()}
        try:
            config_of(state, side)
            error = None
        except ConfigError as refused:
            error = str(refused)
        run = state[f"{side}.run"]
        last = _last(runs, run)
        sides[side] = {"run": None if last is None else run, "error": error}
        texts |= {f"{side}.{key}": text for key, text in {**said[side], **(last or {})}.items()}
    head = [control.label for control in FIGURE.controls if control.name.removeprefix("a.") in said["a"]]
    pairs = zip(head, said["a"].values(), said["b"].values(), strict=True)
    differ = "; ".join(f"{label} {a} in A, {b} in B" for label, a, b in pairs if a != b)
    same = "Both have the same settings, so they get the same numbers."
    texts["difference"] = f"They differ in: {differ}." if differ else same
    rows = [[side.upper(), *said[side].values()] for side in SIDES]
    table = DataTable("The settings of both runs", ("run", *head), rows)
    commands = "\n".join(_command(state, side) for side in SIDES)
    return Look(texts, {"sides": sides, "steps": small["steps"]}, [table], _snippet(state), commands)


FIGURE = Figure(
    name="training",
    place=5,
    title="Training",
    about="Two runs side by side: the reward that is earned, and what is exactly right.",
    controls=(
        Choice("world", "world", "lecture", tuple((n, w[0]) for n, w in SMALL_TASKS.items()), "What is to be sorted."),
        *_controls("a", 0.0),
        *_controls("b", 0.5),
    ),
    compute=_compute,
    keys=(("space", "train and pause"), ("→", "one step"), ("r", "reset")),
)

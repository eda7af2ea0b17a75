"""The flags of `ascent train`, which other commands accept too: from arguments to a Config, and their help."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from ascent.build.backends import backend_of
from ascent.build.reward_loading import check_rewards
from ascent.cli.flags import check_positionals, is_flag, parse_flags, split_leading_word, wants_help
from ascent.cli.help_text import Group, print_help
from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.menu import hyperparameters, name_of
from ascent.explain.about import first_line
from ascent.processes.user_code import CODE
from ascent.runs.run_reader import read_settings
from ascent.runs.trust import DESCRIPTION, check_trust
from ascent.runs.untrusted_files import naming_file, read_json
from ascent.settings import (
    CHOICES,
    PLAIN,
    SHORT,
    Resolved,
    Setting,
    Settings,
    canonical_key,
    check_run_length,
    configure,
    field_docs,
    find_task,
    flatten,
    refuse_unknown_fields,
    resolve,
    settings_of,
)
from ascent.tasks import TASKS
from ascent.tasks.text.text_task import TextTask


@dataclass
class TrainOptions:
    """Settings of the call, which change none of the run's numbers."""

    out: Path | None = None
    """The run's folder. Default: runs/<date>-<task>-<algorithm>-s<seed>."""
    dry_run: bool = False
    """Print what would run, and exit. Needs no model, no data and no network."""
    preflight: bool = True
    """Check a language model before training, and refuse settings that cannot work."""
    config: Annotated[Path | None, "FILE"] = None
    """A run's config.json to start from, or a TOML file: task = "sort", steps = 100, [loss] high = 0.28."""


def parse_train(
    args: list[str], prog: str, shared: Settings | None = None, verify: bool = True
) -> tuple[Config, TrainOptions]:
    """Parse TASK and flags into a config. TASK may be left out if --config names one.

    The choices are read first, because they decide which other flags there are. `shared` has settings of all rows of
    a comparison; a row that needs another value keeps its own. Without `verify`, the files that the task and its
    rewards name are not read.
    """
    CODE.clear()
    task, args = split_leading_word(args)
    values, args = parse_flags(args, settings_of(TrainOptions).values())
    options = TrainOptions(**values)
    layers: list[dict[str, Any]] = []
    if options.config is not None:
        task, layer = _read_config(options.config, task)
        layers.append(layer)
    if task is None and not wants_help(args):
        names = [name_of(cls) + (":SOURCE" if "source" in hyperparameters(cls) else "") for cls in TASKS]
        raise ConfigError(f"TASK is missing: it comes first, as in {prog} lecture. There are {', '.join(names)}")
    choices, args = parse_flags(args, _choice_settings(None))
    resolved = resolve(task or "sort", *layers, choices)
    if wants_help(args):
        _print_run_help(resolved, prog, task, show_all="--help-all" in args)
    settings = _accepted_settings(resolved)
    values, rest = parse_flags(args, settings)
    if rest and is_flag(rest[0]):
        axis, _, name = canonical_key(rest[0].partition("=")[0].lstrip("-")).partition(".")
        if axis in CHOICES:
            refuse_unknown_fields(axis, type(resolved.chosen[axis]), [name])
    check_positionals(f"{prog} {task}", rest, settings, max_words=0)
    values = {name: value for name, value in values.items() if not (name in SHORT and value is None)}
    check_run_length(values)
    common = {name: value for name, value in (shared or {}).items() if name not in resolved.needs}
    config = configure(task, *layers, common, choices, values)
    backend = backend_of(config)
    if verify:
        check_rewards(backend, config.task, reads_data=not (options.dry_run and backend.uses_text))
    backend.check(config)
    return config, options


def is_task(name: str) -> bool:
    """Return whether this names a task rather than a file."""
    if Path(name).exists() or name.endswith((".jsonl", ".json")):
        return False
    try:
        find_task(name)
    except ConfigError:
        return False
    return True


# ---- config files ---------------------------------------------------------------------------------------------


def read_toml(path: Path) -> dict[str, Any]:
    """Read settings from a TOML file: names as on the command line; a table has the fields of its axis or the task."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from None
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        table = value if isinstance(value, dict) else {"name": value}
        flat |= {key: table["name"]} if "name" in table else {}
        flat |= {k if key == "task" else f"{key}.{k}": v for k, v in table.items() if k != "name"}
    return flat


def _read_config(path: Path, task: str | None) -> tuple[str | None, dict[str, Any]]:
    """Return the task and the settings of a file. If `task` is another one, the file's task settings are left out."""
    if path.suffix == ".toml":
        layer = read_toml(path)
        task_of_file = layer.pop("task", None)
        check_run_length(layer)
        return task or task_of_file, layer
    settings, run = read_settings(path, with_description=True), path.parent / "run.json"
    if "id" in settings or run.exists():  # of a run, which may come from another machine
        with naming_file(path):
            check_trust(path.parent, settings, read_json(run).get("code") if run.exists() else None)
    layer = flatten({key: value for key, value in settings.items() if key not in DESCRIPTION})
    recorded = layer.pop("task")
    task = task or recorded
    if find_task(task)[0] is not find_task(recorded)[0]:
        layer = {k: v for k, v in layer.items() if k.split(".")[0] in {*PLAIN, *CHOICES, "ranks"}}
    return task, {k: v for k, v in layer.items() if k not in find_task(task)[1]}


# ---- which flags there are ------------------------------------------------------------------------------------


def _choice_settings(resolved: Resolved | None) -> list[Setting]:
    """Return the flags that are read first: the preset, the algorithm, and one choice per axis."""
    docs = field_docs(Config) | field_docs(Algorithm)
    presets = " | ".join(resolved.task.presets) if resolved else ""  # type: ignore[attr-defined]
    rows = f"A named algorithm, which sets every axis: {' | '.join(ALGORITHMS)}."
    settings = [
        Setting("preset", str, "default", f"Settings of a whole run: {presets}.", "NAME"),
        Setting("algorithm", str, None, rows, "NAME"),
    ]
    for axis, menu in CHOICES.items():
        text = f"{docs.get(axis, '').rstrip('.')}: {' | '.join(name_of(cls) for cls in menu)}."
        settings.append(Setting(axis, str, name_of(resolved.chosen[axis]) if resolved else None, text, "NAME"))
    return settings


def _run_settings(resolved: Resolved) -> dict[str, Setting]:
    """Return every setting of a run once, under its shortest flag, with the present value as its default."""
    short_names = {name: short for short, name in SHORT.items()}
    settings = [*settings_of(TrainOptions).values(), *_choice_settings(resolved)]
    settings += [replace(s, default=resolved.plain.get(name, s.default)) for name, s in PLAIN.items()]
    settings += [replace(s, default=resolved.own.get(n, s.default)) for n, s in settings_of(resolved.task).items()]
    for axis, choice in resolved.chosen.items():
        for name, setting in settings_of(type(choice), axis).items():
            short = short_names.get(setting.name, setting.name)
            settings.append(replace(setting, name=short, default=getattr(choice, name)))
    return {setting.name: setting for setting in settings}


def _accepted_settings(resolved: Resolved) -> list[Setting]:
    """Return the settings of a run under their short and long flags."""
    settings = _run_settings(resolved)
    long = [replace(setting, name=SHORT[name]) for name, setting in settings.items() if name in SHORT]
    short = [replace(setting, kind=setting.kind | None) for name, setting in settings.items() if name in SHORT]
    learning_rate = Setting("lr", float | None, None, "")  # an update without a learning rate refuses it by name
    return [learning_rate, *settings.values(), *long, *short]


# ---- help -----------------------------------------------------------------------------------------------------

USUAL = {
    "task": ("reward", "max_tokens", "tools"),
    "model": ("model", "policy", "policy.lora", "init", "engine"),
    "algorithm": ("preset", "algorithm"),
    "amount": ("steps", "prompts", "samples", "temperature", "seed"),
    "learning rate": ("lr", "update.schedule", "update.warmup"),
    "output": ("out", "config", "eval_every", "track", "dry_run"),
}
"""What --help shows, in the order in which a user decides it."""
SUBJECTS = {
    "task": (),
    "rewards": ("reward", "lenient"),
    "prompts and responses": (
        *("system", "instruction", "max_prompt", "max_tokens", "min_tokens", "stop", "max_context"),
        *("temperature", "top_", "min_p"),
    ),
    "tools, environments, agents": ("tools", "environment", "agent", "max_turns", "turn"),
    "model": ("model", "policy", "init"),
    "algorithm: a named one, or one choice per axis": ("preset", "algorithm", *CHOICES),
    "amount: how much is sampled, and how often it is used": (
        *("steps", "data_epochs", "prompts", "samples", "ahead", "epochs", "minibatches", "micro_batch", "seed"),
        "threads",
    ),
    "optimizer": ("lr", "update."),
    "output": ("out", "config", "eval_", "checkpoint_", "keep", "record_", "track", "dry_run"),
    "checks": ("preflight", "max_reward_errors", "max_mismatch", "old_logp"),
    "processes of torchrun": ("ranks.",),
    "inference engine": ("engine",),
    "sandbox for untrusted code": ("sandbox",),
}
"""The headings of --help-all, and how the names of their settings begin; the longest match decides."""


def _group_by_subject(settings: Mapping[str, Setting], own: Sequence[str]) -> dict[str, list[Setting]]:
    """Sort all settings under the headings of --help-all. `own`: the settings that only this task has."""
    starts = [(start, subject) for subject, starts in SUBJECTS.items() for start in starts]
    placed: list[tuple[str, int, Setting]] = []
    for name, setting in settings.items():
        matches = [(len(start), -i) for i, (start, _) in enumerate(starts) if name.startswith(start)]
        place = -max(matches)[1] if matches and name not in own else -1
        placed.append(("task" if place < 0 else starts[place][1], place, setting))
    placed.sort(key=lambda item: item[1])
    return {subject: [setting for s, _, setting in placed if s == subject] for subject in SUBJECTS}


def _print_run_help(resolved: Resolved, prog: str, task: str | None, show_all: bool) -> None:
    settings, task_settings = _run_settings(resolved), settings_of(resolved.task)
    name = task or "sort"
    own = [name for name in task_settings if name not in settings_of(TextTask)]
    notes: list[str] = []
    if show_all:
        grouped = _group_by_subject(settings, own)
    else:
        grouped = {
            subject: [settings[n] for n in ([*own, *names] if subject == "task" else names) if n in settings]
            for subject, names in USUAL.items()
        }
        grouped["model"] = [s for s in grouped["model"] if s.name != "policy" or "model" not in settings]
        grouped["algorithm"] = grouped["algorithm"][len(resolved.task.presets) == 1 :]  # type: ignore[attr-defined]
        count = len(settings) - sum(map(len, grouped.values()))
        notes = [f"`{prog} {name} --help-all` shows {count} more, among them one flag per axis of the algorithm."]
    grouped = {f"task {name}: {first_line(resolved.task)}" if s == "task" else s: g for s, g in grouped.items()}
    groups: list[Group] = list(grouped.items())
    about = (
        f"The flags of {name}. `ascent list` shows the other tasks and all choices; `ascent explain NAME` explains one."
    )
    print_help(f"{prog} {task or 'TASK'} [OPTIONS]", about, groups, notes)

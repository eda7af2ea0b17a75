"""Flags into settings. Choices are read first; tyro then parses the fields of the chosen dataclasses.

tyro alone would make subcommands of a choice between dataclasses. Here a choice is a flag,
`--advantage leave-one-out`, and its hyperparameters are flags beside it, `--loss.high 0.28`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from ascent.algorithms import ALGORITHMS, Algorithm
from ascent.config import CHOICES, PLAIN, Config, Resolved, configure, flatten, resolve
from ascent.menu import field_docs, hyperparameters, name_of
from ascent.records.run import read_settings
from ascent.tasks import TASKS
from ascent.types import Refused


@dataclass
class Options:
    """What is about this call and not about the run's numbers."""

    out: Path | None = None
    dry_run: bool = False


def parse_train(args: list[str], prog: str) -> tuple[Config, Options]:
    """TASK and flags into a config. TASK may be left out where --config brings one."""
    task, args = _task(args)
    file = _value(args, "config")
    layers: list[dict[str, Any]] = []
    if file is not None:
        given = flatten(read_settings(Path(file)))
        kept = given.pop("task")
        task = task or kept
        if task != kept:
            given = {k: v for k, v in given.items() if k.split(".")[0] in {*PLAIN, *CHOICES}}
        layers.append(given)
    if task is None:
        task = "sort"
        if not {"-h", "--help"} & set(args):
            raise Refused(f"which TASK? There are {', '.join(name_of(t) for t in TASKS)}: {prog} lecture")
    named = {axis: _value(args, axis) for axis in ("preset", "algorithm", *CHOICES)}
    layers.append({axis: name for axis, name in named.items() if name is not None})
    parsed: Any = tyro.cli(_parser(resolve(task, *layers)), prog=f"{prog} {task}", args=args, description=_about(task))
    return configure(task, *layers, _settings(parsed)), Options(parsed.out, parsed.dry_run)


def _task(args: list[str]) -> tuple[str | None, list[str]]:
    if args and not args[0].startswith("-"):
        return args[0], args[1:]
    return None, args


def _value(args: list[str], flag: str) -> str | None:
    """The last value of --flag, before anything else is parsed."""
    found = None
    for i, arg in enumerate(args):
        if arg == f"--{flag}":
            if i + 1 == len(args) or args[i + 1].startswith("--"):
                raise Refused(f"--{flag} needs a name after it")
            found = args[i + 1]
        elif arg.startswith(f"--{flag}="):
            found = arg.partition("=")[2]
    return found


def _about(task: str) -> str:
    others = ", ".join(name_of(t) for t in TASKS)
    return f"Train on {task} (tasks: {others}). `ascent explain NAME` says what a row or a choice computes."


def _parser(found: Resolved) -> type:
    """A dataclass for tyro with the fields of the chosen choices, their present values as defaults."""
    docs, kinds, axes = field_docs(Config), get_type_hints(Config), field_docs(Algorithm)
    rows: list[tuple[str, Any, Any]] = []

    def add(name: str, kind: Any, default: Any, help: str, flag: str | None = None, metavar: str | None = None) -> None:
        note = tyro.conf.arg(help=help, name=flag, metavar=metavar)
        rows.append((name, Annotated[kind, note], dataclasses.field(default=default)))

    add("out", Path | None, None, "The run's folder. Default: runs/<date>-<task>-<algorithm>-s<seed>.")
    add("dry_run", bool, False, "Print what would run, and do nothing.")
    add("config", Path | None, None, "A run's config.json to start from.")
    add("preset", str, "default", f"Settings of a whole run: {' | '.join(found.task.presets)}.")  # type: ignore[attr-defined]
    add("algorithm", str | None, None, f"A named row of the menu: {' | '.join(ALGORITHMS)}.", metavar="ROW")
    for name in PLAIN:
        add(name, kinds[name], found.plain.get(name, PLAIN[name].default), docs[name])
    add("lr", float | None, None, "Learning rate: short for --update.lr.")
    for axis, menu in CHOICES.items():
        names = " | ".join(name_of(cls) for cls in menu)
        text = axes.get(axis, docs.get(axis, "")).rstrip(".")
        add(f"{axis}_name", str, name_of(found.chosen[axis]), f"{text}: {names}.", flag=axis, metavar="NAME")
    for axis in CHOICES:
        now = found.chosen[axis]
        if hyperparameters(type(now)):
            rows.append((axis, type(now), dataclasses.field(default=now)))
    task = _TaskFields.of(found)
    rows.append(("task", Annotated[task, tyro.conf.arg(name="")], dataclasses.field(default_factory=task)))
    return dataclasses.make_dataclass("Settings", rows)


class _TaskFields:
    """A task's fields as a dataclass of their own, checked only once everything is known."""

    @staticmethod
    def of(found: Resolved) -> type:
        kinds, docs = get_type_hints(found.task), field_docs(found.task)
        rows = []
        for name, field in hyperparameters(found.task).items():
            kind = Annotated[kinds[name], tyro.conf.arg(help=docs.get(name, ""))]
            rows.append((name, kind, dataclasses.field(default=found.own.get(name, field.default))))
        return dataclasses.make_dataclass(found.task.__name__, rows)


def _settings(parsed: Any) -> dict[str, Any]:
    """Everything that tyro parsed, as settings."""
    settings = {name: getattr(parsed, name) for name in PLAIN}
    for axis in CHOICES:
        for name in hyperparameters(type(getattr(parsed, axis, None))):
            settings[f"{axis}.{name}"] = getattr(getattr(parsed, axis), name)
    if parsed.lr is not None:
        settings["lr"] = parsed.lr
    return settings | vars(parsed.task)


@dataclass
class ResumeOptions:
    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    from_step: Annotated[int | None, tyro.conf.arg(name="from")] = None
    """Go back to the checkpoint of this step. Default: the newest."""


@dataclass
class ShowOptions:
    run: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    step: int | None = None
    """Print the responses of this step: prompts, responses, log-probs, rewards and δ."""
    json: bool = False
    """One JSON object, for scripts."""


def parse_resume(args: list[str]) -> ResumeOptions:
    return tyro.cli(
        ResumeOptions, prog="ascent resume", args=args, description="Go on with a run, to the same numbers."
    )


def parse_show(args: list[str]) -> ShowOptions:
    return tyro.cli(ShowOptions, prog="ascent show", args=args, description="What a run did.")


__all__ = ["Options", "parse_resume", "parse_show", "parse_train"]

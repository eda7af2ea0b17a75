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
from ascent.config import Config
from ascent.menu import hyperparameters, name_of
from ascent.records.run import read_settings
from ascent.settings import (
    CHOICES,
    PLAIN,
    SHORT,
    Resolved,
    configure,
    field_docs,
    find_task,
    flatten,
    refuse_samples,
    resolve,
)
from ascent.tasks import TASKS
from ascent.types import Refused

COMPARE = "ascent compare"
"""Whose flags stand for several rows at once."""


@dataclass
class Options:
    """What is about this call and not about the run's numbers."""

    out: Path | None = None
    dry_run: bool = False
    preflight: bool = True


def parse_train(args: list[str], prog: str) -> tuple[Config, Options]:
    """TASK and flags into a config. TASK may be left out where --config brings one."""
    task, args = _task(args)
    file = _value(args, "config")
    layers: list[dict[str, Any]] = []
    if file is not None:
        given = flatten(read_settings(Path(file)))
        kept = given.pop("task")
        task = task or kept
        if find_task(task)[0] is not find_task(kept)[0]:
            given = {k: v for k, v in given.items() if k.split(".")[0] in {*PLAIN, *CHOICES}}
        given = {k: v for k, v in given.items() if k not in find_task(task)[1]}
        layers.append(given)
    if task is None:
        task = "sort"
        if not {"-h", "--help"} & set(args):
            raise Refused(f"which TASK? There are {', '.join(map(spelled, TASKS))}: {prog} lecture")
    named = {axis: _value(args, axis) for axis in ("preset", "algorithm", *CHOICES)}
    layers.append({axis: name for axis, name in named.items() if name is not None})
    parsed: Any = tyro.cli(_parser(resolve(task, *layers)), prog=f"{prog} {task}", args=args, description=_about(task))
    config = configure(task, *layers, _settings(parsed))
    if prog != COMPARE:  # there one number may stand for all rows
        refuse_samples(parsed.run.samples if _value(args, "samples") is not None else None, config)
    verify = getattr(config.task, "verify", None)
    if verify is not None:
        verify()
    return config, Options(parsed.out, parsed.dry_run, parsed.preflight)


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
    return f"Train on {task}; `ascent list` has the other tasks.\n`ascent explain NAME` says what a choice computes."


def spelled(task: type) -> str:
    """jsonl:SOURCE, as the command line takes it."""
    return name_of(task) + (":SOURCE" if "source" in hyperparameters(task) else "")


RECORDS = (
    "eval_every",
    "eval_prompts",
    "checkpoint_every",
    "keep",
    "keep_best",
    "record_every",
    "record_rollouts",
    "track",
)
"""The plain settings that decide what is written down and not what is computed."""


def _parser(found: Resolved) -> type:
    """A dataclass for tyro: groups of flags, and the fields of the chosen choices, present values as defaults."""
    docs, kinds, axes = field_docs(Config), get_type_hints(Config), field_docs(Algorithm)
    presets, rows_of_menu = " | ".join(found.task.presets), " | ".join(ALGORITHMS)  # type: ignore[attr-defined]
    call = [
        _row("out", Path | None, None, "The run's folder. Default: runs/<date>-<task>-<algorithm>-s<seed>."),
        _row("dry_run", Annotated[bool, tyro.conf.FlagCreatePairsOff], False, "Print what would run, and do nothing."),
        _row("preflight", bool, True, "Look a language model over before it is trained, and refuse what cannot work."),
        _row("config", Path | None, None, "A run's config.json to start from.", metavar="FILE"),
        _row("preset", str, "default", f"Settings of a whole run: {presets}.", metavar="NAME"),
    ]
    plain = {n: _row(n, kinds[n], found.plain.get(n, PLAIN[n].default), docs[n]) for n in PLAIN}
    run = [row for name, row in plain.items() if name not in RECORDS]
    run.append(_row("lr", float | None, None, "Learning rate: short for --update.lr."))
    if "model" in hyperparameters(type(found.chosen["policy"])):
        run.append(_row("model", str | None, None, "Folder or hub name of the model: short for --policy.model."))
    menu = [
        _row(
            "algorithm",
            str | None,
            None,
            f"A named row, which sets the axes of the algorithm: {rows_of_menu}.",
            metavar="ROW",
        )
    ]
    for axis, choices in CHOICES.items():
        names = " | ".join(name_of(cls) for cls in choices)
        text = axes.get(axis, docs.get(axis, "")).rstrip(".")
        chosen = name_of(found.chosen[axis])
        menu.append(_row(f"{axis}_name", str, chosen, f"{text}: {names}.", flag=axis, metavar="NAME"))
    kinds_of_task, docs_of_task = get_type_hints(found.task), field_docs(found.task)
    task = [
        _row(name, kinds_of_task[name], found.own.get(name, field.default), docs_of_task.get(name, ""))
        for name, field in hyperparameters(found.task).items()
    ]
    groups = [
        *call,
        _group("task", task, str(found.task.__doc__).split("\n")[0]),
        _group("run", run, "How much is sampled, and how often it is used."),
        _group("menu", menu, "The algorithm: a row, or one choice per axis."),
        _group("records", [plain[name] for name in RECORDS], "What is written down, and how often."),
    ]
    for axis in CHOICES:
        now = found.chosen[axis]
        if hyperparameters(type(now)):
            groups.append((axis, type(now), dataclasses.field(default=now)))
    return dataclasses.make_dataclass("Settings", groups)


Row = tuple[str, Any, Any]


def _row(name: str, kind: Any, default: Any, help: str, flag: str | None = None, metavar: str | None = None) -> Row:
    """One flag, without the name of its group before it."""
    hint = None if default is not None else ""
    metavar = metavar or {Path | None: "PATH", float | None: "FLOAT", str | None: "STR"}.get(kind)
    note = tyro.conf.arg(help=help, name=flag, metavar=metavar, help_behavior_hint=hint, prefix_name=False)
    return name, Annotated[kind, note], dataclasses.field(default=default)


def _group(name: str, rows: list[Row], doc: str) -> Row:
    made = dataclasses.make_dataclass(name, rows, namespace={"__doc__": doc})
    return name, made, dataclasses.field(default_factory=made)


def _settings(parsed: Any) -> dict[str, Any]:
    """Everything that tyro parsed, as settings."""
    settings = {n: getattr(parsed.records if n in RECORDS else parsed.run, n) for n in PLAIN}
    for axis in CHOICES:
        for name in hyperparameters(type(getattr(parsed, axis, None))):
            settings[f"{axis}.{name}"] = getattr(getattr(parsed, axis), name)
    short = {name: getattr(parsed.run, name, None) for name in SHORT}
    return settings | {name: value for name, value in short.items() if value is not None} | vars(parsed.task)


@dataclass
class ResumeOptions:
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's folder."""
    from_step: Annotated[int | None, tyro.conf.arg(name="from", metavar="STEP", help_behavior_hint="")] = None
    """Go back to the checkpoint of this step. Default: the newest."""


@dataclass
class ShowOptions:
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's folder."""
    step: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Print the responses of this step: prompts, responses, log-probs, rewards and δ."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """One JSON object, for scripts."""


def parse_resume(args: list[str]) -> ResumeOptions:
    return tyro.cli(
        ResumeOptions, prog="ascent resume", args=args, description="Go on with a run, to the same numbers."
    )


def parse_show(args: list[str]) -> ShowOptions:
    return tyro.cli(ShowOptions, prog="ascent show", args=args, description="What a run did.")


__all__ = ["Options", "parse_resume", "parse_show", "parse_train"]

"""Commands of `ascent`: their words become values, and their fields become help.

A flag is `--name value` or `--name=value`; dashes and underscores are the same. A switch is `--name` or
`--no-name`. A list takes all words up to the next flag. None is a value where a field may be None. The fields of a
dataclass give the flags with their types, defaults and help (`settings.settings_of`).
"""

import inspect
import re
import shutil
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, get_args, get_origin

from ascent.build.backends import backend_of
from ascent.build.reward_loading import check_rewards
from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.menu import hyperparameters, name_of, nearest
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
    canonical,
    check_length,
    configure,
    field_docs,
    find_task,
    flatten,
    refuse_unknown_fields,
    resolve,
    settings_of,
)
from ascent.tasks import TASKS

Group = tuple[str, Iterable[Setting]]
"""A heading in help, and the settings below it."""


@dataclass
class Command:
    """A command: the class LabelStepsCommand is `ascent label-steps`.

    Its docstring is its help, and the first paragraph its line in `ascent --help`. A field without a default is a
    word that stands without a flag; the others are flags. A module in this folder lists its commands in COMMANDS,
    by sections of `ascent --help`.
    """

    words: ClassVar[str] = ""
    """What follows its name in usage, where its fields do not say it."""
    takes_more: ClassVar[bool] = False
    """Other words (flags of `ascent train` or of a task) are kept in `rest` instead of refused."""
    part: ClassVar[type | None] = None
    """Another dataclass whose fields are flags too."""
    axis: ClassVar[str] = ""
    """What stands before those flags: --AXIS.FIELD."""
    ranks: ClassVar[bool] = False
    """May torchrun start it as several processes?"""
    rest: list[str] = field(default_factory=list, init=False)
    of_part: dict[str, Any] = field(default_factory=dict, init=False)
    """The values of the flags of `part`."""

    @classmethod
    def prog(cls) -> str:
        return f"ascent {name_of(cls).removesuffix('-command')}"

    @classmethod
    def usage(cls) -> str:
        words = cls.words or " ".join(_metavar(s) for s in settings_of(cls).values() if s.default is MISSING)
        return f"{cls.prog()} {words}".strip()

    @classmethod
    def read(cls, args: list[str]) -> Self:
        """The command with these words. If they ask for help, it is printed and the program ends."""
        own, part = settings_of(cls), cls.part
        others = {setting.name: setting for setting in settings_of(part, cls.axis).values()} if part else {}
        words = [setting for setting in own.values() if setting.default is MISSING]
        flags = [setting for setting in own.values() if setting.default is not MISSING]
        if asks_for_help(args):
            groups: list[Group] = [("", words), ("options", flags)]
            if part:
                groups.append((f"{part.__name__.lower()} options: {first_line(part)}", others.values()))
            more = " [OPTIONS]" if flags or cls.takes_more else ""
            print_help(cls.usage() + more, inspect.getdoc(cls) or "", groups)
        values, rest = take(args, [*flags, *others.values()])
        if not cls.takes_more:
            rest = plain_words(cls.prog(), rest, [*flags, *others.values()], most=len(words))
        for setting in words:
            if not rest or (cls.takes_more and is_flag(rest[0])):
                raise ConfigError(f"{_metavar(setting)} is missing: {setting.help.rstrip('.')}. Usage: {cls.usage()}")
            values[setting.name] = setting.check(rest.pop(0), _metavar(setting), typed=True)
        command = cls(**{name: value for name, value in values.items() if name in own})
        command.rest = rest
        command.of_part = {name: value for name, value in values.items() if name in others}
        return command

    def execute(self) -> int | None:
        """Do it. The exit status is returned where it is not 0."""
        raise NotImplementedError


# ---- words into values ----------------------------------------------------------------------------------------


def is_flag(word: str) -> bool:
    """--steps and -h, but not a negative number or a lone dash."""
    return re.match(r"--?[A-Za-z]", word) is not None


def asks_for_help(args: list[str]) -> bool:
    return "-h" in args or "--help" in args


def leading(args: list[str]) -> tuple[str | None, list[str]]:
    """What stands before the first flag (a task, a run), if anything does; and the other words."""
    return (args[0], args[1:]) if args and not args[0].startswith("-") else (None, args)


def take(args: list[str], settings: Iterable[Setting]) -> tuple[dict[str, Any], list[str]]:
    """The values of these settings, by name, and all words that are not theirs. The last of two values counts."""
    flags: dict[str, tuple[Setting, bool]] = {}
    for setting in settings:
        flags[setting.flag] = (setting, True)
        if setting.kind is bool:
            flags[setting.negative] = (setting, False)
    values: dict[str, Any] = {}
    rest: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if word == "--":  # what follows are words, whatever they look like
            return values, [*rest, word, *words]
        if flag not in flags:
            rest.append(word)
            continue
        setting, positive = flags[flag]
        taken = [value] if equals else []
        if setting.kind is bool:
            taken += [words.pop(0)] if not equals and words[:1] in (["True"], ["False"]) else []
            values[setting.name] = setting.check(taken[0] if taken else "True", flag, typed=True) is positive
        elif setting.kind == list[str]:  # may be given again; its value is one word that may begin with dashes
            taken += [words.pop(0)] if words and not taken else []
            values[setting.name] = [*values.get(setting.name, []), *_needed(taken, setting)]
        else:
            several = any(get_origin(kind) is tuple for kind in setting.kinds)
            while words and not is_flag(words[0]) and (several or not taken):
                taken.append(words.pop(0))
            word_or_words = taken if several else _needed(taken, setting)[0]
            values[setting.name] = setting.check(word_or_words, flag, typed=True)
    return values, rest


def _needed(words: list[str], setting: Setting) -> list[str]:
    if not words:
        raise ConfigError(f"{setting.flag} needs a value after it: {setting.flag} {_metavar(setting)}")
    return words


def plain_words(prog: str, rest: list[str], settings: Iterable[Setting], most: int | None = None) -> list[str]:
    """The words that stand without a flag, this many at most. Flags are refused; after `--` every word is plain."""
    end = rest.index("--") if "--" in rest else len(rest)
    for flag in (word.partition("=")[0] for word in rest[:end] if is_flag(word)):
        hint = nearest(flag.replace("_", "-"), [setting.flag for setting in settings])
        raise ConfigError(f"{flag}: {prog} has no such flag.{hint} `{prog} --help` says more")
    words = rest[:end] + rest[end + 1 :]
    if most is not None and len(words) > most:
        raise ConfigError(f"{words[most]}: {prog} has no place for this word. `{prog} --help` says more")
    return words


# ---- help -----------------------------------------------------------------------------------------------------


def print_help(usage: str, about: str, groups: Sequence[Group]) -> NoReturn:
    width = min(shutil.get_terminal_size().columns, 100)
    summary, *more = about.split("\n\n", 1)
    lines = [f"usage: {usage}", "", textwrap.fill(summary, width), *(f"\n{text}" for text in more)]
    for title, settings in groups:
        lines += ["", *textwrap.wrap(title, width, subsequent_indent="  ")] if settings else []
        column = min(22, max((len(_spelling(setting)) for setting in settings), default=0) + 4)
        for setting in settings:
            head = f"  {_spelling(setting)}  "
            indent = "" if len(head) <= column else f"{head.rstrip()}\n"
            text = textwrap.wrap(_in_help(setting), width - column, break_long_words=False, break_on_hyphens=False)
            first = indent + (" " * column if indent else head.ljust(column))
            lines.append(first + f"\n{' ' * column}".join(text).replace("\N{NO-BREAK SPACE}", " "))
    print("\n".join(lines))
    raise SystemExit(0)


def _spelling(setting: Setting) -> str:
    """--steps INT; --keep-best; what help shows on the left."""
    if setting.default is MISSING:
        return _metavar(setting)
    if setting.kind is bool:
        return setting.flag if not setting.default else f"{setting.flag}, {setting.negative}"
    return f"{setting.flag} {_metavar(setting)}"


def _metavar(setting: Setting) -> str:
    if setting.metavar or setting.default is MISSING:
        return setting.metavar or setting.name.upper()
    kind = setting.kinds[-1]
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    if get_origin(kind) is tuple:
        return "[TEXT …]"
    optional = setting.kinds[0] is type(None) and ("." in setting.name or setting.default is not None)
    return {str: "TEXT", Any: "TEXT"}.get(kind, kind.__name__.upper()) + ("|None" if optional else "")


def _in_help(setting: Setting) -> str:
    default = setting.default
    silent = default is MISSING or default is False or (default is None and "." not in setting.name)
    if silent or default in ("", (), []) or len(str(default)) > 40 or "Default:" in setting.help:
        return setting.help
    text = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f"{setting.help} (default:\N{NO-BREAK SPACE}{text})".strip()


# ---- the settings of a run ------------------------------------------------------------------------------------

RECORDS = ("eval_", "checkpoint_", "keep", "record_", "track")
"""Plain settings whose names begin like this decide what is recorded, and not what is computed."""


@dataclass
class TrainOptions:
    """Settings of the call, which change none of the run's numbers."""

    out: Path | None = None
    """The run's folder. Default: runs/<date>-<task>-<algorithm>-s<seed>."""
    dry_run: bool = False
    """Print what would run, and do nothing."""
    preflight: bool = True
    """Check a language model before training, and refuse settings that cannot work."""
    config: Annotated[Path | None, "FILE"] = None
    """A run's config.json to start from, or a TOML file of your own: task = "sort", steps = 100, [loss] high = 0.28."""


def parse_train(
    args: list[str], prog: str, shared: Settings | None = None, verify: bool = True
) -> tuple[Config, TrainOptions]:
    """TASK and flags into a config. TASK may be left out where --config brings one.

    There are two passes: first the choices are read, then the fields that the chosen dataclasses have.
    `shared`: settings of all rows of a comparison, except of those that need another value. Without `verify` nothing
    that the task or its rewards name is read.
    """
    CODE.clear()
    task, args = leading(args)
    call, args = take(args, settings_of(TrainOptions).values())
    options = TrainOptions(**call)
    layers: list[dict[str, Any]] = []
    if options.config is not None:
        task, layer = _read_config(options.config, task)
        layers.append(layer)
    if task is None and not asks_for_help(args):
        spelled = [name_of(cls) + (":SOURCE" if "source" in hyperparameters(cls) else "") for cls in TASKS]
        raise ConfigError(f"TASK is missing: it comes first, as in {prog} lecture. There are {', '.join(spelled)}")
    names, args = take(args, _choices(None))
    resolved = resolve(task or "sort", *layers, names)
    groups = _groups(resolved)
    if asks_for_help(args):
        about = f"The flags for {task or 'sort'}. `ascent list` has the other tasks and all choices.\n"
        print_help(f"{prog} {task or 'TASK'} [OPTIONS]", f"{about}`ascent explain NAME` explains a choice.", groups)
    settings = [setting for _, group in groups for setting in group]
    values, rest = take(args, settings)
    if rest and is_flag(rest[0]):
        axis, _, name = canonical(rest[0].partition("=")[0].lstrip("-")).partition(".")
        if axis in CHOICES:
            refuse_unknown_fields(axis, type(resolved.chosen[axis]), [name])
    plain_words(f"{prog} {task}", rest, settings, most=0)
    values = {name: value for name, value in values.items() if not (name in SHORT and value is None)}
    check_length(values)
    common = {name: value for name, value in (shared or {}).items() if name not in resolved.needs}
    config = configure(task, *layers, common, names, values)
    backend = backend_of(config)
    if verify:
        check_rewards(backend, config.task)
    backend.check(config)
    return config, options


def is_task(name: str) -> bool:
    """Does this name a task rather than a file?"""
    if Path(name).exists() or name.endswith((".jsonl", ".json")):
        return False
    try:
        find_task(name)
    except ConfigError:
        return False
    return True


def read_toml(path: Path) -> dict[str, Any]:
    """Settings that a person wrote: names as on the command line; a table has the fields of its axis or of the task."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from None
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        named = value if isinstance(value, dict) else {"name": value}
        flat |= {key: named["name"]} if "name" in named else {}
        flat |= {k if key == "task" else f"{key}.{k}": v for k, v in named.items() if k != "name"}
    return flat


def _read_config(path: Path, task: str | None) -> tuple[str | None, dict[str, Any]]:
    """The task, and the settings of a config.json; of another task's config, those that are not its own."""
    if path.suffix == ".toml":
        layer = read_toml(path)
        named = layer.pop("task", None)
        check_length(layer)
        return task or named, layer
    settings, run = read_settings(path, with_description=True), path.parent / "run.json"
    if "id" in settings or run.exists():  # of a run, which may have come from elsewhere
        with naming_file(path):
            check_trust(path.parent, settings, read_json(run).get("code") if run.exists() else None)
    layer = flatten({key: value for key, value in settings.items() if key not in DESCRIPTION})
    recorded = layer.pop("task")
    task = task or recorded
    if find_task(task)[0] is not find_task(recorded)[0]:
        layer = {k: v for k, v in layer.items() if k.split(".")[0] in {*PLAIN, *CHOICES}}
    return task, {k: v for k, v in layer.items() if k not in find_task(task)[1]}


def _choices(resolved: Resolved | None) -> list[Setting]:
    """The flags of the first pass: a preset, an algorithm, and one choice per axis."""
    docs = field_docs(Config) | field_docs(Algorithm)
    presets = " | ".join(resolved.task.presets) if resolved else ""  # type: ignore[attr-defined]
    rows = f"A named algorithm; it sets every axis below: {' | '.join(ALGORITHMS)}."
    settings = [
        Setting("preset", str, "default", f"Settings of a whole run: {presets}.", "NAME"),
        Setting("algorithm", str, None, rows, "NAME"),
    ]
    for axis, menu in CHOICES.items():
        text = f"{docs.get(axis, '').rstrip('.')}: {' | '.join(name_of(cls) for cls in menu)}."
        settings.append(Setting(axis, str, name_of(resolved.chosen[axis]) if resolved else None, text, "NAME"))
    return settings


def _groups(resolved: Resolved) -> list[Group]:
    """Every flag of a run under its heading, with the present values as defaults."""
    plain = {name: replace(s, default=resolved.plain.get(name, s.default)) for name, s in PLAIN.items()}
    task = [replace(s, default=resolved.own.get(n, s.default)) for n, s in settings_of(resolved.task).items()]
    records = [setting for name, setting in plain.items() if name.startswith(RECORDS)]
    run = [setting for setting in plain.values() if setting not in records]
    policy = settings_of(type(resolved.chosen["policy"]), "policy")
    run.append(Setting("lr", float | None, None, "Learning rate: short for --update.lr."))
    if "model" in policy:
        run.append(Setting("model", str | None, None, "Folder or hub name of the model: short for --policy.model."))
    for short, name in SHORT.items():
        setting = policy.get(name.removeprefix("policy.")) if short.startswith("engine") else None
        if setting is not None:
            first = setting.help.split(". ")[0].rstrip(".")
            run.append(Setting(short, setting.kind | None, None, f"{first}. Short for {setting.flag}."))
    groups: list[Group] = [
        ("options", list(settings_of(TrainOptions).values())),
        (f"task: {first_line(resolved.task)}", task),
        ("run: How much is sampled, and how often it is used.", run),
        ("menu: The algorithm: a named one, or one choice per axis.", _choices(resolved)),
        ("records: What is recorded, and how often.", records),
    ]
    for axis, choice in resolved.chosen.items():
        described = settings_of(type(choice), axis)
        settings = [replace(s, default=getattr(choice, name)) for name, s in described.items()]
        groups.append((f"{axis} {name_of(choice)}: {first_line(type(choice))}", settings))
    return groups

"""The base class of commands, and the parser of their flags.

A flag is `--name value` or `--name=value`; dashes and underscores are the same. A switch is `--name` or
`--no-name`. A list takes all words up to the next flag. None is a value where a field may be None. The fields of a
dataclass define the flags with their types, defaults and help (`settings.settings_of`).
"""

import inspect
import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field
from typing import Any, ClassVar, Self, get_origin

from ascent.cli.help_text import Group, print_help, value_name
from ascent.core.errors import ConfigError
from ascent.core.menu import name_of, nearest
from ascent.explain.about import first_line
from ascent.settings import Setting, settings_of


@dataclass
class Command:
    """A command: the class LabelStepsCommand is `ascent label-steps`.

    Its docstring is its help, and the first paragraph its line in `ascent --help`. A field without a default is a
    positional argument; the others are flags. A module in this folder lists its commands in COMMANDS, by sections of
    `ascent --help`.
    """

    positionals: ClassVar[str] = ""
    """The positional arguments in the usage line, if they are not the fields without a default."""
    accepts_other_flags: ClassVar[bool] = False
    """Whether unknown arguments (flags of `ascent train` or of a task) are kept in `other_args` instead of refused."""
    extra_settings: ClassVar[type | None] = None
    """Another dataclass whose fields are flags too."""
    extra_prefix: ClassVar[str] = ""
    """The prefix of those flags: --PREFIX.FIELD."""
    only_in_help_all: ClassVar[frozenset[str]] = frozenset()
    """Fields that only --help-all shows."""
    under_torchrun: ClassVar[bool] = False
    """Whether torchrun may start the command as several processes."""
    other_args: list[str] = field(default_factory=list, init=False)
    extra_values: dict[str, Any] = field(default_factory=dict, init=False)
    """The values of the flags of `extra_settings`."""

    @classmethod
    def prog(cls) -> str:
        return f"ascent {name_of(cls).removesuffix('-command')}"

    @classmethod
    def usage(cls) -> str:
        names = [value_name(s) for s in settings_of(cls).values() if s.default is MISSING]
        return f"{cls.prog()} {cls.positionals or ' '.join(names)}".strip()

    @classmethod
    def read(cls, args: list[str]) -> Self:
        """Parse the arguments. If they ask for help, print it and exit."""
        fields = settings_of(cls)
        extra = settings_of(cls.extra_settings, cls.extra_prefix) if cls.extra_settings else {}
        extra = {setting.name: setting for setting in extra.values()}
        positionals = [setting for setting in fields.values() if setting.default is MISSING]
        flags = [*(setting for setting in fields.values() if setting.default is not MISSING), *extra.values()]
        if wants_help(args):
            cls._print_help(positionals, flags, show_all="--help-all" in args)
        values, rest = parse_flags(args, flags)
        if not cls.accepts_other_flags:
            rest = check_positionals(cls.prog(), rest, flags, max_words=len(positionals))
        for setting in positionals:
            if not rest or (cls.accepts_other_flags and is_flag(rest[0])):
                raise ConfigError(f"{value_name(setting)} is missing: {setting.help.rstrip('.')}. Usage: {cls.usage()}")
            values[setting.name] = setting.check(rest.pop(0), value_name(setting), typed=True)
        command = cls(**{name: value for name, value in values.items() if name in fields})
        command.other_args = rest
        command.extra_values = {name: value for name, value in values.items() if name in extra}
        return command

    @classmethod
    def _print_help(cls, positionals: list[Setting], flags: list[Setting], show_all: bool) -> None:
        hidden: frozenset[str] = frozenset() if show_all else cls.only_in_help_all
        flags = sorted(flags, key=lambda setting: setting.name not in inspect.get_annotations(cls))
        extra_names = settings_of(cls.extra_settings, cls.extra_prefix) if cls.extra_settings else {}
        extra = {setting.name for setting in extra_names.values()}
        groups: list[Group] = [
            ("", positionals),
            ("options", [setting for setting in flags if setting.name not in hidden | extra]),
            (
                f"{name_of(cls.extra_settings)} options: {first_line(cls.extra_settings)}" if extra else "",
                [setting for setting in flags if setting.name in extra - hidden],
            ),
        ]
        count = sum(setting.name in hidden for setting in flags)
        notes = [f"{count} more options: {cls.prog()} --help-all"] if count else []
        has_options = flags or cls.accepts_other_flags
        print_help(cls.usage() + " [OPTIONS]" * bool(has_options), inspect.getdoc(cls) or "", groups, notes)

    def execute(self) -> int | None:
        """Run the command; return an exit status other than 0 if there is one."""
        raise NotImplementedError


def is_flag(word: str) -> bool:
    """--steps and -h, but not a negative number or a lone dash."""
    return re.match(r"--?[A-Za-z]", word) is not None


def wants_help(args: list[str]) -> bool:
    return any(flag in args for flag in ("-h", "--help", "--help-all"))


def split_leading_word(args: list[str]) -> tuple[str | None, list[str]]:
    """Return the word before the first flag (a task or a run; None if there is none), and the other arguments."""
    return (args[0], args[1:]) if args and not args[0].startswith("-") else (None, args)


def parse_flags(args: list[str], settings: Iterable[Setting]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of these settings by name, and all other arguments. The last value of a flag counts."""
    flags: dict[str, tuple[Setting, bool]] = {}
    for setting in settings:
        flags[setting.flag] = (setting, True)
        if setting.kind is bool:
            flags[setting.negative] = (setting, False)
    values: dict[str, Any] = {}
    rest: list[str] = []
    remaining = list(args)
    while remaining:
        word = remaining.pop(0)
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if word == "--":  # everything that follows is positional
            return values, [*rest, word, *remaining]
        if flag not in flags:
            rest.append(word)
            continue
        setting, is_positive = flags[flag]
        words = [value] if equals else []
        if setting.kind is bool:
            words += [remaining.pop(0)] if not equals and remaining[:1] in (["True"], ["False"]) else []
            values[setting.name] = setting.check(words[0] if words else "True", flag, typed=True) is is_positive
        elif setting.kind == list[str]:  # may be repeated; each value is one word, which may begin with dashes
            words += [remaining.pop(0)] if remaining and not words else []
            values[setting.name] = [*values.get(setting.name, []), *_require_value(words, setting)]
        else:
            is_list = any(get_origin(kind) is tuple for kind in setting.kinds)
            while remaining and not is_flag(remaining[0]) and (is_list or not words):
                words.append(remaining.pop(0))
            value_or_values = words if is_list else _require_value(words, setting)[0]
            values[setting.name] = setting.check(value_or_values, flag, typed=True)
    return values, rest


def _require_value(words: list[str], setting: Setting) -> list[str]:
    if not words:
        raise ConfigError(f"{setting.flag} needs a value: {setting.flag} {value_name(setting)}")
    return words


def check_positionals(
    prog: str, args: list[str], settings: Iterable[Setting], max_words: int | None = None
) -> list[str]:
    """Return the positional arguments; refuse unknown flags, and more words than `max_words`.

    After `--` every argument is positional.
    """
    end = args.index("--") if "--" in args else len(args)
    for flag in (word.partition("=")[0] for word in args[:end] if is_flag(word)):
        hint = nearest(flag.replace("_", "-"), [setting.flag for setting in settings])
        raise ConfigError(f"{flag}: {prog} has no such flag.{hint} `{prog} --help-all` lists its flags")
    words = args[:end] + args[end + 1 :]
    if max_words is not None and len(words) > max_words:
        raise ConfigError(f"{words[max_words]}: unexpected argument of {prog}. See `{prog} --help`")
    return words

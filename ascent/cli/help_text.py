"""The text that --help and --help-all print."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import MISSING
from typing import Any, Literal, NoReturn, get_args, get_origin

from ascent.settings import Setting

Group = tuple[str, Iterable[Setting]]
"""A heading, and the settings below it."""
MAX_WIDTH = 100
MAX_FLAG_COLUMNS = 26
"""Columns for a flag and its value; a longer one has its own line."""


def help_width() -> int:
    return min(shutil.get_terminal_size().columns, MAX_WIDTH)


def print_help(usage: str, description: str, groups: Sequence[Group], notes: Sequence[str] = ()) -> NoReturn:
    """Print the help of a command and exit."""
    width = help_width()
    summary, *paragraphs = description.split("\n\n", 1)
    lines = textwrap.wrap(f"usage: {usage}", width, subsequent_indent=" " * 7)
    lines += ["", *textwrap.wrap(summary, width), *(f"\n{text}" for text in paragraphs)]
    listed = [(title, list(settings)) for title, settings in groups]
    flags = [_flag_and_value(setting) for _, settings in listed for setting in settings]
    column = min(MAX_FLAG_COLUMNS, max(map(len, flags), default=0) + 4)
    for title, settings in listed:
        lines += ["", *textwrap.wrap(title, width, subsequent_indent="  ")] if settings else []
        for setting in settings:
            lines += _setting_lines(setting, column, width)
    for note in notes:
        lines += ["", textwrap.fill(note, width)]
    print("\n".join(lines))
    raise SystemExit(0)


def _setting_lines(setting: Setting, column: int, width: int) -> list[str]:
    """Return the flag on the left, and its help from this column on."""
    head = f"  {_flag_and_value(setting)}  "
    text = textwrap.wrap(_help_and_default(setting), width - column, break_long_words=False, break_on_hyphens=False)
    text = [line.replace("\N{NO-BREAK SPACE}", " ") for line in text] or [""]
    if len(head) > column:
        return [head.rstrip(), *(" " * column + line for line in text)]
    return [head.ljust(column) + text[0], *(" " * column + line for line in text[1:])]


def _flag_and_value(setting: Setting) -> str:
    """--steps INT; --keep-best, --no-keep-best; RUN."""
    if setting.default is MISSING:
        return value_name(setting)
    if setting.kind is bool:
        return setting.flag if not setting.default else f"{setting.flag}, {setting.negative}"
    return f"{setting.flag} {value_name(setting)}"


def value_name(setting: Setting) -> str:
    """Return the placeholder of a setting's value, such as INT or {cpu,cuda}."""
    if setting.metavar or setting.default is MISSING:
        return setting.metavar or setting.name.upper()
    kind = setting.kinds[-1]
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    if get_origin(kind) is tuple:
        return "[TEXT …]"
    optional = setting.kinds[0] is type(None) and ("." in setting.name or setting.default is not None)
    return {str: "TEXT", Any: "TEXT"}.get(kind, kind.__name__.upper()) + ("|None" if optional else "")


def _help_and_default(setting: Setting) -> str:
    default = setting.default
    is_empty = default is MISSING or default is False or (default is None and "." not in setting.name)
    if is_empty or default in ("", (), []) or len(str(default)) > 40 or "Default:" in setting.help:
        return setting.help
    text = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f"{setting.help} (default:\N{NO-BREAK SPACE}{text})".strip()

"""Names of tools and environments in settings: `calculator`, `python`, python:FILE:NAME, or a Python object."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ascent.core.errors import ConfigError
from ascent.core.menu import nearest
from ascent.tasks.python_objects import OBJECT_PREFIX, register_object
from ascent.tasks.user_files import absolute_path

CALLABLE_SETTINGS = {
    "environment": "an environment must be a class, which is instantiated for each episode",
    "tools": "a tool must be a function",
    "agent": "an agent must be a function, f(base_url, key, problem)",
}
"""Settings whose values may be Python callables, and what kind of callable each one takes."""
BUILT_IN_TOOLS = ("calculator", "python")
"""The tools of `environments.tools`."""


def tool_sources(entries: Sequence[str], flag: str = "--tools") -> tuple[str, ...]:
    """Return one source per tool: `calculator`, python:/absolute/path.py:search, or an object.

    In python:FILE:search,convert the names after the first are functions of the same file, unless they are built in.
    """
    sources: list[str] = []
    file = ""
    for entry in map(str.strip, ",".join(entries).split(",")):
        if entry.startswith("python:") and entry.count(":") >= 2:
            path, name = entry.removeprefix("python:").rsplit(":", 1)
            file = f"python:{absolute_path(path)}"
            sources.append(f"{file}:{name}")
        elif entry in BUILT_IN_TOOLS or entry.startswith(OBJECT_PREFIX):
            sources.append(entry)
        elif file and entry.isidentifier():
            sources.append(f"{file}:{entry}")
        else:
            raise ConfigError(
                f"{flag} {entry}: a tool is python:FILE:FUNCTION, or one of: {', '.join(BUILT_IN_TOOLS)}."
                + nearest(entry, BUILT_IN_TOOLS)
            )
    return tuple(sources)


def register_callables(setting: str, value: Any) -> Any:
    """Replace functions and classes among tools, environment or agent with their registered names; keep text."""
    if value is None or isinstance(value, str):
        return value or ""
    if setting == "tools":
        entries = list(value) if isinstance(value, list | tuple) else [value]
        return tuple(entry if isinstance(entry, str) else _name(setting, entry) for entry in entries)
    return _name(setting, value)


def _name(setting: str, value: Any) -> str:
    if not callable(value):
        raise ConfigError(f"{setting} {value!r:.60}: {CALLABLE_SETTINGS[setting]}")
    return register_object(setting, value)


def check_game(name: str) -> None:
    """Raise ConfigError for an unknown game. The list of games is read as text, because importing it takes seconds."""
    spec = importlib.util.find_spec("textarena")
    if spec is None:
        raise ConfigError(f"textarena:{name} needs textarena: pip install 'ascent-rl[gym]'")
    lists = [Path(folder, "envs", "__init__.py") for folder in spec.submodule_search_locations or ()]
    text = "".join(file.read_text(encoding="utf-8") for file in lists if file.is_file())
    games = re.findall(r"^register_with_versions\(\s*id=[\"']([^\"']+)", text, re.MULTILINE)
    if games and name not in games and f"{name}-v0" not in games:
        raise ConfigError(
            (f"textarena has no game {name}.") + nearest(name, [game.replace("-v0", "", 1) for game in games])
        )

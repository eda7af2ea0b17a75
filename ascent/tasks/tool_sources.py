"""How settings name tools and environments: `calculator`, `python`, python:FILE:NAME, or an object of Python."""

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
    "environment": "an environment is a class, which each episode makes",
    "tools": "a tool is a function",
    "agent": "an agent is a function, f(base_url, key, problem)",
}
"""What answers the turns of a response, by its setting, and what it is as an object of Python."""
BUILT_IN_TOOLS = ("calculator", "python")
"""Those of `environments.tools`."""


def tool_sources(entries: Sequence[str], flag: str = "--tools") -> tuple[str, ...]:
    """Each tool by a name of its own: `calculator`, python:/whole/path.py:search, or an object.

    In python:FILE:search,convert the names behind the first are functions of the same file, unless they are built in.
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
                (f"{flag} {entry}: a tool is python:FILE:FUNCTION, or one of: {', '.join(BUILT_IN_TOOLS)}.")
                + nearest(entry, BUILT_IN_TOOLS)
            )
    return tuple(sources)


def register_callables(setting: str, value: Any) -> Any:
    """Tools, an environment or an agent as settings have them: functions and classes by name. Text stays as it is."""
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
    """Refuse a game that textarena lacks. Its list of games is read as text: importing it takes seconds."""
    found = importlib.util.find_spec("textarena")
    if found is None:
        raise ConfigError(f"textarena:{name} needs textarena: pip install 'ascent-rl[gym]'")
    lists = [Path(folder, "envs", "__init__.py") for folder in found.submodule_search_locations or ()]
    text = "".join(file.read_text(encoding="utf-8") for file in lists if file.is_file())
    games = re.findall(r"^register_with_versions\(\s*id=[\"']([^\"']+)", text, re.MULTILINE)
    if games and name not in games and f"{name}-v0" not in games:
        raise ConfigError(
            (f"textarena has no game {name}.") + nearest(name, [game.replace("-v0", "", 1) for game in games])
        )

"""Names of agents in settings, and the checks of agents before a run begins.

python:FILE:NAME             a function, async or not: f(base_url, key, problem)
command:WORDS                a program, started once per episode
verifiers:NAME[:FOLDER]      an environment of verifiers: its name, its file or a TOML file with its [env]; FOLDER is
                             the virtual environment in which verifiers is installed
openenv:URL                  an OpenEnv server, whose environment the policy interacts with
object:NAME@HASH             a Python function passed to the API
"""

import importlib.util
import inspect
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ascent.core.errors import ConfigError
from ascent.core.menu import nearest
from ascent.processes.reward_calls import RewardCallError
from ascent.tasks.python_objects import OBJECT_PREFIX, find_object
from ascent.tasks.user_files import absolute_path, load_python

KINDS = ("python", "command", "verifiers", "openenv")
FORMS = "python:FILE:NAME, command:WORDS, verifiers:NAME or openenv:URL"
AGENT_ARGUMENTS = ("base_url", "key", "problem", "messages", "seed", "seconds")
"""Arguments that an agent's function can take by name. With other names, it gets the first three by position."""
FUNCTION_FORM = "an agent must be a function, f(base_url, key, problem), async or not"
SERVER_PROBE_SECONDS = 5.0
"""Seconds to wait for an OpenEnv server to respond before a run."""


def agent_source(text: str) -> str:
    """Return the setting with absolute paths, so that a run can be resumed from any folder."""
    kind, colon, where = text.partition(":")
    if text.startswith(OBJECT_PREFIX):
        return text
    if kind in KINDS and not where.strip():
        raise ConfigError(f"--agent {text}: nothing follows {kind}{colon}. An agent is {FORMS}")
    if kind not in KINDS or not colon:
        raise ConfigError(f"--agent {text}: an agent is {FORMS}." + nearest(kind, KINDS))
    if kind == "python":
        file, _, name = where.rpartition(":")
        if not file or not name:
            raise ConfigError(f"--agent {text}: expected python:FILE:NAME")
        return f"python:{absolute_path(file)}:{name}"
    if kind == "verifiers":
        taskset, environment = split_verifiers(where)
        taskset = absolute_path(taskset) if taskset.endswith((".py", ".toml")) else taskset
        return f"verifiers:{taskset}:{environment}"
    if kind == "openenv" and (urlsplit(where).scheme not in ("http", "https") or not urlsplit(where).hostname):
        raise ConfigError(f"--agent {text}: expected the address of its server, such as openenv:http://127.0.0.1:8000")
    return text


def split_verifiers(where: str) -> tuple[str, str]:
    """Return NAME and the absolute path of the virtual environment; by default .engines/verifiers."""
    taskset, _, folder = where.partition(":")
    return taskset, absolute_path(folder or ".engines/verifiers")


def verify_agent(source: str) -> None:
    """Raise ConfigError if a file, function, program, virtual environment or server does not exist."""
    kind, _, where = source.partition(":")
    if kind in ("python", "object"):
        try:
            is_object = source.startswith(OBJECT_PREFIX)
            read_agent_signature(find_object(source, "agent") if is_object else load_python("--agent", source))
        except RewardCallError as error:
            raise ConfigError(f"--agent {source}: {error}") from None
    elif kind == "command":
        _verify_command(source, where)
    elif kind == "verifiers":
        taskset, folder = split_verifiers(where)
        if taskset.endswith((".py", ".toml")) and not Path(taskset).is_file():
            raise ConfigError(f"--agent {source}: there is no file {taskset}")
        if not os.access(Path(folder, "bin", "python"), os.X_OK):
            raise ConfigError(
                f"--agent {source}: there is no virtual environment with verifiers in {folder}. Create "
                ".engines/verifiers with `make verifiers`, or name another one: verifiers:NAME:FOLDER"
            )
    else:
        _verify_server(source, where)


def _verify_command(source: str, where: str) -> None:
    try:
        words = shlex.split(where)
    except ValueError as error:
        raise ConfigError(f"--agent {source}: the command cannot be parsed: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"--agent {source}: there is no program {words[0] if words else ''!r}")


def _verify_server(source: str, url: str) -> None:
    if importlib.util.find_spec("websockets") is None:
        raise ConfigError(f"--agent {source} needs websockets: pip install 'ascent-rl[agents]'")
    import urllib.error  # imported here, because every reward worker imports this module
    import urllib.request

    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=SERVER_PROBE_SECONDS) as response:
            response.read(1)
    except (OSError, ValueError) as error:
        reason = f"HTTP {error.code}" if isinstance(error, urllib.error.HTTPError) else str(error)
        raise ConfigError(
            f"--agent {source}: no OpenEnv server responds at {url} ({reason:.120}). Start it first"
        ) from None


# ---- how a function is called -------------------------------------------------------------------------


class AgentSignature(NamedTuple):
    """An agent's function and the arguments that it takes."""

    function: Callable[..., Any]
    names: tuple[str, ...] | None
    """Arguments passed by name; None: base_url, key and problem by position."""

    def __call__(self, **arguments: Any) -> Any:
        if self.names is None:
            return self.function(*(arguments[name] for name in AGENT_ARGUMENTS[:3]))
        return self.function(**{name: arguments[name] for name in self.names})


def read_agent_signature(function: Any) -> AgentSignature:
    """Return how an agent's function is called; raise RewardCallError if its parameters do not fit."""
    if not callable(function) or isinstance(function, type):
        raise RewardCallError(f"it is a {type(function).__name__}, but {FUNCTION_FORM}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise RewardCallError(f"its signature cannot be read: {FUNCTION_FORM}") from None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in parameters if p.default is p.empty and p.kind not in variable]
    named = [p.name for p in parameters if p.kind not in (*variable, inspect.Parameter.POSITIONAL_ONLY)]
    if all(p.name in AGENT_ARGUMENTS and p.kind is not p.POSITIONAL_ONLY for p in needed):
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = tuple(name for name in AGENT_ARGUMENTS if takes_all or name in named)
        if names:
            return AgentSignature(function, names)
    num_positional = sum(p.kind in positional for p in parameters)
    if all(p.kind in positional for p in needed) and len(needed) <= 3 <= num_positional:
        return AgentSignature(function, None)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) and not needed:
        return AgentSignature(function, None)
    raise RewardCallError(
        f"it takes ({', '.join(map(str, parameters))}), but {FUNCTION_FORM}, or one that takes any of these by name: "
        f"{', '.join(AGENT_ARGUMENTS)}"
    )

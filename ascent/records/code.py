"""The Python files that a run's settings name: whoever loads a run runs them, so they must be those it was made with.

Looking at a run runs nothing. Loading its policy does: a run folder that came from elsewhere could name any file. So
run.json keeps the hash of each file, and a file that is not the same any more is refused until its user says so. The
words of a program (--agent command:WORDS, --engine.args WORDS) could be anything, so they are refused until this
process has seen them; so is an interpreter of an engine that lies in the folder itself.
"""

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ascent.core.types import Refused

TRUSTED: set[Path] = set()
"""Files that the user of this process has named."""
PROGRAMS: set[str] = set()
"""Programs that they have named: command:WORDS, or engine:WORDS."""


def trust(file: str | Path) -> None:
    """Let runs use the code of this file, whatever they were made with. On the command line: --trust FILE.

    Or let them start a program (command:WORDS), or an engine with these arguments (engine:WORDS).
    """
    if str(file).startswith(("command:", "engine:")):
        PROGRAMS.add(str(file))
    TRUSTED.add(Path(file).expanduser().resolve())


def code_hashes(settings: Any) -> dict[str, str]:
    """The SHA-256 of every file that the settings name as python:FILE:NAME, sandbox:FILE:NAME or verifiers:FILE.

    It is asked for when a run is made. Whoever makes one has named its programs, so this process may start them again.
    """
    PROGRAMS.update(_programs(settings))
    return {str(path): _hash(path) for kind, path in _files(settings) if kind in ("python", "sandbox", "verifiers")}


def check_code(folder: Path, settings: Any, recorded: Mapping[str, str]) -> None:
    """Refuse settings of a run whose code is not what it was when the run was made."""
    for words in _programs(settings):
        if words not in PROGRAMS:
            raise Refused(
                f"{folder}: its settings start a program, {words!r}. Nothing of it was started. If it is what you "
                f"want, add --trust {shlex.quote(words)}"
            )
    for kind, path in _files(settings):
        if path.resolve() in TRUSTED:
            continue
        known, why = recorded.get(str(path)), None
        if not path.is_absolute():  # Ascent writes whole paths; this one could lie wherever a command is run
            why = "which is not a whole path"
        elif kind in ("judge", "environment", "engine"):  # who is sent the key, or what is run; both may change
            why = "which came with the folder" if path.resolve().is_relative_to(folder.resolve()) else None
        elif not path.is_file():
            why = "which is not there any more"
        elif known is None:
            why = "and there is no record that the run was made with it"
        elif path.resolve().is_relative_to(folder.resolve()):
            why = "which came with the folder"
        elif _hash(path) != known:
            why = "which has changed since the run was made"
        if why is not None:
            raise Refused(
                f"{folder}: its settings name the {kind} file {path}, {why}. Nothing of it was used. Look at it; if it "
                f"is yours and as you want it, add --trust {path}"
            )


def _files(settings: Any) -> Iterator[tuple[str, Path]]:
    """The files of python:FILE:NAME, sandbox:FILE:NAME, judge:FILE and verifiers:FILE:FOLDER, anywhere, also behind a
    weight or a reward."""
    for policy in _engines(settings):
        yield "engine", Path(policy["engine_python"])
    for text in _texts(settings):
        found = re.fullmatch(r"(?s)\s*(?:[^:]*[*+]\s*)?(?:(python|sandbox):(.+):[^:]+|(judge):(.+?)\s*)", text)
        if found:
            yield found[1] or found[3], Path(found[2] or found[4])
        if found := re.fullmatch(r"(?s)verifiers:([^:]+)(?::(.*))?", text):
            if found[1].endswith((".py", ".toml")):
                yield "verifiers", Path(found[1])
            yield "environment", Path(found[2] or "")


def _programs(settings: Any) -> Iterator[str]:
    yield from (text for text in _texts(settings) if text.startswith("command:"))
    yield from (f"engine:{policy['engine_args']}" for policy in _engines(settings) if policy.get("engine_args"))


def _engines(settings: Any) -> Iterator[Mapping[str, Any]]:
    """The policies that start an engine, however deep."""
    if isinstance(settings, Mapping):
        if settings.get("engine_python"):
            yield settings
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        for value in settings:
            yield from _engines(value)


def _texts(settings: Any) -> Iterator[str]:
    """Every text in the settings, however deep."""
    if isinstance(settings, Mapping):
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        for value in settings:
            yield from _texts(value)
    elif isinstance(settings, str):
        yield settings


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

"""Decide whether the settings of a run may execute code, start programs or read files outside its folder.

Showing a run executes nothing. Loading a run may run code, start programs, send API keys to an address, turn off a
sandbox or read files outside the folder, and a folder from an untrusted source could name any of these. So each run
that is made on this machine is recorded in the user's state folder, by a hash of its id and of everything that its
settings use, including code files. A run without a record may use plain data only. Everything else is listed and
rejected until the user trusts it (--trust).
"""

import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.distributed.ranks import torchrun_rank, torchrun_world_size
from ascent.models.causal_lm import SAVED_MODEL
from ascent.processes.user_code import CODE, read_code
from ascent.processes.user_state import state_folder
from ascent.runs.display.terminal import printable
from ascent.settings import CHOICES, canonical_key, flatten, settings_of
from ascent.tasks import TASKS
from ascent.tasks.user_files import absolute_path

TRUSTED: set[str] = set()
"""Hashes that the user of this process trusts: by --trust=HASH, by a confirmation, or by making a run."""
ask_at_terminal = False
"""Whether --trust was given, so that the user is asked if there is a terminal."""
TRUST_VARIABLE = "ASCENT_TRUST"
DESCRIPTION = ("id", "objective", "formula", "label")
"""Keys of config.json that are no settings."""

_OBJECT = r"object:[^:]*"
_NAME = rf"[\w.+-]*|{_OBJECT}"
_FORMS = "old_logp dtype optimizer_state shard norm per form estimator level schedule check engine engine_transport"
_TEXTS = "system instruction stop separator prompt_column answer_column response_column limit_column lora_targets"
_ENGINE = ("engine_url", "engine_python", "engine_args", "engine_key_env", "engine_key_file")
_NEEDED = (*_ENGINE, "reward_env", "sandbox_read", "sandbox_packages", "options", "judge")
_FILES = ("source", "test_file", "path", "demonstrations", "pairs", "labels", "init", "model")
PLAIN_VALUES: dict[str, str] = {
    **dict.fromkeys(("task", "preset", "algorithm", *CHOICES, "eval", "record_rollouts", *_FORMS.split()), _NAME),
    **dict.fromkeys((*_TEXTS.split(), "subset", "split", "test_split"), r"(?s).*"),
    **dict.fromkeys((*_FILES, *_NEEDED), ""),
    **dict.fromkeys(("source", "agent"), _OBJECT),
    **dict.fromkeys(("device", "reward_device"), r"[\w:]*"),
    **dict.fromkeys(("reward", "tools"), rf"[^:]*|[^:]*\*?\s*{_OBJECT}"),
    "environment": rf"textarena:[\w.-]*|{_OBJECT}",
    "model": rf"{SAVED_MODEL}|[\w-][\w.-]*(/[\w.-]+)?",
    "sandbox": "auto|bubblewrap|landlock",
    "track": "tensorboard",
}
"""For each setting, by the last part of its name: a pattern of the values that are plain data.

A file is plain data if it is in the run's folder.
"""
_SOURCES = {"code": "humaneval", "dataset": r"[\w-][\w.-]*/[\w.-]+", "textarena": r"[\w.-]*"}
"""The same patterns for `source`, by task. (Some data sets of reasoning-gym evaluate responses as Python.)"""


def uses_beyond_plain_data(folder: Path, settings: Mapping[str, Any], reread: bool = False) -> dict[str, Path | None]:
    """Return descriptions of everything that the settings use beyond plain data, each with its code file.

    The description contains the hash of the file. `reread`: read files again that were read before.
    """
    used: dict[str, Path | None] = {}
    settings = {key: value for key, value in settings.items() if key not in DESCRIPTION}
    flat = {canonical_key(key): value for key, value in flatten(settings).items()}
    for key, value in flat.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is None or item == "" or _is_plain(folder, key, item, flat.get("task")):
                continue
            text, path = f"--{key.replace('_', '-')} {json.dumps(item, default=str)}", _code_file(str(item))
            if path is not None and not path.is_file():
                raise ConfigError(
                    f"{folder}: its settings name the file {path}, which does not exist. Nothing was loaded"
                )
            if path is not None and reread:
                CODE.pop(path, None)
            used[text if path is None else f"{text} ({json.dumps(str(path))}, SHA-256 {_hash(path)})"] = path
    return used


def _is_plain(folder: Path, key: str, value: Any, task: Any) -> bool:
    name, text = key.rpartition(".")[2], str(value)
    if name not in PLAIN_VALUES:
        return isinstance(value, int | float) or name in _number_settings()
    pattern = _SOURCES.get(str(task), PLAIN_VALUES[name]) if name == "source" else PLAIN_VALUES[name]
    if (name == "model" or (name, task) == ("source", "dataset")) and Path(text).expanduser().exists():
        pattern = ""  # a local path, and not a name on the hub
    inside = name in _FILES and Path(absolute_path(text)).is_relative_to(folder.resolve())
    return inside or re.fullmatch(pattern, text) is not None


@functools.cache
def _number_settings() -> frozenset[str]:
    """Return the settings that accept only numbers; other values of them are rejected before use."""
    classes = (Config, *TASKS, *(choice for menu in CHOICES.values() for choice in menu))
    fields = [(name, setting) for cls in classes for name, setting in settings_of(cls).items()]
    return frozenset(name for name, setting in fields if {*setting.kinds} <= {int, float, bool, NoneType})


def _code_file(text: str) -> Path | None:
    """Return the file of python:FILE:NAME, sandbox:FILE:NAME, judge:FILE or verifiers:FILE, also after a weight."""
    functions = r"\s*(?:[^:]*[*+]\s*)?(?:(?:python|sandbox):(.+):[^:]+|judge:(.+?)\s*)"
    match = re.fullmatch(rf"(?s){functions}|verifiers:([^:]+\.(?:py|toml))(?::.*)?", text)
    return Path(absolute_path(match[1] or match[2] or match[3])) if match else None


def _hash(path: Path) -> str:
    return hashlib.sha256(read_code(path)).hexdigest()


def code_hashes(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of every code file that the settings name, for run.json."""
    return {str(path): _hash(path) for path in uses_beyond_plain_data(Path(), settings).values() if path is not None}


# ---- what is trusted ------------------------------------------------------------------------------------------


def _digest(settings: Mapping[str, Any], used: Iterable[str]) -> str:
    """Return a hash of the run's id and of everything it uses, so that trust does not extend to other runs."""
    return hashlib.sha256(json.dumps([settings.get("id"), sorted(used)]).encode()).hexdigest()[:32]


def record_run(folder: Path, settings: Mapping[str, Any]) -> str:
    """Record that the user has made or trusts a run with these settings; return why that failed, or an empty string."""
    used = uses_beyond_plain_data(folder, settings)
    TRUSTED.add(digest := _digest(settings, used))
    try:
        if used:
            (state_folder("trusted") / digest).write_text(f"{folder.resolve()}\n")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        return f"the run cannot be recorded as yours ({error}). To load it in another process, add --trust={digest}"
    return ""


def check_trust(folder: Path, settings: Mapping[str, Any], recorded: Any = None, trusted: bool = False) -> None:
    """Raise ConfigError for settings that use more than plain data, unless the run is recorded or trusted.

    The code files are read again, and the contents that were hashed are those that run. `recorded`: the hashes in
    run.json.
    """
    used = uses_beyond_plain_data(folder, settings, reread=True)
    digest = _digest(settings, used)
    TRUSTED.update(os.environ.get(TRUST_VARIABLE, "").replace(",", " ").split(), [digest] if trusted else [])
    if not used or digest in TRUSTED or _is_recorded(digest):
        return
    old_hashes = recorded if isinstance(recorded, Mapping) else {}
    changed = [path for path in used.values() if path and old_hashes.get(str(path), _hash(path)) != _hash(path)]
    lines = [*used, *(f"{path} has changed since the run was made" for path in changed)]
    where = f"rank {torchrun_rank()} of {torchrun_world_size()}: {folder}" if torchrun_rank() else f"{folder}"
    about = f"{where}: this run is not known here, and its settings use more than plain data:\n  " + "\n  ".join(lines)
    if ask_at_terminal and torchrun_world_size() == 1 and sys.stdin.isatty() and sys.stderr.isatty():
        sys.stderr.write(printable(f"{about}\nReview the list. Trust this run, now and later? [y/N] "))
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            record_run(folder, settings)
            return
    raise ConfigError(
        f"{about}\nNothing was loaded. Review the list; to trust the run, add --trust, which asks at a terminal. "
        f"Without one: --trust={digest}, or {TRUST_VARIABLE}={digest} in the environment. In Python: ascent.trust(run)"
    )


def _is_recorded(digest: str) -> bool:
    with suppress(OSError, RuntimeError):
        return (state_folder("trusted") / digest).is_file()
    return False

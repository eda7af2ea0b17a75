"""How settings become a Config.

Settings are plain: a flat mapping from a flag's name to a value, `{"advantage": "leave-one-out",
"loss.high": 0.28, "steps": 100}`. A task's preset, a config file, Python keywords and the command
line all speak it. Layers are laid over one another: a row named later replaces every axis of the
algorithm (an optimizer only where the row has another update), and another choice named later drops
the fields of the one before it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ascent.algorithms import ALGORITHMS, MENU, Algorithm
from ascent.config import Config
from ascent.menu import Menu, build, hyperparameters, name_of, nearest, spell
from ascent.own import load_python
from ascent.policies import POLICIES
from ascent.preferences import SHOWN
from ascent.tasks import TASKS
from ascent.types import Refused
from ascent.update import Adam

Settings = Mapping[str, Any]
SHORT = {"lr": "update.lr", "model": "policy.model"}
"""Flags that stand for a field of a choice."""
PLAIN = {f.name: f for f in fields(Config) if f.name not in ("task", "policy", "algorithm")}
CHOICES: dict[str, tuple[type, ...]] = {"policy": POLICIES, **MENU}


def _flag(name: str) -> str:
    return name.replace("_", "-")


def flatten(given: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as settings: {"loss": {"name": "clipped", "low": 0.1}} -> loss, loss.low."""
    flat: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            flat[key] = value["name"]
            flat |= {f"{key}.{k}" if key != "task" else k: v for k, v in value.items() if k != "name"}
        else:
            flat[key] = value
    return flat


@dataclass
class Resolved:
    """Settings laid over one another, before anything is checked as a whole."""

    task: type
    own: dict[str, Any]
    """The task's fields."""
    plain: dict[str, Any]
    """Config's plain fields."""
    chosen: dict[str, Any]
    """The policy and one choice per axis."""

    def config(self) -> Config:
        axes = dict(self.chosen)
        policy = axes.pop("policy")
        return Config(task=build("task", self.task, self.own), policy=policy, algorithm=Algorithm(**axes), **self.plain)


def configure(task: Any, *layers: Settings) -> Config:
    """The config of a task (a name, a class or an instance) under these settings, later ones winning."""
    return resolve(task, *layers).config()


def resolve(task: Any, *layers: Settings) -> Resolved:
    task, source = find_task(task)
    cls = task if isinstance(task, type) else type(task)
    layers = tuple({_canonical(k): v for k, v in layer.items()} for layer in (source, *layers))
    preset = _preset(cls, next((layer["preset"] for layer in reversed(layers) if "preset" in layer), "default"))
    chosen: dict[str, Any] = {"policy": POLICIES[0](), **vars(Algorithm())}
    own = {} if isinstance(task, type) else {name: getattr(task, name) for name in hyperparameters(cls)}
    found = Resolved(cls, own, {}, chosen)
    kept = chosen["update"]  # the last one that no row brought along
    for layer in (preset, *layers):
        if "algorithm" in layer:
            row = _row(layer["algorithm"])
            chosen |= vars(row) | ({"update": kept} if type(row.update) is Adam else {})
        for axis in CHOICES:
            chosen[axis] = _choose(axis, chosen[axis], layer, preset)
        kept = kept if chosen["update"].whole else chosen["update"]
        found.plain |= {k: _checked(k, v, Config) for k, v in layer.items() if k in PLAIN}
        found.own |= {k: _checked(k, v, cls) for k, v in layer.items() if k in hyperparameters(cls)}
        if layer is not preset:
            _refuse_unknown(layer, cls)
    shown = SHOWN.get(chosen["loss"].data)
    if shown is not None:  # there are as many responses as are shown, whatever the other rows of a comparison draw
        found.plain["samples"] = shown
    return found


def refuse_samples(asked: int | None, config: Config) -> None:
    """Refuse a number of responses that was asked for where another is shown."""
    if asked is not None and asked != config.samples and config.algorithm.loss.data in SHOWN:
        raise Refused(
            f"--samples {asked}: {label(config.algorithm)} draws nothing; for every prompt it is shown "
            f"{config.samples} ({config.algorithm.loss.data}). Leave --samples out"
        )


def _preset(task: Any, name: str) -> Settings:
    if name not in task.presets:
        raise Refused(f"--preset {name}: {name_of(task)} has {', '.join(task.presets)}.{nearest(name, task.presets)}")
    return {_canonical(k): v for k, v in task.presets[name].items()}


def find_task(given: Any) -> tuple[Any, Settings]:
    """A task's class or instance, from its name, and the settings that NAME:SOURCE brings along.

    In config.json the two stand apart, as the task's name and its field `source`.
    """
    if not isinstance(given, str):
        return given, {}
    if given.startswith("python:"):
        return _own_task(given), {}
    name, colon, source = given.partition(":")
    known = {name_of(cls): cls for cls in TASKS}
    if name not in known:
        raise Refused(f"TASK {given}: no such task. There are {', '.join(known)}.{nearest(name, known)}")
    if not colon:
        return known[name], {}
    fields_of = [_flag(key) for key in hyperparameters(known[name])]
    if "source" not in fields_of:
        raise Refused(f"TASK {given}: {name} stands alone; its settings are flags: --{', --'.join(fields_of)}")
    return known[name], {"source": source}


def _own_task(given: str) -> Any:
    """A user's own task, a class or an instance. An instance is written down as its class and its fields."""
    found = load_python("TASK", given)
    cls = found if isinstance(found, type) else type(found)
    if not (is_dataclass(cls) and "default" in getattr(cls, "presets", {})):
        raise Refused(
            f"TASK {given}: a task of your own is a frozen dataclass that derives from ascent.tasks.text.Text, or one "
            "like those in ascent.tasks, with `presets`; or an instance of such a class"
        )
    if found is not cls and cls.__module__.startswith("ascent_user_"):
        load_python("TASK", f"{given.rpartition(':')[0]}:{cls.__name__}")
    return found


def _canonical(key: str) -> str:
    """--max-norm and max_norm are one name; --lr is --update.lr."""
    axis, dot, field = key.partition(".")
    key = f"{axis}.{field.replace('-', '_')}" if dot else axis.replace("-", "_")
    return SHORT.get(key, key)


def _row(given: Any) -> Algorithm:
    if isinstance(given, Algorithm):
        return given
    if given not in ALGORITHMS:
        raise Refused(
            f"--algorithm {given}: no such row. There are {', '.join(ALGORITHMS)}.{nearest(str(given), ALGORITHMS)}"
        )
    return ALGORITHMS[given]


def _choose(axis: str, now: Any, layer: Settings, preset: Settings) -> Any:
    """This axis after a layer: another choice if it names one, other fields if it sets any."""
    named = layer.get(axis)
    if named is not None and not isinstance(named, str):
        _refuse_stranger(axis, named, named if isinstance(named, type) else type(named))
        now = named() if isinstance(named, type) else named
    elif named is not None:
        cls = find(axis, CHOICES[axis], named)
        _refuse_stranger(axis, named, cls)
        if cls is not type(now):
            starts = {k.split(".")[1]: v for k, v in preset.items() if k.startswith(f"{name_of(cls)}.")}
            now = build(axis, cls, starts)
    fields_set = {k.split(".", 1)[1]: v for k, v in layer.items() if k.startswith(f"{axis}.")}
    if not fields_set:
        return now
    build(axis, type(now), {k: v for k, v in fields_set.items() if k not in hyperparameters(type(now))})
    return replace(now, **{k: _checked(f"{axis}.{k}", v, type(now)) for k, v in fields_set.items()})


def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass or of its bases: what it means, in its author's words."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs |= _docs_in(base) if is_dataclass(base) else {}
    return docs


@functools.cache
def _docs_in(cls: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return docs
    body = tree.body[0].body  # type: ignore[attr-defined]
    for field, after in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[field.target.id] = inspect.cleandoc(str(after.value.value))  # type: ignore[union-attr]
    return docs


def find(axis: str, menu: Menu, name: str) -> Any:
    """The class of this name on a menu, or a user's own behind python:FILE:NAME."""
    if name.startswith("python:"):
        return load_python(f"--{axis}", name)
    known = {name_of(cls): cls for cls in menu}
    if name not in known:
        raise Refused(f"--{axis} {name}: no such choice. The menu has {', '.join(known)}.{nearest(name, known)}")
    return known[name]


def _refuse_stranger(axis: str, name: Any, cls: Any) -> None:
    """A class of the user's own has to be a choice like those on the menu."""
    base = CHOICES[axis][0].__mro__[1]
    if not (isinstance(cls, type) and is_dataclass(cls) and issubclass(cls, base)):
        derived = "" if base is object else f" that derives from {base.__module__}.{base.__name__}"
        raise Refused(f"--{axis} {name}: a choice of your own is a frozen dataclass{derived}, as those on the menu are")


def _refuse_unknown(layer: Settings, task: type) -> None:
    known = {*PLAIN, *CHOICES, *hyperparameters(task), "algorithm", "preset", *SHORT}
    for key in layer:
        if key.split(".")[0] not in known:
            raise Refused(f"--{_flag(key)}: there is no such setting for {name_of(task)}.{nearest(key, known)}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a class's fields; reading them out of their words takes a while."""
    return get_type_hints(cls)


def _checked(key: str, value: Any, cls: type) -> Any:
    """The value if it is of the field's type, an int made a float where that is wanted; else refused."""
    hint = _hints(cls)[key.rpartition(".")[2]]
    wanted = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in wanted:
        if get_origin(kind) is Literal:
            if value in get_args(kind):
                return value
        elif get_origin(kind) is tuple:
            items = (value,) if isinstance(value, str) else value  # one stands for a tuple of one
            if isinstance(items, list | tuple) and all(type(item) is get_args(kind)[0] for item in items):
                return tuple(items)
        elif kind is Any or type(value) is kind or (kind is type(None) and value is None):
            return value
        elif kind is float and type(value) is int:
            return float(value)
        elif kind is str and key == "record_rollouts" and type(value) is int:
            return str(value)
    choices = [str(v) for kind in wanted for v in (get_args(kind) if get_origin(kind) is Literal else ())]
    what = f"one of {', '.join(choices)}" if choices else " or ".join(_kind(k) for k in wanted)
    raise Refused(f"--{_flag(key)} is {value!r}: it has to be {what}")


def _kind(kind: Any) -> str:
    return (
        f"a list of {get_args(kind)[0].__name__}" if get_origin(kind) is tuple else getattr(kind, "__name__", str(kind))
    )


def label(algorithm: Algorithm) -> str:
    """The nearest row, and what was changed on it: dr-grpo+annealed. Of the update only its kind is part of a row."""

    def changes(row: Algorithm) -> list[str]:
        axes = (f.name for f in fields(Algorithm) if f.name != "update")
        changed = [spell(getattr(algorithm, a)) for a in axes if getattr(row, a) != getattr(algorithm, a)]
        return changed + [name_of(algorithm.update)] * (type(row.update) is not type(algorithm.update))

    row = min(ALGORITHMS, key=lambda name: len(changes(ALGORITHMS[name])))
    return "+".join([row, *changes(ALGORITHMS[row])])

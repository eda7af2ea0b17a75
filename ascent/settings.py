"""Resolve settings to a Config.

Settings are a flat mapping from flag names to values: {"advantage": "leave-one-out", "loss.high": 0.28, "steps": 100}.
Presets of tasks, config files, Python keywords and the command line are layers of settings; later layers win. A named
algorithm replaces all axes of the algorithm (the optimizer only if it has another kind of update). Another choice for
an axis drops the fields of the previous one.

A `Setting` describes one field of a dataclass: its flag, its type, its default and its help.
"""

import ast
import functools
import inspect
import itertools
import textwrap
import threading
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ascent.core.algorithms import ALGORITHMS, MENU, Algorithm
from ascent.core.config import Config, RankSettings
from ascent.core.correction import Truncated
from ascent.core.errors import ConfigError
from ascent.core.menu import hyperparameters, name_of, nearest
from ascent.core.preferences import RESPONSES_PER_PROMPT
from ascent.core.update import Adam
from ascent.models import POLICIES
from ascent.models.causal_lm import lora_settings, register_model
from ascent.tasks import TASKS
from ascent.tasks.base import BaseTask
from ascent.tasks.python_objects import find_object, object_label, object_names, register_class
from ascent.tasks.reward_sources import register_rewards
from ascent.tasks.text.python_rows import register_rows, task_from_object
from ascent.tasks.tool_sources import CALLABLE_SETTINGS, register_callables
from ascent.tasks.user_files import load_python

Settings = Mapping[str, Any]
SHORT = {"lr": "update.lr", "model": "policy.model", "engine": "policy.engine"}
ENGINE_FIELDS = ("url", "python", "args", "deadline", "transport", "key_env", "key_file")
SHORT |= {f"engine.{name}": f"policy.engine_{name}" for name in ENGINE_FIELDS}
"""Short flags for fields of a choice."""
CHOICES: dict[str, tuple[type, ...]] = {"policy": POLICIES, **MENU}
ROW_SETTINGS = ("samples", "epochs", "minibatches")
"""Plain settings that an algorithm may require: see `row_needs`."""
WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text", Path: "a path", NoneType: "None"}


# ---- one field ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A field of a dataclass as a setting: name, type, default and help."""

    name: str
    """Its key in settings, such as steps or loss.high."""
    kind: Any
    """Its type."""
    default: Any = None
    help: str = ""
    metavar: str = ""
    """Placeholder of its value in help texts; by default its type."""

    @property
    def flag(self) -> str:
        return f"--{self.name.rstrip('_').replace('_', '-')}"

    @property
    def negative(self) -> str:
        """The flag that disables a boolean setting: --no-open, --policy.no-checkpointing."""
        axis, dot, field = self.flag.removeprefix("--").rpartition(".")
        return f"--{axis}{dot}no-{field}"

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of a union, None first, because `None` on the command line would also fit str."""
        kinds = get_args(self.kind) if get_origin(self.kind) in (Union, UnionType) else (self.kind,)
        return tuple(sorted(kinds, key=lambda kind: kind is not NoneType))

    def check(self, value: Any, flag: str = "", typed: bool = False) -> Any:
        """Return the value, converted to the setting's type if nothing is lost; `typed`: it is command-line text."""
        for kind in self.kinds:
            try:
                return _fit(value, kind, typed)
            except (ValueError, OverflowError):
                continue
        choices = [str(option) for kind in self.kinds if get_origin(kind) is Literal for option in get_args(kind)]
        wanted = f"one of {', '.join(choices)}" if choices else " or ".join(_type_in_words(k) for k in self.kinds[::-1])
        hint = nearest(str(value), choices)
        raise ConfigError(f"{flag or self.flag} is {value!r}: it has to be {wanted}{f'.{hint}' if hint else ''}")


def _type_in_words(kind: Any) -> str:
    if get_origin(kind) is tuple:
        several = "one or more" if get_args(kind)[-1] is ... else len(get_args(kind))
        return f"{several} values, each {_type_in_words(get_args(kind)[0])}"
    return WORDS.get(kind, str(kind))


def _fit(value: Any, kind: Any, typed: bool) -> Any:
    """Convert the value to this type, or raise ValueError."""
    options = {bool: (True, False), NoneType: (None,)}.get(kind, get_args(kind))
    if get_origin(kind) is tuple:  # a single value stands for a tuple of one
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list | tuple):
            kinds = options[:1] * len(items) if options[-1] is ... else options
            return tuple(_fit(item, kind, typed) for item, kind in zip(items, kinds, strict=True))
    elif options:
        for option in options:
            if value == str(option) if typed else (type(value), value) == (type(option), option):
                return option
    elif (typed and kind in (int, float)) or (type(value) is int and kind in (float, str)):
        return kind(value)
    elif kind is Path and isinstance(value, str | Path):
        return Path(value)
    elif kind is Any or type(value) is kind:
        return value
    raise ValueError


def settings_of(cls: type, axis: str = "") -> dict[str, Setting]:
    """Return the fields of a dataclass as settings, by name. Annotated[int, "N"] sets the metavar."""
    docs, hints, settings = field_docs(cls), get_type_hints(cls, include_extras=True), {}
    for name, field in hyperparameters(cls).items():
        if not field.init:
            continue
        kind, metavar = hints[name], ""
        if get_origin(kind) is Annotated:
            kind, metavar = get_args(kind)
        key = f"{axis}.{name}" if axis else name
        default = field.default if field.default_factory is MISSING else field.default_factory()
        settings[name] = Setting(key, kind, default, docs.get(name, ""), metavar)
    return settings


PARSE_LOCK = threading.Lock()
"""Guards ast.parse: Python 3.11 raises SystemError if two threads parse at the same time."""


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass and its bases."""
    docs: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        try:
            with PARSE_LOCK:
                tree: Any = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # a class defined in a notebook has no source
            continue
        for pair in itertools.pairwise(tree.body[0].body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                    docs[name] = inspect.cleandoc(str(text))
    return docs


PLAIN = {
    name: setting
    for name, setting in settings_of(Config).items()
    if name not in ("task", "policy", "ranks", "algorithm")
}
"""The fields of Config that do not belong to a choice."""


# ---- layers of settings ---------------------------------------------------------------------------------------


@dataclass
class Resolved:
    """Merged layers of settings, before the config as a whole is checked."""

    task: type
    own: dict[str, Any]
    """The task's fields."""
    plain: dict[str, Any]
    """Config's plain fields."""
    chosen: dict[str, Any]
    """The policy and one choice per axis."""

    @property
    def needs(self) -> dict[str, int]:
        return row_needs(self.chosen["loss"], self.chosen["update"])

    def config(self) -> Config:
        axes = dict(self.chosen)
        policy, ranks = axes.pop("policy"), axes.pop("ranks")
        epochs = self.plain.get("data_epochs")
        if epochs is not None and not 0 < epochs < float("inf"):
            raise ConfigError(f"--data-epochs is {epochs:g}: set a number of epochs above 0")
        needed, samples = self.needs.get("samples"), self.plain.get("samples")
        if needed not in (None, samples):
            raise ConfigError(
                f"--samples {samples}: {row_label(Algorithm(**axes))} samples nothing; its {axes['loss'].data} have "
                f"{needed} per prompt. Leave --samples out, or set it to {needed}"
            )
        if getattr(policy, "engine", "local") != "local" and self.plain.get("old_logp", "auto") == "auto":
            self.plain["old_logp"] = "learner"  # so that rounding of another engine does not enter the ratio
        return Config(
            task=build("task", self.task, self.own),
            policy=policy,
            algorithm=Algorithm(**axes),
            ranks=ranks,
            **self.plain,
        )


def configure(task: Any, *layers: Settings) -> Config:
    """Return the config of a task (a name, a class or an instance) with these settings; later layers win."""
    return resolve(task, *layers).config()


def resolve(task: Any, *layers: Settings, recorded: bool = False) -> Resolved:
    """Merge layers of settings.

    With `recorded`, the settings are those of a run folder, which names all of them: presets are not applied, because a
    setting that the run does not name was added later.
    """
    task, source = find_task(task, any(layer.get("reward") for layer in layers))
    cls: Any = task if isinstance(task, type) else type(task)
    layers = tuple(name_python_objects({canonical_key(k): v for k, v in layer.items()}) for layer in (source, *layers))
    name = next((layer["preset"] for layer in reversed(layers) if "preset" in layer), "default")
    preset = {} if recorded else find_named("--preset", name, cls.presets, f"preset of {name_of(cls)}")
    preset = {canonical_key(k): v for k, v in preset.items()}
    chosen: dict[str, Any] = {"policy": POLICIES[0](), "ranks": RankSettings(), **vars(Algorithm())}
    own = {} if isinstance(task, type) else {name: getattr(task, name) for name in hyperparameters(cls)}
    resolved, fields_of_task = Resolved(cls, own, {}, chosen), settings_of(cls)
    kept = chosen["update"]  # the last one that no row brought along
    for layer in (preset, *layers):
        if "algorithm" in layer:
            row = layer["algorithm"]
            row = row if isinstance(row, Algorithm) else find_named("--algorithm", row, ALGORITHMS, "algorithm")
            chosen |= vars(row) | ({"update": kept} if type(row.update) is Adam else {})
            starts = _preset_fields(type(row.critic), preset)
            if starts and row.critic == type(row.critic)():  # it says which critic, and the preset how that one learns
                chosen["critic"] = replace(chosen["critic"], **starts)
        for axis in CHOICES:
            chosen[axis] = _choose(axis, chosen[axis], layer, preset)
        chosen["ranks"] = _with_fields("ranks", chosen["ranks"], layer)
        kept = kept if chosen["update"].full_batch else chosen["update"]
        resolved.plain |= {"data_epochs": None} if "steps" in layer else {}  # the later of the two counts
        resolved.plain |= {k: PLAIN[k].check(v) for k, v in layer.items() if k in PLAIN}
        own |= {k: fields_of_task[k].check(v) for k, v in layer.items() if k in fields_of_task}
        known = [*PLAIN, *fields_of_task, *CHOICES, "algorithm", "preset", *SHORT, "ranks"]
        for key in [] if layer is preset else layer:
            if key == "ranks":
                fields = ", ".join(setting.flag for setting in settings_of(RankSettings, "ranks").values())
                raise ConfigError(f"--ranks has no value of its own: set its fields, {fields}")
            if key.split(".")[0] not in known:
                flag, flags = (f"--{key.replace('_', '-')}", [f"--{name.replace('_', '-')}" for name in known])
                raise ConfigError(f"{flag}: there is no such setting for {name_of(cls)}.{nearest(flag, flags)}")
    given = {key for layer in layers for key in layer}  # what a preset sets, a row may replace
    resolved.plain |= {name: value for name, value in resolved.needs.items() if name not in given}
    if resolved.plain.get("ahead") and cls.kind == "text" and not given & {"correction", "old_logp"}:
        chosen["correction"] = _weighed(chosen["correction"])
    return resolved


def _weighed(correction: Any) -> Any:
    """Return the default correction of a run that samples ahead: older policies sampled some of its tokens."""
    return correction if correction.enabled else Truncated()


def name_python_objects(layer: Settings) -> dict[str, Any]:
    """Replace Python objects (reward functions, rows, a model) by names, and `peft_config` by fields of the policy."""
    words = dict(layer)
    if "reward" in words:
        words["reward"] = register_rewards(words["reward"])
    for setting in CALLABLE_SETTINGS:
        if setting in words:
            words[setting] = register_callables(setting, words[setting])
    if words.get("eval") is not None and not isinstance(words["eval"], str):
        words["eval"] = register_rows("eval", words["eval"])
    if (config := words.pop("peft_config", None)) is not None:
        words |= lora_settings(config)
    tokenizer, model = words.pop("tokenizer", None), words.get("policy.model")
    if isinstance(model, Path):
        words["policy.model"] = str(model)
    elif model is not None and not isinstance(model, str):
        words["policy.model"] = register_model(model, tokenizer)
    elif tokenizer is not None:
        raise ConfigError("tokenizer goes with a model that is given as an object; a name or a folder brings its own")
    return words


def names_of_objects(objects: Settings) -> list[str]:
    """Return the names of the Python objects with which a run is resumed or loaded."""
    names: list[str] = []
    for setting, value in objects.items():
        if setting == "reward":
            names += object_names(register_rewards(value))
        elif setting in ("rows", "eval"):
            names.append(register_rows(setting, value))
        elif setting in CALLABLE_SETTINGS:
            names += object_names([register_callables(setting, value)])
        elif setting == "task" or setting in CHOICES:
            cls = value if isinstance(value, type) else type(value)
            register_class(setting, cls)
            names.append(name_of(cls))
        else:
            known = ["rows", "eval", "reward", *CALLABLE_SETTINGS, "task", *CHOICES]
            raise ConfigError(
                f"{setting}: no such object of a run. There are {', '.join(known)}.{nearest(setting, known)}"
            )
    return names


def row_needs(loss: Any, update: Any) -> dict[str, int]:
    """Return required settings: samples per prompt of offline data; one epoch and mini-batch of full-batch updates."""
    samples = {"samples": RESPONSES_PER_PROMPT[loss.data]} if loss.data in RESPONSES_PER_PROMPT else {}
    return samples | ({"epochs": 1, "minibatches": 1} if update.full_batch else {})


def check_run_length(settings: Settings) -> None:
    """Raise ConfigError if both a number of steps and a number of epochs are given."""
    steps, epochs = settings.get("steps"), settings.get("data_epochs")
    if steps is not None and epochs is not None:
        raise ConfigError(
            f"--steps {steps} and --data-epochs {epochs} both set the length of the run: give one of them"
        )


def canonical_key(key: str) -> str:
    """Normalize a key: max-norm to max_norm, and short flags to full ones (lr to update.lr)."""
    axis, dot, field = key.partition(".")
    key = f"{axis}.{field.replace('-', '_')}" if dot else axis.replace("-", "_")
    return SHORT.get(key, key)


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a config.json to settings: {"loss": {"name": "clipped", "low": 0.1}} -> loss, loss.low."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if key == "ranks" and isinstance(value, Mapping) and value:
            flat |= {f"ranks.{name}": field for name, field in value.items()}
            continue
        if key != "task" and key not in CHOICES:
            flat[key] = value
            continue
        fields = value if isinstance(value, Mapping) else {"name": value}
        if not isinstance(fields.get("name"), str):
            raise ConfigError(f"--{key} is {value!r:.80}: it has to be a name, or an object with a name and its fields")
        flat[key] = fields["name"]
        flat |= {f"{key}.{k}" if key != "task" else k: v for k, v in fields.items() if k != "name"}
    return flat


def config_from(nested: Mapping[str, Any]) -> Config:
    """Return the config that `Config.to_dict` wrote."""
    settings = flatten(nested)
    return resolve(settings.pop("task"), settings, recorded=True).config()


def _choose(axis: str, now: Any, layer: Settings, preset: Settings) -> Any:
    """Return the choice of an axis after a layer, which may name another choice or set fields."""
    named = layer.get(axis)
    if isinstance(named, str):
        cls = find_choice(axis, CHOICES[axis], named)
        _check_choice_class(axis, named, cls)
        if cls is not type(now):
            now = build(axis, cls, _preset_fields(cls, preset))
    elif named is not None:
        cls = named if isinstance(named, type) else type(named)
        _check_choice_class(axis, named, cls)
        if cls not in CHOICES[axis]:
            register_class(axis, cls)
        now = build(axis, named, _preset_fields(named, preset)) if isinstance(named, type) else named
    return _with_fields(axis, now, layer)


def _with_fields(axis: str, now: Any, layer: Settings) -> Any:
    """Return this choice, or the settings of ranks, with the fields that a layer sets."""
    values = {k.split(".", 1)[1]: v for k, v in layer.items() if k.startswith(f"{axis}.")}
    if not values:
        return now
    refuse_unknown_fields(axis, type(now), values)
    settings = settings_of(type(now), axis)
    return replace(now, **{name: settings[name].check(value) for name, value in values.items()})


def _preset_fields(cls: type, preset: Settings) -> dict[str, Any]:
    """Return the fields that a preset sets for a choice."""
    return {k.split(".")[1]: v for k, v in preset.items() if k.startswith(f"{name_of(cls)}.")}


def _check_choice_class(axis: str, name: Any, cls: Any) -> None:
    """Raise ConfigError if a user's class is not a valid choice for this axis."""
    base = CHOICES[axis][0].__mro__[1]
    if not (isinstance(cls, type) and is_dataclass(cls) and issubclass(cls, base)):
        derived = "" if base is object else f" that derives from {base.__module__}.{base.__name__}"
        raise ConfigError(
            f"--{axis} {name}: a choice of your own must be a frozen dataclass{derived}, like those on the menu"
        )


# ---- the task -------------------------------------------------------------------------------------------------


def find_task(task: Any, rewarded: bool = False) -> tuple[Any, Settings]:
    """Return a task's class or instance by name, and the settings that NAME:SOURCE implies.

    config.json stores the name and the field `source` separately. `rewarded`: the settings contain rewards.
    """
    if not isinstance(task, str):
        return task_from_object(task, rewarded)
    if task.startswith("python:"):
        return _own_task(task), {}
    if task.startswith("object:"):
        return find_object(task, "task"), {}
    name, colon, source = task.partition(":")
    cls = find_named("TASK", name, {name_of(cls): cls for cls in TASKS}, "task")
    if colon and "source" not in hyperparameters(cls):
        flags = ", ".join(setting.flag for setting in settings_of(cls).values())
        raise ConfigError(f"TASK {task}: {name} takes no SOURCE; its settings are flags: {flags}")
    return cls, {"source": source} if colon else {}


def _own_task(name: str) -> Any:
    """Load a user's task, a class or an instance. An instance is recorded as its class and its fields."""
    task = load_python("TASK", name)
    cls = task if isinstance(task, type) else type(task)
    if not (is_dataclass(cls) and issubclass(cls, BaseTask) and "default" in cls.presets):
        raise ConfigError(
            f"TASK {name}: a task of your own is a frozen dataclass that derives from ascent.SmallTask or "
            "ascent.TextTask and has `presets`, or an instance of such a class"
        )
    if task is not cls and cls.__module__.startswith("ascent_user_"):
        load_python("TASK", f"{name.rpartition(':')[0]}:{cls.__name__}")
    return task


def find_choice(axis: str, menu: tuple[type, ...], name: str) -> Any:
    """Return the class of this name on a menu, or a user's class from python:FILE:NAME."""
    if name.startswith("python:"):
        return load_python(f"--{axis}", name)
    if name.startswith("object:"):
        return find_object(name, axis)
    return find_named(f"--{axis}", name, {name_of(cls): cls for cls in menu}, "choice")


def build(axis: str, cls: type, settings: Mapping[str, Any]) -> Any:
    """Return a choice with these fields; raise ConfigError for unknown ones."""
    refuse_unknown_fields(axis, cls, settings)
    return cls(**settings)


def refuse_unknown_fields(axis: str, cls: type, names: Iterable[str]) -> None:
    """Raise ConfigError if the class has no field of one of these names."""
    known = hyperparameters(cls)
    for name in names:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            hint = nearest(name, known).replace("mean ", f"mean --{axis}.").replace("_", "-")
            raise ConfigError(f"--{axis}.{name.replace('_', '-')}: {name_of(cls)} has no such field; {has}.{hint}")


def spell(choice: Any, every: bool = False) -> str:
    """Format a choice as clipped(low=0.2, high=0.28), with fields that differ from their defaults, or all fields."""
    values = {f.name: getattr(choice, f.name) for f in fields(choice) if every or getattr(choice, f.name) != f.default}
    shown = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()]
    name = name_of(choice)
    name = object_label(name) if name.startswith("object:") else name
    return name + (f"({', '.join(shown)})" if shown else "")


def row_label(algorithm: Algorithm) -> str:
    """Return the nearest named algorithm and the changes to it, ignoring learning rates: dr-grpo+annealed."""
    critic: Any = algorithm.critic
    pace = {name: f.default for name, f in hyperparameters(type(critic)).items() if name in hyperparameters(Adam)}
    algorithm = replace(algorithm, critic=replace(critic, **{k: v for k, v in pace.items() if v is not MISSING}))

    def changes(row: Algorithm) -> list[str]:
        axes = (f.name for f in fields(Algorithm) if f.name != "update")
        changed = [spell(getattr(algorithm, a)) for a in axes if getattr(row, a) != getattr(algorithm, a)]
        return changed + [name_of(algorithm.update)] * (type(row.update) is not type(algorithm.update))

    row = min(ALGORITHMS, key=lambda name: len(changes(ALGORITHMS[name])))
    return "+".join([row, *changes(ALGORITHMS[row])])


def find_named(flag: str, name: str, known: Mapping[str, Any], kind: str) -> Any:
    """Return the value of a name; raise ConfigError with the known names if it is unknown."""
    if name not in known:
        raise ConfigError(f"{flag} {name}: no such {kind}. There are {', '.join(known)}.{nearest(str(name), known)}")
    return known[name]

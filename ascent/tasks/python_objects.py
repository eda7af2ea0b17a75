"""Objects of Python in the place of names: reward functions, rows, choices and tasks that lie in no file.

Settings are text, and a run's settings are a file. So an object gets a name, object:NAME@HASH, which stands in
config.json. The object itself stays in this process, in `KNOWN`. A run folder never holds it, only what it looked like:
its source text, what it holds and its hash. Whoever resumes the run gives the object again, and it has to be the same.

The hash covers the text of the code without its comments, and the values that it holds: closures, defaults, and globals
of its own module. An object that cannot be compared (a client, a model) counts by its type alone.
"""

import ast
import difflib
import functools
import hashlib
import inspect
import json
import linecache
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ascent.core.errors import ConfigError
from ascent.tasks.base import error_line

OBJECTS: dict[str, Any] = {}
"""The objects of this process, by their names."""
OBJECT_DESCRIPTIONS: dict[str, dict[str, Any]] = {}
"""What is written down of each."""
OBJECT_PREFIX = "object:"
MAX_SOURCE_CHARACTERS = 20_000
"""Characters of a source text that are written down."""


def register_object(setting: str, value: Any, about: dict[str, Any] | None = None) -> str:
    """The name of an object, under which it is known from here on. `setting`: what it was given as."""
    described = {"setting": setting, **(about or describe_object(value))}
    label = described["name"].rpartition(".")[2].strip("<>")
    name = f"{OBJECT_PREFIX}{label}@{described['hash'][:12]}"
    OBJECTS[name] = value
    OBJECT_DESCRIPTIONS[name] = described
    return name


def find_object(name: str, flag: str) -> Any:
    if name not in OBJECTS:
        raise ConfigError(
            f"{flag} {object_label(name)}: it was given in Python, and this process does not have it. Give it again: "
            f"ascent.resume(folder, {flag.removeprefix('--').lower()}=…), or ascent.load with the same"
        )
    return OBJECTS[name]


def object_label(name: str) -> str:
    """object:brevity@1f2e -> brevity."""
    return name.removeprefix(OBJECT_PREFIX).rpartition("@")[0]


def register_class(setting: str, cls: type) -> None:
    """Name a user's own class, by which its instances are written down."""
    if "__ascent_source__" not in vars(cls):
        cls.__ascent_source__ = register_object(setting, cls)  # type: ignore[attr-defined]


def pickle_object(name: str, flag: str) -> bytes:
    """An object as a grading process gets it; refused with what to do if it cannot be sent."""
    import cloudpickle

    value = find_object(name, flag)
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        holds = OBJECT_DESCRIPTIONS[name].get("holds") or {}
        held = f" It holds {', '.join(f'{k} ({v})' for k, v in holds.items())}." if holds else ""
        raise ConfigError(
            f"{flag} {object_label(name)} cannot be pickled for the reward workers: {error_line(error)}.{held} Create "
            "what cannot be pickled inside the function, or run the function in the main process with "
            "ascent.Reward(function, in_process=True)"
        ) from None


# ---- objects of a run ---------------------------------------------------------------------------------------


def object_names(settings: Any) -> Iterator[str]:
    """The names of objects anywhere in settings, also with a weight before them."""
    if isinstance(settings, Mapping):
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        for value in settings:
            yield from object_names(value)
    elif isinstance(settings, str) and (found := re.fullmatch(r"(?:[^:]*\*)?(object:.+)", settings)):
        yield found[1]


def describe_objects(settings: Any) -> dict[str, dict[str, Any]]:
    """What to write down of the objects that settings name."""
    return {
        name: OBJECT_DESCRIPTIONS[name] for name in dict.fromkeys(object_names(settings)) if name in OBJECT_DESCRIPTIONS
    }


def match_objects(recorded: Mapping[str, Any], given: Sequence[str], anyway: bool) -> dict[str, str]:
    """Find the objects that a run was made with among those of this process, or refuse; `given` are those given now.

    One that differs is refused with the difference, or taken `anyway`: returned are the names of such, old and new.
    """
    changed: dict[str, str] = {}
    left = [name for name in given if name not in recorded]
    about = {name: was for name, was in recorded.items() if isinstance(was, Mapping)}
    for name, was in about.items():
        setting, label = was.get("setting"), object_label(name)
        others = [other for other in left if OBJECT_DESCRIPTIONS[other]["setting"] == setting]
        others = [other for other in others if object_label(other) == label] or others
        if name in given or (name in OBJECTS and not others):
            continue
        if not others:
            asked = ", ".join(f"{about[n].get('setting')}={object_label(n)}" for n in about if n not in OBJECTS)
            raise ConfigError(
                f"this run was made with objects of Python, which are not in its folder. Give them again: {asked}"
            )
        left.remove(others[0])
        if not anyway:
            raise ConfigError(
                f"{setting} {label} is not what this run was made with:\n{compare_objects(name, others[0], was)}\nGive "
                "the same one, or anyway=True to continue with this one; the run will say so"
            )
        changed[name] = others[0]
    return changed


def replace_object_names(settings: Any, names: Mapping[str, str]) -> Any:
    """Settings in which objects have other names."""
    if isinstance(settings, Mapping):
        return {key: replace_object_names(value, names) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [replace_object_names(value, names) for value in settings]
    if isinstance(settings, str):
        for old, new in names.items():
            settings = settings.removesuffix(old) + new if settings.endswith(old) else settings
    return settings


def compare_objects(old: str, new: str, was: Mapping[str, Any]) -> str:
    """How an object differs from the one that was written down, line by line."""
    label, now = object_label(old), OBJECT_DESCRIPTIONS[new]
    lines = difflib.unified_diff(
        str(was.get("source") or "").splitlines(),
        str(now.get("source") or "").splitlines(),
        f"{label} of the run",
        f"{label} now",
        lineterm="",
    )
    said = list(lines)
    for key in ("holds", "rows", "columns"):
        before, after = was.get(key), now.get(key)
        if before != after and isinstance(before, Mapping) and isinstance(after, Mapping):
            names = [n for n in {**before, **after} if before.get(n) != after.get(n)]
            said += [f"{n}: {before.get(n, 'nothing')} in the run, {after.get(n, 'nothing')} now" for n in names]
        elif before != after:
            said.append(f"{key}: {before} in the run, {after} now")
    return "\n".join(said) or "what it holds differs, in a way that its text does not show"


# ---- what an object looks like ------------------------------------------------------------------------------


def describe_object(value: Any) -> dict[str, Any]:
    """What is written down of an object: its qualified name, its source text, what it holds, and a hash of it all."""
    inner = getattr(value, "function", value) if is_dataclass(value) and not isinstance(value, type) else value
    while isinstance(inner, functools.partial):
        inner = inner.func
    kind = inner if isinstance(inner, type | FunctionType | MethodType | BuiltinFunctionType) else type(inner)
    name = f"{kind.__module__}.{kind.__qualname__}".replace("<locals>.", "")
    return {
        "name": name,
        "source": (_source(kind) or "")[:MAX_SOURCE_CHARACTERS] or None,
        "holds": {key: _short(held) for key, held in _held(inner).items()},
        "hash": hashlib.sha256(json.dumps(_identity(value, set()), sort_keys=True).encode()).hexdigest(),
    }


def _short(value: Any) -> str:
    if isinstance(value, ModuleType | type | FunctionType | BuiltinFunctionType):
        return getattr(value, "__qualname__", value.__name__)
    plain = isinstance(value, str | int | float | bool | list | tuple | dict | set | None)
    return f"{value!r:.100}" if plain else type(value).__name__


def _held(value: Any) -> dict[str, Any]:
    """Closures, defaults and globals of a function that belong to its own module; the fields of an instance."""
    value = value.__func__ if isinstance(value, MethodType) else value
    if not isinstance(value, FunctionType):
        return {} if isinstance(value, type) or not hasattr(value, "__dict__") else dict(vars(value))
    closure = inspect.getclosurevars(value)
    defaults = {name: p.default for name, p in inspect.signature(value).parameters.items() if p.default is not p.empty}
    return {**closure.globals, **closure.nonlocals, **defaults}


def _identity(value: Any, seen: set[int]) -> Any:
    """A value as JSON that is the same for the same value in another process."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | complex | bytes):
        return repr(value)
    if id(value) in seen:
        return "…"
    seen = seen | {id(value)}
    if isinstance(value, list | tuple):
        return [_identity(each, seen) for each in value]
    if isinstance(value, Mapping):
        return sorted(([repr(key), _identity(each, seen)] for key, each in value.items()), key=lambda pair: pair[0])
    if isinstance(value, set | frozenset):
        return sorted(repr(each) for each in value)
    if isinstance(value, functools.partial):
        return ["partial", *(_identity(part, seen) for part in (value.func, value.args, value.keywords))]
    if isinstance(value, MethodType):
        return ["method", _identity(value.__self__, seen), _identity(value.__func__, seen)]
    if isinstance(value, ModuleType):
        return ["module", value.__name__]
    if isinstance(value, type | FunctionType):
        return _code_identity(value, seen)
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return ["array", str(value.dtype), str(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    kind = type(value)
    if _is_own(kind) or (is_dataclass(kind) and kind.__module__.startswith("ascent")):
        return [
            _identity(kind, seen),
            {k: _identity(v, seen) for k, v in sorted(getattr(value, "__dict__", {}).items())},
        ]
    return ["object", getattr(value, "__qualname__", kind.__qualname__)]


def _code_identity(value: Any, seen: set[int]) -> Any:
    """A function or a class: its text, and what it holds; by name alone where a library brings it."""
    name = value.__qualname__.replace("<locals>.", "")
    if not _is_own(value):
        return ["code", value.__module__, name]
    text = _source(value, plain=True)
    if isinstance(value, type):
        methods = {k: f for k, f in vars(value).items() if isinstance(f, FunctionType) and _lines(f)}
        held = {k: _identity(_held(method), seen) for k, method in sorted(methods.items())}
        shape = {k: str(v) for k, v in sorted(getattr(value, "__annotations__", {}).items())}
        shape |= {f.name: repr(f.default) for f in fields(value)} if is_dataclass(value) else {}
        return ["class", text or name, shape, [base.__qualname__ for base in value.__bases__], held]
    return ["function", text or _bytecode(value.__code__), _identity(_held(value), seen)]


def _is_own(value: Any) -> bool:
    """Is this code of the user's, and not of an installed library? What __main__ holds is, whatever file started it."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    file = (getattr(module, "__file__", None) or "") if module is not sys.modules["__main__"] else ""
    return (
        "site-packages" not in file
        and not (module is not None and module.__name__.startswith("ascent."))
        and (getattr(value, "__module__", "") not in sys.stdlib_module_names)
    )


def _bytecode(code: CodeType) -> list[Any]:
    """For code without a text: what it does, in the bytecode of this version of Python."""
    constants = [_bytecode(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return [sys.version_info[:2], code.co_code.hex(), constants, list(code.co_names)]


def _lines(function: Any) -> list[str]:
    """The file or the notebook's cell that a function is from."""
    code = getattr(function, "__code__", None)
    return [] if code is None else linecache.getlines(code.co_filename, getattr(function, "__globals__", None))


def _source(value: Any, plain: bool = False) -> str | None:
    """The text of a function, a lambda or a class alone; `plain`: without comments, in one spelling."""
    value = value.__func__ if isinstance(value, MethodType) else value
    functions = [value] if isinstance(value, FunctionType) else []
    if isinstance(value, type):
        functions = [f for f in vars(value).values() if isinstance(f, FunctionType) and _lines(f)]
    if not functions or not (lines := _lines(functions[0])):
        return None
    try:
        tree = ast.parse(text := "".join(lines))
    except SyntaxError:  # a cell with magics
        return None
    node = _class_node(tree, value, functions[0]) if isinstance(value, type) else _function_node(tree, value)
    if node is None:
        return None
    if not plain:
        return ast.get_source_segment(text, node)
    if hasattr(node, "decorator_list"):
        node.decorator_list = []
    return ast.unparse(node)


def _function_node(tree: ast.AST, function: FunctionType) -> Any:
    code = function.__code__
    if code.co_name != "<lambda>":
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if first == code.co_firstlineno:
                    return node
        return None
    places = [(line, at) for line, _, at, end in code.co_positions() if line and at is not None and end and end > at]
    inside = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda)
        and all(
            (node.body.lineno, node.body.col_offset) <= place < (node.body.end_lineno, node.body.end_col_offset)
            for place in places
        )
    ]
    return inside[-1] if inside else None  # the innermost: `walk` goes from the outside in


def _class_node(tree: ast.AST, cls: type, method: FunctionType) -> Any:
    line = method.__code__.co_firstlineno
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ClassDef)
            and node.name == cls.__name__
            and node.lineno <= line <= (node.end_lineno or 0)
        ):
            return node
    return None

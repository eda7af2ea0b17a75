"""Registry of Python objects in settings: reward functions, rows, choices and tasks that are not in a file.

Settings are text and are saved to a file. So an object is registered under a name, object:NAME@HASH, which config.json
contains. The object itself stays in this process, in `OBJECTS`. A run folder only has its description: source code,
captured values and hash. To resume the run, the same object must be passed again.

The hash covers the code without comments and the captured values: closures, defaults, and globals of the same module.
Objects that cannot be compared (a client, a model) are hashed by their type.
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
"""Registered objects by name."""
OBJECT_DESCRIPTIONS: dict[str, dict[str, Any]] = {}
"""Description of each registered object, which is recorded in the run folder."""
OBJECT_PREFIX = "object:"
MAX_SOURCE_CHARACTERS = 20_000
"""Maximum number of characters of source code in a description."""


def register_object(setting: str, value: Any, description: dict[str, Any] | None = None) -> str:
    """Register an object that is the value of `setting`, and return its name."""
    description = {"setting": setting, **(description or describe_object(value))}
    label = description["name"].rpartition(".")[2].strip("<>")
    name = f"{OBJECT_PREFIX}{label}@{description['hash'][:12]}"
    OBJECTS[name] = value
    OBJECT_DESCRIPTIONS[name] = description
    return name


def find_object(name: str, flag: str) -> Any:
    if name not in OBJECTS:
        raise ConfigError(
            f"{flag} {object_label(name)} is a Python object that this process does not have. Pass it again: "
            f"ascent.resume(folder, {flag.removeprefix('--').lower()}=…), or ascent.load with the same argument"
        )
    return OBJECTS[name]


def object_label(name: str) -> str:
    """Return the label in a name: brevity for object:brevity@1f2e."""
    return name.removeprefix(OBJECT_PREFIX).rpartition("@")[0]


def register_class(setting: str, cls: type) -> None:
    """Register a user-defined class, so that settings can name its instances."""
    if "__ascent_source__" not in vars(cls):
        cls.__ascent_source__ = register_object(setting, cls)  # type: ignore[attr-defined]


def pickle_object(name: str, flag: str) -> bytes:
    """Pickle an object for worker processes; raise ConfigError if that is impossible."""
    import cloudpickle

    value = find_object(name, flag)
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        captured = OBJECT_DESCRIPTIONS[name].get("holds") or {}
        note = f" It captures {', '.join(f'{k} ({v})' for k, v in captured.items())}." if captured else ""
        raise ConfigError(
            f"{flag} {object_label(name)} cannot be pickled for the reward workers: {error_line(error)}.{note} Create "
            "what cannot be pickled inside the function, or run the function in the main process with "
            "ascent.Reward(function, in_process=True)"
        ) from None


# ---- objects of a run ---------------------------------------------------------------------------------------


def object_names(settings: Any) -> Iterator[str]:
    """Yield the names of objects anywhere in settings, without their weights."""
    if isinstance(settings, Mapping):
        settings = list(settings.values())
    if isinstance(settings, list | tuple):
        for value in settings:
            yield from object_names(value)
    elif isinstance(settings, str) and (match := re.fullmatch(r"(?:[^:]*\*)?(object:.+)", settings)):
        yield match[1]


def describe_objects(settings: Any) -> dict[str, dict[str, Any]]:
    """What to write down of the objects that settings name."""
    return {
        name: OBJECT_DESCRIPTIONS[name] for name in dict.fromkeys(object_names(settings)) if name in OBJECT_DESCRIPTIONS
    }


def match_objects(recorded: Mapping[str, Any], passed: Sequence[str], anyway: bool) -> dict[str, str]:
    """Match the objects of a recorded run with `passed`, those passed now, and with those of this process.

    An object that differs is an error that shows the difference; with `anyway` it is accepted. Return the old and new
    names of the accepted ones.
    """
    changed: dict[str, str] = {}
    unmatched = [name for name in passed if name not in recorded]
    descriptions = {name: old for name, old in recorded.items() if isinstance(old, Mapping)}
    for name, old in descriptions.items():
        setting, label = old.get("setting"), object_label(name)
        others = [other for other in unmatched if OBJECT_DESCRIPTIONS[other]["setting"] == setting]
        others = [other for other in others if object_label(other) == label] or others
        if name in passed or (name in OBJECTS and not others):
            continue
        if not others:
            missing = [name for name in descriptions if name not in OBJECTS]
            arguments = ", ".join(f"{descriptions[n].get('setting')}={object_label(n)}" for n in missing)
            raise ConfigError(
                f"this run was started with Python objects, which are not in its folder. Pass them again: {arguments}"
            )
        unmatched.remove(others[0])
        if not anyway:
            raise ConfigError(
                f"{setting} {label} differs from that of this run:\n{compare_objects(name, others[0], old)}\nPass the "
                "same one, or anyway=True to continue with this one, which the run will record"
            )
        changed[name] = others[0]
    return changed


def replace_object_names(settings: Any, names: Mapping[str, str]) -> Any:
    """Replace names of objects in settings."""
    if isinstance(settings, Mapping):
        return {key: replace_object_names(value, names) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [replace_object_names(value, names) for value in settings]
    if isinstance(settings, str):
        for old, new in names.items():
            settings = settings.removesuffix(old) + new if settings.endswith(old) else settings
    return settings


def compare_objects(old: str, new: str, recorded: Mapping[str, Any]) -> str:
    """Return the difference between an object and its recorded description."""
    label, current = object_label(old), OBJECT_DESCRIPTIONS[new]
    lines = difflib.unified_diff(
        str(recorded.get("source") or "").splitlines(),
        str(current.get("source") or "").splitlines(),
        f"{label} of the run",
        f"{label} now",
        lineterm="",
    )
    differences = list(lines)
    for key in ("holds", "rows", "columns"):
        before, after = recorded.get(key), current.get(key)
        if before != after and isinstance(before, Mapping) and isinstance(after, Mapping):
            names = [n for n in {**before, **after} if before.get(n) != after.get(n)]
            differences += [f"{n}: {before.get(n, 'nothing')} in the run, {after.get(n, 'nothing')} now" for n in names]
        elif before != after:
            differences.append(f"{key}: {before} in the run, {after} now")
    return "\n".join(differences) or "captured values differ in a way that their text does not show"


# ---- descriptions of objects ------------------------------------------------------------------------------


def describe_object(value: Any) -> dict[str, Any]:
    """Describe an object by its qualified name, source code, captured values, and a hash of them."""
    inner = getattr(value, "function", value) if is_dataclass(value) and not isinstance(value, type) else value
    while isinstance(inner, functools.partial):
        inner = inner.func
    kind = inner if isinstance(inner, type | FunctionType | MethodType | BuiltinFunctionType) else type(inner)
    name = f"{kind.__module__}.{kind.__qualname__}".replace("<locals>.", "")
    return {
        "name": name,
        "source": (_source(kind) or "")[:MAX_SOURCE_CHARACTERS] or None,
        "holds": {key: _short_text(captured) for key, captured in _captured_values(inner).items()},
        "hash": hashlib.sha256(json.dumps(_identity(value, set()), sort_keys=True).encode()).hexdigest(),
    }


def _short_text(value: Any) -> str:
    if isinstance(value, ModuleType | type | FunctionType | BuiltinFunctionType):
        return getattr(value, "__qualname__", value.__name__)
    is_plain = isinstance(value, str | int | float | bool | list | tuple | dict | set | None)
    return f"{value!r:.100}" if is_plain else type(value).__name__


def _captured_values(value: Any) -> dict[str, Any]:
    """Return a function's closure, defaults and globals of its module; of an instance, its attributes."""
    value = value.__func__ if isinstance(value, MethodType) else value
    if not isinstance(value, FunctionType):
        return {} if isinstance(value, type) or not hasattr(value, "__dict__") else dict(vars(value))
    closure = inspect.getclosurevars(value)
    defaults = {name: p.default for name, p in inspect.signature(value).parameters.items() if p.default is not p.empty}
    return {**closure.globals, **closure.nonlocals, **defaults}


def _identity(value: Any, seen: set[int]) -> Any:
    """Encode a value as JSON that is equal for equal values in any process."""
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
    if _is_user_code(kind) or (is_dataclass(kind) and kind.__module__.startswith("ascent")):
        return [
            _identity(kind, seen),
            {k: _identity(v, seen) for k, v in sorted(getattr(value, "__dict__", {}).items())},
        ]
    return ["object", getattr(value, "__qualname__", kind.__qualname__)]


def _code_identity(value: Any, seen: set[int]) -> Any:
    """Encode a function or class by its code and captured values; if it is from a library, by its name."""
    name = value.__qualname__.replace("<locals>.", "")
    if not _is_user_code(value):
        return ["code", value.__module__, name]
    text = _source(value, normalized=True)
    if isinstance(value, type):
        methods = {k: f for k, f in vars(value).items() if isinstance(f, FunctionType) and _lines(f)}
        captured = {k: _identity(_captured_values(method), seen) for k, method in sorted(methods.items())}
        shape = {k: str(v) for k, v in sorted(getattr(value, "__annotations__", {}).items())}
        shape |= {f.name: repr(f.default) for f in fields(value)} if is_dataclass(value) else {}
        return ["class", text or name, shape, [base.__qualname__ for base in value.__bases__], captured]
    return ["function", text or _bytecode(value.__code__), _identity(_captured_values(value), seen)]


def _is_user_code(value: Any) -> bool:
    """Return whether code is the user's, not an installed library's. Code of __main__ always is."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    file = (getattr(module, "__file__", None) or "") if module is not sys.modules["__main__"] else ""
    return (
        "site-packages" not in file
        and not (module is not None and module.__name__.startswith("ascent."))
        and (getattr(value, "__module__", "") not in sys.stdlib_module_names)
    )


def _bytecode(code: CodeType) -> list[Any]:
    """Encode code whose source is unavailable by its bytecode and the version of Python."""
    constants = [_bytecode(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return [sys.version_info[:2], code.co_code.hex(), constants, list(code.co_names)]


def _lines(function: Any) -> list[str]:
    """Return the lines of the file or notebook cell that defines a function."""
    code = getattr(function, "__code__", None)
    return [] if code is None else linecache.getlines(code.co_filename, getattr(function, "__globals__", None))


def _source(value: Any, normalized: bool = False) -> str | None:
    """Return the source code of a function, lambda or class; `normalized`: without comments and formatting."""
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
    if not normalized:
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
    positions = [(line, at) for line, _, at, end in code.co_positions() if line and at is not None and end and end > at]
    lambdas = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda)
        and all(
            (node.body.lineno, node.body.col_offset) <= position < (node.body.end_lineno, node.body.end_col_offset)
            for position in positions
        )
    ]
    return lambdas[-1] if lambdas else None  # `walk` goes from the outside in, so the last one is the innermost


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

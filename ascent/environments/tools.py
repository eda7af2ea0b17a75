"""Tools: Python functions that a language model calls.

    def search(words: str, max_pages: int = 3) -> list[str]:
        '''Find pages.'''

A tool's schema is made from its signature and its docstring (google convention) in the training process. `Tools` is
the environment of an episode, in the episode's own process: it parses the calls of a turn, runs them in order, and
returns a message for each. If a call fails (it does not parse, the tool does not exist, an argument is missing, the
tool raises), the message is the error, so that the model can try again. A turn without a call ends the episode.
"""

import asyncio
import functools
import inspect
import json
import random
import re
import traceback
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ascent.core.errors import ConfigError
from ascent.environments import python_tool
from ascent.environments.calculator import calculator
from ascent.environments.tool_call_formats import FORMATS, Schema, ToolCall, json_type, parameter_schemas, schema_types
from ascent.sandbox.isolation import IsolationError
from ascent.sandbox.sandbox import SandboxError
from ascent.sandbox.sandboxed_reward import SandboxSettings
from ascent.tasks.base import error_line
from ascent.tasks.environment import Environment, Step
from ascent.tasks.python_objects import OBJECT_PREFIX, find_object
from ascent.tasks.text.text_task import Message, Problem
from ascent.tasks.user_files import load_python

BUILT_IN: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python_tool.python}
MAX_RESULT_CHARACTERS = 4_000
"""Longer results are truncated."""
TOOL_COUNT_NAMES = ("calls", "unparsed", "failed", "repeated")
"""Counted in each turn: calls, calls that do not parse, calls that failed, and repetitions of earlier calls."""


class Tools(Environment):
    """An episode with tools.

    The reason of a step has the counts of its turn, for the records: `calls=2 unparsed=0 failed=1 repeated=0`. Those
    of the episode so far are in `counts`.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        schemas: Sequence[Schema],
        format_name: str = "plain",
        max_result_characters: int = MAX_RESULT_CHARACTERS,
        sandbox: Sequence[Any] = (),
    ):
        """`format_name`: the tool-call format of the model. `sandbox`: `SandboxSettings` of the tool `python`."""
        self.session = python_tool.PythonSession(SandboxSettings(*sandbox))
        functions = [self.session.run if function is python_tool.python else function for function in functions]
        self.functions = {schema["function"]["name"]: f for f, schema in zip(functions, schemas, strict=True)}
        self.schemas = {schema["function"]["name"]: schema["function"].get("parameters", {}) for schema in schemas}
        self.format, self.parameter_schemas = FORMATS[format_name], parameter_schemas(schemas)
        self.max_result_characters = max_result_characters
        self._runner: asyncio.Runner | None = None
        self._reset()

    def _reset(self) -> None:
        self.counts: Counter[str] = Counter()
        self._previous_calls: set[str] = set()

    def begin(self, problem: Problem, rng: random.Random) -> str | None:
        self._reset()
        return None

    def step(self, action: str) -> Step:
        calls = self.format.parse_turn(action, self.parameter_schemas)
        if not calls:
            return Step(done=True, reason="a turn without a call")
        turn_counts = Counter(calls=len(calls))
        self.session.begin_turn()
        results = [self._execute(call, turn_counts) for call in calls]
        self.counts += turn_counts
        reason = " ".join(f"{name}={turn_counts[name]}" for name in TOOL_COUNT_NAMES)
        return Step(self._messages(calls, results), reason=reason)

    def close(self) -> None:
        self.session.close()
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _execute(self, call: ToolCall, turn_counts: Counter[str]) -> str:
        """Run a call and return its result or error as text."""
        if call.error:
            turn_counts["unparsed"] += 1
            return f"error: {call.error}"
        try:
            key = json.dumps([call.name, call.arguments], sort_keys=True)
            turn_counts["repeated"] += key in self._previous_calls
            self._previous_calls.add(key)
            error_text = self._check_call(call)
            if not error_text:
                return self._truncate(as_text(self._run(call)))
        except (SandboxError, IsolationError):  # not the model's fault
            raise
        except (Exception, SystemExit) as error:
            error_text = traceback.format_exception_only(type(error), error)[-1].strip()
        turn_counts["failed"] += 1
        return self._truncate(f"error: {error_text}")

    def _check_call(self, call: ToolCall) -> str:
        if call.name not in self.functions:
            return f"there is no function {call.name[:60]!r}. There are: {', '.join(self.functions)}"
        return check_arguments(call.arguments, self.schemas[call.name])

    def _run(self, call: ToolCall) -> Any:
        result = self.functions[call.name](**call.arguments)
        if inspect.isawaitable(result):
            self._runner = self._runner or asyncio.Runner()  # one loop for the episode, so that clients stay usable
            result = self._runner.run(_await(result))
        return result

    def _truncate(self, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()
        if len(text) <= self.max_result_characters:
            return text
        shown = text[: self.max_result_characters]
        return f"{shown}… (cut: {self.max_result_characters:,} of {len(text):,} characters)"

    def _messages(self, calls: Sequence[ToolCall], results: Sequence[str]) -> list[Message]:
        pairs = list(zip(calls, results, strict=True))
        if self.format.role == "user":  # templates without tools often refuse two messages of the user in a row
            lines = [f"{call.name}: {result}" if call.name else result for call, result in pairs]
            return [{"role": "user", "content": "\n".join(lines)}]
        return [
            {"role": "tool", "name": call.name, "content": result} | ({"tool_call_id": call.id} if call.id else {})
            for call, result in pairs
        ]


def parse_tool_counts(reason: str) -> dict[str, int]:
    """Return the counts in the reason of a step of `Tools`; empty for other reasons."""
    pairs = [part.partition("=") for part in reason.split()]
    are_counts = all(name in TOOL_COUNT_NAMES and count.isdigit() for name, _, count in pairs)
    return {name: int(count) for name, _, count in pairs} if are_counts else {}


async def _await(result: Any) -> Any:
    return await result


def as_text(result: Any) -> str:
    """Return a result as text: a string unchanged, anything else as JSON."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


# ---- arguments ----------------------------------------------------------------------------------------------


def check_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return the first error in the arguments of a call; empty if they fit the schema."""
    properties = schema.get("properties", {})
    if missing := [name for name in schema.get("required", ()) if name not in arguments]:
        return f"the argument {missing[0]} is missing"
    if unknown := [name for name in arguments if name not in properties]:
        return f"there is no argument {unknown[0][:60]!r}. There are: {', '.join(properties) or 'none'}"
    errors = (_check_value(name, value, properties[name]) for name, value in arguments.items())
    return next(filter(None, errors), "")


def _check_value(name: str, value: Any, schema: Mapping[str, Any]) -> str:
    if value is None and schema.get("nullable"):
        return ""
    types, value_type = schema_types(schema), json_type(value)
    if types and value_type not in types and not (value_type == "integer" and "number" in types):
        return f"the argument {name} has to be {' or '.join(sorted(types))}, and {_short(value)} is {value_type}"
    if "enum" in schema and value not in schema["enum"]:
        return f"the argument {name} has to be one of {', '.join(map(_short, schema['enum']))}, and is {_short(value)}"
    if "anyOf" in schema:
        errors = [_check_value(name, value, option) for option in schema["anyOf"]]
        return "" if "" in errors else errors[0]
    parts: list[tuple[str, Any, Mapping[str, Any]]] = []
    if value_type == "array":
        prefix = list(schema.get("prefixItems", ()))
        if prefix and len(prefix) != len(value):
            return f"the argument {name} has to have {len(prefix)} entries, and has {len(value)}"
        items = prefix or [schema.get("items", {})] * len(value)
        parts = [(f"{name}[{i}]", entry, item) for i, (entry, item) in enumerate(zip(value, items, strict=True))]
    elif value_type == "object":
        parts = [(f"{name}.{key}", entry, schema.get("additionalProperties", {})) for key, entry in value.items()]
    return next(filter(None, (_check_value(*part) for part in parts)), "")


def _short(value: Any) -> str:
    text = as_text(value) if not isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"


# ---- functions and their schemas ----------------------------------------------------------------------------


def load_tool(source: str, flag: str = "--tools") -> Callable[..., Any]:
    """Return the function of a source."""
    if source in BUILT_IN:
        return BUILT_IN[source]
    function = find_object(source, flag) if source.startswith(OBJECT_PREFIX) else load_python(flag, source)
    if not callable(function):
        raise ConfigError(f"{flag} {source}: a tool has to be a function, and this is {type(function).__name__}")
    return function


def schemas_of(functions: Sequence[Callable[..., Any]], flag: str = "--tools") -> list[Schema]:
    """Return the schemas of tools, as chat templates take them. Raises if two tools have the same name."""
    schemas = [schema_of(function, flag) for function in functions]
    names = Counter(schema["function"]["name"] for schema in schemas)
    if duplicates := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"{flag}: two tools have the name {duplicates[0]}. Give them different names")
    return schemas


def schema_of(function: Callable[..., Any], flag: str = "--tools") -> Schema:
    """Return the schema of a function, made by transformers from its signature and docstring.

    Descriptions and types that are missing in the function are missing in the schema.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    unwrapped = function
    while isinstance(unwrapped, functools.partial):
        unwrapped = unwrapped.func
    name = getattr(unwrapped, "__name__", type(unwrapped).__name__)
    if isinstance(unwrapped, type) or not re.fullmatch(r"[A-Za-z_][\w-]{0,63}", name):
        raise ConfigError(f"{flag} {name}: a tool has to be a named function, defined with def")
    try:
        called = unwrapped if inspect.isroutine(unwrapped) else type(unwrapped).__call__
        signature, hints = inspect.signature(function), typing.get_type_hints(called)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"{flag} {name}: its signature cannot be read ({error_line(error)})") from None
    named_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if unnamed := [parameter for parameter in signature.parameters.values() if parameter.kind not in named_kinds]:
        raise ConfigError(
            f"{flag} {name}: {str(unnamed[0]).split(':')[0]} cannot be given by name. All parameters need names"
        )
    description, parameter_texts, _ = parse_google_format_docstring((inspect.getdoc(unwrapped) or "").strip())

    def documented() -> None: ...

    texts = {parameter: (parameter_texts or {}).get(parameter, "") for parameter in signature.parameters}
    lines = [f"    {parameter}: {text or parameter}" for parameter, text in texts.items()]
    documented.__name__, documented.__doc__ = name, "\n".join([description or name, "", "Args:", *lines])
    documented.__annotations__ = {parameter: hints.get(parameter, Any) for parameter in signature.parameters}
    parameters = [parameter.replace(annotation=Any) for parameter in signature.parameters.values()]
    documented.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    try:
        schema = get_json_schema(documented)
    except Exception as error:
        raise ConfigError(f"{flag} {name}: {error_line(error)}") from None
    for parameter, text in texts.items():
        if not text:
            del schema["function"]["parameters"]["properties"][parameter]["description"]
    return schema


def make_tools(
    sources: Sequence[str], schemas: Sequence[Schema], format_name: str, sandbox: Sequence[Any] = ()
) -> Tools:
    """Return an episode with the tools of these sources. Called in the process of the episode."""
    return Tools([load_tool(source) for source in sources], schemas, format_name, sandbox=sandbox)


def prepare_tools(sources: Sequence[str], sandbox: Sequence[Any] = (), **_: Any) -> None:
    """Start the sandbox that the tools of all episodes share."""
    if "python" in sources:
        python_tool.shared_sandbox(SandboxSettings(*sandbox)).start()


make_tools.prepare = prepare_tools  # type: ignore[attr-defined]

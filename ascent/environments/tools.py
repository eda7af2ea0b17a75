"""Tools are functions: what a language model calls them with, and what it gets back.

    def search(words: str, most: int = 3) -> list[str]:
        \"\"\"Finds pages.

        Args:
            words: What to look for.
            most: How many pages at most.
        \"\"\"

A schema comes from signature and docstring, in the process that trains. `Tools` answers the turns of an episode in the
episode's own process: it reads the calls of a turn, runs them in order, and answers each with a message. What goes
wrong with a call (it does not parse, there is no such tool, an argument is missing, the tool raises) is what its
message says: the model can read it and try again. A turn without a call ends the episode.
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
from ascent.tasks.python_objects import PREFIX, find_object
from ascent.tasks.text.text_task import Message, Problem
from ascent.tasks.user_files import load_python

BUILT_IN: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python_tool.python}
LONGEST_RESULT = 4_000
"""Characters of a result that the model sees."""
TOOL_COUNT_NAMES = ("calls", "unparsed", "failed", "repeated")
"""What is counted in a turn: calls; those that do not parse; those that a tool did not answer; those made before."""


class Tools(Environment):
    """An episode with tools. `form`: the name of the format in which the model writes calls.

    The reason of a step has the counts of its turn, for the records: `calls=2 unparsed=0 failed=1 repeated=0`. Those
    of the episode so far are in `counts`.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        schemas: Sequence[Schema],
        form: str = "plain",
        longest_result: int = LONGEST_RESULT,
        sandbox: Sequence[Any] = (),
    ):
        """`sandbox`: the `SandboxSettings` of the tool `python`."""
        self.session = python_tool.PythonSession(SandboxSettings(*sandbox))
        functions = [self.session.run if each is python_tool.python else each for each in functions]
        self.functions = {schema["function"]["name"]: f for f, schema in zip(functions, schemas, strict=True)}
        self.schemas = {schema["function"]["name"]: schema["function"].get("parameters", {}) for schema in schemas}
        self.format, self.types, self.longest_result = FORMATS[form], parameter_schemas(schemas), longest_result
        self._runner: asyncio.Runner | None = None
        self._start()

    def _start(self) -> None:
        self.counts: Counter[str] = Counter()
        self._made: set[str] = set()

    def begin(self, problem: Problem, rng: random.Random) -> str | None:
        self._start()
        return None

    def step(self, action: str) -> Step:
        calls = self.format.parse_turn(action, self.types)
        if not calls:
            return Step(done=True, reason="a turn without a call")
        turn = Counter(calls=len(calls))
        self.session.begin_turn()
        results = [self._answer(call, turn) for call in calls]
        self.counts += turn
        reason = " ".join(f"{name}={turn[name]}" for name in TOOL_COUNT_NAMES)
        return Step(self._messages(calls, results), reason=reason)

    def close(self) -> None:
        self.session.close()
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _answer(self, call: ToolCall, turn: Counter[str]) -> str:
        if call.error:
            turn["unparsed"] += 1
            return f"error: {call.error}"
        try:
            made = json.dumps([call.name, call.arguments], sort_keys=True)
            turn["repeated"] += made in self._made
            self._made.add(made)
            wrong = self._wrong(call)
            if not wrong:
                return self._cut(as_text(self._run(call)))
        except (SandboxError, IsolationError):  # no fault of the model's
            raise
        except (Exception, SystemExit) as error:
            wrong = traceback.format_exception_only(type(error), error)[-1].strip()
        turn["failed"] += 1
        return self._cut(f"error: {wrong}")

    def _wrong(self, call: ToolCall) -> str:
        if call.name not in self.functions:
            return f"there is no function {call.name[:60]!r}. There are: {', '.join(self.functions)}"
        return wrong_arguments(call.arguments, self.schemas[call.name])

    def _run(self, call: ToolCall) -> Any:
        result = self.functions[call.name](**call.arguments)
        if inspect.isawaitable(result):
            self._runner = self._runner or asyncio.Runner()  # one loop for the episode: clients stay usable
            result = self._runner.run(_awaited(result))
        return result

    def _cut(self, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()
        if len(text) <= self.longest_result:
            return text
        return f"{text[: self.longest_result]}… (cut: {self.longest_result:,} of {len(text):,} characters)"

    def _messages(self, calls: Sequence[ToolCall], results: Sequence[str]) -> list[Message]:
        if self.format.role == "user":  # templates without tools often take one message of the user at a time
            lines = [
                f"{call.name}: {result}" if call.name else result for call, result in zip(calls, results, strict=True)
            ]
            return [{"role": "user", "content": "\n".join(lines)}]
        return [
            {"role": "tool", "name": call.name, "content": result} | ({"tool_call_id": call.id} if call.id else {})
            for call, result in zip(calls, results, strict=True)
        ]


def parse_tool_counts(reason: str) -> dict[str, int]:
    """The counts in the reason of a step of `Tools`; empty for other reasons."""
    pairs = [part.partition("=") for part in reason.split()]
    known = all(name in TOOL_COUNT_NAMES and count.isdigit() for name, _, count in pairs)
    return {name: int(count) for name, _, count in pairs} if known else {}


async def _awaited(result: Any) -> Any:
    return await result


def as_text(result: Any) -> str:
    """A result as the model reads it: text as it is, anything else as JSON."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


# ---- arguments ----------------------------------------------------------------------------------------------


def wrong_arguments(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a call, in words; empty: nothing."""
    known = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in arguments]
    if missing:
        return f"the argument {missing[0]} is missing"
    unknown = [name for name in arguments if name not in known]
    if unknown:
        return f"there is no argument {unknown[0][:60]!r}. There are: {', '.join(known) or 'none'}"
    return next((wrong for name, value in arguments.items() if (wrong := _wrong_value(name, value, known[name]))), "")


def _wrong_value(name: str, value: Any, schema: Mapping[str, Any]) -> str:
    if value is None and schema.get("nullable"):
        return ""
    kinds, kind = schema_types(schema), json_type(value)
    if kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
        return f"the argument {name} has to be {' or '.join(sorted(kinds))}, and {_short(value)} is {kind}"
    if "enum" in schema and value not in schema["enum"]:
        return f"the argument {name} has to be one of {', '.join(map(_short, schema['enum']))}, and is {_short(value)}"
    if "anyOf" in schema:
        wrongs = [_wrong_value(name, value, each) for each in schema["anyOf"]]
        return "" if "" in wrongs else wrongs[0]
    parts: list[tuple[str, Any, Mapping[str, Any]]] = []
    if kind == "array":
        first = list(schema.get("prefixItems", ()))
        if first and len(first) != len(value):
            return f"the argument {name} has to have {len(first)} entries, and has {len(value)}"
        each = first or [schema.get("items", {})] * len(value)
        parts = [(f"{name}[{i}]", entry, its) for i, (entry, its) in enumerate(zip(value, each, strict=True))]
    elif kind == "object":
        parts = [(f"{name}.{key}", entry, schema.get("additionalProperties", {})) for key, entry in value.items()]
    return next((wrong for part in parts if (wrong := _wrong_value(*part))), "")


def _short(value: Any) -> str:
    text = as_text(value) if not isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"


# ---- functions and their schemas ----------------------------------------------------------------------------


def load_tool(source: str, flag: str = "--tools") -> Callable[..., Any]:
    """The function of a source."""
    if source in BUILT_IN:
        return BUILT_IN[source]
    function = find_object(source, flag) if source.startswith(PREFIX) else load_python(flag, source)
    if not callable(function):
        raise ConfigError(f"{flag} {source}: it is {type(function).__name__}, and a tool is a function")
    return function


def schemas_of(functions: Sequence[Callable[..., Any]], flag: str = "--tools") -> list[Schema]:
    """The schemas of tools, as chat templates take them; refused where two have one name."""
    schemas = [schema_of(function, flag) for function in functions]
    names = Counter(schema["function"]["name"] for schema in schemas)
    if doubled := [name for name, count in names.items() if count > 1]:
        raise ConfigError(f"{flag}: two tools have the name {doubled[0]}. Give them different names")
    return schemas


def schema_of(function: Callable[..., Any], flag: str = "--tools") -> Schema:
    """The schema of a function, by transformers, from its signature and docstring.

    What the docstring leaves out is left out of the schema: a description, or the type of a parameter.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    whole = function
    while isinstance(whole, functools.partial):
        whole = whole.func
    name = getattr(whole, "__name__", type(whole).__name__)
    if isinstance(whole, type) or not re.fullmatch(r"[A-Za-z_][\w-]{0,63}", name):
        raise ConfigError(f"{flag} {name}: a tool is a function with a name, made by def")
    try:
        called = whole if inspect.isroutine(whole) else type(whole).__call__
        signature, hints = inspect.signature(function), typing.get_type_hints(called)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"{flag} {name}: its signature cannot be read ({error_line(error)})") from None
    fixed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if odd := [each for each in signature.parameters.values() if each.kind not in fixed]:
        raise ConfigError(
            f"{flag} {name}: {str(odd[0]).split(':')[0]} cannot be given by name. A tool has named parameters only"
        )
    about, described, _ = parse_google_format_docstring((inspect.getdoc(whole) or "").strip())

    def shadow() -> None: ...

    given = {each: (described or {}).get(each, "") for each in signature.parameters}
    lines = [f"    {each}: {text or each}" for each, text in given.items()]
    shadow.__name__, shadow.__doc__ = name, "\n".join([about or name, "", "Args:", *lines])
    shadow.__annotations__ = {each: hints.get(each, Any) for each in signature.parameters}
    parameters = [each.replace(annotation=Any) for each in signature.parameters.values()]
    shadow.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    try:
        schema = get_json_schema(shadow)
    except Exception as error:
        raise ConfigError(f"{flag} {name}: {error_line(error)}") from None
    for each, text in given.items():
        if not text:
            del schema["function"]["parameters"]["properties"][each]["description"]
    return schema


def make_tools(sources: Sequence[str], schemas: Sequence[Schema], form: str, sandbox: Sequence[Any] = ()) -> Tools:
    """An episode with the tools of these sources: what an episode's own process makes."""
    return Tools([load_tool(source) for source in sources], schemas, form, sandbox=sandbox)


def prepare_tools(sources: Sequence[str], sandbox: Sequence[Any] = (), **_: Any) -> None:
    """Start what the tools of all episodes share."""
    if "python" in sources:
        python_tool.shared_sandbox(SandboxSettings(*sandbox)).start()


make_tools.prepare = prepare_tools  # type: ignore[attr-defined]

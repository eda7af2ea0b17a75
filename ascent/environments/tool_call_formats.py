"""Formats in which models write tool calls, each with its parser.

A turn is parsed as text with its special tokens. Parsing never raises: a call that does not parse has an `error` that
says why. tool_chat.py chooses the format of a model. A model without one gets the plain format, which the prompt
explains:

    <call>search {"words": "tall towers", "most": 3}</call>

Calls are parsed in the processes of environments, so nothing here imports torch or transformers.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

REASONING_START, REASONING_END = "<think>", "</think>"
"""Markers around reasoning."""
MAX_CALL_CHARACTERS = 20_000
"""The longest call that is parsed."""
_MAX_QUOTED_CHARACTERS = 120
"""Characters of a call that an error quotes."""


class ToolCall(NamedTuple):
    """A tool call."""

    name: str
    arguments: dict[str, Any]
    error: str = ""
    """Why the call does not parse; empty: it parses."""
    id: str = ""
    """The id that the model gave to the call (Mistral)."""


Schema = Mapping[str, Any]
"""A tool as chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}."""
ParameterSchemas = Mapping[str, Mapping[str, Any]]
"""The schema of each parameter of each tool. Formats without JSON need it to tell the number 7 from the text "7"."""


class ToolCallParseError(Exception):
    """A tool call does not parse."""


@dataclass(frozen=True)
class ToolCallFormat:
    """A format of tool calls: `blocks` finds them in the text of a turn, `parse` parses each."""

    name: str
    example: str
    blocks: "CallBlocks" = field(repr=False)
    parse: Callable[[str], list[ToolCall]] = field(repr=False)
    typed: bool = True
    """Whether arguments have types. Otherwise they are text, which is converted by the tools' schemas."""
    role: str = "tool"
    """The role of the messages that return results."""

    def parse_turn(self, text: str, schemas: ParameterSchemas | None = None) -> list[ToolCall]:
        """Return the calls of a turn, in order, without those in its reasoning."""
        text = text.partition(REASONING_END)[2] if text.lstrip().startswith(REASONING_START) else text
        calls: list[ToolCall] = []
        try:
            for block in self.blocks(text):
                calls += self.parse_block(block, schemas)
        except ToolCallParseError as error:
            calls.append(ToolCall("", {}, f"this call does not parse: {error}"))
        return calls

    def parse_block(self, block: str, schemas: ParameterSchemas | None = None) -> list[ToolCall]:
        """Return the calls of one block."""
        try:
            if len(block) > MAX_CALL_CHARACTERS:
                raise ToolCallParseError(f"it has {len(block):,} characters, and the limit is {MAX_CALL_CHARACTERS:,}")
            parsed = self.parse(block)
            calls = parsed if self.typed else [_with_types(call, schemas or {}) for call in parsed]
            for call in calls:
                _check_serializable(call)
            return calls
        except ToolCallParseError as error:
            return [ToolCall("", {}, f"this call does not parse: {error}. The call was: {_truncate(block)}")]


# ---- finding calls ------------------------------------------------------------------------------------------


STRINGS = r'"(?:[^"\\]|\\.)*(?P<end>"|\Z)'
"""JSON strings. `end` is empty in a string that is not closed."""


@dataclass(frozen=True)
class CallBlocks:
    """Where calls are in the text of a turn: after each `opening`, up to the `closing` after its arguments."""

    opening: str = ""
    """Empty: the whole turn decides whether it is a call."""
    closing: str = ""
    """Empty: a call ends at the next opening or at the end of the turn."""
    find: Callable[[str], Iterator[str]] | None = None
    """Finds calls in a whole turn, for formats without an opening."""
    starts: tuple[str, ...] = ()
    """How such a turn with calls may begin; empty: in any way."""
    argument: str = STRINGS
    """Finds the text arguments of a call, which may contain the closing."""

    def __call__(self, text: str) -> Iterator[str]:
        yield from self.find(text) if self.find is not None else self._between(text)

    def _between(self, text: str) -> Iterator[str]:
        at = text.find(self.opening)
        while at >= 0:
            start = at + len(self.opening)
            end = self.find_end(text, start, start, len(text))
            end = text.find(self.closing, start) if end < 0 and self.closing else end
            if end < 0 and self.closing:
                raise ToolCallParseError(f"{self.opening} is not followed by {self.closing}")
            yield text[start : end if end >= 0 else len(text)]
            at = text.find(self.opening, end + len(self.closing)) if end >= 0 else -1

    def find_end(self, text: str, start: int, search_start: int, limit: int) -> int:
        """Return where the call from `start` on ends, searched from `search_start` on; -1: not before the limit."""
        marker = self.closing or self.opening
        end = text.find(marker, search_start, limit)
        while 0 <= end <= start + MAX_CALL_CHARACTERS:
            if all(match["end"] for match in re.finditer(self.argument, text[start:end], re.DOTALL)):
                break
            end = text.find(marker, end + 1, limit)
        return end


PYTHON_TAG = "<|python_tag|>"


def _find_bare_json(text: str) -> Iterator[str]:
    """Yield a turn that is JSON with a name and nothing else, with or without <|python_tag|> before it."""
    text = text.strip()
    bare = _strip_stop_tokens(text.removeprefix(PYTHON_TAG))
    if text.startswith(PYTHON_TAG) or (bare.startswith("{") and '"name"' in bare):
        yield bare


def _find_harmony_calls(text: str) -> Iterator[str]:
    """Yield messages to functions. The recipient is before or after the channel."""
    for part in text.split("<|start|>assistant"):
        header, mark, body = part.partition("<|message|>")
        if to := re.search(r"to=functions\.([^\s<]+)", header):
            yield f"{to[1]}\n{re.split(r'<[|](?:call|end|return)[|]>', body)[0]}" if mark else to[1]


def _strip_stop_tokens(text: str) -> str:
    text = text.strip()
    while end := re.search(r"(?:<\|\w{1,40}\|>|</s>|<[a-z_]{1,20}>)\Z", text[-50:]):
        text = text[: len(text) - len(end[0])].rstrip()
    return text


# ---- parsing a call -----------------------------------------------------------------------------------------


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ToolCallParseError("it is nested too deeply") from None
    except ValueError as error:
        raise ToolCallParseError(f"it is not JSON ({str(error)[:80]})") from None


def _check_serializable(call: ToolCall) -> None:
    """Raise if the call cannot be written as JSON."""
    try:
        json.dumps(call, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # 1e999, \ud800 alone, or a number of thousands of digits
        raise ToolCallParseError("it has a number that is too large or an unpaired surrogate") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _from_object(value: Any) -> ToolCall:
    """Convert {"name": …, "arguments": {…}} to a call. Llama writes `parameters`."""
    if not isinstance(value, dict):
        raise ToolCallParseError('a call is an object {"name": …, "arguments": {…}}')
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        raise ToolCallParseError("it has no name")
    return _make_call(name, arguments, str(value.get("id") or ""))


def _make_call(name: str, arguments: Any, id: str = "") -> ToolCall:
    if isinstance(arguments, str):
        arguments = _parse_json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ToolCallParseError("its arguments are not an object {…}")
    return ToolCall(name.strip(), arguments, id=id)


def _parse_objects(block: str) -> list[ToolCall]:
    value = _parse_json(block)
    return [_from_object(item) for item in value] if isinstance(value, list) else [_from_object(value)]


def _parse_llama(block: str) -> list[ToolCall]:
    """Parse Llama's calls: one after another, separated by a semicolon or nothing."""
    calls: list[ToolCall] = []
    at, decoder = 0, json.JSONDecoder(parse_constant=_refuse_constant)
    while at < len(block):
        try:
            value, at = decoder.raw_decode(block, at)
        except RecursionError:
            raise ToolCallParseError("it is nested too deeply") from None
        except ValueError as error:
            raise ToolCallParseError(f"it is not JSON ({str(error)[:80]})") from None
        calls.append(_from_object(value))
        at = re.compile(r"[\s;,]*").match(block, at).end()  # type: ignore[union-attr]
    if not calls:
        raise ToolCallParseError("there is nothing after <|python_tag|>")
    return calls


def _parse_mistral(block: str) -> list[ToolCall]:
    """Parse [{"name", "arguments", "id"}], or name[ARGS]{…} in newer models."""
    block = _strip_stop_tokens(block)
    if block.startswith(("[", "{")) and not block.startswith("[ARGS]"):
        return _parse_objects(block)
    name, mark, arguments = block.partition("[ARGS]" if "[ARGS]" in block else "{")
    name, _, id = name.partition("[CALL_ID]")
    if not name.strip():
        raise ToolCallParseError("it has no name")
    return [_make_call(name, "{" + arguments if mark == "{" else arguments, id.strip())]


def _parse_deepseek(block: str) -> list[ToolCall]:
    head, _, arguments = block.partition("\n")
    name = head.rpartition("<｜tool▁sep｜>")[2].strip()
    arguments = arguments.strip().removeprefix("```").removeprefix("json").removesuffix("```")
    return [_make_call(_check_name(name), arguments)]


def _parse_name_line(block: str) -> list[ToolCall]:
    """Parse a name on the first line and its arguments as JSON below."""
    name, _, arguments = block.partition("\n")
    return [_make_call(_check_name(name), arguments)]


def _parse_plain(block: str) -> list[ToolCall]:
    name, brace, arguments = block.strip().partition("{")
    return [_make_call(_check_name(name), brace + arguments)]


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[^\s<>{}]{1,100}", name.strip()):
        raise ToolCallParseError("it has no name" if not name.strip() else "its name is not one word")
    return name.strip()


@dataclass(frozen=True)
class _TaggedArguments:
    """Parses calls whose arguments are text in tags."""

    name: str
    """A pattern that finds the name."""
    parameter: str
    """A pattern that finds the `key` and `value` of each argument."""

    def __call__(self, block: str) -> list[ToolCall]:
        name = re.search(self.name, block)
        if not name:
            raise ToolCallParseError("it has no name")
        rest = re.sub(self.parameter, "", block[name.end() :])
        if unclosed := re.search(r"<(?:parameter|arg_key|atem:parameter)[=\s>]", rest):
            raise ToolCallParseError(f"{unclosed[0].strip()} is not closed")
        matches = re.finditer(self.parameter, block[name.end() :])
        return [ToolCall(_check_name(name[1]), {match["key"].strip(): match["value"] for match in matches})]


def _with_types(call: ToolCall, schemas: ParameterSchemas) -> ToolCall:
    parameters = schemas.get(call.name, {})
    arguments = {key: _typed_value(text, parameters.get(key)) for key, text in call.arguments.items()}
    return call._replace(arguments=arguments)


def _typed_value(text: str, schema: Any) -> Any:
    """Convert an argument written as text: to text, JSON, or one of Python's True, False and None."""
    types = schema_types(schema)
    if types == {"string"}:
        return text
    python = {"True": True, "False": False, "None": None}
    try:
        value = python[text.strip()] if text.strip() in python else _parse_json(text)
    except ToolCallParseError:
        return text
    return text if "string" in types and json_type(value) not in types else value


def schema_types(schema: Any) -> set[str]:
    """Return the JSON types that a schema allows; empty: any."""
    if not isinstance(schema, Mapping):
        return set()
    if "anyOf" in schema:
        return set().union(*(schema_types(option) for option in schema["anyOf"]))
    named = schema.get("type", [json_type(value) for value in schema.get("enum", ())])
    types = {named} if isinstance(named, str) else set(named)
    return types | ({"null"} if schema.get("nullable") else set())


def json_type(value: Any) -> str:
    """Return the JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    types = {int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return types.get(type(value), type(value).__name__)


def _parse_pythonic(block: str) -> list[ToolCall]:
    """Parse [f(x=1), g(y='a')]: Python's syntax, and JSON's true, false and null."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes such as \\d
            tree = ast.parse(block.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        return [_from_python_call(call) for call in calls]
    except SyntaxError as error:
        raise ToolCallParseError(f"it is not a list of calls such as [f(x=1)] ({error.msg})") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ToolCallParseError(f"it is not a list of calls such as [f(x=1)] ({type(error).__name__})") from None


def _from_python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ToolCallParseError("it is not a list of calls such as [f(x=1)]")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ToolCallParseError("arguments need names, as in f(x=1)")
    return ToolCall(
        ast.unparse(node.func), {str(keyword.arg): _literal_value(keyword.value) for keyword in node.keywords}
    )


def _literal_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (str, int, float, bool, type(None)):
        return node.value
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(key.value): _literal_value(value) for key, value in pairs if isinstance(key, ast.Constant)}
    number = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
    if number and type(node.operand.value) in (int, float):  # type: ignore[attr-defined]
        return -node.operand.value  # type: ignore[attr-defined]
    raise ToolCallParseError(f"{ast.unparse(node)[:_MAX_QUOTED_CHARACTERS]} is not a value")


def _parse_gemma(block: str) -> list[ToolCall]:
    """Parse call:f{x:1,y:<|"|>text<|"|>}: JSON with unquoted keys and a quotation mark that is one token."""
    head = re.match(r"\s*call:([^\s{]+)\s*", block)
    if not head:
        raise ToolCallParseError("it does not begin with call:NAME{")
    parts = block[head.end() :].split('<|"|>')
    keyed = [re.sub(r"([{,]\s*)([A-Za-z_][\w-]*)(\s*:)", r'\1"\2"\3', part) for part in parts]
    bare = [re.sub(r"\bNone\b", "null", part) for part in keyed]
    text = "".join(json.dumps(parts[i]) if i % 2 else part for i, part in enumerate(bare))
    return [_make_call(head[1], text)]


FORMATS = {
    format.name: format
    for format in (
        ToolCallFormat(
            "hermes",
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
            CallBlocks("<tool_call>", "</tool_call>"),
            _parse_objects,
        ),
        ToolCallFormat(
            "qwen3-coder",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
            CallBlocks("<tool_call>", "</tool_call>", argument=r"<parameter=[^\n>]+>.*?(?P<end></parameter>|\Z)"),
            _TaggedArguments(
                r"<function=([^\n>]+)>", r"(?s)<parameter=(?P<key>[^\n>]+)>\n?(?P<value>.*?)\n?</parameter>"
            ),
            typed=False,
        ),
        ToolCallFormat(
            "glm",
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
            CallBlocks("<tool_call>", "</tool_call>", argument=r"<arg_value>.*?(?P<end></arg_value>|\Z)"),
            _TaggedArguments(
                r"^\s*([^\s<{]+)", r"(?s)<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
            ),
            typed=False,
        ),
        ToolCallFormat(
            "llama",
            '{"name": "add", "parameters": {"a": 1}}',
            CallBlocks(find=_find_bare_json, starts=("{", PYTHON_TAG)),
            _parse_llama,
        ),
        ToolCallFormat(
            "mistral",
            '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
            CallBlocks("[TOOL_CALLS]"),
            _parse_mistral,
        ),
        ToolCallFormat(
            "deepseek",
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
            CallBlocks("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            _parse_deepseek,
        ),
        ToolCallFormat(
            "harmony",
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
            CallBlocks(find=_find_harmony_calls),
            _parse_name_line,
        ),
        ToolCallFormat(
            "pythonic",
            "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
            CallBlocks(
                "<|tool_call_start|>", "<|tool_call_end|>", argument=r"""(['"])(?:(?!\1|\\).|\\.)*(?P<end>\1|\Z)"""
            ),
            _parse_pythonic,
        ),
        ToolCallFormat(
            "gemma",
            "<|tool_call>call:add{a:1}<tool_call|>",
            CallBlocks("<|tool_call>", "<tool_call|>", argument=r'<\|"\|>.*?(?P<end><\|"\|>|\Z)'),
            _parse_gemma,
        ),
        ToolCallFormat(
            "atem",
            '<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>',
            CallBlocks("<atem:invoke ", "</atem:invoke>", argument=r"<atem:parameter .*?(?P<end></atem:parameter>|\Z)"),
            _TaggedArguments(
                r'^name="([^"\n]+)">', r'(?s)<atem:parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</atem:parameter>'
            ),
            typed=False,
        ),
        ToolCallFormat(
            "plain", '<call>add {"a": 1}</call>', CallBlocks("<call>", "</call>"), _parse_plain, role="user"
        ),
    )
}
"""The formats by name, in the order in which they are tried."""
PLAIN = FORMATS["plain"]


def parameter_schemas(tools: Sequence[Schema]) -> ParameterSchemas:
    """Return the schemas of the parameters of each tool."""
    return {tool["function"]["name"]: tool["function"].get("parameters", {}).get("properties", {}) for tool in tools}


def _truncate(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _MAX_QUOTED_CHARACTERS else f"{text[:_MAX_QUOTED_CHARACTERS]}…"

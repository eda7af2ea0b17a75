"""How models write tool calls: a table of formats, each read from the words of a turn.

A turn's words are decoded with their special tokens kept. Reading them never fails: any text gives calls, or none, or
calls whose `error` says why they do not parse. choose.py finds the format of a model. One without a format of its own
gets the plain one, which is explained to it in the prompt:

    <call>search {"words": "tall towers", "most": 3}</call>

Reading runs in the processes of environments, so nothing here imports torch or transformers.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

OPEN, CLOSED = "<think>", "</think>"
"""Around thoughts."""
LONGEST = 20_000
"""Characters of a call that are read."""
_SHOWN = 120
"""Characters of a call that an error quotes."""


class ToolCall(NamedTuple):
    """A call of a tool, or what was meant as one."""

    name: str
    arguments: dict[str, Any]
    error: str = ""
    """Why it does not parse."""
    id: str = ""
    """What the model calls it (Mistral)."""


Schema = Mapping[str, Any]
"""A tool as chat templates take it: {"type": "function", "function": {"name", "description", "parameters"}}."""
Types = Mapping[str, Mapping[str, Any]]
"""The schema of each parameter of each tool: formats without JSON need it to tell the number 7 from the text "7"."""


class ToolCallParseError(Exception):
    """A call that does not parse, and why."""


@dataclass(frozen=True)
class Format:
    """A way to write calls: `blocks` finds them in the words of a turn, `parse` reads each."""

    name: str
    example: str
    blocks: "Blocks" = field(repr=False)
    parse: Callable[[str], list[ToolCall]] = field(repr=False)
    typed: bool = True
    """Arguments have their types. Otherwise they are text, and the schemas say what it stands for."""
    role: str = "tool"
    """Whose messages the results are."""

    def read(self, words: str, types: Types | None = None) -> list[ToolCall]:
        """The calls of a turn, in order. Thoughts, with which a turn may begin, are not read."""
        words = words.partition(CLOSED)[2] if words.lstrip().startswith(OPEN) else words
        calls: list[ToolCall] = []
        try:
            for block in self.blocks(words):
                calls += self.read_block(block, types)
        except ToolCallParseError as error:
            calls.append(ToolCall("", {}, f"this call does not parse: {error}"))
        return calls

    def read_block(self, block: str, types: Types | None = None) -> list[ToolCall]:
        """The calls of one block."""
        try:
            if len(block) > LONGEST:
                raise ToolCallParseError(f"it has {len(block):,} characters, and at most {LONGEST:,} are read")
            parsed = self.parse(block)
            calls = parsed if self.typed else [_with_types(call, types or {}) for call in parsed]
            for call in calls:
                _check_written(call)
            return calls
        except ToolCallParseError as error:
            return [ToolCall("", {}, f"this call does not parse: {error}. Written was: {_cut(block)}")]


# ---- finding calls ------------------------------------------------------------------------------------------


STRINGS = r'"(?:[^"\\]|\\.)*(?P<end>"|\Z)'
"""Strings of JSON. `end` is empty in one that goes on."""


@dataclass(frozen=True)
class Blocks:
    """Where calls stand in the words of a turn: behind each `opening`, up to the `closing` behind its arguments."""

    opening: str = ""
    """Without one, the words of the whole turn decide."""
    closing: str = ""
    """Without one, a call goes on to the next opening or to the end."""
    find: Callable[[str], Iterator[str]] | None = None
    """Finds them in a whole turn, where there is no opening."""
    starts: tuple[str, ...] = ()
    """How such a turn with calls begins; empty: in any way."""
    argument: str = STRINGS
    """Finds the arguments of a call that are text, which may have the closing in it."""

    def __call__(self, words: str) -> Iterator[str]:
        yield from self.find(words) if self.find is not None else self._between(words)

    def _between(self, words: str) -> Iterator[str]:
        at = words.find(self.opening)
        while at >= 0:
            start = at + len(self.opening)
            end = self.end(words, start, start, len(words))
            end = words.find(self.closing, start) if end < 0 and self.closing else end
            if end < 0 and self.closing:
                raise ToolCallParseError(f"{self.opening} is not followed by {self.closing}")
            yield words[start : end if end >= 0 else len(words)]
            at = words.find(self.opening, end + len(self.closing)) if end >= 0 else -1

    def end(self, words: str, start: int, searched: int, limit: int) -> int:
        """Where the call from `start` on ends, looked for from `searched` on; −1: not before the limit."""
        mark = self.closing or self.opening
        end = words.find(mark, searched, limit)
        while 0 <= end <= start + LONGEST:
            if all(match["end"] for match in re.finditer(self.argument, words[start:end], re.DOTALL)):
                break
            end = words.find(mark, end + 1, limit)
        return end


PYTHON_TAG = "<|python_tag|>"


def _bare(words: str) -> Iterator[str]:
    """A turn that is nothing but JSON with a name, behind <|python_tag|> or not."""
    text = words.strip()
    bare = _without_end(text.removeprefix(PYTHON_TAG))
    if text.startswith(PYTHON_TAG) or (bare.startswith("{") and '"name"' in bare):
        yield bare


def _harmony(words: str) -> Iterator[str]:
    """Messages to functions: the recipient stands before the channel or behind it."""
    for part in words.split("<|start|>assistant"):
        header, mark, body = part.partition("<|message|>")
        if to := re.search(r"to=functions\.([^\s<]+)", header):
            yield f"{to[1]}\n{re.split(r'<[|](?:call|end|return)[|]>', body)[0]}" if mark else to[1]


def _without_end(words: str) -> str:
    """Words without the stop tokens behind them."""
    words = words.strip()
    while end := re.search(r"(?:<\|\w{1,40}\|>|</s>|<[a-z_]{1,20}>)\Z", words[-50:]):
        words = words[: len(words) - len(end[0])].rstrip()
    return words


# ---- reading a call -----------------------------------------------------------------------------------------


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ToolCallParseError("it is nested too deeply") from None
    except ValueError as error:
        raise ToolCallParseError(f"it is not JSON ({str(error)[:80]})") from None


def _check_written(call: ToolCall) -> None:
    """Can it be sent as JSON, and read back?"""
    try:
        json.dumps(call, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # 1e999, \ud800 alone, or a number of thousands of digits
        raise ToolCallParseError("it has a number that is too large, or half a character") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _named(value: Any) -> ToolCall:
    """{"name": …, "arguments": {…}} as a call; Llama says `parameters`."""
    if not isinstance(value, dict):
        raise ToolCallParseError('a call is an object {"name": …, "arguments": {…}}')
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        raise ToolCallParseError("it has no name")
    return _call(name, arguments, str(value.get("id") or ""))


def _call(name: str, arguments: Any, id: str = "") -> ToolCall:
    if isinstance(arguments, str):
        arguments = _json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ToolCallParseError("its arguments are not an object {…}")
    return ToolCall(name.strip(), arguments, id=id)


def _objects(block: str) -> list[ToolCall]:
    value = _json(block)
    return [_named(each) for each in value] if isinstance(value, list) else [_named(value)]


def _bare_objects(block: str) -> list[ToolCall]:
    """Llama's calls: several stand behind each other, with a semicolon or nothing between them."""
    calls: list[ToolCall] = []
    at, decoder = 0, json.JSONDecoder(parse_constant=_no_constant)
    while at < len(block):
        try:
            value, at = decoder.raw_decode(block, at)
        except RecursionError:
            raise ToolCallParseError("it is nested too deeply") from None
        except ValueError as error:
            raise ToolCallParseError(f"it is not JSON ({str(error)[:80]})") from None
        calls.append(_named(value))
        at = re.compile(r"[\s;,]*").match(block, at).end()  # type: ignore[union-attr]
    if not calls:
        raise ToolCallParseError("nothing follows <|python_tag|>")
    return calls


def _mistral(block: str) -> list[ToolCall]:
    """[{"name", "arguments", "id"}], or name[ARGS]{…} in newer models."""
    block = _without_end(block)
    if block.startswith(("[", "{")) and not block.startswith("[ARGS]"):
        return _objects(block)
    name, mark, arguments = block.partition("[ARGS]" if "[ARGS]" in block else "{")
    name, _, id = name.partition("[CALL_ID]")
    if not name.strip():
        raise ToolCallParseError("it has no name")
    return [_call(name, "{" + arguments if mark == "{" else arguments, id.strip())]


def _deepseek(block: str) -> list[ToolCall]:
    head, _, arguments = block.partition("\n")
    name = head.rpartition("<｜tool▁sep｜>")[2].strip()
    arguments = arguments.strip().removeprefix("```").removeprefix("json").removesuffix("```")
    return [_call(_required(name), arguments)]


def _first_line(block: str) -> list[ToolCall]:
    """The name on a line, its arguments as JSON below."""
    name, _, arguments = block.partition("\n")
    return [_call(_required(name), arguments)]


def _plain(block: str) -> list[ToolCall]:
    name, _, arguments = block.strip().partition("{")
    return [_call(_required(name), "{" + arguments if _ else "")]


def _required(name: str) -> str:
    if not re.fullmatch(r"[^\s<>{}]{1,100}", name.strip()):
        raise ToolCallParseError("it has no name" if not name.strip() else "its name is not one word")
    return name.strip()


@dataclass(frozen=True)
class _Tagged:
    """Calls whose arguments stand in tags, as text: a parameter's schema says what it is."""

    name: str
    """Finds the name."""
    parameter: str
    """Finds `key` and `value`, each time."""

    def __call__(self, block: str) -> list[ToolCall]:
        name = re.search(self.name, block)
        if not name:
            raise ToolCallParseError("it has no name")
        rest = re.sub(self.parameter, "", block[name.end() :])
        if odd := re.search(r"<(?:parameter|arg_key|atem:parameter)[=\s>]", rest):
            raise ToolCallParseError(f"{odd[0].strip()} is not closed")
        found = re.finditer(self.parameter, block[name.end() :])
        return [ToolCall(_required(name[1]), {match["key"].strip(): match["value"] for match in found})]


def _with_types(call: ToolCall, types: Types) -> ToolCall:
    known = types.get(call.name, {})
    return call._replace(arguments={key: _value(text, known.get(key)) for key, text in call.arguments.items()})


def _value(text: str, schema: Any) -> Any:
    """The value of an argument that is written as text: text itself, or JSON, or one of Python's True, False, None."""
    kinds = kinds_of(schema)
    if kinds == {"string"}:
        return text
    python = {"True": True, "False": False, "None": None}
    try:
        value = python[text.strip()] if text.strip() in python else _json(text)
    except ToolCallParseError:
        return text
    return text if kinds and "string" in kinds and kind_of(value) not in kinds else value


def kinds_of(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty: any."""
    if not isinstance(schema, Mapping):
        return set()
    if "anyOf" in schema:
        return set().union(*(kinds_of(each) for each in schema["anyOf"]))
    named = schema.get("type", [kind_of(each) for each in schema.get("enum", ())])
    kinds = {named} if isinstance(named, str) else set(named)
    return kinds | ({"null"} if schema.get("nullable") else set())


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)


def _pythonic(block: str) -> list[ToolCall]:
    """[f(x=1), g(y='a')]: Python's syntax, and JSON's true, false and null."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes such as \\d
            tree = ast.parse(block.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        return [_python_call(each) for each in calls]
    except SyntaxError as error:
        raise ToolCallParseError(f"it is not a list of calls such as [f(x=1)] ({error.msg})") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ToolCallParseError(f"it is not a list of calls such as [f(x=1)] ({type(error).__name__})") from None


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ToolCallParseError("it is not a list of calls such as [f(x=1)]")
    if node.args or any(each.arg is None for each in node.keywords):
        raise ToolCallParseError("arguments are given by name, as in f(x=1)")
    return ToolCall(ast.unparse(node.func), {str(each.arg): _literal(each.value) for each in node.keywords})


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (str, int, float, bool, type(None)):
        return node.value
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(key.value): _literal(value) for key, value in pairs if isinstance(key, ast.Constant)}
    number = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
    if number and type(node.operand.value) in (int, float):  # type: ignore[attr-defined]
        return -node.operand.value  # type: ignore[attr-defined]
    raise ToolCallParseError(f"{ast.unparse(node)[:_SHOWN]} is not a value")


def _gemma(block: str) -> list[ToolCall]:
    """call:f{x:1,y:<|"|>text<|"|>}: JSON with bare keys and a quotation mark that is one token."""
    head = re.match(r"\s*call:([^\s{]+)\s*", block)
    if not head:
        raise ToolCallParseError("it does not begin with call:NAME{")
    parts = block[head.end() :].split('<|"|>')
    keyed = [re.sub(r"([{,]\s*)([A-Za-z_][\w-]*)(\s*:)", r'\1"\2"\3', part) for part in parts]
    bare = [re.sub(r"\bNone\b", "null", part) for part in keyed]
    text = "".join(json.dumps(parts[i]) if i % 2 else part for i, part in enumerate(bare))
    return [_call(head[1], text)]


FORMATS = {
    each.name: each
    for each in (
        Format(
            "hermes",
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
            Blocks("<tool_call>", "</tool_call>"),
            _objects,
        ),
        Format(
            "qwen3-coder",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
            Blocks("<tool_call>", "</tool_call>", argument=r"<parameter=[^\n>]+>.*?(?P<end></parameter>|\Z)"),
            _Tagged(r"<function=([^\n>]+)>", r"(?s)<parameter=(?P<key>[^\n>]+)>\n?(?P<value>.*?)\n?</parameter>"),
            typed=False,
        ),
        Format(
            "glm",
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
            Blocks("<tool_call>", "</tool_call>", argument=r"<arg_value>.*?(?P<end></arg_value>|\Z)"),
            _Tagged(r"^\s*([^\s<{]+)", r"(?s)<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
            typed=False,
        ),
        Format(
            "llama",
            '{"name": "add", "parameters": {"a": 1}}',
            Blocks(find=_bare, starts=("{", PYTHON_TAG)),
            _bare_objects,
        ),
        Format("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', Blocks("[TOOL_CALLS]"), _mistral),
        Format(
            "deepseek",
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
            Blocks("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            _deepseek,
        ),
        Format(
            "harmony",
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
            Blocks(find=_harmony),
            _first_line,
        ),
        Format(
            "pythonic",
            "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
            Blocks("<|tool_call_start|>", "<|tool_call_end|>", argument=r"""(['"])(?:(?!\1|\\).|\\.)*(?P<end>\1|\Z)"""),
            _pythonic,
        ),
        Format(
            "gemma",
            "<|tool_call>call:add{a:1}<tool_call|>",
            Blocks("<|tool_call>", "<tool_call|>", argument=r'<\|"\|>.*?(?P<end><\|"\|>|\Z)'),
            _gemma,
        ),
        Format(
            "atem",
            '<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>',
            Blocks("<atem:invoke ", "</atem:invoke>", argument=r"<atem:parameter .*?(?P<end></atem:parameter>|\Z)"),
            _Tagged(
                r'^name="([^"\n]+)">', r'(?s)<atem:parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</atem:parameter>'
            ),
            typed=False,
        ),
        Format("plain", '<call>add {"a": 1}</call>', Blocks("<call>", "</call>"), _plain, role="user"),
    )
}
"""The formats by their names, in the order in which they are tried."""
PLAIN = FORMATS["plain"]


def types_of(tools: Sequence[Schema]) -> Types:
    """The schemas of the parameters of each tool."""
    return {tool["function"]["name"]: tool["function"].get("parameters", {}).get("properties", {}) for tool in tools}


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"

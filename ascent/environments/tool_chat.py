"""The tool-call format of a model, found by its chat template.

Known calls are rendered by the template and parsed with each format of the table: first two calls with nested
arguments, quotation marks and non-ASCII letters, then one (the templates of Llama 3 and gpt-oss take no more). A
model whose template does not write tools, calls or results gets the plain format, with an instruction in the prompt.
"""

import json
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

from ascent.core.errors import ConfigError
from ascent.environments.chat_templates import ChatTemplate
from ascent.environments.tool_call_formats import (
    FORMATS,
    PLAIN,
    REASONING_START,
    Schema,
    ToolCall,
    ToolCallFormat,
    parameter_schemas,
    schema_types,
)
from ascent.tasks.text.text_task import Message

_NESTED_ARGUMENTS = {"words": 'say "no", naïve 漢\\字', "most": 3, "deep": {"list": [1, -2.5, None, True], "text": "7"}}
_SIMPLE_ARGUMENTS = {"words": "tall towers", "most": 3}
_PROPERTIES = {
    "words": {"type": "string", "description": "words"},
    "most": {"type": "integer", "description": "count"},
    "deep": {"type": "object", "description": "more"},
}
_PROBE_TOOLS: list[Schema] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A known function.",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["words"]},
        },
    }
    for name in ("find_known", "count_known")
]
_PROBE_CALLS: tuple[list[ToolCall], ...] = (
    [ToolCall("find_known", _NESTED_ARGUMENTS), ToolCall("count_known", _SIMPLE_ARGUMENTS)],
    [ToolCall("find_known", _NESTED_ARGUMENTS)],
    [ToolCall("find_known", _SIMPLE_ARGUMENTS)],
)


class ToolChat:
    """A model's chat template with tools, and the format of its tool calls."""

    def __init__(self, tokenizer: Any, tools: Sequence[Schema], stops: Collection[int] = ()):
        self.format, self.schemas = choose_format(tokenizer, tools, stops), tools
        is_plain = self.format is PLAIN
        self.template = ChatTemplate(tokenizer, () if is_plain else tools, stops)
        self.instruction = tool_instruction(tools) if is_plain else ""
        self.has_system_role = is_plain and self._has_system_role()

    def add_instruction(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages as the template gets them: with the instruction of the plain format."""
        if not self.instruction:
            return list(messages)
        return with_instruction(messages, self.instruction, self.has_system_role)

    def render_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a prompt."""
        return self.template.render_prompt(self.add_instruction(messages))

    def decode_turn(self, turn: Sequence[int], before: Sequence[int] = ()) -> str:
        """Decode a turn for `Tools`, with special tokens, which tool calls use. `before`: the tokens before it."""
        start = REASONING_START if self.template.opens_reasoning(before) else ""
        return start + self.template.decode(turn)

    def _has_system_role(self) -> bool:
        chat = [{"role": "system", "content": "some words"}, {"role": "user", "content": "x"}]
        try:
            return "some words" in self.template.tokenizer.apply_chat_template(chat, tokenize=False)
        except Exception:
            return False


def choose_format(tokenizer: Any, tools: Sequence[Schema], stops: Collection[int] = ()) -> ToolCallFormat:
    """Return the first format of the table that parses the known calls as this model's chat template writes them.

    The plain format is chosen if the template does not write tools or results.
    """
    if not tools:
        raise ConfigError("there are no tools to call")
    template = ChatTemplate(tokenizer, tools, stops)
    supports_tools = _writes_tools(tokenizer, tools) and _accepts_role(template, "tool", tools)
    for calls in _PROBE_CALLS if supports_tools else ():
        text = _render_calls(tokenizer, calls)
        for format in FORMATS.values() if text is not None else ():
            if [
                call._replace(id="") for call in format.parse_turn(text or "", parameter_schemas(_PROBE_TOOLS))
            ] == calls:
                return format
    if not _accepts_role(template, "user", tools):
        raise ConfigError(
            "the chat template of this model takes neither tools nor a second message of the user, so it cannot be "
            "trained with tools. Use a model whose template does"
        )
    return PLAIN


def _writes_tools(tokenizer: Any, tools: Sequence[Schema]) -> bool:
    chat = [{"role": "user", "content": "x"}]
    try:
        text = tokenizer.apply_chat_template(chat, tools=list(tools), add_generation_prompt=True, tokenize=False)
    except Exception:
        return False
    return all(tool["function"]["name"] in text for tool in tools)


def _accepts_role(template: ChatTemplate, role: str, tools: Sequence[Schema]) -> bool:
    message = {"role": role, "name": tools[0]["function"]["name"], "content": "x"}
    try:
        template.render_suffix([message])
        if role == "tool":
            template.render_suffix([message, message])
    except ValueError:
        return False
    return True


def _render_calls(tokenizer: Any, calls: Sequence[ToolCall]) -> str | None:
    """Return the text of a turn with these calls, as the template writes it; None: it writes no calls."""
    user = [{"role": "user", "content": "x"}]
    for as_text in (False, True):
        tool_calls = [
            {
                "id": f"call{i:05d}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False) if as_text else call.arguments,
                },
            }
            for i, call in enumerate(calls)
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": tool_calls}
        try:
            start, prompt, whole = (
                tokenizer.apply_chat_template(
                    chat, tools=_PROBE_TOOLS, add_generation_prompt=generation, tokenize=False
                )
                for chat, generation in ((user, False), (user, True), ([*user, turn], False))
            )
        except Exception:
            continue
        if whole.startswith(start) and prompt.startswith(start):
            return _without_generation_prompt(whole[len(start) :], prompt[len(start) :])
    return None


def _without_generation_prompt(turn: str, prompt: str) -> str:
    """Remove the prefix that a turn shares with the generation prompt (some prompts also open reasoning)."""
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(turn, prompt, strict=False))))
    if shared < len(prompt):
        shared = max(prompt.rfind(mark, 0, shared) for mark in ">\n") + 1
    return turn[shared:]


# ---- the plain format's instruction ---------------------------------------------------------------------------


def tool_instruction(tools: Sequence[Schema]) -> str:
    """Return the explanation of the tools and of the plain format for the prompt."""
    lines = ["You can call these functions:"]
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters", {})
        required = parameters.get("required", ())
        signature = [
            f"{name}{'' if name in required else '?'}: {'|'.join(sorted(schema_types(schema))) or 'any'}"
            + (f" ({schema['description']})" if schema.get("description") else "")
            for name, schema in parameters.get("properties", {}).items()
        ]
        lines.append(f"- {function['name']}({', '.join(signature)}): {function.get('description', '')}".rstrip(": "))
    lines += [
        "To call one, write its name and its arguments as JSON between <call> and </call>, and end your turn:",
        f"<call>{tools[0]['function']['name']} {json.dumps(_example(tools[0]), ensure_ascii=False)}</call>",
        "The result comes in the next message. Without a call, your turn is your answer.",
    ]
    return "\n".join(lines)


def _example(tool: Schema) -> dict[str, Any]:
    """Return arguments for an example of a call."""
    values = {"string": "…", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
    parameters = tool["function"].get("parameters", {})
    return {
        name: (schema.get("enum") or [values.get(min(schema_types(schema), default="string"))])[0]
        for name, schema in parameters.get("properties", {}).items()
        if name in parameters.get("required", ())
    }


def with_instruction(messages: Sequence[Message], text: str, system: bool = True) -> list[Message]:
    """Add a text to the system message of a prompt, or (without `system`) to its first message."""
    first, rest = messages[0], list(messages[1:])
    if first["role"] == "system" or not system:
        joined = [first["content"], text] if first["role"] == "system" else [text, first["content"]]
        return [first | {"content": "\n\n".join(part for part in joined if part)}, *rest]
    return [{"role": "system", "content": text}, first, *rest]

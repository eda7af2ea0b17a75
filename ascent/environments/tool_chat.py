"""Which format a model writes tool calls in: found at the start, by its chat template.

Known calls are rendered by the template and read back with each format of the table. They are two, with nested
arguments, quotation marks and letters beyond ASCII; then one (the templates of Llama 3 and gpt-oss take no more). A
template that shows no tools, no calls or no results gets the plain format with its instruction in the prompt.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

from ascent.core.errors import ConfigError
from ascent.environments.chat_templates import Tail
from ascent.environments.tool_call_formats import FORMATS, OPEN, PLAIN, Format, Schema, ToolCall, kinds_of, types_of
from ascent.tasks.text.text_task import Message

_HARD = {"words": 'say "no", naïve 漢\\字', "most": 3, "deep": {"list": [1, -2.5, None, True], "text": "7"}}
_EASY = {"words": "tall towers", "most": 3}
_PROPERTIES = {
    "words": {"type": "string", "description": "words"},
    "most": {"type": "integer", "description": "count"},
    "deep": {"type": "object", "description": "more"},
}
_KNOWN: list[Schema] = [
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
_TRIED: tuple[list[ToolCall], ...] = (
    [ToolCall("find_known", _HARD), ToolCall("count_known", _EASY)],
    [ToolCall("find_known", _HARD)],
    [ToolCall("find_known", _EASY)],
)


class ToolChat:
    """How a model talks with tools: the format of its calls, its prompts, and the tails that bring it results."""

    def __init__(self, tokenizer: Any, tools: Sequence[Schema], stops: Collection[int] = ()):
        self.format, self.schemas = choose_format(tokenizer, tools, stops), tools
        plain = self.format is PLAIN
        self.tail = Tail(tokenizer, () if plain else tools, stops)
        self.instruction = instruction_of(tools) if plain else ""
        self.system = plain and self._takes_system()

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages of a conversation as the template gets them: with the instruction, if there is one."""
        return with_instruction(messages, self.instruction, self.system) if self.instruction else list(messages)

    def first(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a prompt, ready for the first turn."""
        return self.tail.first(self.messages(messages))

    def words(self, turn: Sequence[int], before: Sequence[int] = ()) -> str:
        """A turn behind these tokens as `Tools` reads it: with its special tokens, because calls stand between them."""
        opened = OPEN if self.tail.opens_thoughts(before) else ""
        return opened + self.tail.decode(turn)

    def _takes_system(self) -> bool:
        chat = [{"role": "system", "content": "some words"}, {"role": "user", "content": "x"}]
        try:
            return "some words" in self.tail.tokenizer.apply_chat_template(chat, tokenize=False)
        except Exception:
            return False


def choose_format(tokenizer: Any, tools: Sequence[Schema], stops: Collection[int] = ()) -> Format:
    """The first format of the table in which known calls of this model's chat template are read back.

    The template has to show the tools and the results too. Where it does not, the plain format is chosen.
    """
    if not tools:
        raise ConfigError("there are no tools to call")
    tail = Tail(tokenizer, tools, stops)
    shown = _shows(tokenizer, tools)
    for calls in _TRIED if shown and _takes(tail, "tool", tools) else ():
        words = _rendered(tokenizer, calls)
        for each in FORMATS.values() if words is not None else ():
            if [call._replace(id="") for call in each.read(words or "", types_of(_KNOWN))] == calls:
                return each
    if not _takes(tail, "user", tools):
        raise ConfigError(
            "the chat template of this model takes neither tools nor a second message of the user, so it cannot be "
            "trained with tools. Take a model whose template does"
        )
    return PLAIN


def _shows(tokenizer: Any, tools: Sequence[Schema]) -> bool:
    chat = [{"role": "user", "content": "x"}]
    try:
        text = tokenizer.apply_chat_template(chat, tools=list(tools), add_generation_prompt=True, tokenize=False)
    except Exception:
        return False
    return all(tool["function"]["name"] in text for tool in tools)


def _takes(tail: Tail, role: str, tools: Sequence[Schema]) -> bool:
    message = {"role": role, "name": tools[0]["function"]["name"], "content": "x"}
    try:
        tail([message])
        if role == "tool":
            tail([message, message])
    except ValueError:
        return False
    return True


def _rendered(tokenizer: Any, calls: Sequence[ToolCall]) -> str | None:
    """The words of a turn with these calls, as the template writes them; None: it does not."""
    user = [{"role": "user", "content": "x"}]
    for as_text in (False, True):
        made = [
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
        turn = {"role": "assistant", "content": "", "tool_calls": made}
        try:
            start, asked, whole = (
                tokenizer.apply_chat_template(chat, tools=_KNOWN, add_generation_prompt=prompted, tokenize=False)
                for chat, prompted in ((user, False), (user, True), ([*user, turn], False))
            )
        except Exception:
            continue
        if whole.startswith(start) and asked.startswith(start):
            return _answer(whole[len(start) :], asked[len(start) :])
    return None


def _answer(turn: str, prompt: str) -> str:
    """A turn without the generation prompt, as far as the two agree (some prompts open a block of thoughts)."""
    same = next((i for i, (a, b) in enumerate(zip(turn, prompt, strict=False)) if a != b), min(len(turn), len(prompt)))
    if same < len(prompt):
        same = max(prompt.rfind(mark, 0, same) for mark in ">\n") + 1
    return turn[same:]


# ---- the plain format's instruction ---------------------------------------------------------------------------


def instruction_of(tools: Sequence[Schema]) -> str:
    """What a prompt says about tools and the plain format."""
    lines = ["You can call these functions:"]
    for tool in tools:
        about = tool["function"]
        parameters = about.get("parameters", {})
        needed = parameters.get("required", ())
        listed = [
            f"{name}{'' if name in needed else '?'}: {'|'.join(sorted(kinds_of(schema))) or 'any'}"
            + (f" ({schema['description']})" if schema.get("description") else "")
            for name, schema in parameters.get("properties", {}).items()
        ]
        lines.append(f"- {about['name']}({', '.join(listed)}): {about.get('description', '')}".rstrip(": "))
    lines += [
        "To call one, write its name and its arguments as JSON between <call> and </call>, and end your turn:",
        f"<call>{tools[0]['function']['name']} {json.dumps(_example(tools[0]), ensure_ascii=False)}</call>",
        "The result comes in the next message. Without a call, your turn is your answer.",
    ]
    return "\n".join(lines)


def _example(tool: Schema) -> dict[str, Any]:
    """Arguments for an example of a call."""
    values = {"string": "…", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
    parameters = tool["function"].get("parameters", {})
    return {
        name: (schema.get("enum") or [values.get(min(kinds_of(schema), default="string"))])[0]
        for name, schema in parameters.get("properties", {}).items()
        if name in parameters.get("required", ())
    }


def with_instruction(messages: Sequence[Message], text: str, system: bool = True) -> list[Message]:
    """The messages of a prompt with this text in the system message, or (without `system`) above the first one."""
    first, rest = messages[0], list(messages[1:])
    if first["role"] == "system" or not system:
        joined = [first["content"], text] if first["role"] == "system" else [text, first["content"]]
        return [first | {"content": "\n\n".join(part for part in joined if part)}, *rest]
    return [{"role": "system", "content": text}, first, *rest]

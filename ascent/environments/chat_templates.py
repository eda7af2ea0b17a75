r"""What a chat template writes between one turn of the assistant and the next, as token ids.

Sampled tokens are kept as they are; they are never decoded and encoded again. The suffix after a turn (its stop token,
the observation and the next generation prompt) is appended in the words of the chat template. Rendering the new
messages alone gives other text (a system prompt, a missing newline), so a chat is rendered once with a sentinel in
place of the assistant's content:

    <|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nSENTINEL<|im_end|>\n<|im_start|>user\nCONTENT<|im_end|>…
                                                                            ╰─────── the suffix ───────

The suffix begins after the first stop token that follows the last sentinel. It is rendered after the conversation so
far, because templates depend on it: on the system message, on a switch such as `/no_think`, on the number of turns.
The text around the new contents is cached by everything that a template depends on: the roles and names of all
messages, the system message, and each content that contains a string of the template. So most turns cost one encoding
and one rendering of a short chat, which shows how the template writes a new content: it may strip it or encode it as
JSON.

Observations are data. An observation that spells a control token (`<|im_end|>`) is encoded as plain text and yields no
control token.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import jinja2

from ascent.core.errors import ConfigError
from ascent.environments.tool_call_formats import REASONING_END, REASONING_START, Schema
from ascent.tasks.base import error_line
from ascent.tasks.text.text_task import Message

SENTINEL = "qzjxq"
"""Stands for the assistant's content."""
UNKNOWN_TOOL = "unknown"
"""Replaces the name of a tool without a schema: a name that the model invented is not written into the chat."""
MAX_CACHED_SUFFIXES = 1000
_FIRST_MESSAGE: Message = {"role": "user", "content": "x"}
_EMPTY_TURN: Message = {"role": "assistant", "content": ""}
_PLAIN = re.compile(r"[\w.,:;!?()+*=-]+( [\w.,:;!?()+*=-]+)*", re.ASCII)
"""Contents that need no rendering: stripping them or encoding them as JSON changes nothing."""
_ID = re.compile(r"call\d{5}")
"""The placeholder of a call's id."""


@dataclass(frozen=True)
class _SuffixTemplate:
    """The suffix of a chat, with slots for the contents of the new messages."""

    before_stop: str
    """What the template writes between the assistant's content and the stop token."""
    stop: str
    stop_id: int
    texts: tuple[str, ...]
    """The template's own text, around and between the contents."""
    slots: tuple[int, ...]
    """The index of the message whose content fills each slot."""
    control_ids: list[int]
    """The control tokens that the template writes."""


class ChatTemplate:
    """A tokenizer's chat template: prompts and suffixes as token ids.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        tools: Schemas of the tools.
        stops: Ids that end a turn, in addition to the tokenizer's end token.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Schema] = (), stops: Collection[int] = ()):
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template, which conversations need. Use a chat model, or set "
                "tokenizer.chat_template"
            )
        self.tokenizer, self.tools = tokenizer, list(tools)
        self.names = {tool["function"]["name"] for tool in tools}
        ends = {i: tokenizer.convert_ids_to_tokens(i) for i in (*stops, tokenizer.eos_token_id) if i is not None}
        self.stops = {token: i for i, token in ends.items() if token}
        special, added = set(tokenizer.all_special_tokens), tokenizer.get_added_vocab()
        template = str(tokenizer.chat_template)
        marks = {t: i for t, i in added.items() if t and (t in special or t in self.stops or t in template)}
        marks |= {token: tokenizer.convert_tokens_to_ids(token) for token in special} | self.stops
        self.control = frozenset(marks.values()) - {tokenizer.unk_token_id}  # any unknown character is encoded as it
        """Ids that only the template may write: special tokens, and added tokens that its text contains."""
        self._boundaries = self.control.difference(
            map(tokenizer.convert_tokens_to_ids, (REASONING_START, REASONING_END))
        )
        lexed = jinja2.Environment().lexer.tokenize(tokenizer.get_chat_template(None, self.tools or None))
        strings = {str(token.value) for token in lexed if token.type == "string"}
        strings = {text for text in strings if re.search(r"\w\w", text) and not text.isidentifier()}
        self._strings = re.compile("|".join(map(re.escape, strings)) or "(?!)")
        """What the template's code may search in a content: its string literals except keys, roles and white space."""
        self._spelled = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        self._suffix_template = lru_cache(MAX_CACHED_SUFFIXES)(self._make_suffix_template)

    def render_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a prompt with these messages and the tools."""
        return list(
            self.tokenizer.apply_chat_template(
                list(messages), tools=self.tools or None, add_generation_prompt=True, return_dict=False
            )
        )

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Return whether the template has opened reasoning at the end of a prompt. Contents do not count."""
        last = next((i for i in reversed(range(len(prompt))) if prompt[i] in self._boundaries), -1)
        text = self.decode(prompt[last + 1 :]) if self._generation_prompt is None else self._generation_prompt
        return text.rfind(REASONING_START) > text.rfind(REASONING_END)

    @cached_property
    def _generation_prompt(self) -> str | None:
        """What the template writes after the last content; None if it contains a control token."""
        try:
            text = self._apply([{"role": "user", "content": SENTINEL}]).rpartition(SENTINEL)[2]
        except Exception:  # the template refuses a chat of one message
            return None
        return None if self._boundaries.intersection(self._ids(text)) else text

    def decode(self, ids: Sequence[int]) -> str:
        """Decode tokens, control tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def render_observation(
        self, turn: Sequence[int], observation: str | Sequence[Message], history: Any = ()
    ) -> list[int]:
        """Return the ids that follow a turn of these ids. An observation that is text is a message of the user."""
        stop = turn[-1] if turn and turn[-1] in self.stops.values() else None
        return self.render_suffix(as_messages(observation), stop is not None, stop, history)

    def render_suffix(
        self, messages: Sequence[Message], ended: bool = True, stop: int | None = None, history: Sequence[Message] = ()
    ) -> list[int]:
        """Return the ids between a turn of the assistant and the next one.

        Args:
            messages: The messages after the turn. A tool message belongs to the call at its position.
            ended: Whether the turn has its stop token. Otherwise the suffix begins with it.
            stop: The stop token of the turn, if it is known. Where the template writes another one (GLM's stop tokens
                name the next role), that one follows.
            history: All messages before the turn.
        """
        calls = [m.get("tool_call_id", "") for m in messages if m["role"] == "tool"]
        new = _clean(messages, self.names)
        chat = [*self._reduce(history), _EMPTY_TURN]
        suffix = self._suffix_template(_with_placeholders(chat, new))
        if not all(message["content"].strip() for message in new):  # templates may leave out an empty message
            suffix = self._suffix_template(_with_placeholders(chat, new, keep_blank=True))
        if any(calls):
            suffix = replace(suffix, texts=tuple(_with_ids(text, calls) for text in suffix.texts))
        contents = [self._render_content(new, slot) for slot in suffix.slots]
        text, control_ids = _interleave(suffix.texts, contents), suffix.control_ids
        if any(self._strings.search(message["content"]) for message in new):  # the template may write something else
            text, masked = (
                _with_ids(self._split_suffix([*chat, *each])[2], calls) for each in (new, self._mask_contents(new))
            )
            control_ids = self._control_ids(self._ids(masked))
        ids = self._ids(suffix.stop + text)
        contents_spell_control = any(map(self._spelled.search, contents))
        if contents_spell_control or ids[0] != suffix.stop_id or self._control_ids(ids[1:]) != control_ids:
            ids = self._encode_in_pieces(suffix, contents)
        if not ended:
            return [*self._ids(suffix.before_stop), *ids]
        other_stop = stop is not None and stop != suffix.stop_id and suffix.stop in self.stops
        return ids if other_stop else ids[1:]

    # ---- rendering: `messages` are the whole chat, in which the last turn of the assistant is empty -------------

    def _reduce(self, history: Sequence[Message]) -> list[Message]:
        """Return the history with "x" for contents that the template does not depend on."""
        reduced = _clean(history or [_FIRST_MESSAGE], self.names)
        for message in reduced:
            is_blank, has_template_string = not message["content"].strip(), self._strings.search(message["content"])
            is_relevant = message["role"] == "system" or is_blank or has_template_string
            message["content"] = message["content"] if is_relevant and message["role"] != "assistant" else "x"
        return reduced

    def _make_suffix_template(self, chat_json: str) -> _SuffixTemplate:
        """Return the suffix of a chat in which placeholders stand for contents."""
        messages = json.loads(chat_json)
        new = messages[_last_turn(messages) + 1 :]
        before_stop, stop, text = self._split_suffix(messages)
        filled = [i for i, message in enumerate(new) if message["content"] == _placeholder(i)]
        counts = [text.count(_placeholder(i)) for i in filled]
        if counts != [1] * len(filled):
            role = new[filled[next(j for j, count in enumerate(counts) if count != 1)]]["role"]
            problem = "leaves out" if not all(counts) else "repeats"
            raise ConfigError(
                f"the chat template of this model {problem} messages of the role {role}: use a model whose template "
                "writes them once"
            )
        slots = tuple(sorted(filled, key=lambda i: text.index(_placeholder(i))))
        texts = tuple(re.split("|".join(_placeholder(i) for i in slots), text)) if slots else (text,)
        stop_id, *ids = self._ids(stop + text)
        if stop_id != self.tokenizer.convert_tokens_to_ids(stop):
            raise ConfigError(
                f"the token {stop!r}, which ends a turn in this chat template, is not one token of the tokenizer"
            )
        return _SuffixTemplate(before_stop, stop, stop_id, texts, slots, self._control_ids(ids))

    def _split_suffix(self, messages: Sequence[Message]) -> tuple[str, str, str]:
        """Return what follows the assistant's content: the text before the stop token, the token, and the suffix."""
        sentinel = SENTINEL
        while any(sentinel in message["content"] for message in messages):
            sentinel += "q"
        has_tool_results = any(m["role"] == "tool" for m in messages[_last_turn(messages) :])
        rendered = self._render(messages, sentinel)
        rest = rendered[rendered.rindex(sentinel) + len(sentinel) :]
        placeholders = [rest.index(_placeholder(i)) for i in range(len(messages)) if _placeholder(i) in rest]
        limit = min([*placeholders, len(rest)])
        stops = [(rest.index(token), token) for token in self.stops if token in rest[:limit]]
        control = self._spelled.search(rest)
        if not stops and not has_tool_results and control and control.start() < limit:
            stops = [(control.start(), control[0])]  # gpt-oss stops at <|return|>, and its history has <|end|>
        if not stops:
            raise ConfigError(
                "the chat template of this model writes no stop token after a turn of the assistant: its stop tokens "
                f"are {', '.join(self.stops) or 'none'}"
            )
        start, stop = min(stops)
        return "" if has_tool_results else rest[:start], stop, rest[start + len(stop) :]

    def _render(self, messages: Sequence[Message], sentinel: str) -> str:
        """Render the chat with the sentinel as the assistant's last content or as arguments of its calls."""
        error: Exception | None = None
        # No content beside calls: Gemma 4 writes it after the results. Others write only content (LFM2), take
        # arguments as a string (DeepSeek), or take one call per turn (Llama 3).
        variants = product(("", sentinel), ({"x": sentinel}, json.dumps({"x": sentinel})), (len(messages), 1))
        for variant in variants if any(m["role"] == "tool" for m in messages) else [("", {}, 0)]:
            try:
                text = self._apply(_with_turns(messages, sentinel, *variant))
            except Exception as raised:
                error = error or raised
                continue
            if sentinel in text:
                return text
        roles = ", ".join(dict.fromkeys(m["role"] for m in messages[_last_turn(messages) + 1 :]))
        reason = f": {error_line(error)}" if error else ""
        raise ConfigError(
            f"the chat template of this model refuses messages of the role {roles} after a turn of the "
            f"assistant{reason}"
        )

    def _apply(self, chat: Sequence[Any]) -> str:
        tools = self.tools or None
        return self.tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, tokenize=False)

    # ---- ids ------------------------------------------------------------------------------------------------

    def _render_content(self, new: Sequence[Message], slot: int) -> str:
        """Return what the template writes for the content of a message, rendered in a short chat."""
        content = new[slot]["content"]
        if _PLAIN.fullmatch(content):
            return content
        chat = json.loads(_with_placeholders([_FIRST_MESSAGE, _EMPTY_TURN], new))
        try:
            suffix = self._suffix_template(json.dumps(chat))
            chat[2 + slot]["content"] = content
            text = self._split_suffix(chat)[2]
        except ValueError:
            return content
        index = suffix.slots.index(slot)
        placeholders = [_placeholder(i) for i in suffix.slots]
        before = _interleave(suffix.texts[: index + 1], placeholders)
        after = _interleave(suffix.texts[index + 1 :], placeholders[index + 1 :])
        matches = text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)
        return text[len(before) : len(text) - len(after)] if matches else content

    def _mask_contents(self, messages: Sequence[Message]) -> list[Message]:
        """Replace all letters by x, except in strings that the template searches: contents then spell no token."""
        letters = re.compile(rf"({self._strings.pattern})|\S")
        return [m | {"content": letters.sub(lambda match: match[1] or "x", m["content"])} for m in messages]

    def _encode_in_pieces(self, suffix: _SuffixTemplate, contents: Sequence[str]) -> list[int]:
        """Return the ids of the stop token and the suffix, with contents encoded without control tokens."""
        ids = self._ids(suffix.stop + suffix.texts[0])
        for content, text in zip(contents, suffix.texts[1:], strict=True):
            ids += [*self._encode_plain(content), *self._encode_inside([text])[0]]
        return ids

    def _control_ids(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i in self.control]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode_inside(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts inside a document: some tokenizers put a space before a text that begins one."""
        lead, *encoded = self.tokenizer(["\n", *("\n" + text for text in texts)], add_special_tokens=False)["input_ids"]
        return [
            list(ids[len(lead) :]) if ids[: len(lead)] == lead else self._ids(text)
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def _encode_plain(self, text: str) -> list[int]:
        """Encode a text without control tokens: those that it spells are cut in two."""
        pieces, start = [], 0
        for match in self._spelled.finditer(text):
            middle = (match.start() + match.end() + 1) // 2
            pieces.append(text[start:middle])
            start = middle
        ids = [i for piece in self._encode_inside([*pieces, text[start:]]) for i in piece]
        if self.control.intersection(ids):  # spelled in characters that the tokenizer normalizes
            ids = [i for letter in self._encode_inside(text) for i in letter if i not in self.control]
        return ids


def _clean(messages: Sequence[Message], names: Collection[str]) -> list[Message]:
    """Return the messages with the fields that templates need, and without text that cannot be encoded."""
    clean: list[Message] = []
    num_results = 0
    for message in messages:
        num_results = 0 if message["role"] == "assistant" else num_results
        content = str(message.get("content") or "").encode("utf-8", "replace").decode()
        clean.append({"role": message["role"], "content": content})
        if message["role"] == "tool":
            name = message.get("name", "")
            clean[-1] |= {"name": name if name in names else UNKNOWN_TOOL, "tool_call_id": _call_id(num_results)}
            num_results += 1
    return clean


def as_messages(observation: str | Sequence[Message]) -> Sequence[Message]:
    """Return an observation as messages. Text is a message of the user."""
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else observation


def _last_turn(messages: Sequence[Message]) -> int:
    return max(i for i, message in enumerate(messages) if message["role"] == "assistant")


def _with_turns(
    messages: Sequence[Message], content: str, content_with_calls: str, arguments: Any, max_calls: int
) -> list[Any]:
    """Return the chat with content in the assistant's turns, and with calls in those that have tool results."""
    chat: list[Any] = [dict(message) for message in messages]
    turn: dict[str, Any] = {}
    for message in chat:
        if message["role"] == "assistant":
            turn, message["content"] = message, content
        elif message["role"] == "tool":
            calls = turn.setdefault("tool_calls", [])
            function = {"name": message["name"], "arguments": arguments}
            calls += [{"id": _call_id(len(calls)), "type": "function", "function": function}][: max_calls - len(calls)]
            turn["content"] = content_with_calls
    return chat


def _with_ids(text: str, ids: Sequence[str]) -> str:
    """Replace all placeholders of call ids by the model's ids, at once: an id may look like a placeholder."""
    valid = {_call_id(i): name for i, name in enumerate(ids) if re.fullmatch("[A-Za-z0-9_-]{1,64}", name)}
    return _ID.sub(lambda match: valid.get(match[0], match[0]), text)


def _placeholder(index: int) -> str:
    return f"wqkzv{index}z"


def _with_placeholders(chat: Sequence[Message], new: Sequence[Message], keep_blank: bool = False) -> str:
    """Return the chat and the new messages as JSON, with placeholders for new contents."""
    kept = [keep_blank and not message["content"].strip() for message in new]
    return json.dumps([*chat, *(m if kept[i] else m | {"content": _placeholder(i)} for i, m in enumerate(new))])


def _call_id(index: int) -> str:
    return f"call{index:05d}"


def _interleave(texts: Sequence[str], contents: Sequence[str]) -> str:
    """Join texts with contents between them. The last text has no content after it."""
    parts = list(texts[:1])
    for content, text in zip(contents, texts[1:], strict=False):
        parts += [content, text]
    return "".join(parts)

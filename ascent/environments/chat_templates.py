"""The template's own tail: what a chat template writes between one turn of the assistant and the next.

The tokens that the model wrote stay as they were drawn; they are never decoded and encoded again. What the environment
answers is added behind them in the words of the chat template. Rendering the new messages alone gives other words (a
system prompt, a missing newline). So a chat is rendered once with a sentinel in place of the assistant's words:

    <|im_start|>user\\nx<|im_end|>\\n<|im_start|>assistant\\nSENTINEL<|im_end|>\\n<|im_start|>user\\nCONTENT<|im_end|>…
                                                                            ╰──────── the tail ────────

The tail begins behind the first stop token that follows the last sentinel. It is rendered behind the conversation so
far, because templates look there: at the system message, at a switch such as `/no_think`, at the number of the turn.
What stands around the new contents is cached by what a template depends on: roles and names of all messages, the system
message, and each content that has a string of the template in it. So most turns cost one encoding, and one rendering of
a short chat, which shows how the template writes a new content: it may trim it or encode it as JSON.

Observations are data. One that spells a control token (`<|im_end|>`) is encoded as plain text: it yields no control
token.
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
from ascent.environments.tool_call_formats import CLOSED, OPEN, Schema
from ascent.tasks.base import error_line
from ascent.tasks.text.text_task import Message

WORDS = "qzjxq"
"""Stands for the assistant's words."""
UNKNOWN = "unknown"
"""The name of a tool that is not among the schemas: a name that the model made up is not written into the chat."""
_KEPT = 1000
"""Tails that are kept."""
_BEGUN: Message = {"role": "user", "content": "x"}
"""The shortest chat that a turn can answer."""
_TURN: Message = {"role": "assistant", "content": ""}
_PLAIN = re.compile(r"[\w.,:;!?()+*=-]+( [\w.,:;!?()+*=-]+)*", re.ASCII)
"""Contents that need no rendering: trimming and encoding as JSON change nothing about them."""
_ID = re.compile(r"call\d{5}")
"""The id of a call, in place of that which the model gave it."""


@dataclass(frozen=True)
class _Frame:
    """The tail of a chat, with holes for the contents of the new messages."""

    opening: str
    """What the template writes between the assistant's words and the token that ends the turn."""
    end: str
    end_id: int
    texts: tuple[str, ...]
    """The template's own text, around and between the contents."""
    slots: tuple[int, ...]
    """Which message's content stands in each hole."""
    marks: list[int]
    """The control tokens that the template writes."""


class Tail:
    """What the chat template of a tokenizer puts behind a turn of the assistant, as ids.

    `tools`: their schemas. `stops`: the ids that end a turn, beside the tokenizer's own end token.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Schema] = (), stops: Collection[int] = ()):
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template, so nothing says how a conversation is written. Take a chat model, "
                "or set tokenizer.chat_template"
            )
        self.tokenizer, self.tools = tokenizer, list(tools)
        self.names = {tool["function"]["name"] for tool in tools}
        ends = {i: tokenizer.convert_ids_to_tokens(i) for i in (*stops, tokenizer.eos_token_id) if i is not None}
        self.stops = {token: i for i, token in ends.items() if token}
        special, added = set(tokenizer.all_special_tokens), tokenizer.get_added_vocab()
        template = str(tokenizer.chat_template)
        marks = {t: i for t, i in added.items() if t and (t in special or t in self.stops or t in template)}
        marks |= {token: tokenizer.convert_tokens_to_ids(token) for token in special} | self.stops
        self.control = frozenset(marks.values()) - {tokenizer.unk_token_id}  # which any unknown letter gives
        """Ids that belong to the template: special tokens, and added ones that its text spells."""
        self._borders = self.control.difference(map(tokenizer.convert_tokens_to_ids, (OPEN, CLOSED)))
        lexed = jinja2.Environment().lexer.tokenize(tokenizer.get_chat_template(None, self.tools or None))
        strings = {str(token.value) for token in lexed if token.type == "string"}
        strings = {text for text in strings if re.search(r"\w\w", text) and not text.isidentifier()}
        self._strings = re.compile("|".join(map(re.escape, strings)) or "(?!)")
        """What the template's code may look for in a content: its strings but for keys, roles and spacing."""
        self._spelled = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        self._frame = lru_cache(_KEPT)(self._make_frame)

    def first(self, messages: Sequence[Message]) -> list[int]:
        """The prompt: these messages and the tools in the template, ready for the first turn."""
        return list(
            self.tokenizer.apply_chat_template(
                list(messages), tools=self.tools or None, add_generation_prompt=True, return_dict=False
            )
        )

    def opens_thoughts(self, prompt: Sequence[int]) -> bool:
        """Does a prompt end with thoughts that the template has opened? What contents spell does not count."""
        last = next((i for i in reversed(range(len(prompt))) if prompt[i] in self._borders), -1)
        text = self.decode(prompt[last + 1 :]) if self._prompted is None else self._prompted
        return text.rfind(OPEN) > text.rfind(CLOSED)

    @cached_property
    def _prompted(self) -> str | None:
        """What the template writes behind the last content, if it has no control token; otherwise None."""
        try:
            text = self._apply([{"role": "user", "content": WORDS}]).rpartition(WORDS)[2]
        except Exception:  # it takes no chat of one message
            return None
        return None if self._borders.intersection(self._ids(text)) else text

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, control tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def answer(self, turn: Sequence[int], observation: str | Sequence[Message], history: Any = ()) -> list[int]:
        """The ids that follow a turn of these ids: what a `Step` observes, words being the user's."""
        stop = turn[-1] if turn and turn[-1] in self.stops.values() else None
        return self(as_messages(observation), stop is not None, stop, history)

    def __call__(
        self, messages: Sequence[Message], ended: bool = True, stop: int | None = None, history: Sequence[Message] = ()
    ) -> list[int]:
        """The ids between a turn of the assistant and the next one, which these messages answer.

        A message of a tool answers the call in its place. `ended`: the turn has its stop token. Otherwise the tail
        begins with it. `stop`: which one, if that is known. Where the template has another one (GLM's stop tokens
        name the next role), that one follows. `history`: all messages before the turn.
        """
        calls = [m.get("tool_call_id", "") for m in messages if m["role"] == "tool"]
        new = _clean(messages, self.names)
        chat = [*self._reduced(history), _TURN]
        frame = self._frame(_shown(chat, new))
        if not all(message["content"].strip() for message in new):  # templates may leave out a message without words
            frame = self._frame(_shown(chat, new, blank=True))
        frame = replace(frame, texts=tuple(_with_ids(text, calls) for text in frame.texts)) if any(calls) else frame
        written = [self._written(new, slot) for slot in frame.slots]
        text, marks = _joined(frame.texts, written), frame.marks
        if any(self._strings.search(message["content"]) for message in new):  # the template may write something else
            text, alike = (_with_ids(self._tail([*chat, *each])[2], calls) for each in (new, self._alike(new)))
            marks = self._marks(self._ids(alike))
        ids = self._ids(frame.end + text)
        if any(map(self._spelled.search, written)) or ids[0] != frame.end_id or self._marks(ids[1:]) != marks:
            ids = self._ids_in_pieces(frame, written)
        if not ended:
            return [*self._ids(frame.opening), *ids]
        other = stop is not None and stop != frame.end_id and frame.end in self.stops
        return ids if other else ids[1:]

    # ---- rendering: messages are the whole chat, in which the last turn of the assistant is empty ---------------

    def _reduced(self, history: Sequence[Message]) -> list[Message]:
        """The history with x for what the template does not depend on, and for the assistant's words."""
        reduced = _clean(history or [_BEGUN], self.names)
        for message in reduced:
            blank, decides = not message["content"].strip(), self._strings.search(message["content"])
            kept = message["role"] == "system" or blank or decides
            message["content"] = message["content"] if kept and message["role"] != "assistant" else "x"
        return reduced

    def _make_frame(self, shown: str) -> _Frame:
        """The tail of a chat, in which sentinels stand for contents."""
        messages = json.loads(shown)
        new = messages[_last_turn(messages) + 1 :]
        opening, end, text = self._tail(messages)
        holes = [i for i, message in enumerate(new) if message["content"] == _content(i)]
        found = [text.count(_content(i)) for i in holes]
        if found != [1] * len(holes):
            role = new[holes[next(j for j, n in enumerate(found) if n != 1)]]["role"]
            times = "does not show" if not all(found) else "repeats"
            raise ConfigError(
                f"the chat template of this model {times} messages of the role {role}: give a model whose template does"
            )
        slots = tuple(sorted(holes, key=lambda i: text.index(_content(i))))
        texts = tuple(re.split("|".join(_content(i) for i in slots), text)) if slots else (text,)
        end_id, *ids = self._ids(end + text)
        if end_id != self.tokenizer.convert_tokens_to_ids(end):
            raise ConfigError(
                f"the token {end!r}, which ends a turn in this chat template, is not one token of the tokenizer"
            )
        return _Frame(opening, end, end_id, texts, slots, self._marks(ids))

    def _tail(self, messages: Sequence[Message]) -> tuple[str, str, str]:
        """What stands behind the assistant's words: up to the token that ends the turn, that token, and the tail."""
        words = WORDS
        while any(words in message["content"] for message in messages):
            words += "q"
        answered = any(m["role"] == "tool" for m in messages[_last_turn(messages) :])
        rendered = self._render(messages, words)
        behind = rendered[rendered.rindex(words) + len(words) :]
        ends = [(behind.index(token), token) for token in self.stops if token in behind]
        first = self._spelled.search(behind)
        contents = [behind.index(_content(i)) for i in range(len(messages)) if _content(i) in behind]
        limit = min([*contents, len(behind)])
        ends = [(at, token) for at, token in ends if at < limit]
        if not ends and not answered and first and first.start() < limit:
            ends = [(first.start(), first[0])]  # gpt-oss stops at <|return|>, and its history has <|end|>
        if not ends:
            raise ConfigError(
                "the chat template of this model writes no stop token behind a turn of the assistant: its end tokens "
                f"are {', '.join(self.stops) or 'none'}"
            )
        at, end = min(ends)
        return "" if answered else behind[:at], end, behind[at + len(end) :]

    def _render(self, messages: Sequence[Message], words: str) -> str:
        """The chat with the sentinel as the assistant's last words or as arguments of its calls."""
        error: Exception | None = None
        # No words beside calls: Gemma 4 writes them behind the results. Others write words only (LFM2), take arguments
        # as a string (DeepSeek), or one call per turn (Llama 3).
        ways = product(("", words), ({"x": words}, json.dumps({"x": words})), (len(messages), 1))
        for way in ways if any(m["role"] == "tool" for m in messages) else [("", {}, 0)]:
            try:
                text = self._apply(_with_turns(messages, words, *way))
            except Exception as raised:
                error = error or raised
                continue
            if words in text:
                return text
        roles = ", ".join(dict.fromkeys(m["role"] for m in messages[_last_turn(messages) + 1 :]))
        said = f": {error_line(error)}" if error else ""
        raise ConfigError(
            f"the chat template of this model does not take an answer by {roles} behind the assistant{said}"
        )

    def _apply(self, chat: Sequence[Any]) -> str:
        tools = self.tools or None
        return self.tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, tokenize=False)

    # ---- ids ------------------------------------------------------------------------------------------------

    def _written(self, new: Sequence[Message], slot: int) -> str:
        """What the template writes for the content of a message: it is rendered in a short chat."""
        content = new[slot]["content"]
        if _PLAIN.fullmatch(content):
            return content
        chat = json.loads(_shown([_BEGUN, _TURN], new))
        try:
            frame = self._frame(json.dumps(chat))
            chat[2 + slot]["content"] = content
            text = self._tail(chat)[2]
        except ValueError:
            return content
        at = frame.slots.index(slot)
        marks = [_content(i) for i in frame.slots]
        before = _joined(frame.texts[: at + 1], marks)
        behind = _joined(frame.texts[at + 1 :], marks[at + 1 :])
        fits = text.startswith(before) and text.endswith(behind) and len(text) >= len(before) + len(behind)
        return text[len(before) : len(text) - len(behind)] if fits else content

    def _alike(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with the strings that the template looks for, and x for all other letters: they spell no token."""
        letters = re.compile(rf"({self._strings.pattern})|\S")
        return [m | {"content": letters.sub(lambda match: match[1] or "x", m["content"])} for m in messages]

    def _ids_in_pieces(self, frame: _Frame, written: Sequence[str]) -> list[int]:
        """The ids of the end token and the tail, in which contents are encoded without control tokens."""
        ids = self._ids(frame.end + frame.texts[0])
        for content, text in zip(written, frame.texts[1:], strict=True):
            ids += [*self._plain(content), *self._behind([text])[0]]
        return ids

    def _marks(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i in self.control]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _behind(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts that do not begin the document: some tokenizers put a space before one that does."""
        lead, *encoded = self.tokenizer(["\n", *("\n" + text for text in texts)], add_special_tokens=False)["input_ids"]
        return [
            list(ids[len(lead) :]) if ids[: len(lead)] == lead else self._ids(text)
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def _plain(self, text: str) -> list[int]:
        """The ids of a text without any control token: those that it spells are cut in two."""
        pieces, start = [], 0
        for match in self._spelled.finditer(text):
            middle = (match.start() + match.end() + 1) // 2
            pieces.append(text[start:middle])
            start = middle
        ids = [i for piece in self._behind([*pieces, text[start:]]) for i in piece]
        if self.control.intersection(ids):  # spelled in letters that the tokenizer takes for others
            ids = [i for letter in self._behind(text) for i in letter if i not in self.control]
        return ids


def _clean(messages: Sequence[Message], names: Collection[str]) -> list[Message]:
    """The messages with all that templates ask for, and nothing that the tokenizer cannot read."""
    clean: list[Message] = []
    tools = 0
    for message in messages:
        tools = 0 if message["role"] == "assistant" else tools
        content = str(message.get("content") or "").encode("utf-8", "replace").decode()
        clean.append({"role": message["role"], "content": content})
        if message["role"] == "tool":
            name = message.get("name", "")
            clean[-1] |= {"name": name if name in names else UNKNOWN, "tool_call_id": _id(tools)}
            tools += 1
    return clean


def as_messages(observation: str | Sequence[Message]) -> Sequence[Message]:
    """An observation as messages; text is a message of the user."""
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else observation


def _last_turn(messages: Sequence[Message]) -> int:
    return max(i for i, message in enumerate(messages) if message["role"] == "assistant")


def _with_turns(messages: Sequence[Message], words: str, beside: str, arguments: Any, count: int) -> list[Any]:
    """The chat with words in the assistant's turns; in those that tools answer, calls with words `beside` them."""
    chat: list[Any] = [dict(message) for message in messages]
    turn: dict[str, Any] = {}
    for message in chat:
        if message["role"] == "assistant":
            turn, message["content"] = message, words
        elif message["role"] == "tool":
            calls = turn.setdefault("tool_calls", [])
            function = {"name": message["name"], "arguments": arguments}
            calls += [{"id": _id(len(calls)), "type": "function", "function": function}][: count - len(calls)]
            turn["content"] = beside
    return chat


def _with_ids(text: str, ids: Sequence[str]) -> str:
    """The text with the model's own ids of calls, all of them at once: one may be spelled as a placeholder is."""
    own = {_id(i): name for i, name in enumerate(ids) if re.fullmatch("[A-Za-z0-9_-]{1,64}", name)}
    return _ID.sub(lambda match: own.get(match[0], match[0]), text)


def _content(index: int) -> str:
    return f"wqkzv{index}z"


def _shown(chat: Sequence[Message], new: Sequence[Message], blank: bool = False) -> str:
    """The chat and the new messages, as JSON, with sentinels for new contents; `blank`: but not for those of spaces."""
    kept = [blank and not message["content"].strip() for message in new]
    return json.dumps([*chat, *(m if kept[i] else m | {"content": _content(i)} for i, m in enumerate(new))])


def _id(index: int) -> str:
    return f"call{index:05d}"


def _joined(texts: Sequence[str], contents: Sequence[str]) -> str:
    """Texts with contents between them; the last text has none behind it."""
    parts = list(texts[:1])
    for content, text in zip(contents, texts[1:], strict=False):
        parts += [content, text]
    return "".join(parts)

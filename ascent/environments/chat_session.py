"""Sessions: what a client of the endpoint says, turn by turn, as the tokens that the policy read and drew.

A client sends the whole history each time. If that is what it was answered, and more, then the policy reads on: the
recorded tokens and what the template puts behind them. The history is compared as messages, and never rendered again:
decoding and encoding do not give back what was drawn. Of an assistant's message the content and the calls count; its
reasoning, the ids of calls and the spacing of JSON do not.
"""

import copy
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from ascent.environments.chat_templates import Tail
from ascent.environments.tool_call_formats import PLAIN, Schema, ToolCall, kinds_of, types_of
from ascent.environments.tool_chat import ToolChat
from ascent.environments.turn_parser import AssistantTurn, TokenReader, TurnReader

ROLES = ("system", "developer", "user", "assistant", "tool")
KEPT = 32
"""Lists of tools whose format is remembered."""


class InvalidMessageError(Exception):
    """A request that cannot be answered, and why."""


class HistoryMismatchError(Exception):
    """A history that is not what was said, and where it differs."""


class Said(NamedTuple):
    """A message as far as it is compared."""

    role: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments, as JSON in one spelling."""


def one_spelling(value: Any) -> str:
    """JSON in one spelling."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


# ---- messages -------------------------------------------------------------------------------------------------


def read_messages(messages: Any, most: int) -> list[dict[str, Any]]:
    """The messages of a request with text as their contents, and arguments of calls as objects; or `Nonsense`."""
    if not isinstance(messages, list) or not messages:
        raise InvalidMessageError("messages: a list of one message or more")
    if len(messages) > most:
        raise InvalidMessageError(f"messages: {len(messages)} of them, and at most {most} are read")
    return [_message(message, i) for i, message in enumerate(messages)]


def _message(message: Any, place: int) -> dict[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise InvalidMessageError(f"{where}: a message is an object with a role: {', '.join(ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    clean: dict[str, Any] = {"role": role, "content": _text(message.get("content"), where)}
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise InvalidMessageError(f"{where}: only an assistant calls tools")
    if calls:
        if not isinstance(calls, list):
            raise InvalidMessageError(f"{where}.tool_calls: a list of calls")
        clean["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if role == "tool":
        clean["tool_call_id"] = str(message.get("tool_call_id") or "")
        clean["name"] = str(message.get("name") or "")
    return clean


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise InvalidMessageError(
                f"{where}.content: text, or a list of parts of the type text; nothing else is read here"
            )
    return "".join(part["text"] for part in parts)


def _call(call: Any, where: str) -> dict[str, Any]:
    about = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(about, Mapping) or not isinstance(about.get("name"), str):
        raise InvalidMessageError(f'{where}: a call is {{"id": …, "function": {{"name": …, "arguments": …}}}}')
    arguments = about.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
            json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()  # finite numbers, no half characters
        except (ValueError, RecursionError):
            raise InvalidMessageError(f"{where}.function.arguments: not JSON") from None
    if not isinstance(arguments, Mapping):
        raise InvalidMessageError(f"{where}.function.arguments: an object {{…}} as JSON")
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": about["name"], "arguments": dict(arguments)},
    }


def read_tools(tools: Any, most: int) -> list[Schema]:
    """The tools of a request as templates take them."""
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > most:
        raise InvalidMessageError(f"tools: a list of at most {most}")
    for i, tool in enumerate(tools):
        about = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(about, Mapping) or not isinstance(about.get("name"), str) or not about["name"]:
            raise InvalidMessageError(
                f'tools[{i}]: a tool is {{"type": "function", "function": {{"name": …, "parameters": …}}}}'
            )
        parameters = about.get("parameters", {})
        if not isinstance(parameters, Mapping) or not _is_schema(parameters):
            raise InvalidMessageError(f"tools[{i}].function.parameters: a JSON schema of an object")
    return list(tools)


def _is_schema(parameters: Mapping[str, Any]) -> bool:
    """Does it say which types its properties have?"""
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    try:
        return isinstance(required, list) and all(
            isinstance(schema, Mapping) and all(isinstance(kind, str) for kind in kinds_of(schema))
            for schema in properties.values()
        )
    except (AttributeError, TypeError, RecursionError):
        return False


def compared(message: Mapping[str, Any]) -> Said:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    return Said(message["role"], content, tuple((c["name"], one_spelling(c["arguments"])) for c in calls))


# ---- a model's way to write them -------------------------------------------------------------------------------


class ChatWriter:
    """How a model writes conversations: prompts, tails, and the turns that it is answered with."""

    def __init__(self, tokenizer: Any, ends: Collection[int]):
        self.tokenizer, self.ends = tokenizer, ends
        self._decoder = tokenizer
        self._chats: OrderedDict[str, tuple[ToolChat | None, Tail]] = OrderedDict()

    def for_thread(self) -> "ChatWriter":
        """A writer for another thread: it encodes with a tokenizer of its own and decodes with this one's."""
        writer = ChatWriter(copy.deepcopy(self.tokenizer), self.ends)
        writer._decoder = self._decoder
        return writer

    @cached_property
    def _special(self) -> dict[int, str]:
        """Special tokens that end no turn, by their names."""
        marks = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        every = marks.union(self.tokenizer.all_special_ids) - set(self.ends)
        return {i: self.tokenizer.convert_ids_to_tokens(i) for i in every}

    def _chat(self, tools: Sequence[Schema]) -> tuple[ToolChat | None, Tail]:
        """The chat with these tools; without any, its tail alone. It refuses models whose template cannot."""
        name = one_spelling(tools)
        if name not in self._chats:
            chat = ToolChat(self.tokenizer, tools, self.ends) if tools else None
            self._chats[name] = chat, chat.tail if chat else Tail(self.tokenizer, (), self.ends)
            if len(self._chats) > KEPT:
                self._chats.popitem(last=False)
        return self._chats[name]

    def first(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema]) -> list[int]:
        """The ids of a prompt."""
        try:
            return self._chat(tools)[1].first(self._written(messages, tools))
        except ValueError:
            raise
        except Exception as error:  # a template says in its own way what it does not take
            raise InvalidMessageError(f"the chat template does not take these messages: {str(error)[:200]}") from None

    def _written(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema]) -> list[Any]:
        """A conversation as the template gets it."""
        chat = self._chat(tools)[0]
        written: list[Any] = _plain(messages) if chat is None or chat.format is PLAIN else list(messages)
        return written if chat is None else chat.messages(written)

    def tail(
        self,
        turn: Sequence[int],
        calls: Sequence[ToolCall],
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        ids: Sequence[str] = (),
        history: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The ids between a turn, which made these calls, and the next one: of messages that answer it.

        A result belongs to the call that it names by its id, of these `ids`; or else to the one in its place.
        `history`: the conversation before the turn.
        """
        chat, tail = self._chat(tools)
        places = iter(range(len(messages)))
        answers: list[dict[str, str]] = []
        for message in _plain(messages) if chat is None or chat.format is PLAIN else messages:
            answer = {"role": message["role"], "content": message["content"]}
            if message["role"] == "tool":
                place, named = next(places), message["tool_call_id"]
                place = ids.index(named) if named and list(ids).count(named) == 1 else place
                call = calls[place] if place < len(calls) else ToolCall("", {})
                answer |= {"name": message["name"] or call.name, "tool_call_id": call.id}
            answers.append(answer)
        return tail.answer(turn, answers, self._written(history, tools) if history else ())

    def words(self, tokens: Sequence[int], special: bool = False) -> str:
        return self._decoder.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    def encode(self, text: str | list[int]) -> list[int]:
        """The ids of a text that the policy continues, without an end token that the tokenizer puts behind it."""
        if isinstance(text, list):
            return text
        ids, plain = (list(self.tokenizer(text, add_special_tokens=added)["input_ids"]) for added in (True, False))
        ends, own = (len(list(takewhile(self.ends.__contains__, reversed(each)))) for each in (ids, plain))
        return ids[: len(ids) - max(0, ends - own)]

    def reader(
        self, tools: Sequence[Schema] = (), stops: Any = (), prompt: Sequence[int] | None = (), one_call: bool = False
    ) -> TokenReader:
        """Reads a turn behind a prompt, of which the last tokens count; None: only words are read.

        With tools, special tokens are marks.
        """
        if prompt is None:
            return TokenReader(TurnReader(stops, None), self.words, {}, self.ends)
        chat, tail = self._chat(tools)
        thinking = tail.opens_thoughts(prompt)
        how = (chat.format, types_of(tools), one_call) if chat else ()
        reader = TurnReader(stops, thinking, *how)
        return TokenReader(reader, self.words, self._special if chat else {}, self.ends)

    def read(self, turn: Sequence[int], *how: Any) -> AssistantTurn:
        """A whole turn as a client reads it."""
        reader = self.reader(*how)
        reader.feed(turn), reader.end()
        return reader.whole


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Messages for a template that knows neither calls nor results.

    Results become messages of the user. Those in a row, and what the user says beside them, are one message: many
    templates take one at a time.
    """
    plain: list[dict[str, str]] = []
    for before, message in zip([None, *messages], messages, strict=False):
        content, roles = message["content"], {message["role"], before["role"] if before else ""}
        for call in message.get("tool_calls", ()):
            about = call["function"]
            content += f"<call>{about['name']} {json.dumps(about['arguments'], ensure_ascii=False)}</call>"
        if "tool" in roles and roles <= {"tool", "user"}:
            plain[-1]["content"] += f"\n{content}"
        else:
            plain.append({"role": "user" if message["role"] == "tool" else message["role"], "content": content})
    return plain


# ---- a session -------------------------------------------------------------------------------------------------


@dataclass
class Session:
    """One conversation, and its record: token by token what was read and drawn."""

    seed: int
    prompt: list[int] = field(default_factory=list)
    response: list[int] = field(default_factory=list)
    """All that follows the prompt."""
    drawn: list[bool] = field(default_factory=list)
    """Which of those the policy drew."""
    logp: list[float] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    """Seconds until the next request, on the last token of each turn."""
    turns: int = 0
    ended: bool = False
    """Did the latest turn end by itself?"""
    said: list[Said] | None = field(default_factory=list)
    """The history, as messages; None: it was given as tokens."""
    tools: str = "[]"
    calls: tuple[ToolCall, ...] = ()
    """Those of the latest turn."""
    latest: list[int] = field(default_factory=list)
    """The tokens of the latest turn."""
    asked: dict[str, Any] = field(default_factory=dict)
    """Settings that the client asked for and that were not used."""
    rewritten: str = ""
    """Where the client's history differed from what was said."""

    def read_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema], writer: ChatWriter
    ) -> list[int]:
        """What follows the record, as ids, before the turn that is asked for; of a new session, its prompt."""
        if not self.turns:
            return writer.first(messages, tools)
        if self.said is None:
            raise HistoryMismatchError("the session began with tokens, and now comes with messages")
        if one_spelling(tools) != self.tools:
            raise HistoryMismatchError("the tools are others than before")
        history = [compared(message) for message in messages]
        for i, (then, now) in enumerate(zip(self.said, history, strict=False)):
            if then != now:
                raise HistoryMismatchError(
                    f"message {i + 1} ({now.role}) is not what was said: {_difference(then, now)}"
                )
        new = messages[len(self.said) :]
        if len(history) <= len(self.said):
            raise HistoryMismatchError(
                f"{len(history)} messages, and {len(self.said)} were said: nothing follows the last turn"
            )
        if any(message["role"] == "assistant" for message in new):
            raise HistoryMismatchError("an assistant's message that the policy did not say")
        ids = [call["id"] for call in messages[len(self.said) - 1].get("tool_calls", ())]  # as the client has them
        return writer.tail(self.latest, self.calls, new, tools, ids, messages[: len(self.said) - 1])

    def read_tokens(self, ids: Sequence[int]) -> list[int]:
        """The same, where the whole history comes as ids."""
        if not self.turns:
            return list(ids)
        known = self.prompt + self.response
        if list(ids[: len(known)]) != known:
            at = next((i for i, (a, b) in enumerate(zip(known, ids, strict=False)) if a != b), len(ids))
            raise HistoryMismatchError(f"token {at} of the history is not what was read or drawn")
        return list(ids[len(known) :])

    def add(self, read: list[int], tokens: list[int], logp: list[float], mass: list[float], waited: float) -> None:
        """A turn is over: `read` came before it."""
        if not self.turns:
            self.prompt = read
        else:
            self.waited[-1] = waited
            self._put(read, False, [0.0] * len(read), [1.0] * len(read), self.turns - 1)
        self._put(tokens, True, logp, mass, self.turns)
        self.turns, self.latest = self.turns + 1, tokens

    def _put(self, tokens: list[int], drawn: bool, logp: list[float], mass: list[float], turn: int) -> None:
        self.response += tokens
        self.drawn += [drawn] * len(tokens)
        self.logp += logp
        self.mass += mass
        self.turn += [turn] * len(tokens)
        self.waited += [0.0] * len(tokens)

    def say(self, messages: Sequence[Mapping[str, Any]] | None, tools: Sequence[Schema], reply: AssistantTurn) -> None:
        """What the client now knows of the conversation."""
        calls = tuple((call.name, one_spelling(call.arguments)) for call in reply.calls)
        said = Said("assistant", reply.content.strip(), calls)
        self.said = None if messages is None else [*map(compared, messages), said]
        self.tools, self.calls = one_spelling(tools), reply.calls


def _difference(then: Said, now: Said) -> str:
    if then.role != now.role:
        return f"it was the {then.role}'s"
    if then.calls != now.calls:
        return "its calls are others"
    return "its content is another"

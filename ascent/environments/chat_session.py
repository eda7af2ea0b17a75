"""Sessions: the conversation of an endpoint's client, recorded as the tokens that were sampled and observed.

A client sends the whole history with each request. If it begins with the recorded history, the record is extended by
the tokens that the chat template writes for the new messages. The history is compared as messages and is not rendered
again, because decoding and encoding sampled tokens may give other tokens. Of an assistant's message, the content and
the tool calls are compared, but not the reasoning, the ids of calls or the spacing of JSON.
"""

import copy
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from ascent.environments.chat_templates import ChatTemplate
from ascent.environments.tool_call_formats import PLAIN, Schema, ToolCall, parameter_schemas
from ascent.environments.tool_chat import ToolChat
from ascent.environments.turn_parser import AssistantTurn, TokenParser, TurnParser

MAX_CACHED_CHATS = 32
"""Lists of tools whose template and tool-call format are cached."""


class InvalidMessageError(Exception):
    """A request that cannot be answered."""


class HistoryMismatchError(Exception):
    """A client's history that differs from the recorded one."""


class MessageKey(NamedTuple):
    """The parts of a message that are compared with the recorded history."""

    role: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()
    """Names and arguments of tool calls, the arguments as canonical JSON."""


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def message_key(message: Mapping[str, Any]) -> MessageKey:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    keys = tuple((call["name"], canonical_json(call["arguments"])) for call in calls)
    return MessageKey(message["role"], content, keys)


# ---- rendering and parsing --------------------------------------------------------------------------------------


class ChatRenderer:
    """Renders prompts and observations with a model's chat template, and makes parsers of its turns.

    `stop_ids`: the tokens that end a turn.
    """

    def __init__(self, tokenizer: Any, stop_ids: Collection[int]):
        self.tokenizer, self.stop_ids = tokenizer, stop_ids
        self._decoder = tokenizer
        self._chats: OrderedDict[str, tuple[ToolChat | None, ChatTemplate]] = OrderedDict()

    def for_thread(self) -> "ChatRenderer":
        """Return a renderer for another thread: it encodes with a copy of the tokenizer and decodes with this one."""
        renderer = ChatRenderer(copy.deepcopy(self.tokenizer), self.stop_ids)
        renderer._decoder = self._decoder
        return renderer

    @cached_property
    def _special(self) -> dict[int, str]:
        """The names of special tokens that end no turn."""
        added = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        ids = added.union(self.tokenizer.all_special_ids) - set(self.stop_ids)
        return {i: self.tokenizer.convert_ids_to_tokens(i) for i in ids}

    def _chat(self, tools: Sequence[Schema]) -> tuple[ToolChat | None, ChatTemplate]:
        """Return the chat with these tools (None without tools) and its template. Raises if the model has none."""
        key = canonical_json(tools)
        if key not in self._chats:
            chat = ToolChat(self.tokenizer, tools, self.stop_ids) if tools else None
            template = chat.template if chat else ChatTemplate(self.tokenizer, (), self.stop_ids)
            self._chats[key] = chat, template
            if len(self._chats) > MAX_CACHED_CHATS:
                self._chats.popitem(last=False)
        return self._chats[key]

    def render_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema]) -> list[int]:
        """Return the token ids of a prompt."""
        try:
            return self._chat(tools)[1].render_prompt(self._for_template(messages, tools))
        except ValueError:
            raise
        except Exception as error:  # chat templates raise errors of any type
            raise InvalidMessageError(f"the chat template refuses these messages: {str(error)[:200]}") from None

    def _for_template(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema]) -> list[Any]:
        """Return the messages as the template gets them."""
        chat = self._chat(tools)[0]
        prepared: list[Any] = without_tool_calls(messages) if chat is None or chat.format is PLAIN else list(messages)
        return prepared if chat is None else chat.add_instruction(prepared)

    def render_suffix(
        self,
        turn: Sequence[int],
        calls: Sequence[ToolCall],
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        call_ids: Sequence[str] = (),
        history: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Return the token ids between a turn and the next one: of the messages that respond to the turn.

        `calls`: the tool calls of the turn. A tool message belongs to the call whose id it names (of `call_ids`), or
        else to the call at its position. `history`: the conversation before the turn.
        """
        chat, template = self._chat(tools)
        positions = iter(range(len(messages)))
        responses: list[dict[str, str]] = []
        for message in without_tool_calls(messages) if chat is None or chat.format is PLAIN else messages:
            response = {"role": message["role"], "content": message["content"]}
            if message["role"] == "tool":
                index, call_id = next(positions), message["tool_call_id"]
                index = call_ids.index(call_id) if call_id and list(call_ids).count(call_id) == 1 else index
                call = calls[index] if index < len(calls) else ToolCall("", {})
                response |= {"name": message["name"] or call.name, "tool_call_id": call.id}
            responses.append(response)
        return template.render_observation(turn, responses, self._for_template(history, tools) if history else ())

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        return self._decoder.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    def encode(self, text: str | list[int]) -> list[int]:
        """Return the ids of a text to continue, without the end tokens that a tokenizer may append."""
        if isinstance(text, list):
            return text
        ids, plain = (list(self.tokenizer(text, add_special_tokens=added)["input_ids"]) for added in (True, False))
        num_ends = [len(list(takewhile(self.stop_ids.__contains__, reversed(each)))) for each in (ids, plain)]
        return ids[: len(ids) - max(0, num_ends[0] - num_ends[1])]

    def make_parser(
        self,
        tools: Sequence[Schema] = (),
        stops: Any = (),
        prompt: Sequence[int] | None = (),
        single_call: bool = False,
    ) -> TokenParser:
        """Return a parser of the turn after a prompt. `prompt`: None for a plain text completion.

        With tools, special tokens are kept as text, because tool-call formats use them.
        """
        if prompt is None:
            return TokenParser(TurnParser(stops, None), self.decode, {}, self.stop_ids)
        chat, template = self._chat(tools)
        in_reasoning = template.opens_reasoning(prompt)
        tool_options = (chat.format, parameter_schemas(tools), single_call) if chat else ()
        parser = TurnParser(stops, in_reasoning, *tool_options)
        return TokenParser(parser, self.decode, self._special if chat else {}, self.stop_ids)

    def parse_turn(self, turn: Sequence[int], *options: Any) -> AssistantTurn:
        """Parse a whole turn, with the options of `make_parser`."""
        parser = self.make_parser(*options)
        parser.feed(turn), parser.end()
        return parser.turn


def without_tool_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return messages for a template without tool calls and tool messages.

    Tool messages become messages of the user. Consecutive ones, and messages of the user next to them, are joined:
    many templates refuse two messages of one role in a row.
    """
    plain: list[dict[str, str]] = []
    for before, message in zip([None, *messages], messages, strict=False):
        content, roles = message["content"], {message["role"], before["role"] if before else ""}
        for call in message.get("tool_calls", ()):
            function = call["function"]
            content += f"<call>{function['name']} {json.dumps(function['arguments'], ensure_ascii=False)}</call>"
        if "tool" in roles and roles <= {"tool", "user"}:
            plain[-1]["content"] += f"\n{content}"
        else:
            plain.append({"role": "user" if message["role"] == "tool" else message["role"], "content": content})
    return plain


# ---- a session --------------------------------------------------------------------------------------------------


@dataclass
class Session:
    """One conversation and its record, token by token."""

    seed: int
    prompt: list[int] = field(default_factory=list)
    response: list[int] = field(default_factory=list)
    """All tokens after the prompt. The five lists below have one entry per token of it."""
    sampled: list[bool] = field(default_factory=list)
    """Whether the policy sampled the token; False: it is part of an observation."""
    logp: list[float] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)
    """Probability mass kept by top-k, top-p and min-p."""
    turn: list[int] = field(default_factory=list)
    """The index of the turn."""
    waited: list[float] = field(default_factory=list)
    """On the last token of each turn: seconds until the next request."""
    num_turns: int = 0
    ended: bool = False
    """Whether the last turn ended with a stop token or a stop string."""
    history: list[MessageKey] | None = field(default_factory=list)
    """The messages so far; None: the client sends tokens."""
    tools: str = "[]"
    last_calls: tuple[ToolCall, ...] = ()
    """The tool calls of the last turn."""
    last_turn: list[int] = field(default_factory=list)
    """The tokens of the last turn."""
    ignored_settings: dict[str, Any] = field(default_factory=dict)
    """Sampling settings that the client requested and that were not used."""
    mismatch: str = ""
    """How the client's history differed from the record."""

    def extend_with_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Schema], renderer: ChatRenderer
    ) -> list[int]:
        """Return the tokens between the record and the next turn; of a new session, its prompt."""
        if not self.num_turns:
            return renderer.render_prompt(messages, tools)
        if self.history is None:
            raise HistoryMismatchError("the session began with token ids, and this request has messages")
        if canonical_json(tools) != self.tools:
            raise HistoryMismatchError("the tools differ from those of the last turn")
        num_known, keys = len(self.history), [message_key(message) for message in messages]
        for i, (recorded, key) in enumerate(zip(self.history, keys, strict=False)):
            if recorded != key:
                difference = _difference(recorded, key)
                raise HistoryMismatchError(f"message {i + 1} ({key.role}) differs from the record: {difference}")
        if len(keys) <= num_known:
            raise HistoryMismatchError(
                f"the request has {len(keys)} messages and the record has {num_known}: no message follows the last turn"
            )
        new = messages[num_known:]
        if any(message["role"] == "assistant" for message in new):
            raise HistoryMismatchError("the request has an assistant's message that the policy did not write")
        call_ids = [call["id"] for call in messages[num_known - 1].get("tool_calls", ())]  # as the client has them
        return renderer.render_suffix(self.last_turn, self.last_calls, new, tools, call_ids, messages[: num_known - 1])

    def extend_with_tokens(self, ids: Sequence[int]) -> list[int]:
        """Do the same for a history of token ids."""
        if not self.num_turns:
            return list(ids)
        known = self.prompt + self.response
        if list(ids[: len(known)]) != known:
            index = next((i for i, (a, b) in enumerate(zip(known, ids, strict=False)) if a != b), len(ids))
            raise HistoryMismatchError(f"token {index} of the history differs from the record")
        return list(ids[len(known) :])

    def record_turn(
        self, new_tokens: list[int], tokens: list[int], logp: list[float], kept_mass: list[float], waited: float
    ) -> None:
        """Record a turn. `new_tokens`: the tokens between the record and the turn."""
        if not self.num_turns:
            self.prompt = new_tokens
        else:
            self.waited[-1] = waited
            count = len(new_tokens)
            self._append(new_tokens, False, [0.0] * count, [1.0] * count, self.num_turns - 1)
        self._append(tokens, True, logp, kept_mass, self.num_turns)
        self.num_turns, self.last_turn = self.num_turns + 1, tokens

    def _append(self, tokens: list[int], sampled: bool, logp: list[float], kept_mass: list[float], turn: int) -> None:
        self.response += tokens
        self.sampled += [sampled] * len(tokens)
        self.logp += logp
        self.kept_mass += kept_mass
        self.turn += [turn] * len(tokens)
        self.waited += [0.0] * len(tokens)

    def record_messages(
        self, messages: Sequence[Mapping[str, Any]] | None, tools: Sequence[Schema], reply: AssistantTurn
    ) -> None:
        """Record the messages of a request and the reply to it. `messages`: None if the client sends tokens."""
        calls = tuple((call.name, canonical_json(call.arguments)) for call in reply.calls)
        key = MessageKey("assistant", reply.content.strip(), calls)
        self.history = None if messages is None else [*map(message_key, messages), key]
        self.tools, self.last_calls = canonical_json(tools), reply.calls


def _difference(recorded: MessageKey, key: MessageKey) -> str:
    if recorded.role != key.role:
        return f"its role was {recorded.role}"
    return "its tool calls differ" if recorded.calls != key.calls else "its content differs"

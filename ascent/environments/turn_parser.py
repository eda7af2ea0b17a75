"""Parsers of a turn of the policy, for a whole turn or for its tokens as they are sampled.

    <think> reasoning </think> content OPENING call CLOSING OPENING call CLOSING …

Text that may be the beginning of a marker (`</think>`, a stop string, the opening of a call) is held back until it is
decided; all other text is returned at once. A tool call is returned when it is closed. A call that does not parse or is
not closed is content, and so is everything after it. The returned parts, joined, equal the whole turn parsed at once.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from ascent.environments.tool_call_formats import (
    REASONING_END,
    REASONING_START,
    ParameterSchemas,
    ToolCall,
    ToolCallFormat,
)

INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class AssistantTurn(NamedTuple):
    """A parsed turn, or the next part of one."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class TurnParser:
    """Parses the text of a turn incrementally.

    Args:
        stops: Stop strings.
        in_reasoning: Whether the prompt has opened the reasoning; None: the turn is plain text.
        format: The format of tool calls; None: there are no tools.
        schemas: The schemas of the parameters of each tool.
        single_call: Whether everything after the first call is left out.
    """

    def __init__(
        self,
        stops: Sequence[str] = (),
        in_reasoning: bool | None = False,
        format: ToolCallFormat | None = None,
        schemas: ParameterSchemas | None = None,
        single_call: bool = False,
    ):
        self.stops, self.format, self.schemas, self.single_call = stops, format, schemas, single_call
        self.text, self.position, self.ended = "", 0, False
        """The text so far; how much of it was parsed; whether the turn has ended."""
        self.turn = AssistantTurn()
        """Everything that was parsed."""
        self._special_spans: list[tuple[int, int]] = []
        """The spans of special tokens in the text. They are not part of the content or of stop strings."""
        self._plain_text = ""
        """The text without them."""
        self._search_start = 0
        """From where the end of the current call is searched."""
        self._state: Callable[[int], bool] = self._parse_reasoning if in_reasoning else self._parse_start
        if in_reasoning is None:
            self._state = self._parse_plain_text
        self._parts: list[AssistantTurn] = []

    def feed(self, text: str, special: bool = False) -> AssistantTurn:
        """Append text and return the newly parsed part. `special`: the text is the name of a special token."""
        if self.ended or not text:
            return AssistantTurn()
        searched, self.text = len(self._plain_text), self.text + text
        if special:
            self._special_spans.append((len(self.text) - len(text), len(self.text)))
        else:
            self._plain_text += text
        stops = [self._plain_text.find(stop, max(0, searched - len(stop) + 1)) for stop in self.stops]
        if found := [index for index in stops if index >= 0]:
            self.text = self.text[: self._index_in_text(min(found))]
            return self.end()
        held_back = partial_match_length(self._plain_text, self.stops)
        return self._parse(self._index_in_text(len(self._plain_text) - held_back) if held_back else len(self.text))

    def end(self) -> AssistantTurn:
        """End the turn and return its last part."""
        already, self.ended = self.ended, True
        return AssistantTurn() if already else self._parse(len(self.text))

    def _parse(self, limit: int) -> AssistantTurn:
        self._parts = []
        while self._state(limit):
            pass
        part = join_parts(self._parts)
        self.turn = join_parts([self.turn, part])
        return part

    # ---- states: each parses up to a limit and returns whether another state continues

    def _parse_start(self, limit: int) -> bool:
        start = self.text[self.position : limit].lstrip()
        if not self.ended and REASONING_START.startswith(start):
            return False
        if start.startswith(REASONING_START):
            self.position += self.text[self.position :].index(REASONING_START) + len(REASONING_START)
            return self._switch_to(self._parse_reasoning)
        return self._switch_to(self._parse_content)

    def _parse_reasoning(self, limit: int) -> bool:
        """Parse the reasoning without the white space around it."""
        if not self.turn.reasoning and not any(part.reasoning for part in self._parts):
            self.position = _skip(self.text, self.position, limit, str.isspace)
            if self.text.startswith(REASONING_START, self.position, limit):  # written by the template and the policy
                self.position = _skip(self.text, self.position + len(REASONING_START), limit, str.isspace)
            elif not self.ended and REASONING_START.startswith(self.text[self.position : limit]):
                return False
        end = self.text.find(REASONING_END, self.position, limit)
        held_back = 0 if self.ended else partial_match_length(self.text[self.position : limit], (REASONING_END,))
        stop = end if end >= 0 else limit - held_back
        stop = self.position + len(self.text[self.position : stop].rstrip())
        self._emit(reasoning=self._without_special(self.position, stop))
        self.position = end + len(REASONING_END) if end >= 0 else stop
        return end >= 0 and self._switch_to(self._skip_newlines)

    def _skip_newlines(self, limit: int) -> bool:
        self.position = _skip(self.text, self.position, limit, "\n".__eq__)
        return self.position < limit and self._switch_to(self._parse_content)

    def _parse_content(self, limit: int) -> bool:
        if self.format is None:
            return self._switch_to(self._parse_plain_text)
        blocks = self.format.blocks
        if not blocks.opening:
            return self._parse_undelimited(limit)
        begin = self.text.find(blocks.opening, self.position, limit)
        if begin >= 0:
            self._emit(content=self._without_special(self.position, begin))
            self.position, self._search_start = begin, begin + len(blocks.opening)
            return self._switch_to(self._parse_call)
        held_back = 0 if self.ended else partial_match_length(self.text[self.position : limit], (blocks.opening,))
        self._emit(content=self._without_special(self.position, limit - held_back))
        self.position = limit - held_back
        return False

    def _parse_undelimited(self, limit: int) -> bool:
        """Wait for the whole turn, which alone decides whether it is a call, unless its beginning excludes one."""
        assert self.format is not None
        blocks, start = self.format.blocks, self.text[self.position : limit].lstrip()
        calls = self._parse_blocks(list(blocks(self.text[self.position : limit]))) if self.ended else ()
        if calls:
            self._emit(calls=calls)
            self.position = limit
            return False
        possible = any(start.startswith(first) or first.startswith(start) for first in blocks.starts)
        undecided = not self.ended and (possible or not blocks.starts)
        return not undecided and self._switch_to(self._parse_plain_text)

    def _parse_call(self, limit: int) -> bool:
        """Parse the call that begins at `position`."""
        assert self.format is not None
        blocks = self.format.blocks
        begin, closing = self.position + len(blocks.opening), blocks.closing or blocks.opening
        end = blocks.find_end(self.text, begin, self._search_start, limit)
        if end < 0 and not self.ended:
            self._search_start = max(begin, limit - len(closing) + 1)
            return False
        if end < 0 and blocks.closing:
            return self._switch_to(self._parse_plain_text)
        calls = self._parse_blocks([self.text[begin : limit if end < 0 else end]])
        if not calls:
            return self._switch_to(self._parse_plain_text)
        self._emit(calls=calls)
        self.position = limit if end < 0 else end + len(blocks.closing)
        return self._switch_to(self._skip_to_next_call)

    def _skip_to_next_call(self, limit: int) -> bool:
        """Leave out text between calls and after them."""
        assert self.format is not None
        opening = self.format.blocks.opening
        begin = -1 if self.single_call else self.text.find(opening, self.position, limit)
        if begin >= 0:
            self.position, self._search_start = begin, begin + len(opening)
            return self._switch_to(self._parse_call)
        held_back = 0 if self.ended else partial_match_length(self.text[self.position : limit], (opening,))
        self.position = limit - held_back
        return False

    def _parse_plain_text(self, limit: int) -> bool:
        self._emit(content=self._without_special(self.position, limit))
        self.position = limit
        return False

    # ---- helpers of the states

    def _switch_to(self, state: Callable[[int], bool]) -> bool:
        self._state = state
        return True

    def _emit(self, content: str = "", reasoning: str = "", calls: tuple[ToolCall, ...] = ()) -> None:
        self._parts.append(AssistantTurn(content, reasoning, calls))

    def _parse_blocks(self, blocks: list[str]) -> tuple[ToolCall, ...]:
        """Return the calls of these blocks; none if one of them does not parse."""
        assert self.format is not None
        calls = [call for block in blocks for call in self.format.parse_block(block, self.schemas)]
        return () if any(call.error for call in calls) else tuple(calls[:1] if self.single_call else calls)

    def _index_in_text(self, index: int) -> int:
        """Convert an index of the text without special tokens to an index of the text."""
        for first, last in self._special_spans:
            index += last - first if first <= index else 0
        return index

    def _without_special(self, start: int, end: int) -> str:
        """Return a slice of the text without special tokens."""
        if not self._special_spans:
            return self.text[start:end]
        parts = []
        for first, last in self._special_spans:
            if first < end and last > start:
                parts.append(self.text[start : max(first, start)])
                start = last
        return "".join([*parts, self.text[start:end]])


def join_parts(parts: Sequence[AssistantTurn]) -> AssistantTurn:
    content, reasoning = ("".join(getattr(part, name) for part in parts) for name in ("content", "reasoning"))
    return AssistantTurn(content, reasoning, tuple(call for part in parts for call in part.calls))


def partial_match_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of a text that is an incomplete beginning of a marker."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def _skip(text: str, start: int, end: int, condition: Callable[[str], bool]) -> int:
    while start < end and condition(text[start]):
        start += 1
    return start


class TokenParser:
    """Detokenizes and parses a turn incrementally. No text is parsed before its last character is complete.

    Args:
        parser: The parser of the text.
        decode: Decodes tokens.
        special: The names of special tokens that are passed to the parser as such.
        ignored: Tokens that are not part of the text.
    """

    def __init__(
        self,
        parser: TurnParser,
        decode: Callable[[Sequence[int]], str],
        special: Mapping[int, str],
        ignored: Collection[int],
    ):
        self.parser, self.decode, self.special, self.ignored = parser, decode, special, ignored
        self._tokens: list[int] = []
        """The tokens that are part of the text."""
        self._context_start, self._context_end = 0, 0
        """New tokens are decoded after the tokens decoded last, so that spaces are right."""
        self._unparsed: deque[tuple[int, int]] = deque()
        """For each call of `feed` that is not parsed completely: the tokens so far and the length of their text."""
        self._num_fed = self._num_parsed = 0

    def feed(self, tokens: Sequence[int]) -> AssistantTurn:
        """Append tokens and return the newly parsed part."""
        parts, self._num_fed = [], self._num_fed + len(tokens)
        for token in tokens:
            if token in self.special:
                parts += [self.parser.feed(self._new_text()), self.parser.feed(self.special[token], special=True)]
            elif token not in self.ignored:
                self._tokens.append(token)
        parts.append(self.parser.feed(self._new_text()))
        incomplete = self._context_end < len(self._tokens)
        self._unparsed.append((self._num_fed, len(self.parser.text) + incomplete))
        return join_parts(parts)

    def end(self) -> AssistantTurn:
        """End the turn and return its last part."""
        part = join_parts([self.parser.feed(self._new_text(final=True)), self.parser.end()])
        self._unparsed = deque([(self._num_fed, 0)])
        return part

    def _new_text(self, final: bool = False) -> str:
        """Return the text of the new tokens; "" while its last character is incomplete, unless it is `final`."""
        if self._context_end == len(self._tokens):
            return ""
        before, now = (self.decode(self._tokens[self._context_start : end]) for end in (self._context_end, None))
        if (not final and now.endswith(INCOMPLETE_CHARACTER)) or len(now) <= len(before):
            return ""
        self._context_start, self._context_end = self._context_end, len(self._tokens)
        return now[len(before) :]

    @property
    def turn(self) -> AssistantTurn:
        """Everything that was parsed."""
        return self.parser.turn

    @property
    def num_parsed(self) -> int:
        """The number of tokens whose text was parsed."""
        while self._unparsed and self._unparsed[0][1] <= self.parser.position:
            self._num_parsed = self._unparsed.popleft()[0]
        return self._num_parsed

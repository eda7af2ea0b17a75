"""A turn of the policy as a client reads it, whole or piece by piece: thoughts, words and calls of tools.

    <think> thoughts </think> words OPENING call CLOSING OPENING call CLOSING …

A piece of text that may still become a mark (`</think>`, a stop string, the opening of a call) is held back until it is
known, and nothing else is: whoever reads along is told as much as is certain. A call is told when it is closed. One
that does not parse, or is not closed, is words, and so is what follows it. What was told stands: the pieces of a turn
together are the turn that is read whole.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from ascent.environments.tool_call_formats import CLOSED, OPEN, Format, ToolCall, Types

TORN = "\N{REPLACEMENT CHARACTER}"


class AssistantTurn(NamedTuple):
    """A turn as a client reads it, or the next piece of one."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class TurnReader:
    """Reads a turn as its text comes.

    `thinking`: the prompt has opened the thoughts; None: there are only words. `format`: that of calls; None: there are
    no tools. `one_call`: whatever follows the first call is left out.
    """

    def __init__(
        self,
        stops: Sequence[str] = (),
        thinking: bool | None = False,
        format: Format | None = None,
        types: Types | None = None,
        one_call: bool = False,
    ):
        self.stops, self.format, self.types, self.one_call = stops, format, types, one_call
        self.text, self.at, self.ended = "", 0, False
        """What has come, how much of it was told or left out, and whether no more is read."""
        self.whole = AssistantTurn()
        """All that was told."""
        self._marks: list[tuple[int, int]] = []
        """Where special tokens stand in the text: they are no words, and no stop string has them."""
        self._bare = ""
        """The text without them."""
        self._from = 0
        """Where the closing of the present call is looked for."""
        self._phase: Callable[[int], bool] = self._thoughts if thinking else self._start
        if thinking is None:
            self._phase = self._only_words
        self._told: list[AssistantTurn] = []

    def feed(self, text: str, special: bool = False) -> AssistantTurn:
        """What can be told now that this text has come. `special`: it is the name of a special token."""
        if self.ended or not text:
            return AssistantTurn()
        seen, self.text = len(self._bare), self.text + text
        if special:
            self._marks.append((len(self.text) - len(text), len(self.text)))
        else:
            self._bare += text
        found = [self._bare.find(stop, max(0, seen - len(stop) + 1)) for stop in self.stops]
        if some := [at for at in found if at >= 0]:
            self.text = self.text[: self._place(min(some))]
            return self.end()
        kept = held(self._bare, self.stops)
        return self._read(self._place(len(self._bare) - kept) if kept else len(self.text))

    def end(self) -> AssistantTurn:
        """What is left: no more comes."""
        already, self.ended = self.ended, True
        return AssistantTurn() if already else self._read(len(self.text))

    def _read(self, limit: int) -> AssistantTurn:
        self._told = []
        while self._phase(limit):
            pass
        told = join_pieces(self._told)
        self.whole = join_pieces([self.whole, told])
        return told

    # ---- the parts of a turn; each reads on up to a limit, and says whether another part follows

    def _start(self, limit: int) -> bool:
        """Does it begin with thoughts?"""
        begun = self.text[self.at : limit].lstrip()
        if not self.ended and OPEN.startswith(begun):
            return False
        if begun.startswith(OPEN):
            self.at += self.text[self.at :].index(OPEN) + len(OPEN)
            return self._become(self._thoughts)
        return self._become(self._words)

    def _thoughts(self, limit: int) -> bool:
        """Without the space around them."""
        if not self.whole.reasoning and not any(told.reasoning for told in self._told):
            self.at = _skipped(self.text, self.at, limit, str.isspace)
            if self.text.startswith(OPEN, self.at, limit):  # the template has opened them, and so has the policy
                self.at = _skipped(self.text, self.at + len(OPEN), limit, str.isspace)
            elif not self.ended and OPEN.startswith(self.text[self.at : limit]):
                return False
        end = self.text.find(CLOSED, self.at, limit)
        upto = end if end >= 0 else limit if self.ended else limit - held(self.text[self.at : limit], (CLOSED,))
        upto = self.at + len(self.text[self.at : upto].rstrip())
        self._tell(reasoning=self._plain(self.at, upto))
        self.at = end + len(CLOSED) if end >= 0 else upto
        return end >= 0 and self._become(self._behind_thoughts)

    def _behind_thoughts(self, limit: int) -> bool:
        self.at = _skipped(self.text, self.at, limit, "\n".__eq__)
        return self.at < limit and self._become(self._words)

    def _words(self, limit: int) -> bool:
        if self.format is None:
            return self._become(self._only_words)
        blocks = self.format.blocks
        if not blocks.opening:
            return self._undecided(limit)
        begin = self.text.find(blocks.opening, self.at, limit)
        if begin >= 0:
            self._tell(content=self._plain(self.at, begin))
            self.at, self._from = begin, begin + len(blocks.opening)
            return self._become(self._call)
        upto = limit if self.ended else limit - held(self.text[self.at : limit], (blocks.opening,))
        self._tell(content=self._plain(self.at, upto))
        self.at = upto
        return False

    def _undecided(self, limit: int) -> bool:
        """Only the whole turn says whether it is a call; unless it begins as none does."""
        assert self.format is not None
        blocks, words = self.format.blocks, self.text[self.at : limit].lstrip()
        calls = self._calls(list(blocks(self.text[self.at : limit]))) if self.ended else ()
        if calls:
            self._tell(calls=calls)
            self.at = limit
            return False
        may = any(words.startswith(start) or start.startswith(words) for start in blocks.starts)
        undecided = not self.ended and (may or not blocks.starts)
        return not undecided and self._become(self._only_words)

    def _call(self, limit: int) -> bool:
        """A call that has begun at `self.at`."""
        assert self.format is not None
        blocks = self.format.blocks
        begin, closing = self.at + len(blocks.opening), blocks.closing or blocks.opening
        end = blocks.end(self.text, begin, self._from, limit)
        if end < 0 and not self.ended:
            self._from = max(begin, limit - len(closing) + 1)
            return False
        if end < 0 and blocks.closing:
            return self._become(self._only_words)
        calls = self._calls([self.text[begin : limit if end < 0 else end]])
        if not calls:
            return self._become(self._only_words)
        self._tell(calls=calls)
        self.at = limit if end < 0 else end + len(blocks.closing)
        return self._become(self._between_calls)

    def _between_calls(self, limit: int) -> bool:
        """Words between calls and behind them are left out."""
        assert self.format is not None
        opening = self.format.blocks.opening
        begin = -1 if self.one_call else self.text.find(opening, self.at, limit)
        if begin >= 0:
            self.at, self._from = begin, begin + len(opening)
            return self._become(self._call)
        self.at = limit if self.ended else limit - held(self.text[self.at : limit], (opening,))
        return False

    def _only_words(self, limit: int) -> bool:
        self._tell(content=self._plain(self.at, limit))
        self.at = limit
        return False

    # ---- pieces

    def _become(self, phase: Callable[[int], bool]) -> bool:
        self._phase = phase
        return True

    def _tell(self, content: str = "", reasoning: str = "", calls: tuple[ToolCall, ...] = ()) -> None:
        self._told.append(AssistantTurn(content, reasoning, calls))

    def _calls(self, blocks: list[str]) -> tuple[ToolCall, ...]:
        """The calls of these blocks; none where one of them does not parse."""
        assert self.format is not None
        calls = [call for block in blocks for call in self.format.read_block(block, self.types)]
        return () if any(call.error for call in calls) else tuple(calls[:1] if self.one_call else calls)

    def _place(self, at: int) -> int:
        """Where a character of the text without special tokens stands in the text."""
        for first, last in self._marks:
            at += last - first if first <= at else 0
        return at

    def _plain(self, start: int, end: int) -> str:
        """The text from here to there without special tokens."""
        if not self._marks:
            return self.text[start:end]
        parts, at = [], start
        for first, last in self._marks:
            if first < end and last > at:
                parts.append(self.text[at : max(first, at)])
                at = last
        return "".join([*parts, self.text[at:end]])


def join_pieces(pieces: Sequence[AssistantTurn]) -> AssistantTurn:
    content, reasoning = ("".join(getattr(piece, name) for piece in pieces) for name in ("content", "reasoning"))
    return AssistantTurn(content, reasoning, tuple(call for piece in pieces for call in piece.calls))


def held(text: str, marks: Sequence[str]) -> int:
    """The most characters at the end of a text that one of these may begin with, and is not complete with."""
    longest = 0
    for mark in marks:
        for count in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:count]):
                longest = count
                break
    return longest


def _skipped(text: str, at: int, end: int, skip: Callable[[str], bool]) -> int:
    while at < end and skip(text[at]):
        at += 1
    return at


class TokenReader:
    """Reads a turn as its tokens come: no character before it is whole.

    `words`: text of tokens. `special`: names of tokens that are marks; `left_out`: tokens that are nothing to a reader.
    """

    def __init__(
        self,
        reader: TurnReader,
        words: Callable[[Sequence[int]], str],
        special: Mapping[int, str],
        left_out: Collection[int],
    ):
        self.reader, self.words, self.special, self.left_out = reader, words, special, left_out
        self._tokens: list[int] = []
        """Those of which words are made."""
        self._start, self._end = 0, 0
        """Words are those behind a few tokens that were read, so that spaces are right: from the first, up to which."""
        self._come: deque[tuple[int, int]] = deque()
        """After each piece that is not read yet, how many tokens have come, and how much text they are."""
        self._count = self._read = 0

    def feed(self, tokens: Sequence[int]) -> AssistantTurn:
        """What can be told now that these tokens have come."""
        told, self._count = [], self._count + len(tokens)
        for token in tokens:
            if token in self.special:
                told += [self.reader.feed(self._text()), self.reader.feed(self.special[token], special=True)]
            elif token not in self.left_out:
                self._tokens.append(token)
        told.append(self.reader.feed(self._text()))
        torn = self._end < len(self._tokens)
        self._come.append((self._count, len(self.reader.text) + torn))
        return join_pieces(told)

    def end(self) -> AssistantTurn:
        """What is left: no more comes."""
        told = join_pieces([self.reader.feed(self._text(whole=False)), self.reader.end()])
        self._come = deque([(self._count, 0)])
        return told

    def _text(self, whole: bool = True) -> str:
        """The words that are new, if their last character is `whole`."""
        if self._end == len(self._tokens):
            return ""
        before, now = (self.words(self._tokens[self._start : end]) for end in (self._end, None))
        if (whole and now.endswith(TORN)) or len(now) <= len(before):
            return ""
        self._start, self._end = self._end, len(self._tokens)
        return now[len(before) :]

    @property
    def whole(self) -> AssistantTurn:
        """All that was told."""
        return self.reader.whole

    @property
    def read(self) -> int:
        """Tokens whose text was told, or left out."""
        while self._come and self._come[0][1] <= self.reader.at:
            self._read = self._come.popleft()[0]
        return self._read

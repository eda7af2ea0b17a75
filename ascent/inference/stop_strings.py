"""Stop strings: a response ends at the token that completes one. That token is its last action.

What counts is the text of the response that rewards read: the tokenizer's own, special tokens left out, without the
prompt. A string may begin and end inside tokens, and a character may be spread over several of them. A special token
counts where a string is its name.
"""

import itertools
from functools import lru_cache
from typing import Any

TORN = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes that are not a complete character yet."""
SLACK = 4
"""Characters at the start of a cut-out text that may differ from the whole: a space, or part of a character."""


class StopStrings:
    """Finds the token that completes a stop string. Text is decoded only at tokens that can complete one."""

    def __init__(self, strings: tuple[str, ...], tokenizer: Any, vocab: int):
        self.strings, self.tokenizer = strings, tokenizer
        self.longest = max(map(len, strings))
        self.may_complete = _may_complete(strings, tokenizer, vocab)
        """By token: 1 if its text can contain the last character of a stop string."""
        names = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        self.named = frozenset(token for name, token in names if name in strings)
        """Special tokens whose names are stop strings."""

    def end(self, tokens: list[int], start: int = 0) -> int:
        """Return the length up to the first token, from `start` on, that completes a stop string; 0: none does."""
        some = (k for k in range(start, len(tokens)) if self.may_complete[tokens[k]])
        return next((k + 1 for k in some if tokens[k] in self.named or self._completed(tokens[: k + 1])), 0)

    def _completed(self, tokens: list[int]) -> bool:
        """Return whether the last token completes a stop string. Decodes as few tokens as possible.

        Text decoded from the middle may begin with an incomplete character, and some tokenizers then break all bytes
        that follow it.
        """
        width = self.longest + 2 * SLACK
        while True:
            part = tokens[-width:]
            before, text = self._text(part[:-1]), self._text(part)
            known = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
            found = any(text.find(s, max(0, known - len(s) + 1)) >= 0 for s in self.strings)
            read = min(len(before.lstrip(TORN)), len(text.lstrip(TORN)))
            if len(part) == len(tokens) or (read >= self.longest + SLACK and not found):
                return found
            width = len(tokens) if found else 2 * width

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def _may_complete(strings: tuple[str, ...], tokenizer: Any, vocab: int) -> bytes:
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):  # a token may change the text before it
        return b"\1" * vocab
    last = {s[-1] for s in strings}
    last |= {TORN} if not all(map(str.isascii, last)) else set()
    tokens, may = _tokens_with(tokenizer, vocab), bytearray(vocab)
    names = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    named = [token for name, token in names if name in strings and token < vocab]
    for token in itertools.chain(named, *(tokens.get(character, ()) for character in last)):
        may[token] = 1
    return bytes(may)


@lru_cache(maxsize=2)
def _tokens_with(tokenizer: Any, vocab: int) -> dict[str, list[int]]:
    """The tokens whose text has a character, special tokens aside. The whole vocabulary is read, once for all strings.

    Each token is read twice in a row, for some write a space between tokens and not before the first.
    """
    known, special = min(vocab, len(tokenizer)), set(tokenizer.all_special_ids)
    tokens: dict[str, list[int]] = {}
    for token, piece in enumerate(tokenizer.batch_decode([[i, i] for i in range(known)], skip_special_tokens=True)):
        for character in set(piece) if token not in special else ():
            tokens.setdefault(character, []).append(token)
    return tokens

"""Stop strings: a response ends at the token that completes a stop string. That token is its last action.

A stop string is searched in the text that rewards see: the response without the prompt, decoded by the tokenizer
without special tokens. It may begin and end inside tokens, and a character may be spread over several tokens. A special
token matches if a stop string is its name.
"""

import itertools
from functools import lru_cache
from typing import Any

INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"
"""What bytes are decoded to that are not a complete character yet."""
DECODING_SLACK = 4
"""Characters at the start of a partly decoded text that may differ from the whole: a space, or part of a character."""


class StopStrings:
    """Finds the token that completes a stop string. Text is decoded only at tokens that can complete one."""

    def __init__(self, strings: tuple[str, ...], tokenizer: Any, vocab_size: int):
        self.strings, self.tokenizer = strings, tokenizer
        self.longest = max(map(len, strings))
        self.may_complete = _may_complete(strings, tokenizer, vocab_size)
        """By token: 1 if its text can contain the last character of a stop string."""
        names = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        self.named = frozenset(token for name, token in names if name in strings)
        """Special tokens whose names are stop strings."""

    def end(self, tokens: list[int], start: int = 0) -> int:
        """Return the length up to the first token, from `start` on, that completes a stop string; 0: none does."""
        candidates = (k for k in range(start, len(tokens)) if self.may_complete[tokens[k]])
        return next((k + 1 for k in candidates if tokens[k] in self.named or self._completes(tokens[: k + 1])), 0)

    def _completes(self, tokens: list[int]) -> bool:
        """Return whether the last token completes a stop string. Decodes as few tokens as possible.

        Text decoded from the middle may begin with an incomplete character, and some tokenizers then decode all bytes
        that follow it wrongly.
        """
        width = self.longest + 2 * DECODING_SLACK
        while True:
            tail = tokens[-width:]
            before, text = self._decode(tail[:-1]), self._decode(tail)
            unchanged = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
            matches = any(text.find(s, max(0, unchanged - len(s) + 1)) >= 0 for s in self.strings)
            decoded = min(len(before.lstrip(INCOMPLETE_CHARACTER)), len(text.lstrip(INCOMPLETE_CHARACTER)))
            if len(tail) == len(tokens) or (decoded >= self.longest + DECODING_SLACK and not matches):
                return matches
            width = len(tokens) if matches else 2 * width

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def _may_complete(strings: tuple[str, ...], tokenizer: Any, vocab_size: int) -> bytes:
    if getattr(tokenizer, "clean_up_tokenization_spaces", False):  # a token may change the text before it
        return b"\1" * vocab_size
    last_characters = {s[-1] for s in strings}
    last_characters |= {INCOMPLETE_CHARACTER} if not all(map(str.isascii, last_characters)) else set()
    tokens, may_complete = _tokens_by_character(tokenizer, vocab_size), bytearray(vocab_size)
    names = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
    named = [token for name, token in names if name in strings and token < vocab_size]
    for token in itertools.chain(named, *(tokens.get(character, ()) for character in last_characters)):
        may_complete[token] = 1
    return bytes(may_complete)


@lru_cache(maxsize=2)
def _tokens_by_character(tokenizer: Any, vocab_size: int) -> dict[str, list[int]]:
    """Return the tokens whose text contains each character, without special tokens. All stop strings share the result.

    Each token is decoded twice in a row, because some tokenizers write a space between tokens but not before the first.
    """
    size, special = min(vocab_size, len(tokenizer)), set(tokenizer.all_special_ids)
    tokens: dict[str, list[int]] = {}
    for token, text in enumerate(tokenizer.batch_decode([[i, i] for i in range(size)], skip_special_tokens=True)):
        for character in set(text) if token not in special else ():
            tokens.setdefault(character, []).append(token)
    return tokens

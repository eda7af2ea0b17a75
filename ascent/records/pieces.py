"""The text of each token of a response, so that the pieces together are the response's own text.

A token need not be text: in a byte-level vocabulary it may be part of a character, and others lose the space before
them when they are decoded alone. A character goes to the token that completes it; a space to the word behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet one."""
LONGEST = 16
"""Tokens that may wait for the rest of a character."""


class Pieces:
    """Cuts responses into their tokens. What a token says alone is asked once, and remembered."""

    def __init__(self, task: Any):
        self.text = task.text
        self.alone: dict[int, str] = {}

    def __call__(self, ids: Sequence[int], whole: str) -> list[str]:
        """A piece of `whole` for each of these tokens; those that are left out of it have an empty one."""
        pieces = [self._alone(i) for i in ids]
        if "".join(pieces) == whole:
            return pieces
        if (words := _listed(pieces, whole)) is not None:
            return words
        if any(BROKEN in piece for piece in pieces):
            pieces = self._completed(ids, pieces)
        return _laid_on(pieces, whole) or pieces

    def _alone(self, token: int) -> str:
        found = self.alone.get(token)
        if found is None:
            found = self.alone[token] = self.text([token])
        return found

    def _completed(self, ids: Sequence[int], pieces: list[str]) -> list[str]:
        """Tokens that are parts of characters, decoded together with those behind them."""
        found: list[str] = []
        start, said = 0, ""
        for end, piece in enumerate(pieces, 1):
            if end == start + 1 and BROKEN not in piece:
                found.append(piece)
                start = end
                continue
            text = self.text(list(ids[start:end]))
            over = not text.endswith(BROKEN) or end == len(pieces) or end - start >= LONGEST
            sure = text if over else text.rstrip(BROKEN)
            found.append(sure[len(said) :])
            start, said = (end, "") if over else (start, max(said, sure, key=len))
        return found


def _listed(pieces: list[str], whole: str) -> list[str] | None:
    """[1 0 2] cut into [1, 0 and 2]: a list of the small worlds; None where it is none."""
    words = whole.split(" ")
    if len(words) != len(pieces) or any(w.strip("[]") != p.strip("[]") for w, p in zip(words, pieces, strict=True)):
        return None
    return [words[0], *(f" {word}" for word in words[1:])]


def _laid_on(pieces: list[str], whole: str) -> list[str] | None:
    """Pieces that differ from the text by spaces alone, with those of the text; None where more differs."""
    found, at = [], 0
    for piece in pieces:
        begin = at
        if not whole.startswith(piece, at):
            piece = piece.lstrip()
            while piece and begin < len(whole) and whole[begin].isspace():
                begin += 1
            if not whole.startswith(piece, begin):
                return None
        found.append(whole[at : begin + len(piece)])
        at = begin + len(piece)
    if found and not whole[at:].strip():
        found[-1] += whole[at:]
        at = len(whole)
    return found if at == len(whole) else None

"""The text of each token of a response, so that the pieces together are the response's own text.

A token need not be text. In a byte-level vocabulary it may be part of a character, and others lose the space before
them when they are decoded alone. A character goes to the token that completes it, a space to the word after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"
"""What a decoder writes for bytes that are not a character, or not yet one."""
LONGEST = 16
"""Maximum number of tokens that are decoded together for one character."""


class Pieces:
    """Cuts responses into the texts of their tokens. The text of a single token is decoded once and remembered."""

    def __init__(self, task: Any):
        self.text = task.text
        self.alone: dict[int, str] = {}

    def __call__(self, ids: Sequence[int], whole: str) -> list[str]:
        """A piece of `whole` for each of these tokens; it is empty for tokens that `whole` leaves out."""
        for token in ids:
            if token not in self.alone:
                self.alone[token] = self.text([token])
        pieces = [self.alone[token] for token in ids]
        if "".join(pieces) == whole:
            return pieces
        if (words := _listed(pieces, whole)) is not None:
            return words
        if any(BROKEN in piece for piece in pieces):
            pieces = self._completed(ids, pieces)
        return _with_spaces(pieces, whole) or pieces

    def _completed(self, ids: Sequence[int], pieces: list[str]) -> list[str]:
        """Tokens that are parts of characters, decoded together with those after them."""
        completed: list[str] = []
        start, before = 0, ""
        for end, piece in enumerate(pieces, 1):
            if end == start + 1 and BROKEN not in piece:
                completed.append(piece)
                start = end
                continue
            text = self.text(list(ids[start:end]))
            over = not text.endswith(BROKEN) or end == len(pieces) or end - start >= LONGEST
            sure = text if over else text.rstrip(BROKEN)
            completed.append(sure[len(before) :])
            start, before = (end, "") if over else (start, max(before, sure, key=len))
        return completed


def _listed(pieces: list[str], whole: str) -> list[str] | None:
    """[1 0 2] cut into [1, 0 and 2]: a list of a small task; None if the text is not one."""
    words = whole.split(" ")
    if len(words) != len(pieces) or any(w.strip("[]") != p.strip("[]") for w, p in zip(words, pieces, strict=True)):
        return None
    return [words[0], *(f" {word}" for word in words[1:])]


def _with_spaces(pieces: list[str], whole: str) -> list[str] | None:
    """The pieces with the spaces of the text; None if they differ by more than spaces."""
    spaced, at = [], 0
    for piece in pieces:
        begin = at
        if not whole.startswith(piece, at):
            piece = piece.lstrip()
            while piece and begin < len(whole) and whole[begin].isspace():
                begin += 1
            if not whole.startswith(piece, begin):
                return None
        spaced.append(whole[at : begin + len(piece)])
        at = begin + len(piece)
    if spaced and not whole[at:].strip():
        spaced[-1] += whole[at:]
        at = len(whole)
    return spaced if at == len(whole) else None

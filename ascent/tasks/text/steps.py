"""The steps of a response in words, and where they end among its tokens."""

from __future__ import annotations

from typing import NamedTuple


class TextStep(NamedTuple):
    """A step of a response: its words, and the place of its last token."""

    words: str
    last: int


def split_steps(pieces: list[str], separator: str) -> list[TextStep]:
    """A response, given its tokens as words, cut after every separator; empty steps go to the one beside them.

    The last step ends with the last token, whatever that is. A response without any words is one empty step.
    """
    text, ends = "", []
    for piece in pieces:
        text += piece
        ends.append(len(text))
    steps: list[TextStep] = []
    start = 0
    while start < len(text):
        at = text.find(separator, start)
        stop = len(text) if at < 0 else at + len(separator)
        words = text[start : len(text) if at < 0 else at]
        last = next(i for i, end in enumerate(ends) if end >= stop)
        if words:
            steps.append(TextStep(words, last))
        elif steps:
            steps[-1] = TextStep(steps[-1].words, last)
        start = stop
    if not steps:
        return [TextStep("", len(pieces) - 1)] if pieces else []
    return [*steps[:-1], TextStep(steps[-1].words, len(pieces) - 1)]

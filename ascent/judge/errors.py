"""What can come of a question to a judge instead of a verdict. None of it is ever a number."""

from __future__ import annotations


class JudgeError(Exception):
    """There is no verdict on this question."""


class Unanswered(JudgeError):
    """No answer came: the address was unreachable, busy or broken for as long as it was tried."""


class Unparsed(JudgeError):
    """An answer came, and no verdict can be read from it. The answer is kept as it was."""

    def __init__(self, why: str, raw: str):
        super().__init__(f"{why}. The answer: {_shown(raw)}")
        self.why, self.raw = why, raw


def _shown(raw: str, length: int = 160) -> str:
    """The end of an answer on one line: the verdict should have stood there."""
    words = " ".join(raw.split())
    return repr(words if len(words) <= length else f"…{words[-length:]}")

"""A language model as a judge, behind an OpenAI-compatible address: of one response, or of two."""

from ascent.judge.ask import Asker, Counts
from ascent.judge.errors import JudgeError, Unanswered, Unparsed
from ascent.judge.settings import Judge, read_judge
from ascent.judge.verdicts import Preference, Scored, compare, score

__all__ = [
    "Asker",
    "Counts",
    "Judge",
    "JudgeError",
    "Preference",
    "Scored",
    "Unanswered",
    "Unparsed",
    "compare",
    "read_judge",
    "score",
]

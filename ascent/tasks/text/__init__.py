"""Language worlds. Grading needs no torch; `Tokenized`, which does, is imported from its own module."""

from ascent.tasks.text.base import Graded, Problem, Text
from ascent.tasks.text.countdown import Countdown
from ascent.tasks.text.dataset import Dataset
from ascent.tasks.text.demonstrations import Demonstrations
from ascent.tasks.text.gsm8k import Gsm8k
from ascent.tasks.text.jsonl import Jsonl
from ascent.tasks.text.preferences import Preferences
from ascent.tasks.text.reasoning_gym import ReasoningGym
from ascent.tasks.text.steps import Steps

__all__ = [
    "Countdown",
    "Dataset",
    "Demonstrations",
    "Graded",
    "Gsm8k",
    "Jsonl",
    "Preferences",
    "Problem",
    "ReasoningGym",
    "Steps",
    "Text",
]

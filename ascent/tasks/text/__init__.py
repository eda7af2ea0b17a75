"""Text tasks. Grading needs no torch; `TokenizedTask`, which does, is imported from its own module."""

from ascent.tasks.text.base import TextTask
from ascent.tasks.text.countdown import Countdown
from ascent.tasks.text.dataset import Dataset
from ascent.tasks.text.gsm8k import Gsm8k
from ascent.tasks.text.offline.files import Demonstrations, Preferences, Steps
from ascent.tasks.text.problems import Graded, Problem
from ascent.tasks.text.reasoning_gym import ReasoningGym
from ascent.tasks.text.rows import Jsonl

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
    "TextTask",
]

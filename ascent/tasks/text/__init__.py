"""Text tasks. Grading needs no torch; `TokenizedTask`, which does, is imported from its own module."""

from ascent.tasks.text.base import Graded, Problem, TextTask

__all__ = ["Graded", "Problem", "TextTask"]

"""Text tasks. Grading needs no torch; `TokenizedTask`, which does, is imported from its own module."""

from ascent.tasks.text.text_task import Graded, Problem, TextTask

__all__ = ["Graded", "Problem", "TextTask"]

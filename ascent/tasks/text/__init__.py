"""Text tasks: prompts and answer checking, without torch."""

from ascent.tasks.text.text_task import Graded, Problem, TextTask

__all__ = ["Graded", "Problem", "TextTask"]

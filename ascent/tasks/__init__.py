"""Worlds: prompts and verifiable rewards, one file each."""

from ascent.tasks.base import Task
from ascent.tasks.lecture import Lecture
from ascent.tasks.sort import Sort

TASKS = (Lecture, Sort)

__all__ = ["TASKS", "Lecture", "Sort", "Task"]

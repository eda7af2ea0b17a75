"""Ascent trains language models with policy gradients: every method a choice on one menu.

run = ascent.train("sort", algorithm="grpo", seed=0)
"""

from ascent.api import load, resume, train  # `ascent.train` is this function; the loop is in the module of that name
from ascent.records import Run
from ascent.types import Refused, Trouble

__version__ = "0.1.0"
__all__ = ["Refused", "Run", "Trouble", "load", "resume", "train"]

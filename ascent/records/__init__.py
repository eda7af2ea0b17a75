"""The run folder: what a run writes down, so that other tools can read it and a kill loses nothing."""

from ascent.records.folder import RunFolder
from ascent.records.run import Run
from ascent.records.writer import Writer

__all__ = ["Run", "RunFolder", "Writer"]

"""Small policies in one process: the reference that every other engine has to reproduce."""

from ascent.engines.small.engine import SmallLearner, SmallSampler

__all__ = ["SmallLearner", "SmallSampler"]

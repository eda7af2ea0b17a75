"""Small policies in one process: the reference that every other engine has to reproduce."""

from ascent.engines.small.learner import SmallLearner
from ascent.engines.small.sampler import SmallSampler

__all__ = ["SmallLearner", "SmallSampler"]

"""Engines: how rollouts are made and steps are taken. One process is the reference."""

from ascent.engines.base import Learner, Sampler, Stepped
from ascent.engines.local import LocalLearner, LocalSampler

__all__ = ["Learner", "LocalLearner", "LocalSampler", "Sampler", "Stepped"]

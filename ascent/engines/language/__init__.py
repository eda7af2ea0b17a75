"""Engines for language models in one process, on a CPU or one GPU."""

from ascent.engines.language.learning.critic import LanguageCritic
from ascent.engines.language.learning.learner import LanguageLearner
from ascent.engines.language.learning.parameters import load_params
from ascent.engines.language.learning.reward_model import LanguageRewardModelLearner, add_head
from ascent.engines.language.proof import prove
from ascent.engines.language.sampling.draw import Support
from ascent.engines.language.sampling.sampler import LanguageSampler

__all__ = [
    "LanguageCritic",
    "LanguageLearner",
    "LanguageRewardModelLearner",
    "LanguageSampler",
    "Support",
    "add_head",
    "load_params",
    "prove",
]

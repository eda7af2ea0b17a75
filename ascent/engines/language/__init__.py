"""Engines for language models in one process, on a CPU or one GPU."""

from ascent.engines.language.critic import LanguageCritic
from ascent.engines.language.demonstrator import Demonstrator, held_out_logp
from ascent.engines.language.draw import Support
from ascent.engines.language.learner import LanguageLearner
from ascent.engines.language.parameters import load_params
from ascent.engines.language.proof import prove
from ascent.engines.language.rater import LanguageRater, add_head
from ascent.engines.language.sampler import LanguageSampler

__all__ = [
    "Demonstrator",
    "LanguageCritic",
    "LanguageLearner",
    "LanguageRater",
    "LanguageSampler",
    "Support",
    "add_head",
    "held_out_logp",
    "load_params",
    "prove",
]

"""Ascent trains language models with policy gradients. Every method is one choice per axis of a single menu.

run = ascent.train("sort", algorithm="grpo", seed=0)

This module is the public interface: what starts and reads runs, and the base classes for choices and tasks of your own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ascent.api import load, resume, train
    from ascent.core.advantages import Advantage
    from ascent.core.algorithms import ALGORITHMS, Algorithm
    from ascent.core.config import Config
    from ascent.core.correction import Correction
    from ascent.core.critics import Critic
    from ascent.core.exploration import Exploration
    from ascent.core.groups import Groups, Shaping
    from ascent.core.kl import KL
    from ascent.core.losses import Loss
    from ascent.core.protocols import Task
    from ascent.core.reference import Reference
    from ascent.core.types import Batch, Prompts, Refused, Rollouts, Scores, Space, Trouble
    from ascent.core.update import Update
    from ascent.core.weights import Weights
    from ascent.policies.small import Policy
    from ascent.records.code import trust
    from ascent.records.run import Run
    from ascent.tasks.base import SmallTask
    from ascent.tasks.text.base import Graded, Problem, TextTask
    from ascent.workflows.evaluate import evaluate
    from ascent.workflows.labels import make_pairs
    from ascent.workflows.policy import export, sample

__version__ = "0.1.0"
_MODULES = {
    "api": "train resume load",
    "records.run": "Run",
    "records.code": "trust",
    "workflows.evaluate": "evaluate",
    "workflows.labels": "make_pairs",
    "workflows.policy": "export sample",
    "tasks.base": "SmallTask",
    "tasks.text.base": "TextTask Problem Graded",
    "policies.small": "Policy",
    "core.types": "Refused Trouble Batch Prompts Rollouts Scores Space",
    "core.protocols": "Task",
    "core.config": "Config",
    "core.algorithms": "Algorithm ALGORITHMS",
    "core.advantages": "Advantage",
    "core.losses": "Loss",
    "core.weights": "Weights",
    "core.kl": "KL",
    "core.reference": "Reference",
    "core.exploration": "Exploration",
    "core.correction": "Correction",
    "core.groups": "Groups Shaping",
    "core.critics": "Critic",
    "core.update": "Update",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name on first use. A process that only grades responses never imports torch."""
    if name in _HOME:
        return getattr(import_module(f"ascent.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

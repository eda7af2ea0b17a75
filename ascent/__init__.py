"""Ascent trains language models with policy gradients.

run = ascent.train("sort", algorithm="grpo", seed=0)

This module is the public interface: functions that start and read runs, the choices of which an algorithm consists
(one per axis: advantage, loss, KL, …), and the base classes of custom choices and tasks.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ascent.api import load, resume, steps, train
    from ascent.build.trained_run import Run
    from ascent.core.advantages import (
        Advantage,
        BatchNormalized,
        BestOnly,
        ByTurn,
        Centered,
        Greedy,
        LeaveOneOut,
        Normalized,
        OptimalBaseline,
        Raw,
        RunningMean,
    )
    from ascent.core.algorithms import ALGORITHMS, Algorithm
    from ascent.core.config import Config
    from ascent.core.correction import Correction, Masked, NoCorrection, Truncated
    from ascent.core.critics import Critic, NoCritic, OwnCritic, SharedCritic
    from ascent.core.errors import ConfigError, RunError
    from ascent.core.exploration import Annealed, Constant, Exploration, NoBonus
    from ascent.core.groups import All, Groups, NoShaping, Overlong, Shaping, WithSignal
    from ascent.core.kl import KL, InLoss, InReward, NoKL
    from ascent.core.losses import Cispo, Clipped, LogProb, Loss, Ratio, SequenceRatio
    from ascent.core.preferences import BradleyTerry, Dpo, Likelihood, StepValue
    from ascent.core.protocols import Task
    from ascent.core.reference import Every, Frozen, MovingAverage, NoReference, Reference
    from ascent.core.types import Batch, Prompts, Rollouts, Scores, Space
    from ascent.core.update import Adam, TrustRegion, Update
    from ascent.core.values import GAE, TD, KStep, MonteCarlo, VTrace
    from ascent.core.weights import FixedLength, SequenceMean, SequenceSum, TokenMean, Weights
    from ascent.models.causal_lm import CausalLM
    from ascent.models.small_policies import PerPosition, Policy, Transformer
    from ascent.processes.reward_calls import Reward, batch
    from ascent.runs.run_reader import trust
    from ascent.tasks.base import SmallTask
    from ascent.tasks.environment import Environment, Step
    from ascent.tasks.small.lecture import Lecture
    from ascent.tasks.small.multi_turn import Guess, Swaps
    from ascent.tasks.small.sorting import Sort
    from ascent.tasks.text.countdown import Countdown
    from ascent.tasks.text.gsm8k import Gsm8k
    from ascent.tasks.text.reasoning_gym import ReasoningGym
    from ascent.tasks.text.table_tasks import Jsonl
    from ascent.tasks.text.text_task import Graded, Problem, TextTask
    from ascent.workflows.evaluate import evaluate
    from ascent.workflows.labels import make_pairs
    from ascent.workflows.loaded_policy import export, sample

if sys.platform == "win32":
    raise ImportError(
        "Ascent runs on Linux and macOS: it locks files and limits processes in ways that Windows does not have. On "
        "Windows, install it in WSL (wsl --install), which is Linux"
    )
__version__ = "0.1.0"
_MODULES = {
    "api": "train resume load steps",
    "build.trained_run": "Run",
    "runs.run_reader": "trust",
    "workflows.evaluate": "evaluate",
    "workflows.labels": "make_pairs",
    "workflows.loaded_policy": "export sample",
    "tasks.base": "SmallTask",
    "tasks.environment": "Environment Step",
    "tasks.text.text_task": "TextTask Problem Graded",
    "processes.reward_calls": "Reward batch",
    "models.small_policies": "Policy PerPosition Transformer",
    "core.errors": "ConfigError RunError",
    "core.types": "Batch Prompts Rollouts Scores Space",
    "core.protocols": "Task",
    "core.config": "Config",
    "core.algorithms": "Algorithm ALGORITHMS",
    "core.advantages": "Advantage Raw Centered LeaveOneOut Normalized BestOnly RunningMean Greedy OptimalBaseline "
    "BatchNormalized ByTurn",
    "core.losses": "Loss LogProb Ratio Clipped SequenceRatio Cispo",
    "core.weights": "Weights TokenMean SequenceMean SequenceSum FixedLength",
    "core.kl": "KL NoKL InLoss InReward",
    "core.reference": "Reference NoReference Frozen Every MovingAverage",
    "core.exploration": "Exploration NoBonus Constant Annealed",
    "core.correction": "Correction NoCorrection Truncated Masked",
    "core.groups": "Groups Shaping All WithSignal NoShaping Overlong",
    "core.critics": "Critic NoCritic OwnCritic SharedCritic",
    "core.update": "Update Adam TrustRegion",
    "core.values": "TD KStep GAE MonteCarlo VTrace",
    "core.preferences": "Likelihood Dpo BradleyTerry StepValue",
    "models.causal_lm": "CausalLM",
    "tasks.small.lecture": "Lecture",
    "tasks.small.sorting": "Sort",
    "tasks.small.multi_turn": "Guess Swaps",
    "tasks.text.countdown": "Countdown",
    "tasks.text.gsm8k": "Gsm8k",
    "tasks.text.reasoning_gym": "ReasoningGym",
    "tasks.text.table_tasks": "Jsonl",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that reward workers do not import torch."""
    if name in _HOME:
        return getattr(import_module(f"ascent.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

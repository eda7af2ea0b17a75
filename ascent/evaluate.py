"""Evaluation on held-out prompts: greedy answers, the exact expectation where it can be enumerated, and pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.config import Config
from ascent.diagnose.calibration import calibration
from ascent.diagnose.exact import every_response, probability, reward_table
from ascent.engines.base import Sampler
from ascent.policies import Policy
from ascent.preferences import PairLoss, margin_of
from ascent.tasks import Task
from ascent.train import scored
from ascent.types import Batch, Metrics, Outputs, Rollouts, Terms, to_batch

Keep = Callable[[Task, Batch], None]
"""Where the scored answers of an evaluation go, with the task that scored them."""
ENUMERABLE = 5_000
"""Prompts × responses up to which E[R] is enumerated at every evaluation."""


def evaluator(
    config: Config, task: Task, sampler: Sampler, policy: Policy | None, keep: Keep | None = None
) -> Callable[[], Metrics]:
    """What the loop calls: held-out accuracy and reward of greedy answers, and E[R] if the policy is small."""
    prompt = task.held_out(config.eval_prompts)
    small = policy is not None and len(prompt) * task.space.vocab**task.space.limit <= ENUMERABLE
    table = reward_table(task, prompt) if small else None
    every = every_response(task.space, prompt, config.temperature) if small else None

    def evaluate() -> Metrics:
        answers, errors = scored(task, sampler.generate(prompt, 1, greedy=True), None)
        if keep is not None:
            keep(task, answers.add(errors=tuple(errors)))
        metrics: Metrics = {"eval/reward_errors": len(errors)} if errors else {}
        if bool(answers.valid.any()):
            assert answers.correct is not None
            metrics["eval/accuracy"] = answers.correct[answers.valid].double().mean().item()
            metrics["eval/reward"] = answers.reward.sum(-1)[answers.valid].double().mean().item()
            if answers.measures is not None:
                means = answers.measures[answers.valid].double().mean(0).tolist()
                metrics |= {f"eval/{name}": mean for name, mean in zip(answers.measured, means, strict=True)}
        if table is not None and every is not None and policy is not None:
            with torch.no_grad():
                metrics["exact/reward"] = (probability(policy, every) * table).sum().item() / len(prompt)
        return metrics

    return evaluate


def margins(learner: Any, loss: PairLoss, pairs: Rollouts) -> Float[Tensor, "pair"]:
    """How much higher each pair's chosen response is rated, by a reward model or by a policy's log-ratios."""
    shape, found = pairs.mask.shape[:2], []
    batch = to_batch(pairs, reward=torch.ones(*shape, 1), valid=torch.ones(shape, dtype=torch.bool))
    batch = batch.add(**learner.score(batch, frozenset({"logp_ref"})))

    def collect(micro: Batch, out: Outputs) -> Terms:
        found.append(margin_of(loss.rating(micro, out)).flatten())
        return Terms(torch.zeros(()), {})

    learner.total(batch, collect)
    return torch.cat(found).double().cpu()


def pair_evaluator(learner: Any, loss: PairLoss, pairs: Rollouts) -> Callable[[], Metrics]:
    """Accuracy, log-loss and calibration on held-out pairs."""
    return lambda: calibration(margins(learner, loss, pairs)).metrics()

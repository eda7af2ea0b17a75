"""Evaluation on held-out prompts, for each kind of data that a run learns from.

samples          accuracy and reward of greedy answers, and E[R] where all responses can be enumerated
demonstrations   the mean log-prob of a token
pairs            accuracy, log-loss and calibration
steps            the mean squared error, and how much of the labels' variance is explained
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.core.config import Config
from ascent.core.loop import scored
from ascent.core.preferences import SHOWN, PairLoss, margin_of
from ascent.core.protocols import Learner, Sampler, Task
from ascent.core.types import Batch, Metrics, Outputs, Rollouts, Terms, to_batch
from ascent.oracle.exact import expected_reward, reward_table
from ascent.records.calibration import calibration

Evaluate = Callable[[], Metrics]
Keep = Callable[[Task, Batch], None]
"""Where the scored answers of an evaluation go, with the task that scored them."""
ENUMERABLE = 5_000
"""Prompts × responses up to which E[R] is enumerated at every evaluation."""


def sample_evaluator(
    config: Config, task: Task, sampler: Sampler, policy: Any = None, keep: Keep | None = None
) -> Evaluate:
    """Accuracy and reward of greedy answers to held-out prompts.

    With a `policy` that gives the probability of any response, E[R] too, if there are few enough to enumerate.
    """
    prompts = task.held_out(config.eval_prompts)
    few = policy is not None and len(prompts) * task.space.vocab**task.space.limit <= ENUMERABLE
    table = reward_table(task, prompts.prompt) if few else None

    def evaluate() -> Metrics:
        answers, errors = scored(task, sampler.generate(prompts, 1, greedy=True))
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
        if table is not None:
            metrics["exact/reward"] = expected_reward(policy, prompts.prompt, table, config.temperature)
        return metrics

    return evaluate


def offline_batch(rollouts: Rollouts, label: Tensor | None = None) -> Batch:
    """Offline data as a batch. A response without a label earns 1."""
    shape = rollouts.mask.shape[:2]
    reward = torch.ones(*shape, 1) if label is None else label
    return to_batch(rollouts, reward=reward, valid=torch.ones(shape, dtype=torch.bool))


def offline_evaluator(config: Config, learner: Learner, task: Task, sampler: Sampler) -> Evaluate:
    """The evaluator of the data that the run learns from, on what its task holds out."""
    rollouts = sampler.generate(task.held_out(config.eval_prompts), SHOWN[config.data])
    if config.data == "demonstrations":
        return demonstration_evaluator(learner, rollouts)
    if config.data == "pairs":
        return pair_evaluator(learner, config.algorithm.loss, rollouts)  # type: ignore[arg-type]
    return step_evaluator(learner, rollouts, task.score(rollouts).reward)


def demonstration_evaluator(learner: Learner, rollouts: Rollouts) -> Evaluate:
    """The mean log-prob of a token of held-out demonstrations: what SFT maximises, where it was not trained."""
    batch = offline_batch(rollouts)

    def evaluate() -> Metrics:
        logp = learner.score(batch, frozenset({"logp_old"}))["logp_old"]
        return {"eval/logp": logp[batch.mask].double().mean().item()}

    return evaluate


def pair_evaluator(learner: Learner, loss: PairLoss, pairs: Rollouts) -> Evaluate:
    """Accuracy, log-loss and calibration on held-out pairs."""
    return lambda: calibration(pair_margins(learner, loss, pairs)).metrics()


def pair_margins(learner: Learner, loss: PairLoss, pairs: Rollouts) -> Float[Tensor, "pair"]:
    """How much higher each pair's chosen response is rated, by a reward model or by a policy's log-ratios."""
    batch = offline_batch(pairs)
    batch = batch.add(**learner.score(batch, frozenset({"logp_ref"})))
    parts = each_part(learner, batch, lambda micro, out: margin_of(loss.rating(micro, out)).flatten())
    return torch.cat(parts).double().cpu()


def step_evaluator(learner: Learner, rollouts: Rollouts, label: Tensor) -> Evaluate:
    """The mean squared error on held-out steps, and how much of the labels' variance the scores explain."""
    batch = offline_batch(rollouts, label)

    def error_of(micro: Batch, out: Outputs) -> Tensor:
        assert out.rating is not None
        return (out.rating - micro.reward).cpu()[micro.mask.cpu()]

    def evaluate() -> Metrics:
        error = torch.cat(each_part(learner, batch, error_of)).double().square().mean()
        spread = label[rollouts.mask].double().var(correction=0)
        metrics = {"eval/steps/error": float(error)}
        return metrics | ({"eval/steps/explained": float(1 - error / spread)} if spread > 0 else {})

    return evaluate


def each_part(learner: Learner, batch: Batch, read: Callable[[Batch, Outputs], Tensor]) -> list[Tensor]:
    """What `read` makes of each micro-batch and of the learner's outputs for it. No parameter moves."""
    parts: list[Tensor] = []

    def collect(micro: Batch, out: Outputs) -> Terms:
        parts.append(read(micro, out))
        return Terms(torch.zeros(()), {})

    learner.total(batch, collect)
    return parts
